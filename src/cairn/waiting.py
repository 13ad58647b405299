"""The queue of requests that wait to run: in order of rank, bounded, and able to say when it will have room."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator

from cairn.errors import Overloaded
from cairn.sequence import Sequence

PACE_SECONDS = 30.0
"""How long the measured progress of the queue is remembered."""


class WaitingQueue:
    """At most `max_requests` requests and `max_tokens` tokens; a request alone may exceed the tokens."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._items: list[Sequence] = []
        self.tokens = 0
        """Tokens of all waiting requests; a request's do not change while it waits."""
        self._pace = Pace()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        """In order of rank. The queue may change meanwhile; the iteration does not."""
        return iter(tuple(self._items))

    def check(self, tokens: int) -> None:
        """Raise `Overloaded` if a request of so many tokens is one too many."""
        waiting, queued = len(self._items), self.tokens
        if waiting < self._max_requests and (not waiting or queued + tokens <= self._max_tokens):
            return
        raise Overloaded(
            f"the queue is full: {waiting} requests with {queued} tokens are waiting, the limits are "
            f"{self._max_requests} (max_queue) and {self._max_tokens} (max_queue_tokens)",
            retry_after=self._pace.seconds_until(
                waiting + 1 - self._max_requests, min(queued, queued + tokens - self._max_tokens)
            ),
        )

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence, also one that was preempted: those are never refused."""
        insort(self._items, sequence, key=Sequence.by_rank)
        self.tokens += len(sequence.tokens)

    def pop(self, sequence: Sequence) -> None:
        """Take this sequence out because it runs now: the progress that `Pace` measures."""
        self.discard(sequence)
        self._pace.left(len(sequence.tokens))

    def discard(self, sequence: Sequence) -> None:
        """Take this sequence out because it ended."""
        self._items.remove(sequence)
        self.tokens -= len(sequence.tokens)

    def tick(self, now: float) -> None:
        """A step was planned at this time."""
        self._pace.tick(now, bool(self._items))


class Pace:
    """How fast the queue moves, measured while requests wait; what is older than `PACE_SECONDS` fades."""

    def __init__(self) -> None:
        self._requests = self._tokens = self._seconds = 0.0
        self._last = math.inf
        self._waited = False

    def tick(self, now: float, waiting: bool) -> None:
        """Time passes; `waiting`: whether anybody waits from now on."""
        if self._waited:
            passed = now - self._last
            fade = math.exp(-passed / PACE_SECONDS)
            self._requests, self._tokens = self._requests * fade, self._tokens * fade
            self._seconds = self._seconds * fade + passed
        self._last, self._waited = now, waiting

    def left(self, tokens: int) -> None:
        """A request of so many tokens left the queue. Only those that had to wait say something about its pace."""
        if self._waited:
            self._requests += 1
            self._tokens += tokens

    def seconds_until(self, requests: int, tokens: int) -> float:
        """When so many more requests and tokens will have left the queue; 1 where nothing was measured yet."""
        if not self._seconds or not self._requests:
            return 1.0
        by_requests, by_tokens = self._seconds / self._requests, self._seconds / self._tokens
        return min(3600.0, max(0.1, requests * by_requests, tokens * by_tokens))
