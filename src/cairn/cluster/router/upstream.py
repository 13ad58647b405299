"""Connections to replicas: HTTP/1.1, kept open, one exchange at a time each."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections import deque
from collections.abc import Sequence
from typing import Literal, cast

import httptools

HIGH_BYTES = 1 << 18
"""Bytes that wait for a slow client before the replica is read no further."""
MOST_IDLE = 64
"""Connections to one replica that are kept open unused."""
CONNECT_SECONDS = 2.0
KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPALIVE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""Options of TCP, and their values in seconds or probes: a machine that is gone is noticed within 25 s although nothing
is sent to it. macOS calls the first one TCP_KEEPALIVE."""

Cause = Literal["closed", "silent", "local"]
"""Why an exchange failed: the replica refused or closed the connection; it said nothing in time, or no way leads to it;
or the router could not open a connection, which says nothing about the replica."""
_NO_WAY = frozenset((errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN))
_LOCAL = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))


class UpstreamLost(ConnectionError):
    """A replica went away before its answer was complete. `sent`: whether it may have had the request."""

    def __init__(self, what: str, *, sent: bool, cause: Cause = "closed") -> None:
        super().__init__(what)
        self.sent, self.cause = sent, cause


class UpstreamConnection(asyncio.Protocol):
    """A connection to a replica, and the exchange that it carries."""

    def __init__(self, among: set[UpstreamConnection]) -> None:
        """Make one that is `among` the open connections from when it is connected until it is closed."""
        self._among = among
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._changed: asyncio.Event = asyncio.Event()
        self._pieces: deque[bytes] = deque()
        self._bytes = 0
        self._paused = False
        self._heads = False
        self._over = True
        self.lost = False
        self._cut = False
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.reusable = False
        self.used = False
        """Whether it carried an exchange before."""
        self.sent_before = False
        """Whether the replica may have had the request over another connection before."""

    # ----------------------------------------------------------------------------------- called by loop and parser

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self._among.add(self)
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE:
            if (option := getattr(socket, name, None)) is not None:
                raw.setsockopt(socket.IPPROTO_TCP, option, value)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort()
            self._lose()
        if self._bytes > HIGH_BYTES and not self._paused and self._transport is not None:
            self._transport.pause_reading()
            self._paused = True

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._among.discard(self)
        self._lose()

    def _lose(self) -> None:
        self.lost, self.reusable = True, False
        self._changed.set()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Take the status."""
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self._heads = True
            self._changed.set()
        else:
            self.headers = []

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._pieces.append(body)
        self._bytes += len(body)
        self._changed.set()

    def on_message_complete(self) -> None:
        """End the exchange."""
        if self.status >= 200:
            self._over, self.reusable = True, self._parser.should_keep_alive() and not self.lost
            self._changed.set()

    # ------------------------------------------------------------------------------------------ called by the router

    @property
    def usable(self) -> bool:
        """Whether another exchange can begin."""
        return self._over and self.reusable and not self.lost

    async def send(self, data: bytes, *, head_only: bool = False) -> None:
        """Send a whole request and wait for the head of its answer. Raise UpstreamLost.

        `head_only`: the answer has no body, whatever its headers say.
        """
        self._parser = httptools.HttpResponseParser(self)
        self.headers, self.status, self._heads, self._over, self.reusable = [], 0, False, False, False
        self._pieces.clear()
        self._bytes = 0
        if self._transport is None or self.lost or self._transport.is_closing():
            raise UpstreamLost("the connection was closed", sent=False)
        self._transport.write(data)
        while not self._heads:
            if self.lost:
                raise self._loss("before it answered")
            await self._wait()
        if head_only and not self._over:
            self._over = True  # the parser waits for a body that does not come, so the connection is not used again

    async def read(self) -> bytes:
        """Return all of the body that has come, empty at its end. Raise UpstreamLost if it is cut off."""
        while not self._pieces:
            if self._over:
                return b""
            if self.lost:
                raise self._loss("in mid-answer")
            await self._wait()
        data = self._pieces.popleft() if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._bytes = 0
        if self._paused and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            self._paused = False
        return data

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _loss(self, when: str) -> UpstreamLost:
        if self._cut:
            return UpstreamLost(f"the replica fell silent {when}", sent=True, cause="silent")
        return UpstreamLost(f"the replica went away {when}", sent=True)

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def cut(self) -> None:
        """Close the connection to a silent replica; whoever waits for its answer gets UpstreamLost."""
        self._cut = True
        self.abort()
        self._lose()


class UpstreamPool:
    """The open connections to one replica."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._idle: list[UpstreamConnection] = []
        self._open: set[UpstreamConnection] = set()
        """All connections, idle or in use."""
        self._cuts = 0
        """How often the replica was silent and all connections were cut."""

    async def take(self, *, new: bool = False) -> UpstreamConnection:
        """Return a connection; `new`: one that was not used before. Raise UpstreamLost if there can be none."""
        cuts = self._cuts
        while self._idle and not new:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.abort()
        try:
            opening = asyncio.get_running_loop().create_connection(self._made, self.host, self.port)
            _, connection = await asyncio.wait_for(opening, CONNECT_SECONDS)
        except TimeoutError as error:
            what = f"the replica cannot be reached: no connection in {CONNECT_SECONDS:g} s"
            raise UpstreamLost(what, sent=False, cause="silent") from error
        except OSError as error:
            raise UpstreamLost(
                f"the replica cannot be reached: {error}", sent=False, cause=_cause(error.errno)
            ) from error
        if cuts != self._cuts:
            connection.abort()
            raise UpstreamLost("the replica fell silent", sent=False, cause="silent")
        return connection

    def _made(self) -> UpstreamConnection:
        return UpstreamConnection(self._open)

    async def exchange(self, data: bytes, *, head_only: bool = False, repeatable: bool = True) -> UpstreamConnection:
        """Send a request and return its connection, with the head of the answer. Raise UpstreamLost.

        The replica may close an idle connection at any moment, so after one that was used before a new one is tried,
        unless the replica may have had the request and that is not `repeatable`. `head_only`: see
        `UpstreamConnection.send`.
        """
        before = False
        for new in (False, True):
            try:
                connection = await self.take(new=new)
            except UpstreamLost as error:
                error.sent |= before
                raise
            try:
                await connection.send(data, head_only=head_only)
            except UpstreamLost as error:
                connection.abort()
                error.sent |= before
                if not connection.used or error.cause == "silent" or (error.sent and not repeatable):
                    raise
                before = error.sent
            except BaseException:
                connection.abort()
                raise
            else:
                connection.sent_before, connection.used = before, True
                return connection
        raise AssertionError("unreachable")

    def give(self, connection: UpstreamConnection) -> None:
        """Keep a connection for the next exchange, or close it if its exchange is not over."""
        if connection.usable and len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.abort()

    def cut(self) -> None:
        """Close all connections, also those in use: their exchanges are lost. For a replica that is silent."""
        self._cuts += 1
        self._idle.clear()
        for connection in tuple(self._open):
            connection.cut()

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            with contextlib.suppress(RuntimeError):
                connection.abort()
        self._idle.clear()


def _cause(number: int | None) -> Cause:
    """Return what an error of `connect` says about the replica."""
    return "silent" if number in _NO_WAY else "local" if number in _LOCAL else "closed"


DROPPED = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"proxy-connection", b"expect")
)
"""Headers of one connection, which are not passed on."""


def request_bytes(method: str, target: bytes, host: str, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bytes:
    """Return a request as it is sent."""
    lines = [method.encode() + b" " + target + b" HTTP/1.1", b"host: " + host.encode()]
    lines += [
        name + b": " + value
        for name, value in headers
        if name not in DROPPED and name not in (b"host", b"content-length")
    ]
    if body or method in ("POST", "PUT", "PATCH"):
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
