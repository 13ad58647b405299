"""Recurrent layers in numpy: short convolution, gated delta net, Mamba 2, and the gates around them.

A state in `states[blocks, layers, numbers]` is the convolution's window [reach - 1, C], oldest first, then a matrix
[K, V] for each head. Block j of a row's table holds the state after the last computed token below 16 (j + 1). Every
sum runs in the order of its index, token by token, so where a row begins and ends changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.elementary import exp, log1p
from cairn.types.model_spec import BLOCK_TOKENS

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

MOST_REACH = 16
"""Most tokens that a convolution covers."""
_UNIT = np.float32(1e-6)
_LINEAR = np.float32(20)
"""Above it log(1 + e^x) is x."""


def kept(table: Ints, start: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield the positions after which the state of a row [start, start + count) is kept, each with its block."""
    for end in range(start // BLOCK_TOKENS * BLOCK_TOKENS + BLOCK_TOKENS, start + count, BLOCK_TOKENS):
        block = int(table[(end - 1) // BLOCK_TOKENS])
        if block >= 0:
            yield end, block
    yield start + count, int(table[(start + count - 1) // BLOCK_TOKENS])


def _before(states: Floats, layer: int, table: Ints, start: int) -> Floats:
    """Return a copy of the state that a row begins with."""
    if not start:
        return np.zeros(states.shape[2], np.float32)
    state: Floats = states[int(table[(start - 1) // BLOCK_TOKENS]), layer].copy()
    return state


def _rows(rows: Ints, tables: Ints) -> Iterator[tuple[int, int, int, Ints]]:
    for (first, count, start), table in zip(rows.tolist(), tables, strict=True):
        yield first, count, start, table


def convolve(
    x: Floats,
    first: int,
    weight: Floats,
    bias: Floats | None,
    silu: bool,
    gated: bool,
    states: Floats,
    layer: int,
    rows: Ints,
    tables: Ints,
    out: Floats,
) -> None:
    """`Kernels.convolve`."""
    channels = out.shape[1]
    taps = weight.reshape(-1, channels)
    reach = len(taps)
    given = x[:, :channels] * x[:, 2 * channels :] if gated else x[:, first : first + channels]
    windows: list[tuple[int, Floats]] = []
    for begin, count, start, table in _rows(rows, tables):
        before = _before(states, layer, table, start)[: (reach - 1) * channels].reshape(reach - 1, channels)
        seen = np.concatenate([before, given[begin : begin + count]])
        total = seen[:count] * taps[0]
        for place in range(1, reach):
            total = total + seen[place : place + count] * taps[place]
        if bias is not None:
            total = total + bias
        if silu:
            total = total / (1 + exp(-total))
        if gated:
            total = total * x[begin : begin + count, channels : 2 * channels]
        out[begin : begin + count] = total
        windows += [(block, seen[end - start : end - start + reach - 1]) for end, block in kept(table, start, count)]
    for block, window in windows:
        states[block, layer, : (reach - 1) * channels] = window.reshape(-1)


def delta(
    x: Floats,
    gates: Floats,
    first: int,
    decay: Floats,
    time_bias: Floats,
    key_heads: int,
    tiled: bool,
    states: Floats,
    layer: int,
    rows: Ints,
    tables: Ints,
    out: Floats,
) -> None:
    """`Kernels.delta`."""
    heads, width = len(decay), (x.shape[1] - out.shape[1]) // 2
    query, key = (_unit(part.reshape(len(x), key_heads, -1)) for part in (x[:, :width], x[:, width : 2 * width]))
    query = query * np.float32(1 / np.sqrt(width // key_heads))
    share: Floats = np.reciprocal(1 + exp(-gates[:, first : first + heads]))
    step = softplus(gates[:, first + heads : first + 2 * heads] + time_bias)
    _scan(
        _spread(key, heads, tiled),
        _spread(query, heads, tiled),
        x[:, 2 * width :].reshape(len(x), heads, -1),
        exp(decay * step),
        share,
        True,
        (states, layer, rows, tables),
        out,
    )


def mamba2(
    x: Floats,
    gates: Floats,
    first: int,
    decay: Floats,
    time_bias: Floats,
    skip: Floats,
    low: float,
    high: float,
    groups: int,
    states: Floats,
    layer: int,
    rows: Ints,
    tables: Ints,
    out: Floats,
) -> None:
    """`Kernels.mamba2`."""
    heads, inner = len(decay), out.shape[1]
    width = (x.shape[1] - inner) // 2
    step = np.clip(softplus(gates[:, first : first + heads] + time_bias), np.float32(low), np.float32(high))
    value = x[:, :inner].reshape(len(x), heads, -1)
    key, query = (
        _spread(part.reshape(len(x), groups, -1), heads, False)
        for part in (x[:, inner : inner + width], x[:, inner + width :])
    )
    _scan(key, query, value, exp(decay * step), step, False, (states, layer, rows, tables), out)
    out += (skip[:, None] * value).reshape(out.shape)


def softplus(x: Floats) -> Floats:
    """Return log(1 + e^x)."""
    out: Floats = np.where(x > _LINEAR, x, log1p(exp(np.minimum(x, _LINEAR))))
    return out


def _unit(x: Floats) -> Floats:
    """Divide vectors along the last axis by their lengths."""
    out: Floats = x * (1 / np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + _UNIT))
    return out


def _spread(x: Floats, heads: int, tiled: bool) -> Floats:
    """Repeat x[M, key heads, K] to [M, heads, K]: tiled, or each key head for neighbouring heads."""
    fan = heads // x.shape[1]
    return np.tile(x, (1, fan, 1)) if tiled else np.repeat(x, fan, axis=1)


def _scan(
    key: Floats,
    query: Floats,
    value: Floats,
    decay: Floats,
    share: Floats,
    corrected: bool,
    places: tuple[Floats, int, Ints, Ints],
    out: Floats,
) -> None:
    """Update the state token by token: S = decay S + outer(key, share * change), and write query @ S to `out`.

    The change is the value; if `corrected` (the delta rule), the value minus key @ (decay S).
    """
    states, layer, rows, tables = places
    heads, size = value.shape[1:]
    numbers = heads * key.shape[2] * size
    done: list[tuple[int, Floats]] = []
    for begin, count, start, table in _rows(rows, tables):
        state = _before(states, layer, table, start)[states.shape[2] - numbers :].reshape(heads, -1, size)
        ends = dict(kept(table, start, count))
        for at in range(begin, begin + count):
            state = state * decay[at, :, None, None]
            change = value[at]
            if corrected:
                change = change - (state * key[at, :, :, None]).sum(axis=1)
            state = state + key[at, :, :, None] * (share[at, :, None] * change)[:, None]
            out[at] = (state * query[at, :, :, None]).sum(axis=1).reshape(-1)
            end = start + at - begin + 1
            if end in ends:
                done.append((ends[end], state))
    for block, state in done:
        states[block, layer, states.shape[2] - numbers :] = state.reshape(-1)


def gated_norm(
    x: Floats, gates: Floats, first: int, weight: Floats, size: int, eps: float, gate_first: bool, out: Floats
) -> None:
    """`Kernels.gated_norm`."""
    gate: Any = gates[:, first : first + x.shape[1]]
    gate = gate / (1 + exp(-gate))
    parts = (x * gate if gate_first else x).reshape(len(x), -1, size)
    mean = np.square(parts).sum(axis=-1, keepdims=True) / np.float32(size)
    normed = parts * (1 / np.sqrt(mean + np.float32(eps)))
    normed = (normed * weight.reshape(-1, size)).reshape(x.shape)
    out[:] = normed if gate_first else normed * gate


def gate_heads(x: Floats, qkv: Floats, size: int) -> None:
    """`Kernels.gate_heads`."""
    width = x.shape[1]
    gate = qkv[:, : 2 * width].reshape(len(x), -1, 2, size)[:, :, 1].reshape(x.shape)
    x *= 1 / (1 + exp(-gate))


__all__ = ["MOST_REACH", "convolve", "delta", "gate_heads", "gated_norm", "kept", "mamba2", "softplus"]
