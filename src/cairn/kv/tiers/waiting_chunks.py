"""Chunks whose pages are still only in the pool: what they will contain, and the queues to copy them."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cairn.kv.pool.cache import Cache, lead
from cairn.kv.pool.sequence_kv import SequenceKV
from cairn.kv.tiers.store import HEAD_BYTES, Chunk
from cairn.system.interfaces import Clock
from cairn.types.model_spec import CHUNK_BLOCKS


@dataclass(frozen=True, slots=True)
class NotedChunk:
    """A chunk whose pages are still only in the pool."""

    chunk: Chunk
    blocks: tuple[bytes, ...]
    """Keys of the blocks whose pages it has."""
    first: bytes
    """Key of the first block of its tokens."""
    tails: tuple[bytes, ...]
    """Keys of the tails that it would replace, whether they exist or not."""
    at: float
    """When it was noted, or its sequence ended."""
    spare: bool
    """Whether it is copied only when nothing else is left to copy."""


class PoolChunks:
    """The contents of the pools, as chunks and tails."""

    def __init__(self, cache: Cache, clock: Clock, has_parent: Callable[[bytes], bool]) -> None:
        """Describe a cache's chunks. `has_parent` returns whether the chunk with a key is stored or will be."""
        self._cache, self._clock, self._has_parent = cache, clock, has_parent
        self._size = cache.info.block_tokens
        self._lead = lead(cache.info.groups)
        self.order = sorted(range(len(cache.pools)), key=lambda number: self.is_state(number))
        """Numbers of groups, states last: they extend KV."""

    def is_state(self, number: int) -> bool:
        """Return whether a group keeps states."""
        return self._cache.info.groups[number].kind == "state"

    def describe(self, seq_kv: SequenceKV, number: int, last: int, tokens: Sequence[int], *, spare: bool) -> NotedChunk:
        """Return the chunk, or tail, of a sequence that ends with block `last`."""
        chain, size, state = seq_kv.chains[number], self._size, self.is_state(number)
        first = last // CHUNK_BLOCKS * CHUNK_BLOCKS
        keys = tuple(chain.key(one, tokens) for one in range(first, last + 1))
        above, parent = self._parent(seq_kv, number, last, tokens)
        chunk = Chunk(
            key=keys[-1],
            parent=parent,
            tokens=tuple(tokens[first * size : (last + 1) * size]),
            depth=(last + 1 if state else first) * size,
            pages=b"",
            group=number,
            heads=() if state else tuple(key[:HEAD_BYTES] for key in keys[:-1]),
            once=seq_kv.progress.once,
        )
        ends = (one for one in range(above, last) if (one + 1) % CHUNK_BLOCKS)
        tails = tuple(chain.key(one, tokens) for one in ends)
        return NotedChunk(chunk, keys[-1:] if state else keys, keys[0], tails, self._clock.now(), spare)

    def before(self, noted: NotedChunk, block: bytes) -> NotedChunk | None:
        """Return what a chunk has before one of its blocks, as a tail; None if that is its first block or a state."""
        count, chunk = noted.blocks.index(block), noted.chunk
        if not count:
            return None
        shorter = dataclasses.replace(
            chunk,
            key=noted.blocks[count - 1],
            tokens=chunk.tokens[: count * self._size],
            heads=chunk.heads[: count - 1],
        )
        return dataclasses.replace(
            noted,
            chunk=shorter,
            blocks=noted.blocks[:count],
            tails=noted.tails[: count - 1],
            at=self._clock.now(),
        )

    def _parent(self, seq_kv: SequenceKV, number: int, last: int, tokens: Sequence[int]) -> tuple[int, bytes]:
        """Return where the parent of the chunk that ends with block `last` ends, in blocks, and its key.

        The key is empty for the first chunk. A state extends the KV of its own chunk.
        """
        key, first = seq_kv.chains[number].key, last // CHUNK_BLOCKS * CHUNK_BLOCKS
        if not self.is_state(number):
            return first, key(first - 1, tokens) if first else b""
        if not self.is_state(self._lead):
            return first, seq_kv.chains[self._lead].key(last, tokens)
        ends = ((end, key(end - 1, tokens)) for end in range(first, 0, -CHUNK_BLOCKS))
        return next((one for one in ends if self._has_parent(one[1])), (0, b""))

    def last_state(self, seq_kv: SequenceKV, number: int, first: int, last: int, tokens: Sequence[int]) -> int:
        """Return the last block up to `last` after which a pool has the state; `first` if there is none."""
        return next((end for end in range(last, first, -1) if self._has_state(seq_kv, number, end, tokens)), first)

    def is_settled(self, seq_kv: SequenceKV, number: int, boundary: int, tokens: Sequence[int]) -> bool:
        """Return whether a pool has the state after so many blocks, and the next one will not replace it."""
        found = self._has_state(seq_kv, number, boundary, tokens)
        return found and seq_kv.table.snapshots.passing != boundary

    def _has_state(self, seq_kv: SequenceKV, number: int, end: int, tokens: Sequence[int]) -> bool:
        return self._cache.has(seq_kv, number, range(end - 1, end), tokens)

    def find(self, noted: NotedChunk) -> list[int] | None:
        """Return the blocks of a noted chunk; None if the pool no longer has all of them."""
        chunk, size = noted.chunk, self._size
        pool = self._cache.pools[chunk.group]
        begin = len(chunk.tokens) - len(noted.blocks) * size
        parts = (chunk.tokens[at : at + size] for at in range(begin, len(chunk.tokens), size))
        blocks = [pool.find(key, part) for key, part in zip(noted.blocks, parts, strict=True)]
        found = [block for block in blocks if block is not None]
        return found if len(found) == len(blocks) else None

    def is_used(self, noted: NotedChunk) -> bool:
        """Return whether a running sequence holds one of the blocks."""
        pool, blocks = self._cache.pools[noted.chunk.group], self.find(noted) or ()
        return any(pool.holders(block) for block in blocks)


class WaitingChunks:
    """The queues of chunks to copy. A chunk is in at most one of them."""

    def __init__(self, groups: int, clock: Clock) -> None:
        self._clock = clock
        self.noted: OrderedDict[bytes, NotedChunk] = OrderedDict()
        """Chunks to copy, parents before children, except those that were lost and noted again."""
        self.spare: OrderedDict[bytes, NotedChunk] = OrderedDict()
        """Chunks to copy when nothing else is left, in the same order; their parents may be in `noted`, but not the
        reverse."""
        self.tails: OrderedDict[bytes, NotedChunk] = OrderedDict()
        """Tails of sequences that have ended, in the order in which they ended."""
        self.users: dict[bytes, list[bytes]] = {}
        """Keys of the waiting chunks that contain each block; several may, since sequences can diverge within a
        chunk."""
        self.blocks = [0] * groups
        """Number of blocks of each group that are part of noted chunks."""

    def __iter__(self) -> Iterator[NotedChunk]:
        """Iterate over the chunks of all queues."""
        return iter((*self.noted.values(), *self.spare.values(), *self.tails.values()))

    @property
    def next(self) -> NotedChunk | None:
        """The chunk to copy next: the first of `noted`, else of `spare`, or its earliest ancestor that waits."""
        first = next(iter((self.noted or self.spare).values()), None)
        return None if first is None else self.line(first)[-1]

    def line(self, noted: NotedChunk, most: float = math.inf) -> list[NotedChunk]:
        """Return a noted chunk followed by its waiting ancestors, nearest first; at most `most` in all."""
        line = [noted]
        while len(line) < most:
            parent = line[-1].chunk.parent
            above = self.noted.get(parent) or self.spare.get(parent)
            if above is None:
                break
            line.append(above)
        return line

    def insert(self, queue: OrderedDict[bytes, NotedChunk], noted: NotedChunk) -> None:
        """Append a chunk to one of the queues."""
        queue[noted.chunk.key] = noted
        for block in noted.blocks:
            self.users.setdefault(block, []).append(noted.chunk.key)
        if queue is self.noted:
            self.blocks[noted.chunk.group] += len(noted.blocks)

    def remove(self, queue: OrderedDict[bytes, NotedChunk], key: bytes) -> NotedChunk:
        """Take a chunk out of its queue and return it."""
        noted = queue.pop(key)
        for block in noted.blocks:
            self.users[block].remove(key)
            if not self.users[block]:
                del self.users[block]
        if queue is self.noted:
            self.blocks[noted.chunk.group] -= len(noted.blocks)
        return noted

    def unnote(self, key: bytes) -> None:
        """Take a noted or spare chunk out of its queue."""
        self.remove(self.noted if key in self.noted else self.spare, key)

    def promote(self, key: bytes, *, wanted: bool = False) -> None:
        """Move a spare chunk, after its spare ancestors, to `noted`; `wanted`: another sequence wants it too."""
        line = []
        while key in self.spare:
            line.append(self.remove(self.spare, key))
            key = line[-1].chunk.parent
        for noted in reversed(line):
            chunk = dataclasses.replace(noted.chunk, once=noted.chunk.once and not wanted)
            self.insert(self.noted, dataclasses.replace(noted, chunk=chunk, spare=False, at=self._clock.now()))

    def superseded(self, noted: NotedChunk) -> list[bytes]:
        """Return the keys of waiting tails that a chunk replaces."""
        return [key for key in noted.tails if key in self.users.get(key, ())]

    def has_longer(self, key: bytes) -> bool:
        """Return whether a waiting chunk begins with the tail of this key."""
        return any(one != key for one in self.users.get(key, ()))
