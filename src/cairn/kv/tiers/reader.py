"""Bringing chunks up from the stores: the thread that reads them, and the gate that says whether reading is worth it.

A load names its chunks in order. The thread fetches one after the other, a few ahead of what the worker has put into
the pool; the first that no store can give ends it. Nothing here touches the pool or the engine.
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
"""How long a load may bring nothing at all."""
_HEAD_START = 0.05
"""Seconds that a load may be behind computing before it is given up: time to get going."""
_FORGET_SECONDS = 60.0
"""How long a measured bandwidth is believed: a slow disk gets another chance."""
_WEIGHT = 0.3
_LARGE = 8 << 20
"""Bytes from which one buffer of a size is kept, and no more: of states a load brings one."""


class Want(NamedTuple):
    """One chunk of one cache group, or what it begins with."""

    group: int
    key: bytes
    tokens: tuple[int, ...]


class Stretch(NamedTuple):
    """What a load brings of one chunk of a context."""

    stop: int
    """How many blocks of the context there are up to its end."""
    wants: tuple[Want, ...]
    """The chunks to read, in the groups that need them."""


class Arrival(NamedTuple):
    """The chunks of one stretch of a context."""

    chunks: tuple[Chunk, ...]
    """They come in the order of the stretch's wants."""
    tier: TierName
    """The lowest tier that any of them came from."""
    buffers: tuple[memoryview, ...] = ()
    """What the chunks' pages may lie in."""
    copies: tuple[Chunk, ...] = ()
    """Copies of those from the disk, for the store in memory: kept as they land, so that a drop meanwhile is not
    undone."""


@dataclass(slots=True, eq=False)
class ContextLoad:
    """What one context waits for. The reader appends to `arrived` and sets `over`; all else is the worker's."""

    stretches: tuple[Stretch, ...]
    tokens: int
    """Tokens that it would save computing."""
    bytes: int
    started: float
    arrived: deque[Arrival] = field(default_factory=deque)
    fetched: int = 0
    landed: int = 0
    """How many stretches were fetched, and how many of them lie in the pool."""
    turn: float = math.inf
    """When the reader came to it."""
    heard: float = 0.0
    """When the last stretch landed."""
    over: bool = False
    """Nothing more will arrive."""
    cancelled: bool = False
    forced: bool = False
    """Asked for: not given up because computing would be faster, until a request waits for it."""
    wanted: float = math.inf
    """Since when one does; only of what was asked for."""
    had: int = 0
    """Stretches that had landed by then."""
    done: list[Callable[[], None]] = field(default_factory=list)
    """What to do at its end."""

    @property
    def bytes_left(self) -> int:
        """What is still to be read, about."""
        return self.bytes * (len(self.stretches) - self.fetched) // len(self.stretches)

    @property
    def ahead_of_need(self) -> bool:
        """Asked for, and no request waits for it."""
        return self.forced and self.wanted == math.inf

    def want(self, now: float) -> None:
        """A request waits for it."""
        if self.ahead_of_need:
            self.wanted, self.had = now, self.landed


class StoreReader:
    """Loads, first come first served; those that nobody waits for come after all others."""

    def __init__(
        self,
        stores: Mapping[TierName, Store],
        sizes: Sequence[int],
        gate: LoadPolicy,
        clock: Clock,
        wake: Callable[[], None],
    ) -> None:
        """`stores` from the fastest down; `wake` is called from the thread whenever something has arrived.

        `sizes`: bytes of the pages of a chunk of each group.
        """
        self._stores = stores
        self._sizes = [size + OVERHEAD for size in sizes]
        self._buffers: dict[int, deque[memoryview]] = {size: deque() for size in self._sizes}
        """Those that nothing lies in, by size. New memory is given out page by page, which takes longer than reading
        does."""
        self._load_policy = gate
        self._clock = clock
        self._wake = wake
        self._changed = threading.Condition()
        self._loads: deque[ContextLoad] = deque()
        self.alive = -math.inf
        """When it last had something to read for anybody."""
        self._fetching = False
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def hangs(self) -> bool:
        """Whether a store has kept it for so long that nobody should queue behind it."""
        return self._fetching and self._clock.now() - self.alive > STALL_SECONDS

    def begin(self, load: ContextLoad) -> None:
        """Read it after those that were begun before, as far as somebody waits for them."""
        with self._changed:
            self._loads.append(load)
            self._changed.notify()

    def taken(self, arrival: Arrival | None = None) -> None:
        """What had arrived was taken, or a load was cancelled: there may be work again."""
        for buffer in arrival.buffers if arrival is not None else ():
            if len(kept := self._buffers[len(buffer)]) <= (AHEAD if len(buffer) <= _LARGE else 0):
                kept.append(buffer)
        with self._changed:
            self._changed.notify()

    def start(self) -> None:
        """Let a thread do the work."""
        self._thread = threading.Thread(target=self._run, name="cairn-kv-read", daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """Stop. False if the thread still hangs in a store."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is None:
            return True
        self._thread.join(1.0)
        return not self._thread.is_alive()

    def work(self) -> bool:
        """Fetch one stretch of the first load; False if there is nothing to read now."""
        load = self._next()
        if load is None:
            return False
        self.alive = self._clock.now()
        load.turn = min(load.turn, self.alive)
        self._fetching = True
        try:
            arrival = self._fetch(load.stretches[load.fetched].wants)
        except Exception as error:  # a bug of ours; the context computes what is missing
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
        """The load to go on with. Those that are over or cancelled are forgotten."""
        with self._changed:
            self._loads = deque(load for load in self._loads if not (load.over or load.cancelled))
            load = next((load for load in self._loads if not load.ahead_of_need), None)
            if load is not None:  # in front: what is waited for later must not come between what it reads
                self._loads.remove(load)
                self._loads.appendleft(load)
            return self._loads[0] if self._loads and len(self._loads[0].arrived) < AHEAD else None

    def _fetch(self, wants: Sequence[Want]) -> Arrival | None:
        chunks: list[Chunk] = []
        buffers: list[memoryview] = []
        copies: list[Chunk] = []
        # Where a window needs nothing, the stretch counts as the ones after it most likely will.
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
    """Whether to load or to compute, from how fast both went of late. What was never measured is taken to be fast.

    The loads' thread calls `read`, the worker's all the others.
    """

    def __init__(self, mode: LoadMode, clock: Clock) -> None:
        self._mode = mode
        self._clock = clock
        self._prefill: float | None = None
        """How many tokens a second are computed."""
        self._bandwidth: float | None = None
        """How many bytes a second are read."""
        self._measured = -math.inf

    def computed(self, tokens: int, seconds: float) -> None:
        """A step that computed so many prompt tokens took so long."""
        if tokens > 0 and seconds > 0:
            self._prefill = _blend(self._prefill, tokens / seconds)

    def read(self, size: int, seconds: float) -> None:
        """So many bytes were read and checked in so long."""
        if size > 0 and seconds > 0:
            self._bandwidth = _blend(self._bandwidth, size / seconds)
            self._measured = self._clock.now()

    def worth(self, tokens: int, size: int, ahead: int) -> bool:
        """Whether to load these tokens' bytes after the `ahead` bytes that other loads still want."""
        if self._mode != "auto":
            return self._mode == "always"
        if self._clock.now() - self._measured > _FORGET_SECONDS:
            self._bandwidth = None
        if self._prefill is None or self._bandwidth is None:
            return True
        return (size + ahead) / self._bandwidth < tokens / self._prefill

    def late(self, load: ContextLoad, alive: float) -> bool:
        """Whether to give a load up: it stands still, or by now computing would have got further.

        Others are read before it, which `worth` knew as far as the bandwidth was known: until it is its turn it gets
        the time that computing all of it takes, and a reader that gives no sign of life, the last one at `alive`, is
        a reason. `worth` was not asked about a load that is `forced`: that one gets the time since a request waits for
        it, which then may begin a load of its own.
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
