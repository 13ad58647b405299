"""Work that reports events - rounds of a team, a run of a workflow - and outlives its connection.

    data: {"type": "turn.delta", ...}        one JSON object an event, `type` first
    data: [DONE]

The events are kept as those of a turn are (`http/event_log.py`): `/v1/requests/{id}/events` follows them from any on,
where `{id}` is the X-Request-ID of the answer, and `/v1/requests/{id}/cancel` interrupts the work. Without a reader for
the time of grace it is interrupted too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any

from cairn.api.http.call import HTTPCall
from cairn.api.http.event_log import EventLogs
from cairn.api.http.sse import DONE, json_event
from cairn.config.config import Config

Emit = Callable[[dict[str, Any]], object]
Work = Callable[[Emit], Awaitable[Any]]


class EventedWork:
    """Work that reports events. It starts when its events are first read."""

    def __init__(self, work: Work, over: Callable[[], object] | None = None) -> None:
        """Report the events of `work`; `over` is called at its end."""
        self._work, self._over = work, over
        self._queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._task: asyncio.Task[Any] | None = None
        self.interrupted = False
        """Whether it was cancelled before its end; it can then be resumed by a later request."""

    def cancel(self) -> None:
        """Cancel the work."""
        if self._task is not None:
            self._task.cancel()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the work's events until its end. Raise the error that ended it."""
        self._task = task = asyncio.create_task(self._run())
        try:
            while (event := await self._queue.get()) is not None:
                yield json_event(event)
            await asyncio.wait({task})
            if task.cancelled():
                self.interrupted = True
                yield json_event({"type": "interrupted"})
            else:
                task.result()
            yield DONE
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if self._over is not None:
                self._over()

    async def _run(self) -> None:
        try:
            await self._work(self._queue.put_nowait)
        finally:
            self._queue.put_nowait(None)


async def answer(
    call: HTTPCall, logs: EventLogs, config: Config, work: Work, *, stream: bool, whole: Callable[[], dict[str, Any]]
) -> None:
    """Do the work and answer the call: with its events, or at the end with the result of `whole`."""
    calls = logs.calls
    if calls is not None:
        calls.open(call.number, [call.number], name=call.name, salt=call.salt)
    evented = EventedWork(work, None if calls is None else partial(calls.close, call.number))
    follower = logs.start(call, evented.events(), evented.cancel, config.heartbeat)
    if stream:
        await follower.run(call)
        return
    await follower.wait(call)
    await call.json(whole() | ({"interrupted": True} if evented.interrupted else {}))
