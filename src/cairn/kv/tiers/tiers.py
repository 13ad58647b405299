"""What lies below the pool: when a context is stored, and how it comes back.

    pool  --findable-->  Behind  --Writer's thread-->  RAM, disk
    pool  <--published--  private blocks  <--land, between steps--  arrived  <--Reader's thread--  RAM, disk

A load holds what it has brought up in the tables of the context that waits for it, so the order of eviction stays
leaves first; it ends by closing the context, whose next `open` finds all of it in the pool. Everything here runs on
the worker's thread; the threads of `StoreWriter` and `StoreReader` see chunks only.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from cairn.kv.pool.attention_window import lead
from cairn.kv.pool.cache import Cache
from cairn.kv.pool.sequence_kv import SequenceKV, TierName
from cairn.kv.tiers.chunk_lookup import ChunkLookup
from cairn.kv.tiers.reader import Arrival, ContextLoad, LoadMode, LoadPolicy, StoreReader, Want
from cairn.kv.tiers.reuse_hints import Standing
from cairn.kv.tiers.store import Chunk, DurableStore, Store, chunk_sizes
from cairn.kv.tiers.store_memory import StoreMemory
from cairn.kv.tiers.store_writer import StoreWriter
from cairn.kv.tiers.write_behind import WriteBehind, WriteLimits
from cairn.system.interfaces import Clock
from cairn.types.errors import trace
from cairn.types.model_spec import CHUNK_BLOCKS
from cairn.types.stats import KvStats, MissReason, Placed, Swept, TakenIn
from cairn.types.step import NO_BLOCK, Engine

log = logging.getLogger(__name__)

TURN_BYTES = 32 << 20
"""Put into the pool between two steps for one load, about."""

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
        self.writer = StoreWriter(tuple(stores.values()), clock, wake, self._tend)
        self.reader = StoreReader(stores, self._sizes, self.load_policy, clock, wake)
        *_, durable = stores.values()
        limits = limits or WriteLimits()
        notes = self._durable.notes if self._durable is not None else None
        self._memory = StoreMemory(notes, cache.seen, self.writer, clock, limits.day_bytes)
        self.write_behind = WriteBehind(cache, engine, clock, durable, self.writer, limits, self._memory.budget)
        self._lookup = ChunkLookup(cache, stores)
        self._loads: dict[SequenceKV, tuple[ContextLoad, Sequence[int]]] = {}
        self._answers: deque[Done] = deque()
        """What to do in the next turn, on the worker's thread."""
        self._sweeping: dict[Sweep, list[Callable[[Swept | None], None]]] = {}
        """What runs on threads of its own, and who waits for it."""
        self._loaded = self._abandoned = 0
        self._load_seconds = 0.0
        self._wake = wake
        self._reported = KvStats()
        cache.below = self

    @property
    def loading(self) -> bool:
        """Whether anything is being brought up."""
        return bool(self._loads)

    # ------------------------------------------------------------------------------------- what the cache says

    def findable(self, context: SequenceKV, tokens: Sequence[int]) -> None:
        """See `LowerTiers`."""
        self.write_behind.findable(context, tokens)

    def lacks(self, block: bytes) -> MissReason | None:
        """See `LowerTiers`."""
        if self.write_behind.writes(block):
            return "not stored yet"
        return "damaged" if self._durable is not None and self._durable.was_damaged(block) else None

    def ended(self, context: SequenceKV, tokens: Sequence[int], boundary: int, computed: int) -> None:
        """See `LowerTiers`."""
        self.write_behind.ended(context, tokens, boundary, computed)

    def unwanted(self, key: bytes) -> None:
        """See `LowerTiers`."""
        self.write_behind.unwanted(key)

    def load(self, context: SequenceKV, tokens: Sequence[int], hit: int, spare: int, most: int | None) -> bool:
        """See `LowerTiers`."""
        return self._begin(context, tokens, hit, spare, None, most)

    def stop(self, context: SequenceKV) -> None:
        """See `LowerTiers`: whatever still arrives is for nobody."""
        context.progress.loading = False
        load, _ = self._loads.pop(context)
        load.cancelled = True
        self.reader.taken()
        if load.landed < len(load.stretches):
            self._abandoned += 1
        if load.landed:
            self._load_seconds += load.heard - load.started
        self._answers += load.done

    def yield_blocks(self) -> bool:
        """See `LowerTiers`: the youngest load goes first."""
        if not self._loads:
            return False
        context = next(reversed(self._loads))
        self._cache.close(context, self._loads[context][1])
        return True

    def _begin(
        self,
        context: SequenceKV,
        tokens: Sequence[int],
        hit: int,
        spare: int,
        done: Done | None,
        most: int | None = None,
    ) -> bool:
        """Begin a load, whose end calls `done`; one with a `done` was asked for and is always worth it."""
        if self.write_behind.dropping:  # what is found now may be gone when it would lie in the pool
            return False
        context.progress.declined = False  # what was thought of an earlier load says nothing of what this one finds
        stretches = self._lookup.wants(context, tokens, hit)
        stop = self._lookup.usable(tokens, stretches[-1].stop) if stretches else hit
        saved = (stop - hit) * self._cache.info.block_tokens
        if saved <= 0 or (most is not None and len(tokens) - stop * self._cache.info.block_tokens > most):
            return False
        size = sum(self._sizes[want.group] for stretch in stretches for want in stretch.wants)
        ahead = sum(load.bytes_left for load, _ in self._loads.values() if not load.ahead_of_need)
        if self.reader.hangs or (done is None and not self.load_policy.worth(saved, size, ahead)):
            context.progress.declined = True
            return False
        if not self._cache.prepare(context, tokens, hit, stop, spare):
            return False
        load = ContextLoad(
            stretches, saved, size, self._clock.now(), forced=done is not None, done=[done] if done else []
        )
        self._loads[context] = load, tokens
        context.progress.loading = True
        self.reader.begin(load)
        return True

    # ----------------------------------------------------------------------------------------- between two steps

    def turn(self, idle: bool) -> bool:
        """Put what has arrived into the pool and copy what is to be written. True if there is more to do at once.

        `idle`: no request has wanted a step for a while. Raises nothing that a store does.
        """
        landing = [self._land(context, *item) for context, item in tuple(self._loads.items())]
        self._memory.turn()
        while self._answers:
            self._answers.popleft()()
        reading = self.write_behind.turn(idle)
        return any(landing) or reading

    def _land(self, context: SequenceKV, load: ContextLoad, tokens: Sequence[int]) -> bool:
        """Put what has arrived for a context into the pool, where it is found at once. True if there is more."""
        room, over, before = TURN_BYTES, False, load.landed
        while load.arrived and room > 0 and not over:
            arrival = load.arrived.popleft()
            over = not self._bring(context, tokens, load, arrival)
            room -= sum(len(chunk.pages) for chunk in arrival.chunks)
            self.reader.taken(arrival)
        if not over and load.arrived:
            return True
        # What lands is slow only as the steps between are; the reader has more.
        if context.claim.wanted:
            load.want(self._clock.now())
        if load.landed == before and self.load_policy.late(load, self.reader.alive) and not load.over:
            context.progress.declined = over = True
        if over or (load.over and not load.arrived):
            self._cache.close(context, tokens)
            return True
        return False

    def _bring(self, context: SequenceKV, tokens: Sequence[int], load: ContextLoad, arrival: Arrival) -> bool:
        """Write one stretch into private blocks and publish them; False, and nothing is found, if that cannot be."""
        size = self._cache.info.block_tokens
        begin, (end, wants) = len(context.table.groups[0]), load.stretches[load.landed]
        parts = [self._pages(chunk, want) for chunk, want in zip(arrival.chunks, wants, strict=True)]
        groups = [want.group for want in wants]
        if not all(parts) or not self._cache.extend(context, tokens, end, groups):
            return False
        for pages, group in zip(parts, groups, strict=True):
            blocks = [block for block in context.table.groups[group][begin:] if block != NO_BLOCK]
            count = 1 if self._is_state(group) else (end - 1) % CHUNK_BLOCKS + 1
            self._engine.write_blocks(group, blocks, pages[count - len(blocks) : count]).wait()
        self._cache.publish(context, tokens, end * size)
        leading = context.chains[lead(self._cache.info.groups)]
        self._cache.seen.store(leading.key(at, tokens) for at in range(begin, end))
        more = self._bring_next(context, tokens, end, arrival.chunks, parts)
        if self._brings(groups):
            context.progress.bring(begin * size, end * size + more, arrival.tier)
            self._loaded += (end - begin) * size + more
        if arrival.copies:
            next(iter(self._stores.values())).keep(arrival.copies)
        load.landed += 1
        load.heard = self._clock.now()
        context.progress.load_seconds = load.heard - load.started
        return True

    def _pages(self, chunk: Chunk, want: Want) -> list[memoryview]:
        """The pages of a chunk; none of one that is not what its tokens say or not what was wanted."""
        page, view = self._cache.info.block_bytes[chunk.group], memoryview(chunk.pages).cast("B")
        count = 1 if self._is_state(chunk.group) else len(chunk.tokens) // self._cache.info.block_tokens
        whole = chunk.tokens == want.tokens or not self._is_state(chunk.group)
        if chunk.group != want.group or not whole or len(view) != count * page:
            return []
        return [view[at : at + page] for at in range(0, len(view), page)]

    def _bring_next(
        self,
        context: SequenceKV,
        tokens: Sequence[int],
        end: int,
        chunks: Sequence[Chunk],
        parts: Sequence[Sequence[memoryview]],
    ) -> int:
        """Put the block into the pools that chunks go on with after block `end`, where its first tokens are the
        context's; return how many are: `Cache.open` copies those."""
        size, at = self._cache.info.block_tokens, end % CHUNK_BLOCKS
        follows = {chunk.tokens[at * size : (at + 1) * size] for chunk in chunks}
        if not at or len(follows) != 1 or len(chunks) != len(self._cache.pools):
            return 0
        (follow,) = follows

        def write(group: int, block: int) -> None:
            self._engine.write_blocks(group, [block], [parts[group][at]]).wait()

        return self._cache.put_beside(context, tokens, end, follow, write)

    def _is_state(self, group: int) -> bool:
        return self._cache.info.groups[group].kind == "state"

    def _brings(self, groups: Sequence[int]) -> bool:
        """Whether chunks of these groups are all that a stretch needed, and its KV was not in the pool already."""
        full = {number for number, group in enumerate(self._cache.info.groups) if group.kind == "full"}
        return not full or not full.isdisjoint(groups)

    # ------------------------------------------------------------------------------------------- what is asked for

    def flush(self, done: Callable[[int], None]) -> None:
        """Call `done` when all noted until now is stored, with the number of chunks that were given up instead."""
        self.write_behind.flush(done)

    def pin(self, owner: str, tokens: Sequence[int], salt: bytes, done: Done) -> None:
        """Pin a context's chunks in every store, in the place of what the owner pinned before.

        Also chunks that are not there yet; of states only those that are, or wait to be stored.
        """
        context = self._cache.context(salt)
        states = self._lookup.states(context, tokens)
        keys = self._lookup.kv_keys(context, tokens) + [key for key in states if self.write_behind.has(key)]
        self.do(lambda store: store.pin(owner, keys), tuple(self._stores.values()), done)

    def mark(self, tokens: Sequence[int], salt: bytes, keep: int, standing: Standing) -> None:
        """Say how soon the stores may evict a context beyond its first `keep` tokens. No step waits for that."""

        def work() -> None:
            _, keys = self._beyond(tokens, salt, keep)
            for store in self._stores.values():
                store.mark(keys, standing)

        self.writer.push(work)

    def prefetch(self, tokens: Sequence[int], salt: bytes, done: Done) -> None:
        """Bring a context up into the pool. What is being brought up for another who asked is not read once more."""
        context = self._cache.context(salt)
        hit = self._cache.found(context, tokens) // self._cache.info.block_tokens
        load = self._asked_for(context, tokens, hit)
        if load is not None:
            load.done.append(lambda: self._after(load, tokens, salt, done))
        elif not self._begin(context, tokens, hit, 0, done):
            self._cache.close(context, tokens)  # it waits for nothing
            done()

    def _asked_for(self, context: SequenceKV, tokens: Sequence[int], hit: int) -> ContextLoad | None:
        """A load that was asked for and brings more than `hit` blocks of this context, and perhaps what extends it."""
        blocks = len(tokens) // self._cache.info.block_tokens
        for other, (load, wanted) in self._loads.items():
            last = min(other.claim.blocks.stop, blocks) - 1
            brings = load.forced and last >= hit and last in other.claim.blocks
            if brings and other.chains[0].key(last, wanted) == context.chains[0].key(last, tokens):
                return load
        return None

    def _after(self, load: ContextLoad, tokens: Sequence[int], salt: bytes, done: Done) -> None:
        """The end of what `prefetch` found to be asked for already: what may be left of a longer context is next.

        Not where it was given up: so would the next one be, and each of them could hold up a request once more.
        """
        if load.landed == len(load.stretches):
            self.prefetch(tokens, salt, done)
        else:
            done()

    def evict(self, tokens: Sequence[int], salt: bytes, keep: int, disk: bool, done: Done) -> None:
        """Give up a context's KV beyond the first `keep` tokens, in the pool and the stores; on the disk only if told.

        What of it is not yet on the disk is written first where it may stay there.
        """
        first, keys = self._beyond(tokens, salt, keep)
        stores = [store for tier, store in self._stores.items() if disk or tier != "disk"]

        def give_up() -> None:
            if disk:
                self._memory.forget(keys)
            self._cache.forget(self._cache.context(salt), tokens, keep)
            self.do(lambda store: self._lookup.drop(store, keys, salt, tokens, first), stores, dropped)

        def dropped() -> None:
            if disk:
                self.write_behind.drop_done()
            done()

        if disk:
            going = frozenset(keys)
            for context, (load, wanted) in tuple(self._loads.items()):
                if any(want.key in going for stretch in load.stretches for want in stretch.wants):
                    self._cache.close(context, wanted)
            keys += self.write_behind.drop(going, self._lookup.beginnings(self._cache.context(salt), tokens, first))
            give_up()
        else:
            self.write_behind.flush(lambda lost: give_up(), told=False)

    def erase_of_model(
        self, model: bytes, tokens: Sequence[int], salt: bytes, keep: int, done: Callable[[bool], None]
    ) -> None:
        """Erase a context of a model that is not served now from its stores beside this one; `done` hears whether it
        went."""
        if (store := self._durable) is None:
            return done(True)
        gone = list[bool]()
        erase = partial(store.erase_of_model, model, salt, tokens, keep)
        self.do(lambda one: gone.append(erase()), (store,), lambda: done(gone == [True]))

    def paths(self, tokens: Sequence[int], salt: bytes) -> list[Path]:
        """The files that the disk has of a context, what is extended before what extends it."""
        keys = self._lookup.all_keys(self._cache.context(salt), tokens)
        return [] if self._durable is None else self._durable.paths(keys)

    def take_in(self, path: Path, tokens: Sequence[int], salt: bytes, done: Callable[[TakenIn], None]) -> None:
        """Keep on the disk what a file has of a context's KV; on a thread of its own, since there may be much."""
        store, context, budget = self._durable, self._cache.context(salt), self.write_behind.budget
        if store is None:
            return done(TakenIn())

        def keyed(group: int, depth: int, part: Sequence[int], pages: memoryview) -> Chunk | None:
            chunk = self._lookup.chunk(context, tokens, group, depth, part, pages)
            if chunk is None or not self._pages(chunk, Want(group, chunk.key, chunk.tokens)) or not budget.left():
                return None
            budget.spend(store.kept_bytes(group, len(pages)))
            return chunk

        def work() -> None:
            taken = TakenIn()
            try:
                taken = store.take_in(path, keyed)
            except Exception as error:  # a bug of ours; whoever asked must hear of it all the same
                log.error("KV could not be taken in: %s", trace(error))
            self._answers.append(lambda: done(taken))
            self._wake()

        threading.Thread(target=work, name="cairn-kv-take-in", daemon=True).start()

    def lingers(self, tokens: Sequence[int], salt: bytes, keep: int) -> bool:
        """Whether something that `evict` was to take from the disk is there still, because the disk refuses that."""
        store = self._durable
        _, keys = self._beyond(tokens, salt, keep)
        return store is not None and store.lingers(keys)

    def unsaved(self, owner: str) -> bool:
        """Whether what this owner pinned or unpinned last is not durable, because the disk refuses that."""
        store = self._durable
        return store is not None and store.unsaved(owner)

    def _beyond(self, tokens: Sequence[int], salt: bytes, keep: int) -> tuple[int, list[bytes]]:
        """The first chunk of a context beyond its first `keep` tokens, and the keys of all from there on."""
        first = -(-keep // self._lookup.chunk_tokens)
        return first, self._lookup.all_keys(self._cache.context(salt), tokens, first)

    def where(self, tokens: Sequence[int], salt: bytes) -> Placed:
        """Leading tokens of a context in the pool and in each store."""
        context = self._cache.context(salt)
        counts = self._lookup.counts(context, tokens)
        pool = self._cache.found(context, tokens)
        return Placed(pool=pool, ram=counts.get("ram", 0), disk=counts.get("disk", 0))

    def do(self, job: Callable[[Store], object], stores: Sequence[Store], done: Done) -> None:
        """Do something to stores after what is queued, on the writer's thread, and `done` on this one."""

        def work() -> None:
            try:
                for store in stores:
                    job(store)
            finally:
                self._answers.append(done)

        self.writer.push(work)

    def sweep(self, job: Sweep, done: Callable[[Swept | None], None]) -> bool:
        """Do something long to the disk store on a thread of its own; False where there is no such store.

        `done` gets what came of it, None where it failed. Who asks for a job that runs already shares it: each reads
        all that is stored.
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
            except Exception as error:  # a bug of ours; whoever asked must hear of it all the same
                log.error("the KV store could not be looked over: %s", trace(error))
            self._answers.append(lambda: answer(swept))
            self._wake()

        threading.Thread(target=work, name="cairn-kv-sweep", daemon=True).start()
        self._sweeping[job] = [done]
        return True

    def news(self) -> KvStats | None:
        """All tiers now, if that is something else than it was at the last call. Not for every step."""
        now = self.stats()
        if now == self._reported:
            return None
        self._reported = now
        return now

    def _tend(self) -> None:
        """About once a second, on the writer's thread: look after the disk, and let its news be heard."""
        store = self._durable
        if store is not None:
            store.tend()
        if self.stats() != self._reported:
            self._wake()

    def stats(self) -> KvStats:
        """All tiers now. Asks every store: not for every step."""
        now = {tier: store.stats() for tier, store in self._stores.items()}
        return KvStats(
            ram=now.get("ram"),
            disk=now.get("disk"),
            queued=self.write_behind.chunks,
            dropped=self.write_behind.dropped,
            deferred=self.write_behind.budget_spent,
            loaded=self._loaded,
            load_seconds=self._load_seconds,
            abandoned=self._abandoned,
        )

    def start(self) -> None:
        """Let threads read and write."""
        self.writer.start()
        self.reader.start()

    def close(self, grace: float) -> None:
        """Write what is noted for up to `grace` seconds, then give the stores back. The engine must still be there."""
        for context, (_, tokens) in tuple(self._loads.items()):
            self._cache.close(context, tokens)
        end = self._clock.now() + grace
        self.write_behind.finish(grace)
        self._memory.write_seen()
        ended = self.writer.close(max(0.0, end - self._clock.now()))
        if left := self.write_behind.left():
            log.warning("%d chunks of KV were not stored before the end, and will be computed again", left)
        # A store is left as it is while a thread still hangs in it; the end of the process gives it back.
        if all([ended, self.reader.close()]):
            self._memory.close()
            for store in self._stores.values():
                store.close()
