"""A wake-up for a consumer of streams, which sleeps until one of them has news or a time has passed."""

from __future__ import annotations

import asyncio
import math
import weakref


class Waker:
    """A wake-up for one consumer that sleeps until any of its streams has news.

    A sleep with a timeout moves a deadline; one timer serves all of them and checks the deadline when it fires. So a
    stream that gets a token every few milliseconds does not make and cancel a timer for each.
    """

    __slots__ = ("__weakref__", "_deadline", "_future", "_loop", "_timer")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[bool] | None = None
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        """Wake the consumer; this costs nothing if it is awake."""
        future = self._future
        if future is not None and not future.done():
            future.set_result(True)

    async def sleep(self, timeout: float | None = None) -> bool:
        """Sleep until `wake` (True) or until `timeout` seconds have passed (False).

        Raise `RuntimeError` if somebody else sleeps: only one of two could be woken.
        """
        if self._future is not None:
            raise RuntimeError("this stream is being read already")
        future: asyncio.Future[bool] = self._loop.create_future()
        self._future = future
        if timeout is None:
            self._deadline = math.inf
        else:
            self._deadline = self._loop.time() + timeout
            if self._timer is None or self._timer.when() > self._deadline:
                self._arm()
        try:
            return await future
        finally:
            self._future = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadline, _expire, weakref.ref(self))

    def __del__(self) -> None:
        # The garbage collector may run in any thread; a timer may be cancelled only in the loop's.
        if self._timer is None or self._loop.is_closed():
            return
        if asyncio._get_running_loop() is self._loop:
            self._timer.cancel()
        else:
            self._loop.call_soon_threadsafe(self._timer.cancel)


def _expire(reference: weakref.ref[Waker]) -> None:
    """End the sleep if its deadline has come, else set the timer again."""
    waker = reference()
    if waker is None:
        return
    waker._timer = None
    if waker._future is None or waker._future.done() or waker._deadline == math.inf:
        return
    if waker._loop.time() >= waker._deadline:
        waker._future.set_result(False)
    else:
        waker._arm()
