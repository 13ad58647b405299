"""Encoders in GGUF files (metadata and tensor names), and the pooling, judge and dense keys that decoders may have too.

Encoder architectures: `bert`, `nomic-bert` and `modern-bert`. Files store tensors as the original models do, so only
names differ. An unknown key with a value that is not neutral is refused by name, as with decoders. `pooling_type` is 0
none, 1 mean, 2 first token, 3 last token, 4 ranking.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cairn.models.families.encoder_spec import ACTIVATIONS
from cairn.models.files import Fields
from cairn.models.gguf.reader import Gguf, vocab_rows
from cairn.models.hub.hub import model_name
from cairn.types.errors import ModelError, ModelFileError
from cairn.types.model_spec import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    Dense,
    Embedding,
    EncoderSpec,
    JudgeSpec,
    ModelSpec,
    Pooling,
    RotaryPositions,
)

POOLINGS: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
NO_POOLING, RANK = 0, 4
JUDGE = "cls.output.weight"
"""The two output rows that a decoder judges with, yes first."""
DENSE = ("dense_2", "dense_3")
KEYS = ("pooling_type", "classifier.output_labels", *(f"{one}_feat_{way}" for one in DENSE for way in ("in", "out")))
"""Metadata keys about pooling and judging, without the architecture's prefix."""
LABELS = ["yes", "no"]


def pooling_of(keys: Fields) -> Pooling | None:
    """Return the pooling that a file states; None if it states none."""
    number = keys.integer("pooling_type", 0, 1 << 16, NO_POOLING)
    if number == NO_POOLING:
        return None
    if number not in POOLINGS:
        known = ", ".join(f"{one} ({name})" for one, name in POOLINGS.items())
        raise ModelError(f"{keys.path}: {keys.prefix}pooling_type {number} is not supported; supported are {known}")
    return POOLINGS[number]


def ranks(keys: Fields) -> bool:
    """Return whether a file's model judges pairs (a reranker)."""
    return keys.integer("pooling_type", 0, 1 << 16, NO_POOLING) == RANK


def purpose(keys: Fields, gguf: Gguf, hidden: int, both: bool) -> dict[str, Any]:
    """Return a decoder's `kind`, `embedding` and `judge` as spec fields. `both`: its attention is bidirectional."""
    if ranks(keys):
        return {"kind": "rerank", "judge": _judge(keys, gguf, hidden)}
    pooling = pooling_of(keys) or ("mean" if both else None)
    if pooling is None:
        return {}
    return {"kind": "embed", "embedding": Embedding(pooling=pooling, dense=_dense(gguf, hidden))}


def _judge(keys: Fields, gguf: Gguf, hidden: int) -> JudgeSpec:
    tensor = gguf.tensors.get(JUDGE)
    if tensor is None or tensor.shape != (2, hidden) or keys.values.get("classifier.output_labels", LABELS) != LABELS:
        raise ModelError(
            f"{keys.path}: {keys.prefix}pooling_type is ranking, for which {JUDGE} of shape [2, {hidden}] with the "
            "labels yes and no is supported"
        )
    return JudgeSpec(yes=0, no=1, apart=True)


def _dense(gguf: Gguf, hidden: int) -> tuple[Dense, ...]:
    found, width = list[Dense](), hidden
    for name in DENSE:
        tensor = gguf.tensors.get(f"{name}.weight")
        if tensor is None:
            continue
        if len(tensor.shape) != 2 or tensor.shape[1] != width:
            raise ModelFileError(
                f"{tensor.path}: the tensor {tensor.name} must be [out, {width}], found the shape {list(tensor.shape)}"
            )
        width = tensor.shape[0]
        found.append(Dense(place=name, inputs=tensor.shape[1], outputs=width, bias=False, inside=True))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Family:
    architecture: str
    """transformers' name of the same model."""
    names: Mapping[str, str]
    """Layer tensors: GGUF's name -> ours."""
    activation: Literal["silu", "gelu"]
    theta: float = 10_000.0


_LAYER = {"attn_output": "o_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
_BEHIND = {**_LAYER, "attn_output_norm": "attention_norm", "layer_output_norm": "mlp_norm"}
_FAMILIES = {
    "bert": _Family(
        "BertModel", {**_BEHIND, "attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj"}, activation="gelu"
    ),
    "nomic-bert": _Family(
        "NomicBertModel", {**_BEHIND, "attn_qkv": "qkv_proj", "ffn_gate": "gate_proj"}, activation="silu", theta=1000.0
    ),
    "modern-bert": _Family(
        "ModernBertModel",
        {
            **_LAYER,
            **{"attn_qkv": "qkv_proj", "ffn_up": "gate_up_proj", "attn_norm": "attention_norm", "ffn_norm": "mlp_norm"},
        },
        activation="gelu",
        theta=160_000.0,
    ),
}
_WHOLE = {
    **{"token_embd": "embed_tokens", "token_embd_norm": "embed_norm", "position_embd": "positions"},
    **{"token_types": "token_types", "output_norm": "norm"},
}
_NAME = re.compile(r"(?:blk\.(\d{1,5})\.)?(\w+)\.(weight|bias)")
_KEYS = frozenset(
    (
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "pooling_type"),
        *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_epsilon", "attention.causal"),
        *("attention.key_length", "attention.value_length", "attention.sliding_window", "rope.dimension_count"),
        *("attention.sliding_window_pattern", "rope.freq_base", "rope.freq_base_swa", "rope.scaling.type"),
        *("hidden_activation", "classifier.pooling_type"),
    )
)


def encoder_name(architecture: str, name: str) -> str | None:
    """Return our name of a tensor; None if such an encoder does not have it."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, end = match.groups()
    names = _WHOLE if layer is None else _FAMILIES[architecture].names
    if part not in names:
        return None
    return f"{names[part]}.{end}" if layer is None else f"layers.{int(layer)}.{names[part]}.{end}"


def gguf_encoder_spec(gguf: Gguf) -> ModelSpec:
    """Return the spec of the encoder in a GGUF file, without its identity.

    Raise `ModelFileError` for a missing or wrong key, `ModelError` for an unsupported feature.
    """
    named = gguf.metadata["general.architecture"]
    family, keys = _FAMILIES[named], _keys(gguf, named)
    hidden, heads = keys.integer("embedding_length", 1, 1 << 20), keys.integer("attention.head_count", 1, 1 << 14)
    if hidden % (2 * heads) or hidden // heads > MAX_HEAD_DIM:
        raise keys.error(
            "attention.head_count", f"such that embedding_length ({hidden}) divides into heads of an even size"
        )
    for name, only in (("attention.head_count_kv", heads), ("rope.dimension_count", hidden // heads)):
        if keys.integer(name, 0, 1 << 20, only) != only:
            raise ModelError(f"{keys.path}: {keys.prefix}{name} other than {only} is not supported")
    if keys.text("rope.scaling.type", "none") != "none":
        raise ModelError(f"{keys.path}: rope scaling is not supported for an encoder")
    layers = keys.integer("block_count", 1, 1 << 12)
    activation = keys.text("hidden_activation", family.activation)
    if activation not in ACTIVATIONS:
        raise ModelError(f"{keys.path}: hidden_activation {activation[:80]!r} is not supported")
    bias = "blk.0.attn_output.bias" in gguf.tensors
    return ModelSpec(
        name=model_name(gguf.paths[0]),
        architecture=family.architecture,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=keys.integer("feed_forward_length", 1, 1 << 22),
        vocab=vocab_rows(gguf, hidden),
        context=keys.integer("context_length", 1, MAX_CONTEXT),
        norm_eps=keys.number("attention.layer_norm_epsilon", 0.0, 1.0),
        rope_theta=keys.number("rope.freq_base", 1.0, 1e15, family.theta),
        activation=ACTIVATIONS[activation],
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias="blk.0.ffn_down.bias" in gguf.tensors,
        groups=(),
        kind="embed",
        embedding=Embedding(pooling=_pooling(keys)),
        encoder=_encoder(keys, gguf, named, layers),
    )


def _pooling(keys: Fields) -> Pooling:
    if ranks(keys):
        raise ModelError(f"{keys.path}: an encoder that judges pairs is served from safetensors, not from GGUF")
    return pooling_of(keys) or "mean"


def _encoder(keys: Fields, gguf: Gguf, named: str, layers: int) -> EncoderSpec:
    def rows(name: str) -> int:
        return gguf.tensors[name].shape[0] if name in gguf.tensors else 0

    if named == "bert":
        positions = rows("position_embd.weight")
        if positions < keys.integer("context_length", 1, MAX_CONTEXT):
            raise keys.error("context_length", f"at most the rows of position_embd.weight ({positions})")
        return EncoderSpec(position_rows=positions, type_rows=rows("token_types.weight"))
    if named == "nomic-bert":
        return EncoderSpec(positions="rotary", type_rows=rows("token_types.weight"), fused=True, gated=True)
    window = keys.integer("attention.sliding_window", 0, MAX_CONTEXT, 0)
    local = _local_layers(keys, layers) if window else [False] * layers
    return EncoderSpec(
        positions="rotary",
        norm_first=True,
        norm_bias="output_norm.bias" in gguf.tensors,
        fused=True,
        gated=True,
        windows=tuple((window // 2 + 1) * one for one in local),
        local=RotaryPositions(theta=keys.number("rope.freq_base_swa", 1.0, 1e15, 10_000.0)),
    )


def _local_layers(keys: Fields, layers: int) -> list[bool]:
    """Return for each layer whether it has a window: from a list, or all but every period-th from the first."""
    listed = keys.values.get("attention.sliding_window_pattern")
    if isinstance(listed, np.ndarray):
        if len(listed) != layers:
            raise keys.error("attention.sliding_window_pattern", f"a whole number, or a list of {layers}")
        return [bool(one) for one in listed.tolist()]
    period = keys.integer("attention.sliding_window_pattern", 1, 1 << 12, 3)
    return [layer % period > 0 for layer in range(layers)]


def _keys(gguf: Gguf, named: str) -> Fields:
    """Return the keys below the architecture's name; raise `ModelError` for an unsupported one that is set."""
    found: dict[str, Any] = {}
    for key, value in gguf.metadata.items():
        name = key.removeprefix(f"{named}.")
        if name in _KEYS and name != key:
            found[name] = value
        elif name != key and (isinstance(value, np.ndarray) or value):
            raise ModelError(f"{gguf.paths[0]}: {key[:120]} is set, which is not supported")
    keys = Fields(found, gguf.paths[0], f"{named}.")
    if keys.flag("attention.causal", False):
        raise ModelError(f"{gguf.paths[0]}: {named}.attention.causal is true, which is not supported for an encoder")
    return keys
