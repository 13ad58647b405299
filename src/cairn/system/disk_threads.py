"""Daemon threads for work that waits for a disk or a store, which may hang: they never hold up the end of a process."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

MOST = 8
"""Limit on threads: a disk that hangs occupies no more, and further work waits in a queue."""

P = ParamSpec("P")
T = TypeVar("T")


class DiskThreads:
    """A pool of at most `most` daemon threads for work that waits for a disk.

    At its end the interpreter waits for the threads of every `concurrent.futures` pool, `asyncio.to_thread` included,
    so one read from a disk that hangs would block the exit for ever. It does not wait for these. A thread is started
    when there is work and no idle one.
    """

    def __init__(self, most: int) -> None:
        self._most, self._started = most, 0
        self._idle = 0
        """Idle threads; below zero, jobs that wait for one."""
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `work` on one of the threads."""
        done: Future[T] = Future()
        with self._lock:
            if self._idle <= 0 and self._started < self._most:
                threading.Thread(target=self._run, name="cairn-disk", daemon=True).start()
                self._started += 1
            else:
                self._idle -= 1
        self._jobs.put((done, lambda: work(*args, **kwargs)))
        return done

    def _run(self) -> None:
        while True:
            done, work = self._jobs.get()
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except BaseException as error:
                    done.set_exception(error)
            del done, work  # release them while waiting for the next job
            with self._lock:
                self._idle += 1


_threads = DiskThreads(MOST)


async def on_disk_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` on a disk thread and return its result.

    If the caller is cancelled, work that has begun goes on, and nobody waits for it.
    """
    return await asyncio.wrap_future(_threads.submit(work, *args, **kwargs))
