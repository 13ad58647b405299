"""Write-behind: which chunks of the pool are to be stored, and when their pages are copied.

    findable  ->  noted  --read between steps-->  queue  --StoreWriter's thread-->  stores
    ended     ->  tails  --once idle, or at the end-->  noted

No step waits for a store. A chunk is noted when all its blocks can be found in the pool. That takes no memory of its
own, so only the pool bounds it. Its pages are copied when the step loop is idle, when the pool is about to need its
blocks, or when it has waited for `COPY_SECONDS`, so that a crash of a busy worker loses little. Copies are bounded in
bytes: while there is no room for more, chunks wait in the pool. If the pool evicts one meanwhile, neither it nor what
extends it is stored; those that were noted are counted. A chunk that a store refused, or dropped on request, is noted
once more when its sequence goes on, at most every `WAIT_SECONDS`.

Sequences that somebody is known to continue, and long ones, come first. Chunks of all others are *spare* until they
come a second time: they are copied when nothing else is left to copy, and given up when the pool needs their blocks.

The blocks of an ended sequence behind its last whole chunk are its tail (`Store`). It is noted once nobody has
continued the sequence for `IDLE_SECONDS`, when the pool is about to need its blocks (except states), and at the end. A
longer tail, or the whole chunk, replaces it.

State groups have chunks only at snapshots, each of one block. A snapshot that the next will replace waits for the end
of its sequence: a state is too large to be stored every few seconds.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from cairn.kv.pool.cache import Cache, lead
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
from cairn.types.errors import DeviceMemoryError
from cairn.types.model_spec import CHUNK_BLOCKS
from cairn.types.step import Engine

log = logging.getLogger(__name__)

COPY_SECONDS = 2.0
"""Longest time that a chunk waits in the pool for an idle step loop; then it is copied between two steps."""
WAIT_SECONDS = 30.0
"""Least seconds between two times that a sequence's refused or dropped chunks are noted again."""
IDLE_SECONDS = 30.0
"""Seconds after its end at which a sequence's tail is stored."""
MOST_TAILS = 4096
"""Most tails that wait for that; the oldest are given up."""


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """Limits in bytes on what is stored, and how much at once."""

    day_bytes: float = 100e9
    """Bytes written in any 24 hours, for whatever purpose."""
    queue_bytes: int = 256 << 20
    """Bytes copied out of the pool and not yet stored. One chunk is always allowed."""
    turn_bytes: int = 32 << 20
    """Bytes copied between two steps. One chunk is always allowed."""
    copy_seconds: float = COPY_SECONDS
    """Longest time that a chunk waits in the pool for an idle step loop; then it is copied between two steps."""
    idle_seconds: float = IDLE_SECONDS
    """Seconds after a sequence's end at which its tail is stored."""


class WriteBehind:
    """The chunks that wait to be written. One thread calls; the writer's thread sees only chunks."""

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
        """Watch the pools of a cache. `store`: the most durable one, whose chunks need not be written again."""
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
        """Bytes of every chunk that is queued or being written, and its note."""
        self._outstanding: OrderedDict[bytes, int] = OrderedDict()
        """Serial of every chunk that is noted, spare, queued or being written."""
        self._serial = 0
        self._touched = RecentKeys()
        self._flushes = Flushes()
        self._drops = 0
        """Calls of `drop` that are not done yet."""
        self._tails_at = -math.inf
        """Time before which no tail is to be noted: they wait in the order of their ends."""
        self._going: set[bytes] = set()
        """Chunks that stores are about to drop, and those that would extend them."""
        self._breaks = 0
        """How often a chunk was lost or dropped, which breaks the chain of those that extend it."""
        self.budget = budget or DayBudget(clock, limits.day_bytes)
        self.bytes = 0
        """Bytes of all chunks that are queued or being written: held outside the pool."""
        self.dropped = 0
        """Chunks that were given up: the pool evicted their blocks while the queue had no room for them and their
        ancestors, there was no memory to copy them, or no store took them."""
        self.budget_spent = 0
        """Chunks that were not stored because the day's bytes were spent."""
        for pool in cache.pools:
            pool.leaving = self._leaving

    # ------------------------------------------------------------------------------------------ what the cache says

    @property
    def chunks(self) -> int:
        """Number of chunks that are noted, spare, queued or being written."""
        return len(self._outstanding)

    @property
    def dropping(self) -> bool:
        """Whether stores are about to drop something."""
        return self._drops > 0

    @property
    def due(self) -> float:
        """Seconds until the next tail is to be noted; infinite if none waits."""
        first = next(iter(self.waiting.tails.values()), None)
        return math.inf if first is None else max(0.0, first.at + self._limits.idle_seconds - self._clock.now())

    def findable(self, seq_kv: SequenceKV, tokens: Sequence[int]) -> None:
        """Note the whole chunks of a sequence that are new in the pool and should be stored.

        A sequence that must not be stored leaves no trace here: the next with the same tokens counts as the first.
        """
        progress = seq_kv.progress
        if not progress.stored:
            return
        now = self._clock.now()
        if progress.breaks < 0:
            progress.breaks = self._breaks
        if progress.durable and progress.breaks != self._breaks and now - progress.looked >= WAIT_SECONDS:
            progress.noted, progress.breaks, progress.looked = [0] * len(progress.noted), self._breaks, now
        for number in self._chunks.order:
            stop = seq_kv.table.published[number] // CHUNK_BLOCKS
            while progress.noted[number] < stop:
                self._note(seq_kv, number, progress.noted[number], tokens)
                progress.noted[number] += 1

    def ended(self, seq_kv: SequenceKV, tokens: Sequence[int], boundary: int, computed: int) -> None:
        """Note the last snapshot and the tail of a sequence that is about to be closed.

        `computed`: positions with KV; `boundary`: of the last snapshot at the end of a chunk, 0 if there is none.
        """
        progress = seq_kv.progress
        if not progress.stored:
            return
        last = computed // self._cache.info.block_tokens
        for number in self._chunks.order:
            if boundary and self._chunks.is_state(number):
                self._note(seq_kv, number, boundary // BOUNDARY - 1, tokens)
            if last % CHUNK_BLOCKS:
                self._note_tail(seq_kv, number, last, tokens)
        # A sequence that was preempted goes on, and meanwhile the pool may give up what was decided.
        progress.own = list(map(max, progress.own, progress.noted))
        progress.noted = [0] * len(progress.noted)

    def unwanted(self, key: bytes) -> None:
        """Do not write a state that is being evicted, unless another noted one extends it."""
        if not any(one.chunk.parent == key for one in self.waiting):
            self.forget((key,))

    def has(self, key: bytes) -> bool:
        """Return whether a chunk is stored or will be."""
        return key in self._outstanding or key in self.waiting.tails or self._store.has(key)

    def writes(self, block: bytes) -> bool:
        """Return whether a chunk with this block is queued or being written."""
        return any(block in noted.blocks for _, noted in self._copied.values())

    # ------------------------------------------------------------------------------------------- between two steps

    def turn(self, idle: bool) -> bool:
        """Copy noted chunks into the queue, up to a turn's bytes; return whether there is more to do at once."""
        if self._writer.finished:
            self._settle()
        if self.waiting.tails and self._clock.now() >= self._tails_at:
            self._take_tails(self._limits.idle_seconds)
        room, more = self._limits.turn_bytes, self._ready(idle)
        while room > 0 and more and (following := self.waiting.next) is not None:
            room -= self._copy(following)
            more = self._ready(idle)
        if self._flushes.waiting:
            self._flushes.answer(lambda: next(iter(self._outstanding.values()), math.inf))
            more = self._ready(idle)
        return more

    def flush(self, done: Flushed, *, counts: bool = True) -> None:
        """Call `done` when everything computed until now that should be stored is stored.

        It is called with the number of those chunks that were given up, and if it `counts`, earlier unreported ones
        too.
        """
        self._note_all()
        self._flushes.add(self._serial + 1, done, counts=counts)

    def forget(self, keys: Collection[bytes]) -> None:
        """Do not write these chunks, unless they are in the queue already."""
        for key in keys:
            if key in self.waiting.tails:
                self.waiting.remove(self.waiting.tails, key)
            elif key in self.waiting.noted or key in self.waiting.spare:
                self.waiting.unnote(key)
                del self._outstanding[key]

    def drop(self, keys: Collection[bytes], beginnings: Collection[Beginning]) -> list[bytes]:
        """Block the copying of chunks that stores are about to drop, and of all that extend them, until `drop_done`.

        Return the keys of further chunks to drop: those not stored yet that begin with one of `beginnings`, whose other
        tokens the caller cannot know. Chunks that a sequence in the pool goes on with are noted anew, to be stored once
        the drop is done.
        """
        self._drops += 1
        self._breaks += 1
        ahead = self._begun(beginnings)
        self._going.update(keys, ahead)
        known = 0
        while known < len(self._going):  # repeated, since a child may have been noted before its parent
            known = len(self._going)
            self._going.update(one.chunk.key for one in self.waiting if one.chunk.parent in self._going)
        self.forget(self._going)
        return ahead

    def _begun(self, beginnings: Collection[Beginning]) -> list[bytes]:
        """Return the chunks that wait, are queued or being written and begin with one of `beginnings`."""
        size = self._cache.info.block_tokens
        return [
            one.chunk.key
            for one in (*self.waiting, *(one for _, one in self._copied.values()))
            for begun in beginnings
            if one.chunk.tokens[: len(begun.tokens)] == begun.tokens
            and one.first == extend(begun.before, one.chunk.tokens[:size])
        ]

    def drop_done(self) -> None:
        """End a `drop`: the stores have dropped the chunks.

        Noted chunks that extend them are forgotten and do not count as lost.
        """
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
        """Copy all noted chunks and tails as the writer makes room, for at most `grace` seconds. No turn follows.

        Chunks of sequences that nobody is known to continue come last.
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
        """Return the number of chunks that were not stored. The writer has ended."""
        self._settle()
        return self.chunks

    def _ready(self, idle: bool) -> bool:
        """Return whether to copy the next chunk now; `idle` as in `Tiers.turn`."""
        if self._drops or not (self.waiting.noted or (idle and self.waiting.spare)):  # most often: turns are frequent
            return False
        following = self.waiting.next
        if following is None or not self._fits(following):
            return False
        return idle or (not following.spare and self._pressing(following))

    def _pressing(self, following: NotedChunk) -> bool:
        """Return whether to copy although requests want a step: a flush waits, or the pool is about to need blocks."""
        if self._flushes.waiting or self._clock.now() - following.at > self._limits.copy_seconds:
            return True
        pools = zip(self._cache.pools, self.waiting.blocks, strict=True)
        return any(noted and (pool.available - noted) * 8 < pool.size for pool, noted in pools)

    def _leaving(self, block: bytes) -> None:
        """Copy the chunks of a block that the pool is about to evict, after their noted ancestors, or give them up."""
        for key in tuple(self.waiting.users.get(block, ())):
            if (tail := self.waiting.tails.get(key)) is not None:
                self.waiting.remove(self.waiting.tails, key)
                if tail.spare or self._chunks.is_state(tail.chunk.group) or not self._fits(tail):
                    self._shorten(tail, block)
                else:
                    self._start(tail)
            elif (spare := self.waiting.spare.get(key)) is not None:
                self.forget((key,))
                self._shorten(spare, block)
            if (noted := self.waiting.noted.get(key)) is None:
                continue
            room = (self._limits.queue_bytes - self.bytes) // self._sizes[noted.chunk.group]
            line = self.waiting.line(noted, max(1, room) + 1)  # one more than fits is enough to see that it does not
            if self._fits(*line):
                for one in reversed(line):
                    self._copy(one)
            else:
                self._give_up(noted)
                self._shorten(noted, block)

    def _shorten(self, noted: NotedChunk, block: bytes) -> None:
        """Queue the part of a given-up chunk before `block`, still in the pool, as a tail."""
        if (tail := self._chunks.before(noted, block)) is not None:
            self._wait(tail)

    def _settle(self) -> None:
        """Process the chunks that the writer has finished."""
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

    def _note(self, seq_kv: SequenceKV, number: int, index: int, tokens: Sequence[int]) -> None:
        """Note one whole chunk unless it is stored, outstanding or not wanted yet."""
        last = (index + 1) * CHUNK_BLOCKS - 1
        key = seq_kv.chains[number].key(last, tokens)
        if self._chunks.is_state(number) and not self._chunks.is_settled(seq_kv, number, last + 1, tokens):
            return
        again = key in self._touched and index >= seq_kv.progress.own[number]
        self._touched.add(key)
        if key in self._outstanding:
            if again or seq_kv.progress.durable:
                self.waiting.promote(key, wanted=again or not seq_kv.progress.once)
            return
        if self._durable(key) and key not in self._going:
            return
        if any(key == one.chunk.parent for _, one in self._copied.values()):
            return  # the store dropped it and so will refuse its queued child; then both are noted again
        noted = self._chunks.describe(seq_kv, number, last, tokens, spare=not (again or seq_kv.progress.durable))
        if again:
            noted = dataclasses.replace(noted, chunk=dataclasses.replace(noted.chunk, once=False))
        if noted.chunk.parent in self._going:
            self._going.add(key)
        elif self._has_parent(noted.chunk.parent):
            self._add(noted)

    def _note_tail(self, seq_kv: SequenceKV, number: int, last: int, tokens: Sequence[int]) -> None:
        """Let the blocks of a group behind the last whole chunk, up to block `last`, wait as a tail."""
        if self._chunks.is_state(number):
            begin = last // CHUNK_BLOCKS * CHUNK_BLOCKS
            last = self._chunks.last_state(seq_kv, number, begin, last, tokens)
            if last == begin:
                return
        self._wait(self._chunks.describe(seq_kv, number, last - 1, tokens, spare=not seq_kv.progress.durable))

    def _wait(self, tail: NotedChunk) -> None:
        """Let a tail wait, unless it is outstanding, to be dropped, or a part of what waits already."""
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
        """Note the tails of sequences that ended `idle` seconds ago; those that somebody continues wait on."""
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
        if idle and self.waiting.tails:
            self._tails_at = next(iter(self.waiting.tails.values())).at + idle

    def _start(self, tail: NotedChunk) -> None:
        """Note a tail, unless a stored chunk contains it or its parent is not stored."""
        parent = tail.chunk.parent
        if parent in self.waiting.tails:
            self._start(self.waiting.remove(self.waiting.tails, parent))
        if self._store.match_within((tail.chunk.key,)) is not None:
            return
        if self._chunks.is_state(tail.chunk.group) and not self._has_parent(parent):
            longer = self._store.match_within((parent,))  # a stored chunk that contains its KV
            parent = parent if longer is None else longer[1]
            tail = dataclasses.replace(tail, chunk=dataclasses.replace(tail.chunk, parent=parent))
        if self._has_parent(parent):
            self._add(tail)

    def _note_all(self) -> None:
        """Note all tails and promote all spare chunks."""
        self._take_tails(0)
        for key in tuple(self.waiting.spare):
            self.waiting.promote(key)

    def _add(self, noted: NotedChunk) -> None:
        """Note a chunk, unless the day's bytes are spent or the pool no longer has it."""
        if not self.budget.left(once=noted.chunk.once):
            self.budget_spent += 1
            return
        if self._chunks.find(noted) is None:
            return  # a window has passed it, or it was counted when it was lost
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
        """Copy a noted chunk's pages out of the pool and queue it; return the bytes.

        Return 0 if it was given up: the pool no longer has it, the day's bytes are spent, or memory is short.
        """
        chunk, found = noted.chunk, self._chunks.find(noted)
        if found is None or not self._has_parent(chunk.parent):
            self._give_up(noted)
            return 0
        if not self.budget.left(once=chunk.once):
            self.budget_spent += 1
            self._give_up(noted)
            return 0
        try:
            pages = b"".join(self._engine.read_blocks(chunk.group, found).wait())
        except (DeviceMemoryError, MemoryError) as error:
            log.warning("a chunk of KV is not stored: there is no memory to copy it (%s)", error)
            self._give_up(noted)
            return 0
        self.waiting.unnote(chunk.key)
        size = self._store.kept_bytes(chunk.group, len(pages))
        self._copied[chunk.key] = len(pages), noted
        self.bytes += len(pages)
        self.budget.spend(size)
        self._writer.push(dataclasses.replace(chunk, pages=pages))
        return len(pages)

    def _fits(self, *line: NotedChunk) -> bool:
        """Return whether these may all be copied: within the bound, or one alone, however large it is."""
        size = sum(self._sizes[noted.chunk.group] for noted in line)
        return self.bytes + size <= self._limits.queue_bytes or (not self.bytes and len(line) == 1)

    def _durable(self, key: bytes) -> bool:
        return self._store.match_prefix((key,)) == 1

    def _has_parent(self, parent: bytes) -> bool:
        return not parent or parent in self._outstanding or self._store.has(parent)

    def _give_up(self, noted: NotedChunk) -> None:
        """Do not store a chunk, nor those that extend it, which will lack their parent. A spare one is not counted."""
        self.waiting.unnote(noted.chunk.key)
        serial = self._outstanding.pop(noted.chunk.key)
        if not noted.spare:
            self._lose(serial)

    def _lose(self, serial: int) -> None:
        self.dropped += 1
        self._breaks += 1
        self._flushes.lose(serial)
