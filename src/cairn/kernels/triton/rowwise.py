"""Norms and activations, one program a token: sums run over a row in pieces of a fixed size."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from cairn.kernels.triton.rounding import power_of_two, sigmoid, tanh

Tensor = Any

PIECE = 1024
"""Largest piece of a row that a program sums at once."""


@triton.jit
def activated(x, kind: tl.constexpr):
    """Return an activation of `Kernels.activate`, or sigmoid."""
    if kind == "sigmoid":
        return sigmoid(x)
    elif kind == "silu":
        return x * sigmoid(x)
    elif kind == "tanh":
        return tanh(x)
    elif kind == "relu2":
        low = tl.maximum(x, 0.0)
        return low * low
    elif kind == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _norm(
    x, x_stride, weight, out, out_stride, width, eps,
    HAS_WEIGHT: tl.constexpr, SHARED: tl.constexpr, ADD: tl.constexpr, LAYER: tl.constexpr,
    bias, HAS_BIAS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Norm one group of one row: by its root mean square, or (LAYER) by its mean and variance."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, target = x + row * x_stride + group * width, out + row * out_stride + group * width
    places = tl.arange(0, PIECE)
    total = tl.zeros((PIECE,), tl.float32)
    mean = 0.0
    if LAYER:
        for at in range(0, width, PIECE):
            total += tl.load(source + at + places, mask=at + places < width, other=0.0)
        mean = tl.sum(total) / width
        total = tl.zeros((PIECE,), tl.float32)
    for at in range(0, width, PIECE):
        inside = at + places < width
        part = tl.where(inside, tl.load(source + at + places, mask=inside, other=0.0) - mean, 0.0)
        total = tl.fma(part, part, total)
    factor = 1.0 / tl.sqrt(tl.sum(total) / width + eps)
    for at in range(0, width, PIECE):
        inside = at + places < width
        made = (tl.load(source + at + places, mask=inside, other=0.0) - mean) * factor
        if HAS_WEIGHT:
            first = at if SHARED else group * width + at
            made *= tl.load(weight + first + places, mask=inside, other=0.0)
        if HAS_BIAS:
            made += tl.load(bias + at + places, mask=inside, other=0.0)
        if ADD:
            made += tl.load(target + at + places, mask=inside, other=0.0)
        tl.store(target + at + places, made, mask=inside)


def norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    out: Tensor,
    *,
    size: int = 0,
    add: bool = False,
    layer: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Write the norm of x[M, W] to `out`, in groups of `size` numbers (0: the whole row), and return `out`.

    The weight is [size], shared by the groups, or [W]. `add`: add to `out`. `layer`: subtract the mean, and add `bias`.
    """
    if not len(x):
        return out
    width = size or x.shape[1]
    shared = weight is None or len(weight) == width
    own = x if weight is None else weight
    _norm[(len(x), x.shape[1] // width)](
        x, x.stride(0), own, out, out.stride(0), width, eps,
        weight is not None, shared, add, layer, x if bias is None else bias, bias is not None,
        PIECE=min(PIECE, power_of_two(width)),
    )  # fmt: skip
    return out


@triton.jit
def _gate(gates, gates_stride, up, up_stride, out, out_stride, width, KIND: tl.constexpr, UP: tl.constexpr,
          PIECE: tl.constexpr):  # fmt: skip
    """Write act(g) * u of one piece of one row; act(g) alone without UP."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECE
    places = at + tl.arange(0, PIECE)
    inside = places < width
    g = tl.load(gates + row * gates_stride + places, mask=inside, other=0.0)
    if UP:
        u = tl.load(up + row * up_stride + places, mask=inside, other=0.0)
        if KIND == "clamped_silu":
            low = tl.minimum(g, 7.0)
            made = (tl.minimum(tl.maximum(u, -7.0), 7.0) + 1.0) * (low * sigmoid(1.702 * low))
        else:
            made = activated(g, KIND) * u
    else:
        made = activated(g, KIND)
    tl.store(out + row * out_stride + places, made, mask=inside)


def gate(gates: Tensor, up: Tensor | None, activation: str, out: Tensor) -> Tensor:
    """Write act(gates) * up to `out`, of `out`'s width; act(gates) alone without `up`. Return `out`."""
    if len(out):
        width = out.shape[1]
        piece = min(PIECE, power_of_two(width))
        _gate[(len(out), triton.cdiv(width, piece))](
            gates, gates.stride(0), gates if up is None else up, 0 if up is None else up.stride(0), out, out.stride(0),
            width, activation, up is not None, PIECE=piece,
        )  # fmt: skip
    return out


@triton.jit
def _statistics(x, x_stride, width, mean_out, square_out, PIECE: tl.constexpr):
    """Write the mean and the mean square of one row."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, PIECE)
    total, squares = tl.zeros((PIECE,), tl.float32), tl.zeros((PIECE,), tl.float32)
    for at in range(0, width, PIECE):
        part = tl.load(x + row * x_stride + at + places, mask=at + places < width, other=0.0)
        total += part
        squares = tl.fma(part, part, squares)
    tl.store(mean_out + row, tl.sum(total) / width)
    tl.store(square_out + row, tl.sum(squares) / width)


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the mean square of each row of x[M, W], as [M, 1]."""
    found = torch.empty((2, len(x), 1), device=x.device)
    if len(x):
        _statistics[(len(x),)](
            x, x.stride(0), x.shape[1], found[0], found[1], PIECE=min(PIECE, power_of_two(x.shape[1]))
        )
    return found[0], found[1]


@triton.jit
def _softmax(x, out, width, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, WIDE)
    part = tl.load(x + row * width + places, mask=places < width, other=-float("inf"))
    weights = tl.exp(part - tl.max(part))
    tl.store(out + row * width + places, weights / tl.sum(weights), mask=places < width)


def softmax(x: Tensor) -> Tensor:
    """Return the softmax of each row of x[M, W], a row at once."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if len(x):
        _softmax[(len(x),)](x, out, x.shape[1], WIDE=power_of_two(x.shape[1]))
    return out
