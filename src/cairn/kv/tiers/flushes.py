"""Callers that wait until every chunk noted so far is stored, and how many chunks each of them lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

Flushed = Callable[[int], None]
"""Called with the number of chunks that were given up."""


@dataclass(slots=True)
class _Flush:
    before: int
    done: Flushed
    counts: bool
    lost: int


class Flushes:
    """The callers that wait. Chunks have serials in the order in which they were noted."""

    def __init__(self) -> None:
        self.waiting: deque[_Flush] = deque()
        """Those that wait, in the order in which they came."""
        self._unreported = 0
        """Chunks given up that were not reported to anybody."""

    def add(self, before: int, done: Flushed, *, counts: bool) -> None:
        """Call `done` once all chunks `before` a serial are stored or given up.

        If it `counts`, it gets the number of those that were given up, plus earlier ones that were not reported.
        """
        self.waiting.append(_Flush(before, done, counts, self._unreported if counts else 0))
        if counts:
            self._unreported = 0

    def lose(self, serial: int) -> None:
        """Count a chunk that was given up for those who wait for it, or else for the next to come."""
        waiting = [flush for flush in self.waiting if flush.counts and serial < flush.before]
        for flush in waiting:
            flush.lost += 1
        if not waiting:
            self._unreported += 1

    def answer(self, oldest: Callable[[], float]) -> None:
        """Call those whose chunks are all done. `oldest` returns the serial of the oldest outstanding chunk."""
        while self.waiting and oldest() >= self.waiting[0].before:
            flush = self.waiting.popleft()
            flush.done(flush.lost)
