"""What calls of the router and its answers are made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgspec

from cairn.cluster.router.upstream import UpstreamConnection

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class RequestAccess(NamedTuple):
    """What the Host and Origin headers of a call allow, whatever its key."""

    headers: Sequence[tuple[bytes, bytes]] = ()
    """Headers that its answer needs beside its own (CORS)."""
    foreign: str = ""
    """Why the page that calls may change nothing of the router; empty for a page that may, and for other clients."""
    vouched: bool = False
    """Whether the router admits the page, so that replicas need not check its origin."""
    preflight: Sequence[tuple[bytes, bytes]] | None = None
    """The headers that answer a CORS preflight; None for any other call."""


PLAIN = RequestAccess()
"""The access of a client that is no web page."""
Admit = Callable[[Message, Receive, Send], RequestAccess]
"""Returns what a call may do; raises CairnError for one whose Host is not the router's."""


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


def with_headers(send: Send, headers: Sequence[tuple[bytes, bytes]]) -> Send:
    """Return a `send` that adds headers to the answer."""

    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *headers]}
        await send(message)

    return send_more


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
