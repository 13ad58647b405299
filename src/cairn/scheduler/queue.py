"""The queue of requests that wait to run, in order, and those that a step skips in favour of shorter ones."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from cairn.scheduler.fairness import Classes, RoundRobin
from cairn.scheduler.sequence import Sequence


class WaitingQueue:
    """Waiting requests in the order in which they start. Unbounded: the caller limits it."""

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        priorities: Mapping[str, int] | None = None,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._back: list[Sequence] = []
        """Preempted sequences, which run before all others."""
        self._rounds: RoundRobin[Sequence] = RoundRobin(weights)
        """Sequences that have not run yet."""
        self._classes, self._now = Classes(priorities or {}), now
        self._count = 0
        self.tokens = 0
        """Tokens of all waiting requests. A request's tokens do not change while it waits."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """Return an iterator in order: preempted sequences by `turn`, then the others in turns between tenants.

        Classes of tenants follow one another; a tenant's sequences go by rank. The iterator is a snapshot: the queue
        may change meanwhile.
        """
        rounds = self._by_class() if self._classes else iter(self._rounds)
        return chain(tuple(self._back), rounds) if self._back else rounds

    def _by_class(self) -> Iterator[Sequence]:
        arrivals = ((share, first.arrival) for share, first in self._rounds.firsts())
        return self._rounds.by_level(self._classes.levels(arrivals, self._now()))

    def push(self, sequence: Sequence) -> None:
        """Queue a new or preempted sequence."""
        if sequence.turn:
            insort(self._back, sequence, key=Sequence.by_turn)
        else:
            self._rounds.add(sequence.request.share, sequence, key=Sequence.by_rank)
        self._count += 1
        self.tokens += len(sequence.tokens)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence that ended."""
        if sequence.turn:
            self._back.remove(sequence)
        else:
            self._rounds.remove(sequence.request.share, sequence)
        self._count -= 1
        self.tokens -= len(sequence.tokens)

    def start(self, sequence: Sequence) -> None:
        """Remove a sequence that runs now, and count its tenant's turn unless it ran before."""
        self.discard(sequence)
        if not sequence.turn:
            self._rounds.served(sequence.request.share)
            self._classes.served(sequence.request.share, self._now())


class Skipped:
    """Waiting requests that a step skips, while it looks for short ones to run beside a long prompt."""

    __slots__ = ("_first", "_priorities")

    def __init__(self) -> None:
        self._first: Sequence | None = None
        self._priorities: dict[str, int] = {}
        """Tenant -> highest priority skipped: its requests of lower priority are skipped, too."""

    @property
    def any(self) -> bool:
        """Whether any request was skipped."""
        return self._first is not None

    def add(self, sequence: Sequence) -> None:
        """Record a skipped request."""
        self._first = sequence if self._first is None else self._first
        request = sequence.request
        self._priorities[request.share] = max(self._priorities.get(request.share, request.priority), request.priority)

    def skip_if_long(self, sequence: Sequence, kept: int) -> bool:
        """Skip the sequence and return True if it is known to be long, or if its tenant's rank order demands it.

        Long: the last look at it found more missing tokens than the `kept` ones reserved for short prompts. Rank order:
        a request of the same tenant with a higher priority was skipped.
        """
        request = sequence.request
        known = kept <= sequence.long_beside and sequence.kv.claim.match is not None
        if not known and self._priorities.get(request.share, request.priority) <= request.priority:
            return False
        self.add(sequence)
        return True

    def needs(self, block_tokens: int) -> int:
        """Return how many blocks of a full group the first skipped request, which runs next, still needs."""
        return self._first.needs(block_tokens) if self._first is not None else 0
