"""The stores of a simulated world: the faults they inject into loads, and the laws of the tiers below the pool."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cairn.kv.pool.cache import lead
from cairn.kv.pool.sequence_kv import SequenceKV, TierName
from cairn.kv.ram import RamStore
from cairn.kv.tiers.store import HEAD_BYTES, Chunk, Store
from cairn.kv.tiers.tiers import Tiers
from cairn.kv.tiers.write_behind import IDLE_SECONDS, WriteLimits
from cairn.types.model_spec import CHUNK_BLOCKS
from cairn.types.outputs import FinishReason

if TYPE_CHECKING:
    from tests.laws.simulator import World


class Broken(AssertionError):
    """A law does not hold."""


def law(holds: bool, text: str) -> None:
    if not holds:
        raise Broken(text)


class UnsureStore(RamStore):
    """A store that loses chunks between look-up and fetch, is slow, and refuses to keep."""

    def __init__(self, budget: int, chance: random.Random, wait: Callable[[float], None]) -> None:
        super().__init__(budget)
        self.chance, self.wait = chance, wait
        self.losing = self.refusing = self.slow = 0.0
        self.fetched = 0

    def fetch(self, key: bytes, tokens: Sequence[int], buffer: memoryview | None = None) -> Chunk | None:
        if self.chance.random() < self.slow:
            self.wait(self.chance.uniform(0, 3))
        if self.chance.random() < self.losing:
            if self.chance.random() < 0.8:
                return None
            self.drop([key])
        chunk = super().fetch(key, tokens)
        self.fetched += chunk is not None
        if chunk is None or buffer is None:
            return chunk
        pages = memoryview(chunk.pages).cast("B")
        buffer[: len(pages)] = pages
        return dataclasses.replace(chunk, pages=buffer[: len(pages)])

    def keep(self, chunks: Sequence[Chunk]) -> int:
        if self.chance.random() < self.refusing:
            chunks = chunks[: self.chance.randrange(len(chunks))] if chunks else chunks
        return super().keep(chunks)


@dataclass(eq=False)
class Flushing:
    """A flush that was requested, and the loss count it must report."""

    chunks: set[tuple[bytes, int]]
    """Chunks (key, serial) outstanding then; one that was lost and noted again has another serial."""
    lost: int


class Storage:
    """The tiers below the pools of one world; its disk outlives the workers."""

    def __init__(self, world: World, chance: random.Random, *, sure: bool) -> None:
        """Draw faults and sizes. With `sure`, everything handed over is kept and nothing is evicted on demand."""
        self.world, self.chance, self.sure = world, chance, sure
        chunk = 8 * world.size * CHUNK_BLOCKS + 1024
        self.disk = UnsureStore(chunk * (chance.choice((2, 6, 30, 1000)) + 1000 * sure), chance, self.pass_time)
        self.disk.losing = chance.choice((0.0, 0.1, 0.3))
        self.disk.refusing = chance.choice((0.0, 0.0, 0.1))
        if sure:
            self.disk.losing = self.disk.refusing = 0.0
        self.disk.slow = chance.choice((0.0, 0.0, 0.05, 0.5))
        self.with_ram = chance.random() < 0.3
        self.hanging = chance.random() < 0.1
        """Whether the reader thread hangs in a store for ever."""
        self.pace = chance.choice((1.0, 1.0, 0.3, 0.1))
        """How often the threads make progress between two steps."""
        self.load = chance.choice(("always", "always", "always", "auto", "auto", "never"))
        self.page = 8 * world.size * CHUNK_BLOCKS
        queue = self.page * chance.choice((1, 4, 1000))
        self.limits = WriteLimits(
            chance.choice((0.0, 1e9, 1e9, 1e9)) + 1e9 * sure, queue, chunk * chance.choice((1, 100))
        )
        self.asked = self.answered = self.loaded = 0
        self.evicted = False
        self.tails = self.whole = 0
        """Tails that were stored at rest, and contexts whose end was stored completely."""
        self.start()

    def start(self) -> None:
        """Create the tiers of a new worker."""
        world = self.world
        if hasattr(self, "tiers"):
            self.loaded += self.tiers.stats().loaded
        self.asked = self.answered = 0
        stores: dict[TierName, Store] = {"disk": self.disk}
        if self.with_ram:
            stores = {"ram": RamStore(20_000), "disk": self.disk}
        self.tiers = Tiers(world.cache, world.engine.inner, world.clock, stores, load=self.load, limits=self.limits)
        behind = self.tiers.write_behind
        self.flushing, self.unreported, self.lose = list[Flushing](), 0, behind._lose
        behind._lose = self.lost  # type: ignore[method-assign]

    def warm(self) -> None:
        """Fill the store with what earlier workers may have left."""
        world = self.world
        width = CHUNK_BLOCKS * world.size
        for base in world.bases:
            context = world.cache.context(self.chance.choice((b"", b"", b"tenant")))
            for number in sorted(range(len(context.chains)), key=lambda one: world.groups[one].kind == "state"):
                chain = context.chains[number]
                keys = [chain.key(i, base) for i in range(len(base) // world.size)][CHUNK_BLOCKS - 1 :: CHUNK_BLOCKS]
                truth = np.array(world.digests(number, tuple(base)), dtype=np.uint64)
                state = world.groups[number].kind == "state"
                parents = self.parents(context, base, keys) if state else [b"", *keys]
                for index in range(self.chance.choice((0, len(keys) // 2, len(keys), len(keys)))):
                    part = slice(index * width, (index + 1) * width)
                    pages = truth[part][-1 if state else 0 :].tobytes()
                    depth = (index + state) * width
                    blocks = range(index * CHUNK_BLOCKS, (index + 1) * CHUNK_BLOCKS - 1)
                    heads = () if state else tuple(chain.key(block, base)[:HEAD_BYTES] for block in blocks)
                    chunk = Chunk(keys[index], parents[index], tuple(base[part]), depth, pages, number, heads)
                    if not state or self.chance.random() < 0.4:
                        RamStore.keep(self.disk, [chunk])

    def parents(self, context: SequenceKV, base: Sequence[int], keys: Sequence[bytes]) -> list[bytes]:
        """Return the chunks that states extend: the KV of the same tokens, or nothing if there is none."""
        number = lead(self.world.groups)
        if self.world.groups[number].kind == "state":
            return [b""] * len(keys)
        chain = context.chains[number]
        return [chain.key((index + 1) * CHUNK_BLOCKS - 1, base) for index in range(len(keys))]

    def pass_time(self, seconds: float) -> None:
        self.world.clock.time += seconds

    def calm(self) -> None:
        """Stop all faults."""
        self.disk.losing = self.disk.refusing = self.disk.slow = 0.0

    def turn(self, idle: bool) -> None:
        """Do what happens between two steps."""
        chance = self.chance
        for _ in range(chance.choice((0, 1, 1, 4)) if chance.random() < self.pace else 0):
            self.work()
        if chance.random() < 0.1 * (not self.sure):
            self.ask()
        self.tiers.turn(idle)
        self.audit()

    def work(self) -> bool:
        return any([not self.hanging and self.tiers.reader.work(), self.tiers.writer.work()])

    def ask(self) -> None:
        """Make one random request of those that the front makes."""
        world, chance = self.world, self.chance
        if not world.live:
            return
        request = chance.choice(list(world.live.values())).request
        tokens = (request.prompt + tuple(world.live[request.id].got))[: chance.randint(1, 2 * len(request.prompt))]
        kind = chance.choice(("flush", "pin", "unpin", "prefetch", "evict", "where"))
        self.asked += kind != "where"
        if kind == "flush":
            flush = Flushing(set(), self.unreported)
            self.tiers.flush(lambda gone: self.flushed(flush, gone))
            flush.chunks.update(self.tiers.write_behind._outstanding.items())  # including chunks that waited as tails
            self.unreported = 0
            self.flushing.append(flush)
        elif kind in ("pin", "unpin"):
            self.tiers.pin("agent", tokens if kind == "pin" else (), request.salt, self.done)
        elif kind == "prefetch":
            self.tiers.prefetch(tokens, request.salt, self.done)
        elif kind == "evict":
            self.evicted = True
            self.tiers.evict(tokens, request.salt, chance.randint(0, len(tokens)), chance.random() < 0.5, self.done)
        else:
            placed = self.tiers.where(tokens, request.salt)
            law(placed.pool <= len(tokens) and placed.disk <= len(tokens), "more is somewhere than there is")

    def done(self) -> None:
        self.answered += 1

    def lost(self, serial: int) -> None:
        """Record the loss of a chunk with every flush that waits for it, or for the next flush to report."""
        waiting = [flush for flush in self.flushing if serial in {one for _, one in flush.chunks}]
        for flush in waiting:
            flush.lost += 1
        self.unreported += not waiting
        self.lose(serial)

    def flushed(self, flush: Flushing, gone: int) -> None:
        self.answered += 1
        self.flushing.remove(flush)
        left = flush.chunks & set(self.tiers.write_behind._outstanding.items())
        law(not left, "a flush was answered before all was written")
        law(gone == flush.lost, "a flush does not say what was given up")

    def audit(self) -> None:
        """Check the laws of the state between two steps."""
        behind = self.tiers.write_behind
        law(behind.bytes == sum(size for size, _ in behind._copied.values()), "the queue's bytes do not add up")
        law(behind.bytes <= max(self.limits.queue_bytes, self.page), "the queue's bound was ignored")
        places = [*behind.waiting.noted, *behind.waiting.spare, *behind._copied]
        law(sorted(behind._outstanding) == sorted(places), "a chunk waits nowhere or twice")
        law(not set(behind.waiting.tails) & set(places), "a tail waits twice")
        waiting = {**behind.waiting.noted, **behind.waiting.spare, **behind.waiting.tails}
        for noted in waiting.values():
            blocks = [self.world.cache.pools[noted.chunk.group]._index.get(block) for block in noted.blocks]
            law(None not in blocks, "a chunk waits for blocks that are gone")
            state = self.world.groups[noted.chunk.group].kind == "state"
            law(state or not set(noted.tails) & set(waiting), "a tail waits beside the chunk that replaces it")
        law(
            not any(noted.chunk.parent in behind.waiting.spare for noted in behind.waiting.noted.values()),
            "a noted chunk waits behind a spare parent",
        )
        queued = [job for job in self.tiers.writer._jobs if isinstance(job, Chunk)]
        later: set[bytes] = set()
        for job in reversed(queued):
            law(job.parent not in later, "a chunk is queued before what it extends")
            later.add(job.key)
        used = sorted((block, key) for key, noted in waiting.items() for block in noted.blocks)
        law(
            used == sorted((block, key) for block, keys in behind.waiting.users.items() for key in keys),
            "blocks are noted for the wrong chunks",
        )
        counts = Counter[int]()
        for noted in behind.waiting.noted.values():
            counts[noted.chunk.group] += len(noted.blocks)
        law(
            [counts[group] for group in range(len(behind.waiting.blocks))] == behind.waiting.blocks,
            "noted blocks are miscounted",
        )
        denied = {context for context in self.tiers._loads if not context.progress.loading}
        law(not denied, "a load that its context denies")
        law(self.disk.stats().bytes <= self.disk.stats().budget, "the store is larger than its budget")
        for key, chunk in self.disk._chunks.items():
            law(not chunk.parent or chunk.parent in self.disk._chunks, "the store has a chunk without what it extends")
            law(key == chunk.key, "a chunk under another key")

    def end(self) -> None:
        """End a worker in order: everything the pools have of ended contexts must be stored."""
        world, behind = self.world, self.tiers.write_behind
        for sequence in tuple(world.scheduler._sequences.values()):
            world.ended.append((sequence.request.salt, list(sequence.tokens)))
            world.scheduler.drop(sequence.request.id, FinishReason.CANCELLED)
        for _ in range(2000):
            behind.finish(0.0)
            if not self.tiers.writer.work() and not behind.chunks:
                break
        behind.left()
        # KV that left a window, and what a small pool gave up, cannot be stored with what follows.
        if not self.sure or behind.dropped or any(group.kind == "window" for group in world.groups):
            return
        for salt, tokens in world.ended:
            context = world.cache.context(salt)
            cached = world.cache.found(context, tokens)
            if any(group.kind == "state" for group in world.groups):
                cached -= cached % (CHUNK_BLOCKS * world.size)  # the state of a longer context replaces this one's
            law(self.tiers.where(tokens, salt).disk >= cached, "an end leaves something behind that is not stored")
            self.whole += cached > 0

    def at_rest(self) -> None:
        """Check that nothing is outstanding, and that every stored chunk holds what its key says."""
        world = self.world
        if self.chance.random() < 0.5 or world.scarce is not None:
            self.end()
        for _ in range(2000):
            busy = [self.work(), self.tiers.turn(True), self.tiers.loading, self.tiers.write_behind.chunks > 0]
            if not any(busy):
                break
            world.clock.time += 0.5
        else:
            raise Broken("the tiers do not come to rest")
        world.clock.time += IDLE_SECONDS + 1
        while self.tiers.turn(True) or self.work() or self.tiers.write_behind.chunks:
            pass
        law(not self.tiers.write_behind.waiting.tails, "a tail waits although its context is idle")
        law(self.asked == self.answered, "somebody waits for an answer for ever")
        law(not self.tiers.write_behind.chunks and not self.tiers.write_behind.bytes, "chunks are outstanding at rest")
        for store in self.tiers._stores.values():
            assert isinstance(store, RamStore)
            for key, chunk in store._chunks.items():
                self.check(key, chunk)
            self.check_tails(store)
        self.loaded += self.tiers.stats().loaded

    def check(self, key: bytes, chunk: Chunk) -> None:
        """Check the laws of one stored chunk."""
        world = self.world
        tokens, width = world.tokens_of(key), CHUNK_BLOCKS * world.size
        state, length = world.groups[chunk.group].kind == "state", (len(tokens) - 1) % width + 1
        law(tokens[-length:] == chunk.tokens, "a chunk with other tokens than its key's")
        law(length % world.size == 0, "a tail with a block that is not full")
        law(chunk.depth == len(tokens) - (0 if state else length), "a chunk says a wrong depth")
        law(len(chunk.heads) == (0 if state else length // world.size - 1), "a chunk does not say which blocks it has")
        truth = world.digests(chunk.group, tokens)[-1 if state else -length :]
        words = [word for page in [memoryview(chunk.pages)] for word in page.cast("B").cast("Q").tolist()]
        law(words == truth, "a stored chunk does not hold what its key says")
        self.tails += length < width and not state

    def check_tails(self, store: RamStore) -> None:
        """Check that of chunks with a common beginning only the longest is stored."""
        width = CHUNK_BLOCKS * self.world.size
        there: dict[tuple[bytes, tuple[int, ...]], list[tuple[int, ...]]] = {}
        for chunk in store._chunks.values():
            tokens = self.world.tokens_of(chunk.key)
            before = len(tokens) - len(chunk.tokens)
            law(before % width == 0, "a chunk begins within another")
            if self.world.groups[chunk.group].kind != "state":
                root = self.world.parents[self.world.first_key(chunk.key)][0]
                there.setdefault((root, tokens[:before]), []).append(chunk.tokens)
        for alike in there.values():
            for one, two in itertools.pairwise(sorted(alike)):
                law(two[: len(one)] != one, "a tail is kept beside a longer one")
