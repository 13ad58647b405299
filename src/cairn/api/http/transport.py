"""The output of a connection: a transport that counts, and the refusals of the guard."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from cairn.api.http.call import SAFE, encode, retry_after
from cairn.api.http.not_found import body_of
from cairn.types.errors import CairnError

WRITE_BUFFER = 1 << 14
"""Bytes that wait in a transport before its writer has to wait. Each write costs the transport a kilobyte more, so
it is better to keep what a slow client has not read as tokens, before encoding."""


_TCP_CLOSE = 7
"""The state of a connection that was reset, as Linux numbers them (netinet/tcp.h)."""


class OutputTransport:
    """A transport that counts what was written and closes the way its owner wants.

    It sends the head of an answer together with the first piece of its body: each write is a system call and wakes the
    client.
    """

    __slots__ = ("_end", "_head", "events", "raw", "written")

    def __init__(self, raw: asyncio.Transport, end: Callable[[], None]) -> None:
        self.raw = raw
        self.written = 0
        self.events = False
        """Whether the answer under way is a stream of events."""
        self._end = end
        self._head = b""

    def write(self, data: bytes) -> None:
        """Send, or keep the head of an answer until more comes."""
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 1"):
            self._head = data
            self.events = b"\r\ncontent-type: text/event-stream" in data
            return
        if self._head:
            data = self._head + data
            self._head = b""
        self.written += len(data)
        self.raw.write(data)

    def flush(self) -> None:
        """Send a head that nothing follows."""
        if self._head:
            self.write(b"")

    @property
    def reset(self) -> bool:
        """Whether the other side has reset the connection, or that cannot be found out."""
        try:
            state = self.raw.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        except (AttributeError, OSError):  # not Linux, or no longer a socket
            return True
        return bool(state[0] == _TCP_CLOSE)

    def close(self) -> None:
        """Close after what was written is sent; a client that still sends gets time to read it."""
        self._end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def refusal(error: CairnError, path: str, request_id: str) -> bytes:
    """Return a complete HTTP answer that refuses a request, in the shape that the path's clients read."""
    body = encode(body_of(path, error, request_id))
    lines = [
        b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode()),
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"connection: close",
        b"x-request-id: " + request_id.encode(),
        *(name + b": " + value for name, value in (*SAFE, *retry_after(error))),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
