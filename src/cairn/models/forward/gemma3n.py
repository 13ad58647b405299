"""The forward pass of a hidden state that is kept several times over (Gemma 3n): AltUp, and LAuReL beside attention.

start:    hidden -> project -> as long as hidden: one stream for each matrix, behind hidden itself
predict:  streams -> mixed by what the active one says; the active one of them is the layer's hidden state
beside:   normed -> project -> project -> norm -> added to normed; what attention gives is added, and halved in square
correct:  hidden less what was predicted of it, to each stream by a part that hidden says
input:    the active stream through the layer's input, to all streams but the first
end:      streams -> project -> as long as the first: their mean is the hidden state

A layer reads the streams of one buffer and writes them to the other, in turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from cairn.kernels.base import Array, Kernels, Matrix
from cairn.models.forward.gemma4 import LayerInput
from cairn.models.spec.uneven_spec import MERGES, STREAMS
from cairn.types.model_spec import ModelSpec

Pack = Callable[..., Matrix]


@dataclass(frozen=True, slots=True)
class StreamEnds:
    """What makes streams, and what makes one state of them."""

    count: int
    apart: tuple[Matrix, ...]
    joined: tuple[Matrix, ...]


@dataclass(frozen=True, slots=True)
class StreamLayer:
    """One layer's weights as the kernels packed them."""

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
    """What a step needs beside the buffers of other layers; empty for a model without streams."""

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
        """The buffers with something made of each."""
        return StreamBuffers(**{one.name: make(getattr(self, one.name)) for one in fields(self)})


def build_ends(kernels: Kernels, spec: ModelSpec, weights: Mapping[str, Any]) -> StreamEnds | None:
    """Pack what makes streams and joins them."""
    streams = spec.uneven.streams if spec.uneven is not None else None
    if streams is None:
        return None
    apart, joined = (
        tuple(kernels.matrix([weights[f"{place}.{number}.weight"]], [None]) for number in range(streams.count - 1))
        for place in (STREAMS, MERGES)
    )
    return StreamEnds(streams.count, apart, joined)


def build_streams(matrix: Pack, vector: Callable[[str], Array], spec: ModelSpec, layer: int) -> StreamLayer | None:
    """Pack one layer's own."""
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
    """Buffers for steps of at most `tokens` tokens."""
    streams = spec.uneven.streams if spec.uneven is not None else None
    count, hidden, rank = (streams.count, spec.hidden, streams.rank) if streams else (0, 0, 0)
    shapes: list[tuple[int, ...]] = [(count, hidden), (count, hidden), (hidden,), (hidden,), (rank,)]
    shapes += [(count,), (count * count,), (count,)]
    return StreamBuffers(*(kernels.allocate((tokens, *shape), "float32") for shape in shapes))


def stream_numbers(spec: ModelSpec) -> int:
    """Numbers for each token in the buffers."""
    streams = spec.uneven.streams if spec.uneven is not None else None
    if streams is None:
        return 0
    return 2 * (streams.count + 1) * spec.hidden + streams.rank + streams.count * (streams.count + 2)


def run_start(k: Kernels, own: StreamEnds, hidden: Any, b: StreamBuffers, out: Any) -> None:
    """b.here[M, A, H] = the streams of an embedding hidden[M, H]; writes `out` too."""
    k.put_stream(hidden, 0, b.here)
    for number, matrix in enumerate(own.apart, 1):
        k.project(hidden, matrix, out)
        k.match_magnitude(hidden, out)
        k.put_stream(out, number, b.here)


def run_end(k: Kernels, own: StreamEnds, hidden: Any, b: StreamBuffers, out: Any) -> None:
    """hidden[M, H] = the mean of the streams b.here[M, A, H]; writes `out` too."""
    k.take_stream(b.here, 0, b.first)
    k.take_stream(b.here, 0, hidden)
    for number, matrix in enumerate(own.joined, 1):
        k.take_stream(b.here, number, b.beside)
        k.project(b.beside, matrix, out)
        k.match_magnitude(b.first, out)
        k.add(out, hidden)
    k.scale(hidden, 1 / own.count)


def _route(k: Kernels, own: StreamLayer, x: Any, eps: float, b: StreamBuffers, normed: Any) -> None:
    """b.routed[M, A] = what x[M, H] says of the streams."""
    k.norm(x, own.router_norm, eps, normed)
    k.scale(normed, 1 / own.hidden)
    k.project(normed, own.router, b.routed)
    k.activate(b.routed, "tanh", b.routed)


def run_predict(k: Kernels, own: StreamLayer, hidden: Any, eps: float, b: StreamBuffers, normed: Any) -> None:
    """b.there[M, A, H] = what the streams b.here are before the layer, and hidden[M, H] the active one of them."""
    k.take_stream(b.here, own.active, hidden)
    _route(k, own, hidden, eps, b, normed)
    k.project(b.routed, own.predict, b.parts)
    k.mix_streams(b.here, b.parts, b.there)
    k.take_stream(b.there, own.active, hidden)


def run_beside(k: Kernels, own: StreamLayer, x: Any, eps: float, b: StreamBuffers) -> None:
    """b.beside[M, H] = what stands beside attention, of what attention takes, x[M, H]."""
    k.project(x, own.left, b.low)
    k.project(b.low, own.right, b.beside)
    k.norm(b.beside, own.norm, eps, b.beside)
    k.add(x, b.beside)


def run_joined(k: Kernels, hidden: Any, b: StreamBuffers) -> None:
    """hidden[M, H] = with what stands beside attention, over the root of 2."""
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
    """b.there[M, A, H] = the streams after the layer, which gives hidden[M, H]. `inputs`: those of all layers, and room
    for one."""
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
