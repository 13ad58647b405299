"""The engine's cost curve: how much longer a decode step takes the more tokens it has, measured while it runs."""

from __future__ import annotations

from typing import Final

MOST_TOKENS: Final = 128
"""Tokens of the largest step that is measured; nothing is known of larger ones."""
_SLOPE: Final = 0.2
"""Part of a step of one token that each further one is assumed to cost before any was measured."""
_SPEED_WEIGHT: Final = 0.3
_SHAPE_WEIGHT: Final = 0.05
_FIRST_WEIGHT: Final = 0.7
"""Weight of a size's first measurement, against what was expected from its neighbours."""
_MOST_CHANGE: Final = 2.0
"""Factor by which one measurement may differ from what was expected; more counts as this."""
_FRESH_STEPS: Final = 1000
"""Steps after which a size that was not measured again is estimated from its neighbours."""


class StepCost:
    """Relative cost of steps by their tokens, and the present seconds of a unit.

    A measurement is the product of both. Most of a surprise changes the speed, which contexts and other programs
    change all the time; the rest changes the curve at this size. So sizes that take turns settle at their true ratio,
    and a machine that slows down leaves the curve alone.
    """

    __slots__ = ("_cost", "_measured", "_speed", "_steps", "_top")

    def __init__(self) -> None:
        self._cost = [1.0 + _SLOPE * (tokens - 1) for tokens in range(MOST_TOKENS + 1)]
        self._measured = [-_FRESH_STEPS] * (MOST_TOKENS + 1)
        """Number of the step in which each size was last measured."""
        self._speed = 0.0
        self._steps = 0
        self._top = 0
        """Largest size that was ever measured."""

    def record(self, tokens: int, seconds: float) -> None:
        """Take the time of a decode step with so many tokens, guesses included."""
        if not 0 < tokens <= MOST_TOKENS or seconds <= 0:
            return
        self._steps += 1
        fresh = self._fresh(tokens)
        expected = self._cost[tokens] if fresh else self.of(tokens)
        if not self._speed:
            self._speed = seconds / expected
        surprise = seconds / (self._speed * expected)
        if surprise > _MOST_CHANGE:
            surprise = _MOST_CHANGE
        elif surprise < 1 / _MOST_CHANGE:
            surprise = 1 / _MOST_CHANGE
        if fresh:
            self._speed *= surprise**_SPEED_WEIGHT
            self._cost[tokens] = expected * surprise**_SHAPE_WEIGHT
        else:  # the cost was a guess, and the speed is known from other sizes
            self._cost[tokens] = expected * surprise**_FIRST_WEIGHT
        self._measured[tokens] = self._steps
        if tokens > self._top:
            self._top = tokens

    def of(self, tokens: int) -> float:
        """Return the relative cost of a step: as measured, or between the next smaller and larger measured sizes."""
        if self._fresh(tokens):
            return self._cost[tokens]
        low = next((size for size in range(tokens - 1, 0, -1) if self._fresh(size)), 0)
        high = next((size for size in range(tokens + 1, self._top + 1) if self._fresh(size)), 0)
        if not low and not high:
            return self._cost[tokens]
        if low and high:
            part = (tokens - low) / (high - low)
            return self._cost[low] + part * (self._cost[high] - self._cost[low])
        known = low or high
        return max(0.0, self._cost[known]) * (1 + _SLOPE * (tokens - 1)) / (1 + _SLOPE * (known - 1))

    def relative(self, seconds: float) -> float:
        """Return seconds at the present speed in the unit of `of`; 0 before anything was measured."""
        return seconds / self._speed if self._speed else 0.0

    def _fresh(self, tokens: int) -> bool:
        measured = self._measured[tokens]
        return measured > 0 and self._steps - measured < _FRESH_STEPS
