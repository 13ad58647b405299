"""Quantised matrices of safetensors, as float32 values and as codes of the kernels.

    float8   e4m3 numbers, a scale for all of them, for each output, or for each block of outputs and inputs
    four     e2m1 numbers with a scale for each 16 (e4m3, and one for all) or 32 (e8m0)
    mxfp4    as gpt-oss has it: e2m1 numbers in blocks of 32 with an exponent each, in two tensors
    affine   integers of 4 or 8 bits with a scale and a bias for groups of inputs
    whole    integers of 4 or 8 bits with a middle or zero point to subtract, and scales for groups of inputs

Integers and fp4 become kernel codes without loss if groups are multiples of 32 neighbours. Everything else is rounded
to 8 bits. Matrices are read in slices, so beside the result a few MB are needed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cairn.kernels.base import GROUP, Packed, Quantized
from cairn.kernels.quantized import dequantized
from cairn.models.quantization.dequant import FP4, KINDS, SLICE, Codes, dequantize
from cairn.models.quantization.quantize import rounded, unpack
from cairn.models.quantization.tensor_meta import TensorMeta, codes
from cairn.models.safetensors.coded_weights import Coded
from cairn.types.errors import ModelFileError

PARTS = (".blocks", ".scales")
"""Suffixes of a tensor that is stored in two parts."""
_KIND = next(kind for kind in KINDS.values() if kind.name == "MXFP4")


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """A matrix [out, in]: blocks [out, in / 32, 16] and scales [out, in / 32], both uint8.

    A byte holds two neighbours, the first in its low half. A value is one of sixteen, times 2 ** (exponent - 127).
    `rows` reorders them as GGUF's MXFP4, so that one decoder serves both.
    """

    blocks: NDArray[np.uint8]
    scales: NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return len(self.scales), self.scales.shape[1] * GROUP

    def rows(self) -> NDArray[np.uint8]:
        """Return GGUF's blocks [out * in / 32, 17]."""
        order = np.stack([self.blocks & 15, self.blocks >> 4], axis=-1).reshape(-1, 2, 16)
        return np.concatenate([self.scales.reshape(-1, 1), order[:, 0] | order[:, 1] << 4], axis=1)

    @property
    def kind(self) -> tuple[str, bool]:
        """MXFP4, without rounding."""
        return _KIND.name, False

    @property
    def nbytes(self) -> int:
        """Bytes in its file."""
        return self.blocks.nbytes + self.scales.nbytes

    def values(self) -> NDArray[np.float32]:
        """Return the values [out, in]."""
        return dequantize(_KIND, self.rows()).reshape(self.shape)

    def packed_outline(self) -> TensorMeta:
        """Return the meta of `packed()`."""
        return codes(self.shape, _KIND.bits, *_KIND.scaled, table=_KIND.table)

    def packed(self) -> tuple[Packed, float]:
        """Return the matrix as kernel codes; the error is 0."""
        return unpack(_KIND, self.rows(), self.shape)


def join_mxfp4(
    path: Path, found: Mapping[str, Any], parts: Mapping[str, NDArray[Any]], expected: Mapping[str, Any]
) -> dict[str, Coded]:
    """Return the tensors stored in two parts, whose names end in `PARTS`; raise `ModelFileError` for wrong parts."""
    packed: dict[str, Coded] = {}
    for name in dict.fromkeys(one.rpartition(".")[0] for one in parts):
        out, inner = expected[name]
        wanted = {".blocks": (out, inner // GROUP, GROUP // 2), ".scales": (out, inner // GROUP)}
        for end, shape in wanted.items():
            one = parts.get(name + end)
            if one is None or one.dtype != np.uint8 or one.shape != shape or inner % GROUP:
                actual = "nothing" if one is None else f"{one.dtype} of shape {list(one.shape)}"
                raise ModelFileError(f"{path}: {name}{end} must be U8 of shape {list(shape)}, found {actual}")
        if name in found:
            raise ModelFileError(f"{path}: the tensor {name[:120]!r} is stored under two names")
        packed[name] = Mxfp4(parts[f"{name}.blocks"], parts[f"{name}.scales"])
    return packed


Floats = NDArray[np.float32]
Rows = NDArray[np.int64]

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT_E8 = np.dtype(ml_dtypes.float8_e8m0fnu)
_FLOAT8 = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float32)


class StoredMatrix(ABC):
    """A matrix [out, in] as it is stored."""

    kind: str
    shape: tuple[int, int]
    nbytes: int

    @abstractmethod
    def values(self, rows: Rows) -> Floats:
        """Return the values of some outputs [n, in]."""

    def outline(self, rows: int) -> TensorMeta | None:
        """Return the meta of `packed` for `rows` outputs; None if they cannot be kernel codes."""
        return None

    def packed(self, rows: Rows) -> Quantized:
        """Return some outputs as kernel codes, without loss; only if there is an `outline`."""
        raise ValueError("this form has no outline, so its outputs cannot be kernel codes")


class Float8(StoredMatrix):
    """Numbers of 8 bits with scales [outputs, inputs], each for a `block` or for the whole matrix."""

    def __init__(self, weight: NDArray[Any], scales: NDArray[Any], block: tuple[int, int]) -> None:
        """Take `scales` [r, c], where r and c are 1, one for each block, or one for each output or input."""
        self.kind, self.nbytes = "FP8", weight.nbytes + scales.nbytes
        self.shape = (weight.shape[0], weight.shape[1])
        self._bytes, self._scales = weight.view(np.uint8), scales
        self._block = tuple(
            of if there == 1 else 1 if there == of else size
            for of, there, size in zip(weight.shape, scales.shape, block, strict=True)
        )

    @staticmethod
    def fits(weight: NDArray[Any], scales: NDArray[Any], block: tuple[int, int]) -> bool:
        """Return whether the shape of the scales fits the matrix and the block size."""
        return scales.ndim == 2 and all(
            there in (1, of, -(-of // size)) for of, there, size in zip(weight.shape, scales.shape, block, strict=True)
        )

    def values(self, rows: Rows) -> Floats:
        """Return the values of some outputs [n, in]."""
        found: Floats = _FLOAT8[self._bytes[rows]]
        scales = self._scales[rows // self._block[0]].astype(np.float32)
        found *= np.repeat(scales, self._block[1], axis=1)[:, : self.shape[1]] if scales.shape[1] > 1 else scales
        return found


class Float4(StoredMatrix):
    """Numbers of 4 bits, two in a byte, the first in its low half; scales are multiplied by a factor and divided."""

    def __init__(
        self, packed: NDArray[np.uint8], scales: NDArray[Any], factor: np.float32, divisor: np.float32, nbytes: int
    ) -> None:
        """Take `scales` [out, G] in e4m3, or in e8m0, which may have the type uint8."""
        self.kind, self.nbytes = "NVFP4" if scales.dtype == FLOAT8 else "MXFP4", nbytes
        self.shape = (len(packed), 2 * packed.shape[1])
        self._packed, self._factor, self._divisor = packed, factor, divisor
        self._scales = scales if scales.dtype == FLOAT8 else scales.view(FLOAT_E8)
        self._size = self.shape[1] // scales.shape[1]

    def values(self, rows: Rows) -> Floats:
        """Return the values of some outputs [n, in]."""
        return np.repeat(self._scale(rows), self._size, axis=1) * self._codes(rows)

    def outline(self, rows: int) -> TensorMeta | None:
        """Return the meta of `packed`."""
        return None if self._size % GROUP else codes((rows, self.shape[1]), 8, "float32")

    def packed(self, rows: Rows) -> Quantized:
        """Return some outputs as kernel codes."""
        found, step = np.empty((len(rows), self.shape[1]), np.int8), max(1, SLICE // self.shape[1])
        for at in range(0, len(rows), step):
            found[at : at + step] = self._codes(rows[at : at + step])
        return Quantized(8, found, np.repeat(self._scale(rows), self._size // GROUP, axis=1))

    def _codes(self, rows: Rows) -> NDArray[np.int8]:
        """Return twice the values."""
        packed = self._packed[rows]
        return FP4[np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)]

    def _scale(self, rows: Rows) -> Floats:
        """Return half the scales."""
        found: Floats = self._scales[rows].astype(np.float32) * self._factor / self._divisor
        return found * np.float32(0.5)


class IntegerCodes(StoredMatrix):
    """Integers c with scales: (c - zero) * scale, where c and zero are centred."""

    def __init__(
        self,
        kind: str,
        shape: tuple[int, int],
        nbytes: int,
        bits: Literal[4, 8],
        read: Callable[[Rows], NDArray[np.int8]],
        scales: NDArray[Any],
        zeros: Callable[[Rows], NDArray[np.int16]] | None,
        groups: NDArray[np.intp] | None = None,
    ) -> None:
        """Take `read`, which returns c of some outputs [n, in], `zeros`, which returns [n, G], and `scales` [out, G].

        `groups`: the group of each input; None if groups are neighbouring inputs.
        """
        self.kind, self.shape, self.nbytes = kind, shape, nbytes
        self._bits, self._read, self._scales, self._zeros, self._groups = bits, read, scales, zeros, groups
        self._size = shape[1] // scales.shape[1]

    def values(self, rows: Rows) -> Floats:
        """Return the values of some outputs [n, in]."""
        found = self._read(rows).astype(np.float32)
        scale = self._scales[rows].astype(np.float32)
        if self._zeros is not None:
            found -= self._spread(self._zeros(rows).astype(np.float32))
        found *= self._spread(scale)
        return found

    def outline(self, rows: int) -> TensorMeta | None:
        """Return the meta of `packed`. Scales other than float16 count as float32, an upper bound."""
        if self._groups is not None or self._size % GROUP:
            return None
        half = self._scales.dtype == np.float16 and self._zeros is None
        scale = "float16" if half else "float32"
        return codes((rows, self.shape[1]), self._bits, scale, "" if self._zeros is None else scale)

    def packed(self, rows: Rows) -> Quantized:
        """Return some outputs as kernel codes."""
        share = self._size // GROUP
        scale: NDArray[Any] = self._scales[rows].astype(np.float32)
        zeros = None if self._zeros is None else self._zeros(rows)
        minimum = None
        if zeros is not None and zeros.any():
            first = zeros + np.int16(8 if self._bits == 4 else 0)  # codes of 4 bits are counted from 0
            minimum = np.repeat(-first.astype(np.float32) * scale, share, axis=1)
        elif (half := scale.astype(np.float16)).astype(np.float32).tobytes() == scale.tobytes():
            scale = half
        shape = len(rows), self.shape[1]
        found: Codes = np.empty(shape, np.uint8) if self._bits == 4 else np.empty(shape, np.int8)
        step = max(1, SLICE // self.shape[1])
        for at in range(0, len(rows), step):
            part = self._read(rows[at : at + step])
            found[at : at + step] = part + np.int8(8) if self._bits == 4 else part
        return Quantized(self._bits, found, np.repeat(scale, share, axis=1), minimum)

    def _spread(self, numbers: Floats) -> Floats:
        """Expand numbers of groups [n, G] to inputs [n, in], or keep a single group for broadcasting."""
        if self._groups is not None:
            return numbers[:, self._groups]
        return np.repeat(numbers, self._size, axis=1) if numbers.shape[1] > 1 else numbers


class AffineCodes(StoredMatrix):
    """Integers c from 0 on with scales and biases of groups: c * scale + bias, as MLX has them."""

    def __init__(
        self,
        words: NDArray[np.uint32],
        scales: NDArray[Any],
        biases: NDArray[Any],
        bits: Literal[4, 8],
        nbytes: int,
    ) -> None:
        """Take `words` [out, in * bits / 32], and `scales` and `biases` [out, G], a group a multiple of 32."""
        self.kind, self.shape, self.nbytes = f"MLX{bits}", (len(words), words.shape[1] * 32 // bits), nbytes
        self._words, self._scales, self._biases, self._bits = words, scales, biases, bits
        self._share = self.shape[1] // scales.shape[1] // GROUP

    def values(self, rows: Rows) -> Floats:
        """Return the values of some outputs [n, in], those of the kernels' codes."""
        return dequantized(self.packed(rows))

    def outline(self, rows: int) -> TensorMeta | None:
        """Return the meta of `packed`."""
        return codes((rows, self.shape[1]), self._bits, "float32", "float32")

    def packed(self, rows: Rows) -> Quantized:
        """Return some outputs as kernel codes. Codes of 8 bits are signed: their biases take 128 scales."""
        scale, bias = (one[rows].astype(np.float32) for one in (self._scales, self._biases))
        found = np.ascontiguousarray(self._words[rows]).view(np.uint8)
        if self._bits == 4:
            found = np.stack([found & 15, found >> 4], axis=-1).reshape(len(rows), -1)
        else:
            found = (found ^ np.uint8(128)).view(np.int8)
            bias = bias + np.float32(128) * scale
        scale, bias = (np.repeat(one, self._share, axis=1) for one in (scale, bias))
        return Quantized(self._bits, found, scale, bias)


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """A `coded_weights.Coded` of some outputs of a stored matrix, transposed if `turned`."""

    source: StoredMatrix
    rows: Rows
    turned: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        shape = len(self.rows), self.source.shape[1]
        return (shape[1], shape[0]) if self.turned else shape

    @property
    def kind(self) -> tuple[str, bool]:
        """Number format, and whether `packed` has to round."""
        return self.source.kind, self._exact() is None

    @property
    def nbytes(self) -> int:
        """Its share of the stored bytes."""
        return self.source.nbytes * len(self.rows) // self.source.shape[0]

    def values(self) -> Floats:
        """Return the values [out, in]."""
        inner = self.source.shape[1]
        found, step = np.empty((len(self.rows), inner), np.float32), max(1, SLICE // inner)
        with np.errstate(all="ignore"):
            for at in range(0, len(self.rows), step):
                found[at : at + step] = self.source.values(self.rows[at : at + step])
        return np.ascontiguousarray(found.T) if self.turned else found

    def packed_outline(self) -> TensorMeta | None:
        """Return the meta of `packed()`; None if the kernels' groups do not fit the matrix."""
        if self.shape[1] % GROUP:
            return None
        passing = 4 * math.prod(self.shape) if self.turned else 0
        return self._exact() or codes(self.shape, 8, "float16", passing=passing)

    def packed(self) -> tuple[Packed, float]:
        """Return the matrix as kernel codes, and its relative error."""
        if self._exact() is not None:
            return self.source.packed(self.rows), 0.0
        if self.turned:
            whole = self.values()
            return rounded(lambda begin, end: whole[begin:end], self.shape, 8)
        return rounded(lambda begin, end: self.source.values(self.rows[begin:end]), self.shape, 8)

    def _exact(self) -> TensorMeta | None:
        return None if self.turned else self.source.outline(len(self.rows))


def row_numbers(shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return an array of a stored matrix's shape whose rows hold their own row number.

    The rules of a family that split, transpose or reorder stored tensors are applied to it instead of the matrix;
    `selected_rows` then reads from the result what was done.
    """
    rows = np.arange(math.prod(shape[:-1])).reshape(*shape[:-1], 1)
    return np.broadcast_to(rows, shape)


def selected_rows(source: StoredMatrix, part: NDArray[np.int64]) -> SelectedRows | None:
    """Return which rows of the stored matrix `part` selects, and whether it is transposed.

    None if it does not select whole rows. `part` is a `row_numbers` array after a family's rules.
    """
    if part.ndim != 2:
        return None
    for turned, one in ((False, part), (True, part.T)):
        if one.shape[1] == source.shape[1] and (one.strides[1] == 0 or bool((one == one[:, :1]).all())):
            return SelectedRows(source, np.array(one[:, 0]), turned)
    return None
