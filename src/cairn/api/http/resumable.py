"""Answers that outlive their connection: an event log of each, which readers follow from any event on.

A request sent with `X-Cairn-Resumable: 1`, an agent's turn and a stored response are generated onto a log by a task of
their own; the connection is only the first reader. Events are numbered from 1 and carry their number as the event's id,
so a client that lost its connection asks for what follows the last one it saw and gets each later event once, in order.
Without a reader for the time of grace the request is cancelled; a log is kept as long after its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from cairn.api.chat.wire import EVENT_STREAM, HEARTBEAT, error_event
from cairn.api.http.call import Disconnected, HTTPCall, Watch, internal
from cairn.api.http.call_table import CallTable
from cairn.api.http.event_log import EventLog
from cairn.frontend.request_state import Waker
from cairn.types.errors import CairnError, InvalidRequest, NotFound, trace

logger = logging.getLogger("cairn.api")

HEADER = b"x-cairn-resumable"


class EventLogs:
    """The logs of one server: as many bytes as allowed, each for the time of grace after its last reader."""

    def __init__(self, grace: float, limit: int, calls: CallTable | None = None) -> None:
        """`grace` in seconds; `limit`: bytes of memory of all logs together; `calls`: by what clients call them."""
        self.calls = calls
        self._grace = grace
        self._limit = limit
        self._logs: dict[int, EventLog] = {}
        self._ended: OrderedDict[int, EventLog] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self.size = 0
        """How many bytes of memory it takes."""

    def start(
        self,
        call: HTTPCall,
        events: AsyncGenerator[bytes, None],
        cancel: Callable[[], object],
        heartbeat: float,
        error: Callable[[CairnError], bytes] = error_event,
        unattended: bool = False,
    ) -> Follower:
        """Generate `events` onto a log. `call` is its first reader; `cancel` ends the request when the grace is over,
        unless it is `unattended` and may run without readers.

        `error` makes the events of a failure. The reader is counted from here on: follow it, or `leave`.
        """
        log = EventLog(call.number, call.salt, cancel, error)
        log.unattended = unattended
        self._logs[call.number] = log
        self.size += log.size
        follower = self._follower(log, heartbeat)
        task = asyncio.create_task(self._record(log, events))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return follower

    def state(self, number: int, salt: bytes) -> str | None:
        """What became of the work of a log of the same tenant; None for any other number."""
        log = self._logs.get(number)
        if log is None or log.salt != salt:
            return None
        if not log.over:
            return "running"
        return "cancelled" if log.cancelled else "finished" if log.failure is None else "failed"

    def cancel(self, number: int) -> bool:
        """End the work of a log; whether it still went on."""
        log = self._logs[number]
        if log.over:
            return False
        log.cancelled = True
        log.cancel()
        return True

    def find(self, number: int, salt: bytes, heartbeat: float) -> Follower:
        """A reader of a log of the same tenant; NotFound for any other number."""
        log = self._logs.get(number)
        if log is None or log.salt != salt:
            raise NotFound(
                "there is no such resumable request, or its time of grace is over; "
                "requests are resumable if sent with X-Cairn-Resumable: 1",
                field="id",
            )
        return self._follower(log, heartbeat)

    def _follower(self, log: EventLog, heartbeat: float) -> Follower:
        waker = Waker()
        log.readers.add(waker)
        if log.timer is not None:
            log.timer.cancel()
            log.timer = None
        return Follower(log, waker, heartbeat, self._leave)

    def _leave(self, log: EventLog, waker: Waker) -> None:
        log.readers.discard(waker)
        self._wait_for_readers(log)

    def _wait_for_readers(self, log: EventLog) -> None:
        if not log.readers and log.timer is None and log.number in self._logs:
            log.timer = asyncio.get_running_loop().call_later(self._grace, self._expire, log)

    def _expire(self, log: EventLog) -> None:
        """Nobody came back: end what still runs, unless it needs nobody, and forget what has ended."""
        log.timer = None
        if log.over:
            self._forget(log)
        elif not log.unattended:
            log.cancel()

    async def _record(self, log: EventLog, events: AsyncGenerator[bytes, None]) -> None:
        try:
            async with aclosing(events):
                async for data in events:
                    log.begun = True
                    self._add(log, data)
        except Exception as error:
            if not isinstance(error, CairnError):
                logger.error("request %016x: %s", log.number, trace(error))
            known = error if isinstance(error, CairnError) else internal(f"{log.number:016x}")
            log.failure = known
            if log.begun:
                self._add(log, log.error(known))
        finally:
            before = log.size
            log.end()
            if log.number in self._logs:
                self.size += log.size - before
            if not log.begun:
                self._forget(log)
            elif log.number in self._logs:
                self._ended[log.number] = log
                self._wait_for_readers(log)

    def _add(self, log: EventLog, data: bytes) -> None:
        before = log.size
        log.add(data)
        if log.number in self._logs:
            self.size += log.size - before
        while self.size > self._limit:
            if self._ended:
                self._forget(next(iter(self._ended.values())))
                continue
            largest = max(self._logs.values(), key=lambda one: one.size)
            before = largest.size
            if not largest.shorten():
                break
            self.size += largest.size - before

    def _forget(self, log: EventLog) -> None:
        if self._logs.pop(log.number, None) is not None:
            self.size -= log.size
        self._ended.pop(log.number, None)
        if log.timer is not None:
            log.timer.cancel()
            log.timer = None


class Follower:
    """One reader of a log, counted until `run` has ended."""

    def __init__(self, log: EventLog, waker: Waker, heartbeat: float, leave: Callable[[EventLog, Waker], None]) -> None:
        self._log = log
        self._waker = waker
        self._heartbeat = heartbeat
        self._leave = leave

    async def run(self, call: HTTPCall, after: int = 0) -> None:
        """Answer the call with every event that follows number `after`, until the end or until the client leaves.

        The headers are sent once the request was let in. Raises what kept it from that, and InvalidRequest if there is
        no event `after` yet.
        """
        log = self._log
        try:
            if after > log.last:
                raise InvalidRequest(f"after is {after}; the last event so far is {log.last}", field="after")
            async with Watch(call) as watch:
                while not log.begun and not log.over:
                    await self._waker.sleep()
                if log.failure is not None and not log.begun:
                    raise log.failure
                log.read(after)
                if call.scope["method"] == "HEAD":
                    watch.stop()
                    await call.respond(200, b"", EVENT_STREAM)
                    return
                await call.begin(EVENT_STREAM)
                await self._send(call, after, watch)
                if log.failure is not None:
                    call.ended = log.failure.code
        finally:
            self._leave(log, self._waker)

    def leave(self) -> None:
        """Read nothing."""
        self._leave(self._log, self._waker)

    async def wait(self, call: HTTPCall) -> None:
        """Return when all is said, for an answer sent whole. Raises what ended it early, and Disconnected if the
        client left before; the log then has its time of grace."""
        log = self._log
        try:
            async with Watch(call) as watch:
                while not log.over:
                    await self._waker.sleep()
                watch.stop()
            if watch.left:
                raise Disconnected
            if log.failure is not None:
                raise log.failure
        finally:
            self._leave(log, self._waker)

    async def _send(self, call: HTTPCall, after: int, watch: Watch) -> None:
        log = self._log
        news = True
        while True:
            try:
                data, after = log.read(after)
            except NotFound as error:  # so slow a reader that its next event had to make room
                watch.stop()
                await call.write(log.error(error), more=False)
                return
            if log.over and after == log.last:
                watch.stop()
                await call.write(data, more=False)
                return
            if data or not news:
                await call.write(data or HEARTBEAT)
            news = True
            if after == log.last and not log.over:
                news = await self._waker.sleep(self._heartbeat)


def is_resumable(call: HTTPCall, stream: bool) -> bool:
    """Whether the call asks to outlive its connection. InvalidRequest for what cannot."""
    value = call.header(HEADER)
    if value is None or value == b"0":
        return False
    if value != b"1":
        raise InvalidRequest("X-Cairn-Resumable must be 1 or 0", field="X-Cairn-Resumable")
    if not stream:
        raise InvalidRequest("X-Cairn-Resumable needs stream to be true", field="X-Cairn-Resumable")
    return True


def parse_after(call: HTTPCall) -> int:
    """The number in Last-Event-ID, which a browser sends when it comes back, else in `?after=N`, else 0."""
    query = call.scope.get("query_string", b"").decode("latin-1")
    name, _, text = query.partition("=")
    if query and name != "after":
        raise InvalidRequest("the only parameter of this route is after=N", field="after")
    seen = (call.header(b"last-event-id") or b"").decode("latin-1")
    text = seen or (text if query else "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InvalidRequest("after must be the id of an event, a whole number", field="after")
    return int(text)
