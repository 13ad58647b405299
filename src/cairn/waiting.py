"""The queue of requests that wait to run: in order of rank, and bounded."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from cairn.errors import Overloaded
from cairn.sequence import Sequence


class WaitingQueue:
    """At most `max_requests` requests and `max_tokens` tokens; a request alone may exceed the tokens."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._items: list[Sequence] = []
        self.tokens = 0
        """Tokens of all waiting requests; a request's do not change while it waits."""

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
            f"{self._max_requests} (max_queue) and {self._max_tokens} (max_queue_tokens)"
        )

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence, also one that was preempted: those are never refused."""
        insort(self._items, sequence, key=Sequence.by_rank)
        self.tokens += len(sequence.tokens)

    def discard(self, sequence: Sequence) -> None:
        """Take this sequence out, because it runs now or has ended."""
        self._items.remove(sequence)
        self.tokens -= len(sequence.tokens)
