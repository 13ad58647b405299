"""Server-sent events (html.spec.whatwg.org, 9.2): their framing, headers, heartbeats, and the ends of streams.

The chunks of OpenAI's streams, thousands a second, are framed by hand in `api/chat/openai_chunks.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from cairn.api.http.call import HTTPCall, Watch, encode, error_body
from cairn.types.errors import CairnError

DONE = b"data: [DONE]\n\n"
"""The event that ends every successful stream."""
HEARTBEAT = b": still here\n\n"
"""A comment, which clients skip. It keeps proxies and the connection awake while nothing else is sent."""
EVENT_STREAM: list[tuple[bytes, bytes]] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
"""The headers of a stream."""


def json_event(value: Any, kind: str = "") -> bytes:
    """Return an event whose data is a JSON value; `kind`: the event's name, if it has one."""
    data = b"data: " + encode(value) + b"\n\n"
    return b"event: " + kind.encode() + b"\n" + data if kind else data


async def stream_events(call: HTTPCall, send: Callable[[], Awaitable[None]]) -> None:
    """Answer with the events that `send` writes, until it returns or the client goes away. HEAD gets headers alone."""
    async with Watch(call) as watch:
        if call.scope["method"] == "HEAD":
            watch.stop()
            await call.respond(200, b"", EVENT_STREAM)
            return
        await call.begin(EVENT_STREAM)
        await send()
        watch.stop()
        await call.write(b"", more=False)


def error_event(error: CairnError) -> bytes:
    """Return the event that ends a stream which failed after it began."""
    return json_event(error_body(error))
