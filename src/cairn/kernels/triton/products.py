"""Products of activations with weights: floats by matrix units, packed codes with exact sums of their groups.

One tile size serves every number of rows, and a program sums over all inputs in order. So a row's result does not
depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from cairn.kernels.base import GROUP
from cairn.kernels.torch.weights import PackedCodes, TorchMatrix, pack
from cairn.kernels.triton.rounding import narrow, product

Tensor = Any

ROWS, OUTPUTS, INNER = 32, 64, 32
"""A tile: rows of activations, outputs, and inputs of one product."""
PACKED_OUTPUTS = 32
"""Outputs of a tile of packed weights: with 64, registers spill on Turing and on CDNA 2."""
LARGEST_CODE = tl.constexpr(127.0)
LEAST_MAGNITUDE = tl.constexpr(1e-30)


@triton.jit
def _dense(
    x, x_stride, weights, bias, out, out_stride, rows, outputs, inner,
    HAS_BIAS: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """out[M, N] = x[M, K] @ weights[N, K].T + bias, with x rounded to the weights' type."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    here, there = row < rows, output < outputs
    kind: tl.constexpr = weights.dtype.element_ty
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    source = x + row.to(tl.int64)[:, None] * x_stride
    wanted = weights + output.to(tl.int64)[None, :] * inner
    for at in range(0, inner, INNER):
        place = at + tl.arange(0, INNER)
        within = place < inner
        given = tl.load(source + place[None, :], mask=here[:, None] & within[None, :], other=0.0)
        part = tl.load(wanted + place[:, None], mask=within[:, None] & there[None, :], other=0.0)
        total = product(narrow(given, kind), part, total)
    if HAS_BIAS:
        total += tl.load(bias + output, mask=there, other=0.0)[None, :]
    target = out + row.to(tl.int64)[:, None] * out_stride + output[None, :]
    if ADD:
        total += tl.load(target, mask=here[:, None] & there[None, :], other=0.0)
    tl.store(target, total, mask=here[:, None] & there[None, :])


@triton.jit
def _round(x, x_stride, codes, scales, inner, GROUP: tl.constexpr):
    """Round one group of a row to codes of 8 bits: see `kernels.quantized`."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = group * GROUP + tl.arange(0, GROUP)
    part = tl.load(x + row * x_stride + place)
    most = tl.max(tl.abs(part))
    finite = most < float("inf")
    usable = finite & (most >= LEAST_MAGNITUDE)
    scaled = tl.where(usable, part, 0.0) * tl.where(usable, LARGEST_CODE / most, 0.0)
    # To nearest, ties to even: adding 1.5 * 2^23 leaves no bit behind the point.
    near = (scaled + 12582912.0) - 12582912.0
    tl.store(codes + row * inner + place, near.to(tl.int8))
    share = tl.where(usable, most / LARGEST_CODE, tl.where(finite, 0.0, float("nan")))
    tl.store(scales + row * (inner // GROUP) + group, share)


@triton.jit
def group_scale(scale, block_scale, output, group, groups, block_groups, there, BLOCKED: tl.constexpr):
    """Return the scales, or minima, of one group of each output in float32."""
    found = tl.load(scale + output * groups + group, mask=there, other=0.0).to(tl.float32)
    if BLOCKED:
        blocks = groups // block_groups
        found *= tl.load(block_scale + output * blocks + group // block_groups, mask=there, other=0.0).to(tl.float32)
    return found


@triton.jit
def _packed(
    codes, shares, weights, scale, minimum, block_scale, block_minimum, bias, out, out_stride, rows, outputs, inner,
    block_groups,
    BITS: tl.constexpr, BELOW: tl.constexpr, HAS_MINIMUM: tl.constexpr, BLOCKED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """out[M, N] = x @ weights.T + bias over codes of x in groups of GROUP, and of weights in groups of SPAN.

    Products of codes and their sums within a group are whole numbers below 2^24, so they are exact in float32.
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    here, there = row < rows, output < outputs
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    groups = inner // SPAN
    source = codes + row.to(tl.int64)[:, None] * inner
    width = inner // 2 if BITS == 4 else inner
    wanted = weights + output[None, :] * width
    for group in range(0, groups):
        place = group * SPAN + tl.arange(0, SPAN)
        given = tl.load(source + place[None, :], mask=here[:, None], other=0)
        if BITS == 4:
            pair = tl.load(wanted + (place // 2)[:, None], mask=there[None, :], other=0)
            part = ((pair >> ((place % 2) * 4)[:, None].to(tl.uint8)) & 15).to(tl.float32)
        else:
            part = tl.load(wanted + place[:, None], mask=there[None, :], other=0).to(tl.float32)
        # Whole numbers up to 255 are exact in bfloat16.
        exact = product(given.to(tl.float32).to(tl.bfloat16), (part - BELOW).to(tl.bfloat16), tl.zeros_like(total))
        share = tl.load(shares + row.to(tl.int64) * (inner // GROUP) + group * SPAN // GROUP, mask=here, other=0.0)
        factor = group_scale(scale, block_scale, output, group, groups, block_groups, there, BLOCKED)
        total = tl.fma(exact, share[:, None] * factor[None, :], total)
        if HAS_MINIMUM:
            low = group_scale(minimum, block_minimum, output, group, groups, block_groups, there, BLOCKED)
            whole = tl.sum(given.to(tl.int32), axis=1).to(tl.float32)
            total = tl.fma((whole * share)[:, None], low[None, :] + tl.zeros_like(total), total)
    if HAS_BIAS:
        total += tl.load(bias + output, mask=there, other=0.0)[None, :]
    target = out + row.to(tl.int64)[:, None] * out_stride + output[None, :]
    if ADD:
        total += tl.load(target, mask=here[:, None] & there[None, :], other=0.0)
    tl.store(target, total, mask=here[:, None] & there[None, :])


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes int8 [M, K] and scales [M, K / 32] of activations."""
    count, inner = x.shape
    codes = torch.empty((count, inner), dtype=torch.int8, device=x.device)
    scales = torch.empty((count, inner // GROUP), device=x.device)
    if count:
        _round[(count, inner // GROUP)](x, x.stride(0), codes, scales, inner, GROUP=GROUP)
    return codes, scales


class TritonMatrix(TorchMatrix):
    """A matrix whose products are kernels of ours."""

    __slots__ = ()

    def product(self, x: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """Write x[M, in] @ matrix + bias to out[M, out], or add it, and return `out`."""
        count = len(x)
        if x.stride(-1) != 1:
            x = x.contiguous()
        if out is None:
            out = torch.empty((count, self.outputs), device=x.device)
        if not count:
            return out
        first, low = 0, None
        for part, bias in zip(self.parts, self.biases, strict=True):
            target = out[:, first:]
            if isinstance(part, PackedCodes):
                low = round_rows(x) if low is None else low
                first += _packed_product(low, part, bias, target, self.inner, add=add)
            else:
                first += _dense_product(x, part, bias, target, add=add)
        return out

    @property
    def outputs(self) -> int:
        """Number of outputs of all parts."""
        return sum(len(one.codes) if isinstance(one, PackedCodes) else len(one) for one in self.parts)


def _dense_product(x: Tensor, part: Tensor, bias: Tensor | None, out: Tensor, *, add: bool) -> int:
    outputs, inner = part.shape
    _dense[(triton.cdiv(outputs, OUTPUTS), triton.cdiv(len(x), ROWS))](
        x, x.stride(0), part, part if bias is None else bias, out, out.stride(0), len(x), outputs, inner,
        bias is not None, add, ROWS=ROWS, OUTPUTS=OUTPUTS, INNER=INNER,
    )  # fmt: skip
    return int(outputs)


def _packed_product(
    low: tuple[Tensor, Tensor], part: PackedCodes, bias: Tensor | None, out: Tensor, inner: int, *, add: bool
) -> int:
    codes, shares = low
    outputs, groups = part.scale.shape
    block = part.block_scale
    # With a minimum, codes count from it; without one, codes of 4 bits from 8 and of 6 bits from 32.
    below = 0 if part.minimum is not None else {4: 8, 6: 32}.get(part.bits, 0)
    _packed[(triton.cdiv(outputs, PACKED_OUTPUTS), triton.cdiv(len(codes), ROWS))](
        codes, shares, part.codes, part.scale, part.scale if part.minimum is None else part.minimum,
        part.scale if block is None else block, part.scale if part.block_minimum is None else part.block_minimum,
        part.scale if bias is None else bias, out, out.stride(0), len(codes), outputs, inner,
        1 if block is None else groups // block.shape[1],
        BITS=part.bits, BELOW=below, HAS_MINIMUM=part.minimum is not None, BLOCKED=block is not None,
        HAS_BIAS=bias is not None, ADD=add, SPAN=inner // groups, GROUP=GROUP, ROWS=ROWS, OUTPUTS=PACKED_OUTPUTS,
    )  # fmt: skip
    return int(outputs)


def pack_matrix(weights: Sequence[Any], biases: Sequence[Any], tensor: Callable[[Any], Tensor]) -> TritonMatrix:
    """Pack matrices with the same input into one; `tensor` copies a numpy array to the device."""
    made = pack(weights, biases, tensor)
    parts = tuple(one if isinstance(one, PackedCodes) else one.contiguous() for one in made.parts)
    return TritonMatrix(parts, made.biases, made.inner)
