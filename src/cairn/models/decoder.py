"""The forward pass, written once over kernels whose arrays are opaque, and recorded once into a program.

    tokens -> embed -> [norm+qkv -> rope+KV write -> attention -> out+residual -> gated MLP+residual] x layers
    hidden[wanted] -> norm+head -> logits

Families differ by data: which weights exist, which group a layer's cache belongs to, which scaling the positions have.
`body` and `head` may not branch on values, so that what was recorded at load is what every step replays. Programs are
symbolic in three sizes: M tokens, B rows and R logits rows of a step; every buffer is allocated once at its maximum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cairn.kernels.base import Array, Kernels, Matrix, Rope
from cairn.kernels.program import Call, Program, Size, Slot
from cairn.types import BLOCK_TOKENS, ModelSpec

LOGITS_ROWS = 32
"""Most logits rows in one run of the head; a step that wants more runs it in slices."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights as the kernels packed them, and where its KV lives."""

    group: int
    index: int
    """Place among the layers of its group."""
    window: int
    attention_norm: Array
    qkv: Matrix
    q_norm: Array | None
    k_norm: Array | None
    out: Matrix
    mlp_norm: Array
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model's weights and the constants of its forward pass."""

    embedding: Array
    rope: Rope
    layers: tuple[Layer, ...]
    norm: Array
    head: Matrix
    eps: float
    scale: float
    activation: str


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a step reads and writes: arrays, views of them, or (while recording) `Slot`s in their place."""

    tokens: Any
    """int32 [M]"""
    positions: Any
    """int32 [M]"""
    rows: Any
    """int32 [B, 3]: first token, tokens, first position of each row."""
    tables: tuple[Any, ...]
    """A group: int32 [B, width], -1 where there is no block."""
    slots: tuple[Any, ...]
    """A group: int32 [M], where a token's KV goes: block * BLOCK_TOKENS + offset."""
    wanted: Any
    """int32 [R]: tokens of the step whose logits are wanted."""
    hidden: Any
    angles: Any
    qkv: Any
    query: Any
    attended: Any
    logits: Any
    """float32 [R, V]"""


def build(kernels: Kernels, spec: ModelSpec, weights: Mapping[str, Any]) -> Decoder:
    """Pack checked weights (names and shapes of `weights.expected_tensors`) for the kernels.

    The head is the largest matrix, so it comes first: what passes through memory beside it finds the least there. A
    tied embedding is the head itself.
    """
    head = kernels.matrix([weights["model.embed_tokens.weight" if spec.tied else "lm_head.weight"]], [None])
    return Decoder(
        embedding=head if spec.tied else kernels.table(weights["model.embed_tokens.weight"]),
        rope=kernels.rope(spec.head_dim, spec.rope_theta, spec.rope_scaling),
        layers=tuple(_layer(kernels, spec, weights, layer) for layer in range(spec.layers)),
        norm=kernels.vector(weights["model.norm.weight"]),
        head=head,
        eps=spec.norm_eps,
        scale=1 / math.sqrt(spec.head_dim),
        activation=spec.activation,
    )


def _layer(kernels: Kernels, spec: ModelSpec, weights: Mapping[str, Any], layer: int) -> Layer:
    prefix = f"model.layers.{layer}."
    group = next(number for number, group in enumerate(spec.groups) if layer in group.layers)

    def matrix(*names: str) -> Matrix:
        found = [weights[f"{prefix}{name}.weight"] for name in names]
        return kernels.matrix(found, [weights.get(f"{prefix}{name}.bias") for name in names])

    def norm(name: str) -> Array | None:
        return kernels.vector(weights[f"{prefix}{name}.weight"]) if f"{prefix}{name}.weight" in weights else None

    return Layer(
        group=group,
        index=spec.groups[group].layers.index(layer),
        window=spec.groups[group].window,
        attention_norm=norm("input_layernorm"),
        qkv=matrix("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=norm("self_attn.q_norm"),
        k_norm=norm("self_attn.k_norm"),
        out=matrix("self_attn.o_proj"),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=matrix("mlp.gate_proj", "mlp.up_proj"),
        down=matrix("mlp.down_proj"),
    )


def allocate(kernels: Kernels, spec: ModelSpec, tokens: int, rows: int, context: int) -> Buffers:
    """Buffers for steps of at most `tokens` tokens and `rows` rows with contexts of at most `context` tokens."""
    width, groups = -(-context // BLOCK_TOKENS), range(len(spec.groups))
    query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return Buffers(
        tokens=kernels.allocate((tokens,), "int32"),
        positions=kernels.allocate((tokens,), "int32"),
        rows=kernels.allocate((rows, 3), "int32"),
        tables=tuple(kernels.allocate((rows, width), "int32") for _ in groups),
        slots=tuple(kernels.allocate((tokens,), "int32") for _ in groups),
        wanted=kernels.allocate((LOGITS_ROWS,), "int32"),
        hidden=kernels.allocate((tokens, spec.hidden), "float32"),
        angles=kernels.allocate((tokens, 2, spec.head_dim // 2), "float32"),
        qkv=kernels.allocate((tokens, query + 2 * kv), "float32"),
        query=kernels.allocate((tokens, spec.heads, spec.head_dim), "float32"),
        attended=kernels.allocate((tokens, query), "float32"),
        logits=kernels.allocate((LOGITS_ROWS, spec.vocab), "float32"),
    )


def buffer_bytes(spec: ModelSpec, tokens: int, rows: int, context: int, *, scores: bool) -> int:
    """Bytes that `allocate` takes, and about as much again for what kernels hold while they run.

    `scores`: whether they hold those of a whole context at once, as the reference kernels do.
    """
    wide = spec.hidden + 3 * spec.heads * spec.head_dim + 2 * spec.kv_heads * spec.head_dim + 4 * spec.ffn
    tables = len(spec.groups) * rows * context // BLOCK_TOKENS
    held = 3 * spec.heads * context * min(tokens, 8) if scores else 0
    return 4 * (2 * tokens * wide + 3 * LOGITS_ROWS * spec.vocab + tables + held)


def body(k: Kernels, decoder: Decoder, kv: Sequence[Array], b: Buffers) -> None:
    """Every layer over the step's tokens: writes their KV and leaves their last hidden state in `b.hidden`."""
    k.embed(decoder.embedding, b.tokens, b.hidden)
    k.rope_angles(decoder.rope, b.positions, b.angles)
    for layer in decoder.layers:
        g = layer.group
        k.norm_project(b.hidden, layer.attention_norm, decoder.eps, layer.qkv, b.qkv)
        k.rope_write(b.qkv, b.angles, layer.q_norm, layer.k_norm, decoder.eps, kv[g], layer.index, b.slots[g], b.query)
        k.attention(b.query, kv[g], layer.index, b.rows, b.tables[g], layer.window, decoder.scale, b.attended)
        k.project_add(b.attended, layer.out, b.hidden)
        k.gated_mlp(b.hidden, layer.mlp_norm, decoder.eps, layer.gate_up, decoder.activation, layer.down)


def head(k: Kernels, decoder: Decoder, b: Buffers) -> None:
    """Logits of the wanted tokens, after `body`."""
    k.logits(b.hidden, b.wanted, decoder.norm, decoder.eps, decoder.head, b.logits)


def with_slots(buffers: Buffers) -> Buffers:
    """The buffers as symbols, for recording."""
    sizes: dict[str, Size] = {"rows": "rows", "tables": "rows", "wanted": "logits", "logits": "logits"}

    def symbol(name: str) -> Any:
        value, size = getattr(buffers, name), sizes.get(name, "tokens")
        return tuple(Slot(size, one) for one in value) if isinstance(value, tuple) else Slot(size, value)

    return Buffers(**{name: symbol(name) for name in Buffers.__slots__})


def cut(kernels: Kernels, buffers: Buffers, sizes: Mapping[Size, int]) -> Buffers:
    """The buffers at a step's sizes: what a direct run of `body` or `head` takes."""

    def view(slot: Any) -> Any:
        return tuple(map(view, slot)) if isinstance(slot, tuple) else kernels.first(slot.array, sizes[slot.size])

    symbols = with_slots(buffers)
    return Buffers(**{name: view(getattr(symbols, name)) for name in Buffers.__slots__})


class Recorder:
    """Stands in for the kernels while a forward pass is recorded: it notes every call and computes nothing."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __getattr__(self, kernel: str) -> Any:
        def record(*arguments: Any) -> None:
            self.calls.append(Call(kernel, arguments))

        return record


def record(kernels: Kernels, decoder: Decoder, kv: Sequence[Array], buffers: Buffers) -> tuple[Program, Program]:
    """The programs of `body` and `head` over these buffers and this KV pool."""
    symbols = with_slots(buffers)
    layers: Any = Recorder()
    body(layers, decoder, kv, symbols)
    last: Any = Recorder()
    head(last, decoder, symbols)
    return kernels.program(layers.calls), kernels.program(last.calls)
