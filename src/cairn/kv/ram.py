"""A store in host memory, for engines whose pool is elsewhere: KV that a GPU evicts comes back without a disk.

Leaves first: a chunk is evicted only when nothing here extends it, the least recently used first. Superseded chunks
(`Standing`) go before all others; chunks that wait for their next turn outlive others used at the same time, until as
many bytes as the whole budget were stored after them.
"""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from cairn.kv.tiers.store import HEAD_BYTES, Chunk, Standing, Standings, Watch, later, spared
from cairn.types.stats import TierStats

_CHUNK_OVERHEAD = 1024
"""Approximate bytes that a chunk takes beside its pages: 64 tokens, keys and the index."""


class Leaves:
    """The order of eviction: when chunks were used, and which of them nothing extends.

    Time is counted in bytes stored.
    """

    def __init__(self, patience: int) -> None:
        """Set how many bytes longer (`patience`) waiting chunks stay than others that were used at the same time."""
        self._patience = patience
        self._used: dict[bytes, tuple[int, int]] = {}
        """Bytes stored before the last use of each chunk, and that use's serial number."""
        self._order: list[tuple[float, int, bytes]] = []
        self._places: dict[bytes, tuple[float, int, bytes]] = {}
        self._uses = 0
        self._standings = Standings()

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the keys in the order of eviction. Start a new iteration after a change."""
        return (key for _, _, key in self._order)

    def use(self, key: bytes, now: int) -> None:
        """Record a use of a chunk."""
        self._uses += 1
        self._used[key] = now, self._uses
        self._move(key)

    def add(self, key: bytes) -> None:
        """Add a chunk that nothing extends any more."""
        self._places.setdefault(key, (0, 0, b""))
        self._move(key)

    def extend(self, key: bytes) -> None:
        """Take a chunk out of the order because another one extends it now."""
        if (place := self._places.pop(key, None)) is not None and place[2]:
            del self._order[bisect.bisect_left(self._order, place)]

    def remove(self, key: bytes, parent: bytes) -> None:
        """Forget a chunk; its parent inherits its last use."""
        self.extend(key)
        used = self._used.pop(key)
        if parent in self._used:
            self._used[parent] = max(self._used[parent], used)
            self._move(parent)

    def mark(self, keys: Iterable[bytes], standing: Standing) -> None:
        """Set the standing of chunks, also of those that are stored later."""
        for key in self._standings.set(keys, standing):
            self._move(key)

    def _move(self, key: bytes) -> None:
        if key in self._places:
            self.extend(key)
            kept, number = self._used[key]
            place = self._places[key] = (kept + later(self._standings.of(key), self._patience), number, key)
            bisect.insort(self._order, place)


class RamStore:
    """A `Store` in memory with a budget in bytes. Every call is short, under one lock."""

    def __init__(self, budget: int) -> None:
        self._lock = threading.Lock()
        self._chunks: dict[bytes, Chunk] = {}
        self._children: dict[bytes, set[bytes]] = {}
        """Keys of the chunks here that extend a chunk, which may itself not be here."""
        self._leaves = Leaves(budget)
        """Chunks that nothing here extends, in the order of eviction."""
        self._chunks_by_head: dict[bytes, set[bytes]] = {}
        """Keys of the chunks here by the heads of the blocks that they contain."""
        self._pins: dict[str, frozenset[bytes]] = {}
        self._pinned_heads = Counter[bytes]()
        """Number of pinned keys by head."""
        self._pinned_chunks = Counter[bytes]()
        """Number of pinned heads in each chunk here that has any. Counted with each change: figures are asked for
        between steps."""
        self._stats = TierStats(budget=budget)
        self._watch: Watch | None = None

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        """See `Store`."""
        with self._lock:
            return next((count for count, key in enumerate(keys) if key not in self._chunks), len(keys))

    def has(self, key: bytes) -> bool:
        """See `Store`."""
        with self._lock:
            return key in self._chunks

    def kept_bytes(self, group: int, size: int) -> int:
        """See `Store`."""
        return size + _CHUNK_OVERHEAD

    def match_within(self, keys: Sequence[bytes]) -> tuple[int, bytes] | None:
        """See `Store`."""
        found: tuple[int, bytes] | None = None
        with self._lock:
            for count, key in enumerate(keys, 1):
                if not (having := self._chunks_by_head.get(key[:HEAD_BYTES])):
                    break
                found = count, max(having, key=lambda one: len(self._chunks[one].heads))
        return found

    def fetch(self, key: bytes, tokens: Sequence[int], buffer: memoryview | None = None) -> Chunk | None:
        """See `Store`. The pages are not copied."""
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None or chunk.tokens[: len(tokens)] != tuple(tokens):
                return None
            self._leaves.mark((key,), "idle")
            self._leaves.use(key, self._stats.written)
            self._count(read=_size(chunk))
            return chunk

    def keep(self, chunks: Sequence[Chunk]) -> int:
        """See `Store`. A chunk without its parent or without room is refused, and so are those after it."""
        with self._lock:
            for count, chunk in enumerate(chunks):
                if chunk.key in self._chunks or self._chunks_by_head.get(chunk.key[:HEAD_BYTES]):
                    continue
                orphan = bool(chunk.parent) and chunk.parent not in self._chunks
                if orphan or not self._make_room(_size(chunk), chunk.parent):
                    left = chunks[count:]
                    self._count(refused=len(left) - len(spared(left)))
                    return count
                self._chunks[chunk.key] = chunk
                self._children.setdefault(chunk.parent, set()).add(chunk.key)
                for head in _heads(chunk):
                    self._chunks_by_head.setdefault(head, set()).add(chunk.key)
                if pinned := sum(head in self._pinned_heads for head in set(_heads(chunk))):
                    self._pinned_chunks[chunk.key] = pinned
                self._leaves.extend(chunk.parent)
                self._leaves.use(chunk.key, self._stats.written)
                if chunk.once:
                    self._leaves.mark((chunk.key,), "once")
                if chunk.key not in self._children:
                    self._leaves.add(chunk.key)
                self._count(chunks=1, bytes=_size(chunk), written=_size(chunk))
                if self._watch is not None:
                    self._watch(True, _heads(chunk), chunk.parent[:HEAD_BYTES])
                tails = [one for head in chunk.heads for one in self._chunks_by_head[head] if one[:HEAD_BYTES] == head]
                self._drop(tails)
            return len(chunks)

    def drop(self, keys: Sequence[bytes]) -> int:
        """See `Store`."""
        with self._lock:
            return self._drop(keys)

    def _drop(self, keys: Sequence[bytes]) -> int:
        """Remove these chunks and all that extend them; return how many were removed."""
        family, waiting = [], list(keys)
        while waiting:
            key = waiting.pop()
            family.append(key)
            waiting += self._children.get(key, ())
        # Children were found after their parents, so they are removed before them.
        return sum(self._remove(key) for key in reversed(dict.fromkeys(family)))

    def pin(self, owner: str, keys: Sequence[bytes]) -> None:
        """See `Store`; durable here means as long as this store."""
        new = frozenset(keys)
        with self._lock:
            old = self._pins.pop(owner, frozenset())
            if new:
                self._pins[owner] = new
            # Only what differs: a pin is replaced after each turn of its agent, and most of it stays.
            for key in new - old:
                self._pinned_heads[key[:HEAD_BYTES]] += 1
                if self._pinned_heads[key[:HEAD_BYTES]] == 1:
                    self._pinned_chunks.update(self._chunks_by_head.get(key[:HEAD_BYTES], ()))
            for key in old - new:
                self._unpin(key[:HEAD_BYTES])

    def _unpin(self, head: bytes) -> None:
        self._pinned_heads[head] -= 1
        if self._pinned_heads[head]:
            return
        del self._pinned_heads[head]
        for key in self._chunks_by_head.get(head, ()):
            self._pinned_chunks[key] -= 1
            if not self._pinned_chunks[key]:
                del self._pinned_chunks[key]

    def mark(self, keys: Sequence[bytes], standing: Standing) -> None:
        """See `Store`."""
        with self._lock:
            self._leaves.mark(keys, standing)

    def watch(self, watch: Watch | None) -> None:
        """See `WatchedStore`."""
        with self._lock:
            self._watch = watch
            if watch is not None:
                for chunk in self._chunks.values():
                    watch(True, _heads(chunk), chunk.parent[:HEAD_BYTES])

    def durable(self) -> None:
        """Return None: the store ends with the process."""

    def stats(self) -> TierStats:
        """See `Store`."""
        with self._lock:
            return msgspec.structs.replace(self._stats, pinned=len(self._pinned_chunks))

    def close(self) -> None:
        """Release the memory."""
        with self._lock:
            self._chunks.clear()
            self._children.clear()
            self._chunks_by_head.clear()
            self._pinned_chunks.clear()
            self._leaves = Leaves(0)

    def _make_room(self, size: int, parent: bytes) -> bool:
        """Evict leaves other than `parent`, which is about to be extended, until `size` bytes fit.

        Return False if they do not fit.
        """
        while self._stats.bytes + size > self._stats.budget:
            free = (key for key in self._leaves if key != parent and key not in self._pinned_chunks)
            victim = next(free, None)
            if victim is None:
                return False
            self._remove(victim)
            self._count(evicted=1)
        return True

    def _remove(self, key: bytes) -> bool:
        chunk = self._chunks.pop(key, None)
        if chunk is None:
            return False
        self._pinned_chunks.pop(key, None)
        gone = []
        for head in _heads(chunk):
            self._chunks_by_head[head].discard(key)
            if not self._chunks_by_head[head]:
                del self._chunks_by_head[head]
                gone.append(head)
        if gone and self._watch is not None:
            self._watch(False, gone, chunk.parent[:HEAD_BYTES])
        self._leaves.remove(key, chunk.parent)
        siblings = self._children[chunk.parent]
        siblings.discard(key)
        if not siblings:
            del self._children[chunk.parent]
            if chunk.parent in self._chunks:
                self._leaves.add(chunk.parent)
        self._count(chunks=-1, bytes=-_size(chunk))
        return True

    def _count(self, **changes: int) -> None:
        now = {name: getattr(self._stats, name) + change for name, change in changes.items()}
        self._stats = msgspec.structs.replace(self._stats, **now)


def _heads(chunk: Chunk) -> tuple[bytes, ...]:
    """Return the heads of all blocks of a chunk."""
    return (*chunk.heads, chunk.key[:HEAD_BYTES])


def _size(chunk: Chunk) -> int:
    return len(memoryview(chunk.pages).cast("B")) + _CHUNK_OVERHEAD
