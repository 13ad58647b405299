"""The limit on bytes written in any 24 hours, while the wall clock is changed."""

from __future__ import annotations

import pytest

from cairn.kv.tiers.day_budget import DAY_SECONDS, DayBudget
from tests.kv.stored import Time


@pytest.mark.parametrize("back", [3600.0, 30 * DAY_SECONDS])
def test_bytes_count_for_a_day_after_the_clock_was_set_back(back: float) -> None:
    """They were written now at the latest, so they are forgotten a day from now, and not before."""
    time = Time()
    budget = DayBudget(time, 100)
    time.wall = back
    budget.spend(60)
    time.wall = 0.0
    budget.spend(40)
    assert not budget.left() and all(start <= time.time_ns() / 1e9 for start, _ in budget.record())
    time.sleep(DAY_SECONDS - 1)
    assert not budget.left()
    time.sleep(2 * 900.0 + 1)
    assert budget.left() and budget.record() == ()


def test_the_order_of_spans_holds_when_the_clock_jumps_to_and_fro() -> None:
    time = Time()
    budget = DayBudget(time, 1000)
    for wall in (0.0, 7200.0, 3600.0, 90_000.0, -5000.0, 1000.0):
        time.wall = wall
        budget.spend(10)
        starts = [start for start, _ in budget.record()]
        assert starts == sorted(starts) and starts[-1] <= time.time_ns() / 1e9
