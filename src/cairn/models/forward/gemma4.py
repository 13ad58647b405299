"""Gemma 4's per-layer parts: shared KV, per-group head sizes, per-layer inputs.

attention:     heads of the group's size; values are normed without a weight; a layer without keys and values reads
               those of an earlier one
layer inputs:  rows of a table (`forward.row_table`) -> scale, and hidden -> project -> scale -> norm, added and scaled:
               one for each layer;
               after a layer: hidden -> project -> gate with its input -> project -> norm -> add
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from cairn.kernels.base import Array, Kernels, Matrix
from cairn.models.families.uneven_spec import INPUTS_NORM, INPUTS_PROJECTION
from cairn.types.model_spec import ModelSpec, Uneven

Pack = Callable[..., Matrix]
"""Packs the matrices of these names (below a layer), with their biases."""


@dataclass(frozen=True, slots=True)
class GroupAttention:
    """One layer's attention, with its group's heads."""

    window: int
    heads: int
    kv_heads: int
    size: int
    """Head size."""
    shared: bool
    """Whether it reads the KV of an earlier layer."""
    qkv: Matrix
    """Only queries if KV is shared."""
    q_norm: Array
    k_norm: Array | None
    out: Matrix


@dataclass(frozen=True, slots=True)
class Inputs:
    """Weights that make the inputs of all layers."""

    projection: Matrix
    norm: Array
    layers: int
    width: int
    hidden: int


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Weights that apply one layer's input."""

    first: int
    """Offset of the layer's input among those of all layers."""
    gate: Matrix
    projection: Matrix
    norm: Array


@dataclass(frozen=True, slots=True)
class UnevenBuffers:
    """Additional buffers of a step; empty for other models. Groups of the same sizes share theirs."""

    qkv: tuple[Any, ...]
    asked: tuple[Any, ...]
    """Queries of layers with shared KV: float32 [M, Q D]"""
    query: tuple[Any, ...]
    attended: tuple[Any, ...]
    gates: Any
    gated: Any
    """`gates` and `gated` belong to the MLP of double width."""
    inputs: Any
    """float32 [M, L P]: inputs of all layers."""
    rows: Any
    """float32 [M, L P]: table rows of the step's tokens, read by the engine."""
    gate: Any
    """float32 [M, P]"""

    def map(self, make: Callable[[Any], Any]) -> UnevenBuffers:
        """Return the buffers mapped through `make`; a shared buffer is mapped once."""
        made: dict[int, Any] = {}

        def once(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(once, value))
            if id(value) not in made:
                made[id(value)] = make(value)
            return made[id(value)]

        return UnevenBuffers(**{one.name: once(getattr(self, one.name)) for one in fields(self)})


def build_attention(matrix: Pack, norm: Callable[[str], Array | None], spec: ModelSpec, layer: int) -> GroupAttention:
    """Pack one layer's attention."""
    uneven, group = spec.uneven, spec.group_of(layer)
    assert uneven is not None
    shared = layer >= spec.layers - len(uneven.kv_from)
    value = "self_attn.k_proj" if layer in uneven.keys_as_values else "self_attn.v_proj"
    _, kv_heads, _, size = spec.page(group)
    return GroupAttention(
        window=spec.groups[group].sight,
        heads=spec.heads,
        kv_heads=kv_heads,
        size=size,
        shared=shared,
        qkv=matrix("self_attn.q_proj") if shared else matrix("self_attn.q_proj", "self_attn.k_proj", value),
        q_norm=norm("self_attn.q_norm"),
        k_norm=norm("self_attn.k_norm"),
        out=matrix("self_attn.o_proj"),
    )


def build_inputs(kernels: Kernels, spec: ModelSpec, weights: Mapping[str, Any]) -> Inputs | None:
    """Pack the weights that make the inputs of all layers; None without inputs."""
    if spec.uneven is None or not spec.uneven.inputs:
        return None
    return Inputs(
        projection=kernels.matrix([weights[INPUTS_PROJECTION]], [None]),
        norm=kernels.vector(weights[INPUTS_NORM]),
        layers=spec.layers,
        width=spec.uneven.inputs,
        hidden=spec.hidden,
    )


def build_input(matrix: Pack, vector: Callable[[str], Array], uneven: Uneven | None, layer: int) -> LayerInput | None:
    """Pack the weights that apply one layer's input; None without inputs."""
    if uneven is None or not uneven.inputs:
        return None
    return LayerInput(
        first=layer * uneven.inputs,
        gate=matrix("per_layer_input_gate"),
        projection=matrix("per_layer_projection"),
        norm=vector("post_per_layer_input_norm.weight"),
    )


def allocate_uneven(kernels: Kernels, spec: ModelSpec, tokens: int) -> UnevenBuffers:
    """Allocate buffers for steps of at most `tokens` tokens."""
    uneven = spec.uneven

    def floats(*shape: int) -> Any:
        return kernels.allocate((tokens, *shape), "float32")

    if uneven is None:
        none = floats(0)
        return UnevenBuffers((), (), (), (), none, none, none, none, none)
    pages = [spec.page(group) for group in range(len(spec.groups))]
    every = {
        (heads, size): (
            floats((spec.heads + 2 * heads) * size),
            floats(spec.heads * size),
            floats(spec.heads, size),
            floats(spec.heads * size),
        )
        for _, heads, _, size in pages
    }
    own = [every[page[1], page[3]] for page in pages]
    wide, inputs = 2 * spec.ffn if uneven.wide else 0, spec.layers * uneven.inputs
    qkv, asked, query, attended = zip(*own, strict=True)
    return UnevenBuffers(
        *(qkv, asked, query, attended),
        *(floats(2 * wide), floats(wide), floats(inputs), floats(inputs), floats(uneven.inputs)),
    )


def uneven_numbers(spec: ModelSpec) -> int:
    """Return the numbers per token in the buffers."""
    uneven = spec.uneven
    if uneven is None:
        return 0
    pages = [spec.page(group) for group in range(len(spec.groups))]
    heads = sum((4 * spec.heads + 2 * page[1]) * page[3] for page in pages)
    return heads + (6 * spec.ffn if uneven.wide else 0) + 2 * spec.layers * uneven.inputs + uneven.inputs


def run_inputs(k: Kernels, own: Inputs, hidden: Any, eps: float, b: UnevenBuffers) -> None:
    """Set b.inputs[M, L P] to the inputs of all layers, from b.rows[M, L P] and the embedding hidden[M, H]."""
    k.scale(b.rows, math.sqrt(own.width))
    k.project(hidden, own.projection, b.inputs)
    k.scale(b.inputs, 1 / math.sqrt(own.hidden))
    k.norm_heads(b.inputs, 0, own.layers, own.width, own.norm, eps)
    k.add(b.rows, b.inputs)
    k.scale(b.inputs, math.sqrt(0.5))


def run_attention(
    k: Kernels,
    own: GroupAttention,
    x: Any,
    group: int,
    index: int,
    places: tuple[Any, Any, Any, Any, Any, Any],
    how: tuple[float, float],
    b: UnevenBuffers,
    out: Any,
) -> None:
    """Set out[M, H] to the attention of x[M, H].

    `places`: angles, cache, slots, rows, tables and the row of each token; `how`: eps and the scale of scores.
    """
    angles, kv, slots, rows, tables, members = places
    eps, scale = how
    query, attended = b.query[group], b.attended[group]
    if own.shared:
        asked = b.asked[group]
        k.project(x, own.qkv, asked)
        k.norm_heads(asked, 0, own.heads, own.size, own.q_norm, eps)
        k.turn_heads(asked, angles, query)
    else:
        qkv = b.qkv[group]
        k.project(x, own.qkv, qkv)
        k.norm_heads(qkv, own.heads + own.kv_heads, own.kv_heads, own.size, None, eps)
        k.rope_write(qkv, angles, own.q_norm, own.k_norm, eps, kv, index, slots, query)
    k.attention(query, kv, index, rows, tables, own.window, scale, attended, 0.0, False, None, members)
    k.project(attended, own.out, out)


def run_input(
    k: Kernels, own: LayerInput, activation: str, eps: float, hidden: Any, b: UnevenBuffers, normed: Any, out: Any
) -> None:
    """Add the effect of a layer's input to hidden[M, H]."""
    k.project(hidden, own.gate, b.gate)
    k.gate_with(b.gate, activation, b.inputs, own.first, b.gate)
    k.project(b.gate, own.projection, out)
    k.norm(out, own.norm, eps, normed)
    k.add(normed, hidden)
