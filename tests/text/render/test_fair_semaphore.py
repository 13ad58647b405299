from __future__ import annotations

import asyncio
import signal
import threading
import time

import msgspec
import pytest

from cairn.system.deadline import DEADLINE
from cairn.system.helper_limits import cpu_seconds
from cairn.text.render.fair_semaphore import AT_ONCE, FairSemaphore, LongTexts
from cairn.text.render.parent import Renderer
from cairn.text.render.render_wire import Job, Setup
from cairn.types.errors import DeadlineExceeded, Overloaded


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_waiter_is_refused_only_for_time_its_own_tenant_used() -> None:
    slots = FairSemaphore(most=1.0)
    await slots.take("a")
    waiting = [asyncio.create_task(slots.take("a")) for _ in range(4)]
    closing = asyncio.create_task(slots.take("a", patient=True))
    await settle()
    waiting[1].cancel()
    await settle()
    slots.give("a", 0.6)
    await waiting[0]
    slots.give("a", 0.6)  # more than 1 s in total
    await asyncio.wait_for(closing, 20)  # the impatient ones before it have been refused
    assert [type(task.exception()) for task in waiting[2:]] == [Overloaded, Overloaded]
    slots.give("a", 5.0)
    await slots.take("a")  # nobody is before it
    late = asyncio.create_task(slots.take("a"))
    await settle()
    slots.give("a", 0.9)
    late.cancel()  # just as its turn comes
    with pytest.raises(asyncio.CancelledError):
        await late
    await slots.take("a")


async def test_a_tenant_waits_for_one_job_of_another_however_many_wait() -> None:
    slots, order = FairSemaphore(most=1.0), list[str]()

    async def job(share: str) -> None:
        await slots.take(share)
        order.append(share)

    await slots.take("a")
    tasks = [asyncio.create_task(job(share)) for share in "aaaaaaabb"]
    await settle()
    slots.give("a", 0.6)
    await settle()
    for _ in range(20):  # each holder takes 0.6 s
        slots.give(order[-1], 0.6)
        await settle()
        if all(task.done() for task in tasks):
            break
    assert order == ["a", "b", "b"]
    errors = [task.exception() for task in tasks]
    # Refused for their own tenant's use
    assert [error is None for error in errors] == [True] + 6 * [False] + 2 * [True]
    assert all(isinstance(error, Overloaded) and error.retry_after for error in errors if error)


async def test_a_refusal_counts_the_tenants_own_queue() -> None:
    slots = FairSemaphore(most=1.0)
    for _ in range(100):
        await slots.take("a")
        slots.give("a", 3.0)
    await slots.take("a")
    waiting = [asyncio.create_task(slots.take("a")) for _ in range(5)]
    await settle()
    slots.give("a", 3.0)
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    times = [error.retry_after for error in errors if isinstance(error, Overloaded)]
    assert [round(seconds or 0) for seconds in times] == [15, 12, 9, 6, 3]


async def test_a_tenant_has_one_long_text_worked_on_and_another_need_not_wait_for_it() -> None:
    long, order, running = LongTexts(), list[str](), list[threading.Event]()
    begun = threading.Semaphore(0)

    def work(share: str, end: threading.Event) -> str:
        order.append(share)
        begun.release()
        assert end.wait(30)
        return share

    async def one(share: str) -> str:
        running.append(end := threading.Event())
        return await long.run(share, work, share, end)

    tasks = [asyncio.create_task(one(share)) for share in ("a",) * 5 + ("b",) * 2 + ("c",)]
    await settle()
    for _ in range(AT_ONCE):
        assert await asyncio.to_thread(begun.acquire, timeout=30)
    assert sorted(order) == ["a", "b"]
    tasks[0].cancel()  # its thread goes on and keeps the slot
    tasks[1].cancel()  # which waits and leaves no trace
    for left in tasks[:2]:
        with pytest.raises(asyncio.CancelledError):
            await left
    DEADLINE.set(time.monotonic() + 0.05)
    with pytest.raises(DeadlineExceeded, match="time limit while it waited for the threads"):
        await one("a")
    assert sorted(order) == ["a", "b"]
    for end in running:
        end.set()
    assert await asyncio.gather(*tasks[2:]) == ["a"] * 3 + ["b"] * 2 + ["c"]
    assert order.index("c") <= 4 and order.count("a") == 4  # after one more of each other tenant at most


def test_a_short_job_takes_time_although_its_time_is_bounded() -> None:
    signal.setitimer(signal.ITIMER_PROF, 1000)
    try:
        for _ in range(20):
            began, end = cpu_seconds(), time.perf_counter() + 2e-4
            while time.perf_counter() < end:
                pass
            assert cpu_seconds() > began
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


async def test_a_tenant_that_keeps_the_template_busy_makes_no_others_chat_a_429() -> None:
    slow = "{% for a in range(300) %}{% for b in range(300) %}{% endfor %}{% endfor %}slow"
    renderer = Renderer(Setup(templates={"slow": slow}, variables={}, timeout=20.0))
    payload = {"messages": [[{"role": "user", "content": "x"}]], "variables": {"tools": None, "documents": None}}
    job = Job(template="slow", payload=msgspec.json.encode(payload), marks="", now=0.0)
    renderer._slots = FairSemaphore(most=1e-4)
    await renderer.start()
    try:
        busy = [asyncio.create_task(renderer.render(job, "a")) for _ in range(9)]
        await settle()
        assert await renderer.render(job, "b") == ["slow"]
        results = await asyncio.gather(*busy, return_exceptions=True)
        assert sum(isinstance(result, Overloaded) for result in results) >= 7
    finally:
        await renderer.close()


async def test_a_tenant_holds_at_most_its_own_number_of_slots_and_others_get_the_rest() -> None:
    slots, order, inside = FairSemaphore(2, each=1), list[str](), list[str]()

    async def work(tenant: str) -> None:
        async with slots.slot(tenant):
            inside.append(tenant)
            assert len(inside) <= 2 and inside.count(tenant) == 1
            order.append(tenant)
            await asyncio.sleep(0)
            inside.remove(tenant)

    await asyncio.gather(*(work("much") for _ in range(50)), work("one"), work("two"), work("three"))
    assert len(order) == 53 and set(order[:6]) == {"much", "one", "two", "three"}
    assert slots._free == 2 and not slots._held


async def test_a_call_waits_for_a_slot_until_its_deadline() -> None:
    slots = FairSemaphore(1, each=1, what="the reader")

    async def late(tenant: str) -> None:
        DEADLINE.set(time.monotonic() + 0.05)
        with pytest.raises(DeadlineExceeded, match="waited for the reader"):
            async with slots.slot(tenant):
                pass

    async with slots.slot("me"):
        await asyncio.wait_for(asyncio.gather(late("me"), late("you")), 30)
        waiting = asyncio.create_task(slots.slot("me").__aenter__())
        await settle()
        waiting.cancel()
        await asyncio.wait({waiting})
        assert not [*slots._waiting.tagged()]
    async with asyncio.timeout(30), slots.slot("you"):
        assert slots._held == {"you": 1}
