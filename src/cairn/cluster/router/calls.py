"""What calls of the router and its answers are made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

import msgspec

from cairn.cluster.router.upstream import UpstreamConnection

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientLeft(Exception):
    """The client closed its connection."""


def replica_url(scope: Message) -> str:
    """Return the replica that a call of a route names; empty for none."""
    return str(parse_qs(scope["query_string"].decode("latin-1")).get("replica", [""])[0])


async def read_whole(connection: UpstreamConnection) -> bytes:
    """Return the rest of an answer. Raise UpstreamLost."""
    parts = []
    while data := await connection.read():
        parts.append(data)
    return b"".join(parts)


async def read_body(receive: Receive) -> bytes:
    """Return the request's body. The listener bounds its size. Raise ClientLeft."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def until_gone(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(send: Send, status: int, body: bytes, kind: bytes = b"application/json", after: bytes = b"") -> None:
    """Send a whole answer. `after`: seconds of a Retry-After header."""
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
    if after:
        headers.append((b"retry-after", after))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def fail(send: Send, status: int, code: str, message: str, after: bytes = b"") -> None:
    """Send an error in the form of OpenAI's."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    await respond(send, status, msgspec.json.encode({"error": error}), after=after)
