"""The queue of requests that wait to run, in order. Who of them is passed by others."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from cairn.scheduler.fairness import Classes, RoundRobin
from cairn.scheduler.sequence import Sequence


class WaitingQueue:
    """The requests that wait; how many there may be is the business of whoever adds them."""

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        priorities: Mapping[str, int] | None = None,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._back: list[Sequence] = []
        """Those that ran before and were preempted."""
        self._rounds: RoundRobin[Sequence] = RoundRobin(weights)
        """All others."""
        self._classes, self._now = Classes(priorities or {}), now
        self._count = 0
        self.tokens = 0
        """Tokens of all waiting requests; a request's do not change while it waits."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """Go through them in order: those that ran before by their turn, then one of each tenant, a second of each,
        and so on, one class of tenants after the other; those of a tenant by rank. The queue may change meanwhile; the
        iteration does not."""
        rounds = self._by_class() if self._classes else iter(self._rounds)
        return chain(tuple(self._back), rounds) if self._back else rounds

    def _by_class(self) -> Iterator[Sequence]:
        came = ((share, first.arrival) for share, first in self._rounds.firsts())
        return self._rounds.by_level(self._classes.levels(came, self._now()))

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence, also one that was preempted."""
        if sequence.turn:
            insort(self._back, sequence, key=Sequence.by_turn)
        else:
            self._rounds.add(sequence.request.share, sequence, key=Sequence.by_rank)
        self._count += 1
        self.tokens += len(sequence.tokens)

    def discard(self, sequence: Sequence) -> None:
        """Take this sequence out, because it runs now or has ended."""
        if sequence.turn:
            self._back.remove(sequence)
        else:
            self._rounds.remove(sequence.request.share, sequence)
        self._count -= 1
        self.tokens -= len(sequence.tokens)

    def start(self, sequence: Sequence) -> None:
        """Take this sequence out, because it runs now: its tenant has had its turn, unless it ran before."""
        self.discard(sequence)
        if not sequence.turn:
            self._rounds.served(sequence.request.share)
            self._classes.served(sequence.request.share, self._now())


class Passed:
    """Waiting requests that a step passes beside a long prompt, in search of short ones."""

    __slots__ = ("_first", "_priorities")

    def __init__(self) -> None:
        self._first: Sequence | None = None
        self._priorities: dict[str, int] = {}
        """The highest of each tenant's: none of its own passes that has less."""

    @property
    def any(self) -> bool:
        """Whether anybody was passed."""
        return self._first is not None

    def add(self, sequence: Sequence) -> None:
        """Remember that this one is passed."""
        self._first = sequence if self._first is None else self._first
        request = sequence.request
        self._priorities[request.share] = max(self._priorities.get(request.share, request.priority), request.priority)

    def again(self, sequence: Sequence, kept: int) -> bool:
        """Pass this one if the last look at it says that it is long where so many tokens are kept for short ones, or if
        one of its tenant's that has a higher priority was passed."""
        request = sequence.request
        known = kept <= sequence.long_beside and sequence.kv.claim.match is not None
        if not known and self._priorities.get(request.share, request.priority) <= request.priority:
            return False
        self.add(sequence)
        return True

    def needs(self, block_tokens: int) -> int:
        """Blocks of a full group that the first of them does not hold yet: it is the next to run."""
        return self._first.needs(block_tokens) if self._first is not None else 0
