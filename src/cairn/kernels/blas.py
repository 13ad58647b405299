"""Matrix products by BLAS in which each row's result is independent of the other rows, bit for bit.

BLAS only gets tiles of exactly 8 rows, zero-padded, times a panel of the matrix of fixed width. Panels are narrow
enough for OpenBLAS's small-matrix kernels, which neither repack nor use threads (and run twice as fast here). Whether a
tile's rows are independent of each other and of their place is measured for each shape (`tile_rows`); a shape that
fails gets one row in each call. BLAS is pinned to one thread, so the number of threads cannot change how it splits
work; our threads work on different panels instead.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

Floats = NDArray[np.float32]

TILE = 8
"""Rows of activations in one BLAS call."""

_SMALL = 1_000_000
"""OpenBLAS takes its small-matrix path up to about this many multiplications (100 cubed)."""
_WORTH_THREADS = 16_000_000
"""Multiplications in one projection below which handing work to threads costs more than it saves."""


class OneBlasThread:
    """Pins BLAS to one thread from the first kernels to the last: its thread count belongs to the whole process."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may call `leave` while this thread is inside `enter`.
        self._lock = threading.RLock()
        self._users = 0
        self._limits: Any = None

    def enter(self) -> None:
        """Add a user; the first one pins BLAS."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._limits = threadpool_limits(limits=1, user_api="blas")

    def leave(self) -> None:
        """Remove a user; the last one restores the previous thread count."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._limits.restore_original_limits()


one_blas_thread = OneBlasThread()


@functools.cache
def tile_rows(inner: int, width: int, transposed: bool = False) -> int:
    """Return `TILE` if BLAS computes [8, inner] @ [inner, width] row by row, else 1.

    Tested is whether each row has the same bits in any place and beside any neighbours.

    `transposed`: the right side is stored as [width, inner], as keys are.
    """
    rng = np.random.default_rng(0)
    right = rng.standard_normal((width, inner) if transposed else (inner, width), dtype=np.float32)
    right = right.T if transposed else right
    tile = rng.standard_normal((TILE, inner), dtype=np.float32)
    want = np.matmul(tile, right)
    turned = np.stack([np.roll(tile, shift, axis=0) for shift in range(TILE)])
    alone = np.zeros((TILE, TILE, inner), np.float32)
    alone[np.arange(TILE), np.arange(TILE)[::-1]] = tile
    same = all(np.array_equal(np.roll(got, -shift, axis=0), want) for shift, got in enumerate(np.matmul(turned, right)))
    return TILE if same and np.array_equal(np.matmul(alone, right)[np.arange(TILE), np.arange(TILE)[::-1]], want) else 1


@dataclass(frozen=True, slots=True)
class Matrix:
    """A packed matrix: panels[C, in, width], zero-padded to C * width >= out columns."""

    panels: Floats
    bias: Floats | None
    out: int
    rows: int
    """Rows of a tile for this shape: `TILE`, or 1 where that was not stable."""


def pack(weights: Sequence[NDArray[Any]], biases: Sequence[NDArray[Any] | None]) -> Matrix:
    """Pack matrices [out, in] with the same input into one; outputs are concatenated in order."""
    inner, out = weights[0].shape[1], sum(weight.shape[0] for weight in weights)
    widest = min(256, max(16, _SMALL // (TILE * inner) // 16 * 16))
    count = -(-out // widest)
    width = -(-out // count // 16) * 16
    panels = np.zeros((count, inner, width), np.float32)
    at = 0
    for weight in weights:
        for panel in range(count):
            low, high = max(panel * width, at), min((panel + 1) * width, at + len(weight))
            if low < high:
                panels[panel, :, low - panel * width : high - panel * width] = weight[low - at : high - at].T
        at += len(weight)
    bias = None
    if any(one is not None for one in biases):
        parts = [np.zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
        bias = np.concatenate([np.asarray(part, np.float32) for part in parts])
    return Matrix(panels, bias, out, tile_rows(inner, width))


def project(x: Floats, matrix: Matrix, pool: ThreadPoolExecutor | None, threads: int) -> Floats:
    """Return x[M, in] @ matrix + bias as [M, out], tile by tile."""
    count, inner, width = matrix.panels.shape
    tiles = -(-len(x) // matrix.rows)
    padded = np.zeros((tiles * matrix.rows, inner), np.float32)
    padded[: len(x)] = x
    left = padded.reshape(1, tiles, matrix.rows, inner)
    got = np.empty((tiles * matrix.rows, count * width), np.float32)
    # A view as [panel, tile, row, column], into which each product is written directly.
    target = got.reshape(tiles, matrix.rows, count, width).transpose(2, 0, 1, 3)
    if pool is None or tiles * TILE * matrix.panels.size < _WORTH_THREADS:
        np.matmul(left, matrix.panels[:, None], out=target)
    else:
        step = -(-count // threads)
        parts = [slice(at, at + step) for at in range(0, count, step)]
        work = [pool.submit(np.matmul, left, matrix.panels[p, None], out=target[p]) for p in parts]
        for part in work:
            part.result()
    got = got[: len(x), : matrix.out]
    return got if matrix.bias is None else got + matrix.bias
