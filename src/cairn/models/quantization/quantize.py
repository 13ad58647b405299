"""Matrices as groups of 32 codes with a scale: exact as a GGUF file has them, or rounded to 8 or 4 bits.

Rounding is to the nearest code of the group. With 8 bits the largest magnitude of a group gets code 127. With 4 bits
codes range from -8 to 7 and the scale is searched: the value of the largest magnitude is mapped to one of a few codes
near -8, the best of these is kept, and its scale is then refitted to its codes. Errors are relative: sqrt(sum((value -
rounded) ** 2) / sum(value ** 2)) over a tensor. Matrices are processed in slices, so beside the result a few MB are
needed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.base import BLOCK, GROUP, Packed, Quantized
from cairn.kernels.codebooks import RowBlocks
from cairn.models.quantization.dequant import SLICE, BlockFormat, Blocks, Codes, dequantize

Floats = NDArray[np.float32]
Rows = Callable[[int, int], NDArray[Any]]
"""Rows [begin, end) of a matrix, in any float type."""

VERSION = "groups-3"
"""Version of the rounding; a change that can alter a bit of a weight needs a new one."""

_SLICE = 1 << 16
"""Values rounded at a time, so that they fit a core's cache."""
_THREADS, _WORTH_THREADS = min(4, os.cpu_count() or 1), 4
"""Threads that convert a large matrix, as numpy works without the interpreter's lock, and slices that make it large."""
_LEAST, _MOST = 2.0**-13, 65504.0
"""Scales are float16 if the largest of a matrix lies between these: groups whose scales are then too small for float16
are some 10,000 times smaller than the largest weights."""
_CODES = (-8.0, -7.6, -7.2, -8.4, -8.9)
"""Candidates for the value of the largest magnitude, before rounding and clipping to [-8, 7]."""


def unpack(kind: BlockFormat, blocks: Blocks, shape: tuple[int, ...]) -> tuple[Packed, float]:
    """Return a matrix of a GGUF file as codes, and its error: 0.0 except for formats that are not `exact`."""
    out, inner = shape
    if kind.rows:
        # Copied: a mapped file that shrinks while the engine runs would kill the process.
        return RowBlocks(kind.rows, np.array(blocks).reshape(out, -1)), 0.0
    if kind.split is None:
        width = inner // kind.values

        def rows(begin: int, end: int) -> NDArray[Any]:
            return dequantize(kind, blocks[begin * width : end * width]).reshape(-1, inner)

        return rounded(rows, (out, inner), 8)
    scale, minimum = kind.scaled
    groups = (out, inner // (GROUP // 2 if kind.bits == 6 else GROUP))
    held = Quantized(
        kind.bits,
        _empty_codes(kind.bits, (out, inner)),
        np.zeros(groups, scale),
        np.zeros(groups, minimum) if minimum else None,
        np.empty((out, inner // BLOCK), np.float16) if kind.blocks else None,
        np.empty((out, inner // BLOCK), np.float16) if kind.blocks and minimum else None,
        kind.table,
    )
    step = SLICE // kind.values
    into = [one.reshape(len(blocks), -1) for one in held.arrays]
    split = kind.split

    def convert(at: int) -> None:
        with np.errstate(all="ignore"):  # of this thread
            found = split(np.ascontiguousarray(blocks[at : at + step]))
        for whole, part in zip(into, (one for one in found if one is not None), strict=True):
            whole[at : at + step] = part

    slices = range(0, len(blocks), step)
    if len(slices) < _WORTH_THREADS:
        for at in slices:
            convert(at)
    else:
        with ThreadPoolExecutor(_THREADS, "cairn-codes") as threads:
            for _ in threads.map(convert, slices):
                pass
    with np.errstate(all="ignore"):
        if kind.table and scale == "float32" and np.array_equal(half := held.scale.astype(np.float16), held.scale):
            held = replace(held, scale=half)
    return held, 0.0


def rounded(rows: Rows, shape: tuple[int, int], bits: Literal[4, 8]) -> tuple[Quantized, float]:
    """Return a matrix [out, in] rounded to codes, and its error. Groups with a non-finite value get the scale NaN."""
    out, inner = shape
    step = max(1, _SLICE // inner)
    most = np.empty((out, inner // GROUP), np.float32)
    with np.errstate(all="ignore"):
        for at in range(0, out, step):
            most[at : at + step] = np.abs(_groups(rows, at, at + step)).max(axis=-1)
        held = Quantized(
            bits,
            _empty_codes(bits, shape),
            np.empty(most.shape, _scale_type(most / np.float32(127 if bits == 8 else 8))),
        )
        wrong = total = 0.0
        exact = np.float64 if held.scale.dtype == np.float32 else np.float32  # squares of large weights overflow
        for at in range(0, out, step):
            part = slice(at, at + step)
            groups = _groups(rows, at, at + step)
            codes, scale = (_eight if bits == 8 else _four)(groups, most[part], held.scale.dtype)
            held.codes[part] = (codes + (8 if bits == 4 else 0)).reshape(-1, inner)
            held.scale[part] = scale
            finite = np.isfinite(most[part])
            wrong += float(np.square(groups - codes * scale[..., None], dtype=exact)[finite].sum(dtype=np.float64))
            total += float(np.square(groups, dtype=exact)[finite].sum(dtype=np.float64))
    return held, math.sqrt(wrong / total) if total else 0.0


def _empty_codes(bits: int, shape: tuple[int, int]) -> Codes:
    return np.empty(shape, np.int8) if bits == 8 else np.empty(shape, np.uint8)


def _groups(rows: Rows, begin: int, end: int) -> Floats:
    part = rows(begin, end).astype(np.float32)
    return part.reshape(len(part), -1, GROUP)


def _scale_type(scales: Floats) -> type[Any]:
    some = scales[np.isfinite(scales)]
    largest = some.max(initial=0.0)
    return np.float16 if largest == 0 or _LEAST <= largest <= _MOST else np.float32


def _codes(groups: Floats, scale: Floats, low: int, high: int) -> Floats:
    """Return the nearest codes; 0 if the scale is 0 or not finite."""
    usable = np.isfinite(scale) & (scale != 0)
    factor = np.where(usable, 1 / np.where(usable, scale, 1), 0).astype(np.float32)
    values = np.where(usable[..., None], groups, 0) * factor[..., None]
    nearest: Floats = np.clip(np.rint(values), low, high)
    return nearest


def _eight(groups: Floats, most: Floats, dtype: Any) -> tuple[Floats, Floats]:
    scale = np.where(np.isfinite(most), most / np.float32(127), np.nan).astype(dtype).astype(np.float32)
    return _codes(groups, scale, -127, 127), scale


def _four(groups: Floats, most: Floats, dtype: Any) -> tuple[Floats, Floats]:
    place = np.abs(groups).argmax(axis=-1)
    largest = np.take_along_axis(groups, place[..., None], axis=-1)[..., 0]
    largest = np.where(np.isfinite(most), largest, np.nan)
    codes, scale, error = _try(groups, largest / np.float32(_CODES[0]), dtype)
    for code in _CODES[1:]:
        found = _try(groups, largest / np.float32(code), dtype)
        codes, scale, error = _better((codes, scale, error), found)
    squares = np.square(codes).sum(axis=-1)
    fitted = np.divide((codes * groups).sum(axis=-1), squares, out=scale.copy(), where=squares > 0)
    codes, scale, _ = _better((codes, scale, error), _try(groups, fitted, dtype))
    return codes, scale


_Tried = tuple[Floats, Floats, Floats]
"""Codes [.., 32], scale [..] and squared error [..]."""


def _try(groups: Floats, scale: Floats, dtype: Any) -> _Tried:
    scale = scale.astype(dtype).astype(np.float32)
    codes = _codes(groups, scale, -8, 7)
    return codes, scale, np.square(groups - codes * scale[..., None]).sum(axis=-1)


def _better(one: _Tried, other: _Tried) -> _Tried:
    """Return the candidate with the smaller error for each group; the first on a tie."""
    second = other[2] < one[2]
    return (
        np.where(second[..., None], other[0], one[0]),
        np.where(second, other[1], one[1]),
        np.where(second, other[2], one[2]),
    )
