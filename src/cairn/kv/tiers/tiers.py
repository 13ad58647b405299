"""The tiers below the pool: when a sequence is stored, and how it comes back.

    pool  --findable-->  WriteBehind  --StoreWriter's thread-->  RAM, disk
    pool  <--published--  private blocks  <--land, between steps--  arrived  <--StoreReader's thread--  RAM, disk

A load keeps what it has brought up in the tables of the sequence that waits for it, so leaves are still evicted first.
It ends by closing the sequence, whose next `open` finds all of it in the pool. Everything here runs on the worker's
thread; the threads of `StoreWriter` and `StoreReader` see only chunks.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from cairn.kv.pool.cache import Cache, lead
from cairn.kv.pool.sequence_kv import SequenceKV, TierName
from cairn.kv.tiers.chunk_lookup import ChunkLookup
from cairn.kv.tiers.reader import Arrival, ContextLoad, LoadMode, LoadPolicy, StoreReader, Want
from cairn.kv.tiers.saved_notes import SavedNotes
from cairn.kv.tiers.store import (
    Chunk,
    DurableStore,
    SettlingStore,
    Standing,
    Store,
    Watch,
    WatchedStore,
    chunk_sizes,
)
from cairn.kv.tiers.store_writer import StoreWriter
from cairn.kv.tiers.write_behind import WriteBehind, WriteLimits
from cairn.system.interfaces import Clock
from cairn.types.errors import DeviceMemoryError, trace
from cairn.types.model_spec import CHUNK_BLOCKS
from cairn.types.stats import ImportedKv, KvStats, MissReason, Placed, Swept
from cairn.types.step import NO_BLOCK, Engine

log = logging.getLogger(__name__)

TURN_BYTES = 32 << 20
"""Approximate bytes put into the pool between two steps for one load."""

SETTLE_SECONDS = 2.0
"""Longest wait for the shared store, in which nothing else is written."""
Done = Callable[[], None]
Sweep = Callable[[DurableStore], Swept]


class Tiers:
    """The stores below one cache, the fastest first. One thread calls; `wake` is called from others."""

    def __init__(
        self,
        cache: Cache,
        engine: Engine,
        clock: Clock,
        stores: Mapping[TierName, Store],
        *,
        load: LoadMode = "auto",
        limits: WriteLimits | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._cache = cache
        self._engine = engine
        self._clock = clock
        self._stores = stores
        lasting = (store.durable() for store in stores.values())
        self._durable = next((store for store in lasting if store is not None), None)
        self._sizes = chunk_sizes(cache.info.groups, cache.info.block_bytes)
        self.load_policy = LoadPolicy(load, clock)
        # What counts as stored: the disk, which the shared store's failures then cannot harm; else the lowest tier.
        durable = stores.get("disk") or tuple(stores.values())[-1]
        self.writer = StoreWriter(tuple(stores.values()), clock, wake, self._tend, durable)
        self.reader = StoreReader(stores, self._sizes, self.load_policy, clock, wake)
        limits = limits or WriteLimits()
        notes = self._durable.notes if self._durable is not None else None
        self._notes = SavedNotes(notes, cache.seen, self.writer, clock, limits.day_bytes)
        self.write_behind = WriteBehind(cache, engine, clock, durable, self.writer, limits, self._notes.budget)
        self._lookup = ChunkLookup(cache, stores)
        self._loads: dict[SequenceKV, tuple[ContextLoad, Sequence[int]]] = {}
        self._answers: deque[Done] = deque()
        """Callbacks for the next turn, on the worker's thread."""
        self._sweeping: dict[Sweep, list[Callable[[Swept | None], None]]] = {}
        """Jobs that run on threads of their own, and the callbacks that wait for them."""
        self._loaded = self._abandoned = 0
        self._load_seconds = 0.0
        self._wake = wake
        self._reported = KvStats()
        cache.below = self

    @property
    def loading(self) -> bool:
        """Whether any sequence is being loaded."""
        return bool(self._loads)

    def watch(self, watches: Callable[[TierName], Watch] | None) -> None:
        """Set each tier's block watcher (`WatchedStore`), where it can have one; None: remove it."""
        for name, store in self._stores.items():
            if isinstance(store, WatchedStore):
                store.watch(None if watches is None else watches(name))

    # ------------------------------------------------------------------------------------- what the cache says

    def findable(self, seq_kv: SequenceKV, tokens: Sequence[int]) -> None:
        """See `LowerTiers`."""
        self.write_behind.findable(seq_kv, tokens)

    def lacks(self, block: bytes) -> MissReason | None:
        """See `LowerTiers`."""
        if self.write_behind.writes(block):
            return "not stored yet"
        return "damaged" if self._durable is not None and self._durable.was_damaged(block) else None

    def ended(self, seq_kv: SequenceKV, tokens: Sequence[int], boundary: int, computed: int) -> None:
        """See `LowerTiers`."""
        self.write_behind.ended(seq_kv, tokens, boundary, computed)

    def unwanted(self, key: bytes) -> None:
        """See `LowerTiers`."""
        self.write_behind.unwanted(key)

    def load(self, seq_kv: SequenceKV, tokens: Sequence[int], hit: int, spare: int, most: int | None) -> bool:
        """See `LowerTiers`."""
        return self._begin(seq_kv, tokens, hit, spare, None, most)

    def stop(self, seq_kv: SequenceKV) -> None:
        """See `LowerTiers`. Chunks that still arrive are discarded."""
        seq_kv.progress.loading = False
        load, _ = self._loads.pop(seq_kv)
        load.cancelled = True
        self.reader.taken()
        if load.landed < len(load.stretches):
            self._abandoned += 1
        if load.landed:
            self._load_seconds += load.heard - load.started
        self._answers += load.done

    def yield_blocks(self) -> bool:
        """See `LowerTiers`. The youngest load is given up first."""
        if not self._loads:
            return False
        seq_kv = next(reversed(self._loads))
        self._cache.close(seq_kv, self._loads[seq_kv][1])
        return True

    def _begin(
        self,
        seq_kv: SequenceKV,
        tokens: Sequence[int],
        hit: int,
        spare: int,
        done: Done | None,
        most: int | None = None,
    ) -> bool:
        """Begin a load that calls `done` at its end; return False if it is not worth it or has no room.

        With `done` it was asked for explicitly and is always worth it.
        """
        if self.write_behind.dropping:  # chunks that are found now may be gone before they are loaded
            return False
        seq_kv.progress.declined = False  # the verdict on an earlier load says nothing about this one
        stretches = self._lookup.wants(seq_kv, tokens, hit)
        stop = self._lookup.usable(tokens, stretches[-1].stop) if stretches else hit
        saved = (stop - hit) * self._cache.info.block_tokens
        if saved <= 0 or (most is not None and len(tokens) - stop * self._cache.info.block_tokens > most):
            return False
        size = sum(self._sizes[want.group] for stretch in stretches for want in stretch.wants)
        ahead = sum(load.bytes_left for load, _ in self._loads.values() if not load.ahead_of_need)
        if self.reader.hangs or (done is None and not self.load_policy.worth(saved, size, ahead)):
            seq_kv.progress.declined = True
            return False
        if not self._cache.prepare(seq_kv, tokens, hit, stop, spare):
            return False
        load = ContextLoad(
            stretches, saved, size, self._clock.now(), forced=done is not None, done=[done] if done else []
        )
        self._loads[seq_kv] = load, tokens
        seq_kv.progress.loading = True
        self.reader.begin(load)
        return True

    # ----------------------------------------------------------------------------------------- between two steps

    def turn(self, idle: bool) -> bool:
        """Put arrived chunks into the pool and copy chunks to be written; return whether there is more to do at once.

        `idle`: no request has wanted a step for a while. A failing store raises nothing here, nor does an engine that
        is short of memory: what it could not copy is a miss.
        """
        landing = self._loads and any([self._land(seq_kv, *item) for seq_kv, item in tuple(self._loads.items())])
        self._notes.turn()
        while self._answers:
            self._answers.popleft()()
        reading = self.write_behind.turn(idle)
        return reading or bool(landing)

    def _land(self, seq_kv: SequenceKV, load: ContextLoad, tokens: Sequence[int]) -> bool:
        """Put the chunks that arrived for a sequence into the pool; return whether there is more to do at once."""
        room, over, before = TURN_BYTES, False, load.landed
        while load.arrived and room > 0 and not over:
            arrival = load.arrived.popleft()
            try:
                over = not self._bring(seq_kv, tokens, load, arrival)
            except (DeviceMemoryError, MemoryError) as error:
                log.warning("loaded KV is computed instead: there is no memory to put it into the pool (%s)", error)
                over = True
            room -= sum(len(chunk.pages) for chunk in arrival.chunks)
            self.reader.taken(arrival)
        if not over and load.arrived:
            return True
        # From here on the reader is what is slow: all that had arrived is in the pool.
        if seq_kv.claim.wanted:
            load.want(self._clock.now())
        if load.landed == before and self.load_policy.late(load, self.reader.alive) and not load.over:
            seq_kv.progress.declined = over = True
        if over or (load.over and not load.arrived):
            self._cache.close(seq_kv, tokens)
            return True
        return False

    def _bring(self, seq_kv: SequenceKV, tokens: Sequence[int], load: ContextLoad, arrival: Arrival) -> bool:
        """Write one stretch into private blocks and publish them; return False and publish nothing if that fails."""
        size = self._cache.info.block_tokens
        begin, (end, wants) = len(seq_kv.table.groups[0]), load.stretches[load.landed]
        parts = [self._pages(chunk, want) for chunk, want in zip(arrival.chunks, wants, strict=True)]
        groups = [want.group for want in wants]
        if not all(parts) or not self._cache.extend(seq_kv, tokens, end, groups):
            return False
        for pages, group in zip(parts, groups, strict=True):
            blocks = [block for block in seq_kv.table.groups[group][begin:] if block != NO_BLOCK]
            count = 1 if self._is_state(group) else (end - 1) % CHUNK_BLOCKS + 1
            self._engine.write_blocks(group, blocks, pages[count - len(blocks) : count]).wait()
        self._cache.publish(seq_kv, tokens, end * size)
        leading = seq_kv.chains[lead(self._cache.info.groups)]
        self._cache.seen.store(leading.key(at, tokens) for at in range(begin, end))
        more = self._bring_next(seq_kv, tokens, end, arrival.chunks, parts)
        if self._brings(groups):
            seq_kv.progress.bring(begin * size, end * size + more, arrival.tier)
            self._loaded += (end - begin) * size + more
        if arrival.copies:
            next(iter(self._stores.values())).keep(arrival.copies)
        load.landed += 1
        load.heard = self._clock.now()
        seq_kv.progress.load_seconds = load.heard - load.started
        return True

    def _pages(self, chunk: Chunk, want: Want) -> list[memoryview]:
        """Return the pages of a chunk; none if it is not the wanted chunk or its size is wrong."""
        page, view = self._cache.info.block_bytes[chunk.group], memoryview(chunk.pages).cast("B")
        count = 1 if self._is_state(chunk.group) else len(chunk.tokens) // self._cache.info.block_tokens
        whole = chunk.tokens == want.tokens or not self._is_state(chunk.group)
        if chunk.group != want.group or not whole or len(view) != count * page:
            return []
        return [view[at : at + page] for at in range(0, len(view), page)]

    def _bring_next(
        self,
        seq_kv: SequenceKV,
        tokens: Sequence[int],
        end: int,
        chunks: Sequence[Chunk],
        parts: Sequence[Sequence[memoryview]],
    ) -> int:
        """Publish the block after `end` if the chunks have it and its first tokens are the sequence's.

        Return how many tokens agree: `Cache.open` copies those.
        """
        size, at = self._cache.info.block_tokens, end % CHUNK_BLOCKS
        follows = {chunk.tokens[at * size : (at + 1) * size] for chunk in chunks}
        if not at or len(follows) != 1 or len(chunks) != len(self._cache.pools):
            return 0
        (follow,) = follows

        def write(group: int, block: int) -> None:
            self._engine.write_blocks(group, [block], [parts[group][at]]).wait()

        return self._cache.parts.put(seq_kv, tokens, end, follow, write)

    def _is_state(self, group: int) -> bool:
        return self._cache.info.groups[group].kind == "state"

    def _brings(self, groups: Sequence[int]) -> bool:
        """Return whether a stretch loaded KV of these groups, and not only states beside KV that the pool has."""
        full = {number for number, group in enumerate(self._cache.info.groups) if group.kind == "full"}
        return not full or not full.isdisjoint(groups)

    # ------------------------------------------------------------------------------------------- what is asked for

    def flush(self, done: Callable[[int], None]) -> None:
        """Call `done` with the number of chunks that were given up, once all others noted until now are stored."""
        self.write_behind.flush(done)

    def share(self, done: Done) -> None:
        """Call `done` once all noted until now is in the shared store, and what others put there is known.

        A store that does not answer is waited for `SETTLE_SECONDS`. Without one `done` is called at once.
        """
        shared = self._stores.get("shared")
        if not isinstance(shared, SettlingStore):
            done()
            return
        stores, settle = (shared,), lambda store: shared.settle(SETTLE_SECONDS)
        self.write_behind.flush(lambda lost: self.do(settle, stores, done), counts=False)

    def pin(self, owner: str, tokens: Sequence[int], salt: bytes, done: Done) -> None:
        """Pin a context's chunks in every store, in place of what the owner pinned before.

        Chunks that are not stored yet are pinned too; states only if they are stored or will be.
        """
        seq_kv = self._cache.context(salt)
        states = self._lookup.states(seq_kv, tokens)
        keys = self._lookup.kv_keys(seq_kv, tokens) + [key for key in states if self.write_behind.has(key)]
        self.do(lambda store: store.pin(owner, keys), tuple(self._stores.values()), done)

    def mark(self, tokens: Sequence[int], salt: bytes, keep: int, standing: Standing) -> None:
        """Set the standing of a context beyond its first `keep` tokens. No step waits for that."""

        def work() -> None:
            _, keys = self._beyond(tokens, salt, keep)
            for store in self._stores.values():
                store.mark(keys, standing)

        self.writer.push(work)

    def prefetch(self, tokens: Sequence[int], salt: bytes, done: Done) -> None:
        """Load a context into the pool. If a prefetch already loads it, wait for that one."""
        seq_kv = self._cache.context(salt)
        hit = self._cache.found(seq_kv, tokens) // self._cache.info.block_tokens
        load = self._asked_for(seq_kv, tokens, hit)
        if load is not None:
            load.done.append(lambda: self._after(load, tokens, salt, done))
        elif not self._begin(seq_kv, tokens, hit, 0, done):
            self._cache.close(seq_kv, tokens)  # it must not stay among the waiters
            done()

    def _asked_for(self, seq_kv: SequenceKV, tokens: Sequence[int], hit: int) -> ContextLoad | None:
        """Return a prefetch that brings more than `hit` blocks of this context, and perhaps of what extends it."""
        blocks = len(tokens) // self._cache.info.block_tokens
        for other, (load, wanted) in self._loads.items():
            last = min(other.claim.blocks.stop, blocks) - 1
            brings = load.forced and last >= hit and last in other.claim.blocks
            if brings and other.chains[0].key(last, wanted) == seq_kv.chains[0].key(last, tokens):
                return load
        return None

    def _after(self, load: ContextLoad, tokens: Sequence[int], salt: bytes, done: Done) -> None:
        """Prefetch the rest of a longer context after a prefetch that brought its beginning has ended.

        If that one was given up, end: the next one would be given up too, and each could hold up a request.
        """
        if load.landed == len(load.stretches):
            self.prefetch(tokens, salt, done)
        else:
            done()

    def evict(self, tokens: Sequence[int], salt: bytes, keep: int, disk: bool, done: Done) -> None:
        """Evict a context's KV beyond the first `keep` tokens from the pool and the stores; then call `done`.

        With `disk`, evict it from the disk too; otherwise write KV there first that is not there yet.
        """
        first, keys = self._beyond(tokens, salt, keep)
        stores = [store for tier, store in self._stores.items() if disk or tier == "ram"]

        def give_up() -> None:
            if disk:
                self._notes.forget(keys)
            self._cache.forget(self._cache.context(salt), tokens, keep)
            self.do(lambda store: self._lookup.drop(store, keys, salt, tokens, first), stores, dropped)

        def dropped() -> None:
            if disk:
                self.write_behind.drop_done()
            done()

        if disk:
            going = frozenset(keys)
            for seq_kv, (load, wanted) in tuple(self._loads.items()):
                if any(want.key in going for stretch in load.stretches for want in stretch.wants):
                    self._cache.close(seq_kv, wanted)
            keys += self.write_behind.drop(going, self._lookup.beginnings(self._cache.context(salt), tokens, first))
            give_up()
        else:
            self.write_behind.flush(lambda lost: give_up(), counts=False)

    def erase_of_model(
        self,
        model: bytes,
        tokens: Sequence[int],
        salt: bytes,
        keep: int,
        searched: Collection[bytes] | None,
        done: Callable[[bool], None],
    ) -> None:
        """Erase a context of a model that is not served now from its stores; call `done` with whether it is gone.

        `searched`: see `DurableStore.erase_of_model`.
        """
        if (store := self._durable) is None:
            return done(True)
        gone = list[bool]()
        erase = partial(store.erase_of_model, model, salt, tokens, keep, searched)
        self.do(lambda one: gone.append(erase()), (store,), lambda: done(gone == [True]))

    def paths(self, tokens: Sequence[int], salt: bytes) -> list[Path]:
        """Return the files that the disk has of a context, parents before children."""
        keys = self._lookup.all_keys(self._cache.context(salt), tokens)
        return [] if self._durable is None else self._durable.paths(keys)

    def import_kv(self, path: Path, tokens: Sequence[int], salt: bytes, done: Callable[[ImportedKv], None]) -> None:
        """Store a file's KV of a context on the disk, on a thread of its own, since there may be much."""
        store, seq_kv, budget = self._durable, self._cache.context(salt), self.write_behind.budget
        spent: dict[bytes, int] = {}
        if store is None:
            return done(ImportedKv())

        def keyed(group: int, depth: int, part: Sequence[int], pages: memoryview) -> Chunk | None:
            chunk = self._lookup.chunk(seq_kv, tokens, group, depth, part, pages)
            if chunk is None or not self._pages(chunk, Want(group, chunk.key, chunk.tokens)):
                return None
            if not store.has(chunk.key):  # a chunk that is stored already is not written again
                if not budget.left():
                    return None
                spent[chunk.key] = store.kept_bytes(group, len(pages))
                budget.spend(spent[chunk.key])
            return chunk

        def refuse(chunk: Chunk) -> None:
            budget.refund(spent.pop(chunk.key, 0))

        def work() -> None:
            taken = ImportedKv()
            try:
                taken = store.import_kv(path, keyed, refuse)
            except Exception as error:  # a bug of ours; the caller must get an answer all the same
                log.error("KV could not be taken in: %s", trace(error))
            self._answers.append(lambda: done(taken))
            self._wake()

        threading.Thread(target=work, name="cairn-kv-take-in", daemon=True).start()

    def lingers(self, tokens: Sequence[int], salt: bytes, keep: int) -> bool:
        """Return whether KV that `evict` should have removed from the disk is still there, because the disk refuses."""
        store = self._durable
        _, keys = self._beyond(tokens, salt, keep)
        return store is not None and store.lingers(keys)

    def unsaved(self, owner: str) -> bool:
        """Return whether the owner's last pin or unpin is not durable, because the disk refuses."""
        store = self._durable
        return store is not None and store.unsaved(owner)

    def _beyond(self, tokens: Sequence[int], salt: bytes, keep: int) -> tuple[int, list[bytes]]:
        """Return the first chunk beyond the first `keep` tokens of a context, and all keys from there on."""
        first = -(-keep // self._lookup.chunk_tokens)
        return first, self._lookup.all_keys(self._cache.context(salt), tokens, first)

    def where(self, tokens: Sequence[int], salt: bytes) -> Placed:
        """Return the leading tokens of a context in the pool and in each store."""
        seq_kv = self._cache.context(salt)
        counts = self._lookup.counts(seq_kv, tokens)
        pool = self._cache.found(seq_kv, tokens)
        ram, disk, shared = (counts.get(tier, 0) for tier in ("ram", "disk", "shared"))
        return Placed(pool=pool, ram=ram, disk=disk, shared=shared)

    def do(self, job: Callable[[Store], object], stores: Sequence[Store], done: Done) -> None:
        """Run a job on stores on the writer's thread, after what is queued, then `done` on this thread."""

        def work() -> None:
            try:
                for store in stores:
                    job(store)
            finally:
                self._answers.append(done)

        self.writer.push(work)

    def sweep(self, job: Sweep, done: Callable[[Swept | None], None]) -> bool:
        """Run a long job on the disk store on a thread of its own; return False if there is no such store.

        `done` is called with the result, None if the job failed. A caller that asks for a running job shares it: each
        job reads all that is stored.
        """
        store = self._durable
        if store is None:
            return False
        if job in self._sweeping:
            self._sweeping[job].append(done)
            return True

        def answer(swept: Swept | None) -> None:
            for one in self._sweeping.pop(job):
                one(swept)

        def work() -> None:
            swept = None
            try:
                swept = job(store)
            except Exception as error:  # a bug of ours; the callers must get an answer all the same
                log.error("the KV store could not be swept: %s", trace(error))
            self._answers.append(lambda: answer(swept))
            self._wake()

        threading.Thread(target=work, name="cairn-kv-sweep", daemon=True).start()
        self._sweeping[job] = [done]
        return True

    def news(self) -> KvStats | None:
        """Return the figures of all tiers if they changed since the last call. Too slow for every step."""
        now = self.stats()
        if now == self._reported:
            return None
        self._reported = now
        return now

    def _tend(self) -> None:
        """Do the disk's upkeep, about once a second on the writer's thread, and wake the worker if figures changed."""
        store = self._durable
        if store is not None:
            store.tend()
        if self.stats() != self._reported:
            self._wake()

    def stats(self) -> KvStats:
        """Return the figures of all tiers. Asks every store: too slow for every step."""
        now = {tier: store.stats() for tier, store in self._stores.items()}
        return KvStats(
            ram=now.get("ram"),
            disk=now.get("disk"),
            shared=now.get("shared"),
            queued=self.write_behind.chunks,
            dropped=self.write_behind.dropped,
            deferred=self.write_behind.budget_spent,
            loaded=self._loaded,
            load_seconds=self._load_seconds,
            abandoned=self._abandoned,
        )

    def start(self) -> None:
        """Start the threads that read and write."""
        self.writer.start()
        self.reader.start()

    def close(self, grace: float, *, intact: bool = True) -> None:
        """Write noted chunks for up to `grace` seconds, then close the stores. The engine must still be there.

        If its memory is not `intact`, nothing more is copied out of it: only what was copied before is written.
        """
        for seq_kv, (_, tokens) in tuple(self._loads.items()):
            self._cache.close(seq_kv, tokens)
        end = self._clock.now() + grace
        if intact:
            self.write_behind.finish(grace)
        self._notes.write_seen()
        ended = self.writer.close(max(0.0, end - self._clock.now()))
        if left := self.write_behind.left():
            log.warning("%d chunks of KV were not stored before the end, and will be computed again", left)
        # A store in which a thread still hangs is not closed; the end of the process releases it.
        if all([ended, self.reader.close()]):
            self._notes.close()
            for store in self._stores.values():
                store.close()
