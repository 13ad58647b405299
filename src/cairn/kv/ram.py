"""A store in host memory, for engines whose pool is not host memory: what a GPU forgets comes back without a disk.

Leaves first: a chunk goes only when nothing here extends it, the one used longest ago before the others.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from cairn.kv.store import Chunk, spared
from cairn.stats import TierStats

_CHUNK_OVERHEAD = 1024
"""Bytes that a chunk takes beside its pages, about: 64 tokens, keys and the index."""


class RamStore:
    """`Store` with a budget in bytes. Every call is short, under one lock."""

    def __init__(self, budget: int) -> None:
        self._lock = threading.Lock()
        self._chunks: dict[bytes, Chunk] = {}
        self._children: dict[bytes, set[bytes]] = {}
        """Keys of the chunks here that extend a chunk, which may itself not be here."""
        self._leaves: OrderedDict[bytes, None] = OrderedDict()
        """Chunks that nothing here extends, the one used longest ago first."""
        self._pins: dict[str, frozenset[bytes]] = {}
        self._stats = TierStats(budget=budget)

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        """See `Store`."""
        with self._lock:
            return next((count for count, key in enumerate(keys) if key not in self._chunks), len(keys))

    def fetch(self, key: bytes, tokens: Sequence[int], buffer: memoryview | None = None) -> Chunk | None:
        """See `Store`. No copy."""
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None or chunk.tokens != tuple(tokens):
                return None
            if key in self._leaves:
                self._leaves.move_to_end(key)
            self._count(read=_size(chunk))
            return chunk

    def keep(self, chunks: Sequence[Chunk]) -> int:
        """See `Store`. A chunk without its parent or without room is refused, and those after it."""
        with self._lock:
            for count, chunk in enumerate(chunks):
                if chunk.key in self._chunks:
                    continue
                orphan = bool(chunk.parent) and chunk.parent not in self._chunks
                if orphan or not self._make_room(_size(chunk), chunk.parent):
                    left = chunks[count:]
                    self._count(refused=len(left) - len(spared(left)))
                    return count
                self._chunks[chunk.key] = chunk
                self._children.setdefault(chunk.parent, set()).add(chunk.key)
                self._leaves.pop(chunk.parent, None)
                if chunk.key not in self._children:
                    self._leaves[chunk.key] = None
                self._count(chunks=1, bytes=_size(chunk), written=_size(chunk))
            return len(chunks)

    def drop(self, keys: Sequence[bytes]) -> int:
        """See `Store`."""
        with self._lock:
            family, waiting = [], list(keys)
            while waiting:
                key = waiting.pop()
                family.append(key)
                waiting += self._children.get(key, ())
            # What extends was found after what it extends.
            return sum(self._remove(key) for key in reversed(dict.fromkeys(family)))

    def pin(self, owner: str, keys: Sequence[bytes]) -> None:
        """See `Store`; durable here means as long as this store."""
        with self._lock:
            self._pins.pop(owner, None)
            if keys:
                self._pins[owner] = frozenset(keys)

    def stats(self) -> TierStats:
        """See `Store`."""
        with self._lock:
            pinned = frozenset[bytes]().union(*self._pins.values())
            return msgspec.structs.replace(self._stats, pinned=sum(key in self._chunks for key in pinned))

    def close(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._chunks.clear()
            self._children.clear()
            self._leaves.clear()

    def _make_room(self, size: int, parent: bytes) -> bool:
        """Evict leaves until `size` bytes fit; never `parent`, which is about to be extended."""
        while self._stats.bytes + size > self._stats.budget:
            pinned = self._pins.values()
            free = (key for key in self._leaves if key != parent and not any(key in keys for keys in pinned))
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
        self._leaves.pop(key, None)
        siblings = self._children[chunk.parent]
        siblings.discard(key)
        if not siblings:
            del self._children[chunk.parent]
            if chunk.parent in self._chunks:
                # Only of leaves it is known when they were used. What extended it was the oldest, so it is next.
                self._leaves[chunk.parent] = None
                self._leaves.move_to_end(chunk.parent, last=False)
        self._count(chunks=-1, bytes=-_size(chunk))
        return True

    def _count(self, **changes: int) -> None:
        now = {name: getattr(self._stats, name) + change for name, change in changes.items()}
        self._stats = msgspec.structs.replace(self._stats, **now)


def _size(chunk: Chunk) -> int:
    return len(memoryview(chunk.pages).cast("B")) + _CHUNK_OVERHEAD
