"""Paged attention: splits of a fixed number of positions, merged in order, so that no batch changes a result.

One program computes a tile of a row's tokens for one head of keys, with the query heads that share it. If every row has
one token, splits run in parallel and a second kernel merges them; otherwise a program takes its splits in turn. The
arithmetic of both is the same.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from cairn.kernels.triton.rounding import narrow, power_of_two, product, tanh
from cairn.types.model_spec import BLOCK_TOKENS

Tensor = Any

SPLIT, LINES = 256, 16
"""Positions of a split; query lines (tokens times heads that share keys) of a program."""
NONE = tl.constexpr(-float("inf"))


@triton.jit
def _merge(total, peak, weight, part, part_peak, part_weight):
    """Merge two partial results: sums of values, peaks of scores, and sums of weights."""
    high = tl.maximum(peak, part_peak)
    safe = tl.where(high == NONE, 0.0, high)
    own, other = tl.exp(peak - safe), tl.exp(part_peak - safe)
    total = tl.fma(total, own[:, None] + tl.zeros_like(total), part * other[:, None])
    return total, high, tl.fma(weight, own, part_weight * other)


@triton.jit
def _lowest(position, window, CHUNKED: tl.constexpr, WINDOW: tl.constexpr):
    """Return the lowest position that `position` sees."""
    if CHUNKED:
        return position - position % window
    elif WINDOW:
        return tl.maximum(position - window + 1, 0)
    else:
        return position * 0


@triton.jit
def _partial(
    query, query_inside, size, rest, keys, layer_at, block_stride, value_stride, slot_stride, table, own, seen_to,
    low, high, window, scale, cap,
    WIDE: tl.constexpr, REST: tl.constexpr, VALUE: tl.constexpr, CHUNKED: tl.constexpr, WINDOW: tl.constexpr,
    BOTH: tl.constexpr, CAPPED: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Attend to the positions [low, high) of one split, a block of the pool at a time."""
    kind: tl.constexpr = keys.dtype.element_ty
    place, part_place, value_place = tl.arange(0, WIDE), tl.arange(0, REST), tl.arange(0, VALUE)
    given = narrow(tl.load(query[:, None] + place[None, :], mask=query_inside[:, None] & (place < size)[None, :],
                           other=0.0), kind)  # fmt: skip
    if REST > 1:
        more = narrow(tl.load(query[:, None] + size + part_place[None, :],
                              mask=query_inside[:, None] & (part_place < rest)[None, :], other=0.0), kind)  # fmt: skip
    total = tl.zeros((LINES, VALUE), tl.float32)
    peak, weight = tl.full((LINES,), NONE, tl.float32), tl.zeros((LINES,), tl.float32)
    lowest = _lowest(own, window, CHUNKED, WINDOW)
    offset = tl.arange(0, TILE)
    for at in range(low // TILE * TILE, high, TILE):
        block = tl.load(table + at // TILE)
        other = at + offset
        # Offsets within a block fit 32 bits; the block's own does not.
        line = keys + tl.maximum(block, 0).to(tl.int64) * block_stride + layer_at
        there = (other < high) & (other * 0 + block >= 0)
        found = tl.load(line + offset[None, :] * slot_stride + place[:, None],
                        mask=there[None, :] & (place < size)[:, None], other=0.0)  # fmt: skip
        scores = product(given, found, tl.zeros((LINES, TILE), tl.float32))
        if REST > 1:
            found = tl.load(line + offset[None, :] * slot_stride + size + part_place[:, None],
                            mask=there[None, :] & (part_place < rest)[:, None], other=0.0)  # fmt: skip
            scores = product(more, found, scores)
        scores *= scale
        if CAPPED:
            scores = cap * tanh(scores / cap)
        seen = (other < high)[None, :] & (other[None, :] <= seen_to[:, None]) & query_inside[:, None]
        if BOTH:
            if WINDOW:
                seen &= (other[None, :] < own[:, None] + window) & (other[None, :] > own[:, None] - window)
        else:
            seen &= other[None, :] >= lowest[:, None]
        scores = tl.where(seen, scores, NONE)
        high_score = tl.maximum(peak, tl.max(scores, axis=1))
        safe = tl.where(high_score == NONE, 0.0, high_score)
        shares = tl.exp(scores - safe[:, None])
        fade = tl.exp(peak - safe)
        values = tl.load(line + value_stride + offset[:, None] * slot_stride + value_place[None, :],
                         mask=there[:, None] & (value_place < size)[None, :], other=0.0)  # fmt: skip
        total = product(narrow(shares, kind), values, total * fade[:, None])
        weight = tl.fma(weight, fade, tl.sum(shares, axis=1))
        peak = high_score
    return total, peak, weight


@triton.jit
def _finished(total, peak, weight, sink, HAS_SINKS: tl.constexpr):
    """Return the attention: sums of values divided by the sum of weights, sinks included."""
    if HAS_SINKS:
        high = tl.maximum(peak, sink)
        fade = tl.exp(peak - high)
        return total * (fade / tl.fma(weight, fade, tl.exp(sink - high)))[:, None]
    else:
        return total / tl.where(weight == 0.0, 1.0, weight)[:, None]


@triton.jit
def _attend(
    query, kv, layer, rows, tables, table_stride, window, scale, cap, sinks, out, partial, peaks,
    block_stride, layer_stride, head_stride, value_stride, slot_stride, size, rest, tiles, splits, heads, kv_heads,
    value_size,
    CHUNKED: tl.constexpr, WINDOW: tl.constexpr, BOTH: tl.constexpr, CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr,
    PARALLEL: tl.constexpr, FAN: tl.constexpr, TOKENS: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr,
    VALUE: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    key_head, split = tl.program_id(1), tl.program_id(2)
    begin, count, start = tl.load(rows + row * 3), tl.load(rows + row * 3 + 1), tl.load(rows + row * 3 + 2)
    if tile * TOKENS >= count:
        return
    lines = tl.arange(0, LINES)
    token, head = tile * TOKENS + lines // FAN, key_head * (heads // kv_heads) + lines % FAN
    inside = (lines // FAN < TOKENS) & (token < count) & (lines % FAN < heads // kv_heads)
    own = start + token
    end = tl.minimum(start + count, start + (tile + 1) * TOKENS)
    low = _lowest(start + tile * TOKENS, window, CHUNKED, WINDOW)
    if BOTH:
        end = start + count
        seen_to = own * 0 + end
        if WINDOW:
            end = tl.minimum(end, start + (tile + 1) * TOKENS + window)
    else:
        seen_to = own
    line = (begin + token).to(tl.int64) * heads + head
    queries = query + line * (size + rest)
    table, layer_at = tables + row.to(tl.int64) * table_stride, layer * layer_stride + key_head * head_stride
    if PARALLEL:
        first = split * SPLIT
        if (first >= end) | (first + SPLIT <= low):
            return
        total, peak, weight = _partial(
            queries, inside, size, rest, kv, layer_at, block_stride, value_stride, slot_stride, table, own, seen_to,
            tl.maximum(first, low), tl.minimum(first + SPLIT, end), window, scale, cap,
            WIDE, REST, VALUE, CHUNKED, WINDOW, BOTH, CAPPED, LINES, TILE,
        )  # fmt: skip
        at = line * splits + split
        place = tl.arange(0, VALUE)
        tl.store(partial + at[:, None] * value_size + place[None, :], total,
                 mask=inside[:, None] & (place < value_size)[None, :])  # fmt: skip
        tl.store(peaks + at * 2, peak, mask=inside)
        tl.store(peaks + at * 2 + 1, weight, mask=inside)
    else:
        total = tl.zeros((LINES, VALUE), tl.float32)
        peak, weight = tl.full((LINES,), NONE, tl.float32), tl.zeros((LINES,), tl.float32)
        for first in range(low // SPLIT * SPLIT, end, SPLIT):
            part, part_peak, part_weight = _partial(
                queries, inside, size, rest, kv, layer_at, block_stride, value_stride, slot_stride, table, own, seen_to,
                tl.maximum(first, low), tl.minimum(first + SPLIT, end), window, scale, cap,
                WIDE, REST, VALUE, CHUNKED, WINDOW, BOTH, CAPPED, LINES, TILE,
            )  # fmt: skip
            total, peak, weight = _merge(total, peak, weight, part, part_peak, part_weight)
        sink = tl.zeros((LINES,), tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=inside, other=0.0)
        made = _finished(total, peak, weight, sink, HAS_SINKS)
        place = tl.arange(0, VALUE)
        tl.store(out + line[:, None] * value_size + place[None, :], made,
                 mask=inside[:, None] & (place < value_size)[None, :])  # fmt: skip


@triton.jit
def _merge_splits(
    partial, peaks, rows, window, sinks, out, splits, heads, value_size,
    CHUNKED: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, VALUE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Merge the splits of rows of one token, one program a row and head."""
    row, head = tl.program_id(0), tl.program_id(1) + tl.arange(0, 1)
    begin, start = tl.load(rows + row * 3), tl.load(rows + row * 3 + 2)
    line = begin.to(tl.int64) * heads + head
    place = tl.arange(0, VALUE)
    total = tl.zeros((1, VALUE), tl.float32)
    peak, weight = tl.full((1,), NONE, tl.float32), tl.zeros((1,), tl.float32)
    low = _lowest(start, window, CHUNKED, WINDOW)
    for split in range(low // SPLIT, start // SPLIT + 1):
        at = line * splits + split
        part = tl.load(
            partial + at[:, None] * value_size + place[None, :], mask=(place < value_size)[None, :], other=0.0
        )
        total, peak, weight = _merge(total, peak, weight, part, tl.load(peaks + at * 2), tl.load(peaks + at * 2 + 1))
    sink = tl.zeros((1,), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head)
    made = _finished(total, peak, weight, sink, HAS_SINKS)
    tl.store(out + line[:, None] * value_size + place[None, :], made, mask=(place < value_size)[None, :])


def attend(
    query: Tensor,
    kv: Tensor,
    layer: int,
    rows: Tensor,
    tables: Tensor,
    window: int,
    scale: float,
    out: Tensor,
    softcap: float = 0.0,
    both: bool = False,
    sinks: Tensor | None = None,
    *,
    most: int,
    rest: int = 0,
) -> None:
    """Run `Kernels.attention`; `most`: tokens of the longest row.

    `rest`: the last numbers of a latent that are no value. Then keys are latents, and out[M, Q, L] is without them.
    """
    count, heads, whole = query.shape
    if not count:
        return
    size, kv_heads = whole - rest, kv.shape[3]
    fan = power_of_two(heads // kv_heads)
    lines = max(LINES, fan)
    tokens = lines // fan
    tiles, splits = triton.cdiv(most, tokens), triton.cdiv(tables.shape[1] * BLOCK_TOKENS, SPLIT)
    parallel = most == 1 and splits > 1 and not both
    partial = torch.empty((count * heads * splits, size) if parallel else (1,), device=query.device)
    peaks = torch.empty((count * heads * splits, 2) if parallel else (1,), device=query.device)
    given = query if sinks is None else sinks
    _attend[(len(rows) * tiles, kv_heads, splits if parallel else 1)](
        query, kv, layer, rows, tables, tables.stride(0), abs(window), scale, softcap, given, out, partial, peaks,
        kv.stride(0), kv.stride(1), kv.stride(3), 0 if rest else kv.stride(2), kv.stride(4), size, rest, tiles, splits,
        heads, kv_heads, size,
        CHUNKED=window < 0, WINDOW=window > 0, BOTH=both, CAPPED=softcap > 0, HAS_SINKS=sinks is not None,
        PARALLEL=parallel, FAN=fan, TOKENS=tokens, WIDE=power_of_two(size, 16),
        REST=power_of_two(rest, 16) if rest else 1, VALUE=power_of_two(size, 16), LINES=lines,
        TILE=BLOCK_TOKENS, SPLIT=SPLIT,
    )  # fmt: skip
    if parallel:
        _merge_splits[(len(rows), heads)](
            partial, peaks, rows, abs(window), given, out, splits, heads, size,
            CHUNKED=window < 0, WINDOW=window > 0, HAS_SINKS=sinks is not None, VALUE=power_of_two(size, 16),
            SPLIT=SPLIT,
        )  # fmt: skip
