"""A worker without a process: scheduler, cache, fake engine and tiers on one thread, stepped by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from cairn.engine.fake import FakeEngine, fake_spec
from cairn.kv.pool.cache import Cache
from cairn.kv.pool.sequence_kv import TierName
from cairn.kv.tiers.reader import LoadMode
from cairn.kv.tiers.store import Chunk, DurableStore, Standing, Store
from cairn.kv.tiers.tiers import Tiers
from cairn.kv.tiers.write_behind import WriteLimits
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.step_budget import Limits
from cairn.types.outputs import FinishReason, Output
from cairn.types.request import Request, SamplingParams
from cairn.types.stats import CacheReport, TierStats
from tests.laws.simulator import VirtualClock

SIZE = 4
"""Tokens in a block; a chunk is 16."""


class Between:
    """A store whose calls can be observed and replaced: `fetch` and `keep`."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.fetch: Callable[[bytes, Sequence[int], memoryview | None], Chunk | None] = inner.fetch
        self.keep: Callable[[Sequence[Chunk]], int] = inner.keep
        self.pinned: dict[str, tuple[bytes, ...]] = {}

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        return self.inner.match_prefix(keys)

    def has(self, key: bytes) -> bool:
        return self.inner.has(key)

    def kept_bytes(self, group: int, size: int) -> int:
        return self.inner.kept_bytes(group, size)

    def match_within(self, keys: Sequence[bytes]) -> tuple[int, bytes] | None:
        return self.inner.match_within(keys)

    def drop(self, keys: Sequence[bytes]) -> int:
        return self.inner.drop(keys)

    def pin(self, owner: str, keys: Sequence[bytes]) -> None:
        self.pinned[owner] = tuple(keys)
        self.inner.pin(owner, keys)

    def mark(self, keys: Sequence[bytes], standing: Standing) -> None:
        self.inner.mark(keys, standing)

    def durable(self) -> DurableStore | None:
        return None

    def stats(self) -> TierStats:
        return self.inner.stats()

    def close(self) -> None:
        self.inner.close()


class Rig:
    """One worker's life, without threads: `settle` does their work."""

    def __init__(
        self,
        stores: Mapping[TierName, Store] | None,
        *,
        blocks: int | Sequence[int] = 64,
        windows: Sequence[int] = (0,),
        load: LoadMode = "always",
        limits: WriteLimits | None = None,
        identity: bytes = b"fake",
        context: int = 512,
        scheduling: Limits | None = None,
        size: int = SIZE,
    ) -> None:
        spec = msgspec.structs.replace(fake_spec(64, context, windows), identity=identity)
        self.clock = VirtualClock()
        self.engine = FakeEngine(spec, blocks=blocks, block_tokens=size)
        self.cache = Cache(self.engine.info)
        self.tiers = Tiers(self.cache, self.engine, self.clock, stores, load=load, limits=limits) if stores else None
        self.scheduler = Scheduler(self.cache, scheduling or Limits(step_tokens=64), self.clock)
        self.outputs: dict[int, list[Output]] = {}
        self._ids = 0

    def add(
        self, prompt: Sequence[int], count: int = 3, *, salt: bytes = b"", durable: bool = True, stored: bool = True
    ) -> int:
        self._ids += 1
        sampling = SamplingParams(max_tokens=count)
        request = Request(
            id=self._ids, prompt=tuple(prompt), sampling=sampling, salt=salt, durable=durable, stored=stored
        )
        self.scheduler.add(request)
        self.outputs[self._ids] = []
        return self._ids

    def step(self) -> bool:
        """Run one turn of the loop without the threads' work; return whether a step was planned."""
        plan = self.scheduler.plan()
        if plan is not None:
            results = plan.run(self.engine)
            assert not isinstance(results, Exception), results
            for output in self.scheduler.commit(plan, results):
                self.outputs[output.id].append(output)
        self.clock.time += 0.01
        if self.tiers is not None:
            self.tiers.turn(plan is None)
        return plan is not None

    def threads(self) -> bool:
        """Do what the threads would do now; return whether there was anything."""
        assert self.tiers is not None
        return any([self.tiers.reader.work(), self.tiers.writer.work()])

    def settle(self) -> None:
        """Step until there is nothing left to do anywhere."""
        for _ in range(5000):
            busy = self.step()
            if self.tiers is not None:
                busy = self.threads() or busy or bool(self.tiers.loading)
            if not busy and self.scheduler.idle:
                return
        raise AssertionError("it does not come to rest")

    def ask(
        self, prompt: Sequence[int], count: int = 3, *, salt: bytes = b"", durable: bool = True, stored: bool = True
    ) -> CacheReport:
        """Run one request to its end, check its answer, and return where its KV came from."""
        id = self.add(prompt, count, salt=salt, durable=durable, stored=stored)
        self.settle()
        return self.check(id, prompt, count)

    def check(self, id: int, prompt: Sequence[int], count: int) -> CacheReport:
        outputs = self.outputs[id]
        tokens = [token for output in outputs for token in output.tokens]
        assert tokens == self.engine.oracle(prompt, SamplingParams(max_tokens=count), count)
        assert outputs[-1].finish is FinishReason.LENGTH
        (report,) = (output.cache for output in outputs if output.cache is not None)
        assert report.computed + report.cached == len(prompt)
        return report
