"""Rotary positions, norms of heads, and writing keys and values to the paged pool, one program a token and head."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from cairn.kernels.triton.rounding import narrow, power_of_two

Tensor = Any


@triton.jit
def _turned(source, weight, angles, place, size, turns, factor, HAS_NORM: tl.constexpr, TURNS: tl.constexpr):
    """Return numbers `place` of a head, normed by factor * weight and rotated."""
    inside = place < size
    own = tl.load(source + place, mask=inside, other=0.0)
    if HAS_NORM:
        own *= factor * tl.load(weight + place, mask=inside, other=0.0)
    if TURNS:
        half = turns // 2
        turned = place < turns
        second = place >= half
        other_place = tl.where(second, place - half, place + half)
        other = tl.load(source + other_place, mask=turned, other=0.0)
        if HAS_NORM:
            other *= factor * tl.load(weight + other_place, mask=turned, other=0.0)
        pair = tl.where(second, place - half, place)
        cos = tl.load(angles + pair, mask=turned, other=1.0)
        sin = tl.load(angles + half + pair, mask=turned, other=0.0)
        own = tl.where(turned, tl.where(second, own * cos + other * sin, own * cos - other * sin), own)
    return own


@triton.jit
def _rope_write(
    qkv, qkv_stride, angles, q_norm, k_norm, eps, kv, layer, slots, query, block_stride, layer_stride, value_stride,
    size, turns, heads, kv_heads, q_step,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, Q_ALL: tl.constexpr, K_ALL: tl.constexpr, TURNS: tl.constexpr,
    LATE: tl.constexpr, WIDE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, WIDE)
    inside = place < size
    line, angle = qkv + token * qkv_stride, angles + token * turns
    first_key = heads * q_step * size
    if head < heads:
        made = _head(line, head * q_step * size, q_step * size, heads, head, q_norm, angle, eps, place, size, turns,
                     Q_NORM, Q_ALL, TURNS, LATE, WIDE)  # fmt: skip
        tl.store(query + (token * heads + head) * size + place, made, mask=inside)
    else:
        own = head - heads
        slot = tl.load(slots + token).to(tl.int64)
        target = kv + (slot // BLOCK_TOKENS) * block_stride + layer * layer_stride
        target += (slot % BLOCK_TOKENS) * size
        if own < kv_heads:
            made = _head(line, first_key + own * size, size, kv_heads, own, k_norm, angle, eps, place, size, turns,
                         K_NORM, K_ALL, TURNS, LATE, WIDE)  # fmt: skip
            target += own * BLOCK_TOKENS * size
        else:
            made = tl.load(line + first_key + own * size + place, mask=inside, other=0.0)
            target += value_stride + (own - kv_heads) * BLOCK_TOKENS * size
        tl.store(target + place, narrow(made, kv.dtype.element_ty), mask=inside)


@triton.jit
def _head(
    line, first, step, heads, head, weight, angles, eps, place, size, turns,
    NORM: tl.constexpr, ALL: tl.constexpr, TURNS: tl.constexpr, LATE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return one head normed and rotated; the norm is over the head, or (ALL) over all heads of the token."""
    inside = place < size
    source = line + first
    # `late` norms what was rotated, otherwise a norm comes first.
    turn_first: tl.constexpr = TURNS and LATE
    factor = 1.0
    if NORM:
        if ALL:
            weight += head * size
            total = tl.zeros((WIDE,), tl.float32)
            begin = source - head * step
            for one in range(0, heads):
                part = _turned(begin + one * step, weight, angles, place, size, turns, 1.0, False, turn_first)
                total = tl.fma(part, part, total)
            factor = 1.0 / tl.sqrt(tl.sum(total) / (heads * size) + eps)
        else:
            part = _turned(source, weight, angles, place, size, turns, 1.0, False, turn_first)
            factor = 1.0 / tl.sqrt(tl.sum(part * part) / size + eps)
    if LATE:
        made = _turned(source, weight, angles, place, size, turns, 1.0, False, TURNS)
        if NORM:
            made *= factor * tl.load(weight + place, mask=inside, other=0.0)
        return made
    else:
        return _turned(source, weight, angles, place, size, turns, factor, NORM, TURNS)


def rope_write(
    qkv: Tensor,
    angles: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    kv: Tensor,
    layer: int,
    slots: Tensor,
    query: Tensor,
    late: bool,
) -> None:
    """Run `Kernels.rope_write`."""
    count, heads, size = query.shape
    kv_heads, block_tokens = kv.shape[3], kv.shape[4]
    if not count:
        return
    wide = qkv.shape[1] // size - 2 * kv_heads
    _rope_write[(count, heads + 2 * kv_heads)](
        qkv, qkv.stride(0), query if angles is None else angles, query if q_norm is None else q_norm,
        query if k_norm is None else k_norm, eps, kv, layer, slots, query, kv.stride(0), kv.stride(1), kv.stride(2),
        size, 0 if angles is None else 2 * angles.shape[-1], heads, kv_heads, wide // heads,
        q_norm is not None, k_norm is not None, q_norm is not None and len(q_norm) != size,
        k_norm is not None and len(k_norm) != size, angles is not None, late, WIDE=power_of_two(size),
        BLOCK_TOKENS=block_tokens,
    )  # fmt: skip
