"""KV as 8-bit integers, as the numpy kernels hold it: an int8 code a number, and the scales behind a row's codes.

A row is what a pool keeps of one position and head: its key, or its value. The numbers of a row share a scale, a 127th
of the largest magnitude among them; a latent has two, of the part that is normed and of the part that is turned. Codes
are rounded as those of activations are: see `kernels.quantized`. The native kernels keep as many bytes in an order of
their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.quantized import group_codes

Floats = NDArray[np.float32]

SCALE_BYTES = np.dtype(np.float32).itemsize


def row_bytes(size: int, once: bool = False) -> int:
    """Bytes of a row of so many numbers; `once`: of a latent."""
    return size + SCALE_BYTES * (2 if once else 1)


def row_size(kv: NDArray[Any]) -> int:
    """Numbers in a row of a pool kv[blocks, layers, 2 or 1, K, block_tokens, ...] of any type."""
    width = int(kv.shape[5])
    return width - row_bytes(0, kv.shape[2] == 1) if kv.dtype == np.int8 else width


def stored(x: Floats, dtype: np.dtype[Any], rank: int = 0) -> NDArray[Any]:
    """Rows x[..., D] as a pool of this type takes them. `rank`: of a latent, the numbers that are normed."""
    if dtype != np.int8:
        return x
    parts = [group_codes(part) for part in ((x[..., :rank], x[..., rank:]) if rank else (x,))]
    scales = np.stack([scale for _, scale in parts], axis=-1).astype("<f4")
    return np.concatenate([*(codes for codes, _ in parts), scales.view(np.int8)], axis=-1)


def numbers(rows: NDArray[Any], rank: int = 0) -> Floats:
    """What rows of a pool stand for, in float32: the inverse of `stored`, but for what that rounded."""
    if rows.dtype != np.int8:
        return rows.astype(np.float32, copy=False)
    size = rows.shape[-1] - row_bytes(0, bool(rank))
    scales = np.ascontiguousarray(rows[..., size:]).view("<f4").astype(np.float32, copy=False)
    found = rows[..., :size].astype(np.float32)
    if rank:
        found[..., :rank] *= scales[..., :1]
        found[..., rank:] *= scales[..., 1:]
    else:
        found *= scales
    return found
