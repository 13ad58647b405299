"""Steps that are planned while the step before them runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cairn.engine.fake import FakeEngine
from cairn.scheduler.planned_step import Plan
from cairn.types.errors import DeviceMemoryError
from cairn.types.outputs import FinishReason
from cairn.types.step import EngineCall, Row, RowResult
from tests.laws.simulator import Rule
from tests.scheduler.test_scheduler import PROMPT, Rig


def started(**fields: Any) -> tuple[Rig, Plan]:
    """Return a rig with two answers whose prompts are computed, and a plan of their next tokens."""
    rig = Rig(windows=(0, 7), **fields)
    for number in (1, 2):
        rig.add(number, PROMPT[number:], max_tokens=6, temperature=float(number - 1))
    rig.step()
    return rig, rig.plan()


def test_answers_are_the_same_as_step_by_step() -> None:
    rig, plan = started()
    requests = [sequence.request for sequence in plan.sequences]
    ahead = 0
    while plan is not None:
        running = plan.submit(rig.engine)
        after = rig.scheduler.follow(plan)
        submitted = None if after is None else after.submit(rig.engine)
        rig.commit(plan, running.results())
        while submitted is not None:
            ahead += 1
            assert all(row.pending is not None for row in submitted.plan.rows)
            later = rig.scheduler.follow(submitted.plan)
            upcoming = None if later is None else later.submit(rig.engine)
            rig.commit(submitted.plan, submitted.results())
            submitted = upcoming
        plan = rig.scheduler.plan()  # type: ignore[assignment]
    assert [rig.tokens(request.id) for request in requests] == [rig.oracle(request) for request in requests]
    assert rig.finish(1) is FinishReason.LENGTH and ahead == 4 and rig.nothing_held()


def test_an_answer_that_ends_has_a_row_in_vain_and_no_output() -> None:
    rig, plan = started()
    first = rig.oracle(plan.sequences[0].request)
    rig.scheduler.drop(1, FinishReason.CANCELLED)
    rig.commit(plan, plan.run(rig.engine))
    rig.add(3, PROMPT[1:], max_tokens=6, stop_token_ids=(first[2],))
    rig.step()
    plan = rig.plan()
    results = plan.run(rig.engine)
    after = rig.scheduler.follow(plan)
    assert after is not None
    rig.commit(plan, results)
    again = rig.scheduler.follow(after)
    assert again is not None and len(again.rows) == 2
    rig.commit(after, after.run(rig.engine))
    assert rig.finish(3) is FinishReason.STOP, "in the step before the one ahead"
    outputs = rig.commit(again, again.run(rig.engine))
    assert [output.id for output in outputs] == [2]
    rig.run()
    assert rig.tokens(2) == rig.oracle_of(2) and rig.tokens(3) == first[:3] and rig.nothing_held()


@pytest.mark.parametrize(
    "case", ["waits", "grammar", "prompt", "scored", "mirostat", "deadline", "blocks", "committed"]
)
def test_a_step_that_needs_results_is_not_planned_ahead(case: str) -> None:
    rig, plan = started()
    if case == "waits":
        rig.add(3)
    elif case == "committed":
        rig.commit(plan, plan.run(rig.engine))
    elif case == "deadline":
        rig.commit(plan, plan.run(rig.engine))
        rig.add(3, timeout=5.0)
        rig.step()
        plan = rig.plan()
        rig.clock.time += 10
    elif case == "grammar":
        plan.sequences[0].matcher = Rule.__new__(Rule)
    elif case == "mirostat":
        plan.sequences[0].mu = 3.0
    elif case == "blocks":
        rig.cache.grow = lambda *_: False  # type: ignore[method-assign]
    else:
        rig.commit(plan, plan.run(rig.engine))
        rig.add(
            3,
            tuple(number % 60 for number in range(100)),
            max_tokens=0 if case == "scored" else 2,
            prompt_logprobs=case == "scored",
        )
        if case == "prompt":
            rig.scheduler._step_tokens = 40
        plan = rig.plan()
    assert rig.scheduler.follow(plan) is None


class ShortOfMemory:
    """An engine that runs out of memory in its first step of several rows."""

    def __init__(self, inner: FakeEngine) -> None:
        self.inner, self.failed = inner, False
        self.info = inner.info

    def decode(self, rows: Sequence[Row]) -> EngineCall[list[RowResult]]:
        if len(rows) > 1 and not self.failed:
            self.failed = True
            self.inner._sampled = []

            class Failed:
                done = True

                def wait(self) -> list[RowResult]:
                    raise DeviceMemoryError("no memory is left on the device")

            return Failed()
        return self.inner.decode(rows)

    prefill = decode


def test_the_step_behind_one_that_ran_out_of_memory_is_computed_again() -> None:
    """Its rows continue tokens that never came: none of them may fail, and no token is lost or repeated."""
    rig, plan = started()
    engine: Any = ShortOfMemory(rig.engine)
    running = plan.submit(engine)
    after = rig.scheduler.follow(plan)
    assert after is not None
    behind = after.submit(engine)
    rig.commit(plan, running.results())
    assert engine.failed and rig.commit(after, behind.results()) == []
    rig.run()
    assert [rig.tokens(number) for number in (1, 2)] == [rig.oracle_of(number) for number in (1, 2)]
