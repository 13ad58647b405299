"""Stand-ins for kernels and weights that write packed matrices to a file, or read them from one.

`decoder.build` runs with them over tensor names, so that only what is needed is built.
"""

# The methods are documented in kernels.base.
# ruff: noqa: D102

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from cairn.kernels.native import NativeKernels, form_of, packed_bytes
from cairn.models.forward.moe import is_expert
from cairn.models.hub.digests import tell
from cairn.models.packing.weight_format import HeldWeights
from cairn.models.quantization.tensor_meta import TensorMeta

MAGIC = b"CAIRNPK1"
START = 4096
"""Offset of the first matrix, on a page boundary."""
_READ = 64 << 20
_PIECE = 4 << 20


class KeptMatrix(msgspec.Struct, frozen=True):
    """One matrix in the file."""

    parts: tuple[tuple[int, int, str], ...]
    """(out, in, `native.form_of`)"""
    bytes: int
    check: int


class FileDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of the file, in the order in which `decoder.build` asks for matrices."""

    key: str
    errors: dict[str, float]
    matrices: list[KeptMatrix]


class DamagedMatrices(Exception):
    """The file does not match its description or its key."""


class WeightsView(Mapping[str, str]):
    """Stand-in for the weights that returns each tensor's name."""

    def __init__(self, weights: HeldWeights) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> str:
        if name not in self._weights:
            raise KeyError(name)
        return name

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class PackingKernels(ABC):
    """Stand-in for the kernels that builds from names; everything but matrices is built from the weights."""

    def __init__(self, kernels: NativeKernels, weights: HeldWeights) -> None:
        self._kernels, self._weights = kernels, weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def vector(self, name: str) -> Any:
        return self._kernels.vector(self._array(name))

    def table(self, name: str) -> Any:
        if self._weights.outline(name).scale:
            return self.matrix([name], [None])
        return self._kernels.table(self._array(name))

    @abstractmethod
    def matrix(self, names: Sequence[str], biases: Sequence[str | None]) -> Any:
        """Return the matrix as the kernels would build it."""

    def _array(self, name: str) -> Any:
        return self._weights[name]

    def _biases(self, names: Sequence[str | None]) -> list[NDArray[Any] | None]:
        return [None if name is None else self._array(name) for name in names]


class WritingKernels(PackingKernels):
    """Packs each matrix and appends its memory to a file."""

    ahead = 2
    """Matrices that may wait to be written, while the next one is packed."""

    def __init__(self, kernels: NativeKernels, weights: HeldWeights, file: Any) -> None:
        super().__init__(kernels, weights)
        self.whole = True
        """Whether everything was written."""
        self._file = file
        self._matrices: list[KeptMatrix] = []
        self._writer = ThreadPoolExecutor(1, "cairn-packed")
        self._waiting: list[Future[None]] = []
        self._write(MAGIC + bytes(START - len(MAGIC)))

    def matrix(self, names: Sequence[str], biases: Sequence[str | None]) -> Any:
        parts = [self._weights[name] for name in names]
        made = self._kernels.matrix(parts, self._biases(biases))
        shapes = tuple((one.shape[0], one.shape[1], form_of(one)) for one in parts)
        self._waiting.append(self._writer.submit(self._append, made, shapes))
        while len(self._waiting) > self.ahead:
            self._waiting.pop(0).result()
        return made

    def _append(self, made: Any, shapes: tuple[tuple[int, int, str], ...]) -> None:
        memory = made.memory()
        self._matrices.append(KeptMatrix(shapes, memory.nbytes, xxhash.xxh3_64_intdigest(memory)))
        self._write(memory)

    def close(self) -> None:
        """Wait until everything is written, or given up."""
        self._writer.shutdown(wait=True)

    def finish(self, key: str) -> None:
        """Append the description."""
        while self._waiting:
            self._waiting.pop(0).result()
        text = msgspec.json.encode(FileDescription(key, self._weights.errors, self._matrices))
        self._write(text + hashlib.sha256(text).digest() + len(text).to_bytes(4, "little"))

    def _write(self, data: Any) -> None:
        view = memoryview(data)
        try:
            while self.whole and view.nbytes:
                view = view[self._file.write(view) :]
        except OSError:
            self.whole = False  # e.g. a full disk: the model is loaded nevertheless


class DiscardingKernels(WritingKernels):
    """Packs each matrix, appends its memory to a file and discards it."""

    ahead = 0

    def vector(self, name: str) -> Any:
        return None

    def table(self, name: str) -> Any:
        return self.matrix([name], [None]) if self._weights.outline(name).scale else None

    def matrix(self, names: Sequence[str], biases: Sequence[str | None]) -> Any:
        super().matrix(names, [None] * len(names))


class ReadingKernels(PackingKernels):
    """Fills each matrix from a file."""

    def __init__(
        self,
        kernels: NativeKernels,
        weights: HeldWeights,
        file: Any,
        matrices: list[KeptMatrix],
        mapped: NDArray[np.uint8] | None = None,
        checked: bool = False,
    ) -> None:
        """Read matrices from `file`.

        `mapped`: the whole file, mapped; experts are then used in place. `checked`: without a checksum test of experts.
        """
        super().__init__(kernels, weights)
        self._file, self._matrices, self._mapped, self._checked = file, iter(matrices), mapped, checked
        self._done, self._total = 0, sum(one.bytes for one in matrices)

    def matrix(self, names: Sequence[str], biases: Sequence[str | None]) -> Any:
        kept = next(self._matrices, None)
        if kept is None or not fits(kept.parts, [self._weights.outline(name) for name in names]):
            raise DamagedMatrices
        if self._mapped is not None and is_expert(names[0]):
            return self._expert(kept, self._biases(biases), self._mapped)
        made = self._kernels.blank(kept.parts, self._biases(biases))
        memory = made.memory()
        if memory.nbytes != kept.bytes:
            raise DamagedMatrices
        at, view = 0, memoryview(memory)
        while at < kept.bytes:
            tell("reading the packed weights", self._done + at, self._total)
            count = self._file.readinto(view[at : at + _READ])
            if not count:
                raise DamagedMatrices
            at += count
        self._done += kept.bytes
        if xxhash.xxh3_64_intdigest(memory) != kept.check:
            raise DamagedMatrices
        return made

    def _expert(self, kept: KeptMatrix, biases: list[NDArray[Any] | None], mapped: NDArray[np.uint8]) -> Any:
        """Return a matrix that stays in the mapped file."""
        if packed_bytes(kept.parts) != kept.bytes:
            raise DamagedMatrices
        at = START + self._done
        if self._checked:
            self._file.seek(kept.bytes, os.SEEK_CUR)
        else:
            self._check(kept)
        self._done += kept.bytes
        return self._kernels.mapped(kept.parts, biases, mapped[at : at + kept.bytes])

    def _check(self, kept: KeptMatrix) -> None:
        hasher, left = xxhash.xxh3_64(), kept.bytes
        while left:
            tell("checking the experts", self._done + kept.bytes - left, self._total)
            piece = self._file.read(min(left, _PIECE))
            if not piece:
                raise DamagedMatrices
            hasher.update(piece)
            left -= len(piece)
        if hasher.intdigest() != kept.check:
            raise DamagedMatrices


def fits(parts: Sequence[tuple[int, int, str]], wanted: Sequence[TensorMeta]) -> bool:
    """Return whether the parts match the model; whether scales are half precision is known only once they are built."""
    return len(parts) == len(wanted) and all(
        (out, inner) == one.shape and form.split()[0] == one.form.split()[0]
        for (out, inner, form), one in zip(parts, wanted, strict=True)
    )


def as_kernels(through: PackingKernels) -> Any:
    """Return the stand-in typed as kernels, for `decoder.build`."""
    return through


def as_weights(weights: HeldWeights) -> Any:
    """Return a stand-in for the weights."""
    return WeightsView(weights)
