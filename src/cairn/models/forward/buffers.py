"""Buffers of a decoder's steps, allocated once at their largest size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cairn.kernels.base import Kernels
from cairn.kernels.program import Size, Slot
from cairn.models.forward.gemma3n import StreamBuffers, allocate_streams, stream_numbers
from cairn.models.forward.gemma4 import UnevenBuffers, allocate_uneven, uneven_numbers
from cairn.models.forward.latent import LatentBuffers, allocate_latent, latent_numbers
from cairn.models.forward.moe import MixtureBuffers, allocate_mixture, mixture_numbers
from cairn.models.forward.mtp_head import JoinBuffers, allocate_join, join_numbers
from cairn.models.forward.recurrent import RecurrentBuffers, allocate_recurrent, recurrent_numbers
from cairn.types.model_spec import BLOCK_TOKENS, ModelSpec
from cairn.types.request import MAX_APPLIED


@dataclass(frozen=True, slots=True)
class Buffers:
    """A step's inputs and intermediate results: arrays, views of them, or `Slot`s while recording."""

    tokens: Any
    """int32 [M]"""
    positions: Any
    """int32 [M]"""
    members: Any
    """int32 [M]: the row of each token."""
    rows: Any
    """int32 [B, 3]: first token, tokens, first position of each row."""
    tables: tuple[Any, ...]
    """Block table of each group: int32 [B, width], -1 for no block."""
    slots: tuple[Any, ...]
    """For each group int32 [M]: where a token's KV goes, as block * BLOCK_TOKENS + offset."""
    adapters: Any
    """int32 [B, MAX_APPLIED]: numbers of each row's adapters, -1 for none."""
    scales: Any
    """float32 [B, MAX_APPLIED]: their scales."""
    wanted: Any
    """int32 [R]: tokens of the step that need logits."""
    hidden: Any
    angles: tuple[Any, ...]
    """One for each group; groups with the same positions share one."""
    normed: Any
    qkv: Any
    query: Any
    attended: Any
    gates: Any
    gated: Any
    projected: Any
    logits: Any
    """float32 [R, V]"""
    mixture: MixtureBuffers
    latent: LatentBuffers
    uneven: UnevenBuffers
    recurrent: RecurrentBuffers
    streams: StreamBuffers
    join: JoinBuffers


_OWN = (MixtureBuffers, RecurrentBuffers, LatentBuffers, UnevenBuffers, StreamBuffers, JoinBuffers)
"""Buffers used by one kind of layer only."""
_PASSING = frozenset(("normed", "projected", "gates", "gated"))
"""Buffers not read outside the program that writes them, so that fusing kernels may omit them."""


def allocate(kernels: Kernels, spec: ModelSpec, tokens: int, rows: int, context: int) -> Buffers:
    """Allocate buffers for steps of at most `tokens` tokens in `rows` rows, with contexts of `context` tokens."""
    width, groups = -(-context // BLOCK_TOKENS), range(len(spec.groups))
    query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    asked = 2 * query if spec.output_gate else query
    own = 0 if spec.latent or spec.uneven else 1  # these have separate attention buffers
    ropes = [spec.rope(group) for group in groups]
    turns = [(rope, spec.turned_in(group)) for group, rope in enumerate(ropes)]
    angles = {turn: kernels.allocate((tokens, 2, turn[1] // 2), "float32") for turn in dict.fromkeys(turns)}
    return Buffers(
        tokens=kernels.allocate((tokens,), "int32"),
        positions=kernels.allocate((tokens,), "int32"),
        members=kernels.allocate((tokens,), "int32"),
        rows=kernels.allocate((rows, 3), "int32"),
        tables=tuple(kernels.allocate((rows, width), "int32") for _ in groups),
        slots=tuple(kernels.allocate((tokens,), "int32") for _ in groups),
        adapters=kernels.allocate((rows, MAX_APPLIED), "int32"),
        scales=kernels.allocate((rows, MAX_APPLIED), "float32"),
        wanted=kernels.allocate((kernels.logits_rows,), "int32"),
        hidden=kernels.allocate((tokens, spec.hidden), "float32"),
        angles=tuple(angles[turn] for turn in turns),
        normed=kernels.allocate((tokens, spec.hidden), "float32"),
        qkv=kernels.allocate((tokens, own * (asked + 2 * kv)), "float32"),
        query=kernels.allocate((tokens, own * spec.heads, spec.head_dim), "float32"),
        attended=kernels.allocate((tokens, own * query), "float32"),
        gates=kernels.allocate((tokens, 2 * spec.ffn), "float32"),
        gated=kernels.allocate((tokens, spec.ffn), "float32"),
        projected=kernels.allocate((tokens, spec.hidden), "float32"),
        logits=kernels.allocate((kernels.logits_rows, spec.vocab), "float32"),
        mixture=allocate_mixture(kernels, spec.experts, spec.hidden, tokens),
        latent=allocate_latent(kernels, spec, tokens),
        uneven=allocate_uneven(kernels, spec, tokens),
        recurrent=allocate_recurrent(kernels, spec.recurrence, tokens),
        streams=allocate_streams(kernels, spec, tokens),
        join=allocate_join(kernels, spec, tokens),
    )


def buffer_bytes(spec: ModelSpec, tokens: int, rows: int, context: int, *, logits_rows: int, scores: bool) -> int:
    """Return the bytes that `allocate` takes, doubled for what kernels hold while they run.

    `logits_rows` is the kernels'. `scores`: whether they hold scores of a whole context at once, as numpy's do.
    """
    wide = spec.hidden + 3 * spec.heads * spec.head_dim + 2 * spec.kv_heads * spec.head_dim + 4 * spec.ffn
    wide += mixture_numbers(spec.experts, spec.hidden) + recurrent_numbers(spec.recurrence)
    wide += latent_numbers(spec) + uneven_numbers(spec) + stream_numbers(spec) + join_numbers(spec)
    wide += spec.heads * spec.head_dim if spec.output_gate else 0
    tables = len(spec.groups) * rows * context // BLOCK_TOKENS
    held = 3 * spec.heads * context * min(tokens, 8) if scores else 0
    return 4 * (2 * tokens * wide + 3 * logits_rows * spec.vocab + tables + held)


def with_slots(buffers: Buffers) -> Buffers:
    """Return the buffers as symbolic slots, for recording."""
    sizes: dict[str, Size] = {"wanted": "logits", "logits": "logits"}
    sizes |= dict.fromkeys(("rows", "tables", "adapters", "scales"), "rows")

    def symbol(name: str) -> Any:
        value, size = getattr(buffers, name), sizes.get(name, "tokens")
        if isinstance(value, _OWN):
            return value.map(lambda array: Slot("tokens", array))
        if not isinstance(value, tuple):
            return Slot(size, value, name in _PASSING)
        second: Size | None = "blocks" if name == "tables" else None
        made = {id(one): Slot(size, one, second=second) for one in value}
        return tuple(made[id(one)] for one in value)

    return Buffers(**{name: symbol(name) for name in Buffers.__slots__})


def cut(kernels: Kernels, buffers: Buffers, sizes: Mapping[Size, int]) -> Buffers:
    """Return the buffers cut to a step's sizes, for a direct run of `body` or `head`."""
    symbols = with_slots(buffers)
    made: dict[int, Any] = {}

    def view(slot: Any) -> Any:
        if isinstance(slot, tuple):
            return tuple(map(view, slot))
        if isinstance(slot, _OWN):
            return slot.map(view)
        if id(slot) not in made:
            made[id(slot)] = kernels.first(slot.array, sizes[slot.size])
        return made[id(slot)]

    return Buffers(**{name: view(getattr(symbols, name)) for name in Buffers.__slots__})
