"""Loads from the stores: the thread that reads chunks, and the policy that decides whether reading is worth it.

A load names its chunks in order. The thread fetches one after the other, a few ahead of what the worker has put into
the pool; the first chunk that no store can give ends the load. Nothing here touches the pool or the engine.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from cairn.kv.pool.sequence_kv import TierName
from cairn.kv.tiers.store import OVERHEAD, Chunk, Store
from cairn.system.interfaces import Clock
from cairn.types.errors import trace

log = logging.getLogger(__name__)

LoadMode = Literal["auto", "always", "never"]

AHEAD = 4
"""Chunks that may wait to be put into the pool before the thread reads on."""
STALL_SECONDS = 10.0
"""Longest time in which a load may bring nothing at all."""
_HEAD_START = 0.05
"""Seconds that a load may be behind computing before it is given up: time to get going."""
_FORGET_SECONDS = 60.0
"""Seconds after which a measured bandwidth is forgotten: a slow disk gets another chance."""
_WEIGHT = 0.3
_LARGE = 8 << 20
"""Size from which only one buffer is kept: a load brings one state."""


class Want(NamedTuple):
    """One chunk of one cache group to read, or the beginning of one."""

    group: int
    key: bytes
    tokens: tuple[int, ...]


class Stretch(NamedTuple):
    """The part of a load that belongs to one chunk of a sequence."""

    stop: int
    """Blocks of the sequence up to its end."""
    wants: tuple[Want, ...]
    """The chunks to read, in the groups that need them."""


class Arrival(NamedTuple):
    """The chunks that were read for one stretch."""

    chunks: tuple[Chunk, ...]
    """In the order of the stretch's wants."""
    tier: TierName
    """The lowest tier that any of them came from."""
    buffers: tuple[memoryview, ...] = ()
    """Buffers that the chunks' pages may lie in."""
    copies: tuple[Chunk, ...] = ()
    """Copies of the chunks from the disk, for the store in memory: kept when they land, so that a drop meanwhile is not
    undone."""


@dataclass(slots=True, eq=False)
class ContextLoad:
    """The load that one sequence waits for.

    The reader appends to `arrived` and sets `over`; all else is the worker's.
    """

    stretches: tuple[Stretch, ...]
    tokens: int
    """Tokens that it would save computing."""
    bytes: int
    started: float
    arrived: deque[Arrival] = field(default_factory=deque)
    fetched: int = 0
    landed: int = 0
    """Stretches that were fetched, and those of them that are in the pool."""
    turn: float = math.inf
    """When the reader first came to it."""
    heard: float = 0.0
    """When the last stretch landed."""
    over: bool = False
    """Whether nothing more will arrive."""
    cancelled: bool = False
    forced: bool = False
    """Whether it is a prefetch: it is not given up as slower than computing unless a request waits for it."""
    wanted: float = math.inf
    """When a request began to wait for it, for a prefetch."""
    had: int = 0
    """Stretches that had landed at `wanted`."""
    done: list[Callable[[], None]] = field(default_factory=list)
    """Callbacks for its end."""

    @property
    def bytes_left(self) -> int:
        """Approximate bytes that are still to be read."""
        return self.bytes * (len(self.stretches) - self.fetched) // len(self.stretches)

    @property
    def ahead_of_need(self) -> bool:
        """Whether it is a prefetch that no request waits for."""
        return self.forced and self.wanted == math.inf

    def want(self, now: float) -> None:
        """Record that a request waits for it since `now`."""
        if self.ahead_of_need:
            self.wanted, self.had = now, self.landed


class StoreReader:
    """Reads loads, first come first served; those that no request waits for come last."""

    def __init__(
        self,
        stores: Mapping[TierName, Store],
        sizes: Sequence[int],
        load_policy: LoadPolicy,
        clock: Clock,
        wake: Callable[[], None],
    ) -> None:
        """Prepare to read `stores`, the fastest first; call `wake` from the thread whenever something has arrived.

        `sizes`: bytes of the pages of a chunk of each group.
        """
        self._stores = stores
        self._sizes = [size + OVERHEAD for size in sizes]
        self._buffers: dict[int, deque[memoryview]] = {size: deque() for size in self._sizes}
        """Free buffers by size. New memory is handed out page by page, which takes longer than reading."""
        self._load_policy = load_policy
        self._clock = clock
        self._wake = wake
        self._changed = threading.Condition()
        self._loads: deque[ContextLoad] = deque()
        self.alive = -math.inf
        """When it last began to read something."""
        self._fetching = False
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def hangs(self) -> bool:
        """Whether a store has blocked it for so long that no load should queue behind it."""
        return self._fetching and self._clock.now() - self.alive > STALL_SECONDS

    def begin(self, load: ContextLoad) -> None:
        """Queue a load after earlier ones that requests wait for."""
        with self._changed:
            self._loads.append(load)
            self._changed.notify()

    def taken(self, arrival: Arrival | None = None) -> None:
        """Reuse the buffers of an arrival and read on; without one, a load was cancelled."""
        for buffer in arrival.buffers if arrival is not None else ():
            if len(kept := self._buffers[len(buffer)]) <= (AHEAD if len(buffer) <= _LARGE else 0):
                kept.append(buffer)
        with self._changed:
            self._changed.notify()

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="cairn-kv-read", daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """Stop the thread; return False if it still hangs in a store."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is None:
            return True
        self._thread.join(1.0)
        return not self._thread.is_alive()

    def work(self) -> bool:
        """Fetch one stretch of the first load; return False if there is nothing to read now."""
        load = self._next()
        if load is None:
            return False
        self.alive = self._clock.now()
        load.turn = min(load.turn, self.alive)
        self._fetching = True
        try:
            arrival = self._fetch(load.stretches[load.fetched].wants)
        except Exception as error:  # a bug of ours; the sequence computes what is missing
            log.error("KV could not be read: %s", trace(error))
            arrival = None
        finally:
            self._fetching = False
        if arrival is not None:
            load.arrived.append(arrival)
            load.fetched += 1
        if arrival is None or load.fetched == len(load.stretches):
            load.over = True
        self._wake()
        return True

    def _next(self) -> ContextLoad | None:
        """Return the load to go on with, and forget those that are over or cancelled."""
        with self._changed:
            self._loads = deque(load for load in self._loads if not (load.over or load.cancelled))
            load = next((load for load in self._loads if not load.ahead_of_need), None)
            if load is not None:  # to the front, so that loads that are waited for later do not interrupt it
                self._loads.remove(load)
                self._loads.appendleft(load)
            return self._loads[0] if self._loads and len(self._loads[0].arrived) < AHEAD else None

    def _fetch(self, wants: Sequence[Want]) -> Arrival | None:
        chunks: list[Chunk] = []
        buffers: list[memoryview] = []
        copies: list[Chunk] = []
        # A stretch of which a window needs nothing is attributed to the lowest tier, like most of those after it.
        tiers = tuple(self._stores)
        fastest, lowest = tiers[0], tiers[0 if wants else -1]
        began = self._clock.now()
        for want in wants:
            size = self._sizes[want.group]
            kept = self._buffers[size]
            buffers.append(kept.popleft() if kept else np.empty(size, np.uint8).data)
            tried = ((tier, store.fetch(want.key, want.tokens, buffers[-1])) for tier, store in self._stores.items())
            tier, chunk = next((one for one in tried if one[1] is not None), (None, None))
            if chunk is None or tier is None:
                return None
            if tier != fastest:
                lowest = max(lowest, tier, key=tiers.index)
                if self._stores[fastest].durable() is None:
                    copies.append(dataclasses.replace(chunk, pages=bytes(chunk.pages)))
            chunks.append(chunk)
        size = sum(len(memoryview(chunk.pages).cast("B")) for chunk in chunks)
        self._load_policy.read(size, self._clock.now() - began)
        return Arrival(tuple(chunks), lowest, tuple(buffers), tuple(copies))

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._next() is None and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
            self.work()


class LoadPolicy:
    """Decides whether to load or to compute, from how fast both went lately. Unmeasured speeds count as fast.

    The reader's thread calls `read`, the worker's all other methods.
    """

    def __init__(self, mode: LoadMode, clock: Clock) -> None:
        self._mode = mode
        self._clock = clock
        self._prefill: float | None = None
        """Tokens computed per second."""
        self._bandwidth: float | None = None
        """Bytes read per second."""
        self._measured = -math.inf

    def computed(self, tokens: int, seconds: float) -> None:
        """Record the prompt tokens and the seconds of a step."""
        if tokens > 0 and seconds > 0:
            self._prefill = _blend(self._prefill, tokens / seconds)

    def read(self, size: int, seconds: float) -> None:
        """Record how long it took to read and check so many bytes."""
        if size > 0 and seconds > 0:
            self._bandwidth = _blend(self._bandwidth, size / seconds)
            self._measured = self._clock.now()

    def worth(self, tokens: int, size: int, ahead: int) -> bool:
        """Return whether to load `size` bytes instead of computing the tokens; other loads read `ahead` bytes first."""
        if self._mode != "auto":
            return self._mode == "always"
        if self._clock.now() - self._measured > _FORGET_SECONDS:
            self._bandwidth = None
        if self._prefill is None or self._bandwidth is None:
            return True
        return (size + ahead) / self._bandwidth < tokens / self._prefill

    def late(self, load: ContextLoad, alive: float) -> bool:
        """Return whether to give a load up: it stalls, or computing would have got further by now.

        It stalls if neither the load nor the reader, which last moved at `alive`, has moved for `STALL_SECONDS`. A
        stretch may take as long as computing its tokens, counted from when the reader first came to the load. While
        the reader is busy with other loads, the whole load may take as long as computing all of it. A `forced` load is
        late only if a request waits for it, counted from when it began to wait; then the request may begin its own.
        """
        now = self._clock.now()
        if now - max(load.started, load.heard, alive) > STALL_SECONDS:
            return True
        if self._mode != "auto" or self._prefill is None:
            return False
        part = (load.landed + 1 - load.had) / len(load.stretches)
        since = load.wanted if load.forced else load.turn
        if since == math.inf and not load.forced:
            part, since = 1.0, load.started
        return now - since > _HEAD_START + part * load.tokens / self._prefill


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
