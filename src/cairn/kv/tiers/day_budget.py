"""The limit on bytes of KV written in any 24 hours, for whatever purpose and across restarts."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence

from cairn.system.interfaces import Clock

DAY_SECONDS = 86_400.0
_SPAN = 900.0
"""Seconds whose bytes are counted together; they count until all of them are a day old."""
_STEPS = 64
"""Parts of a day's bytes. One part is saved ahead as spent, so that the bytes of a killed process are never
forgotten."""
_ONCE = 0.5
"""Share of the day's bytes that sequences which nobody is known to continue may use."""

Written = tuple[float, int]
"""Seconds since 1970, and the bytes written in the span from then on."""


class DayBudget:
    """The bytes written in the last 24 hours, and their limit. Any thread.

    A caller that asks for `left` before each chunk exceeds the limit by at most one chunk.
    """

    def __init__(self, clock: Clock, limit: float, remember: Callable[[Sequence[Written]], None] | None = None) -> None:
        """Start with nothing written. `remember` is called before bytes are written that were not saved yet."""
        self._clock, self._limit, self._remember = clock, limit, remember
        self._lock = threading.Lock()
        self._spans: deque[list[float]] = deque()
        """The beginning of each span of the last day, and its bytes."""
        self._ahead = 0.0
        """Bytes that are saved as spent but not written yet."""

    def restore(self, written: Sequence[Written]) -> None:
        """Count the bytes that earlier processes wrote. Times in the future count as now."""
        now = self._now()
        with self._lock:
            self._spans = deque([min(start, now), float(size)] for start, size in sorted(written))

    def left(self, *, once: bool = False) -> bool:
        """Return whether anything may still be written; `once`: for a sequence that nobody is known to continue."""
        with self._lock:
            return self._total() < self._limit * (_ONCE if once else 1)

    def spend(self, size: int) -> None:
        """Count bytes that are about to be written."""
        with self._lock:
            now = self._settle()
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
        """Take back bytes that were not written after all."""
        with self._lock:
            for span in reversed(self._spans):
                back = min(size, span[1])
                span[1], size = span[1] - back, size - int(back)

    def record(self) -> tuple[Written, ...]:
        """Return the spans of the last 24 hours, for `restore`."""
        with self._lock:
            return self._record(0)

    def _record(self, ahead: float) -> tuple[Written, ...]:
        self._total()
        found = [(start, int(size)) for start, size in self._spans]
        if ahead and found:
            found[-1] = found[-1][0], found[-1][1] + int(ahead)
        return tuple(found)

    def _total(self) -> float:
        self._settle()
        return sum(size for _, size in self._spans)

    def _settle(self) -> float:
        """Forget spans older than a day; return the time. Spans in the future (the clock was set back) move to now."""
        now = self._now()
        for span in reversed(self._spans):
            if span[0] <= now:
                break
            span[0] = now
        while self._spans and now - self._spans[0][0] >= DAY_SECONDS + _SPAN:
            self._spans.popleft()
        return now

    def _now(self) -> float:
        return self._clock.time_ns() / 1e9
