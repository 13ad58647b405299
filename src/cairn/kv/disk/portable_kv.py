"""The KV of a context within another file: chunk files, one after another.

    magic
    for each chunk   4 bytes of length, and the chunk's file as `chunk_file` says
    end              4 bytes of zero; what follows is not KV

A chunk's bytes are used only after its checksums are verified; its key is computed anew from the tokens and the tenant
for whom it is imported.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Protocol

MAGIC = b"cairn agent kv 1"
_LENGTH = struct.Struct("<I")
MOST_CHUNK = 1 << 30
"""Most bytes of one chunk's file."""
LEAST_CHUNK = 128
"""Least bytes of a chunk's file: its header alone is longer."""
END = _LENGTH.pack(0)


class Broken(ValueError):
    """The error for lengths that do not fit the file."""


class Readable(Protocol):
    """A file that can be read."""

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset` on."""
        ...

    def size(self) -> int:
        """Return its bytes."""
        ...


def framed(size: int) -> bytes:
    """Return the bytes that precede a chunk's file of so many bytes."""
    return _LENGTH.pack(size)


def frames(file: Readable) -> Iterator[tuple[int, int]]:
    """Yield the offset and length of each chunk's file, and last the offset where KV ends, with length 0.

    Yield nothing for a file without the magic. Raise `Broken` if the file ends early or a chunk's length is impossible.
    """
    at, size = len(MAGIC), file.size()
    if file.read(0, at) != MAGIC:
        return
    while True:
        head = file.read(at, _LENGTH.size)
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else MOST_CHUNK + 1
        at += _LENGTH.size
        if length > MOST_CHUNK or 0 < length < LEAST_CHUNK or at + length > size:
            raise Broken(f"the chunk at byte {at} has an impossible length of {length} bytes")
        yield at, length
        if not length:
            return
        at += length
