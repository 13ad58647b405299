"""How many bytes of KV may be written in any 24 hours, whatever for and however often the process is started."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence

from cairn.system.interfaces import Clock

DAY_SECONDS = 86_400.0
_SPAN = 900.0
"""Seconds whose bytes are counted together: they count until all of them are a day ago."""
_STEPS = 64
"""Parts of a day's bytes. As much is written down ahead, so that what a killed process wrote is never forgotten."""
_ONCE = 0.5
"""Of the day's bytes, how much contexts may use up that nobody is known to go on with."""

Written = tuple[float, int]
"""Seconds since 1970, and bytes that were written from then on for a while."""


class DayBudget:
    """Bytes that were written in the last 24 hours, and their limit. Any thread.

    Who asks whether something is `left` before each chunk writes at most one chunk beyond the limit.
    """

    def __init__(self, clock: Clock, limit: float, remember: Callable[[Sequence[Written]], None] | None = None) -> None:
        """`remember` is called before bytes are written that were not written down yet."""
        self._clock, self._limit, self._remember = clock, limit, remember
        self._lock = threading.Lock()
        self._spans: deque[list[float]] = deque()
        """The beginning of each span that is not a day ago, and its bytes."""
        self._ahead = 0.0
        """Bytes that are written down already."""

    def restore(self, written: Sequence[Written]) -> None:
        """Count what earlier processes wrote. What a clock that was ahead says counts as written now."""
        now = self._now()
        with self._lock:
            self._spans = deque([min(start, now), float(size)] for start, size in sorted(written))

    def left(self, *, once: bool = False) -> bool:
        """Whether something may still be written; `once`: of a context that nobody is known to go on with."""
        with self._lock:
            return self._total() < self._limit * (_ONCE if once else 1)

    def spend(self, size: int) -> None:
        """Count bytes that are about to be written."""
        with self._lock:
            now = self._now()
            if not self._spans or now - self._spans[-1][0] >= _SPAN:
                self._spans.append([now, 0])
            self._spans[-1][1] += size
            self._ahead -= size
            ahead = self._ahead < 0 and self._limit < math.inf
            if ahead:
                self._ahead = self._limit / _STEPS
            record = self._record(self._ahead) if ahead else None
        if record is not None and self._remember is not None:
            self._remember(record)

    def refund(self, size: int) -> None:
        """Give bytes back that were not written after all."""
        with self._lock:
            for span in reversed(self._spans):
                back = min(size, span[1])
                span[1], size = span[1] - back, size - int(back)

    def record(self) -> tuple[Written, ...]:
        """Return what was written in the last 24 hours, to be restored."""
        with self._lock:
            return self._record(0)

    def _record(self, ahead: float) -> tuple[Written, ...]:
        self._total()
        found = [(start, int(size)) for start, size in self._spans]
        if ahead and found:
            found[-1] = found[-1][0], found[-1][1] + int(ahead)
        return tuple(found)

    def _total(self) -> float:
        now = self._now()
        while self._spans and now - self._spans[0][0] >= DAY_SECONDS + _SPAN:
            self._spans.popleft()
        return sum(size for _, size in self._spans)

    def _now(self) -> float:
        return self._clock.time_ns() / 1e9
