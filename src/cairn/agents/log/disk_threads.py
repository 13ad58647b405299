"""Threads for work that waits for a disk.

At the end of a program the interpreter waits for the threads of every pool of `concurrent.futures`, that of
`asyncio.to_thread` among them: one read from a disk that hangs would keep a server from its end for ever. Nobody waits
for these.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

MOST = 8
"""Threads at once: a disk that hangs takes no more, and what else waits for it is in a queue."""

P = ParamSpec("P")
T = TypeVar("T")


class DiskThreads:
    """At most `most` daemon threads, started when there is work that no idle one takes."""

    def __init__(self, most: int) -> None:
        self._most, self._started = most, 0
        self._idle = 0
        """Below zero: jobs that wait for a thread."""
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Do this on one of the threads."""
        done: Future[T] = Future()
        with self._lock:
            if self._idle <= 0 and self._started < self._most:
                threading.Thread(target=self._run, name="cairn-agents-disk", daemon=True).start()
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
            del done, work  # nothing of them is kept while the next is waited for
            with self._lock:
                self._idle += 1


_threads = DiskThreads(MOST)


async def on_disk_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns, done on another thread. If this is cancelled, work that has begun goes on,
    and nobody waits for it."""
    return await asyncio.wrap_future(_threads.submit(work, *args, **kwargs))
