"""Drafts by the model's own head (MTP): fewer steps, the same answers, and the right states and slots."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cairn.engine.fake import STATE, _Truth, fake_spec
from cairn.scheduler.drafts import mtp_head
from cairn.scheduler.drafts.combined import CombinedDrafter
from cairn.scheduler.drafts.mtp_head import READ, MtpHead
from cairn.scheduler.drafts.policy import MeasuredPolicy
from cairn.types.request import Request, SamplingExtras, SamplingParams
from tests.laws.fake_head import FakeHead, WatchedEngine
from tests.scheduler.test_scheduler import VOCAB, Rig


class Site:
    """A rig whose engine has a head that is right about every greedy answer."""

    def __init__(
        self,
        *,
        fixed: int = 3,
        blocks: int = 400,
        most: int = 64,
        windows: tuple[int, ...] = (0,),
        context: int = 200,
        pool: int = 200,
        **limits: Any,
    ) -> None:
        engine = WatchedEngine(fake_spec(VOCAB, context, windows), blocks=pool, block_tokens=4)
        self.fake = FakeHead(engine, blocks, most)
        self.head = MtpHead(self.fake)  # type: ignore[arg-type]
        self.policy = MeasuredPolicy(fixed, model=self.head)
        self.rig = Rig(drafts=self.policy, windows=windows, context=context, blocks=pool, **limits)
        self.rig.engine = engine

    def answers(self, requests: list[Request]) -> dict[int, Any]:
        for request in requests:
            self.rig.scheduler.add(request)
        self.rig.run()
        assert self.rig.nothing_held() and not self.head.broken
        assert self.head.free == self.head.blocks and not self.head.waiting, "something of the head is left"
        return {request.id: (self.rig.tokens(request.id), self.rig.finish(request.id)) for request in requests}


def asked(id: int, chance: random.Random, length: int = 0, **sampling: Any) -> Request:
    prompt = tuple(chance.choices(range(VOCAB), k=length or chance.randrange(1, 40)))
    options = {"max_tokens": 40, "temperature": 0.0} | sampling
    return Request(id=id, prompt=prompt, sampling=SamplingParams(**options), salt=chance.choice((b"a", b"b")))


def plain(requests: list[Request], **limits: Any) -> tuple[dict[int, Any], Rig]:
    rig = Rig(**limits)
    for request in requests:
        rig.scheduler.add(request)
    rig.run()
    return {request.id: (rig.tokens(request.id), rig.finish(request.id)) for request in requests}, rig


def test_a_head_that_is_right_saves_most_steps() -> None:
    requests = [asked(1, random.Random(1))]
    expected, one_by_one = plain(requests)
    site = Site()
    assert site.answers(requests) == expected
    assert len(site.rig.plans) <= len(one_by_one.plans) / 3
    stats = site.rig.scheduler.stats()
    assert stats.accepted >= 25 and stats.rejected <= 3


@pytest.mark.parametrize("windows", [(0,), (0, 7), (0, STATE)])
@pytest.mark.parametrize("seed", range(8))
def test_guesses_change_nothing(seed: int, windows: tuple[int, ...]) -> None:
    """In a batch, sampled or greedy, preempted or not, with a head that reads in pieces and has few blocks."""
    chance = random.Random(seed)
    requests = [
        asked(id, chance, temperature=chance.choice((0.0, 0.8)), seed=id, repetition_penalty=chance.choice((1.0, 1.3)))
        for id in range(1, 7)
    ]
    expected, _ = plain(requests, windows=windows)
    for fixed, blocks, most, pool in ((0, 400, 64, 200), (4, 400, 5, 200), (7, 12, 64, 200), (7, 400, 64, 40)):
        site = Site(fixed=fixed, blocks=blocks, most=most, windows=windows, pool=pool)
        assert site.answers(requests) == expected
        if fixed:
            assert site.rig.scheduler.stats().accepted > 0


def test_the_head_reads_the_end_of_a_long_prompt_in_pieces() -> None:
    context = 3 * READ
    site = Site(context=context, pool=2 * READ, blocks=READ, most=100, step_tokens=256)
    request = asked(1, random.Random(2), length=2 * READ)
    assert site.answers([request]) == plain([request], context=context, blocks=2 * READ, step_tokens=256)[0]
    rows = [row for plan in site.rig.plans for row in plan.rows if row.states_from is not None]
    assert rows[0].states_from == READ and rows[0].start <= READ
    longest = max(len(slot) for slot in site.fake.slots.values())
    assert longest > 2 * READ, "it has read up to the answer"
    assert site.rig.scheduler.stats().accepted > 20


def test_behind_a_cached_prefix_the_heads_context_begins_later() -> None:
    site = Site()
    first = asked(1, random.Random(3), length=60)
    site.answers([first])
    again = Request(id=2, prompt=(*first.prompt, 5), sampling=first.sampling, salt=first.salt)
    expected, _ = plain([again])
    before = site.rig.scheduler.stats().accepted
    assert site.answers([again]) == expected
    rows = [row for plan in site.rig.plans for row in plan.rows]
    assert any(row.start >= 56 and row.states_from == row.start for row in rows), "nothing was cached"
    assert site.rig.scheduler.stats().accepted - before > 20


def test_slots_computed_from_the_heads_own_states_are_overwritten() -> None:
    """After each step it reads the sampled tokens with the model's states, and nothing else twice."""
    site = Site(fixed=5)
    request = asked(1, random.Random(4), temperature=0.9, seed=4)
    assert site.answers([request]) == plain([request])[0]
    assert site.rig.scheduler.stats().rejected > 10


def guesses_of(head: MtpHead, tokens: list[int]) -> Any:
    guesses = head.open(b"a", tokens)
    assert guesses is not None
    return guesses


def test_states_that_are_missing_begin_a_new_context_and_known_ones_are_passed_over() -> None:
    site = Site()
    engine, tokens = site.rig.engine, random.Random(5).choices(range(VOCAB), k=30)

    def states(first: int, end: int) -> bytes:
        states = b""
        for place in range(first, end):
            word = _Truth(engine).state(tokens[: place + 1]).to_bytes(8, "little")
            site.fake.model.prefixes[word] = tuple(tokens[: place + 1])
            states += word
        return states

    guesses = guesses_of(site.head, tokens[:20])
    guesses.take_states(0, states(0, 12), 12)
    guesses.take_states(4, states(4, 19), 15)
    assert len(guesses.propose(3)) == 3 and guesses.read == 19
    guesses.extend(tokens[20:])
    guesses.take_states(25, states(25, 29), 4)
    assert guesses.run == tokens[26:] and guesses.read == 0
    assert len(guesses.propose(2)) == 2 and not site.head.broken
    guesses.extend([3])
    assert not guesses.propose(2), "the state before the last token is not there"
    guesses.close()
    assert site.head.free == site.head.blocks


def test_waiting_states_have_a_bound_for_one_sequence_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site()
    one, other = guesses_of(site.head, [1] * 9), guesses_of(site.head, [2] * 9)
    one.take_states(0, bytes(8 * 100), 100)
    assert one.waiting == 100 and site.head.waiting == 800
    one.take_states(100, bytes(8 * mtp_head.MOST_WAITING), mtp_head.MOST_WAITING)
    assert one.waiting == 0 == site.head.waiting
    monkeypatch.setattr(mtp_head, "STATE_BYTES", 1000)
    one.take_states(2000, bytes(8 * 100), 100)
    other.take_states(0, bytes(8 * 100), 100)
    assert (one.waiting, other.waiting, site.head.waiting) == (100, 0, 800)


def test_a_head_that_fails_ends_its_guesses_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    requests = [asked(id, random.Random(id)) for id in range(1, 4)]
    expected, _ = plain(requests)
    site, calls = Site(), iter(range(1000))
    step = site.fake.step

    def failing(row: Any) -> Any:
        if next(calls) == 5:
            raise RuntimeError("injected")
        return step(row)

    site.fake.step = failing  # type: ignore[method-assign]
    for request in requests:
        site.rig.scheduler.add(request)
    site.rig.run()
    assert {request.id: (site.rig.tokens(request.id), site.rig.finish(request.id)) for request in requests} == expected
    assert site.head.broken and caplog.text.count("the head for further tokens failed") == 1
    assert site.head.free == site.head.blocks


def test_drafting_time_counts_against_the_guesses() -> None:
    """A head whose guess takes as long as a step is not asked."""
    for seconds, asks in ((0.0001, True), (0.01, False)):
        site = Site(fixed=0)
        for _ in range(50):
            for tokens in (1, 2, 4, 8):
                site.policy.step_took(1, tokens, 0.01 * (1 + 0.02 * tokens))
        drafter = site.policy.open(asked(1, random.Random(6)), [*range(20)])
        assert isinstance(drafter, CombinedDrafter)
        drafter.take_states(0, bytes(8 * 19), 19)
        site.head.seconds = seconds
        assert bool(site.policy.width(drafter, 1)) == asks


def test_a_sequence_starts_with_what_the_head_was_worth_in_others() -> None:
    site = Site()
    for _ in range(20):
        one = guesses_of(site.head, [1] * 9)
        one._guesses = [3, 4]
        one.extend([5])
    fresh = guesses_of(site.head, [1] * 9)
    fresh.take_states(0, bytes(8 * 8), 8)
    assert fresh.chances(1)[0] < 0.2
    for _ in range(100):
        fresh.extend([5] * 10)
    assert fresh.chances(1)[0] > 0.5, "it is tried again after a while"


def test_the_head_is_not_asked_while_a_step_runs() -> None:
    """It needs that step's states, so no step is planned ahead, and it is not asked meanwhile."""
    site = Site()
    site.rig.scheduler.add(asked(1, random.Random(7), length=9))
    for _ in range(3):
        site.rig.step()
    site.policy.width = lambda drafter, rows: 0  # type: ignore[method-assign]
    plan = site.rig.plan()
    site.policy.width = lambda drafter, rows: len(drafter.chances(3))  # type: ignore[method-assign, attr-defined]
    before = dict(site.fake.slots)
    assert site.rig.scheduler.follow(plan) is None
    assert site.fake.slots == before
    site.rig.commit(plan, plan.run(site.rig.engine))


@pytest.mark.parametrize("options", [{"max_tokens": 3}, {"max_tokens": 40, "mirostat": True}])
def test_requests_that_do_not_speculate_have_no_states(options: dict[str, Any]) -> None:
    extras = SamplingExtras(mirostat=2) if options.pop("mirostat", False) else None
    site = Site()
    site.answers([asked(1, random.Random(8), **options, extras=extras)])
    assert all(row.states_from is None for plan in site.rig.plans for row in plan.rows)
