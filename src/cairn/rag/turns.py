"""Few may work at once, and tenants take turns: who has much to do does not hold up the others."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from cairn.system.deadline import DEADLINE
from cairn.types.errors import DeadlineExceeded


class TenantPlaces:
    """So many places, in the order of arrival; each tenant has or waits for one at most, and its others for that."""

    def __init__(self, places: int) -> None:
        self._places = asyncio.Semaphore(places)
        self._tenants: dict[str, tuple[asyncio.Lock, int]] = {}
        """A tenant's own turn, and how many have it or wait for it."""

    @contextlib.asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """A place. DeadlineExceeded where there is none before the call wants its answer."""
        turn, count = self._tenants.get(tenant) or (asyncio.Lock(), 0)
        self._tenants[tenant] = turn, count + 1
        try:
            async with contextlib.AsyncExitStack() as held:
                deadline = DEADLINE.get()
                try:
                    async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                        await held.enter_async_context(turn)
                        await held.enter_async_context(self._places)
                except TimeoutError:
                    raise DeadlineExceeded("the request reached its time limit before its document was read") from None
                yield
        finally:
            _, count = self._tenants.pop(tenant)
            if count > 1:
                self._tenants[tenant] = turn, count - 1
