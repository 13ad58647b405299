"""How much may be written a day."""

from __future__ import annotations

from cairn.seams import Clock

DAY_SECONDS = 86_400.0


class DayBudget:
    """Bytes a day. What no store took is given back."""

    def __init__(self, clock: Clock, limit: float) -> None:
        self._clock, self._limit = clock, limit
        self._day, self._spent = clock.now(), 0

    @property
    def left(self) -> bool:
        """Whether something may still be written today."""
        if self._clock.now() - self._day >= DAY_SECONDS:
            self._day, self._spent = self._clock.now(), 0
        return self._spent < self._limit

    def spend(self, size: int) -> None:
        """So much is to be written."""
        self._spent += size

    def refund(self, size: int) -> None:
        """So much was not written after all, perhaps of what was spent the day before."""
        self._spent = max(0, self._spent - size)
