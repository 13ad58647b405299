"""The forward pass of an encoder over whole texts, packed one after the other without padding, recorded once.

    tokens -> embed (+ positions, + types) -> norm -> layers:
        [norm ->] project to q, k, v -> rotate, write -> attend to all of the text -> project -> add [-> norm]
        [norm ->] project -> activation -> project -> add [-> norm]
    -> [norm] -> hidden;  pooled -> project -> tanh, or activation and norm -> project -> scores

Norms stand before or after each half of a layer. Keys and values lie in blocks like a decoder's, but every layer
overwrites them. The order of a sum depends only on positions in the text, so a vector is the same bit for bit whatever
else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cairn.kernels.base import Array, Kernels, Matrix, Rope
from cairn.kernels.program import Program, Size, Slot
from cairn.models.families.encoder_spec import mlp_names, qkv_names
from cairn.models.forward.norms import LayerNorm
from cairn.models.forward.recorder import Recorder
from cairn.types.model_spec import BLOCK_TOKENS, EncoderSpec, ModelSpec, RotaryPositions


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One layer's packed weights."""

    window: int
    angles: int
    """Index of its buffer of rotary angles."""
    attention_norm: LayerNorm | None
    qkv: Matrix
    out: Matrix
    mlp_norm: LayerNorm
    up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class Head:
    """Weights that make scores of a pooled state."""

    dense: Matrix
    norm: LayerNorm | None
    out: Matrix


@dataclass(frozen=True, slots=True)
class Encoder:
    """A model's weights and the constants of its forward pass."""

    embedding: Array
    positions: Array | None
    types: Array | None
    embed_norm: LayerNorm
    ropes: tuple[Rope, ...]
    """Of layers without and with a window; empty for learned positions."""
    layers: tuple[EncoderLayer, ...]
    norm: LayerNorm | None
    head: Head | None
    eps: float
    scale: float
    activation: str
    gated: bool
    norm_first: bool


@dataclass(frozen=True, slots=True)
class EncoderBuffers:
    """A step's inputs and intermediate results: arrays, or `Slot`s while recording."""

    tokens: Any
    """int32 [M]"""
    positions: Any
    """int32 [M]: position in the text; for learned positions the row of their table."""
    types: Any
    """int32 [M]"""
    members: Any
    """int32 [M]: the text of each token."""
    rows: Any
    """int32 [B, 3]: first token in the step, tokens, 0."""
    tables: Any
    """int32 [B, width]: block table of each text, -1 for no block."""
    slots: Any
    """int32 [M]: where a token's keys and values go."""
    hidden: Any
    angles: tuple[Any, ...]
    beside: Any
    qkv: Any
    query: Any
    attended: Any
    wide: Any
    gated: Any
    projected: Any


@dataclass(frozen=True, slots=True)
class HeadBuffers:
    """Buffers of the head, which runs over pooled texts."""

    pooled: Any
    dense: Any
    scores: Any


_PASSING = frozenset(("projected", "beside", "wide", "gated"))


def build(kernels: Kernels, spec: ModelSpec, weights: Mapping[str, Any]) -> Encoder:
    """Pack checked weights (names and shapes of `encoder_spec.encoder_tensors`) for the kernels."""
    encoder = spec.encoder
    assert encoder is not None

    def matrix(*names: str) -> Matrix:
        return kernels.matrix([weights[f"{name}.weight"] for name in names], [weights.get(f"{n}.bias") for n in names])

    def norm(name: str) -> LayerNorm | None:
        if f"{name}.weight" not in weights:
            return None
        bias = kernels.vector(weights[f"{name}.bias"]) if f"{name}.bias" in weights else None
        return LayerNorm(kernels.vector(weights[f"{name}.weight"]), bias)

    def table(name: str) -> Array | None:
        return kernels.table(weights[name]) if name in weights else None

    def layer(number: int) -> EncoderLayer:
        prefix, mlp_norm = f"layers.{number}.", norm(f"layers.{number}.mlp_norm")
        assert mlp_norm is not None
        return EncoderLayer(
            window=encoder.window(number),
            angles=int(encoder.window(number) > 0 and encoder.local is not None),
            attention_norm=norm(f"{prefix}attention_norm"),
            qkv=matrix(*(prefix + name for name in qkv_names(encoder))),
            out=matrix(f"{prefix}o_proj"),
            mlp_norm=mlp_norm,
            up=matrix(*(prefix + name for name in mlp_names(encoder))),
            down=matrix(f"{prefix}down_proj"),
        )

    embed_norm = norm("embed_norm")
    assert embed_norm is not None
    return Encoder(
        embedding=kernels.table(weights["embed_tokens.weight"]),
        positions=table("positions.weight"),
        types=table("token_types.weight"),
        embed_norm=embed_norm,
        ropes=tuple(kernels.rope(spec.head_dim, rope.theta, rope.scaling) for rope in _ropes(spec, encoder)),
        layers=tuple(layer(number) for number in range(spec.layers)),
        norm=norm("norm"),
        head=Head(matrix("head.dense"), norm("head.norm"), matrix("head.out")) if encoder.labels else None,
        eps=spec.norm_eps,
        scale=1 / math.sqrt(spec.head_dim),
        activation=spec.activation,
        gated=encoder.gated,
        norm_first=encoder.norm_first,
    )


def _ropes(spec: ModelSpec, encoder: EncoderSpec) -> list[RotaryPositions]:
    if encoder.positions == "learned":
        return []
    whole = RotaryPositions(theta=spec.rope_theta, scaling=spec.rope_scaling)
    return [whole] if encoder.local is None else [whole, encoder.local]


def allocate(kernels: Kernels, spec: ModelSpec, tokens: int, rows: int, context: int) -> EncoderBuffers:
    """Allocate buffers for steps of at most `tokens` tokens in `rows` texts of at most `context` tokens."""
    encoder = spec.encoder
    assert encoder is not None

    def floats(*shape: int) -> Array:
        return kernels.allocate((tokens, *shape), "float32")

    def ints() -> Array:
        return kernels.allocate((tokens,), "int32")

    return EncoderBuffers(
        tokens=ints(),
        positions=ints(),
        types=ints(),
        members=ints(),
        rows=kernels.allocate((rows, 3), "int32"),
        tables=kernels.allocate((rows, -(-context // BLOCK_TOKENS)), "int32"),
        slots=ints(),
        hidden=floats(spec.hidden),
        angles=tuple(floats(2, spec.head_dim // 2) for _ in range(len(_ropes(spec, encoder)) or 1)),
        beside=floats(spec.hidden),
        qkv=floats(3 * spec.hidden),
        query=floats(spec.heads, spec.head_dim),
        attended=floats(spec.hidden),
        wide=floats(spec.ffn * (1 + encoder.gated)),
        gated=floats(spec.ffn),
        projected=floats(spec.hidden),
    )


def kv_blocks(tokens: int, rows: int) -> int:
    """Return the most blocks that the texts of a step take: each text begins a new one."""
    return tokens // BLOCK_TOKENS + rows


def buffer_bytes(spec: ModelSpec, tokens: int, rows: int, context: int, *, scores: bool) -> int:
    """Return the bytes of buffers and blocks, doubled for what kernels hold while they run.

    `scores`: whether kernels hold scores of a whole text at once, as the reference kernels do.
    """
    wide = 9 * spec.hidden + spec.head_dim + 3 * spec.ffn
    kept = 2 * BLOCK_TOKENS * kv_blocks(tokens, rows) * spec.hidden
    held = 3 * spec.heads * context * min(tokens, 1 << 9) if scores else 0
    return 4 * (2 * tokens * wide + kept + rows * context // BLOCK_TOKENS + held)


def body(k: Kernels, model: Encoder, kv: Array, b: EncoderBuffers) -> None:
    """Run every layer over the step's texts; leave their last hidden states in `b.hidden`."""
    _embed(k, model, b)
    for rope, angles in zip(model.ropes, b.angles, strict=False):
        k.rope_angles(rope, b.positions, angles)
    for layer in model.layers:
        x = _before(k, model, layer.attention_norm, b)
        k.project(x, layer.qkv, b.qkv)
        k.rope_write(b.qkv, b.angles[layer.angles], None, None, model.eps, kv, 0, b.slots, b.query)
        k.attention(b.query, kv, 0, b.rows, b.tables, layer.window, model.scale, b.attended, 0.0, True, None, b.members)
        k.project(b.attended, layer.out, b.projected)
        k.add(b.projected, b.hidden)
        _behind(k, model, layer.attention_norm, b)
        x = _before(k, model, layer.mlp_norm, b)
        k.project(x, layer.up, b.wide)
        if model.gated:
            k.gate(b.wide, model.activation, b.gated)
        else:
            k.activate(b.wide, model.activation, b.gated)
        k.project(b.gated, layer.down, b.projected)
        k.add(b.projected, b.hidden)
        _behind(k, model, layer.mlp_norm, b)
    if model.norm is not None:
        _norm(k, model, model.norm, b.hidden, b.hidden)


def _embed(k: Kernels, model: Encoder, b: EncoderBuffers) -> None:
    k.embed(model.embedding, b.tokens, b.hidden)
    for table, places in ((model.positions, b.positions), (model.types, b.types)):
        if table is not None:
            k.embed(table, places, b.projected)
            k.add(b.projected, b.hidden)
    _norm(k, model, model.embed_norm, b.hidden, b.hidden)


def _norm(k: Kernels, model: Encoder, norm: LayerNorm, x: Array, out: Array) -> None:
    k.layer_norm(x, norm.weight, norm.bias, model.eps, out)


def _before(k: Kernels, model: Encoder, norm: LayerNorm | None, b: EncoderBuffers) -> Array:
    """Return the input of a half of a layer, normed if norms come first."""
    if not model.norm_first or norm is None:
        return b.hidden
    _norm(k, model, norm, b.hidden, b.beside)
    return b.beside


def _behind(k: Kernels, model: Encoder, norm: LayerNorm | None, b: EncoderBuffers) -> None:
    if not model.norm_first and norm is not None:
        _norm(k, model, norm, b.hidden, b.hidden)


def head(k: Kernels, model: Encoder, b: HeadBuffers) -> None:
    """Compute the scores of pooled states."""
    assert model.head is not None
    k.project(b.pooled, model.head.dense, b.dense)
    k.activate(b.dense, "tanh" if model.head.norm is None else "gelu", b.dense)
    if model.head.norm is not None:
        _norm(k, model, model.head.norm, b.dense, b.dense)
    k.project(b.dense, model.head.out, b.scores)


def record(kernels: Kernels, model: Encoder, kv: Array, buffers: EncoderBuffers) -> Program:
    """Return the program of `body` over these buffers."""
    sizes: dict[str, Size] = {"rows": "rows", "tables": "rows"}

    def symbol(name: str) -> Any:
        value, size = getattr(buffers, name), sizes.get(name, "tokens")
        if isinstance(value, tuple):
            return tuple(Slot(size, one) for one in value)
        return Slot(size, value, name in _PASSING, "blocks" if name == "tables" else None)

    recorder: Any = Recorder()
    body(recorder, model, kv, EncoderBuffers(**{name: symbol(name) for name in EncoderBuffers.__slots__}))
    return kernels.program(recorder.calls)


def record_head(model: Encoder, buffers: HeadBuffers) -> Callable[[Any, Slot], Slot]:
    """Return a function that records `head` over pooled states and these buffers."""

    def record(k: Any, pooled: Slot) -> Slot:
        scores = Slot("tokens", buffers.scores)
        head(k, model, HeadBuffers(pooled, Slot("tokens", buffers.dense), scores))
        return scores

    return record
