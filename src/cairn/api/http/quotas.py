"""Quotas of a tenant: the bytes that its agents, collections and files may take on the disk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from cairn.api.http.call import HTTPCall
from cairn.config.values import TenantLimits
from cairn.system.interfaces import Clock
from cairn.types.errors import QuotaExceeded

FORM = b"multipart/form-data"
ENVELOPE = 64 << 10
"""Bytes of a form that are not counted: its fields and boundaries, which are not kept."""
FRESH_SECONDS = 5.0
"""Seconds for which a measurement of a tenant's bytes is used."""
MOST_MEASURED = 1000
MIB = 1 << 20


class _TenantBytes:
    """Bytes of one tenant."""

    __slots__ = ("added", "arriving", "at", "changed", "lock", "measured")

    def __init__(self) -> None:
        self.at = float("-inf")
        self.measured = 0
        """Bytes on the disk at that time."""
        self.added = 0
        """Bytes that came since, as far as their number is known."""
        self.arriving = 0
        self.changed = False
        """Whether anything was added or deleted since."""
        self.lock = asyncio.Lock()
        """Held while the bytes are measured."""

    @property
    def taken(self) -> int:
        """Bytes that count against the limit: kept, and on their way."""
        return self.measured + self.added + self.arriving


class _ArrivingBytes:
    """The bytes that one call brings."""

    __slots__ = ("_most", "_passed", "_quotas", "_settled", "_tenant", "size")

    def __init__(self, quotas: Quotas, tenant: str, most: int, passed: int) -> None:
        """Count the bytes of one call; the first `passed` bytes are free."""
        self._quotas, self._tenant, self._most, self._passed = quotas, tenant, most, passed
        self._settled = False
        self.size = 0
        """Bytes that count now."""

    async def announced(self, length: int) -> None:
        """Count a body of this length. Raises QuotaExceeded."""
        self.size = max(0, length - self._passed)
        self._passed = max(0, self._passed - length)
        try:
            await self._quotas.take(self._tenant, self.size, self._most)
        except BaseException:
            self.size = 0
            raise

    async def arrived(self, size: int) -> None:
        """Count `size` bytes more of a body without a length. Raises QuotaExceeded."""
        passed = min(self._passed, size)
        self._passed -= passed
        if size == passed or self._settled:
            return
        try:
            await self._quotas.take(self._tenant, size - passed, self._most)
        except QuotaExceeded:
            self.settled()  # a refused body takes no room from others
            raise
        self.size += size - passed

    def settled(self) -> None:
        """Stop counting the body: it is refused, or its route counts what it keeps."""
        self._settled = True
        self.over(kept=False)

    def over(self, *, kept: bool) -> None:
        """Count nothing of it as on its way. `kept`: it may be on the disk now."""
        self._quotas.give(self._tenant, self.size, kept=kept)
        self.size = 0


class Quotas:
    """The bounds of one server. `used` returns how many bytes a tenant keeps."""

    def __init__(
        self, clock: Clock, limits: Callable[[str], TenantLimits], used: Callable[[str], Awaitable[int]]
    ) -> None:
        self._clock, self._used = clock, used
        self.limits = limits
        self._tenants: dict[str, _TenantBytes] = {}

    @contextlib.asynccontextmanager
    async def arriving(self, call: HTTPCall, *, keeps: bool, upload: bool = False) -> AsyncIterator[None]:
        """Count the bytes of a call while it is answered, if its route `keeps` them.

        An `upload` may be KV for the most part, so its route counts itself how much of it is kept. Raises QuotaExceeded
        if its tenant may not keep that much.
        """
        most = self.limits(call.tenant).max_disk_mib
        if most is None:
            yield
            return
        method = call.scope["method"]
        if not keeps:
            try:
                yield
            finally:
                if method == "DELETE" and call.tenant in self._tenants:
                    self._tenants[call.tenant].changed = True
            return
        form = (call.header(b"content-type") or b"")[: len(FORM)].lower() == FORM
        coming = _ArrivingBytes(self, call.tenant, most, ENVELOPE if form else 0)
        length = call.header(b"content-length")
        known = length is not None or upload
        await coming.announced(int(length) if length is not None and not upload else 0)
        call.arrived = None if known else coming.arrived
        call.settled = coming.settled
        answered = False
        try:
            yield
            answered = True
        finally:
            coming.over(kept=answered)

    @contextlib.asynccontextmanager
    async def room(self, tenant: str, size: int) -> AsyncIterator[None]:
        """Count `size` bytes while they are being written. Raises QuotaExceeded if the tenant may not keep them."""
        most = self.limits(tenant).max_disk_mib
        if most is None:
            yield
            return
        await self.take(tenant, size, most)
        written = False
        try:
            yield
            written = True
        finally:
            self.give(tenant, size, kept=written)

    async def take(self, tenant: str, size: int, most: int) -> None:
        """Count `size` bytes as on their way. Raises QuotaExceeded if more than `most` MiB would be taken."""
        kept = self._of(tenant)
        await self._measure(tenant, kept, FRESH_SECONDS)
        if not _fits(kept, size, most) and kept.changed:
            await self._measure(tenant, kept, 0.0)
        if not _fits(kept, size, most):
            coming = f", {kept.arriving / MIB:.1f} MiB of yours are on their way" if kept.arriving else ""
            more = f", and this brings {size / MIB:.1f} MiB" if size else ""
            raise QuotaExceeded(
                f"what you keep takes {(kept.measured + kept.added) / MIB:.1f} MiB on the disk{coming}{more}; the "
                f"limit is {most} (max_disk_mib); delete agents, teams, runs, collections or files",
                field="max_disk_mib",
            )
        kept.arriving += size

    def give(self, tenant: str, size: int, *, kept: bool) -> None:
        """Count `size` bytes as on their way no more. `kept`: they may be on the disk now."""
        known = self._of(tenant)
        known.arriving -= size
        known.added += size if kept else 0
        known.changed = True

    async def _measure(self, tenant: str, kept: _TenantBytes, age: float) -> None:
        """Measure the tenant's bytes on the disk, unless that was done within `age` seconds."""
        began = self._clock.now()
        if began - kept.at < age:
            return
        async with kept.lock:
            if kept.at >= began:  # another has, while this one waited
                return
            kept.added, kept.changed = 0, False  # bytes that come meanwhile are counted twice rather than missed
            now = self._clock.now()
            kept.measured = await self._used(tenant)
            kept.at = now

    def _of(self, tenant: str) -> _TenantBytes:
        if tenant not in self._tenants:
            if len(self._tenants) >= MOST_MEASURED:
                self._tenants = {name: one for name, one in self._tenants.items() if one.arriving}
            self._tenants[tenant] = _TenantBytes()
        return self._tenants[tenant]


def _fits(kept: _TenantBytes, size: int, most: int) -> bool:
    return kept.taken < most * MIB and kept.taken + size <= most * MIB
