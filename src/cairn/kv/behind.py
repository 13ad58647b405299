"""Write-behind: which chunks of what the pool has are to be stored, and the queue they wait in. No step waits for it.

    findable  ->  noted  --read between steps-->  queue  --writer's thread-->  stores

A chunk is noted when all its blocks can be found in the pool, and its pages are copied when the step loop has nothing
better to do; one that the pool gives up before is not stored, nor is what extends it.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from cairn.engine.base import Engine
from cairn.kv.cache import Cache
from cairn.kv.context import Context, Memory
from cairn.kv.store import CHUNK_BLOCKS, Chunk, Store
from cairn.kv.writing import Writer
from cairn.seams import Clock

DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """What is stored and how much at once. Bytes."""

    day_bytes: float = 100e9
    """Written a day for contexts that came only once; then only what comes again is written."""
    queue_bytes: int = 256 << 20
    """Of chunks that were noted and are not yet stored."""
    turn_bytes: int = 32 << 20
    """Copied between two steps at most; one chunk always may be."""


@dataclass(frozen=True, slots=True)
class _Noted:
    """A chunk whose pages are still only in the pool."""

    chunk: Chunk
    blocks: tuple[bytes, ...]
    """Keys of its blocks."""


class Behind:
    """What waits to be written. One thread calls; the writer's thread sees chunks only."""

    def __init__(
        self, cache: Cache, engine: Engine, clock: Clock, store: Store, writer: Writer, limits: WriteLimits
    ) -> None:
        """`store`: the most durable one, whose chunks need not be written again."""
        self._cache = cache
        self._engine = engine
        self._clock = clock
        self._store = store
        self._writer = writer
        self._limits = limits
        self._sizes = tuple(CHUNK_BLOCKS * size for size in cache.info.block_bytes)
        self._noted: deque[_Noted] = deque()
        self._outstanding: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """Serial and bytes of every chunk that is noted, queued or being written."""
        self._serial = 0
        self._touched = Memory()
        self._stored = Memory()
        self._flushes: deque[tuple[int, int, Callable[[int], None]]] = deque()
        self._day = clock.now()
        self._day_bytes = 0
        self.bytes = 0
        """Of all outstanding chunks."""
        self.dropped = 0
        """Chunks that were given up: the queue was full, the pool needed their blocks, or no store took them."""
        self.budget_spent = 0
        """Chunks that were not stored at first touch because the day's bytes were written."""

    @property
    def chunks(self) -> int:
        """Chunks that are noted, queued or being written."""
        return len(self._outstanding)

    def findable(self, context: Context, tokens: Sequence[int]) -> None:
        """The pool has more of this context: note the chunks that are whole and should be stored.

        A context that must not be stored leaves no trace here: the next to come with the same tokens is the first.
        """
        if not context.stored:
            return
        for number, published in enumerate(context.published):
            while context.noted[number] < published // CHUNK_BLOCKS:
                self._note(context, number, context.noted[number], tokens)
                context.noted[number] += 1

    def not_yet(self, context: Context, index: int, tokens: Sequence[int]) -> bool:
        """Whether the chunk with this block of the first group was seen and, as far as is remembered, never stored."""
        last = (index // CHUNK_BLOCKS + 1) * CHUNK_BLOCKS - 1
        if (last + 1) * self._cache.info.block_tokens > len(tokens):
            return False
        key = context.chains[0].key(last, tokens)
        return key in self._touched and key not in self._stored

    def pressing(self) -> bool:
        """Whether to read now although requests want a step: the queue is half full, somebody waits for it, or the
        pool is about to need the blocks."""
        short = any(pool.free * 8 < pool.size for pool in self._cache.pools)
        return bool(self._noted) and (short or bool(self._flushes) or self.bytes * 2 >= self._limits.queue_bytes)

    def turn(self, idle: bool) -> bool:
        """Copy what is noted into the queue, as much as one turn may. True if there is more to do at once."""
        self._settle()
        room = self._limits.turn_bytes
        while self._noted and room > 0 and (idle or self.pressing()):
            room -= self._read(self._noted.popleft())
        while self._flushes and not self._waits_for(self._flushes[0][0]):
            _, dropped, done = self._flushes.popleft()
            done(self.dropped - dropped)
        return bool(self._noted) and (idle or self.pressing())

    def flush(self, done: Callable[[int], None]) -> None:
        """Call `done` when all that was noted until now is stored, with the chunks that were given up meanwhile."""
        self._flushes.append((self._serial + 1, self.dropped, done))

    def forget(self, keys: Collection[bytes]) -> None:
        """Do not write these any more, unless they are in the queue already."""
        for noted in [noted for noted in self._noted if noted.chunk.key in keys]:
            self._noted.remove(noted)
            self._done_with(noted.chunk.key)

    def finish(self) -> None:
        """Read all that is noted: the last turn."""
        while self._noted:
            self._read(self._noted.popleft())

    def _settle(self) -> None:
        """Take note of what the writer has finished."""
        while self._writer.finished:
            key, kept = self._writer.finished.popleft()
            self._done_with(key)
            if kept:
                self._stored.add(key)
            else:
                self.dropped += 1

    def _waits_for(self, serial: int) -> bool:
        """Whether a chunk noted before then is still outstanding."""
        first = next(iter(self._outstanding.values()), None)
        return first is not None and first[0] < serial

    def _note(self, context: Context, number: int, index: int, tokens: Sequence[int]) -> None:
        """Decide about one whole chunk of a context: it is stored, outstanding, not wanted (yet), or noted now."""
        chain, last = context.chains[number], (index + 1) * CHUNK_BLOCKS - 1
        key = chain.key(last, tokens)
        if key in self._outstanding or self._durable(key):
            return
        again = key in self._touched
        self._touched.add(key)
        if not again:
            if not context.durable:
                return
            if not self._within_day():
                self.budget_spent += 1
                return
        size = self._sizes[number]
        parent = chain.key(last - CHUNK_BLOCKS, tokens) if index else b""
        if not self._has_parent(parent):
            return
        if self.bytes + size > self._limits.queue_bytes:
            self.dropped += 1
            return
        width = CHUNK_BLOCKS * self._cache.info.block_tokens
        part = tuple(tokens[index * width : (index + 1) * width])
        blocks = tuple(chain.key(last - CHUNK_BLOCKS + 1 + one, tokens) for one in range(CHUNK_BLOCKS))
        self._noted.append(_Noted(Chunk(key, parent, part, index * width, b"", number), blocks))
        self._serial += 1
        self._outstanding[key] = self._serial, size
        self.bytes += size

    def _read(self, noted: _Noted) -> int:
        """Copy a noted chunk's pages out of the pool and queue it; returns the bytes."""
        chunk, size = noted.chunk, self._cache.info.block_tokens
        pool = self._cache.pools[chunk.group]
        parts = (chunk.tokens[at : at + size] for at in range(0, len(chunk.tokens), size))
        blocks = [pool.find(key, part) for key, part in zip(noted.blocks, parts, strict=True)]
        found = [block for block in blocks if block is not None]
        if len(found) < len(blocks) or not self._has_parent(chunk.parent):
            self._done_with(chunk.key)
            self.dropped += 1
            return 0
        pages = b"".join(self._engine.read_blocks(chunk.group, found).wait())
        self._writer.push(dataclasses.replace(chunk, pages=pages))
        self._day_bytes += len(pages)
        return len(pages)

    def _durable(self, key: bytes) -> bool:
        return self._store.leading((key,)) == 1

    def _has_parent(self, parent: bytes) -> bool:
        return not parent or parent in self._outstanding or self._durable(parent)

    def _within_day(self) -> bool:
        if self._clock.now() - self._day >= DAY_SECONDS:
            self._day, self._day_bytes = self._clock.now(), 0
        return self._day_bytes < self._limits.day_bytes

    def _done_with(self, key: bytes) -> None:
        _, size = self._outstanding.pop(key)
        self.bytes -= size
