"""Weights of which some tensors are stored as codes, in one mapping with plain tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.base import Packed
from cairn.models.quantization import tensor_meta as known
from cairn.models.quantization.tensor_meta import TensorMeta

_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class Coded(Protocol):
    """A matrix stored as codes."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        ...

    @property
    def kind(self) -> tuple[str, bool]:
        """Number format, and whether `packed` has to round."""
        ...

    @property
    def nbytes(self) -> int:
        """Approximate bytes in its file."""
        ...

    def values(self) -> NDArray[np.float32]:
        """Return the values [out, in]."""
        ...

    def packed_outline(self) -> TensorMeta | None:
        """Return the meta of `packed()`; None if the kernels' groups do not fit the matrix."""
        ...

    def packed(self) -> tuple[Packed, float]:
        """Return the matrix as kernel codes, and its relative error."""
        ...


class CodedWeights(Mapping[str, NDArray[Any]]):
    """`weights.open_weights` with some `Coded` tensors. Arrays are not cached: ask for each once."""

    def __init__(self, plain: Mapping[str, NDArray[Any]], coded: Mapping[str, Coded]) -> None:
        self._plain, self._coded = plain, coded

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._coded[name].values() if name in self._coded else self._plain[name]

    def outline(self, name: str) -> TensorMeta:
        """Return the meta of `[name]`, with the bytes of memory that building it takes."""
        if name not in self._coded:
            return known.outline(self._plain, name)
        shape = self._coded[name].shape
        return TensorMeta(shape, "float32", 4 * math.prod(shape))

    def packed_outline(self, name: str) -> TensorMeta | None:
        """Return the meta of `packed(name)`; None for a tensor without codes."""
        return self._coded[name].packed_outline() if name in self._coded else None

    def packed(self, name: str) -> tuple[Packed, float]:
        """Return a tensor with a `packed_outline` as codes, and its relative error."""
        return self._coded[name].packed()

    def kind(self, name: str) -> tuple[str, bool]:
        """Return a tensor's number format in the file, and whether `packed` has to round it."""
        if name in self._coded:
            return self._coded[name].kind
        return _KINDS[str(self._plain[name].dtype)], False

    def stored(self, name: str) -> tuple[str, int]:
        """Return a tensor's number format in the file, and its bytes there."""
        if name in self._coded:
            return self._coded[name].kind[0], self._coded[name].nbytes
        return _KINDS[str(self._plain[name].dtype)], self._plain[name].nbytes

    def __contains__(self, name: object) -> bool:
        return name in self._plain or name in self._coded

    def __iter__(self) -> Iterator[str]:
        return iter((*self._plain, *self._coded))

    def __len__(self) -> int:
        return len(self._plain) + len(self._coded)
