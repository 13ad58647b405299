"""The states of a sequence, and what each step computes of it."""

from __future__ import annotations

import itertools

import pytest

from cairn.engine.fake import FakeEngine, fake_spec
from cairn.kv.pool.cache import Cache
from cairn.scheduler.sequence import LEGAL, Sequence, State
from cairn.types.outputs import FinishReason
from cairn.types.request import Request, SamplingParams


def sequence(prompt: tuple[int, ...] = (1, 2, 3), limit: int = 100, **sampling: object) -> Sequence:
    cache = Cache(FakeEngine(fake_spec(), blocks=4).info)
    options = SamplingParams(**{"max_tokens": 4, **sampling})  # type: ignore[arg-type]
    return Sequence(Request(id=1, prompt=prompt, sampling=options), cache.context(b""), limit, 0, 0.0)


def test_the_legal_transitions_are_these_and_no_others() -> None:
    """Known failure 6."""
    waiting, running = State.WAITING, State.RUNNING
    ends = State.FINISHED, State.FAILED, State.CANCELLED
    legal = {(waiting, running), (waiting, State.FAILED), (waiting, State.CANCELLED), (running, waiting)}
    legal |= {(running, end) for end in ends}
    assert {(a, b) for a in LEGAL for b in LEGAL[a]} == legal
    assert set(LEGAL) == set(State)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)))
def test_every_transition_is_checked(before: State, after: State) -> None:
    """A completed request cannot become failed (known failure 6)."""
    it = sequence()
    it.state = before
    if after in LEGAL[before]:
        it.become(after)
        assert it.state is after
    else:
        with pytest.raises(RuntimeError, match="not legal"):
            it.become(after)
        assert it.state is before


@pytest.mark.parametrize(
    ("sampled", "options", "reason"),
    [
        ([], {}, None),
        ([5], {}, None),
        ([5, 5, 5, 5], {}, FinishReason.LENGTH),
        ([9], {"stop_token_ids": (8, 9)}, FinishReason.STOP),
        ([9, 5], {"stop_token_ids": (9,)}, None),
        ([9], {"stop_token_ids": (9,), "min_tokens": 1}, None),
        ([5, 9], {"stop_token_ids": (9,), "min_tokens": 1}, FinishReason.STOP),
        ([5, 5, 5, 9], {"stop_token_ids": (9,)}, FinishReason.STOP),
        ([5, 5], {"limit": 5}, FinishReason.LENGTH),
        ([5, 5], {"limit": 6}, None),
    ],
)
def test_when_the_tokens_so_far_are_the_last(
    sampled: list[int], options: dict[str, int], reason: FinishReason | None
) -> None:
    """Known failure 15."""
    it = sequence(**options)  # type: ignore[arg-type]
    it.tokens += sampled
    assert it.ending() is reason


def test_a_stop_token_in_the_prompt_ends_nothing() -> None:
    assert sequence(prompt=(1, 9), stop_token_ids=(9,)).ending() is None


def test_logits_are_wanted_at_the_end_only() -> None:
    it = sequence(prompt=(1, 2, 3, 4, 5))
    assert it.row(3).logits_from is None
    assert not it.row(3).samples
    assert it.row(5).logits_from == 4
    assert it.row(5).samples


def test_a_scored_prompt_wants_all_that_is_not_scored_yet() -> None:
    it = sequence(prompt=(1, 2, 3, 4, 5), prompt_logprobs=True)
    assert it.row(3).logits_from == 0
    it.scored = 3
    assert it.row(3).logits_from is None
    assert it.row(5).logits_from == 3
    it.scored = it.to_score
    assert it.row(5).logits_from == 4


def test_a_prompt_alone_is_computed_up_to_its_last_token() -> None:
    it = sequence(prompt=(1, 2, 3), max_tokens=0)
    assert it.target == 2
    assert it.row(it.target).logits_from is None
