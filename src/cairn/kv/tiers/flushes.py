"""Who waits until everything noted so far is stored, and what they are told was given up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

Flushed = Callable[[int], None]
"""Gets the number of chunks that were given up."""


@dataclass(slots=True)
class _Flush:
    before: int
    done: Flushed
    counts: bool
    lost: int


class Flushes:
    """Those who wait. Chunks are known by serials in the order in which they were noted."""

    def __init__(self) -> None:
        self._waiting: deque[_Flush] = deque()
        self._untold = 0
        """Chunks given up that nobody was told of."""

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiting)

    def add(self, before: int, done: Flushed, *, counts: bool) -> None:
        """`done` waits for all chunks `before` a serial.

        Where it `counts`, it is told of those that were given up, and of earlier ones that nobody was told of.
        """
        self._waiting.append(_Flush(before, done, counts, self._untold if counts else 0))
        if counts:
            self._untold = 0

    def lose(self, serial: int) -> None:
        """A chunk is given up: whoever waits for it is told, or else whoever comes next."""
        waiting = [flush for flush in self._waiting if flush.counts and serial < flush.before]
        for flush in waiting:
            flush.lost += 1
        if not waiting:
            self._untold += 1

    def answer(self, oldest: Callable[[], float]) -> None:
        """Call those that wait for nothing any more. `oldest`: serial of the oldest chunk that is outstanding."""
        while self._waiting and oldest() >= self._waiting[0].before:
            flush = self._waiting.popleft()
            flush.done(flush.lost)
