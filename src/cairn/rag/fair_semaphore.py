"""A semaphore that is fair between tenants: one with much to do does not hold up the others."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from cairn.system.deadline import DEADLINE
from cairn.types.errors import DeadlineExceeded


class FairSemaphore:
    """Semaphore over `slots` slots; each tenant holds or queues for one at a time, its other calls behind it."""

    def __init__(self, slots: int) -> None:
        self._slots = asyncio.Semaphore(slots)
        self._tenants: dict[str, tuple[asyncio.Lock, int]] = {}
        """For each tenant its lock and how many calls hold it or wait for it."""

    @contextlib.asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Hold a slot while entered. Raise DeadlineExceeded if none frees up before the request's deadline."""
        turn, count = self._tenants.get(tenant) or (asyncio.Lock(), 0)
        self._tenants[tenant] = turn, count + 1
        try:
            async with contextlib.AsyncExitStack() as held:
                deadline = DEADLINE.get()
                try:
                    async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                        await held.enter_async_context(turn)
                        await held.enter_async_context(self._slots)
                except TimeoutError:
                    raise DeadlineExceeded("the request reached its time limit before its document was read") from None
                yield
        finally:
            _, count = self._tenants.pop(tenant)
            if count > 1:
                self._tenants[tenant] = turn, count - 1
