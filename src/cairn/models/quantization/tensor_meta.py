"""Shape, number format and memory of tensors before they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cairn.kernels.base import BLOCK, GROUP
from cairn.kernels.codebooks import ROW_FORMATS


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor as it will be read: an array, or codes (`kernels.base.Packed`)."""

    shape: tuple[int, ...]
    dtype: str
    """float32, float16 or bfloat16; of codes int8, or uint8 for 4 to 6 bits."""
    made: int
    """Bytes of memory that reading takes; 0 for a view of the mapped file."""
    scale: str = ""
    """Type of the codes' scales; "" for plain numbers."""
    minimum: str = ""
    """Type of the codes' minima; "" for none."""
    block: Literal[0, 4, 5, 6] = 0
    """Bits of codes in super-blocks; 0 for everything else."""
    table: str = ""
    """As `Quantized.table`, or `RowBlocks.kind`."""

    @property
    def bits(self) -> int:
        """Bits of a number: 2 to 8 for codes, 16 or 32."""
        if self.table in ROW_FORMATS:
            return ROW_FORMATS[self.table].bits
        return (
            4
            if self.table
            else self.block or {"uint8": 4, "int8": 8, "float16": 16, "bfloat16": 16, "float32": 32}[self.dtype]
        )

    @property
    def form(self) -> str:
        """Name as in `kernels.native.form_of`."""
        if not self.scale:
            return self.dtype
        if self.table in ROW_FORMATS:
            return self.table
        if self.block:
            return "iq4_xs" if self.table else f"q{self.block}_k"
        half = self.scale == "float16" and self.minimum in ("", "float16")
        return f"{self.table or f'int{self.bits}'} {'half' if half else 'float'}{' minimum' * bool(self.minimum)}"


def outline(weights: Mapping[str, Any], name: str) -> TensorMeta:
    """Return the meta of one tensor without reading it.

    Weights that build tensors on demand have a method `outline` that is asked instead.
    """
    known: Callable[[str], TensorMeta] | None = getattr(weights, "outline", None)
    if known is not None:
        return known(name)
    array = weights[name]
    return TensorMeta(array.shape, str(array.dtype), 0)


def outlines(weights: Mapping[str, Any]) -> dict[str, TensorMeta]:
    """Return the meta of every tensor without reading them."""
    return {name: outline(weights, name) for name in weights}


def row_blocks(shape: tuple[int, ...], kind: str) -> TensorMeta:
    """Return the meta of codebook rows."""
    return TensorMeta(shape, "uint8", math.prod(shape) // BLOCK * ROW_FORMATS[kind].bytes, "float16", table=kind)


def blocks(shape: tuple[int, ...], bits: Literal[4, 5, 6], table: str = "") -> TensorMeta:
    """Return the meta of codes in super-blocks."""
    count = math.prod(shape)
    if table:
        return TensorMeta(shape, "int8", count + count // GROUP + 2 * (count // BLOCK), "int8", "", bits, table)
    scale, minimum = ("int8", "") if bits == 6 else ("uint8", "uint8")
    beside = count // 16 + (2 if bits == 6 else 4) * (count // BLOCK)
    return TensorMeta(shape, "uint8", count + beside, scale, minimum, bits)


def codes(
    shape: tuple[int, ...], bits: int, scale: str, minimum: str = "", passing: int = 0, table: str = ""
) -> TensorMeta:
    """Return the meta of groups of codes; making them takes `passing` more bytes."""
    groups = math.prod(shape) // GROUP
    beside = sum({"float16": 2, "float32": 4}[one] * groups for one in (scale, minimum) if one)
    made = math.prod(shape) + beside + passing
    return TensorMeta(shape, "uint8" if bits == 4 else "int8", made, scale, minimum, table=table)
