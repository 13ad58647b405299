"""Write-behind: which chunks of what the pool has are to be stored, and the queue they wait in. No step waits for it.

    findable  ->  noted  --read between steps-->  queue  --writer's thread-->  stores

A chunk is noted when all its blocks can be found in the pool. That takes no memory of its own, so there is no bound on
it but the pool. Its pages are copied when the step loop has nothing better to do, when the pool is about to need its
blocks, or when it has waited for `COPY_SECONDS`: what a crash loses of a loop that never rests. The copies are bounded
in bytes: while there is no room for more, chunks wait in the pool. One that the pool gives up meanwhile is not stored,
nor is what extends it; those that were noted are counted. What a store refused, or dropped because it was told to, is
noted once more when its context goes on, at most every `WAIT_SECONDS`.

Of a state group there are chunks only where there are snapshots, each of one block. One that the next will take the
place of waits for the end of its sequence: a state is too large to be stored every few seconds.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from cairn.kv.pool.attention_window import lead
from cairn.kv.pool.cache import Cache
from cairn.kv.pool.prefix import extend
from cairn.kv.pool.sequence_kv import RecentKeys, SequenceKV
from cairn.kv.pool.snapshots import BOUNDARY
from cairn.kv.tiers.chunk_lookup import Tail
from cairn.kv.tiers.store import Chunk, Store, chunk_pages, chunk_sizes
from cairn.kv.tiers.store_writer import StoreWriter
from cairn.system.interfaces import Clock
from cairn.types.block_size import CHUNK_BLOCKS
from cairn.types.step import Engine

COPY_SECONDS = 2.0
"""How long a chunk waits in the pool for the step loop to have nothing to do; then it is copied between two steps."""
WAIT_SECONDS = 30.0
"""How often, at most, a context that goes on has the chunks noted once more that a store refused or dropped."""
DAY_SECONDS = 86_400.0

Flushed = Callable[[int], None]
"""Gets the number of chunks that were given up."""


@dataclass(slots=True)
class _Flush:
    before: int
    done: Flushed
    counts: bool
    lost: int


class Flushes:
    """Who waits until everything noted so far is stored, and what they are told was given up.

    Chunks are known by serials in the order in which they were noted.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Flush] = deque()
        self._untold = 0
        """Chunks given up that nobody was told of."""

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiting)

    def add(self, before: int, done: Flushed, *, counts: bool) -> None:
        """`done` waits for all chunks `before` a serial.

        Where it `counts`, it is told of those that were given up, and of earlier ones that nobody was told of.
        """
        self._waiting.append(_Flush(before, done, counts, self._untold if counts else 0))
        if counts:
            self._untold = 0

    def lose(self, serial: int) -> None:
        """A chunk is given up: whoever waits for it is told, or else whoever comes next."""
        waiting = [flush for flush in self._waiting if flush.counts and serial < flush.before]
        for flush in waiting:
            flush.lost += 1
        if not waiting:
            self._untold += 1

    def answer(self, oldest: Callable[[], float]) -> None:
        """Call those that wait for nothing any more. `oldest`: serial of the oldest chunk that is outstanding."""
        while self._waiting and oldest() >= self._waiting[0].before:
            flush = self._waiting.popleft()
            flush.done(flush.lost)


class DayBudget:
    """How many bytes may be written a day. What no store took is given back."""

    def __init__(self, clock: Clock, limit: float) -> None:
        self._clock, self._limit = clock, limit
        self._day, self._spent = clock.now(), 0

    @property
    def left(self) -> bool:
        """Whether something may still be written today."""
        if self._clock.now() - self._day >= DAY_SECONDS:
            self._day, self._spent = self._clock.now(), 0
        return self._spent < self._limit

    def spend(self, size: int) -> None:
        """So much is to be written."""
        self._spent += size

    def refund(self, size: int) -> None:
        """So much was not written after all, perhaps of what was spent the day before."""
        self._spent = max(0, self._spent - size)


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """What is stored and how much at once. Bytes."""

    day_bytes: float = 100e9
    """Written a day for contexts that came only once; then only what comes again is written."""
    queue_bytes: int = 256 << 20
    """Copied out of the pool and not yet stored. One chunk always may be."""
    turn_bytes: int = 32 << 20
    """Copied between two steps at most; one chunk always may be."""


@dataclass(frozen=True, slots=True)
class _Noted:
    """A chunk whose pages are still only in the pool."""

    chunk: Chunk
    blocks: tuple[bytes, ...]
    """Keys of the blocks whose pages it has."""
    first: bytes
    """The key of the first block of its tokens."""
    at: float
    """When it was noted."""


class WriteBehind:
    """What waits to be written. One thread calls; the writer's thread sees chunks only."""

    def __init__(
        self, cache: Cache, engine: Engine, clock: Clock, store: Store, writer: StoreWriter, limits: WriteLimits
    ) -> None:
        """`store`: the most durable one, whose chunks need not be written again."""
        self._cache = cache
        self._engine = engine
        self._clock = clock
        self._store = store
        self._writer = writer
        self._limits = limits
        self._sizes = chunk_sizes(cache.info.groups, cache.info.block_bytes)
        self._pages = tuple(chunk_pages(group) for group in cache.info.groups)
        self._lead = lead(cache.info.groups)
        self._order = sorted(range(len(cache.pools)), key=lambda number: self._is_state(number))
        """Numbers of groups, states last: they extend KV."""
        self._noted: OrderedDict[bytes, _Noted] = OrderedDict()
        """Parents before children, but for those that were lost and noted again."""
        self._users: dict[bytes, list[bytes]] = {}
        """Which noted chunks a block, all by their keys, is a part of: contexts may part within a chunk."""
        self._noted_blocks = [0] * len(cache.pools)
        self._copied: dict[bytes, tuple[int, _Noted]] = {}
        """Bytes of every chunk that is queued or being written, and what was noted of it."""
        self._outstanding: OrderedDict[bytes, int] = OrderedDict()
        """Serial of every chunk that is noted, queued or being written."""
        self._serial = 0
        self._touched = RecentKeys()
        self._stored = RecentKeys()
        self._flushes = Flushes()
        self._drops = 0
        """Orders of `drop` that go on."""
        self._going: set[bytes] = set()
        """Chunks that stores are about to drop, and what would extend them."""
        self._breaks = 0
        """How often a chunk was lost or ordered away, which breaks the line of those that extend it."""
        self._budget = DayBudget(clock, limits.day_bytes)
        self.bytes = 0
        """Held outside the pool: of all chunks that are queued or being written."""
        self.dropped = 0
        """Chunks that were given up: the pool needed their blocks while the queue had no room for them and what they
        extend, or no store took them."""
        self.budget_spent = 0
        """Chunks that were not stored at first touch because the day's bytes were written."""
        for pool in cache.pools:
            pool.leaving = self._leaving

    @property
    def chunks(self) -> int:
        """Chunks that are noted, queued or being written."""
        return len(self._outstanding)

    @property
    def dropping(self) -> bool:
        """Whether stores are about to drop something."""
        return self._drops > 0

    def findable(self, context: SequenceKV, tokens: Sequence[int]) -> None:
        """The pool has more of this context: note the chunks that are whole and should be stored.

        A context that must not be stored leaves no trace here: the next to come with the same tokens is the first.
        """
        progress = context.progress
        if not progress.stored:
            return
        now = self._clock.now()
        if progress.breaks < 0:
            progress.breaks = self._breaks
        if progress.durable and progress.breaks != self._breaks and now - progress.looked >= WAIT_SECONDS:
            progress.noted, progress.breaks, progress.looked = [0] * len(progress.noted), self._breaks, now
        for number in self._order:
            stop = context.table.published[number] // CHUNK_BLOCKS
            while progress.noted[number] < stop:
                self._note(context, number, progress.noted[number], tokens)
                progress.noted[number] += 1

    def ended(self, context: SequenceKV, tokens: Sequence[int], boundary: int) -> None:
        """A context's newest snapshot, at this boundary, is its last."""
        index = boundary // BOUNDARY - 1
        for number in self._order:
            if context.progress.stored and self._is_state(number):
                self._note(context, number, index, tokens)

    def unwanted(self, key: bytes) -> None:
        """Do not write a state that is forgotten, unless another that is noted extends it."""
        if not any(one.chunk.parent == key for one in self._noted.values()):
            self.forget((key,))

    def has(self, key: bytes) -> bool:
        """Whether a chunk is stored, or is to be."""
        return key in self._outstanding or self._durable(key)

    def not_stored_yet(self, context: SequenceKV, index: int, tokens: Sequence[int]) -> bool:
        """Whether the chunk with this block of the leading group was seen and, as far as one remembers, not stored."""
        last = (index // CHUNK_BLOCKS + 1) * CHUNK_BLOCKS - 1
        if (last + 1) * self._cache.info.block_tokens > len(tokens):
            return False
        key = context.chains[self._lead].key(last, tokens)
        return key in self._touched and key not in self._stored

    def turn(self, idle: bool) -> bool:
        """Copy what is noted into the queue, as much as one turn may. True if there is more to do at once."""
        self._settle()
        room = self._limits.turn_bytes
        while room > 0 and self._ready(idle):
            room -= self._copy(self._next())
        self._flushes.answer(lambda: next(iter(self._outstanding.values()), math.inf))
        return self._ready(idle)

    def flush(self, done: Callable[[int], None], *, told: bool = True) -> None:
        """Call `done` when all that was noted until now is stored.

        It gets how many chunks were given up: of those, and since the last flush that was `told`.
        """
        self._flushes.add(self._serial + 1, done, counts=told)

    def forget(self, keys: Collection[bytes]) -> None:
        """Do not write these any more, unless they are in the queue already."""
        for key in [key for key in keys if key in self._noted]:
            self._unnote(key)
            del self._outstanding[key]

    def drop(self, keys: Collection[bytes], tails: Collection[Tail]) -> list[bytes]:
        """Stores are about to drop these and all that extends them: until `drop_done` nothing is copied that might.

        So is what begins with one of `tails`, as far as it is not stored yet: returns the keys of that, which whoever
        has not heard of all its tokens cannot know. Where somebody goes on with any of it in the pool, it is noted
        anew, to be stored once the stores are done.
        """
        self._drops += 1
        self._breaks += 1
        ahead = self._begun(tails)
        self._going.update(keys, ahead)
        known = 0
        while known < len(self._going):  # more than once, since what extends a chunk may have been noted before it
            known = len(self._going)
            self._going.update(key for key, one in self._noted.items() if one.chunk.parent in self._going)
        self.forget(self._going)
        return ahead

    def _begun(self, tails: Collection[Tail]) -> list[bytes]:
        """Chunks that are noted, queued or being written and begin with one of these."""
        size = self._cache.info.block_tokens
        return [
            one.chunk.key
            for one in (*self._noted.values(), *(one for _, one in self._copied.values()))
            for tail in tails
            if one.chunk.tokens[: len(tail.tokens)] == tail.tokens
            and one.first == extend(tail.before, one.chunk.tokens[:size])
        ]

    def drop_done(self) -> None:
        """They have: what was noted to extend them is no loss."""
        self._drops -= 1
        self._breaks += 1
        if not self._drops:
            self._going.clear()
        self._settle()
        known = -1
        while known != len(self._noted):
            known = len(self._noted)
            for noted in list(self._noted.values()):
                if not self._has_parent(noted.chunk.parent):
                    self.forget((noted.chunk.key,))

    def finish(self, grace: float) -> None:
        """Copy all that is noted as the writer makes room, for `grace` seconds at most: the last turn."""
        end = self._clock.now() + grace
        while self._noted:
            self._settle()
            if self._fits(self._next()):
                self._copy(self._next())
            elif not self._writer.wait(end - self._clock.now()):
                return

    def left(self) -> int:
        """Chunks that were not stored, when the writer has ended."""
        self._settle()
        return self.chunks

    def _ready(self, idle: bool) -> bool:
        """Whether to copy the next chunk now; `idle` as in `Tiers.turn`."""
        wanted = bool(self._noted) and not self._drops
        return wanted and self._fits(self._next()) and (idle or self._pressing())

    def _pressing(self) -> bool:
        """Whether to copy although requests want a step: somebody waits for it, or the pool is about to need blocks."""
        if self._flushes or self._clock.now() - self._next().at > COPY_SECONDS:
            return True
        pools = zip(self._cache.pools, self._noted_blocks, strict=True)
        return any(noted and (pool.available - noted) * 8 < pool.size for pool, noted in pools)

    def _leaving(self, block: bytes) -> None:
        """The pool is about to give up a block: copy its chunks, after all noted ones they extend, or give them up."""
        for key in tuple(self._users.get(block, ())):
            room = (self._limits.queue_bytes - self.bytes) // self._sizes[self._noted[key].chunk.group]
            line = self._line(self._noted[key], max(1, room) + 1)  # one more than fit is as good as all of a long one
            if self._fits(*line):
                for one in reversed(line):
                    self._copy(one)
            else:
                self._give_up(line[0])

    def _settle(self) -> None:
        """Take note of what the writer has finished."""
        while self._writer.finished:
            key, kept = self._writer.finished.popleft()
            size, serial = self._written(key)
            if kept:
                self._stored.add(key)
            else:
                self._budget.refund(size)
                self._lose(serial)

    def _note(self, context: SequenceKV, number: int, index: int, tokens: Sequence[int]) -> None:
        """Decide about one whole chunk of a context: it is stored, outstanding, not wanted (yet), or noted now."""
        chain, last = context.chains[number], (index + 1) * CHUNK_BLOCKS - 1
        key = chain.key(last, tokens)
        if self._is_state(number) and not self._is_there(context, number, last, tokens):
            return
        if key in self._outstanding or (self._durable(key) and key not in self._going):
            return
        if any(key == one.chunk.parent for _, one in self._copied.values()):
            return  # it left the store, which will not take what is queued; when that is lost both are noted again
        again = key in self._touched
        self._touched.add(key)
        if not again:
            if not context.progress.durable:
                return
            if not self._budget.left:
                self.budget_spent += 1
                return
        parent = self._parent(context, number, index, tokens)
        if parent in self._going:
            self._going.add(key)
            return
        if not self._has_parent(parent):
            return
        width = CHUNK_BLOCKS * self._cache.info.block_tokens
        part = tuple(tokens[index * width : (index + 1) * width])
        blocks = tuple(chain.key(one, tokens) for one in range(last - self._pages[number] + 1, last + 1))
        depth = (index + 1 if self._is_state(number) else index) * width
        first = chain.key(index * CHUNK_BLOCKS, tokens)
        noted = _Noted(Chunk(key, parent, part, depth, b"", number), blocks, first, self._clock.now())
        if self._find(noted) is None:
            return  # a window has left it behind, or it was counted when it was lost
        self._going.discard(key)
        self._noted[key] = noted
        for block in blocks:
            self._users.setdefault(block, []).append(key)
        self._noted_blocks[number] += len(blocks)
        self._serial += 1
        self._outstanding[key] = self._serial

    def _is_state(self, number: int) -> bool:
        return self._cache.info.groups[number].kind == "state"

    def _is_there(self, context: SequenceKV, number: int, last: int, tokens: Sequence[int]) -> bool:
        """Whether the pool has the state at the end of block `last`, and the next does not take its place."""
        size, key = self._cache.info.block_tokens, context.chains[number].key(last, tokens)
        found = self._cache.pools[number].find(key, tokens[last * size : (last + 1) * size])
        return found is not None and context.table.snapshots.passing != last + 1

    def _parent(self, context: SequenceKV, number: int, index: int, tokens: Sequence[int]) -> bytes:
        """The key of what a chunk extends; empty for the first."""
        last, key = (index + 1) * CHUNK_BLOCKS - 1, context.chains[number].key
        if not self._is_state(number):
            return key(last - CHUNK_BLOCKS, tokens) if index else b""
        if not self._is_state(self._lead):
            return context.chains[self._lead].key(last, tokens)
        before = (key(one, tokens) for one in range(last - CHUNK_BLOCKS, -1, -CHUNK_BLOCKS))
        return next((one for one in before if self._has_parent(one)), b"")

    def _find(self, noted: _Noted) -> list[int] | None:
        """The blocks of a noted chunk; None where the pool does not have all of them any more."""
        chunk, size = noted.chunk, self._cache.info.block_tokens
        pool = self._cache.pools[chunk.group]
        begin = len(chunk.tokens) - len(noted.blocks) * size
        parts = (chunk.tokens[at : at + size] for at in range(begin, len(chunk.tokens), size))
        blocks = [pool.find(key, part) for key, part in zip(noted.blocks, parts, strict=True)]
        found = [block for block in blocks if block is not None]
        return found if len(found) == len(blocks) else None

    def _copy(self, noted: _Noted) -> int:
        """Copy a noted chunk's pages out of the pool and queue it; returns the bytes."""
        chunk, found = noted.chunk, self._find(noted)
        if found is None or not self._has_parent(chunk.parent):
            self._give_up(noted)
            return 0
        self._unnote(chunk.key)
        pages = b"".join(self._engine.read_blocks(chunk.group, found).wait())
        self._copied[chunk.key] = len(pages), noted
        self.bytes += len(pages)
        self._budget.spend(len(pages))
        self._writer.push(dataclasses.replace(chunk, pages=pages))
        return len(pages)

    def _next(self) -> _Noted:
        """What to copy next: the first noted, or what it extends, if that left the store and was noted again since."""
        return self._line(next(iter(self._noted.values())))[-1]

    def _line(self, noted: _Noted, most: float = math.inf) -> list[_Noted]:
        """A noted chunk, and after it the noted ones that it extends, nearest first; `most` in all."""
        line = [noted]
        while len(line) < most and line[-1].chunk.parent in self._noted:
            line.append(self._noted[line[-1].chunk.parent])
        return line

    def _fits(self, *line: _Noted) -> bool:
        """Whether these may all be copied: within the bound, or one alone, however large it is."""
        size = sum(self._sizes[noted.chunk.group] for noted in line)
        return self.bytes + size <= self._limits.queue_bytes or (not self.bytes and len(line) == 1)

    def _durable(self, key: bytes) -> bool:
        return self._store.match_prefix((key,)) == 1

    def _has_parent(self, parent: bytes) -> bool:
        return not parent or parent in self._outstanding or self._durable(parent)

    def _unnote(self, key: bytes) -> None:
        noted = self._noted.pop(key)
        for block in noted.blocks:
            self._users[block].remove(key)
            if not self._users[block]:
                del self._users[block]
        self._noted_blocks[noted.chunk.group] -= len(noted.blocks)

    def _give_up(self, noted: _Noted) -> None:
        """It will not be stored; neither will what extends it, because that lacks its parent when its turn comes."""
        self._unnote(noted.chunk.key)
        self._lose(self._outstanding.pop(noted.chunk.key))

    def _lose(self, serial: int) -> None:
        self.dropped += 1
        self._breaks += 1
        self._flushes.lose(serial)

    def _written(self, key: bytes) -> tuple[int, int]:
        """The writer is done with a chunk; its bytes and serial."""
        size, _ = self._copied.pop(key)
        self.bytes -= size
        return size, self._outstanding.pop(key)
