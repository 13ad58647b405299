"""The supported architectures of model folders, one row each. Imports nothing large: it is checked first at start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cairn.models.files import MODULES, Fields
from cairn.models.quantization.quantized_config import scheme_of
from cairn.types.errors import ModelError


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture differs from the plain decoder. A string names the config field that decides."""

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool | str = False
    qk_norm_whole: bool = False
    """Whether the norm spans all heads together."""
    plain_norm: bool | str = False
    """Whether queries and keys are normed without a weight."""
    pre_norms: bool = True
    post_norms: bool = False
    """Whether norms stand before (`pre_norms`) and after (`post_norms`) attention and MLP."""
    head_dim: int | None = None
    """Default head size; None: hidden_size / num_attention_heads."""
    kv_heads: int | None = None
    """Default of num_key_value_heads; None: num_attention_heads."""
    window: Literal["none", "all", "by layer", "by type", "unturned"] = "none"
    """Which layers `sliding_window` limits. "by layer": those listed, if `use_sliding_window` is set; "by type": always
    those listed. The list is `layer_types`, else it follows from `max_window_layers` and `period`. "unturned": all
    layers with positions attend within chunks of `attention_chunk_size`."""
    period: int = 0
    """Every `period`-th layer has no window."""
    local_rope: bool = False
    """Whether layers with a window have their own rope theta."""
    gemma: bool = False
    """Whether norms multiply by 1 + w and also follow attention and MLP, embeddings are scaled by sqrt(hidden), scores
    by `query_pre_attn_scalar`, and scores and logits may have a softcap."""
    nested: bool = False
    """Whether the model is the text part of a larger one: `text_config`, and tensors with a prefix."""
    mixture: str = ""
    """Row of `moe_spec.MIXTURES`; "": no experts."""
    multipliers: bool = False
    """Whether `embedding_multiplier`, `attention_multiplier`, `residual_multiplier` and `logits_scaling` are read."""
    sinks: bool = False
    activation: Literal["clamped_silu", "relu2", "xielu"] | None = None
    """Activation of the MLP, if configs do not state it."""
    rotary: bool = False
    """Whether `partial_rotary_factor` is read."""
    unturned: bool | Literal["by window"] = False
    """Whether `no_rope_layers` lists the layers without positions (0), or else every `no_rope_layer_interval`-th has
    none. "by window": layers without a window, if others have one."""
    unscaled: bool = False
    """Whether layers with a window use unscaled rotary positions."""
    query_scaling: bool = False
    """Whether `llama_4_scaling_beta` is read."""
    late_norms: bool = False
    """Whether queries and keys are rotated before they are normed."""
    stretched: bool = False
    """Whether the rotary setting `alpha` scales theta; configs call it dynamic."""
    long_rope: bool = False
    """Whether rotary positions may be scaled by lists of factors, one for short and one for long contexts."""
    uneven: bool = False
    """Whether layers differ in shape: see `uneven_spec`."""
    streams: bool = False
    """Whether the hidden state is kept in several streams (AltUp)."""
    latent: bool = False
    """Whether attention is multi-head latent attention: see `latent_spec`."""
    packed: bool = False
    """Whether its safetensors may hold experts in MXFP4."""
    ahead: bool = False
    """Whether multi-token-prediction layers may follow the last layer: see `ahead_spec`."""
    recurrence: str = ""
    """Rule of `recurrent_spec` that finds the recurrent layers; "": none."""
    alone: bool = False
    """Whether a layer is either a mixer (attention or recurrent) or an MLP."""
    mlp_gated: bool = True
    output_gate: bool = False
    """Whether each head's query comes with a gate that multiplies the attention output."""
    centred: bool = False
    """Whether norms multiply by 1 + w, except those of recurrent layers."""
    positions: str = ""
    """Field that states whether layers have rotary positions: only if it is "rope"."""
    sections: bool = False
    """Whether positions may have sections for images, which do not affect text."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields that a config may omit."""


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

_GEMMA_4 = Family(
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm=True,
    post_norms=True,
    window="by type",
    period=6,
    local_rope=True,
    uneven=True,
    mixture="gemma4",
    defaults={
        **{"num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512},
        **{"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "bos_token_id": 2, "eos_token_id": 1},
        "vocab_size": 262_144,
        "max_position_embeddings": 131_072,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    },
)

_GEMMA_3N = Family(
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm=True,
    post_norms=True,
    window="by type",
    period=5,
    local_rope=True,
    uneven=True,
    streams=True,
    defaults={
        **{"num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512, "num_kv_shared_layers": 15},
        **{"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "bos_token_id": 2, "eos_token_id": 1},
        **{"vocab_size": 262_400, "max_position_embeddings": 32_768, "final_logit_softcapping": 30.0},
    },
)

_OLMO_2 = Family(
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm=True,
    qk_norm_whole=True,
    pre_norms=False,
    post_norms=True,
    defaults={"rms_norm_eps": 1e-5},
)
_QWEN_3_5 = Family(
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm=True,
    head_dim=256,
    kv_heads=4,
    rotary=True,
    ahead=True,
    recurrence="delta",
    output_gate=True,
    centred=True,
    sections=True,
    defaults={"partial_rotary_factor": 0.25},
)
_QWEN_3_5_MOE = replace(_QWEN_3_5, kv_heads=2, mixture="qwen3.5")
_LFM: dict[str, Any] = {"norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True}
_LFM_2 = Family(qk_norm=True, kv_heads=8, recurrence="conv", defaults=_LFM)
_ALWAYS_FULL: dict[str, Any] = {"sliding_window": None}
"""Default of families where a missing window means none."""

_DEEPSEEK_3 = Family(
    latent=True,
    mixture="deepseek3",
    out_bias="attention_bias",
    ahead=True,
    defaults={"norm_topk_prob": True, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "n_shared_experts": 1},
)

_MISTRAL_4 = replace(
    _DEEPSEEK_3,
    mixture="mistral4",
    ahead=False,
    query_scaling=True,
    defaults={
        **{"norm_topk_prob": True, "n_shared_experts": 1},
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    },
)

_LLAMA_4 = Family(
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    head_dim=128,
    kv_heads=8,
    window="unturned",
    unturned=True,
    plain_norm="use_qk_norm",
    mixture="llama4",
    defaults={"use_qk_norm": True, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "intermediate_size_mlp": 16384},
)

FAMILIES = {
    "LlamaForCausalLM": Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
    "Llama4ForCausalLM": _LLAMA_4,
    "Llama4ForConditionalGeneration": replace(_LLAMA_4, nested=True),
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
    "Qwen2MoeForCausalLM": Family(qkv_bias="qkv_bias", mixture="qwen2", defaults={"qkv_bias": True}),
    "Qwen3MoeForCausalLM": Family(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True, mixture="qwen3"),
    "MixtralForCausalLM": Family(
        kv_heads=8, window="all", mixture="mixtral", defaults=_ALWAYS_FULL | {"rope_theta": 1e6}
    ),
    "OlmoeForCausalLM": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm=True,
        qk_norm_whole=True,
        mixture="olmo",
        defaults={"rms_norm_eps": 1e-5},
    ),
    "GptOssForCausalLM": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        head_dim=64,
        kv_heads=8,
        window="by type",
        period=2,
        mixture="gpt-oss",
        sinks=True,
        activation="clamped_silu",
        packed=True,
        defaults={"attention_bias": True, "sliding_window": 128, "rope_theta": 150_000.0, "rms_norm_eps": 1e-5},
    ),
    "Glm4MoeForCausalLM": Family(
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        kv_heads=8,
        mixture="glm4",
        rotary=True,
        ahead=True,
        defaults={
            **{"partial_rotary_factor": 0.5, "norm_topk_prob": True, "first_k_dense_replace": 1},
            **{"rms_norm_eps": 1e-5},
        },
    ),
    "DeepseekV2ForCausalLM": Family(
        latent=True, mixture="deepseek2", out_bias="attention_bias", defaults={"norm_topk_prob": False}
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK_3,
    "Glm4MoeLiteForCausalLM": replace(
        _DEEPSEEK_3, mixture="glm4 lite", defaults={"norm_topk_prob": True, "rms_norm_eps": 1e-5, "n_shared_experts": 1}
    ),
    "Mistral4ForCausalLM": _MISTRAL_4,
    "GraniteForCausalLM": Family(
        qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias", multipliers=True
    ),
    "SmolLM3ForCausalLM": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        kv_heads=4,
        unturned=True,
        defaults={"rope_theta": 2e6},
    ),
    "Olmo2ForCausalLM": _OLMO_2,
    "Olmo3ForCausalLM": replace(
        _OLMO_2,
        window="by type",
        period=4,
        unscaled=True,
        defaults={"rope_theta": 5e5, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    ),
    "Exaone4ForCausalLM": Family(
        qk_norm=True,
        kv_heads=32,
        pre_norms=False,
        post_norms=True,
        window="by type",
        period=4,
        unturned="by window",
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
    ),
    "Glm4ForCausalLM": Family(
        qkv_bias="attention_bias",
        post_norms=True,
        head_dim=128,
        kv_heads=2,
        rotary=True,
        defaults={"attention_bias": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7},
    ),
    "SeedOssForCausalLM": Family(
        qkv_bias="attention_bias", out_bias="attention_out_bias", mlp_bias="mlp_bias", defaults={"attention_bias": True}
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm=True,
        late_norms=True,
        stretched=True,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "ApertusForCausalLM": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm=True,
        mlp_gated=False,
        activation="xielu",
        defaults={"rope_theta": 12e6, "rms_norm_eps": 1e-5},
    ),
    "Phi3ForCausalLM": Family(
        window="all",
        rotary=True,
        long_rope=True,
        defaults=_ALWAYS_FULL | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    "Ministral3ForCausalLM": Family(kv_heads=8, window="all", query_scaling=True, defaults=_ALWAYS_FULL),
    "Gemma3nForCausalLM": _GEMMA_3N,
    "Gemma3nForConditionalGeneration": replace(_GEMMA_3N, nested=True),
    "Gemma4ForCausalLM": _GEMMA_4,
    "Gemma4ForConditionalGeneration": replace(_GEMMA_4, nested=True),
    "Qwen3_5ForCausalLM": _QWEN_3_5,
    "Qwen3_5ForConditionalGeneration": replace(_QWEN_3_5, nested=True),
    "Qwen3_5MoeForCausalLM": _QWEN_3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": replace(_QWEN_3_5_MOE, nested=True),
    "Qwen3NextForCausalLM": replace(
        _QWEN_3_5,
        kv_heads=2,
        mixture="qwen2",
        defaults={"partial_rotary_factor": 0.25, "norm_topk_prob": True},
    ),
    "Lfm2ForCausalLM": _LFM_2,
    "Lfm2MoeForCausalLM": replace(
        _LFM_2, mixture="lfm2", defaults=_LFM | {"norm_topk_prob": True, "num_dense_layers": 2}
    ),
    "GraniteMoeHybridForCausalLM": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mixture="granite",
        multipliers=True,
        recurrence="mamba2",
        positions="position_embedding_type",
    ),
    "NemotronHForCausalLM": Family(
        head_dim=128,
        kv_heads=8,
        mixture="nemotron",
        recurrence="nemotron",
        positions="position_embedding_type",
        alone=True,
        mlp_gated=False,
        activation="relu2",
        mlp_bias="mlp_bias",
        ahead=True,
        defaults={"layer_norm_epsilon": 1e-5, "norm_topk_prob": True},
    ),
    "Mamba2ForCausalLM": Family(
        recurrence="mamba",
        alone=True,
        # Its context is unlimited, and no config states one.
        defaults={
            **{"num_attention_heads": 1, "intermediate_size": 1, "max_position_embeddings": 1 << 17, "head_dim": 64},
            **{"num_heads": 128, "layer_norm_epsilon": 1e-5, "hidden_size": 4096},
        },
    ),
    "Gemma2ForCausalLM": _GEMMA_2,
    "Gemma3ForCausalLM": _GEMMA_3,
    "Gemma3ForConditionalGeneration": replace(_GEMMA_3, nested=True),
}


_PARTS = {
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral4": "Mistral4ForCausalLM",
    }
}
"""Multimodal models whose text part is one of several families: its `model_type` names it."""
FAMILIES |= {
    f"{name} ({kind})": replace(FAMILIES[own], nested=True)
    for name, kinds in _PARTS.items()
    for kind, own in kinds.items()
}


def without_part(architecture: str) -> str:
    """Return the architecture of a multimodal model's text part; other names are returned unchanged."""
    name, _, kind = architecture.partition(" (")
    return _PARTS.get(name, {}).get(kind.removesuffix(")"), architecture)


AHEAD = 8
"""Most multi-token-prediction layers after the last layer."""
ENCODERS = (
    *("BertModel", "BertForMaskedLM", "BertForSequenceClassification"),
    *("RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification"),
    *("XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification"),
    *("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
    "NomicBertModel",
)
"""Architectures of encoders, described in `encoder_spec`."""


_HEAD = re.compile(r"(For[A-Z]\w+|Model)\Z")
"""Suffix of an architecture's name after the family."""


def named_architecture(config: Fields) -> str:
    """Return the architecture that a config.json names."""
    named = config.values.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise config.error("architectures", "a list with one architecture name")
    return named[0]


def check_architecture(config: Fields) -> None:
    """Raise `ModelError` if a config.json's architecture is not supported."""
    if named_architecture(config) not in ENCODERS:
        family_of(config, bare=(config.path.parent / MODULES).exists())


def family_of(config: Fields, *, bare: bool = False) -> tuple[str, Family]:
    """Return the architecture of a config.json and its row; raise `ModelError` for an unsupported one.

    `bare`: names of models without a head are accepted, as embedding models have them.
    """
    name = named_architecture(config)
    headed = f"{name.removesuffix('Model').removesuffix('Text')}ForCausalLM"
    if bare and name.endswith("Model") and headed in FAMILIES:
        name = headed
    if name in _PARTS:
        kind = config.object("text_config").text("model_type", "mistral")
        if kind not in _PARTS[name]:
            raise ModelError(f"{config.path}: a {name} whose text part is {kind[:80]!r} is not supported")
        name = f"{name} ({kind})"
    if name not in FAMILIES:
        known = ", ".join(
            sorted({_HEAD.sub("", one.partition(" (")[0]) for one in (*FAMILIES, *ENCODERS)})
        )  # families only, so that the message stays short
        raise ModelError(f"{config.path}: the architecture {name[:80]!r} is not supported; supported are {known}")
    scheme_of(config, FAMILIES[name].packed)
    if sees_both(config) and not bare:
        raise ModelError(f"{config.path}: use_bidirectional_attention is true; such a model does not generate text")
    if not config.flag("is_causal", True) or (sees_both(config) and not FAMILIES[name].local_rope):
        raise ModelError(f"{config.path}: attention in both directions is not supported for {name}")
    return name, FAMILIES[name]


def sees_both(config: Fields) -> bool:
    """Return whether a decoder's attention is bidirectional."""
    if config.values.get("use_bidirectional_attention") == "vision":  # only among image tokens
        return False
    return config.has("use_bidirectional_attention") and config.flag("use_bidirectional_attention", False)


def text_config(config: Fields, family: Family) -> Fields:
    """Return the fields of the text part, with the family's defaults for missing ones."""
    inner = config.object("text_config") if family.nested else config
    around = {key: config.values[key] for key in _AROUND if key in config.values}
    return Fields({**family.defaults, **inner.values, **around}, config.path, inner.prefix)


_AROUND = ("eos_token_id", "bos_token_id", "tie_word_embeddings")
"""Fields beside `text_config` that apply to the text part too."""
