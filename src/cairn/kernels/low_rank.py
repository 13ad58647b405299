"""The side path of adapters, for kernel sets whose arrays Python may index: the meaning of `Kernels.adapt`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cairn.kernels.base import LowRank


def adapt(
    product: Callable[[Any, Any], Any],
    x: Any,
    rows: Sequence[Sequence[int]],
    slots: Sequence[Sequence[int]],
    scales: Sequence[Sequence[float]],
    adapters: Sequence[LowRank],
    out: Any,
) -> None:
    """Add each row's adapters to its tokens of `out`, as `Kernels.adapt` says. `product(x, matrix)` multiplies."""
    by_slot = {one.slot: one for one in adapters}
    for (first, count, _), own, factors in zip(rows, slots, scales, strict=True):
        part = slice(first, first + count)
        for slot, factor in zip(own, factors, strict=True):
            if (one := by_slot.get(slot)) is None:
                continue
            low = product(x[part], one.down) * factor
            for up in one.ups:
                out[part, up.column : up.column + up.out] += product(low[:, up.first : up.first + up.rank], up.matrix)
