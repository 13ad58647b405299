"""A model's activity in each of the last minutes."""

from __future__ import annotations

from cairn.frontend.last_hour import MINUTES, LastHour
from cairn.system.metrics import Metrics
from cairn.system.posix import SystemClock


class Clock(SystemClock):
    passed = 0.0

    def now(self) -> float:
        return 1000.0 + self.passed

    def time_ns(self) -> int:
        return int((1e9 + self.passed) * 1e9)


def test_each_minute_has_what_came_in_it() -> None:
    clock, metrics, hour = Clock(), Metrics("cairn", "m"), LastHour()
    metrics.generation_tokens = 100  # before the first look
    hour.note(clock, metrics)
    metrics.generation_tokens += 5
    clock.passed += 30
    hour.note(clock, metrics)
    assert not hour.minutes
    metrics.prompt_tokens += 40
    metrics.prompt_tokens_cached += 30
    metrics.first_token.observe(0.5)
    metrics.first_token.observe(1.5)
    clock.passed += 31
    hour.note(clock, metrics)
    clock.passed += 60
    hour.note(clock, metrics)
    first, second = hour.minutes
    assert (first.generated, first.prompt, first.cached, first.answers, first.first_token) == (5, 40, 30, 2, 2.0)
    assert (second.generated, second.prompt, second.answers, second.first_token) == (0, 0, 0, 0.0)
    assert second.at - first.at == 60


def test_no_more_than_an_hour_is_kept() -> None:
    clock, metrics, hour = Clock(), Metrics("cairn", "m"), LastHour()
    for number in range(3 * MINUTES):
        metrics.generation_tokens += number
        hour.note(clock, metrics)
        clock.passed += 60
    assert len(hour.minutes) == MINUTES and hour.minutes[-1].generated == 3 * MINUTES - 1
