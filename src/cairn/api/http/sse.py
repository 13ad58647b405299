"""Server-sent events (html.spec.whatwg.org, 9.2): headers, heartbeats, and the events that end a stream."""

from __future__ import annotations

from cairn.api.http.call import encode, error_body
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


def error_event(error: CairnError) -> bytes:
    """Return the event that ends a stream which failed after it began."""
    return b"data: " + encode(error_body(error)) + b"\n\n"
