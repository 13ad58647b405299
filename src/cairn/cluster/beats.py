"""Signs of life: each replica replaces an object of its own every half second, and watches those of the others.

A replica counts as silent after `LEASE_SECONDS` in which this one looked and saw no change. Time in which this one did
not look, because it was stopped or the store was away, does not count, and no two clocks are compared. A wrong verdict
interrupts a turn, but corrupts none: see `chain.py`. A beat that cannot be read is no sign of life, unless nothing can
be read: then the store is away.

A beat also says what tenants have used on its replica, so that their limits hold over all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from cairn.cluster.guard import AsyncBlobs
from cairn.cluster.keys import ClusterKeys
from cairn.system.interfaces import Clock

BEAT_SECONDS = 0.5
LEASE_SECONDS = 3.0
GAP = 2.0
"""Beats that one look may account for at most."""
FOLDER = "beats"
FORGET_SECONDS = 3600.0
"""Silence after which a replica's object is removed."""


class TenantUsage(msgspec.Struct, frozen=True, array_like=True):
    """What a payer has used on one replica since it started, and the requests of it that are being answered there."""

    tenant: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    running: int


class UsageExchange(Protocol):
    """The limits of a server, which count what tenants use on the others."""

    def own_usage(self) -> Mapping[str, TenantUsage]:
        """Return what is used here, by payer."""
        ...

    def count_others(self, holder: str, usage: Mapping[str, TenantUsage]) -> None:
        """Count what is used at another replica, by payer."""
        ...

    def forget_other(self, holder: str) -> None:
        """Count no request as running at a replica that is silent."""
        ...


class _Beat(msgspec.Struct, frozen=True, array_like=True):
    number: int
    usage: dict[str, TenantUsage]


_DECODER = msgspec.msgpack.Decoder(_Beat)


class Beats:
    """The signs of life of all replicas. Runs on the event loop."""

    def __init__(self, blobs: AsyncBlobs, keys: ClusterKeys, clock: Clock, holder: str) -> None:
        self._blobs, self._keys, self._clock, self._holder = blobs, keys, clock, holder
        self._beat = 0
        self._heard: dict[str, tuple[bytes, float]] = {}
        """The last beat of each replica, and for how many seconds it has not changed."""
        self._looked: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self.usage: UsageExchange | None = None
        """Supplies this replica's usage, receives that of others."""

    def start(self) -> None:
        """Begin to beat and to watch."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop, and take this replica's sign of life away."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(OSError):
            await self._blobs.delete([f"{FOLDER}/{self._holder}"])

    def alive(self, holder: str) -> bool:
        """Return whether a replica may still be alive, as far as this one has seen."""
        if holder == self._holder:
            return True
        # One that was not heard of may just have begun: it has as long as others to be heard.
        _, silent = self._heard.setdefault(holder, (b"", 0.0))
        return silent < LEASE_SECONDS

    async def _run(self) -> None:
        await asyncio.gather(*map(self._repeat, (self._show, self._look)))

    async def _repeat(self, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat `work` until closed. Each kind of work has a task of its own, so that a slow look delays no beat."""
        while not self._closing:
            with contextlib.suppress(OSError):
                await work()
            await asyncio.sleep(BEAT_SECONDS)

    async def step(self) -> None:
        """Beat once and look once. Raise OSError if the store fails."""
        await self._show()
        await self._look()

    async def _show(self) -> None:
        """Replace this replica's own beat."""
        self._beat += 1
        name = f"{FOLDER}/{self._holder}"
        own = {} if self.usage is None else dict(self.usage.own_usage())
        await self._blobs.replace(name, self._keys.seal(name, msgspec.msgpack.encode(_Beat(self._beat, own))))

    async def _look(self) -> None:
        """Read the beats of all, and count the silence of those that have not changed."""
        found = await self._read()
        now = self._clock.now()
        passed = 0.0 if self._looked is None else max(0.0, min(now - self._looked, GAP * BEAT_SECONDS))
        self._looked = now
        for holder in {*found, *self._heard}:
            beat, silent = self._heard.get(holder, (b"", 0.0))
            if found.get(holder, b"") not in (b"", beat):
                self._heard[holder] = found[holder], 0.0
                self._count(holder, found[holder])
            else:
                self._heard[holder] = beat, silent + passed
                if silent < LEASE_SECONDS <= silent + passed and self.usage is not None:
                    self.usage.forget_other(holder)
        for holder in [one for one, (_, silent) in self._heard.items() if silent > FORGET_SECONDS]:
            del self._heard[holder]
            await self._blobs.delete([f"{FOLDER}/{holder}"])

    async def _read(self) -> dict[str, bytes]:
        """Return the beats of all replicas that can be read. Raise OSError if none can."""
        found, failed = dict[str, bytes](), None
        names = await self._blobs.list(FOLDER)
        for name, data in zip(names, await self._blobs.read_several(names, waits=False), strict=True):
            if isinstance(data, OSError):
                failed = data
            elif data is not None and (beat := self._keys.open(name, data)) is not None:
                found[name.rsplit("/", 1)[-1]] = beat
        if failed is not None and not found:
            raise failed
        return found

    def _count(self, holder: str, beat: bytes) -> None:
        """Count what another replica says that tenants have used there."""
        if self.usage is None or holder == self._holder:
            return
        with contextlib.suppress(msgspec.MsgspecError):  # a replica of another version
            self.usage.count_others(holder, _DECODER.decode(beat).usage)
