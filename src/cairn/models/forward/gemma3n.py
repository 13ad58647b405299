"""Gemma 3n's parallel streams of the hidden state: AltUp, and LAuReL beside attention.

start: hidden -> project -> scaled to hidden's length: one stream for each matrix, after hidden itself predict: streams
-> mixed by a router over the active one; the active prediction is the layer's hidden state beside: normed -> project ->
project -> norm -> added to normed; the attention output is added; divided by sqrt(2) correct: hidden minus its
prediction, added to each stream with a share that a router gives input: the active stream through the layer's input,
added to all streams but the first end: streams -> project -> scaled to the first one's length: their mean is the hidden
state

A layer reads the streams of one buffer and writes them to the other, alternating.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from cairn.kernels.base import Array, Kernels, Matrix
from cairn.models.families.uneven_spec import MERGES, STREAMS
from cairn.models.forward.gemma4 import LayerInput
from cairn.types.model_spec import ModelSpec

Pack = Callable[..., Matrix]


@dataclass(frozen=True, slots=True)
class StreamEnds:
    """Weights that make the streams and that merge them."""

    count: int
    apart: tuple[Matrix, ...]
    joined: tuple[Matrix, ...]


@dataclass(frozen=True, slots=True)
class StreamLayer:
    """One layer's packed stream weights."""

    active: int
    hidden: int
    sparsity: float | None
    router_norm: Array
    router: Matrix
    predict: Matrix
    correct: Matrix
    scale: Array | None
    left: Matrix
    right: Matrix
    norm: Array


@dataclass(frozen=True, slots=True)
class StreamBuffers:
    """Additional buffers of a step; empty for a model without streams."""

    here: Any
    """float32 [M, A, H]"""
    there: Any
    first: Any
    """float32 [M, H]"""
    beside: Any
    """float32 [M, H]"""
    low: Any
    """float32 [M, rank]"""
    routed: Any
    """float32 [M, A]"""
    parts: Any
    """float32 [M, A A]"""
    shares: Any
    """float32 [M, A]"""

    def map(self, make: Callable[[Any], Any]) -> StreamBuffers:
        """Return the buffers mapped through `make`."""
        return StreamBuffers(**{one.name: make(getattr(self, one.name)) for one in fields(self)})


def build_ends(kernels: Kernels, spec: ModelSpec, weights: Mapping[str, Any]) -> StreamEnds | None:
    """Pack the weights that make and merge streams; None without streams."""
    streams = spec.uneven.streams if spec.uneven is not None else None
    if streams is None:
        return None
    apart, joined = (
        tuple(kernels.matrix([weights[f"{place}.{number}.weight"]], [None]) for number in range(streams.count - 1))
        for place in (STREAMS, MERGES)
    )
    return StreamEnds(streams.count, apart, joined)


def build_streams(matrix: Pack, vector: Callable[[str], Array], spec: ModelSpec, layer: int) -> StreamLayer | None:
    """Pack one layer's stream weights; None without streams."""
    streams = spec.uneven.streams if spec.uneven is not None else None
    if streams is None:
        return None
    return StreamLayer(
        active=streams.active,
        hidden=spec.hidden,
        sparsity=streams.sparsity[layer] if streams.sparsity else None,
        router_norm=vector("altup.router_norm.weight"),
        router=matrix("altup.modality_router"),
        predict=matrix("altup.prediction_coefs"),
        correct=matrix("altup.correction_coefs"),
        scale=vector("altup.correct_output_scale") if streams.scaled else None,
        left=matrix("laurel.linear_left"),
        right=matrix("laurel.linear_right"),
        norm=vector("laurel.post_laurel_norm.weight"),
    )


def allocate_streams(kernels: Kernels, spec: ModelSpec, tokens: int) -> StreamBuffers:
    """Allocate buffers for steps of at most `tokens` tokens."""
    streams = spec.uneven.streams if spec.uneven is not None else None
    count, hidden, rank = (streams.count, spec.hidden, streams.rank) if streams else (0, 0, 0)
    shapes: list[tuple[int, ...]] = [(count, hidden), (count, hidden), (hidden,), (hidden,), (rank,)]
    shapes += [(count,), (count * count,), (count,)]
    return StreamBuffers(*(kernels.allocate((tokens, *shape), "float32") for shape in shapes))


def stream_numbers(spec: ModelSpec) -> int:
    """Return the numbers per token in the buffers."""
    streams = spec.uneven.streams if spec.uneven is not None else None
    if streams is None:
        return 0
    return 2 * (streams.count + 1) * spec.hidden + streams.rank + streams.count * (streams.count + 2)


def run_start(k: Kernels, own: StreamEnds, hidden: Any, b: StreamBuffers, out: Any) -> None:
    """Set b.here[M, A, H] to the streams of an embedding hidden[M, H]; `out` is overwritten."""
    k.put_stream(hidden, 0, b.here)
    for number, matrix in enumerate(own.apart, 1):
        k.project(hidden, matrix, out)
        k.match_magnitude(hidden, out)
        k.put_stream(out, number, b.here)


def run_end(k: Kernels, own: StreamEnds, hidden: Any, b: StreamBuffers, out: Any) -> None:
    """Set hidden[M, H] to the mean of the merged streams b.here[M, A, H]; `out` is overwritten."""
    k.take_stream(b.here, 0, b.first)
    k.take_stream(b.here, 0, hidden)
    for number, matrix in enumerate(own.joined, 1):
        k.take_stream(b.here, number, b.beside)
        k.project(b.beside, matrix, out)
        k.match_magnitude(b.first, out)
        k.add(out, hidden)
    k.scale(hidden, 1 / own.count)


def _route(k: Kernels, own: StreamLayer, x: Any, eps: float, b: StreamBuffers, normed: Any) -> None:
    """Set b.routed[M, A] to the router's output for x[M, H]."""
    k.norm(x, own.router_norm, eps, normed)
    k.scale(normed, 1 / own.hidden)
    k.project(normed, own.router, b.routed)
    k.activate(b.routed, "tanh", b.routed)


def run_predict(k: Kernels, own: StreamLayer, hidden: Any, eps: float, b: StreamBuffers, normed: Any) -> None:
    """Set b.there[M, A, H] to the predicted streams and hidden[M, H] to the active one."""
    k.take_stream(b.here, own.active, hidden)
    _route(k, own, hidden, eps, b, normed)
    k.project(b.routed, own.predict, b.parts)
    k.mix_streams(b.here, b.parts, b.there)
    k.take_stream(b.there, own.active, hidden)


def run_beside(k: Kernels, own: StreamLayer, x: Any, eps: float, b: StreamBuffers) -> None:
    """Set b.beside[M, H] to LAuReL's output for attention's input x[M, H]."""
    k.project(x, own.left, b.low)
    k.project(b.low, own.right, b.beside)
    k.norm(b.beside, own.norm, eps, b.beside)
    k.add(x, b.beside)


def run_joined(k: Kernels, hidden: Any, b: StreamBuffers) -> None:
    """Add LAuReL's output to hidden[M, H] and divide by sqrt(2)."""
    k.add(b.beside, hidden)
    k.scale(hidden, 1 / math.sqrt(2))


def run_correct(
    k: Kernels,
    own: StreamLayer,
    layer: LayerInput,
    activation: str,
    eps: float,
    hidden: Any,
    inputs: tuple[Any, Any],
    b: StreamBuffers,
    normed: Any,
    out: Any,
) -> None:
    """Set b.there[M, A, H] to the corrected streams after the layer, whose output is hidden[M, H].

    `inputs`: the inputs of all layers, and a buffer for one.
    """
    _route(k, own, hidden, eps, b, normed)
    k.project(b.routed, own.correct, b.shares)
    k.correct_streams(hidden, b.shares, own.active, b.there)
    k.take_stream(b.there, own.active, hidden)
    if own.scale is not None:
        k.scale_columns(hidden, own.scale, hidden)
    every, gate = inputs
    k.project(hidden, layer.gate, gate)
    k.gate_with(gate, activation, every, layer.first, gate)
    k.project(gate, layer.projection, out)
    k.norm(out, layer.norm, eps, normed)
    k.add_streams(normed, 1, b.there)
