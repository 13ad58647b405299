"""Several coroutines at once."""

from __future__ import annotations

import asyncio

from cairn.system.concurrency import CountedLock


async def test_a_counted_lock_counts_who_holds_it_and_who_waits() -> None:
    lock, seen = CountedLock(), list[tuple[bool, int]]()

    async def use() -> None:
        async with lock:
            pass

    await lock.acquire()
    waiting = [asyncio.create_task(use()) for _ in range(2)]
    await asyncio.sleep(0)
    assert lock.users == 3
    lock.release()
    seen.append((lock.locked(), lock.users))
    assert seen == [(False, 2)], "between two holders it is not locked, and in use"
    waiting[1].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert lock.users == 0 and not lock.locked()
