"""config.json of an encoder -> `ModelSpec`, and the names of its tensors.

Field names and defaults are those of transformers' configuration classes. Tensor names differ by family; a table maps
them to ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cairn.models.families.activation_spec import ACTIVATIONS as NAMED
from cairn.models.families.config_keys import ENCODER_ROWS, understood
from cairn.models.families.embedding_files import check_width, embedding_of
from cairn.models.families.families import ENCODERS, named_architecture
from cairn.models.files import Fields
from cairn.models.hub.hub import model_name
from cairn.types.errors import ModelError
from cairn.types.model_spec import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_VOCAB,
    Embedding,
    EncoderSpec,
    ModelSpec,
    Pooling,
    RopeScaling,
    RotaryPositions,
)

JUDGES = "ForSequenceClassification"
"""Suffix of architectures that judge texts or pairs of texts."""
MAX_LABELS = 1 << 10

ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh", "gelu"]] = {**NAMED, "swiglu": "silu"}

_BERT = {
    r"embeddings\.word_embeddings": "embed_tokens",
    r"embeddings\.position_embeddings": "positions",
    r"embeddings\.token_type_embeddings": "token_types",
    r"embeddings\.LayerNorm": "embed_norm",
    r"encoder\.layer\.(\d+)\.attention\.self\.query": r"layers.\1.q_proj",
    r"encoder\.layer\.(\d+)\.attention\.self\.key": r"layers.\1.k_proj",
    r"encoder\.layer\.(\d+)\.attention\.self\.value": r"layers.\1.v_proj",
    r"encoder\.layer\.(\d+)\.attention\.output\.dense": r"layers.\1.o_proj",
    r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm": r"layers.\1.attention_norm",
    r"encoder\.layer\.(\d+)\.intermediate\.dense": r"layers.\1.up_proj",
    r"encoder\.layer\.(\d+)\.output\.dense": r"layers.\1.down_proj",
    r"encoder\.layer\.(\d+)\.output\.LayerNorm": r"layers.\1.mlp_norm",
}
_ROBERTA = {**_BERT, r"classifier\.dense": "head.dense", r"classifier\.out_proj": "head.out"}
_MODERN = {
    r"embeddings\.tok_embeddings": "embed_tokens",
    r"embeddings\.norm": "embed_norm",
    r"layers\.(\d+)\.attn\.Wqkv": r"layers.\1.qkv_proj",
    r"layers\.(\d+)\.attn\.Wo": r"layers.\1.o_proj",
    r"layers\.(\d+)\.attn_norm": r"layers.\1.attention_norm",
    r"layers\.(\d+)\.mlp\.Wi": r"layers.\1.gate_up_proj",
    r"layers\.(\d+)\.mlp\.Wo": r"layers.\1.down_proj",
    r"layers\.(\d+)\.mlp_norm": r"layers.\1.mlp_norm",
    r"final_norm": "norm",
    r"head\.dense": "head.dense",
    r"head\.norm": "head.norm",
    r"classifier": "head.out",
}
_NOMIC = {
    r"embeddings\.word_embeddings": "embed_tokens",
    r"embeddings\.token_type_embeddings": "token_types",
    r"emb_ln|embeddings\.LayerNorm": "embed_norm",
    r"(?:encoder\.)?layers\.(\d+)\.attn\.Wqkv": r"layers.\1.qkv_proj",
    r"(?:encoder\.)?layers\.(\d+)\.attn\.out_proj": r"layers.\1.o_proj",
    r"(?:encoder\.)?layers\.(\d+)\.norm1": r"layers.\1.attention_norm",
    r"(?:encoder\.)?layers\.(\d+)\.mlp\.fc12": r"layers.\1.gate_proj",
    r"(?:encoder\.)?layers\.(\d+)\.mlp\.fc11": r"layers.\1.up_proj",
    r"(?:encoder\.)?layers\.(\d+)\.mlp\.fc2": r"layers.\1.down_proj",
    r"(?:encoder\.)?layers\.(\d+)\.norm2": r"layers.\1.mlp_norm",
}


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """How to read the files of one family."""

    names: Mapping[str, str]
    """Pattern of a tensor's name, without part and suffix -> ours."""
    judge: Mapping[str, str]
    """The same for tensors that only judging models have."""
    ignored: str
    """Pattern of the tensors of unused heads."""
    read: Callable[[Fields], dict[str, Any]]
    """Reads the settings of its config other than sizes."""


def _bert(config: Fields) -> dict[str, Any]:
    kind = config.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ModelError(f"{config.path}: position_embedding_type {kind[:80]!r} is not supported; absolute is")
    rows = config.integer("max_position_embeddings", 1, MAX_CONTEXT, 512)
    return {
        "context": rows,
        "bias": True,
        "encoder": {"position_rows": rows, "type_rows": config.integer("type_vocab_size", 0, 1 << 10, 2)},
        "head": "tanh",
    }


def _roberta(config: Fields) -> dict[str, Any]:
    found = _bert(config)
    first = config.integer("pad_token_id", 0, found["context"] - 1, 1) + 1
    found["encoder"] |= {"first_position": first}
    if first >= found["context"]:
        raise config.error("max_position_embeddings", f"more than {first}")
    return {**found, "context": found["context"] - first}


def _modern(config: Fields) -> dict[str, Any]:
    layers = config.integer("num_hidden_layers", 1, 1 << 12, 22)
    for name in ("attention_bias", "mlp_bias"):
        if config.flag(name, False):
            raise ModelError(f"{config.path}: {name} is not supported")
    if (named := config.text("classifier_activation", "gelu")) != "gelu":
        raise ModelError(f"{config.path}: classifier_activation {named[:80]!r} is not supported; gelu is")
    ropes = config.object("rope_parameters")
    window = config.integer("local_attention", 2, MAX_CONTEXT, 128) // 2 + 1
    return {
        "context": config.integer("max_position_embeddings", 1, MAX_CONTEXT, 8192),
        "bias": False,
        "eps": 1e-5,
        "theta": _theta(ropes.object("full_attention"), config, "global_rope_theta", 160_000.0),
        "encoder": {
            "positions": "rotary",
            "norm_first": True,
            "norm_bias": config.flag("norm_bias", False),
            "fused": True,
            "gated": True,
            "windows": tuple(window * one for one in _windowed(config, layers)),
            "local": RotaryPositions(
                theta=_theta(ropes.object("sliding_attention"), config, "local_rope_theta", 10_000.0)
            ),
        },
        "head": "norm",
        "head_bias": config.flag("classifier_bias", False),
    }


def _windowed(config: Fields, layers: int) -> list[bool]:
    """Return for each layer whether it has a window."""
    if not config.has("layer_types"):
        period = config.integer("global_attn_every_n_layers", 1, 1 << 12, 3)
        return [layer % period > 0 for layer in range(layers)]
    kinds = config.values["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != layers or {*kinds} - {"full_attention", "sliding_attention"}:
        raise config.error("layer_types", f"a list of {layers} entries, each full_attention or sliding_attention")
    return [kind == "sliding_attention" for kind in kinds]


def _nomic(config: Fields) -> dict[str, Any]:
    biases = ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")
    for name in ("prenorm", "use_rms_norm", "parallel_block", "causal", *biases):
        if config.flag(name, False):
            raise ModelError(f"{config.path}: {name} is not supported")
    if config.number("rotary_emb_fraction", 0.0, 1.0, 1.0) != 1:
        raise ModelError(f"{config.path}: rotary_emb_fraction other than 1 is not supported")
    heads = config.integer("num_attention_heads", 1, 1 << 14)
    if config.has("head_dim") and heads * config.integer("head_dim", 1, MAX_HEAD_DIM) != config.values["hidden_size"]:
        raise ModelError(f"{config.path}: head_dim other than hidden_size / num_attention_heads is not supported")
    if config.has("moe_every_n_layers") and config.integer("moe_every_n_layers", 0, 1 << 12):
        raise ModelError(f"{config.path}: experts (moe_every_n_layers) are not supported")
    return {
        "context": config.integer("max_position_embeddings", 1, MAX_CONTEXT, 2048),
        "bias": False,
        "theta": _theta(config.object("rope_parameters"), config, "rotary_emb_base", 1_000.0),
        "encoder": {
            "positions": "rotary",
            "type_rows": config.integer("type_vocab_size", 0, 1 << 10, 2),
            "fused": True,
            "gated": True,
        },
    }


def _theta(rope: Fields, config: Fields, name: str, default: float) -> float:
    kind = rope.text("rope_type", "default")
    if kind != "default":
        raise ModelError(f"{config.path}: rope scaling {kind[:80]!r} is not supported for an encoder")
    return (rope if rope.has("rope_theta") else config).number(
        "rope_theta" if rope.has("rope_theta") else name, 1.0, 1e15, default
    )


_POOLER = {r"pooler\.dense": "head.dense", r"classifier": "head.out"}
_FAMILIES = {
    "Bert": EncoderFamily(_BERT, _POOLER, r"pooler\..*|cls\..*", _bert),
    "Roberta": EncoderFamily(_ROBERTA, {}, r"pooler\..*|lm_head\..*", _roberta),
    "XLMRoberta": EncoderFamily(_ROBERTA, {}, r"pooler\..*|lm_head\..*", _roberta),
    "ModernBert": EncoderFamily(_MODERN, {}, r"head\..*|decoder\..*", _modern),
    "NomicBert": EncoderFamily(_NOMIC, {}, r"pooler\..*|cls\..*", _nomic),
}
_PART = re.compile(r"(?:bert|roberta|model)\.(?=embeddings\.|encoder\.|layers\.|final_norm|pooler\.)")
_HEAD = re.compile(r"(Model|ForMaskedLM|ForSequenceClassification)\Z")
_BUFFERS = re.compile(r".*\.(position_ids|token_type_ids|inv_freq)")
_OLD = {"gamma": "weight", "beta": "bias"}
_SYNONYMS = {
    **{"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
    **{"n_inner": "intermediate_size", "layer_norm_epsilon": "layer_norm_eps", "norm_eps": "layer_norm_eps"},
    **{"activation_function": "hidden_act", "hidden_activation": "hidden_act"},
    **{"max_trained_positions": "max_position_embeddings"},
}
"""Other names of fields in some families."""


def is_encoder(config: Fields) -> bool:
    """Return whether a config.json is an encoder's."""
    return named_architecture(config) in ENCODERS


def encoder_family(architecture: str) -> EncoderFamily:
    """Return the row of an architecture in `ENCODERS`."""
    return _FAMILIES[_HEAD.sub("", architecture)]


def encoder_spec(config: Fields, folder: Path) -> ModelSpec:
    """Return the spec of an encoder; raise `ModelFileError` for a wrong field, `ModelError` if it is unsupported."""
    architecture = named_architecture(config)
    if config.has("quantization_config"):
        raise ModelError(f"{config.path}: quantised safetensors (quantization_config) are not supported")
    row = ENCODER_ROWS[_HEAD.sub("", architecture)]
    config = understood(config, architecture, row)
    known = {ours: config.values[theirs] for theirs, ours in _SYNONYMS.items() if config.has(theirs)}
    config = Fields({**known, **config.values}, config.path)
    read = encoder_family(architecture).read(config)
    hidden, heads = config.integer("hidden_size", 1, 1 << 20), config.integer("num_attention_heads", 1, 1 << 14)
    if hidden % (2 * heads) or hidden // heads > MAX_HEAD_DIM:
        raise config.error(
            "num_attention_heads", f"such that hidden_size ({hidden}) divides into heads of an even size"
        )
    activation = config.text("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        known_ones = ", ".join(sorted(ACTIVATIONS))
        raise ModelError(f"{config.path}: hidden_act {activation[:80]!r} is not supported; supported are {known_ones}")
    judges = architecture.endswith(JUDGES)
    head = {"head": read["head"], "head_bias": read.get("head_bias", True), "labels": _labels(config)} if judges else {}
    layers, bias = config.integer("num_hidden_layers", 1, 1 << 12), read["bias"]
    return ModelSpec(
        name=model_name(folder),
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=config.integer("intermediate_size", 1, 1 << 22),
        vocab=config.integer("vocab_size", 1, MAX_VOCAB),
        context=read["context"],
        norm_eps=config.number("layer_norm_eps", 0.0, 1.0, read.get("eps", 1e-12)),
        rope_theta=read.get("theta", 10_000.0),
        rope_scaling=RopeScaling(),
        activation=ACTIVATIONS[activation],
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        groups=(),
        kind="rerank" if judges else "embed",
        embedding=_embedding(config, folder, judges),
        encoder=EncoderSpec(**read["encoder"], **head),
    )


def _embedding(config: Fields, folder: Path, judges: bool) -> Embedding:
    """Return the embedding settings; the default pooling is the mean, as in sentence-transformers."""
    if not judges:
        found = embedding_of(folder) or Embedding(pooling="mean")
        check_width(found, config.integer("hidden_size", 1, 1 << 20), folder)
        return found
    pooling: Pooling = "mean" if config.text("classifier_pooling", "cls") == "mean" else "cls"
    return Embedding(pooling=pooling)


def _labels(config: Fields) -> int:
    """Return the number of scores: the number of labels, or 2 by default as in transformers."""
    if config.has("id2label"):
        count = len(config.object("id2label").values)
        if not 1 <= count <= MAX_LABELS:
            raise config.error("id2label", f"an object of 1 to {MAX_LABELS} labels")
        return count
    return config.integer("num_labels", 1, MAX_LABELS, 2)


def own_name(spec: ModelSpec, stored: str) -> str:
    """Return our name of a stored tensor: "" if it is not used, the stored name if it is unknown."""
    family = encoder_family(spec.architecture)
    name = _PART.sub("", stored, count=1) if _PART.match(stored) else stored
    if _BUFFERS.fullmatch(name):
        return ""
    stem, _, suffix = name.rpartition(".")
    names = {**family.names, **family.judge} if spec.kind == "rerank" else family.names
    for pattern, ours in names.items():
        if match := re.fullmatch(pattern, stem):
            return f"{match.expand(ours)}.{_OLD.get(suffix, suffix)}"
    return "" if re.fullmatch(family.ignored, name) else stored


def encoder_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return our name and the shape of every tensor of an encoder; matrices are [out, in]."""
    encoder = spec.encoder
    assert encoder is not None
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (spec.vocab, spec.hidden)}
    if encoder.position_rows:
        shapes["positions.weight"] = (encoder.position_rows, spec.hidden)
    if encoder.type_rows:
        shapes["token_types.weight"] = (encoder.type_rows, spec.hidden)

    shapes |= _norm("embed_norm", spec.hidden, encoder.norm_bias)
    for layer in range(spec.layers):
        prefix = f"layers.{layer}."
        for name, out in _inputs(spec, encoder):
            shapes |= _matrix(prefix + name, out, spec.hidden, spec.mlp_bias if name in _MLP else spec.qkv_bias)
        shapes |= _matrix(f"{prefix}o_proj", spec.hidden, spec.hidden, spec.out_bias)
        shapes |= _matrix(f"{prefix}down_proj", spec.hidden, spec.ffn, spec.mlp_bias)
        if layer or not encoder.norm_first:  # the embedding norm serves as the first layer's
            shapes |= _norm(f"{prefix}attention_norm", spec.hidden, encoder.norm_bias)
        shapes |= _norm(f"{prefix}mlp_norm", spec.hidden, encoder.norm_bias)
    if encoder.norm_first:
        shapes |= _norm("norm", spec.hidden, encoder.norm_bias)
    if encoder.labels:
        shapes |= _matrix("head.dense", spec.hidden, spec.hidden, encoder.head_bias)
        if encoder.head == "norm":
            shapes |= _norm("head.norm", spec.hidden, encoder.norm_bias)
        shapes |= _matrix("head.out", encoder.labels, spec.hidden, True)
    return shapes


def _matrix(name: str, out: int, inner: int, bias: bool) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {f"{name}.weight": (out, inner)}
    return found | {f"{name}.bias": (out,)} if bias else found


def _norm(name: str, size: int, bias: bool) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys((f"{name}.weight", f"{name}.bias")[: 1 + bias], (size,))


_MLP = ("gate_up_proj", "gate_proj", "up_proj")


def qkv_names(encoder: EncoderSpec) -> tuple[str, ...]:
    """Return the names of the query, key and value matrices."""
    return ("qkv_proj",) if encoder.fused else ("q_proj", "k_proj", "v_proj")


def mlp_names(encoder: EncoderSpec) -> tuple[str, ...]:
    """Return the names of the first matrices of the MLP."""
    if not encoder.gated:
        return ("up_proj",)
    return ("gate_up_proj",) if encoder.fused and encoder.norm_first else ("gate_proj", "up_proj")


def _inputs(spec: ModelSpec, encoder: EncoderSpec) -> list[tuple[str, int]]:
    """Return every matrix that multiplies a layer's hidden state, with its output size."""
    wide = {"qkv_proj": 3 * spec.hidden, "gate_up_proj": 2 * spec.ffn}
    plain = dict.fromkeys(("q_proj", "k_proj", "v_proj"), spec.hidden) | dict.fromkeys(_MLP[1:], spec.ffn)
    return [(name, (plain | wide)[name]) for name in (*qkv_names(encoder), *mlp_names(encoder))]
