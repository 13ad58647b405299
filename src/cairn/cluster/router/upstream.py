"""Connections to replicas: HTTP/1.1, kept open, one exchange at a time each."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import cast

import httptools

HIGH_BYTES = 1 << 18
"""Bytes that wait for a slow client before the replica is read no further."""
MOST_IDLE = 64
"""Connections to one replica that are kept open unused."""
CONNECT_SECONDS = 2.0


class UpstreamLost(ConnectionError):
    """A replica went away before its answer was complete. `sent`: whether it may have had the request."""

    def __init__(self, what: str, *, sent: bool) -> None:
        super().__init__(what)
        self.sent = sent


class UpstreamConnection(asyncio.Protocol):
    """A connection to a replica, and the exchange that it carries."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._changed: asyncio.Event = asyncio.Event()
        self._pieces: deque[bytes] = deque()
        self._bytes = 0
        self._paused = False
        self._heads = False
        self._over = True
        self.lost = False
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.reusable = False
        self.sent_before = False
        """Whether the replica may have had the request over another connection before."""

    # ----------------------------------------------------------------------------------- called by loop and parser

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

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
                raise UpstreamLost("the replica went away before it answered", sent=True)
            await self._wait()
        if head_only and not self._over:
            self._over = True  # the parser waits for a body that does not come, so the connection is not used again

    async def read(self) -> bytes:
        """Return all of the body that has come, empty at its end. Raise UpstreamLost if it is cut off."""
        while not self._pieces:
            if self._over:
                return b""
            if self.lost:
                raise UpstreamLost("the replica went away in mid-answer", sent=True)
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

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()


class UpstreamPool:
    """The open connections to one replica."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._idle: list[UpstreamConnection] = []

    async def take(self, *, new: bool = False) -> UpstreamConnection:
        """Return a connection; `new`: one that was not used before. Raise UpstreamLost if there can be none."""
        while self._idle and not new:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.abort()
        try:
            opening = asyncio.get_running_loop().create_connection(UpstreamConnection, self.host, self.port)
            _, connection = await asyncio.wait_for(opening, CONNECT_SECONDS)
        except (OSError, TimeoutError) as error:
            raise UpstreamLost(f"the replica cannot be reached: {error}", sent=False) from error
        return connection

    async def exchange(self, data: bytes, *, head_only: bool = False, repeatable: bool = True) -> UpstreamConnection:
        """Send a request and return its connection, with the head of the answer. Raise UpstreamLost.

        The replica may close an idle connection at any moment, so a new one is tried before the replica counts as gone,
        unless it may have had the request and that is not `repeatable`. `head_only`: see `UpstreamConnection.send`.
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
                if new or (error.sent and not repeatable):
                    raise
                before = error.sent
            except BaseException:
                connection.abort()
                raise
            else:
                connection.sent_before = before
                return connection
        raise AssertionError("unreachable")

    def give(self, connection: UpstreamConnection) -> None:
        """Keep a connection for the next exchange, or close it if its exchange is not over."""
        if connection.usable and len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.abort()

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            with contextlib.suppress(RuntimeError):
                connection.abort()
        self._idle.clear()


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
