"""Totals of tenants: an answer costs the same however many tenants there are."""

from __future__ import annotations

import pytest

from cairn.agents import savings
from cairn.agents.log.records import Savings
from cairn.agents.savings import SavingsTotals, summed
from cairn.types.outputs import Done, FinishReason, Timing, Usage
from cairn.types.stats import CacheReport


def done(computed: int, prefill: float) -> Done:
    usage = Usage(prompt_tokens=computed, completion_tokens=1)
    report = CacheReport(computed=computed, pool=8, load=0.25)
    return Done(reason=FinishReason.STOP, usage=usage, cache=report, timing=Timing(prefill=prefill))


def test_the_total_is_the_sum_over_tenants_without_adding_them_up_for_each_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    totals, added = SavingsTotals(), 0

    def counted(one: Savings, other: Savings) -> Savings:
        nonlocal added
        added += 1
        return summed(one, other)

    monkeypatch.setattr(savings, "summed", counted)
    for number in range(50):
        totals.load(f"before {number}", Savings(requests=1, computed=10, prefill_seconds=2.0))
    for number in range(100):
        totals.count(f"tenant {number}", done(computed=16, prefill=0.5), now=float(number))
    assert added <= 50, "all tenants are added up once, after they were read from the log"
    assert totals.total.requests == 150 and totals.total.computed == 50 * 10 + 100 * 16
    assert totals.speed == pytest.approx((50 * 2.0 + 100 * (0.5 - 0.25)) / totals.total.computed)
    totals.load("tenant 0", Savings(requests=5))
    assert totals.total.requests == 154
