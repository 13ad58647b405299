"""GGUF files, versions 2 and 3: metadata and where each tensor lies, checked whole before anything is built.

The format (https://github.com/ggml-org/ggml, docs/gguf.md), little-endian: magic, version, counts; then metadata, each
entry a key, a type and a value; then for each tensor its name, dimensions, type and offset; then, aligned, the data.
A model may be split into files NAME-00001-of-0000N.gguf; the first holds the metadata. Data is mapped, not read.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from cairn.models.files import MAX_SPLITS, Fields, opened, reading, shards
from cairn.models.quantization.dequant import KINDS, OTHER_KINDS, BlockFormat
from cairn.types.errors import ModelFileError
from cairn.types.model_spec import MAX_VOCAB

MAX_KEY_BYTES = (1 << 16) - 1
"""The longest metadata key or tensor name; the format's own bound for keys."""
MAX_STRING_BYTES = 16 << 20
MAX_ELEMENTS = 1 << 24
"""Most elements of all arrays together."""
MAX_TEXTS = 1 << 20
"""Most strings in one array; the largest vocabularies have some 300,000 tokens and 600,000 merges."""

MAX_ALL_TEXTS = 1 << 21
"""Most strings in all arrays together."""
MAX_HEADER_BYTES = 1 << 28
"""Longest header before the tensor data; the largest have some 20 MB. A sparse file may announce terabytes."""

_READ = 1 << 20
_LENGTH = struct.Struct("<Q")
_SCALARS = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4"},
    **{6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8"},
}
"""Type number -> numpy type of the stored value. 7 is bool."""
_BOOL, _STRING, _ARRAY = 7, 8, 9


class Cursor:
    """Reader of a header, value by value; raises `ModelFileError` with the byte offset for broken or truncated data.

    The header is read, not mapped: if a mapped file is truncated while it is read, the process is killed.
    """

    __slots__ = ("_data", "_file", "_size", "at", "elements", "path", "strings")

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.at = path, 0
        self.elements = self.strings = 0
        self._data, self._file, self._size = bytearray(), file, size

    def error(self, text: str) -> ModelFileError:
        """Return an error that names the current byte offset."""
        return ModelFileError(f"{self.path}: at byte {self.at}: {text}")

    def take(self, count: int) -> bytes:
        """Read the next `count` bytes."""
        end = self.at + count
        if end > len(self._data):
            self._fill(end)
        piece = bytes(self._data[self.at : end])
        self.at = end
        return piece

    def whole(self, kind: str) -> int:
        """Read an integer of numpy's type `kind`."""
        return int.from_bytes(self.take(int(kind[2])), "little", signed=kind[1] == "i")

    def text(self, limit: int, what: str) -> str:
        """Read a string of at most `limit` bytes; `what` names it in the message."""
        return self.texts(1, limit, what)[0]

    def texts(self, count: int, limit: int, what: str) -> list[str]:
        """Read `count` strings. A vocabulary has some 100,000, so the loop is tight."""
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
        """Read ahead until the buffer holds the bytes before `end`."""
        if end <= self._size:
            if end > MAX_HEADER_BYTES:
                raise self.error(f"the header has more than {MAX_HEADER_BYTES} bytes, the limit")
            self._data += self._file.read(max(end - len(self._data), _READ))
        if end > len(self._data):
            raise ModelFileError(
                f"{self.path}: truncated: a value from byte {self.at} of the header ends at byte {end}, but the file "
                f"has only {self._size} bytes"
            )


def read_metadata(cursor: Cursor, entries: int) -> dict[str, Any]:
    """Read `entries` metadata entries; arrays of strings become lists, arrays of numbers numpy arrays."""
    found: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.text(MAX_KEY_BYTES, "a metadata key")
        if key in found:
            raise cursor.error(f"the metadata key {key[:120]!r} appears twice")
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
    # The shortest decimal that rounds to this float32: 1e-06 instead of 9.99999997e-07.
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
        raise cursor.error(f"{what} has elements of the type {kind}, expected numbers, booleans or strings")
    if count > MAX_TEXTS:
        raise cursor.error(f"{what} has {count} strings, more than {MAX_TEXTS}")
    cursor.strings += count
    if cursor.strings > MAX_ALL_TEXTS:
        raise cursor.error(f"{what} has {count} strings; all arrays together may have {MAX_ALL_TEXTS}")
    return cursor.texts(count, MAX_STRING_BYTES, f"an element of {key[:120]!r}")


MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 16
"""Most metadata entries, and most tensors, of one file; the largest models have some thousands."""
MAX_SIZE = 1 << 40
"""The largest size of one dimension."""
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as its file describes it."""

    name: str
    kind: BlockFormat
    shape: tuple[int, ...]
    """Slowest axis first, as numpy has it; matrices are [out, in]."""
    path: Path
    begin: int
    """Bytes from the start of the file."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Gguf:
    """Metadata and tensors of a model in one or several files."""

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    """Arrays of strings are lists, arrays of numbers are numpy arrays."""
    tensors: dict[str, Tensor]

    @property
    def fields(self) -> Fields:
        """Typed access to the metadata; errors name the file."""
        return Fields(self.metadata, self.paths[0])

    @property
    def own_fields(self) -> Fields:
        """Typed access to the keys below the architecture's name."""
        prefix = f"{self.metadata.get('general.architecture')}."
        own = {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}
        return Fields(own, self.paths[0], prefix)

    def blocks(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor's bytes as [blocks, bytes of a block], mapped read-only from its file."""
        tensor = self.tensors[name]
        with reading(tensor.path):
            if tensor.path.stat().st_size < tensor.begin + tensor.size:
                raise ModelFileError(f"{tensor.path}: the file became shorter while it was read")
            data = np.memmap(tensor.path, np.uint8, "r", offset=tensor.begin, shape=(tensor.size,))
        # A plain ndarray: slices of np.memmap carry a subclass through every operation.
        return np.asarray(data).reshape(-1, tensor.kind.bytes)


def vocab_rows(gguf: Gguf, hidden: int) -> int:
    """Return the number of rows of the embedding, which may exceed the number of tokens."""
    tensor = gguf.tensors.get("token_embd.weight")
    if tensor is None or len(tensor.shape) != 2 or tensor.shape[1] != hidden or tensor.shape[0] > MAX_VOCAB:
        found = "nothing" if tensor is None else f"the shape {list(tensor.shape)}"
        raise ModelFileError(f"{gguf.paths[0]}: token_embd.weight must be [tokens, {hidden}], found {found}")
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > tensor.shape[0]:
        raise ModelFileError(f"{gguf.paths[0]}: {len(tokens)} tokens, but the embedding has {tensor.shape[0]} rows")
    if isinstance(tokens, list) and not set(map(type, tokens)) <= {str}:
        raise gguf.fields.error("tokenizer.ggml.tokens", "a list of texts")
    return tensor.shape[0]


_read: ContextVar[dict[tuple[object, ...], Gguf] | None] = ContextVar("cairn_gguf_read", default=None)


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """Read the same unchanged files once inside, on this thread: a vocabulary takes some 50 to 150 ms each time."""
    token = _read.set({})
    try:
        yield
    finally:
        _read.reset(token)


def read_gguf(path: Path) -> Gguf:
    """Read and check the headers of a model's file or files.

    Raise `ModelFileError` that names the file and the problem: not a GGUF file, truncated, beyond a limit, tensors that
    overlap or lie outside the file, duplicate names, or parts that do not belong together.
    """
    paths = shards(path)
    if (known := _read.get()) is None:
        return _read_all(paths)
    with reading(path):
        facts = [(one, one.stat()) for one in paths]
    key = tuple((str(one), at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for one, at in facts)
    if key not in known:
        known[key] = _read_all(paths)
    return known[key]


def _read_all(paths: tuple[Path, ...]) -> Gguf:
    """Return what the headers of all parts say."""
    metadata: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for number, one in enumerate(paths):
        found, described = _read_file(one)
        if len(paths) > 1:
            _check_part(one, found, number, len(paths))
        if not number:
            metadata = found
        for tensor in described:
            if tensor.name in tensors:
                raise ModelFileError(f"{one}: the tensor {tensor.name[:120]!r} appears twice")
            tensors[tensor.name] = tensor
    if len(paths) == 1 and Fields(metadata, paths[0]).integer("split.count", 0, MAX_SPLITS, 0) > 1:
        raise ModelFileError(
            f"{paths[0]}: is one part of a split model; its name must end in -0000K-of-0000N.gguf beside the others"
        )
    wanted = Fields(metadata, paths[0]).integer("split.tensors.count", 0, MAX_ENTRIES, len(tensors))
    if len(paths) > 1 and wanted != len(tensors):
        raise ModelFileError(f"{paths[0]}: split.tensors.count is {wanted}, but its parts hold {len(tensors)} tensors")
    return Gguf(paths, metadata, tensors)


def _check_part(path: Path, metadata: dict[str, Any], number: int, count: int) -> None:
    fields = Fields(metadata, path)
    if fields.integer("split.count", 0, MAX_SPLITS) != count:
        raise fields.error("split.count", f"{count}, as the file's name says")
    if fields.integer("split.no", 0, MAX_SPLITS) != number:
        raise fields.error("split.no", f"{number}, as the file's name says")


def _read_file(path: Path) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the metadata and the tensors of one file."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        cursor = Cursor(path, file, size)
        if size < 24 or cursor.take(4) != MAGIC:
            raise ModelFileError(f"{path}: not a GGUF file: it does not begin with {MAGIC.decode()} and a header")
        version = cursor.whole("<u4")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            state = "is big-endian" if swapped else f"has version {version}"
            raise ModelFileError(f"{path}: {state}; supported is GGUF of versions 2 and 3, little-endian")
        tensors, entries = cursor.whole("<u8"), cursor.whole("<u8")
        for what, count in (("tensors", tensors), ("metadata entries", entries)):
            if count > MAX_ENTRIES:
                raise ModelFileError(f"{path}: announces {count} {what}, more than {MAX_ENTRIES}")
        metadata = read_metadata(cursor, entries)
        fields = Fields(metadata, path)
        alignment = fields.integer("general.alignment", 8, 1 << 20, DEFAULT_ALIGNMENT)
        if alignment % 8:
            raise fields.error("general.alignment", "a multiple of 8")
        described = [_describe(cursor) for _ in range(tensors)]
        start = -(-cursor.at // alignment) * alignment
    return metadata, list(_placed(path, described, start, alignment, size))


def _describe(cursor: Cursor) -> Tensor:
    """Read one tensor's description; `begin` is still relative to the data section."""
    name = cursor.text(MAX_KEY_BYTES, "the name of a tensor")
    where = f"the tensor {name[:120]!r}"
    axes = cursor.whole("<u4")
    if not 1 <= axes <= 4:
        raise cursor.error(f"{where} has {axes} dimensions, expected 1 to 4")
    shape = tuple(cursor.whole("<u8") for _ in range(axes))
    number, begin = cursor.whole("<u4"), cursor.whole("<u8")
    if any(not 1 <= one <= MAX_SIZE for one in shape):
        raise cursor.error(f"{where} has the dimensions {list(shape)}, expected each from 1 to {MAX_SIZE}")
    if number not in KINDS:
        known = ", ".join(kind.name for kind in KINDS.values())
        called = f"type {OTHER_KINDS[number]}" if number in OTHER_KINDS else f"type number {number}"
        raise cursor.error(f"{where} has the {called}, which is not supported; supported are {known}")
    kind = KINDS[number]
    if shape[0] % kind.values:
        raise cursor.error(f"{where} has rows of {shape[0]} values, expected a multiple of {kind.values} ({kind.name})")
    count = 1
    for one in shape:
        count *= one
    return Tensor(name, kind, shape[::-1], cursor.path, begin, count // kind.values * kind.bytes)


def _placed(path: Path, found: list[Tensor], start: int, alignment: int, size: int) -> Iterator[Tensor]:
    """Yield the tensors with absolute offsets; raise unless each is aligned, inside the file and overlaps no other."""
    at = 0
    for tensor in sorted(found, key=lambda one: (one.begin, one.size)):
        where = f"{path}: the tensor {tensor.name[:120]!r}"
        if tensor.begin % alignment:
            raise ModelFileError(f"{where} starts at byte {tensor.begin}, expected a multiple of {alignment}")
        if tensor.begin < at:
            raise ModelFileError(f"{where} starts at byte {tensor.begin}, where another one ends at {at}")
        at = tensor.begin + tensor.size
        if start + at > size:
            raise ModelFileError(f"{where} ends at byte {start + at}, but the file is truncated at {size}")
        yield Tensor(tensor.name, tensor.kind, tensor.shape, path, start + tensor.begin, tensor.size)
