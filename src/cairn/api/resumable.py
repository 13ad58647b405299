"""Answers that outlive their connection: a tape of each, which readers follow from any event on.

A request sent with `X-Cairn-Resumable: 1` is generated onto a tape by a task of its own; its connection is only the
first reader. Events are numbered from 1 and carry their number as the event's id, so a client that lost its connection
asks for what follows the last one it saw and gets each later event once, in order. Without a reader for the time of
grace the request is cancelled; a tape is kept as long after its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from cairn.api.reply import Call, Disconnected, Watch, internal
from cairn.api.sse import EVENT_STREAM, HEARTBEAT, error_event
from cairn.api.tape import Tape
from cairn.errors import CairnError, InvalidRequest, NotFound, trace
from cairn.service.stream import Waker

log = logging.getLogger("cairn.api")

HEADER = b"x-cairn-resumable"


class Tapes:
    """The tapes of one server: as many bytes as allowed, each for the time of grace after its last reader."""

    def __init__(self, grace: float, limit: int) -> None:
        """`grace` in seconds; `limit`: bytes of memory of all tapes together."""
        self._grace = grace
        self._limit = limit
        self._tapes: dict[int, Tape] = {}
        self._ended: OrderedDict[int, Tape] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self.size = 0
        """How many bytes of memory it takes."""

    def start(
        self, call: Call, events: AsyncGenerator[bytes, None], cancel: Callable[[], object], heartbeat: float
    ) -> Follower:
        """Generate `events` onto a tape. `call` is its first reader; `cancel` ends the request when the grace is over.

        The reader is counted from here on, so follow it.
        """
        tape = Tape(call.number, call.salt, cancel)
        self._tapes[call.number] = tape
        self.size += tape.size
        follower = self._follower(tape, heartbeat)
        task = asyncio.create_task(self._record(tape, events))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return follower

    def find(self, number: int, salt: bytes, heartbeat: float) -> Follower:
        """A reader of a tape of the same tenant; NotFound for any other number."""
        tape = self._tapes.get(number)
        if tape is None or tape.salt != salt:
            raise NotFound(
                "there is no such resumable request, or its time of grace is over; "
                "requests are resumable if sent with X-Cairn-Resumable: 1",
                field="id",
            )
        return self._follower(tape, heartbeat)

    def _follower(self, tape: Tape, heartbeat: float) -> Follower:
        waker = Waker()
        tape.readers.add(waker)
        if tape.timer is not None:
            tape.timer.cancel()
            tape.timer = None
        return Follower(tape, waker, heartbeat, self._leave)

    def _leave(self, tape: Tape, waker: Waker) -> None:
        tape.readers.discard(waker)
        self._wait_for_readers(tape)

    def _wait_for_readers(self, tape: Tape) -> None:
        if not tape.readers and tape.timer is None and tape.number in self._tapes:
            tape.timer = asyncio.get_running_loop().call_later(self._grace, self._expire, tape)

    def _expire(self, tape: Tape) -> None:
        """Nobody came back: end what still runs, forget what has ended."""
        tape.timer = None
        if tape.over:
            self._forget(tape)
        else:
            tape.cancel()

    async def _record(self, tape: Tape, events: AsyncGenerator[bytes, None]) -> None:
        try:
            async with aclosing(events):
                async for data in events:
                    tape.begun = True
                    self._add(tape, data)
        except Exception as error:
            if not isinstance(error, CairnError):
                log.error("request %016x: %s", tape.number, trace(error))
            known = error if isinstance(error, CairnError) else internal(f"{tape.number:016x}")
            tape.failure = known
            if tape.begun:
                self._add(tape, error_event(known))
        finally:
            before = tape.size
            tape.end()
            if tape.number in self._tapes:
                self.size += tape.size - before
            if not tape.begun:
                self._forget(tape)
            elif tape.number in self._tapes:
                self._ended[tape.number] = tape
                self._wait_for_readers(tape)

    def _add(self, tape: Tape, data: bytes) -> None:
        before = tape.size
        tape.add(data)
        if tape.number in self._tapes:
            self.size += tape.size - before
        while self.size > self._limit:
            if self._ended:
                self._forget(next(iter(self._ended.values())))
                continue
            largest = max(self._tapes.values(), key=lambda one: one.size)
            before = largest.size
            if not largest.shorten():
                break
            self.size += largest.size - before

    def _forget(self, tape: Tape) -> None:
        if self._tapes.pop(tape.number, None) is not None:
            self.size -= tape.size
        self._ended.pop(tape.number, None)
        if tape.timer is not None:
            tape.timer.cancel()
            tape.timer = None


class Follower:
    """One reader of a tape, counted until `run` has ended."""

    def __init__(self, tape: Tape, waker: Waker, heartbeat: float, leave: Callable[[Tape, Waker], None]) -> None:
        self._tape = tape
        self._waker = waker
        self._heartbeat = heartbeat
        self._leave = leave

    async def run(self, call: Call, after: int = 0) -> None:
        """Answer the call with every event that follows number `after`, until the end or until the client leaves.

        The headers are sent once the request was let in. Raises what kept it from that, and InvalidRequest if there is
        no event `after` yet.
        """
        tape = self._tape
        try:
            if after > tape.last:
                raise InvalidRequest(f"after is {after}; the last event so far is {tape.last}", field="after")
            async with Watch(call) as watch:
                while not tape.begun and not tape.over:
                    await self._waker.sleep()
                if tape.failure is not None and not tape.begun:
                    raise tape.failure
                tape.read(after)
                if call.scope["method"] == "HEAD":
                    watch.stop()
                    await call.respond(200, b"", EVENT_STREAM)
                    return
                await call.begin(EVENT_STREAM)
                await self._send(call, after, watch)
                if tape.failure is not None:
                    call.ended = tape.failure.code
        finally:
            self._leave(tape, self._waker)

    async def wait(self, call: Call) -> None:
        """Return when all is said, for an answer sent whole. Raises what ended it early, and Disconnected if the
        client left before; the tape then has its time of grace."""
        tape = self._tape
        try:
            async with Watch(call) as watch:
                while not tape.over:
                    await self._waker.sleep()
                watch.stop()
            if watch.left:
                raise Disconnected
            if tape.failure is not None:
                raise tape.failure
        finally:
            self._leave(tape, self._waker)

    async def _send(self, call: Call, after: int, watch: Watch) -> None:
        tape = self._tape
        news = True
        while True:
            try:
                data, after = tape.read(after)
            except NotFound as error:  # so slow a reader that its next event had to make room
                watch.stop()
                await call.write(error_event(error), more=False)
                return
            if tape.over and after == tape.last:
                watch.stop()
                await call.write(data, more=False)
                return
            if data or not news:
                await call.write(data or HEARTBEAT)
            news = True
            if after == tape.last and not tape.over:
                news = await self._waker.sleep(self._heartbeat)


def is_resumable(call: Call, stream: bool) -> bool:
    """Whether the call asks to outlive its connection. InvalidRequest for what cannot."""
    value = call.header(HEADER)
    if value is None or value == b"0":
        return False
    if value != b"1":
        raise InvalidRequest("X-Cairn-Resumable must be 1 or 0", field="X-Cairn-Resumable")
    if not stream:
        raise InvalidRequest("X-Cairn-Resumable needs stream to be true", field="X-Cairn-Resumable")
    return True


def parse_after(call: Call) -> int:
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
