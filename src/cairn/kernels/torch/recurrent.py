"""Layers that keep a state: short convolution, gated delta net and Mamba 2, row by row. See `kernels.recurrent`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cairn.kernels.recurrent import kept
from cairn.types.model_spec import BLOCK_TOKENS

Tensor = Any
Ints = NDArray[np.int32]
Places = tuple[Tensor, int, Ints, Ints]
"""States, the layer's index, and rows and tables on the host."""

_UNIT = 1e-6


def _rows(places: Places) -> Iterator[tuple[int, int, int, Ints, Tensor]]:
    """Yield each row's first token, tokens, start, table, and a copy of the state that it begins with."""
    states, layer, rows, tables = places
    for (first, count, start), table in zip(rows.tolist(), tables, strict=False):
        if start:
            before = states[int(table[(start - 1) // BLOCK_TOKENS]), layer].clone()
        else:
            before = torch.zeros(states.shape[2], device=states.device)
        yield first, count, start, table, before


def convolve(
    x: Tensor,
    first: int,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    gated: bool,
    places: Places,
    out: Tensor,
) -> None:
    """`Kernels.convolve`."""
    states, layer = places[:2]
    channels = out.shape[1]
    taps = weight.reshape(-1, channels)
    reach = len(taps)
    given = x[:, :channels] * x[:, 2 * channels :] if gated else x[:, first : first + channels]
    windows: list[tuple[int, Tensor]] = []
    for begin, count, start, table, before in _rows(places):
        seen = torch.cat([before[: (reach - 1) * channels].reshape(reach - 1, channels), given[begin : begin + count]])
        total = seen[:count] * taps[0]
        for place in range(1, reach):
            total = total + seen[place : place + count] * taps[place]
        if bias is not None:
            total = total + bias
        if silu:
            total = torch.nn.functional.silu(total)
        if gated:
            total = total * x[begin : begin + count, channels : 2 * channels]
        out[begin : begin + count] = total
        windows += [(block, seen[end - start : end - start + reach - 1]) for end, block in kept(table, start, count)]
    for block, window in windows:
        states[block, layer, : (reach - 1) * channels] = window.reshape(-1)


def delta(
    x: Tensor,
    gates: Tensor,
    first: int,
    decay: Tensor,
    time_bias: Tensor,
    key_heads: int,
    tiled: bool,
    places: Places,
    out: Tensor,
) -> None:
    """`Kernels.delta`."""
    heads, width = len(decay), (x.shape[1] - out.shape[1]) // 2
    query, key = (_unit(part.reshape(len(x), key_heads, -1)) for part in (x[:, :width], x[:, width : 2 * width]))
    query = query / math.sqrt(width // key_heads)
    share = torch.sigmoid(gates[:, first : first + heads])
    step = torch.nn.functional.softplus(gates[:, first + heads : first + 2 * heads] + time_bias)
    value = x[:, 2 * width :].reshape(len(x), heads, -1)
    vectors = spread(key, heads, tiled), spread(query, heads, tiled), value
    _scan(*vectors, torch.exp(decay * step), share, True, places, out)


def mamba2(
    x: Tensor,
    gates: Tensor,
    first: int,
    decay: Tensor,
    time_bias: Tensor,
    skip: Tensor,
    limits: tuple[float, float],
    groups: int,
    places: Places,
    out: Tensor,
) -> None:
    """`Kernels.mamba2`."""
    heads, inner = len(decay), out.shape[1]
    width = (x.shape[1] - inner) // 2
    step = torch.nn.functional.softplus(gates[:, first : first + heads] + time_bias).clamp(*limits)
    value = x[:, :inner].reshape(len(x), heads, -1)
    key, query = (
        spread(part.reshape(len(x), groups, -1), heads, False)
        for part in (x[:, inner : inner + width], x[:, inner + width :])
    )
    _scan(key, query, value, torch.exp(decay * step), step, False, places, out)
    out += (skip[:, None] * value).reshape(out.shape)


def _unit(x: Tensor) -> Tensor:
    """Divide vectors along the last axis by their lengths."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _UNIT)


def spread(x: Tensor, heads: int, tiled: bool) -> Tensor:
    """Repeat x[M, key heads, K] to [M, heads, K]: tiled, or each key head for neighbouring heads."""
    fan = heads // x.shape[1]
    return x.repeat(1, fan, 1) if tiled else x.repeat_interleave(fan, dim=1)


def _scan(
    key: Tensor,
    query: Tensor,
    value: Tensor,
    decay: Tensor,
    share: Tensor,
    corrected: bool,
    places: Places,
    out: Tensor,
) -> None:
    """Update the states token by token, as `kernels.recurrent` does."""
    states, layer = places[:2]
    heads, size = value.shape[1:]
    numbers = heads * key.shape[2] * size
    done: list[tuple[int, Tensor]] = []
    for begin, count, start, table, before in _rows(places):
        state = before[len(before) - numbers :].reshape(heads, -1, size)
        ends = dict(kept(table, start, count))
        for at in range(begin, begin + count):
            state = state * decay[at, :, None, None]
            change = value[at]
            if corrected:
                change = change - (state * key[at, :, :, None]).sum(dim=1)
            state = state + key[at, :, :, None] * (share[at, :, None] * change)[:, None]
            out[at] = (state * query[at, :, :, None]).sum(dim=1).reshape(-1)
            end = start + at - begin + 1
            if end in ends:
                done.append((ends[end], state))
    for block, state in done:
        states[block, layer, states.shape[2] - numbers :] = state.reshape(-1)
