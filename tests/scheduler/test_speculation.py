"""Guesses behind a row's last token: which are accepted, reported and given back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.step_budget import Limits
from cairn.types.outputs import FinishReason
from cairn.types.request import Request, SamplingParams
from cairn.types.step import Ready
from tests.scheduler.test_scheduler import PROMPT, Rig


class Fixed:
    """A drafter, and its policy, that guesses these tokens once."""

    bytes = 0
    asks_model = False

    def __init__(self, guesses: Sequence[int]) -> None:
        self.guesses = list(guesses)
        self.recorded: list[tuple[int, int]] = []
        self.closed = 0

    def open(self, request: Request, prompt: Sequence[int]) -> Any:
        return self

    def close(self, drafter: Any) -> None:
        self.closed += 1

    def extend(self, tokens: Sequence[int]) -> None:
        """Do nothing: the guesses are fixed."""

    expect = extend

    def states_from(self, request: Request, length: int) -> int | None:
        return None

    def take_states(self, first: int, states: Any, count: int) -> None:
        raise AssertionError("states that nobody wants")

    def width(self, drafter: Any, rows: int) -> int:
        return 7

    def propose(self, width: int) -> list[int]:
        guesses, self.guesses = self.guesses[:width], []
        return guesses

    def record(self, drafter: Any, offered: int, accepted: int) -> None:
        self.recorded.append((offered, accepted))

    def step_took(self, rows: int, tokens: int, seconds: float) -> None:
        """Do nothing: the widths are fixed."""


class Ends:
    """A matcher that allows anything until so many tokens have come."""

    def __init__(self, count: int) -> None:
        self.count, self.taken = count, 0

    @property
    def over(self) -> bool:
        return self.taken >= self.count

    def mask(self) -> Ready[bytes] | None:
        return None

    def accepts(self, draft: Sequence[int]) -> int:
        return len(draft)

    def masks(self, draft: Sequence[int]) -> tuple[None, ...]:
        return (None,) * (len(draft) + 1)

    def consume(self, token: int) -> None:
        self.taken += 1

    def forced(self) -> int | None:
        return None

    def likely(self) -> list[int]:
        return []


def guessing(guesses: Any, *, matcher: Any = None, **sampling: Any) -> tuple[Rig, list[int], Fixed]:
    """Return a rig, a whole answer and a drafter; the answer's first token is there, the guesses follow it."""
    rig = Rig()
    request = Request(id=1, prompt=PROMPT, sampling=SamplingParams(**{"max_tokens": 9, "temperature": 0.0} | sampling))
    answer = rig.oracle(request)
    policy = Fixed(guesses(answer))
    rig.scheduler = Scheduler(rig.cache, Limits(), rig.clock, policy)
    rig.scheduler.add(request, matcher)
    rig.step()
    return rig, answer, policy


def test_right_guesses_come_with_their_step() -> None:
    rig, answer, policy = guessing(lambda answer: answer[1:5])
    (output,) = rig.step()
    assert list(output.tokens) == answer[1:6] and policy.recorded == [(4, 4)]
    rig.run()
    assert rig.tokens(1) == answer and policy.closed == 1


def test_a_wrong_guess_and_those_behind_it_are_rejected_and_their_blocks_freed() -> None:
    rig, answer, policy = guessing(lambda answer: [*answer[1:3], (answer[3] + 1) % 64, *answer[4:7]])
    before = rig.cache.use()[0].held
    (output,) = rig.step()
    assert list(output.tokens) == answer[1:4] and policy.recorded == [(6, 2)]
    length = len(PROMPT) + 4
    assert rig.cache.use()[0].held == -(-length // 4) >= before
    rig.run()
    assert rig.tokens(1) == answer


def test_an_answer_ends_within_a_draft_where_its_grammar_does() -> None:
    rig, answer, _ = guessing(lambda answer: answer[1:7], matcher=Ends(4))
    (output,) = rig.step()
    assert list(output.tokens) == answer[1:4] and output.finish is FinishReason.STOP
    assert rig.nothing_held()


def test_nothing_is_guessed_behind_a_stop_token_or_the_longest_answer() -> None:
    rig, answer, policy = guessing(lambda answer: answer[1:8], max_tokens=4)
    rig.run()
    assert rig.tokens(1) == answer[:4] and policy.recorded == [(2, 2)], "the last one needs none behind it"
    stop = guessing(lambda answer: ())[1][3]
    rig, answer, policy = guessing(lambda _: (), stop_token_ids=(stop,))
    policy.guesses = [*answer[1:3], stop, 5, 6]
    rig.run()
    assert rig.tokens(1) == answer and answer[-1] == stop and policy.recorded == [(2, 2)]


@pytest.mark.parametrize("token", [-1, 64, 10_000])
def test_a_guess_outside_the_vocabulary_ends_the_draft(token: int) -> None:
    rig, answer, policy = guessing(lambda answer: [answer[1], token, answer[3]])
    rig.run()
    assert rig.tokens(1) == answer and policy.recorded == [(1, 1)]


def test_a_draft_is_no_prompt() -> None:
    rig, _, _ = guessing(lambda answer: answer[1:5])
    plan = rig.plan()
    assert (plan.singles, plan.chunked, plan.extra, plan.prompt_tokens) == (1, 0, 4, 0)
