"""GGUF files, versions 2 and 3: metadata and where each tensor lies, checked whole before anything is built.

The format (https://github.com/ggml-org/ggml, docs/gguf.md), little-endian: magic, version, counts; then metadata, each
entry a key, a type and a value; then for each tensor its name, dimensions, type and offset; then, aligned, the data.
A model may be split into files NAME-00001-of-0000N.gguf; the first holds the metadata. Data is mapped, not read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.models.files import MAX_SPLITS, Fields, opened, reading, shards
from cairn.models.gguf.gguf_header import MAX_KEY_BYTES, Cursor, read_metadata
from cairn.models.packing.dequant import KINDS, OTHER_KINDS, BlockFormat
from cairn.types.errors import ModelFileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 16
"""Most metadata entries, and most tensors, of one file; the largest models have some thousands."""
MAX_SIZE = 1 << 40
"""The largest size of one dimension."""
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as its file describes it."""

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
    """The metadata and the tensors of a model in one file or several."""

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    """Numbers, truth values, strings; arrays of strings are lists, arrays of numbers are numpy's."""
    tensors: dict[str, Tensor]

    @property
    def fields(self) -> Fields:
        """Typed access to the metadata; errors name the file."""
        return Fields(self.metadata, self.paths[0])

    @property
    def own_fields(self) -> Fields:
        """Those below the architecture's name."""
        prefix = f"{self.metadata.get('general.architecture')}."
        own = {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}
        return Fields(own, self.paths[0], prefix)

    def blocks(self, name: str) -> NDArray[np.uint8]:
        """A tensor's bytes, mapped read-only from its file, as [blocks, bytes of a block]."""
        tensor = self.tensors[name]
        with reading(tensor.path):
            if tensor.path.stat().st_size < tensor.begin + tensor.size:
                raise ModelFileError(f"{tensor.path}: the file became shorter while it was read")
            data = np.memmap(tensor.path, np.uint8, "r", offset=tensor.begin, shape=(tensor.size,))
        # A plain ndarray: slices of np.memmap carry a subclass through every operation.
        return np.asarray(data).reshape(-1, tensor.kind.bytes)


def read_gguf(path: Path) -> Gguf:
    """Read and check the headers of a model's file or files.

    Raises `ModelFileError` that names the file and what is wrong: not a GGUF, truncated, beyond a limit, tensors that
    overlap or lie outside the file, names that stand twice, parts that do not belong together.
    """
    paths = shards(path)
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
                raise ModelFileError(f"{one}: the tensor {tensor.name[:120]!r} stands twice")
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
    """The metadata and the tensors of one file."""
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
    """One tensor's description; `begin` is still relative to the data."""
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
    """The tensors at their places in the file, each inside it, aligned, and beside all others."""
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
