"""Frames between a process and its helpers: a length of 4 bytes, little-endian, then msgpack.

A helper imports this, so it imports little.
"""

from __future__ import annotations

import socket

import msgspec

MAX_FRAME = 128 << 20
"""Longest frame in bytes, either way."""
PIECE = 1 << 20
"""Most bytes that are read at once."""


def frame(message: msgspec.Struct) -> bytes:
    """Return a message as it goes over the wire. Raises ValueError if it is too long."""
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_FRAME:
        raise ValueError(f"a frame of {len(data)} bytes is longer than {MAX_FRAME}")
    return len(data).to_bytes(4, "little") + data


def receive_frame(channel: socket.socket) -> bytes | None:
    """Return the content of the next frame; None at the end of the stream, or before a frame that is too long."""
    head = _exactly(channel, 4)
    size = int.from_bytes(head, "little") if head is not None else MAX_FRAME + 1
    return _exactly(channel, size) if size <= MAX_FRAME else None


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = channel.recv(min(size - len(data), PIECE))
        if not piece:
            return None
        data += piece
    return bytes(data)
