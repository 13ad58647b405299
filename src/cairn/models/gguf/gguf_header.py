"""The bytes of a GGUF header -> numbers, texts and arrays, each checked before it is believed.

Nothing here takes memory that the file does not have: a length is compared with the file's size before it is read.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cairn.types.errors import ModelFileError

MAX_KEY_BYTES = (1 << 16) - 1
"""The longest metadata key or tensor name; the format's own bound for keys."""
MAX_STRING_BYTES = 16 << 20
MAX_ELEMENTS = 1 << 24
"""Most elements of all arrays together."""
MAX_TEXTS = 1 << 20
"""Most texts in one array; the largest vocabularies have some 300,000 tokens and 600,000 merges."""

MAX_ALL_TEXTS = 1 << 21
"""Most texts in all arrays together."""
MAX_HEADER_BYTES = 1 << 28
"""Of all before the tensors; the largest have some 20 MB. A file with holes may say that it has terabytes."""

_READ = 1 << 20
_LENGTH = struct.Struct("<Q")
_SCALARS = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4"},
    **{6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8"},
}
"""Number of a value's type -> how it is stored. 7 is a truth value."""
_BOOL, _STRING, _ARRAY = 7, 8, 9


class Cursor:
    """Reads a header value by value; what lies outside the file, or is broken, is a `ModelFileError` with its place.

    The header is read, not mapped: a mapped file that is cut while it is read would kill the process.
    """

    __slots__ = ("_data", "_file", "_size", "at", "elements", "path", "strings")

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.at = path, 0
        self.elements = self.strings = 0
        self._data, self._file, self._size = bytearray(), file, size

    def error(self, text: str) -> ModelFileError:
        """An error at the byte where the cursor stands."""
        return ModelFileError(f"{self.path}: at byte {self.at}: {text}")

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        end = self.at + count
        if end > len(self._data):
            self._fill(end)
        piece = bytes(self._data[self.at : end])
        self.at = end
        return piece

    def whole(self, kind: str) -> int:
        """A whole number stored as numpy's `kind`."""
        return int.from_bytes(self.take(int(kind[2])), "little", signed=kind[1] == "i")

    def text(self, limit: int, what: str) -> str:
        """A string of at most `limit` bytes; `what` is for the message."""
        return self.texts(1, limit, what)[0]

    def texts(self, count: int, limit: int, what: str) -> list[str]:
        """`count` strings one after another. A vocabulary has some 100,000, so the loop is a tight one."""
        found: list[str] = []
        data, at = self._data, self.at
        for _ in range(count):
            if at + 8 > len(data):
                self._fill(at + 8)
            (size,) = _LENGTH.unpack_from(data, at)
            self.at = at
            if size > limit:
                raise self.error(f"{what} has {size} bytes, more than {limit}")
            at += 8 + size
            if at > len(data):
                self._fill(at)
            try:
                found.append(data[at - size : at].decode())
            except UnicodeDecodeError:
                raise self.error(f"{what} is not UTF-8") from None
        self.at = at
        return found

    def _fill(self, end: int) -> None:
        """Read on, so that the bytes before `end` are here."""
        if end <= self._size:
            if end > MAX_HEADER_BYTES:
                raise self.error(f"the header goes on, and that of no model has more than {MAX_HEADER_BYTES} bytes")
            self._data += self._file.read(max(end - len(self._data), _READ))
        if end > len(self._data):
            raise ModelFileError(
                f"{self.path}: truncated: what begins at byte {self.at} of the header ends at byte {end}, and the file "
                f"has only {self._size} bytes"
            )


def read_metadata(cursor: Cursor, entries: int) -> dict[str, Any]:
    """`entries` entries: numbers, truth values, texts; arrays of texts are lists, arrays of numbers numpy's."""
    found: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.text(MAX_KEY_BYTES, "a metadata key")
        if key in found:
            raise cursor.error(f"the metadata key {key[:120]!r} stands twice")
        found[key] = _value(cursor, key, cursor.whole("<u4"))
    return found


def _value(cursor: Cursor, key: str, kind: int) -> Any:
    if kind == _STRING:
        return cursor.text(MAX_STRING_BYTES, f"the value of {key[:120]!r}")
    if kind == _ARRAY:
        return _array(cursor, key)
    if kind not in _SCALARS:
        raise cursor.error(f"the value of {key[:120]!r} has the unknown type {kind}")
    stored = _SCALARS[kind]
    if stored[1] != "f":
        number = cursor.whole(stored)
        return _truth(cursor, key, number) if kind == _BOOL else number
    if stored == "<f8":
        return float(np.frombuffer(cursor.take(8), "<f8")[0])
    # The shortest decimal that this float32 stands for: 1e-06, where its own value is 9.99999997e-07.
    return float(str(np.frombuffer(cursor.take(4), "<f4")[0]))


def _truth(cursor: Cursor, key: str, number: int) -> bool:
    if number > 1:
        raise cursor.error(f"{key[:120]!r} must be true or false, found {number}")
    return bool(number)


def _array(cursor: Cursor, key: str) -> Any:
    what = f"the array {key[:120]!r}"
    kind, count = cursor.whole("<u4"), cursor.whole("<u8")
    cursor.elements += count
    if cursor.elements > MAX_ELEMENTS:
        raise cursor.error(f"{what} has {count} elements; all arrays together may have {MAX_ELEMENTS}")
    if kind in _SCALARS:
        dtype = np.dtype(_SCALARS[kind])
        values = np.frombuffer(cursor.take(count * dtype.itemsize), dtype)
        return values.astype(bool) if kind == _BOOL else values
    if kind != _STRING:
        raise cursor.error(f"{what} has elements of the type {kind}, expected numbers, truth values or texts")
    if count > MAX_TEXTS:
        raise cursor.error(f"{what} has {count} texts, more than {MAX_TEXTS}")
    cursor.strings += count
    if cursor.strings > MAX_ALL_TEXTS:
        raise cursor.error(f"{what} has {count} texts; all arrays together may have {MAX_ALL_TEXTS}")
    return cursor.texts(count, MAX_STRING_BYTES, f"an element of {key[:120]!r}")
