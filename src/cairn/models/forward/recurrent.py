"""The forward pass of a recurrent layer, which keeps a state instead of keys and values.

delta normed -> project -> convolve q, k, v -> gated delta rule -> norm, gated -> project mamba2 normed -> project ->
convolve v, B, C -> scan -> gate, then norm -> project conv normed -> project -> gated convolution -> project
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cairn.kernels.base import Array, Kernels, Matrix
from cairn.models.families.recurrent_spec import MIXER
from cairn.types.model_spec import Recurrence


@dataclass(frozen=True, slots=True)
class Recurrent:
    """One layer's packed weights; those that its kind lacks are None."""

    facts: Recurrence
    inward: Matrix
    conv: Array
    conv_bias: Array | None
    decay: Array | None
    time_bias: Array | None
    skip: Array | None
    norm: Array | None
    out: Matrix


@dataclass(frozen=True, slots=True)
class RecurrentBuffers:
    """Additional buffers of recurrent layers; all of them share one set."""

    inward: Any
    """float32 [M, P]: the projected input."""
    convolved: Any
    """float32 [M, C]"""
    scanned: Any
    """float32 [M, heads V]"""

    def map(self, make: Callable[[Any], Any]) -> RecurrentBuffers:
        """Return the buffers mapped through `make`."""
        return RecurrentBuffers(make(self.inward), make(self.convolved), make(self.scanned))


def build_recurrent(matrix: Callable[..., Matrix], vector: Callable[[str], Array], facts: Recurrence) -> Recurrent:
    """Pack one layer."""
    split = facts.kind == "delta"
    names = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"] if split else ["in_proj"]
    scans, mamba = facts.kind != "conv", facts.kind == "mamba2"
    return Recurrent(
        facts=facts,
        inward=matrix(*(MIXER + name for name in names)),
        conv=vector(f"{MIXER}conv.weight"),
        conv_bias=vector(f"{MIXER}conv.bias") if facts.conv_bias else None,
        decay=vector(f"{MIXER}decay") if scans else None,
        time_bias=vector(f"{MIXER}dt_bias") if scans else None,
        skip=vector(f"{MIXER}D") if mamba else None,
        norm=vector(f"{MIXER}norm.weight") if scans else None,
        out=matrix(f"{MIXER}out_proj"),
    )


def allocate_recurrent(kernels: Kernels, facts: Recurrence | None, tokens: int) -> RecurrentBuffers:
    """Allocate buffers for steps of at most `tokens` tokens; empty ones for a model without such layers."""
    sizes = (facts.projected, facts.channels, facts.inner if facts.kind != "conv" else 0) if facts else (0, 0, 0)
    return RecurrentBuffers(*(kernels.allocate((tokens, size), "float32") for size in sizes))


def recurrent_numbers(facts: Recurrence | None) -> int:
    """Return the numbers per token in the buffers."""
    return facts.projected + facts.channels + facts.inner if facts else 0


def run_recurrent(
    k: Kernels,
    layer: Recurrent,
    x: Any,
    eps: float,
    places: tuple[Any, int, Any, Any],
    members: Any,
    b: RecurrentBuffers,
    out: Any,
) -> None:
    """Set out[M, H] to the layer's output for x[M, H].

    `places`: the group's states, the layer's index in the group, rows, tables.
    """
    how = layer.facts
    inner = how.inner
    k.project(x, layer.inward, b.inward)
    if how.kind == "conv":
        k.convolve(b.inward, 0, layer.conv, layer.conv_bias, False, True, *places, b.convolved, members)
        k.project(b.convolved, layer.out, out)
        return
    delta = how.kind == "delta"
    first = 0 if delta else inner
    k.convolve(b.inward, first, layer.conv, layer.conv_bias, True, False, *places, b.convolved, members)
    gates = (b.convolved, b.inward, how.channels + inner, layer.decay, layer.time_bias)
    if delta:
        k.delta(*gates, how.key_heads, how.tiled, *places, b.scanned, members)
        k.gated_norm(b.scanned, b.inward, how.channels, layer.norm, how.value_size, eps, False, b.scanned)
    else:
        low, high = how.step_limits or (0.0, math.inf)
        k.mamba2(*gates, layer.skip, low, high, how.key_heads, *places, b.scanned, members)
        k.gated_norm(b.scanned, b.inward, 0, layer.norm, inner // how.key_heads, eps, True, b.scanned)
    k.project(b.scanned, layer.out, out)
