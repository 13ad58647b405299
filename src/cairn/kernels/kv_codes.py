"""KV as 8-bit integers in the numpy kernels' layout: an int8 code for each number, and scales after a row's codes.

A row is the key or the value of one position and head. Its numbers share a scale, 1/127 of their largest magnitude; a
latent has two scales, one for the normed part and one for the rotated part. Codes are rounded as activations are: see
`kernels.quantized`. The native kernels use as many bytes in an order of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.quantized import group_codes

Floats = NDArray[np.float32]

SCALE_BYTES = np.dtype(np.float32).itemsize


def row_bytes(size: int, once: bool = False) -> int:
    """Return the bytes of a row of `size` numbers; `once`: of a latent."""
    return size + SCALE_BYTES * (2 if once else 1)


def row_size(kv: NDArray[Any]) -> int:
    """Return how many numbers a row of a pool kv[blocks, layers, 2 or 1, K, block_tokens, ...] has, of any type."""
    width = int(kv.shape[5])
    return width - row_bytes(0, kv.shape[2] == 1) if kv.dtype == np.int8 else width


def stored(x: Floats, dtype: np.dtype[Any], rank: int = 0) -> NDArray[Any]:
    """Convert rows x[..., D] to a pool's type. `rank`: for latents, the size of the normed part."""
    if dtype != np.int8:
        return x
    parts = [group_codes(part) for part in ((x[..., :rank], x[..., rank:]) if rank else (x,))]
    scales = np.stack([scale for _, scale in parts], axis=-1).astype("<f4")
    return np.concatenate([*(codes for codes, _ in parts), scales.view(np.int8)], axis=-1)


def numbers(rows: NDArray[Any], rank: int = 0) -> Floats:
    """Convert rows of a pool to float32: the inverse of `stored`, except for its rounding."""
    if rows.dtype != np.int8:
        return rows.astype(np.float32, copy=False)
    size = rows.shape[-1] - row_bytes(0, bool(rank))
    scales = np.ascontiguousarray(rows[..., size:]).view("<f4").astype(np.float32, copy=False)
    values = rows[..., :size].astype(np.float32)
    if rank:
        values[..., :rank] *= scales[..., :1]
        values[..., rank:] *= scales[..., 1:]
    else:
        values *= scales
    return values
