"""The KV of a context within another file: chunks as a disk store has them, one after another.

    magic
    for each chunk   4 bytes of length, and the chunk's file as `chunk_file` says
    end              4 bytes of zero; what follows is not KV

Only the bytes of a chunk are believed, once its checksums are right; its key is computed anew from the tokens and the
tenant that it is taken in for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Protocol

MAGIC = b"cairn agent kv 1"
_LENGTH = struct.Struct("<I")
MOST_CHUNK = 1 << 30
"""Bytes of one chunk's file, at most."""
LEAST_CHUNK = 128
"""Bytes that every chunk's file has: its header alone is longer."""
END = _LENGTH.pack(0)


class Broken(ValueError):
    """The lengths do not fit the file."""


class Readable(Protocol):
    """A file that is read."""

    def read(self, offset: int, size: int) -> bytes:
        """Up to so many bytes from there on."""
        ...

    def size(self) -> int:
        """Its bytes."""
        ...


def framed(size: int) -> bytes:
    """What comes before a chunk's file of so many bytes."""
    return _LENGTH.pack(size)


def frames(file: Readable) -> Iterator[tuple[int, int]]:
    """Where each chunk's file begins and how long it is; last the place where KV ends, with length 0.

    `Broken` for a file that ends before that or has a chunk that is too long. None of a file that does not begin so.
    """
    at, size = len(MAGIC), file.size()
    if file.read(0, at) != MAGIC:
        return
    while True:
        head = file.read(at, _LENGTH.size)
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else MOST_CHUNK + 1
        at += _LENGTH.size
        if length > MOST_CHUNK or 0 < length < LEAST_CHUNK or at + length > size:
            raise Broken(f"a chunk at byte {at} has {length} bytes, which none has or the file does not")
        yield at, length
        if not length:
            return
        at += length
