"""A bound on the characters of filled prompts that one tenant's runs hold at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from cairn.workflows.definition import MAX_FILLED

MAX_HELD = 16 * MAX_FILLED
"""Characters of filled prompts that one tenant's runs hold at once."""


class _TenantMemory:
    def __init__(self) -> None:
        self.held = 0
        self.waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def give(self, size: int) -> None:
        """Release `size` characters and admit waiters in the order of arrival."""
        self.held -= size
        while self.waiting and self.held + self.waiting[0][0] <= MAX_HELD:
            more, ready = self.waiting.popleft()
            if not ready.done():
                self.held += more
                ready.set_result(None)


class PromptMemory:
    """A weighted semaphore for each tenant, held from before a prompt is joined until it is answered."""

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantMemory] = {}

    @contextlib.asynccontextmanager
    async def hold(self, tenant: str, size: int) -> AsyncIterator[None]:
        """Hold `size` characters (at most MAX_FILLED) while entered; wait until there is room."""
        memory = self._tenants.setdefault(tenant, _TenantMemory())
        await _take(memory, size)
        try:
            yield
        finally:
            memory.give(size)
            if not memory.held and not memory.waiting:
                self._tenants.pop(tenant, None)


async def _take(memory: _TenantMemory, size: int) -> None:
    if not memory.waiting and memory.held + size <= MAX_HELD:
        memory.held += size
        return
    ready = asyncio.get_running_loop().create_future()
    memory.waiting.append((size, ready))
    try:
        await ready
    except asyncio.CancelledError:
        if not ready.cancelled():  # admitted and cancelled at the same time
            memory.give(size)
        raise
