"""Tenants take turns for few places."""

from __future__ import annotations

import asyncio
import time

import pytest

from cairn.rag.fair_semaphore import FairSemaphore
from cairn.system.deadline import DEADLINE
from cairn.types.errors import DeadlineExceeded


async def test_a_busy_tenant_does_not_hold_up_others() -> None:
    turns, order, inside = FairSemaphore(2), list[str](), list[str]()

    async def work(tenant: str) -> None:
        async with turns.slot(tenant):
            inside.append(tenant)
            assert len(inside) <= 2 and inside.count(tenant) == 1
            order.append(tenant)
            await asyncio.sleep(0)
            inside.remove(tenant)

    await asyncio.gather(*(work("much") for _ in range(50)), work("one"), work("two"), work("three"))
    assert len(order) == 53 and set(order[:6]) == {"much", "one", "two", "three"}
    assert not turns._tenants


async def test_waiting_ends_with_the_call() -> None:
    turns = FairSemaphore(1)

    async def late(tenant: str) -> None:
        DEADLINE.set(time.monotonic() + 0.05)
        with pytest.raises(DeadlineExceeded):
            async with turns.slot(tenant):
                pass

    async with turns.slot("me"):
        await asyncio.wait_for(asyncio.gather(late("me"), late("you")), 5)
        waiting = asyncio.create_task(turns.slot("me").__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert [count for _, count in turns._tenants.values()] == [1]
    async with asyncio.timeout(5), turns.slot("you"):
        assert list(turns._tenants) == ["you"]
