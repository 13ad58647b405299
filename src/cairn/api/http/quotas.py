"""How much a tenant may keep on the disk: what its agents, teams, runs, collections and files take there.

What was written is looked at every few seconds, in the background of a call that would write more, so a tenant may get
somewhat beyond its bound, and then writes nothing more until something is deleted. Stored KV is not counted: it has a
budget of its own, and goes when its room is needed.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from cairn.api.http.call import HTTPCall
from cairn.config.config import TenantLimits
from cairn.system.interfaces import Clock
from cairn.types.errors import QuotaExceeded

WRITES = re.compile(
    r"/v1/(agents(/import|/[^/]+/(turns|fork|resume))?|teams(/[^/]+/(rounds|messages|votes|fork|tool_results))?"
    r"|workflows/runs(/[^/]+/resume)?|conversations(/[^/]+(/items)?)?|collections(/[^/]+/documents)?|files"
    r"|vector_stores(/[^/]+/(files|file_batches))?|responses)"
)
"""Routes whose POST keeps more than was there."""
FRESH_SECONDS = 5.0
"""How old what is known of a tenant may be."""
MOST_TENANTS = 1000
MIB = 1 << 20


class Quotas:
    """The bounds of one server. `used` tells how many bytes a tenant keeps."""

    def __init__(
        self, clock: Clock, limits: Callable[[str], TenantLimits], used: Callable[[str], Awaitable[int]]
    ) -> None:
        self._clock, self._used = clock, used
        self.limits = limits
        self._known: dict[str, tuple[float, int]] = {}

    async def check(self, call: HTTPCall) -> None:
        """QuotaExceeded for a call that would keep more although its tenant keeps all that it may."""
        if call.scope["method"] != "POST" or (most := self.limits(call.tenant).max_disk_mib) is None:
            return
        if WRITES.fullmatch(call.path) is None:
            return
        held = await self._held(call.tenant)
        if held >= most * MIB:
            raise QuotaExceeded(
                f"what you keep takes {held / MIB:.1f} MiB on the disk, the limit is {most} (max_disk_mib); delete "
                "agents, teams, runs, collections or files",
                field="max_disk_mib",
            )

    async def _held(self, tenant: str) -> int:
        at, held = self._known.get(tenant, (-FRESH_SECONDS, 0))
        if self._clock.now() - at >= FRESH_SECONDS:
            held = await self._used(tenant)
            if len(self._known) >= MOST_TENANTS:
                self._known.clear()
            self._known[tenant] = self._clock.now(), held
        return held
