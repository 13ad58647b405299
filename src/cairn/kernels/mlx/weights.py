"""Weights of the MLX kernels: floats in their own type, codes as MLX's affine groups where those hold them exactly.

A group of MLX is 32, 64 or 128 weights scale * code + bias, with codes from 0 on. Everything in groups of 32 fits, with
scales and biases in float32: signed codes are moved into the bias, and the scale of a super-block is multiplied out.
MXFP4 is MLX's own mxfp4. Matrices in groups of 16 (Q6_K, IQ2) have no such form and become float16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from cairn.kernels.base import GROUP, Packed
from cairn.kernels.codebooks import ROW_FORMATS, RowBlocks
from cairn.kernels.mlx.cells import from_numpy
from cairn.kernels.quantized import dequantized

Array = Any
Floats = NDArray[np.float32]

_SIZES = (128, 64, GROUP)
"""Groups that MLX has."""
_BYTES = 8
_MXFP4_BIAS = 127
"""frexp's exponent of a scale s = 2 ** (e - 128), of codes that are doubled, and this are mxfp4's e."""
_NO_NUMBER = 255
"""The exponent of mxfp4 that is no number."""
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of mxfp4's codes."""
_FP4_PLACES = np.zeros(256, np.uint8)
"""Twice a value as int8 -> its code."""
_FP4_PLACES[np.array(_FP4[1:], np.int8).view(np.uint8)] = np.arange(1, 16)
_FP4_PLACES[0] = 0
_SLICE = 1 << 22
"""Most codes that are packed at once."""


@dataclass(frozen=True, slots=True)
class FloatPart:
    """Weights [out, in] or [experts, out, in] in their own type."""

    weight: Array
    narrow: bool
    """Whether inputs are rounded to the type of the weights; otherwise the product is in float32."""

    @property
    def out(self) -> int:
        """Number of outputs."""
        return int(self.weight.shape[-2])

    def product(self, x: Array) -> Array:
        """Return x[M, in] @ weights in float32."""
        return self._times(x, self.weight, lambda a, b: a @ b)

    def each(self, x: Array) -> Array:
        """Return x[M, T, in] times the T matrices, [M, T, out]."""
        return mx.swapaxes(self.product(mx.swapaxes(x, 0, 1)), 0, 1)

    def chosen(self, x: Array, which: Array) -> Array:
        """Return x[M, 1 or T, in] times the expert of which[M, T], [M, T, out]."""
        count = which.size
        if not self._as_stored and count < len(self.weight):  # convert only these experts to float32
            taken = mx.take(self.weight, which.reshape(-1), axis=0).reshape(*which.shape, *self.weight.shape[1:])
            return self._times(x[:, :, None], taken, lambda a, b: a @ b)[:, :, 0]
        lines = mx.arange(x.shape[0] * x.shape[1]).reshape(x.shape[0], x.shape[1])
        lines = mx.broadcast_to(lines, which.shape)

        def times(a: Array, b: Array) -> Array:
            return mx.gather_mm(a.reshape(-1, 1, a.shape[-1]), b, lhs_indices=lines, rhs_indices=which)[:, :, 0]

        return self._times(x, self.weight, times)

    def rows(self, which: Array) -> Array:
        """Return the weights [n, in] of the outputs `which` in float32."""
        return mx.take(self.weight, which, axis=0).astype(mx.float32)

    @property
    def _as_stored(self) -> bool:
        return self.narrow or self.weight.dtype == mx.float32

    def _times(self, x: Array, weight: Array, times: Any) -> Array:
        turned = mx.swapaxes(weight, -1, -2)
        if not self._as_stored:
            return times(x, turned.astype(mx.float32))
        if weight.dtype != mx.float16:
            return times(x.astype(weight.dtype), turned).astype(mx.float32)
        # float16 ends at 65,504, and activations may not: rows are divided by a power of two near their largest number.
        most = mx.maximum(mx.abs(x).max(axis=-1, keepdims=True), 2.0**-100)
        factor = mx.power(2.0, mx.ceil(mx.log2(most)))
        return times((x / factor).astype(mx.float16), turned).astype(mx.float32) * factor


@dataclass(frozen=True, slots=True)
class CodedPart:
    """Weights [out, in] or [experts, out, in] as MLX's groups of codes."""

    codes: Array
    """uint32 [..., out, in * bits / 32]"""
    scale: Array
    """[..., out, in / group]; exponents in uint8 for mxfp4"""
    bias: Array | None
    """None for mxfp4"""
    group: int
    bits: int
    narrow: bool
    """Whether inputs are rounded to bfloat16, if that or mxfp4 is the type of the scales."""
    mode: str = "affine"
    """affine or mxfp4"""

    @property
    def out(self) -> int:
        """Number of outputs."""
        return int(self.codes.shape[-2])

    def product(self, x: Array) -> Array:
        """Return x[M, in] @ weights in float32."""
        made = mx.quantized_matmul(self._given(x), self.codes, self.scale, self.bias, transpose=True, **self._how)
        return made.astype(mx.float32)

    def each(self, x: Array) -> Array:
        """Return x[M, T, in] times the T matrices, [M, T, out]."""
        return mx.swapaxes(self.product(mx.swapaxes(x, 0, 1)), 0, 1)

    def chosen(self, x: Array, which: Array) -> Array:
        """Return x[M, 1 or T, in] times the expert of which[M, T], [M, T, out]."""
        lines = mx.broadcast_to(mx.arange(x.shape[0] * x.shape[1]).reshape(x.shape[0], x.shape[1]), which.shape)
        given = self._given(x).reshape(-1, 1, x.shape[-1])
        places = {"lhs_indices": lines, "rhs_indices": which}
        made = mx.gather_qmm(given, self.codes, self.scale, self.bias, transpose=True, **places, **self._how)
        return made[:, :, 0].astype(mx.float32)

    def rows(self, which: Array) -> Array:
        """Return the weights [n, in] of the outputs `which` in float32."""
        codes, scale = (mx.take(one, which, axis=0) for one in (self.codes, self.scale))
        bias = None if self.bias is None else mx.take(self.bias, which, axis=0)
        return mx.dequantize(codes, scale, bias, **self._how).astype(mx.float32)

    @property
    def _how(self) -> dict[str, Any]:
        return {"group_size": self.group, "bits": self.bits, "mode": self.mode}

    def _given(self, x: Array) -> Array:
        return x.astype(mx.bfloat16) if self.narrow and self.scale.dtype != mx.float32 else x


Part = FloatPart | CodedPart


@dataclass(slots=True)
class MlxMatrix:
    """A matrix in parts, whose outputs are concatenated in order."""

    parts: tuple[Part, ...]
    biases: tuple[Array | None, ...]
    inner: int
    joined: JoinedMatrices | None = None
    """What holds its numbers since `stacked` joined it with others of its layer."""

    def product(self, x: Array) -> Array:
        """Return x[M, in] @ matrix + bias as [M, out]."""
        found = []
        for part, bias in zip(self.parts, self.biases, strict=True):
            made = part.product(x)
            found.append(made if bias is None else made + bias)
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=-1)

    def rows(self, which: Array) -> Array:
        """Return the weights [n, in] of the outputs `which`, in float32."""
        found, first = None, 0
        for part in self.parts:
            own = part.rows(mx.clip(which - first, 0, part.out - 1))
            found = own if found is None else mx.where((which >= first)[:, None], own, found)
            first += part.out
        return found

    @property
    def arrays(self) -> list[Array]:
        """All arrays, to be computed at load."""
        return [one for part in self.parts for one in arrays_of(part)] + [one for one in self.biases if one is not None]


def arrays_of(part: Part) -> list[Array]:
    """Return the arrays of a part."""
    found = [part.weight] if isinstance(part, FloatPart) else [part.codes, part.scale, part.bias]
    return [one for one in found if one is not None]


@dataclass(frozen=True, slots=True)
class JoinedMatrices:
    """The matrices of all experts of a layer, part by part in one array each."""

    parts: tuple[Part, ...]
    biases: tuple[Array | None, ...]
    """[experts, out] of each part."""
    inner: int

    def product(self, x: Array, which: Array) -> Array:
        """Return x[M, 1 or T, in] times the experts of which[M, T], biases added, [M, T, out]."""
        found = []
        for part, bias in zip(self.parts, self.biases, strict=True):
            made = part.chosen(x, which)
            found.append(made if bias is None else made + mx.take(bias, which, axis=0))
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=-1)

    def product_of_each(self, x: Array) -> Array:
        """Return x[M, T, in] times all T matrices, one each, biases added, [M, T, out]."""
        found = []
        for part, bias in zip(self.parts, self.biases, strict=True):
            made = part.each(x)
            found.append(made if bias is None else made + bias)
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=-1)


def stacked(matrices: Sequence[MlxMatrix]) -> JoinedMatrices:
    """Join experts of one layer that are stored alike; experts in several forms become float16 or float32.

    Each matrix is emptied: its numbers are in the result only, which joining the same ones again returns.
    """
    if matrices[0].joined is not None:
        return matrices[0].joined
    parts, biases = [], []
    for number in range(len(matrices[0].parts)):
        own = [one.parts[number] for one in matrices]
        added = [one.biases[number] for one in matrices]
        parts.append(_stack(own))
        biases.append(None if added[0] is None else mx.stack(added))
    found = JoinedMatrices(tuple(parts), tuple(biases), matrices[0].inner)
    mx.eval([one for part in parts for one in arrays_of(part)], [one for one in biases if one is not None])
    for one in matrices:
        one.parts, one.biases, one.joined = (), (), found
    return found


def _stack(parts: Sequence[Part]) -> Part:
    first = parts[0]
    if len({_form(one) for one in parts}) == 1:
        if isinstance(first, FloatPart):
            return FloatPart(mx.stack([one.weight for one in parts if isinstance(one, FloatPart)]), first.narrow)
        codes, scale, *bias = (mx.stack(list(column)) for column in zip(*map(arrays_of, parts), strict=True))
        return replace(first, codes=codes, scale=scale, bias=bias[0] if bias else None)
    coded = [one for one in parts if isinstance(one, CodedPart)]
    if len(coded) == len(parts) and len({(one.bits, one.mode) for one in coded}) == 1:
        least = min(one.group for one in coded)
        return _stack([_wide(one, least) for one in coded])
    every = mx.arange(first.out)
    return FloatPart(mx.stack([one.rows(every).astype(mx.float16) for one in parts]), first.narrow)


def _form(part: Part) -> tuple[object, ...]:
    if isinstance(part, FloatPart):
        return (part.weight.dtype,)
    return (part.group, part.bits, part.mode, part.scale.dtype)


def _wide(part: CodedPart, group: int) -> CodedPart:
    """Return an affine part with scales in float32 for groups of another size, which divides its own."""
    numbers = arrays_of(part)[1:]
    scale, bias = (mx.repeat(one.astype(mx.float32), part.group // group, axis=-1) for one in numbers)
    return replace(part, scale=scale, bias=bias, group=group)


def pack(weights: Sequence[Any], biases: Sequence[Any], narrow: bool) -> MlxMatrix:
    """Pack matrices with the same input into one."""
    parts = tuple(
        _coded(one, narrow) if isinstance(one, Packed) else FloatPart(from_numpy(one), narrow) for one in weights
    )
    added = tuple(None if bias is None else from_numpy(np.asarray(bias, np.float32)) for bias in biases)
    made = MlxMatrix(parts, added, int(weights[0].shape[1]))
    mx.eval(made.arrays)
    return made


def _coded(one: Packed, narrow: bool) -> Part:
    """Return MLX's form of a packed matrix: groups of codes, or float16 if they have no group of their size."""
    if isinstance(one, RowBlocks):
        if ROW_FORMATS[one.kind].group % GROUP:
            return FloatPart(mx.array(dequantized(one).astype(np.float16)), narrow)
        signed, shares = one.codes()
        scale = np.asarray(shares, np.float32)
        return _groups(_from_zero(signed), 8, scale, np.float32(-128) * scale, narrow)
    if one.table == "fp4" and (exponents := _exponents(one.scale)) is not None:
        codes = _FP4_PLACES[one.codes.view(np.uint8)]
        return CodedPart(mx.array(packed_codes(codes, 4)), mx.array(exponents), None, GROUP, 4, narrow, "mxfp4")
    scale = _multiplied(one.scale, one.block_scale)
    minimum = None if one.minimum is None else _multiplied(one.minimum, one.block_minimum)
    if one.bits == 6:
        return FloatPart(mx.array(dequantized(one).astype(np.float16)), narrow)
    shift = {4: 8 if minimum is None else 0, 5: 0, 8: 128}[one.bits]
    codes = _from_zero(one.codes) if one.bits == 8 else one.codes.view(np.uint8)
    bias = np.float32(-shift) * scale
    return _groups(codes, one.bits, scale, bias if minimum is None else bias + minimum, narrow)


def _exponents(scale: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Return mxfp4's exponents for scales of codes that are twice its values; None if one is no power of two."""
    mantissa, exponent = np.frexp(scale.astype(np.float64))
    found = exponent + _MXFP4_BIAS
    whole = (mantissa == 0.5).all() and found.min() >= 0 and found.max() < _NO_NUMBER
    return found.astype(np.uint8) if whole else None


def _from_zero(codes: NDArray[Any]) -> NDArray[np.uint8]:
    """Return signed codes of 8 bits plus 128."""
    found: NDArray[np.uint8] = codes.view(np.uint8) ^ np.uint8(128)
    return found


def _multiplied(numbers: NDArray[Any], block: NDArray[np.float16] | None) -> Floats:
    """Return scales in float32; integers of super-blocks are multiplied by the block's own scale, which is exact."""
    found: Floats = numbers.astype(np.float32)
    return (
        found if block is None else found * np.repeat(block.astype(np.float32), numbers.shape[1] // block.shape[1], 1)
    )


def _groups(codes: NDArray[np.uint8], bits: int, scale: Floats, bias: Floats, narrow: bool) -> CodedPart:
    """Return the affine part, in the largest groups whose neighbours have equal scales and biases."""
    size = codes.shape[1] // scale.shape[1]
    for wanted in _SIZES:
        share = wanted // size
        if share > 1 and scale.shape[1] % share == 0 and all(_repeats(one, share) for one in (scale, bias)):
            scale, bias, size = scale[:, ::share], bias[:, ::share], wanted
            break
    scale, bias = np.ascontiguousarray(scale), np.ascontiguousarray(bias)
    short = all((_bfloat16(one) == one).all() for one in (scale, bias))
    kind = mx.bfloat16 if short else mx.float32
    words, held_scale, held_bias = mx.array(packed_codes(codes, bits)), mx.array(scale), mx.array(bias)
    return CodedPart(words, held_scale.astype(kind), held_bias.astype(kind), size, bits, narrow)


def _repeats(numbers: Floats, share: int) -> bool:
    """Tell whether so many neighbours are always equal."""
    return bool((numbers == np.repeat(numbers[:, ::share], share, axis=1)).all())


def _bfloat16(numbers: Floats) -> Floats:
    """Return numbers with what bfloat16 does not hold cut off."""
    cut: Floats = (numbers.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return cut


def packed_codes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Return codes [out, in] as MLX packs them: each row a stream of bits, the lowest of a code first."""
    out, inner = codes.shape
    found = np.empty((out, inner * bits // 32), np.uint32)
    step = max(1, _SLICE // inner)
    for at in range(0, out, step):
        part = np.ascontiguousarray(codes[at : at + step])
        if bits == 4:
            part = part[:, 0::2] | (part[:, 1::2] << np.uint8(4))
        elif bits < _BYTES:
            loose = np.unpackbits(part[:, :, None], axis=2, bitorder="little")[:, :, :bits]
            part = np.packbits(loose.reshape(len(part), -1), axis=1, bitorder="little")
        found[at : at + step] = np.ascontiguousarray(part).view(np.uint32)
    return found
