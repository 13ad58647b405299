"""Multi-head latent attention in numpy: one latent for each token, from which all heads' keys and values are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.kernels import kv_codes
from cairn.kernels.paged import attend

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


def turned(x: Floats, angles: Floats, neighbours: bool) -> Floats:
    """Rotate pairs of x[M, ..., r] by angles[M, 2, r / 2]: (2i, 2i + 1) if `neighbours`, else (i, i + r / 2)."""
    shape = (len(x), *[1] * (x.ndim - 2), -1)
    cos, sin = angles[:, 0].reshape(shape), angles[:, 1].reshape(shape)
    half = x.shape[-1] // 2
    places = (slice(0, None, 2), slice(1, None, 2)) if neighbours else (slice(0, half), slice(half, None))
    first, second = x[..., places[0]], x[..., places[1]]
    out = np.empty(x.shape, np.float32)
    out[..., places[0]] = first * cos - second * sin
    out[..., places[1]] = second * cos + first * sin
    return out


def write(
    x: Floats,
    angles: Floats,
    neighbours: bool,
    norm: Callable[[Floats], Floats],
    kv: NDArray[Any],
    layer: int,
    slots: Ints,
) -> None:
    """`kernels.base.Kernels.latent_write`."""
    turns = 2 * angles.shape[-1]
    rank = x.shape[1] - turns
    block, offset = np.divmod(slots, kv.shape[4])
    made = np.empty(x.shape, np.float32)
    made[:, :rank] = norm(np.ascontiguousarray(x[:, :rank]))
    made[:, rank:] = turned(x[:, rank:], angles, neighbours)
    kv[block, layer, 0, 0, offset] = kv_codes.stored(made, kv.dtype, rank)


def queries(
    x: Floats,
    keys: Sequence[Any],
    angles: Floats,
    neighbours: bool,
    project: Callable[[Floats, Any], Floats],
    query: Floats,
) -> None:
    """`kernels.base.Kernels.latent_queries`."""
    turns = 2 * angles.shape[-1]
    split = x.reshape(len(x), len(keys), -1)
    for head, matrix in enumerate(keys):
        query[:, head, :-turns] = project(np.ascontiguousarray(split[:, head, :-turns]), matrix)
    query[:, :, -turns:] = turned(split[:, :, -turns:], angles, neighbours)


def attention(query: Floats, kv: NDArray[Any], layer: int, rows: Ints, tables: Ints, scale: float, out: Floats) -> None:
    """`kernels.base.Kernels.latent_attention`."""
    count, heads, size = query.shape
    whole = np.zeros((count, heads * size), np.float32)
    attend(query, kv, layer, rows, tables, 0, scale, whole, rank=out.shape[2])
    out[:] = whole.reshape(query.shape)[:, :, : out.shape[2]]


def values(x: Floats, matrices: Sequence[Any], project: Callable[[Floats, Any], Floats], out: Floats) -> None:
    """`kernels.base.Kernels.latent_values`."""
    split = out.reshape(len(x), len(matrices), -1)
    for head, matrix in enumerate(matrices):
        split[:, head] = project(np.ascontiguousarray(x[:, head]), matrix)
