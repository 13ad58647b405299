"""Disk work on threads that nothing joins."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cairn.system.disk_threads import DiskThreads, on_disk_thread


async def test_disk_work_runs_in_a_thread_and_its_error_is_raised() -> None:
    def fails() -> None:
        raise OSError("no disk")

    assert await on_disk_thread(threading.current_thread) is not threading.current_thread()
    assert await on_disk_thread(sorted, [2, 1], reverse=True) == [2, 1]
    with pytest.raises(OSError, match="no disk"):
        await on_disk_thread(fails)


def test_threads_that_hang_are_few_and_no_other_is_started_while_one_is_idle() -> None:
    """Known failure 3: they are daemons, so that the end of the program does not wait for them."""
    threads, goes_on = DiskThreads(2), threading.Event()
    before = set(threading.enumerate())
    for number in range(3):
        assert threads.submit(int, number).result(20) == number
    hung = [threads.submit(goes_on.wait) for _ in range(4)]
    last = threads.submit(threading.current_thread)
    started = set(threading.enumerate()) - before
    assert len(started) == 2 and all(thread.daemon for thread in started)
    assert hung[3].cancel() and not last.done()
    goes_on.set()
    assert last.result(20) in started
    assert not hung[3].done() or hung[3].cancelled()
    assert [job.result(20) for job in hung[:3]] == [True] * 3


async def test_a_cancelled_caller_leaves_the_work_to_its_thread() -> None:
    begun, goes_on, done = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        goes_on.wait()
        done.set()

    waiting = asyncio.create_task(on_disk_thread(slow))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    goes_on.set()
    assert done.wait(20)
