"""The queue of an encoder: turns of tenants, steps by tokens, and every way in which a text may end."""

from __future__ import annotations

from typing import Any

import pytest

from cairn.scheduler.encoder_queue import TextQueue
from cairn.scheduler.planned_step import Plan
from cairn.scheduler.step_budget import Limits
from cairn.types.errors import Conflict, ContextTooLong, InvalidRequest
from cairn.types.outputs import FinishReason
from cairn.types.request import Request, SamplingParams
from cairn.types.step import EngineInfo, RowResult

INFO = EngineInfo(
    groups=(),
    blocks=(),
    block_tokens=16,
    block_bytes=(),
    context=100,
    vocab=50,
    max_rows=4,
    max_tokens=128,
    identity=b"x",
    device="cpu",
    generates=False,
)


class Time:
    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def time_ns(self) -> int:
        return int(self.at * 1e9)


def text(id: int, size: int = 10, share: str = "a", **fields: Any) -> Request:
    return Request(
        id=id, prompt=(1,) * size, sampling=SamplingParams(max_tokens=0), share=share, want="hidden", **fields
    )


def queue(**limits: Any) -> tuple[TextQueue, Time]:
    time = Time()
    return TextQueue(INFO, Limits(**{"step_tokens": 64, **limits}), time), time


def ids(plan: Plan | None) -> list[int]:
    return [] if plan is None else list(plan.started)


def done(made: TextQueue, plan: Plan | None) -> list[tuple[int, FinishReason | None, bytes]]:
    assert plan is not None
    results = [RowResult(hidden=bytes([len(row.tokens)])) for row in plan.rows]
    return [(one.id, one.finish, one.vector) for one in made.commit(plan, results, 0.1)]


def test_steps_are_filled_by_tokens_and_rows() -> None:
    made, _ = queue()
    for id, size in enumerate((30, 30, 30, 64, 1, 1, 1, 1, 1)):
        made.add(text(id, size))
    seen = []
    while (plan := made.plan()) is not None:
        assert plan.encodes and sum(row.end for row in plan.rows) == plan.chunked == plan.prompt_tokens
        seen.append(ids(plan))
        done(made, plan)
    assert seen == [[0, 1], [2], [3], [4, 5, 6, 7], [8]]
    assert made.idle and made.stats().waiting_tokens == 0


def test_a_text_longer_than_a_step_is_one_by_itself() -> None:
    made, _ = queue()
    made.add(text(1, 100))
    made.add(text(2, 1))
    first = made.plan()
    assert ids(first) == [1] and done(made, first) == [(1, FinishReason.STOP, bytes([100]))]
    assert ids(made.plan()) == [2]


def test_tenants_take_turns_and_urgent_texts_come_first() -> None:
    made, _ = queue(max_running=2)
    for id in range(4):
        made.add(text(id, share="many", priority=int(id == 3)))
    made.add(text(9, share="few"))
    order = []
    while (plan := made.plan()) is not None:
        order += ids(plan)
        done(made, plan)
    assert order == [3, 9, 0, 1, 2]


def test_texts_that_cannot_be_computed_are_refused() -> None:
    made, _ = queue()
    with pytest.raises(ContextTooLong, match="101 tokens; the model takes at most 100"):
        made.add(text(1, 101))
    with pytest.raises(InvalidRequest, match="cannot generate text"):
        made.add(Request(id=1, prompt=(1,), sampling=SamplingParams(max_tokens=1)))
    made.add(text(1))
    with pytest.raises(Conflict):
        made.add(text(1))


def test_late_and_dropped_texts_leave() -> None:
    made, time = queue(max_running=1)
    made.add(text(1))
    made.add(text(2, timeout=5))
    made.add(text(3))
    plan = made.plan()
    assert ids(plan) == [1]
    assert made.drop(1, FinishReason.CANCELLED) is not None and made.drop(7, FinishReason.CANCELLED) is None
    assert done(made, plan) == [], "nobody waits for it any more"
    assert made.drop(3, FinishReason.CANCELLED) is not None
    time.at = 5.0
    plan = made.plan()
    assert plan is not None and not plan.rows
    assert done(made, plan) == [(2, FinishReason.DEADLINE, b"")]
    assert made.idle and made.plan() is None


def test_an_engine_that_fails_ends_the_texts_of_its_step_alone() -> None:
    made, _ = queue(max_running=2)
    for id in range(3):
        made.add(text(id))
    plan = made.plan()
    assert plan is not None
    ended = made.commit(plan, RuntimeError("no"))
    assert [(one.id, one.finish) for one in ended] == [(0, FinishReason.ERROR), (1, FinishReason.ERROR)]
    plan = made.plan()
    assert plan is not None and ids(plan) == [2]
    (one,) = made.commit(plan, [RowResult(error="not finite")])
    assert one.finish is FinishReason.ERROR and one.error == "not finite"
    assert made.idle
