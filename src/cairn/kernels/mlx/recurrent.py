"""Layers that keep a state: short convolution, gated delta net and Mamba 2. See `kernels.recurrent`.

Functions as `kernels.mlx.attention` describes them. States are read as they were before the step and written after it:
`Pool.later`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from cairn.kernels.mlx.cells import Blank, LaterWrite, Pool
from cairn.kernels.mlx.places import Places, StateRun

Array = Any
Scan = Callable[..., tuple[Array, Array]]
"""A way to compute `scan`."""

_UNIT = 1e-6


def convolve(
    x: Array,
    first: int,
    weight: Array,
    bias: Array | None,
    silu: bool,
    gated: bool,
    states: Pool,
    layer: int,
    rows: Places,
    tables: Places,
    out: Blank,
    members: None = None,
) -> Array:
    """`Kernels.convolve`."""
    channels = out.shape[1]
    taps = weight.reshape(-1, channels)
    past = len(taps) - 1
    given = x[:, :channels] * x[:, 2 * channels :] if gated else x[:, first : first + channels]
    found = []
    for run in rows.states():
        before = _before(states, layer, run)[:, : past * channels].reshape(run.rows, past, channels)
        seen = mx.concatenate((before, _of_run(given, run)), axis=1)
        total = seen[:, : run.tokens] * taps[0]
        for place in range(1, past + 1):
            total = total + seen[:, place : place + run.tokens] * taps[place]
        found.append(total.reshape(-1, channels))
        for end, blocks in run.ends:
            window = seen[:, end : end + past].reshape(run.rows, -1)
            states.later.append(LaterWrite(layer, blocks, 0, window))
    total = _joined(found)
    if bias is not None:
        total = total + bias
    if silu:
        total = total * mx.sigmoid(total)
    return total * x[:, channels : 2 * channels] if gated else total


def delta(
    x: Array,
    gates: Array,
    first: int,
    decay: Array,
    time_bias: Array,
    key_heads: int,
    tiled: bool,
    states: Pool,
    layer: int,
    rows: Places,
    tables: Places,
    out: Blank,
    members: None = None,
    run: Scan | None = None,
) -> Array:
    """`Kernels.delta`; `run` computes the scan in another way than `scan`."""
    heads, width = len(decay), (x.shape[1] - out.shape[1]) // 2
    query, key = (_unit(part.reshape(len(x), key_heads, -1)) for part in (x[:, :width], x[:, width : 2 * width]))
    query = query / math.sqrt(width // key_heads)
    share = mx.sigmoid(gates[:, first : first + heads])
    step = _softplus(gates[:, first + heads : first + 2 * heads] + time_bias)
    value = x[:, 2 * width :].reshape(len(x), heads, -1)
    vectors = _spread(key, heads, tiled), _spread(query, heads, tiled), value
    return _scan(run or scan, (*vectors, mx.exp(decay * step), share), True, states, layer, rows)


def mamba2(
    x: Array,
    gates: Array,
    first: int,
    decay: Array,
    time_bias: Array,
    skip: Array,
    low: float,
    high: float,
    groups: int,
    states: Pool,
    layer: int,
    rows: Places,
    tables: Places,
    out: Blank,
    members: None = None,
    run: Scan | None = None,
) -> Array:
    """`Kernels.mamba2`; `run` computes the scan in another way than `scan`."""
    heads, inner = len(decay), out.shape[1]
    width = (x.shape[1] - inner) // 2
    step = mx.clip(_softplus(gates[:, first : first + heads] + time_bias), low, high)
    value = x[:, :inner].reshape(len(x), heads, -1)
    key, query = (
        _spread(part.reshape(len(x), groups, -1), heads, False)
        for part in (x[:, inner : inner + width], x[:, inner + width :])
    )
    given = (key, query, value, mx.exp(decay * step), step)
    made = _scan(run or scan, given, False, states, layer, rows)
    return made + (skip[:, None] * value).reshape(made.shape)


def _scan(run: Scan, vectors: Sequence[Array], corrected: bool, states: Pool, layer: int, rows: Places) -> Array:
    """Update the states token by token, as `kernels.recurrent` does; return [M, heads V]."""
    key, _, value, _, _ = vectors
    heads, size = value.shape[1:]
    numbers = heads * key.shape[2] * size
    at = states.page[0] - numbers
    found = []
    for part in rows.states():
        state = _before(states, layer, part)[:, at:].reshape(part.rows, heads, -1, size)
        given = [_of_run(one, part) for one in vectors]
        ends, begin = dict(part.ends), 0
        for end in sorted(ends):
            made, state = run(*(one[:, begin:end] for one in given), state, corrected)
            found.append(made.reshape(-1, heads * size))
            states.later.append(LaterWrite(layer, ends[end], at, state.reshape(part.rows, -1)))
            begin = end
    return _joined(found)


def scan(
    key: Array, query: Array, value: Array, decay: Array, share: Array, state: Array, corrected: bool
) -> tuple[Array, Array]:
    """Return outputs [rows, tokens, heads, V] and the states after the last token.

    `key` and `query` are [rows, tokens, heads, K], `value` [rows, tokens, heads, V], `decay` and `share`
    [rows, tokens, heads], `state` [rows, heads, K, V].
    """
    found = []
    for token in range(key.shape[1]):
        state = state * decay[:, token, :, None, None]
        own = key[:, token, :, :, None]
        change = value[:, token]
        if corrected:
            change = change - (state * own).sum(axis=2)
        state = state + own * (share[:, token, :, None] * change)[:, :, None]
        found.append((state * query[:, token, :, :, None]).sum(axis=2))
    return mx.stack(found, axis=1), state


def gated_norm(
    x: Array, gates: Array, first: int, weight: Array, size: int, eps: float, gate_first: bool, out: Blank
) -> Array:
    """`Kernels.gated_norm`."""
    own = gates[:, first : first + x.shape[1]]
    gate = own * mx.sigmoid(own)
    parts = (x * gate if gate_first else x).reshape(len(x), -1, size)
    normed = (mx.fast.rms_norm(parts, None, eps) * weight.reshape(-1, size)).reshape(x.shape)
    return normed if gate_first else normed * gate


def _before(states: Pool, layer: int, run: StateRun) -> Array:
    """Return the states [rows, N] that the rows begin with."""
    found = mx.take(states.layers[layer][0], run.before, axis=0)
    return mx.where(run.fresh[:, None], 0, found)


def _of_run(x: Array, run: StateRun) -> Array:
    """Return the tokens of a run, [rows, tokens, ...]."""
    return x[run.first : run.first + run.rows * run.tokens].reshape(run.rows, run.tokens, *x.shape[1:])


def _joined(found: list[Array]) -> Array:
    return found[0] if len(found) == 1 else mx.concatenate(found, axis=0)


def _unit(x: Array) -> Array:
    """Divide vectors along the last axis by their lengths."""
    return x * mx.rsqrt(mx.square(x).sum(axis=-1, keepdims=True) + _UNIT)


def _softplus(x: Array) -> Array:
    """Return log(1 + e^x)."""
    return mx.logaddexp(x, mx.zeros_like(x))


def _spread(x: Array, heads: int, tiled: bool) -> Array:
    """Repeat x[M, key heads, K] to [M, heads, K]: tiled, or each key head for neighbouring heads."""
    fan = heads // x.shape[1]
    return mx.tile(x, (1, fan, 1)) if tiled else mx.repeat(x, fan, axis=1)
