"""A simulated day of agents over a store too small for all their contexts: how many tokens are computed twice.

Agents of a few kinds share the beginning of their contexts. Each works through tasks: it calls tools and waits for the
results, mostly for seconds, sometimes for half an hour. Now and then it runs into a dead end and is rolled back to
where that began. When a task is done its user comes back after an hour, or never. Nothing here computes or sleeps: a
context is a chain of keys, and the day is a list of events ordered by time.

The law: a store that is told the standing of contexts (waiting, idle, superseded) recomputes fewer tokens than the same
store without that knowledge, at equal bytes. Without it, the in-memory store is a plain LRU.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cairn.kv.disk.chunk_file import Name
from cairn.kv.disk.index import DiskIndex, IndexEntry
from cairn.kv.ram import RamStore
from cairn.kv.tiers.store import Chunk, Standing
from tests.laws.storage_world import law

TOKENS = 64
PAGES = bytes(1024)
CHUNK_BYTES = 2048
"""Bytes of a chunk in a `RamStore`."""
AGENTS, KINDS, OPENING = 24, 3, 24
DAY = 10 * 3600.0
MOST = 500
"""Length of the longest context, in chunks."""


class Tier(Protocol):
    """The part of a store's interface that a day uses."""

    def turn(self, keys: Sequence[bytes], now: float) -> int:
        """Run a turn with this context; return how many chunks were found. Stores the rest as far as there is room."""
        ...

    def mark(self, keys: Sequence[bytes], standing: Standing) -> None: ...


class Memory:
    """A tier with a `RamStore`."""

    def __init__(self, chunks: int) -> None:
        self.store = RamStore(chunks * CHUNK_BYTES)

    def turn(self, keys: Sequence[bytes], now: float) -> int:
        found = self.store.match_prefix(keys)
        for key in keys[:found]:
            self.store.fetch(key, ())
        parents = (b"", *keys)
        self.store.keep([Chunk(key, parents[at], (), at * TOKENS, PAGES) for at, key in enumerate(keys)])
        return found

    def mark(self, keys: Sequence[bytes], standing: Standing) -> None:
        self.store.mark(keys, standing)


class Disk:
    """A tier with the index of a `DiskStore` and the budget that limits it, without files."""

    def __init__(self, chunks: int) -> None:
        self.index, self.most = DiskIndex(), chunks

    def turn(self, keys: Sequence[bytes], now: float) -> int:
        found = 0
        for key in keys:
            if (entry := self.index.get(key)) is None:
                break
            self.index.use(entry, now)
            self.index.mark((key,), "idle")
            found += 1
        for at in range(found, len(keys)):
            parent = keys[at - 1] if at else b""
            if at:
                above = self.index.get(parent)
                if above is None:
                    break
                self.index.hold(above)
            while len(self.index) >= self.most and (victim := self.index.victim()) is not None:
                self.index.mark_deleted(victim)
                self.index.forget(victim)
            if at and above is not None:
                self.index.release(above)
            name = Name(keys[at], parent, b"", at * TOKENS, CHUNK_BYTES)
            self.index.add(IndexEntry(keys[at], parent, name, CHUNK_BYTES, now, now))
        return found

    def mark(self, keys: Sequence[bytes], standing: Standing) -> None:
        self.index.mark(keys, standing)


@dataclass(order=True)
class Worker:
    """An agent at work."""

    at: float
    """Start of its next turn, in seconds."""
    number: int
    keys: list[bytes] = field(compare=False)
    waiting: bool = field(default=False, compare=False)
    dead_end: tuple[int, int] | None = field(default=None, compare=False)
    """Where the abandoned branch began, and how many turns it still gets."""


@dataclass
class Event:
    """A turn with a context and its standing afterwards, or a context whose end is superseded."""

    at: float
    keys: list[bytes]
    standing: Standing | None
    left: int = 0
    """Leading chunks that are not superseded."""


def day(seed: int) -> Iterator[Event]:
    """Return the events of a day, in order."""
    rng = random.Random(seed)
    workers = []
    for number in range(AGENTS):
        opening = _grown([], OPENING, f"kind {number % KINDS}")
        workers.append(Worker(rng.uniform(0, 0.6 * DAY), number, opening))
    heapq.heapify(workers)
    while workers and workers[0].at < DAY:
        one = heapq.heappop(workers)
        if one.dead_end is not None and one.dead_end[1] <= 0:
            yield Event(one.at, list(one.keys), "superseded", one.dead_end[0])
            one.keys, one.dead_end = one.keys[: one.dead_end[0]], None
        one.keys = _grown(one.keys, rng.randint(1, 9), f"{one.number} {rng.random()}")
        if len(one.keys) > MOST:
            continue
        in_call = rng.random() < 0.8
        was, one.waiting = one.waiting, in_call
        yield Event(one.at, list(one.keys), "waiting" if in_call else "idle" if was else None)
        if one.dead_end is not None:
            one.dead_end = one.dead_end[0], one.dead_end[1] - 1
        elif rng.random() < 0.08:
            one.dead_end = len(one.keys), rng.randint(2, 7)
        if in_call:
            one.at += min(2400.0, rng.lognormvariate(3.5, 1.6))
        elif rng.random() < 0.55:
            one.at += rng.expovariate(1 / 3600)
        else:
            continue
        heapq.heappush(workers, one)


def _grown(keys: list[bytes], count: int, salt: str) -> list[bytes]:
    grown = list(keys)
    for at in range(count):
        before = grown[-1] if grown else b""
        grown.append(hashlib.sha256(before + f"{salt} {at}".encode()).digest())
    return grown


def computed_again(events: Sequence[Event], tier: Tier, *, hints: bool) -> int:
    """Return how many tokens were computed although they had been computed before."""
    known = set[bytes]()
    again = 0
    for event in events:
        if event.standing == "superseded":
            if hints:
                tier.mark(event.keys[event.left :], "superseded")
            continue
        hits = tier.turn(event.keys, event.at)
        again += sum(key in known for key in event.keys[hits:])
        known.update(event.keys)
        if hints and event.standing is not None:
            tier.mark(event.keys, event.standing)
    return again * TOKENS


@dataclass(frozen=True)
class Figures:
    """Tokens computed again, summed over stores of two sizes."""

    plain: int
    hinted: int
    """Of the same store, when it is told the standing of contexts."""


def figures(seed: int, kind: Callable[[int], Tier]) -> Figures:
    """Play one day over stores that hold a fifth and two fifths of all its chunks."""
    events = list(day(seed))
    chunks = len({key for event in events for key in event.keys})
    sizes = (chunks // 5, 2 * chunks // 5)
    plain, hinted = (sum(computed_again(events, kind(size), hints=how) for size in sizes) for how in (False, True))
    return Figures(plain, hinted)


def run(seed: int) -> None:
    """Play one day and check the law."""
    for kind in (Memory, Disk):
        outcome = figures(seed, kind)
        law(outcome.hinted < outcome.plain, f"{kind.__name__}: {outcome}")
