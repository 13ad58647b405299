"""Drafts by a small model: fewer steps, the same answers, and nothing left behind or shared between tenants."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cairn.engine.fake import FakeEngine, fake_spec
from cairn.scheduler.drafts.combined import CombinedDrafter
from cairn.scheduler.drafts.draft_model import PIECE, DraftModel
from cairn.scheduler.drafts.policy import MeasuredPolicy
from cairn.scheduler.drafts.suffix import SuffixDrafter
from cairn.types.errors import DeviceMemoryError
from cairn.types.request import Request, SamplingParams
from tests.scheduler.test_scheduler import VOCAB, Rig


def guesser(
    *, blocks: int = 200, windows: tuple[int, ...] = (0,), context: int = 200, max_tokens: int = 64
) -> DraftModel:
    """Return the very model that the rig serves as a draft model: all its guesses of a greedy answer are right."""
    spec = fake_spec(VOCAB, context, windows)
    return DraftModel(FakeEngine(spec, blocks=blocks, block_tokens=4, max_rows=1, max_tokens=max_tokens))


def asked(id: int, chance: random.Random, **sampling: Any) -> Request:
    prompt = tuple(chance.choices(range(VOCAB), k=chance.randrange(1, 40)))
    options = {"max_tokens": 40, "temperature": 0.0} | sampling
    return Request(id=id, prompt=prompt, sampling=SamplingParams(**options), salt=chance.choice((b"a", b"b")))


def answers(requests: list[Request], policy: MeasuredPolicy | None, **limits: Any) -> tuple[dict[int, Any], Rig]:
    rig = Rig(drafts=policy, **limits)
    for request in requests:
        rig.scheduler.add(request)
    rig.run()
    assert rig.nothing_held()
    return {request.id: (rig.tokens(request.id), rig.finish(request.id)) for request in requests}, rig


def test_a_model_that_knows_the_answer_saves_most_steps() -> None:
    chance = random.Random(1)
    requests = [asked(1, chance)]
    plain, one_by_one = answers(requests, None)
    model = guesser()
    guessed, rig = answers(requests, MeasuredPolicy(fixed=3, model=model))
    assert guessed == plain
    assert len(rig.plans) <= len(one_by_one.plans) / 2
    assert sum(use.held for use in model._cache.use()) == 0, "blocks of the small model are left"


@pytest.mark.parametrize("windows", [(0,), (0, 7)])
@pytest.mark.parametrize("seed", range(8))
def test_guesses_change_nothing(seed: int, windows: tuple[int, ...]) -> None:
    """In a batch, sampled or greedy, in pools of any size, with a model that reads long prompts in pieces."""
    chance = random.Random(seed)
    requests = [
        asked(id, chance, temperature=chance.choice((0.0, 0.8)), seed=id, repetition_penalty=chance.choice((1.0, 1.3)))
        for id in range(1, 7)
    ]
    plain, _ = answers(requests, None, windows=windows)
    for width, blocks, most in ((0, 200, 64), (4, 200, 16), (7, 30, 16)):
        model = guesser(blocks=blocks, windows=windows, max_tokens=most)
        guessed, rig = answers(requests, MeasuredPolicy(fixed=width, model=model), windows=windows)
        assert guessed == plain
        assert sum(use.held for use in model._cache.use()) == 0
        if width:
            assert rig.scheduler.stats().accepted > 0


def test_the_draft_model_reads_a_long_sequence_in_pieces_and_then_guesses() -> None:
    context = 4 * PIECE
    model = guesser(blocks=context, context=context, max_tokens=PIECE)
    tokens = random.Random(3).choices(range(VOCAB), k=2 * PIECE + 50)
    guesses = model.open(b"a", tokens)
    assert guesses is not None
    assert [len(guesses.propose(3)) for _ in range(3)] == [0, 0, 3]
    assert guesses.computed == len(tokens)


def test_the_draft_model_does_not_compute_accepted_tokens_again() -> None:
    model = guesser()
    guesses = model.open(b"a", [1, 2, 3])
    assert guesses is not None
    right = list(guesses.propose(4))
    wrong = (right[2] + 1) % VOCAB
    guesses.extend([*right[:2], wrong])
    assert guesses.computed == 5, "of the prompt and two guesses"
    again = model.open(b"b", [1, 2, 3, *right[:2], wrong])
    assert again is not None
    assert list(guesses.propose(4)) == list(again.propose(4)), "as from the start"
    assert guesses.chances(1)[0] > 0.5


def test_tenants_share_nothing_of_the_draft_model() -> None:
    model = guesser()
    tokens = [*range(30)]
    first = model.open(b"a", tokens)
    assert first is not None
    first.propose(2)
    model.end(first)
    own, other = model.open(b"a", tokens), model.open(b"b", tokens)
    assert own is not None and other is not None
    assert own.computed > 0 and other.computed == 0


def test_without_room_or_context_the_draft_model_makes_no_guesses() -> None:
    model = guesser(blocks=12)
    assert model.open(b"a", [*range(39)]) is not None
    assert model.open(b"a", [*range(40, 63)]) is None
    assert guesser().open(b"a", [1] * 199) is None
    policy = MeasuredPolicy(model=guesser(blocks=2))
    assert isinstance(policy.open(asked(1, random.Random(2)), [*range(30)]), SuffixDrafter)


def test_an_engine_that_fails_ends_its_guesses_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    requests = [asked(id, random.Random(id)) for id in range(1, 4)]
    plain, _ = answers(requests, None)
    model = guesser()
    calls = iter(range(100))
    decode = model._engine.decode

    def failing(rows: Any) -> Any:
        if next(calls) == 5:
            raise RuntimeError("injected")
        return decode(rows)

    model._engine.decode = failing  # type: ignore[method-assign]
    guessed, _ = answers(requests, MeasuredPolicy(fixed=3, model=model))
    assert guessed == plain and model.broken
    assert caplog.text.count("the draft model failed") == 1


def test_a_block_that_cannot_be_copied_ends_its_guesses_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        Request(id=id, prompt=tuple(range(1, 40 - id)), sampling=SamplingParams(max_tokens=9)) for id in range(1, 4)
    ]
    plain, _ = answers(requests, None, max_running=1)
    model = guesser()

    def failing(group: int, pairs: Any) -> Any:
        raise DeviceMemoryError("injected")

    monkeypatch.setattr(model._engine, "copy_blocks", failing)
    guessed, _ = answers(requests, MeasuredPolicy(fixed=3, model=model), max_running=1)
    assert guessed == plain and model.broken
    assert sum(use.held for use in model._cache.use()) == 0


def test_recurrent_states_are_refused() -> None:
    with pytest.raises(ValueError, match="recurrent"):
        guesser(windows=(0, -1))


def test_drafting_time_counts_against_the_guesses() -> None:
    """A small model that takes as long as the large one is not asked."""
    chance = random.Random(4)
    for seconds, asks in ((0.0001, True), (0.01, False)):
        model = guesser()
        policy = MeasuredPolicy(model=model)
        for _ in range(50):
            for tokens in (1, 2, 4, 8):
                policy.step_took(1, tokens, 0.01 * (1 + 0.02 * tokens))
        drafter = policy.open(asked(1, chance), [*range(20)])
        assert isinstance(drafter, CombinedDrafter)
        model.seconds = seconds
        assert bool(policy.width(drafter, 1)) == asks
