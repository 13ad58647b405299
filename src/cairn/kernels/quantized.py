"""Products with quantised weights in numpy, which define the native ones up to the order of sums.

Activations are rounded once for each product, in groups of 32: scale = max|x| / 127 and code = x * (127 / max|x|)
rounded to the nearest, ties to even. A group whose largest magnitude is below 2**-100 counts as zero, because 127 /
max|x| could overflow. A group with an infinity or NaN gets the scale NaN, so that its row of outputs is NaN and no
other row's is. Sums of products of codes are exact integers; the scales are multiplied in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.kernels import blas
from cairn.kernels.base import GROUP, Packed, Quantized
from cairn.kernels.codebooks import RowBlocks

Floats = NDArray[np.float32]

LARGEST_CODE = 127
LEAST_MAGNITUDE = np.float32(2.0**-100)
"""Groups whose largest magnitude is below this count as zero."""


def activation_codes(x: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Return codes [M, in] and scales [M, in / 32] of activations x[M, in]."""
    codes, scale = group_codes(x.reshape(len(x), -1, GROUP))
    return codes.reshape(x.shape), scale


def group_codes(groups: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Return codes [..., n] and scales [...] of groups [..., n] of any size."""
    most = np.abs(groups).max(axis=-1)
    usable = np.isfinite(most) & (most >= LEAST_MAGNITUDE)
    with np.errstate(all="ignore"):
        factor = np.where(usable, np.float32(LARGEST_CODE) / most, np.float32(0))
        scale = np.where(usable, most / np.float32(LARGEST_CODE), np.float32(0))
    scale = np.where(np.isfinite(most), scale, np.float32(np.nan))
    codes = np.rint(np.where(usable[..., None], groups, np.float32(0)) * factor[..., None])
    return codes.astype(np.int8), scale.astype(np.float32)


def rounded(x: Floats) -> Floats:
    """Round activations x[M, in] as products with quantised weights do."""
    codes, scale = activation_codes(x)
    return codes.astype(np.float32) * np.repeat(scale, GROUP, axis=1)


def dequantized(weight: Packed) -> Floats:
    """Return the weights [out, in] in float32."""
    if isinstance(weight, RowBlocks):
        return weight.values()
    if weight.block_scale is not None:
        return _of_blocks(weight, weight.block_scale)
    codes = weight.codes.astype(np.float32).reshape(len(weight), -1, GROUP)
    if weight.bits == 4 and weight.minimum is None:
        codes -= 8
    codes *= weight.scale.astype(np.float32)[..., None]
    if weight.minimum is not None:
        codes += weight.minimum.astype(np.float32)[..., None]
    return codes.reshape(weight.shape)


def _of_blocks(weight: Quantized, block_scale: NDArray[np.float16]) -> Floats:
    out, inner = weight.shape
    scale = _whole(weight.scale, block_scale)
    codes = weight.codes.astype(np.float32).reshape(out, scale.shape[1], -1)
    if weight.bits == 6:
        codes -= 32
    codes *= scale[..., None]
    if weight.minimum is not None and weight.block_minimum is not None:
        codes += _whole(weight.minimum, weight.block_minimum)[..., None]
    return codes.reshape(out, inner)


def _whole(numbers: NDArray[Any], block: NDArray[np.float16]) -> Floats:
    """Multiply integers [out, groups] by the float of their super-block."""
    share = numbers.shape[1] // max(1, block.shape[1])
    return numbers.astype(np.float32) * np.repeat(block.astype(np.float32), share, axis=1)


@dataclass(frozen=True, slots=True)
class Segments:
    """A packed matrix whose parts may be quantised or not; neighbours of one kind are packed together."""

    parts: tuple[tuple[bool, blas.Matrix], ...]
    """(whether activations are rounded, panels) for each part; outputs are concatenated in order."""
    out: int

    @property
    def inner(self) -> int:
        """Width of the input."""
        return int(self.parts[0][1].panels.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of the panels."""
        return sum(part.panels.nbytes for _, part in self.parts)

    def rows(self, which: NDArray[Any]) -> Floats:
        """Return the weights [n, in] of the outputs `which`."""
        weights = np.empty((len(which), self.inner), np.float32)
        first = 0
        for _, part in self.parts:
            inside = (which >= first) & (which < first + part.out)
            panel, column = np.divmod(which[inside] - first, part.panels.shape[2])
            weights[inside] = part.panels[panel, :, column]
            first += part.out
        return weights


def segments(weights: Sequence[NDArray[Any] | Packed], biases: Sequence[NDArray[Any] | None]) -> Segments:
    """Pack matrices [out, in] with the same input into one; outputs are concatenated in order."""
    parts = []
    pairs = list(zip(weights, biases, strict=True))
    for quantised, run in groupby(pairs, key=lambda pair: isinstance(pair[0], Packed)):
        neighbours = list(run)
        arrays = [dequantized(one) if isinstance(one, Packed) else one for one, _ in neighbours]
        parts.append((quantised, blas.pack(arrays, [bias for _, bias in neighbours])))
    return Segments(tuple(parts), sum(part.out for _, part in parts))
