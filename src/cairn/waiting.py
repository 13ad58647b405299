"""The queue of requests that wait to run: in order, and bounded. Who of them is passed by others."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from cairn.errors import Overloaded
from cairn.kv.blocks import BlockPool
from cairn.rounds import Rounds
from cairn.sequence import Sequence

LOOKS = 8
"""Waiting requests that are found to be long before a step looks no further for short ones: to know is not free."""
PAUSE = 4
"""Steps for which such a one then counts as long unseen: with `LOOKS` it says how many a short one may stand behind."""
AGAIN = 16
"""Steps after which one that did not fit is looked at again, although no more room is seen: somebody may have published
what it needs."""


class WaitingQueue:
    """At most `max_requests` requests and `max_tokens` tokens; a request alone may exceed the tokens."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._back: list[Sequence] = []
        """Those that ran before and were preempted."""
        self._rounds: Rounds[Sequence] = Rounds()
        """All others."""
        self._count = 0
        self._refused: Refused | None = None
        self.tokens = 0
        """Tokens of all waiting requests; a request's do not change while it waits."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """Go through them in order: those that ran before by their turn, then one of each tenant, a second of each,
        and so on; those of a tenant by rank. The queue may change meanwhile; the iteration does not."""
        return chain(tuple(self._back), self._rounds) if self._back else iter(self._rounds)

    def check(self, tokens: int) -> None:
        """Raise `Overloaded` if a request of so many tokens is one too many."""
        waiting, queued = self._count, self.tokens
        if waiting < self._max_requests and (not waiting or queued + tokens <= self._max_tokens):
            return
        raise Overloaded(
            f"the queue is full: {waiting} requests with {queued} tokens are waiting, the limits are "
            f"{self._max_requests} (max_queue) and {self._max_tokens} (max_queue_tokens)"
        )

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence, also one that was preempted: those are never refused."""
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
        if self._refused is not None and self._refused.sequence is sequence:
            self._refused = None

    def start(self, sequence: Sequence) -> None:
        """Take this sequence out, because it runs now: its tenant has had its turn, unless it ran before."""
        self.discard(sequence)
        if not sequence.turn:
            self._rounds.served(sequence.request.share)

    def opened(self, sequence: Sequence, covered: int | None, passed: Passed, running: int, kept: int) -> None:
        """Remember, where a sequence was not opened (`covered` is None), what there was then."""
        if covered is None and (short := sequence.kv.short) is not None:
            self._refused = Refused(sequence, passed, running, kept > 0, short, short.available)

    def full(self, sequence: Sequence, passed: Passed, running: int, kept: int) -> bool:
        """Whether there was no room for this one a few steps ago and there is no more now: to find out anew is as dear
        as its cached prefix is long. Only beside others that run, so that something happens meanwhile."""
        last, kv = self._refused, sequence.kv
        if last is None or last.sequence is not sequence or kv.loading or kv.short is not last.short or not running:
            return False
        same = passed.near(last.passed) and (kept > 0) == last.beside
        return same and running >= last.running and last.short.available <= last.available


class Passed:
    """Waiting requests that the step of this number, beside a long prompt, passes in search of short ones."""

    __slots__ = ("_first", "_looks", "_priorities", "_step")

    def __init__(self, step: int) -> None:
        self._step = step
        self._first: Sequence | None = None
        self._looks = 0
        self._priorities: dict[str, int] = {}
        """The highest of each tenant's: none of its own passes that has less."""

    @property
    def any(self) -> bool:
        """Whether anybody was passed."""
        return self._first is not None

    @property
    def enough(self) -> bool:
        """Whether to look no further."""
        return self._looks >= LOOKS

    def add(self, sequence: Sequence) -> None:
        """Remember that this one is passed."""
        self._first = sequence if self._first is None else self._first
        request = sequence.request
        self._priorities[request.share] = max(self._priorities.get(request.share, request.priority), request.priority)

    def long(self, sequence: Sequence, *, pause: bool) -> None:
        """Pass this one, whose cached prefix was looked up and is too short; with `pause` it is not looked up again at
        once."""
        self._looks += 1
        sequence.long_until = self._step + PAUSE * pause
        self.add(sequence)

    def again(self, sequence: Sequence) -> bool:
        """Pass this one if it was long at a look at most `PAUSE` steps ago, or if one of its tenant's that has a higher
        priority was passed."""
        request = sequence.request
        outranked = self._priorities.get(request.share, request.priority) > request.priority
        if self._step > sequence.long_until and not outranked:
            return False
        self.add(sequence)
        return True

    def near(self, other: Passed) -> bool:
        """Whether that was a few steps ago, and room is left for the same sequence."""
        return self._step < other._step + AGAIN and self._first is other._first

    def needs(self, block_tokens: int) -> int:
        """Blocks of a full group that the first of them does not hold yet: it is the next to run."""
        return self._first.needs(block_tokens) if self._first is not None else 0


class Refused(NamedTuple):
    """What there was when a sequence did not fit."""

    sequence: Sequence
    passed: Passed
    running: int
    beside: bool
    """Whether it would have run beside a long prompt."""
    short: BlockPool
    """The pool that had too few blocks."""
    available: int
    """How many that were."""
