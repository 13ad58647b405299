"""Functions that all Triton kernels share: rounding to 16 bits, products and activations without overflow."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
"""Whether the kernels run in Triton's interpreter, which cuts float32 off where GPUs round to bfloat16."""


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Round float32 numbers to `dtype`, to nearest and ties to even, in the interpreter too."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.where(x == x, near, x).to(tl.bfloat16)
    else:
        return x.to(dtype)


@triton.jit
def product(a, b, total):
    """Return total + a @ b in float32. The interpreter multiplies the bits of bfloat16 numbers: it gets float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + e^-x)."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Return tanh(x), without overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    whole = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -whole, whole)


@triton.jit
def softplus(x):
    """Return log(1 + e^x), without overflow."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


def power_of_two(size: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `size` and `least`."""
    return max(least, int(triton.next_power_of_2(size)))
