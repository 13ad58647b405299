"""Event logs: the events of an answer, kept so that clients can read them again from any number on."""

from __future__ import annotations

import asyncio
import logging
import zlib
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

from cairn.api.http.call import Disconnected, HTTPCall, Watch, internal
from cairn.api.http.sse import EVENT_STREAM, HEARTBEAT, error_event
from cairn.frontend.waker import Waker
from cairn.system.interfaces import Clock
from cairn.types.errors import CairnError, Conflict, InvalidRequest, NotFound, trace

KEEP_SECONDS = 600.0
KEEP_CALLS = 1000
PREFIXES = ("chatcmpl-", "cmpl-", "req-", "msg_", "resp_")


class CallTable:
    """Calls by number, and by the names that clients gave them.

    Calls that have ended are kept for 10 minutes, at most 1,000 of them.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._live: dict[int, _Call] = {}
        self._ended: OrderedDict[int, tuple[float, _Call]] = OrderedDict()
        self._names: dict[tuple[bytes, str], _Name] = {}

    def open(self, number: int, ids: Sequence[int], *, name: str | None = None, salt: bytes = b"") -> None:
        """Register a call and its requests. `name` is the client's own name for it, unique below its `salt`."""
        if len(ids) == 1 and name is None:
            return
        key = None if name is None else (salt, name)
        self._live[number] = _Call(tuple(ids), key)
        if key is not None:
            named = self._names.setdefault(key, _Name())
            named.shared |= bool(named.live)
            named.live.add(number)
            named.last = number
            named.calls += 1

    def close(self, number: int) -> None:
        """Note that a call has ended."""
        call = self._live.pop(number, None)
        if call is None:
            return
        if call.key is not None:
            named = self._names[call.key]
            named.live.discard(number)
            named.shared &= bool(named.live)
        now = self._clock.now()
        self._ended[number] = (now, call)
        while len(self._ended) > KEEP_CALLS or next(iter(self._ended.values()))[0] < now - KEEP_SECONDS:
            _, (_, old) = self._ended.popitem(last=False)
            if old.key is not None:
                self._names[old.key].calls -= 1
                if not self._names[old.key].calls:
                    del self._names[old.key]

    def ids(self, number: int) -> tuple[int, ...]:
        """Return the request ids of a call; of an unknown call, the id of the same number."""
        found = self._live.get(number)
        if found is None and number in self._ended:
            found = self._ended[number][1]
        return found.ids if found is not None else (number,)

    def find(self, text: str, salt: bytes) -> int | None:
        """Return the number of a call by a client's own name or by a server id; None for neither.

        A name means the call that has it now, else the last one that had it. Raises Conflict if several had it at once
        and one of them still runs: the wrong one must not be ended.
        """
        named = self._names.get((salt, text))
        if named is None:
            return parse_id(text)
        if named.shared:
            raise Conflict(
                "several requests in flight have had this X-Request-ID; use the id of the answer, which is also in "
                "its X-Cairn-Request-ID",
                field="id",
            )
        return next(iter(named.live), named.last)


@dataclass(slots=True)
class _Call:
    ids: tuple[int, ...]
    key: tuple[bytes, str] | None


@dataclass(slots=True)
class _Name:
    """The calls of one tenant to which a client gave the same name."""

    live: set[int] = field(default_factory=set)
    last: int = 0
    calls: int = 0
    """Number of calls with this name in the table, running or ended; the name is deleted with the last one."""
    shared: bool = False
    """Whether two calls had the name at the same time; reset once no call with the name is running."""


def parse_id(text: str) -> int | None:
    """Return the number in an id as clients see it (X-Request-ID, or the `id` of an answer); None for anything else."""
    for prefix in PREFIXES:
        text = text.removeprefix(prefix)
    if len(text) != 16 or not all(char in "0123456789abcdef" for char in text):
        return None
    return int(text, 16)


PAGE = 1 << 15
"""Bytes of events that are compressed together; they repeat each other, so little remains."""
LOG_COST = 1 << 12
"""Bytes that a log counts beside its events."""
_END = b"\n\n"


class _Page(NamedTuple):
    first: int
    """Number of the first event."""
    packed: bytes


class EventLog:
    """The events of one answer. Those of the beginning may be given up when memory is short."""

    __slots__ = (
        "_fresh",
        "_fresh_bytes",
        "_pages",
        "begun",
        "cancel",
        "cancelled",
        "error",
        "failure",
        "last",
        "number",
        "over",
        "readers",
        "salt",
        "size",
        "timer",
        "unattended",
    )

    def __init__(
        self, number: int, salt: bytes, cancel: Callable[[], object], error: Callable[[CairnError], bytes]
    ) -> None:
        self.number = number
        self.salt = salt
        self.over = False
        self.begun = False
        """Whether its request was admitted: a failure from then on is an event."""
        self.cancelled = False
        """Somebody has ended it by its id."""
        self.failure: CairnError | None = None
        """Why it ended early."""
        self.last = 0
        """Number of the last event."""
        self.readers: set[Waker] = set()
        self.size = LOG_COST
        """How many bytes of memory it takes."""
        self.timer: asyncio.TimerHandle | None = None
        self.unattended = False
        """Its request needs no reader."""
        self.cancel = cancel
        self.error = error
        """The events of a failure, as the answer's dialect has them."""
        self._pages: list[_Page] = []
        self._fresh: list[bytes] = []
        self._fresh_bytes = 0

    @property
    def first(self) -> int:
        """Number of the first event that is still there, or of the next one."""
        return self._pages[0].first if self._pages else self.last - len(self._fresh) + 1

    def add(self, data: bytes) -> None:
        """Append whole events."""
        events = data.split(_END)[:-1]
        self._fresh += events
        self.last += len(events)
        self._fresh_bytes += len(data)
        self.size += len(data)
        if self._fresh_bytes >= PAGE:
            self._pack()
        self.wake()

    def end(self) -> None:
        """Close the log: release what the request held, and compress the events."""
        self.over = True
        self.cancel, self.error = _nothing, error_event  # the old ones hold the whole prompt
        if self._fresh:
            self._pack()
        self.wake()

    def _pack(self) -> None:
        packed = zlib.compress(_END.join(self._fresh), 1)
        self._pages.append(_Page(self.last - len(self._fresh) + 1, packed))
        self.size += len(packed) - self._fresh_bytes
        self._fresh, self._fresh_bytes = [], 0

    def shorten(self) -> bool:
        """Drop the oldest page; return False if there is none."""
        if not self._pages:
            return False
        self.size -= len(self._pages.pop(0).packed)
        return True

    def read(self, after: int) -> tuple[bytes, int]:
        """Return some of the events after number `after`, as sent, and the number of the last of them.

        Raises NotFound if the first of them is no longer kept.
        """
        if after >= self.last:
            return b"", after
        if after + 1 < self.first:
            raise NotFound(
                f"the events up to {self.first - 1} are no longer kept; the text so far is at "
                f"/v1/requests/{self.number:016x}",
                field="after",
            )
        index = bisect_right(self._pages, after + 1, key=lambda page: page.first) - 1
        fresh = self.last - len(self._fresh) + 1
        if after + 1 >= fresh:
            first, events = fresh, self._fresh
        else:
            page = self._pages[index]
            first, events = page.first, zlib.decompress(page.packed).split(_END)
        wanted = events[after + 1 - first :]
        data = b"".join([b"id: %d\n%s\n\n" % pair for pair in enumerate(wanted, after + 1)])
        return data, after + len(wanted)

    def wake(self) -> None:
        """Tell the readers that there is news."""
        for reader in self.readers:
            reader.wake()


def _nothing() -> None:
    """Do nothing: there is nothing left to cancel."""


logger = logging.getLogger("cairn.api")

HEADER = b"x-cairn-resumable"


class EventLogs:
    """The logs of one server: as many bytes as allowed, each for the time of grace after its last reader."""

    def __init__(self, grace: float, limit: int, calls: CallTable | None = None) -> None:
        """Keep logs for `grace` seconds after their end, within `limit` bytes in all."""
        self.calls = calls
        self._grace = grace
        self._limit = limit
        self._logs: dict[int, EventLog] = {}
        self._ended: OrderedDict[int, EventLog] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self.size = 0
        """How many bytes of memory it takes."""
        self._sizes = Counter[bytes]()
        """The bytes of each tenant, by its salt."""

    def start(
        self,
        call: HTTPCall,
        events: AsyncGenerator[bytes, None],
        cancel: Callable[[], object],
        heartbeat: float,
        error: Callable[[CairnError], bytes] = error_event,
        unattended: bool = False,
    ) -> Follower:
        """Generate `events` onto a new log and return its first reader, `call`.

        `cancel` ends the request when the grace time is over, unless it is `unattended` and may run without readers.
        `error` makes the events of a failure. The reader counts from here on: follow it, or `leave`.
        """
        log = EventLog(call.number, call.salt, cancel, error)
        log.unattended = unattended
        self._logs[call.number] = log
        self._resized(log, 0)
        follower = self._follower(log, heartbeat)
        task = asyncio.create_task(self._record(log, events))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return follower

    def state(self, number: int, salt: bytes) -> str | None:
        """Return the state of the work behind a log of the same tenant; None for any other number."""
        log = self._logs.get(number)
        if log is None or log.salt != salt:
            return None
        if not log.over:
            return "running"
        return "cancelled" if log.cancelled else "finished" if log.failure is None else "failed"

    def cancel(self, number: int) -> bool:
        """Cancel the request behind a log; return whether it was still running."""
        log = self._logs[number]
        if log.over:
            return False
        log.cancelled = True
        log.cancel()
        return True

    def find(self, number: int, salt: bytes, heartbeat: float) -> Follower:
        """Return a reader of a log of the same tenant. Raises NotFound for any other number."""
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
        """End the grace time: cancel work that needs a reader, forget a log that is complete."""
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
                self._resized(log, before)
            if not log.begun:
                self._forget(log)
            elif log.number in self._logs:
                self._ended[log.number] = log
                self._wait_for_readers(log)

    def _add(self, log: EventLog, data: bytes) -> None:
        before = log.size
        log.add(data)
        if log.number in self._logs:
            self._resized(log, before)
        while self.size > self._limit and self._make_room():
            pass

    def _make_room(self) -> bool:
        """Forget the oldest ended log of the tenant that takes most, or else drop the oldest page of its largest one.

        Return False if neither is there.
        """
        salt = max(self._sizes, key=self._sizes.__getitem__)
        if (ended := next((log for log in self._ended.values() if log.salt == salt), None)) is not None:
            self._forget(ended)
            return True
        largest = max((log for log in self._logs.values() if log.salt == salt), key=lambda one: one.size)
        before = largest.size
        if largest.shorten():
            self._resized(largest, before)
        elif self._ended:
            self._forget(next(iter(self._ended.values())))
        else:
            return False
        return True

    def _resized(self, log: EventLog, before: int) -> None:
        """Count the bytes by which a log has changed."""
        self.size += log.size - before
        self._sizes[log.salt] += log.size - before

    def _forget(self, log: EventLog) -> None:
        if self._logs.pop(log.number, None) is not None:
            self.size -= log.size
            self._sizes[log.salt] -= log.size
            if not self._sizes[log.salt]:
                del self._sizes[log.salt]
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
        """Answer the call with every event after number `after`, until the end or until the client leaves.

        The headers are sent once the request was admitted. Raises the error that prevented that, and InvalidRequest if
        there is no event `after` yet.
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
        """Wait for the end of the log, for an answer sent in one piece.

        Raises the error that ended it early, and Disconnected if the client left before; the log then has its grace
        time.
        """
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
    """Return whether the call asks to outlive its connection. Raises InvalidRequest if it cannot."""
    value = call.header(HEADER)
    if value is None or value == b"0":
        return False
    if value != b"1":
        raise InvalidRequest("X-Cairn-Resumable must be 1 or 0", field="X-Cairn-Resumable")
    if not stream:
        raise InvalidRequest("X-Cairn-Resumable needs stream to be true", field="X-Cairn-Resumable")
    return True


def parse_after(call: HTTPCall) -> int:
    """Return the event number in Last-Event-ID, which a reconnecting browser sends, else in `?after=N`, else 0."""
    query = call.scope.get("query_string", b"").decode("latin-1")
    name, _, text = query.partition("=")
    if query and name != "after":
        raise InvalidRequest("the only parameter of this route is after=N", field="after")
    seen = (call.header(b"last-event-id") or b"").decode("latin-1")
    text = seen or (text if query else "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InvalidRequest("after must be the id of an event, a whole number", field="after")
    return int(text)
