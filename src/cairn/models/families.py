"""The architectures of folders that are built. This imports nothing large: whoever starts looks here first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cairn.errors import ModelError
from cairn.models.files import Fields


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture differs from the plain decoder. A string names the config field that decides."""

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    head_dim: int | None = None
    """Default head size; None: hidden_size / num_attention_heads."""
    kv_heads: int | None = None
    """Default of num_key_value_heads; None: num_attention_heads."""
    window: Literal["none", "all", "by layer", "by type"] = "none"
    """Which layers `sliding_window` limits: "by layer" where `use_sliding_window` is set, "by type" always; which those
    are, `layer_types` says, or else `max_window_layers` and `period`."""
    period: int = 0
    """Every so many-th layer has no window."""
    local_rope: bool = False
    """Whether layers with a window have rotary positions of their own."""
    gemma: bool = False
    """Whether norms multiply by 1 + w and also stand behind attention and MLP, embeddings are scaled by the root of
    their width, `query_pre_attn_scalar` is the scale of scores, and these and the logits may have a softcap."""
    nested: bool = False
    """Whether the model is the text part of a larger one: `text_config`, and tensors with a prefix."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of fields that a config may leave out."""


_GEMMA: dict[str, Any] = {
    **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096},
    **{"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "bos_token_id": 2, "eos_token_id": 1},
}
_GEMMA_2 = Family(
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    window="by type",
    period=2,
    gemma=True,
    defaults=_GEMMA
    | {"vocab_size": 256_000, "max_position_embeddings": 8192}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
)
_GEMMA_3 = Family(
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm=True,
    window="by type",
    period=6,
    local_rope=True,
    gemma=True,
    defaults=_GEMMA
    | {"vocab_size": 262_208, "max_position_embeddings": 131_072}
    | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
)

FAMILIES = {
    "LlamaForCausalLM": Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
    "MistralForCausalLM": Family(kv_heads=8, window="all"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, kv_heads=32, window="by layer"),
    "Qwen3ForCausalLM": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm=True,
        head_dim=128,
        kv_heads=32,
        window="by layer",
    ),
    "Gemma2ForCausalLM": _GEMMA_2,
    "Gemma3ForCausalLM": _GEMMA_3,
    "Gemma3ForConditionalGeneration": replace(_GEMMA_3, nested=True),
}


MODULES = "modules.json"
"""The file by which a folder says that its model makes embeddings."""
ENCODERS = (
    *("BertModel", "BertForMaskedLM", "BertForSequenceClassification"),
    *("RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification"),
    *("XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification"),
    *("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
    "NomicBertModel",
)
"""The architectures of encoders; what each means is in `encoder_spec`."""


def named_architecture(config: Fields) -> str:
    """The architecture that a config.json names."""
    named = config.values.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise config.error("architectures", "a list with one architecture name")
    return named[0]


def check_architecture(config: Fields) -> None:
    """Raise `ModelError` for a config.json whose architecture is not built."""
    if named_architecture(config) not in ENCODERS:
        family_of(config, bare=(config.path.parent / MODULES).exists())


def family_of(config: Fields, *, bare: bool = False) -> tuple[str, Family]:
    """The architecture of a config.json, and what it means. Raises `ModelError` naming one that is not built.

    `bare`: the model may be named as one without a head, as those that make embeddings are.
    """
    name = named_architecture(config)
    headed = f"{name.removesuffix('Model')}ForCausalLM"
    if bare and name.endswith("Model") and headed in FAMILIES:
        name = headed
    if name not in FAMILIES:
        known = ", ".join(sorted([*FAMILIES, *ENCODERS]))
        raise ModelError(f"{config.path}: the architecture {name[:80]!r} is not supported; supported are {known}")
    if config.has("quantization_config"):
        raise ModelError(f"{config.path}: quantised safetensors (quantization_config) are not supported")
    if config.has("use_bidirectional_attention") and config.flag("use_bidirectional_attention", False):
        raise ModelError(f"{config.path}: use_bidirectional_attention is true; such a model does not generate text")
    return name, FAMILIES[name]


def text_config(config: Fields, family: Family) -> Fields:
    """The fields of the part that answers, with what the family has where the config says nothing."""
    inner = config.object("text_config") if family.nested else config
    around = {key: config.values[key] for key in _AROUND if key in config.values}
    return Fields({**family.defaults, **inner.values, **around}, config.path, inner.prefix)


_AROUND = ("eos_token_id", "bos_token_id", "tie_word_embeddings")
"""What a config says beside its `text_config` of that part too."""
