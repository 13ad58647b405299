"""Layers that keep a state: short convolution, gated delta net and Mamba 2, token by token within a row."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from cairn.kernels.triton.rounding import power_of_two, sigmoid, softplus
from cairn.types.model_spec import BLOCK_TOKENS

Tensor = Any

CHANNELS, COLUMNS = 128, 32
"""Channels of a convolution, and columns of a head's state, that one program keeps."""


@triton.jit
def _convolve(
    x, x_stride, first, weight, bias, states, block_stride, layer_at, rows, tables, table_stride, out, out_stride,
    channels,
    REACH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, GATED: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    begin, count, start = tl.load(rows + row * 3), tl.load(rows + row * 3 + 1), tl.load(rows + row * 3 + 2)
    table = tables + row.to(tl.int64) * table_stride
    before = tl.maximum(start - 1, 0) // BLOCK_TOKENS
    source = states + tl.load(table + before).to(tl.int64) * block_stride + layer_at
    for token in range(0, count):
        total = tl.zeros((CHANNELS,), tl.float32)
        for tap in tl.static_range(REACH):
            at = channel * 0 + (token - (REACH - 1) + tap)
            number = _input(x, x_stride, first, begin, at, channel, channels, inside, GATED)
            kept = tl.load(
                source + (at + REACH - 1) * channels + channel,
                mask=inside & (at < 0) & (channel * 0 + start > 0),
                other=0.0,
            )
            part = tl.where(at < 0, kept, number) * tl.load(weight + tap * channels + channel, mask=inside, other=0.0)
            total = part if tap == 0 else total + part
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=inside, other=0.0)
        if SILU:
            total *= sigmoid(total)
        line = begin.to(tl.int64) + token
        if GATED:
            total *= tl.load(x + line * x_stride + channels + channel, mask=inside, other=0.0)
        tl.store(out + line * out_stride + channel, total, mask=inside)


@triton.jit
def _input(x, x_stride, first, begin, at, channel, channels, inside, GATED: tl.constexpr):
    """Return a token's inputs; zero for tokens before the row."""
    line = x + (begin + tl.maximum(at, 0)).to(tl.int64) * x_stride
    here = inside & (at >= 0)
    if GATED:
        return tl.load(line + channel, mask=here, other=0.0) * tl.load(
            line + 2 * channels + channel, mask=here, other=0.0
        )
    else:
        return tl.load(line + first + channel, mask=here, other=0.0)


@triton.jit
def _keep_inputs(
    x, x_stride, first, states, block_stride, layer_at, old, rows, tables, table_stride, channels,
    REACH: tl.constexpr, GATED: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the last REACH - 1 inputs at each boundary and at the end. old[B, REACH - 1, C]: those before each row."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    begin, count, start = tl.load(rows + row * 3), tl.load(rows + row * 3 + 1), tl.load(rows + row * 3 + 2)
    table = tables + row.to(tl.int64) * table_stride
    before = old + row.to(tl.int64) * (REACH - 1) * channels
    for index in range(start // BLOCK_TOKENS, (start + count - 1) // BLOCK_TOKENS + 1):
        block = tl.load(table + index).to(tl.int64)
        end = tl.minimum((index + 1) * BLOCK_TOKENS, start + count) - start
        target = states + tl.maximum(block, 0) * block_stride + layer_at
        for tap in tl.static_range(REACH - 1):
            at = channel * 0 + (end - (REACH - 1) + tap)
            number = _input(x, x_stride, first, begin, at, channel, channels, inside, GATED)
            kept = tl.load(before + (at + REACH - 1) * channels + channel, mask=inside & (at < 0), other=0.0)
            tl.store(
                target + tap * channels + channel,
                tl.where(at < 0, kept, number),
                mask=inside & (channel * 0 + block >= 0),
            )


def convolve(
    x: Tensor,
    first: int,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    gated: bool,
    states: Tensor,
    layer: int,
    rows: Tensor,
    tables: Tensor,
    out: Tensor,
) -> None:
    """Run `Kernels.convolve`."""
    channels = out.shape[1]
    reach = weight.numel() // channels
    if not len(rows) or not len(x):
        return
    old = old_states(states, layer, rows, tables)[:, : (reach - 1) * channels].contiguous()
    grid = len(rows), triton.cdiv(channels, CHANNELS)
    places = states.stride(0), layer * states.stride(1)
    _convolve[grid](
        x, x.stride(0), first, weight, weight if bias is None else bias, states, *places, rows, tables,
        tables.stride(0), out, out.stride(0), channels,
        REACH=reach, HAS_BIAS=bias is not None, SILU=silu, GATED=gated, CHANNELS=CHANNELS, BLOCK_TOKENS=BLOCK_TOKENS,
    )  # fmt: skip
    _keep_inputs[grid](
        x, x.stride(0), first, states, *places, old, rows, tables, tables.stride(0), channels,
        REACH=reach, GATED=gated, CHANNELS=CHANNELS, BLOCK_TOKENS=BLOCK_TOKENS,
    )  # fmt: skip


def old_states(states: Tensor, layer: int, rows: Tensor, tables: Tensor) -> Tensor:
    """Return copies [B, N] of the states that rows begin with, without asking the host."""
    start = rows[:, 2].long()
    block = tables.gather(1, ((start - 1).clamp(min=0) // BLOCK_TOKENS)[:, None])[:, 0].long()
    found = states[block.clamp(min=0), layer]
    return torch.where((start > 0)[:, None], found, 0.0)


@triton.jit
def _scan(
    key, query, value, decay, share, old, old_first, states, block_stride, state_at, rows, tables, table_stride, out,
    out_stride, heads, key_size, value_size,
    CORRECTED: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Update some columns of one head's state [K, V] by a row's tokens in turn: see `Kernels.delta` and `mamba2`."""
    row, head = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    line = tl.arange(0, KEYS)
    inside, there = column < value_size, line < key_size
    whole = there[:, None] & inside[None, :]
    begin, count, start = tl.load(rows + row * 3), tl.load(rows + row * 3 + 1), tl.load(rows + row * 3 + 2)
    table = tables + row.to(tl.int64) * table_stride
    own = (head * key_size + line)[:, None] * value_size + column[None, :]
    state = tl.load(old + row.to(tl.int64) * old_first + own, mask=whole, other=0.0)
    for token in range(0, count):
        at = (begin.to(tl.int64) + token) * heads + head
        k = tl.load(key + at * key_size + line, mask=there, other=0.0)
        q = tl.load(query + at * key_size + line, mask=there, other=0.0)
        v = tl.load(value + at * value_size + column, mask=inside, other=0.0)
        state *= tl.load(decay + at)
        if CORRECTED:
            v -= tl.sum(state * k[:, None], axis=0)
        state += k[:, None] * (tl.load(share + at) * v)[None, :]
        made = tl.sum(state * q[:, None], axis=0)
        tl.store(out + (begin.to(tl.int64) + token) * out_stride + head * value_size + column, made, mask=inside)
        end = start + token + 1
        block = tl.load(table + (end - 1) // BLOCK_TOKENS).to(tl.int64)
        # The interpreter wants a condition of one number as a block.
        last = own * 0 + end
        kept = ((last % BLOCK_TOKENS == 0) | (last == start + count)) & (own * 0 + block >= 0)
        tl.store(states + tl.maximum(block, 0) * block_stride + state_at + own, state, mask=whole & kept)


def scan(
    key: Tensor,
    query: Tensor,
    value: Tensor,
    decay: Tensor,
    share: Tensor,
    corrected: bool,
    states: Tensor,
    layer: int,
    rows: Tensor,
    tables: Tensor,
    out: Tensor,
) -> None:
    """Update the states by key[M, heads, K], query and value[M, heads, V], and write the outputs."""
    count, heads, size = value.shape
    inner = key.shape[2]
    if not len(rows) or not count:
        return
    numbers = heads * inner * size
    old = old_states(states, layer, rows, tables)[:, states.shape[2] - numbers :].contiguous()
    at = layer * states.stride(1) + states.shape[2] - numbers
    _scan[(len(rows), heads, triton.cdiv(size, COLUMNS))](
        key.contiguous(), query.contiguous(), value.contiguous(), decay.contiguous(), share.contiguous(), old, numbers,
        states, states.stride(0), at, rows, tables, tables.stride(0), out, out.stride(0), heads, inner, size,
        CORRECTED=corrected, KEYS=power_of_two(inner), COLUMNS=COLUMNS, BLOCK_TOKENS=BLOCK_TOKENS,
    )  # fmt: skip


@triton.jit
def _gates(gates, stride, first, decay, time_bias, fades, shares, heads, low, high, CLAMPED: tl.constexpr,
           WIDE: tl.constexpr):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    inside = head < heads
    line = gates + token * stride + first + head
    if CLAMPED:
        step = softplus(tl.load(line, mask=inside, other=0.0) + tl.load(time_bias + head, mask=inside, other=0.0))
        step = tl.minimum(tl.maximum(step, low), high)
        share = step
    else:
        share = sigmoid(tl.load(line, mask=inside, other=0.0))
        given = tl.load(line + heads, mask=inside, other=0.0)
        step = softplus(given + tl.load(time_bias + head, mask=inside, other=0.0))
    fade = tl.exp(tl.load(decay + head, mask=inside, other=0.0) * step)
    tl.store(fades + token * heads + head, fade, mask=inside)
    tl.store(shares + token * heads + head, share, mask=inside)


def gates(
    given: Tensor, first: int, decay: Tensor, time_bias: Tensor, limits: tuple[float, float] | None = None
) -> tuple[Tensor, Tensor]:
    """Return what each token multiplies a head's state with, and its share of the change: [M, heads] each.

    With `limits` as in `Kernels.mamba2`, otherwise as in `Kernels.delta`.
    """
    heads = len(decay)
    found = torch.empty((2, len(given), heads), device=given.device)
    if len(given):
        _gates[(len(given),)](
            given, given.stride(0), first, decay, time_bias, found[0], found[1], heads, *(limits or (0.0, 0.0)),
            CLAMPED=limits is not None, WIDE=power_of_two(heads),
        )  # fmt: skip
    return found[0], found[1]


@triton.jit
def _unit(x, x_stride, out, size, factor, WIDE: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, WIDE)
    part = tl.load(x + token * x_stride + head * size + place, mask=place < size, other=0.0)
    made = part * (factor / tl.sqrt(tl.sum(part * part) + 1e-6))
    tl.store(out + (token * tl.num_programs(1) + head) * size + place, made, mask=place < size)


def unit(x: Tensor, heads: int, factor: float = 1.0) -> Tensor:
    """Return x[M, heads D] as [M, heads, D], each head divided by its length and multiplied by a factor."""
    size = x.shape[1] // heads
    out = torch.empty((len(x), heads, size), device=x.device)
    if len(x):
        _unit[(len(x), heads)](x, x.stride(0), out, size, factor, WIDE=power_of_two(size))
    return out


def query_factor(size: int) -> float:
    """Return what the queries of a gated delta net are multiplied by."""
    return 1.0 / math.sqrt(size)
