"""Paged attention and what goes with it: KV writes, rotations, latents. Functions as `kernels.base` declares them.

A function gets MLX's arrays, a `Pool` where a pool is declared, `Places` for rows and tables, and a `Blank` for an
argument that it overwrites. It returns the new values of the arguments that it changes, but for pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from cairn.kernels.mlx.cells import Blank, Pool
from cairn.kernels.mlx.places import Places, Sight
from cairn.kernels.mlx.weights import JoinedMatrices
from cairn.types.model_spec import BLOCK_TOKENS

Array = Any


def rope_write(
    qkv: Array,
    angles: Array | None,
    q_norm: Array | None,
    k_norm: Array | None,
    eps: float,
    kv: Pool,
    layer: int,
    slots: Array,
    query: Blank,
    late: bool = False,
) -> Array:
    """`Kernels.rope_write`."""
    _, heads, size = query.shape
    kv_heads = kv.page[1]
    split = qkv.reshape(len(qkv), -1, size)
    wide = split.shape[1] - 2 * kv_heads
    q, k, v = split[:, : wide : wide // heads], split[:, wide : wide + kv_heads], split[:, wide + kv_heads :]
    _store(kv, layer, slots, (_turned(k, angles, k_norm, eps, late), v))
    return _turned(q, angles, q_norm, eps, late)


def attention(
    query: Array,
    kv: Pool,
    layer: int,
    rows: Places,
    tables: Places,
    window: int,
    scale: float,
    out: Blank,
    softcap: float = 0.0,
    both: bool = False,
    sinks: Array | None = None,
    members: None = None,
    narrow: bool = False,
) -> Array:
    """`Kernels.attention`. `narrow`: queries are rounded to the pool's type, in which a GPU's kernels read it."""
    query = query.astype(kv.dtype) if narrow else query
    sights = rows.sights(window, both)
    return _attended(query, kv.layers[layer], kv.page[-1], sights, scale, softcap, sinks).reshape(out.shape)


def latent_write(
    x: Array, angles: Array, neighbours: bool, norm: Array, eps: float, kv: Pool, layer: int, slots: Array
) -> None:
    """`Kernels.latent_write`."""
    rank = x.shape[1] - 2 * angles.shape[-1]
    normed = mx.fast.rms_norm(x[:, :rank], norm, eps)
    turned = _pairs(x[:, None, rank:], angles, neighbours)
    _store(kv, layer, slots, (mx.concatenate((normed[:, None], turned), axis=2),))


def latent_queries(x: Array, keys: JoinedMatrices, angles: Array, neighbours: bool, query: Blank) -> Array:
    """`Kernels.latent_queries`."""
    turns = 2 * angles.shape[-1]
    split = x.reshape(len(x), query.shape[1], -1)
    plain = keys.product_of_each(split[:, :, :-turns])
    return mx.concatenate((plain, _pairs(split[:, :, -turns:], angles, neighbours)), axis=2)


def latent_attention(
    query: Array,
    kv: Pool,
    layer: int,
    rows: Places,
    tables: Places,
    scale: float,
    out: Blank,
    members: None = None,
    narrow: bool = False,
) -> Array:
    """`Kernels.latent_attention`; `narrow` as in `attention`."""
    query = query.astype(kv.dtype) if narrow else query
    return _attended(query, kv.layers[layer], out.shape[2], rows.sights(0, False), scale, 0.0, None)


def latent_values(x: Array, values: JoinedMatrices, out: Blank) -> Array:
    """`Kernels.latent_values`."""
    return values.product_of_each(x).reshape(out.shape)


def gate_heads(x: Array, qkv: Array, size: int) -> Array:
    """`Kernels.gate_heads`."""
    gates = qkv[:, : 2 * x.shape[1]].reshape(len(x), -1, 2, size)[:, :, 1]
    return x * mx.sigmoid(gates.reshape(x.shape))


def turn_heads(x: Array, angles: Array, query: Blank) -> Array:
    """`Kernels.turn_heads`."""
    return _rotated(x.reshape(query.shape), angles)


def rope_angles(rope: tuple[Array, float], positions: Array, angles: Blank) -> Array:
    """`Kernels.rope_angles`."""
    # Not mx.fast.rope: it would compute each angle anew in each layer, and knows no factor.
    turns = positions.astype(mx.float32)[:, None] * rope[0]
    return mx.stack((mx.cos(turns) * rope[1], mx.sin(turns) * rope[1]), axis=1)


def scale_queries(query: Array, positions: Array, beta: float, original: float, ahead: int = 0) -> Array:
    """`Kernels.scale_queries`."""
    turns = mx.floor((positions + ahead).astype(mx.float32) / original)
    return query * (1 + beta * mx.log(1 + turns))[:, None, None]


def norm_heads(x: Array, first: int, heads: int, size: int, weight: Array | None, eps: float) -> Array:
    """`Kernels.norm_heads`."""
    begin, end = first * size, (first + heads) * size
    normed = mx.fast.rms_norm(x[:, begin:end].reshape(len(x), heads, size), weight, eps)
    return mx.concatenate((x[:, :begin], normed.reshape(len(x), -1), x[:, end:]), axis=1)


def layer_norm_heads(
    x: Array, first: int, heads: int, size: int, weight: Array, bias: Array | None, eps: float
) -> Array:
    """`Kernels.layer_norm_heads`."""
    begin, end = first * size, (first + heads) * size
    normed = mx.fast.layer_norm(x[:, begin:end].reshape(len(x), heads, size), None, None, eps)
    normed = normed * weight.reshape(-1, size)
    normed = normed if bias is None else normed + bias
    return mx.concatenate((x[:, :begin], normed.reshape(len(x), -1), x[:, end:]), axis=1)


def _store(kv: Pool, layer: int, slots: Array, numbers: Sequence[Array]) -> None:
    """Write keys and values [M, K, D], or latents [M, 1, D], to their slots."""
    block, offset = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
    arrays = kv.layers[layer]
    for part, one in enumerate(numbers):
        array = arrays[part]
        array[block, offset] = one.astype(array.dtype)
        arrays[part] = array
        del array


def _attended(
    query: Array,
    arrays: Sequence[Array],
    size: int,
    sights: Sequence[Sight],
    scale: float,
    cap: float,
    sinks: Array | None,
) -> Array:
    """Return attention [M, heads, size] of query[M, heads, D] over a layer's pool arrays [blocks, 16, K, D].

    Values are the first `size` numbers of the last array, which is also the first one if latents are stored.
    """
    found = []
    for sight in sights:
        read = [_gathered(one, sight) for one in arrays]
        # A missing value counts 0 times, but 0 times an infinity is not 0.
        ends = None if sinks is None else sinks.astype(query.dtype)
        k, v = read[0], mx.where(sight.known[:, None, :, None], read[-1][..., :size], 0)
        for begin, end, seen in sight.seen:
            first = sight.first + sight.rows * begin
            part = query[first : first + sight.rows * (end - begin)].reshape(sight.rows, end - begin, *query.shape[1:])
            given = mx.swapaxes(part, 1, 2)
            made = (
                _capped(given, k, v, seen, scale, cap, sinks)
                if cap
                else mx.fast.scaled_dot_product_attention(given, k, v, scale=scale, mask=seen, sinks=ends)
            )
            found.append(mx.swapaxes(made, 1, 2).reshape(-1, query.shape[1], size).astype(mx.float32))
    return found[0] if len(found) == 1 else mx.concatenate(found, axis=0)


def _gathered(pool: Array, sight: Sight) -> Array:
    """Return what a run reads of a pool, [rows, K, positions, D]."""
    pages = mx.take(pool, sight.blocks, axis=0)  # [rows, n, 16, K, D]
    return mx.swapaxes(pages.reshape(sight.rows, -1, *pool.shape[2:]), 1, 2)


def _capped(q: Array, k: Array, v: Array, seen: Array, scale: float, cap: float, sinks: Array | None) -> Array:
    """Return attention with capped scores, which no fused kernel has."""
    rows, heads, count, size = q.shape
    kv_heads = k.shape[1]
    grouped = q.astype(mx.float32).reshape(rows, kv_heads, heads // kv_heads, count, size)
    scores = grouped @ mx.swapaxes(k.astype(mx.float32), 2, 3)[:, :, None] * scale
    scores = cap * mx.tanh(scores / cap)
    scores = mx.where(seen[:, :, None], scores, -mx.inf)
    if sinks is None:
        shares = mx.softmax(scores, axis=-1)
    else:
        ends = mx.broadcast_to(sinks.reshape(1, kv_heads, -1, 1, 1), (*scores.shape[:-1], 1))
        shares = mx.softmax(mx.concatenate((scores, ends), axis=-1), axis=-1)[..., :-1]
    return (shares @ v.astype(mx.float32)[:, :, None]).reshape(rows, heads, count, -1)


def _turned(x: Array, angles: Array | None, norm: Array | None, eps: float, late: bool) -> Array:
    """Return heads x[M, heads, D] normed and rotated; if `late`, rotated and then normed."""
    if late:
        turned = _rotated(x, angles)
        return turned if norm is None else _norm_all(turned, norm, eps)
    return _rotated(x if norm is None else _norm_all(x, norm, eps), angles)


def _norm_all(x: Array, weight: Array, eps: float) -> Array:
    """Norm x[M, heads, D] head by head, or all heads together if the weight spans them."""
    if len(weight) == x.shape[-1]:
        return mx.fast.rms_norm(x, weight, eps)
    return mx.fast.rms_norm(x.reshape(len(x), -1), weight, eps).reshape(x.shape)


def _rotated(x: Array, angles: Array | None) -> Array:
    """Rotate the pairs (i, i + r/2) of the first r numbers of x[M, heads, D] by angles[M, 2, r/2]."""
    if angles is None:
        return x
    turns = 2 * angles.shape[-1]
    return mx.concatenate((_pairs(x[..., :turns], angles, False), x[..., turns:]), axis=-1)


def _pairs(x: Array, angles: Array, neighbours: bool) -> Array:
    """Rotate pairs of x[M, heads, r]: (2i, 2i + 1) if `neighbours`, else (i, i + r/2)."""
    cos, sin = angles[:, None, 0], angles[:, None, 1]
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
    made = first * cos - second * sin, second * cos + first * sin
    return mx.stack(made, axis=-1).reshape(x.shape) if neighbours else mx.concatenate(made, axis=-1)
