"""Write-behind: which chunks of what the pool has are to be stored, and the queue they wait in. No step waits for it.

    findable  ->  noted  --read between steps-->  queue  --writer's thread-->  stores
    ended     ->  tails  --once idle, or at the end-->  noted

A chunk is noted when all its blocks can be found in the pool. That takes no memory of its own, so there is no bound on
it but the pool. Its pages are copied when the step loop has nothing better to do, when the pool is about to need its
blocks, or when it has waited for `COPY_SECONDS`: what a crash loses of a loop that never rests. The copies are bounded
in bytes: while there is no room for more, chunks wait in the pool. One that the pool gives up meanwhile is not stored,
nor is what extends it; those that were noted are counted. What a store refused, or dropped because it was told to, is
noted once more when its context goes on, at most every `WAIT_SECONDS`.

Contexts that somebody is known to go on with, and long ones, come first. Chunks of all others are *spare* until they
come a second time: they are copied when nothing else is left to be, and given up when the pool needs their blocks.

What an ended context has behind its last whole chunk is its tail (`Store`). It is noted once nobody has gone on with
the context for `IDLE_SECONDS`, when the pool is about to need its blocks (but for states), and at the end. A longer
one, or the whole chunk, takes its place.

Of a state group there are chunks only where there are snapshots, each of one block. One that the next will take the
place of waits for the end of its sequence: a state is too large to be stored every few seconds.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from cairn.kv.pool.attention_window import lead
from cairn.kv.pool.cache import Cache
from cairn.kv.pool.prefix import extend
from cairn.kv.pool.sequence_kv import RecentKeys, SequenceKV
from cairn.kv.pool.snapshots import BOUNDARY
from cairn.kv.tiers.chunk_lookup import Beginning
from cairn.kv.tiers.day_budget import DayBudget
from cairn.kv.tiers.flushes import Flushed, Flushes
from cairn.kv.tiers.store import Store, chunk_sizes
from cairn.kv.tiers.store_writer import StoreWriter
from cairn.kv.tiers.waiting_chunks import NotedChunk, PoolChunks, WaitingChunks
from cairn.system.interfaces import Clock
from cairn.types.model_spec import CHUNK_BLOCKS
from cairn.types.step import Engine

COPY_SECONDS = 2.0
"""How long a chunk waits in the pool for the step loop to have nothing to do; then it is copied between two steps."""
WAIT_SECONDS = 30.0
"""How often, at most, a context that goes on has the chunks noted once more that a store refused or dropped."""
IDLE_SECONDS = 30.0
"""How long after its end a context's tail is stored."""
MOST_TAILS = 4096
"""Tails that wait for that; the oldest are given up."""


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """What is stored and how much at once. Bytes."""

    day_bytes: float = 100e9
    """Written in any 24 hours, whatever for."""
    queue_bytes: int = 256 << 20
    """Copied out of the pool and not yet stored. One chunk always may be."""
    turn_bytes: int = 32 << 20
    """Copied between two steps at most; one chunk always may be."""


class WriteBehind:
    """What waits to be written. One thread calls; the writer's thread sees chunks only."""

    def __init__(
        self,
        cache: Cache,
        engine: Engine,
        clock: Clock,
        store: Store,
        writer: StoreWriter,
        limits: WriteLimits,
        budget: DayBudget | None = None,
    ) -> None:
        """`store`: the most durable one, whose chunks need not be written again."""
        self._cache = cache
        self._engine = engine
        self._clock = clock
        self._store = store
        self._writer = writer
        self._limits = limits
        self._sizes = chunk_sizes(cache.info.groups, cache.info.block_bytes)
        self._lead = lead(cache.info.groups)
        self._chunks = PoolChunks(cache, clock, self._has_parent)
        self.waiting = WaitingChunks(len(cache.pools), clock)
        self._copied: dict[bytes, tuple[int, NotedChunk]] = {}
        """Bytes of every chunk that is queued or being written, and what was noted of it."""
        self._outstanding: OrderedDict[bytes, int] = OrderedDict()
        """Serial of every chunk that is noted, spare, queued or being written."""
        self._serial = 0
        self._touched = RecentKeys()
        self._flushes = Flushes()
        self._drops = 0
        """Orders of `drop` that go on."""
        self._going: set[bytes] = set()
        """Chunks that stores are about to drop, and what would extend them."""
        self._breaks = 0
        """How often a chunk was lost or ordered away, which breaks the line of those that extend it."""
        self.budget = budget or DayBudget(clock, limits.day_bytes)
        self.bytes = 0
        """Held outside the pool: of all chunks that are queued or being written."""
        self.dropped = 0
        """Chunks that were given up: the pool needed their blocks while the queue had no room for them and what they
        extend, or no store took them."""
        self.budget_spent = 0
        """Chunks that were not stored because the day's bytes were written."""
        for pool in cache.pools:
            pool.leaving = self._leaving

    # ------------------------------------------------------------------------------------------ what the cache says

    @property
    def chunks(self) -> int:
        """Chunks that are noted, spare, queued or being written."""
        return len(self._outstanding)

    @property
    def dropping(self) -> bool:
        """Whether stores are about to drop something."""
        return self._drops > 0

    @property
    def due(self) -> float:
        """Seconds until the next tail is to be noted; infinite where none waits."""
        first = next(iter(self.waiting.tails.values()), None)
        return math.inf if first is None else max(0.0, first.at + IDLE_SECONDS - self._clock.now())

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
        for number in self._chunks.order:
            stop = context.table.published[number] // CHUNK_BLOCKS
            while progress.noted[number] < stop:
                self._note(context, number, progress.noted[number], tokens)
                progress.noted[number] += 1

    def ended(self, context: SequenceKV, tokens: Sequence[int], boundary: int, computed: int) -> None:
        """A context is about to be closed of which so many positions were computed; its newest snapshot at the end of a
        chunk, at this boundary (0: there is none), is its last."""
        if not context.progress.stored:
            return
        last = computed // self._cache.info.block_tokens
        for number in self._chunks.order:
            if boundary and self._chunks.is_state(number):
                self._note(context, number, boundary // BOUNDARY - 1, tokens)
            if last % CHUNK_BLOCKS:
                self._note_tail(context, number, last, tokens)

    def unwanted(self, key: bytes) -> None:
        """Do not write a state that is forgotten, unless another that is noted extends it."""
        if not any(one.chunk.parent == key for one in self.waiting):
            self.forget((key,))

    def has(self, key: bytes) -> bool:
        """Whether a chunk is stored, or is to be."""
        return key in self._outstanding or key in self.waiting.tails or self._store.has(key)

    def writes(self, block: bytes) -> bool:
        """Whether a chunk with this block is queued or being written."""
        return any(block in noted.blocks for _, noted in self._copied.values())

    # ------------------------------------------------------------------------------------------- between two steps

    def turn(self, idle: bool) -> bool:
        """Copy what is noted into the queue, as much as one turn may. True if there is more to do at once."""
        self._settle()
        self._take_tails(IDLE_SECONDS)
        room = self._limits.turn_bytes
        while room > 0 and self._ready(idle) and (following := self.waiting.next) is not None:
            room -= self._copy(following)
        self._flushes.answer(lambda: next(iter(self._outstanding.values()), math.inf))
        return self._ready(idle)

    def flush(self, done: Flushed, *, told: bool = True) -> None:
        """Call `done` when all is stored that is to be stored of what was computed until now.

        It gets how many chunks were given up: of those, and since the last flush that was `told`.
        """
        self._note_all()
        self._flushes.add(self._serial + 1, done, counts=told)

    def forget(self, keys: Collection[bytes]) -> None:
        """Do not write these any more, unless they are in the queue already."""
        for key in keys:
            if key in self.waiting.tails:
                self.waiting.remove(self.waiting.tails, key)
            elif key in self.waiting.noted or key in self.waiting.spare:
                self.waiting.unnote(key)
                del self._outstanding[key]

    def drop(self, keys: Collection[bytes], beginnings: Collection[Beginning]) -> list[bytes]:
        """Stores are about to drop these and all that extends them: until `drop_done` nothing is copied that might.

        So is what begins with one of `beginnings`, as far as it is not stored yet: returns the keys of that, which
        whoever has not heard of all its tokens cannot know. Where somebody goes on with any of it in the pool, it is
        noted anew, to be stored once the stores are done.
        """
        self._drops += 1
        self._breaks += 1
        ahead = self._begun(beginnings)
        self._going.update(keys, ahead)
        known = 0
        while known < len(self._going):  # more than once, since what extends a chunk may have been noted before it
            known = len(self._going)
            self._going.update(one.chunk.key for one in self.waiting if one.chunk.parent in self._going)
        self.forget(self._going)
        return ahead

    def _begun(self, beginnings: Collection[Beginning]) -> list[bytes]:
        """Chunks that wait in the pool, are queued or being written and begin with one of these."""
        size = self._cache.info.block_tokens
        return [
            one.chunk.key
            for one in (*self.waiting, *(one for _, one in self._copied.values()))
            for begun in beginnings
            if one.chunk.tokens[: len(begun.tokens)] == begun.tokens
            and one.first == extend(begun.before, one.chunk.tokens[:size])
        ]

    def drop_done(self) -> None:
        """They have: what was noted to extend them is no loss."""
        self._drops -= 1
        self._breaks += 1
        if not self._drops:
            self._going.clear()
        self._settle()
        known = -1
        while known != len(self._outstanding):
            known = len(self._outstanding)
            for noted in (*self.waiting.noted.values(), *self.waiting.spare.values()):
                if not self._has_parent(noted.chunk.parent):
                    self.forget((noted.chunk.key,))

    def finish(self, grace: float) -> None:
        """Copy all that is noted, and all tails, as the writer makes room, for `grace` seconds at most: the last turn.

        What nobody is known to go on with comes last.
        """
        self._note_all()
        end = self._clock.now() + grace
        while (following := self.waiting.next) is not None:
            self._settle()
            if self._fits(following):
                self._copy(following)
            elif not self._writer.wait(end - self._clock.now()):
                return

    def left(self) -> int:
        """Chunks that were not stored, when the writer has ended."""
        self._settle()
        return self.chunks

    def _ready(self, idle: bool) -> bool:
        """Whether to copy the next chunk now; `idle` as in `Tiers.turn`."""
        following = self.waiting.next
        if self._drops or following is None or not self._fits(following):
            return False
        return idle or (not following.spare and self._pressing(following))

    def _pressing(self, following: NotedChunk) -> bool:
        """Whether to copy although requests want a step: somebody waits for it, or the pool is about to need blocks."""
        if self._flushes or self._clock.now() - following.at > COPY_SECONDS:
            return True
        pools = zip(self._cache.pools, self.waiting.blocks, strict=True)
        return any(noted and (pool.available - noted) * 8 < pool.size for pool, noted in pools)

    def _leaving(self, block: bytes) -> None:
        """The pool is about to give up a block: copy its chunks, after all noted ones they extend, or give them up."""
        for key in tuple(self.waiting.users.get(block, ())):
            if (tail := self.waiting.tails.get(key)) is not None:
                self.waiting.remove(self.waiting.tails, key)
                unwanted = tail.spare or self._chunks.is_state(tail.chunk.group) or not self._fits(tail)
                if not unwanted:
                    self._start(tail)
            elif key in self.waiting.spare:
                self.forget((key,))
            if (noted := self.waiting.noted.get(key)) is None:
                continue
            room = (self._limits.queue_bytes - self.bytes) // self._sizes[noted.chunk.group]
            line = self.waiting.line(noted, max(1, room) + 1)  # one more than fit is as good as all of a long one
            if self._fits(*line):
                for one in reversed(line):
                    self._copy(one)
            else:
                self._give_up(line[0])

    def _settle(self) -> None:
        """Take note of what the writer has finished."""
        while self._writer.finished:
            key, kept = self._writer.finished.popleft()
            size, noted = self._copied.pop(key)
            self.bytes -= size
            serial = self._outstanding.pop(key)
            if kept:
                if noted.chunk.group == self._lead:
                    self._cache.seen.store(noted.blocks)
                if stale := [tail for tail in noted.tails if self._store.has(tail)]:
                    self._writer.push(partial(self._writer.drop, stale))
            else:
                self.budget.refund(self._store.kept_bytes(noted.chunk.group, size))
                self._lose(serial)

    # --------------------------------------------------------------------------------------------- what is stored

    def _note(self, context: SequenceKV, number: int, index: int, tokens: Sequence[int]) -> None:
        """Decide about one whole chunk of a context: it is stored, outstanding, not wanted (yet), or noted now."""
        last = (index + 1) * CHUNK_BLOCKS - 1
        key = context.chains[number].key(last, tokens)
        if self._chunks.is_state(number) and not self._chunks.is_settled(context, number, last + 1, tokens):
            return
        again = key in self._touched
        self._touched.add(key)
        if key in self._outstanding:
            if again or context.progress.durable:
                self.waiting.promote(key, wanted=again or not context.progress.once)
            return
        if self._durable(key) and key not in self._going:
            return
        if any(key == one.chunk.parent for _, one in self._copied.values()):
            return  # it left the store, which will not take what is queued; when that is lost both are noted again
        noted = self._chunks.describe(context, number, last, tokens, spare=not (again or context.progress.durable))
        if again:
            noted = dataclasses.replace(noted, chunk=dataclasses.replace(noted.chunk, once=False))
        if noted.chunk.parent in self._going:
            self._going.add(key)
        elif self._has_parent(noted.chunk.parent):
            self._add(noted)

    def _note_tail(self, context: SequenceKV, number: int, last: int, tokens: Sequence[int]) -> None:
        """Let what the pool has of a group behind the last whole chunk, up to block `last`, wait to be noted."""
        if self._chunks.is_state(number):
            begin = last // CHUNK_BLOCKS * CHUNK_BLOCKS
            last = self._chunks.last_state(context, number, begin, last, tokens)
            if last == begin:
                return
        tail = self._chunks.describe(context, number, last - 1, tokens, spare=not context.progress.durable)
        key = tail.chunk.key
        if key in self._outstanding or key in self._going or tail.chunk.parent in self._going:
            return
        if self.waiting.has_longer(key):
            return
        old = self.waiting.remove(self.waiting.tails, key) if key in self.waiting.tails else None
        if old is not None and not old.spare:
            tail = dataclasses.replace(tail, spare=False, chunk=dataclasses.replace(tail.chunk, once=old.chunk.once))
        if self._chunks.find(tail) is not None:
            self.forget(self.waiting.superseded(tail))
            self.waiting.insert(self.waiting.tails, tail)
        if len(self.waiting.tails) > MOST_TAILS:
            self.waiting.remove(self.waiting.tails, next(iter(self.waiting.tails)))

    def _take_tails(self, idle: float) -> None:
        """Note the tails of contexts that ended `idle` seconds ago; those that somebody goes on with wait on."""
        now = self._clock.now()
        while (
            self.waiting.tails
            and not self._drops
            and now - (tail := next(iter(self.waiting.tails.values()))).at >= idle
        ):
            self.waiting.remove(self.waiting.tails, tail.chunk.key)
            if idle and (self._chunks.is_used(tail) or tail.chunk.parent in self.waiting.tails):
                self.waiting.insert(self.waiting.tails, dataclasses.replace(tail, at=now))
            else:
                self._start(tail)

    def _start(self, tail: NotedChunk) -> None:
        """Note a tail, unless it is a part of what is stored or what it extends is not."""
        parent = tail.chunk.parent
        if parent in self.waiting.tails:
            self._start(self.waiting.remove(self.waiting.tails, parent))
        if self._store.match_within((tail.chunk.key,)) is not None:
            return
        if self._chunks.is_state(tail.chunk.group) and not self._has_parent(parent):
            longer = self._store.match_within((parent,))  # which its KV may be a part of
            parent = parent if longer is None else longer[1]
            tail = dataclasses.replace(tail, chunk=dataclasses.replace(tail.chunk, parent=parent))
        if self._has_parent(parent):
            self._add(tail)

    def _note_all(self) -> None:
        """Note all tails, and what is spare as if it were not."""
        self._take_tails(0)
        for key in tuple(self.waiting.spare):
            self.waiting.promote(key)

    def _add(self, noted: NotedChunk) -> None:
        """Note a chunk, unless the day's bytes are written or the pool has it no more."""
        if not self.budget.left(once=noted.chunk.once):
            self.budget_spent += 1
            return
        if self._chunks.find(noted) is None:
            return  # a window has left it behind, or it was counted when it was lost
        key = noted.chunk.key
        self._going.discard(key)
        self.forget(self.waiting.superseded(noted))
        if not noted.spare:
            self.waiting.promote(noted.chunk.parent)
        self.waiting.insert(self.waiting.spare if noted.spare else self.waiting.noted, noted)
        self._serial += 1
        self._outstanding[key] = self._serial

    # ------------------------------------------------------------------------------------------------- the queue

    def _copy(self, noted: NotedChunk) -> int:
        """Copy a noted chunk's pages out of the pool and queue it; returns the bytes."""
        chunk, found = noted.chunk, self._chunks.find(noted)
        if found is None or not self._has_parent(chunk.parent):
            self._give_up(noted)
            return 0
        if not self.budget.left(once=chunk.once):
            self.budget_spent += 1
            self._give_up(noted)
            return 0
        self.waiting.unnote(chunk.key)
        pages = b"".join(self._engine.read_blocks(chunk.group, found).wait())
        size = self._store.kept_bytes(chunk.group, len(pages))
        self._copied[chunk.key] = len(pages), noted
        self.bytes += len(pages)
        self.budget.spend(size)
        self._writer.push(dataclasses.replace(chunk, pages=pages))
        return len(pages)

    def _fits(self, *line: NotedChunk) -> bool:
        """Whether these may all be copied: within the bound, or one alone, however large it is."""
        size = sum(self._sizes[noted.chunk.group] for noted in line)
        return self.bytes + size <= self._limits.queue_bytes or (not self.bytes and len(line) == 1)

    def _durable(self, key: bytes) -> bool:
        return self._store.match_prefix((key,)) == 1

    def _has_parent(self, parent: bytes) -> bool:
        return not parent or parent in self._outstanding or self._store.has(parent)

    def _give_up(self, noted: NotedChunk) -> None:
        """It will not be stored; neither will what extends it, because that lacks its parent when its turn comes. Of
        what is spare that is no loss."""
        self.waiting.unnote(noted.chunk.key)
        serial = self._outstanding.pop(noted.chunk.key)
        if not noted.spare:
            self._lose(serial)

    def _lose(self, serial: int) -> None:
        self.dropped += 1
        self._breaks += 1
        self._flushes.lose(serial)
