"""The fields of each family's config.json: which are read, and which may have only certain values.

A row lists the fields that the family's configuration class of transformers reads. An unsupported field that changes a
number is refused by name. A test compares the rows with the classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cairn.models.families.families import without_part
from cairn.models.files import Fields
from cairn.types.errors import ModelError


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """Fields of one family's config.json in addition to `COMMON` and `HARMLESS`."""

    used: frozenset[str] = frozenset()
    harmless: frozenset[str] = frozenset()
    """Fields that change no answer of this family, although they would for another."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Field -> supported values; for a list, the supported entries. Null counts as absent."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other name -> the field."""


COMMON = frozenset(
    (
        *("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings", "bos_token_id", "eos_token_id"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "intermediate_size"),
        *("rope_parameters", "rope_scaling", "rope_theta", "rms_norm_eps"),
    )
)
"""Fields read for every decoder that has them."""
HARMLESS = frozenset(
    (
        # Training only: dropout, initial values, losses.
        *(
            "attention_dropout",
            "hidden_dropout",
            "residual_dropout",
            "embd_pdrop",
            "resid_pdrop",
            "router_jitter_noise",
        ),
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "embedding_dropout"),
        *("mlp_dropout", "initializer_range", "initializer_cutoff_factor", "rescale_prenorm_residual"),
        *("router_aux_loss_coef", "altup_coef_clip", "time_step_max", "time_step_floor", "sparse_pred_ignore_index"),
        # How transformers computes or what it returns, not the numbers.
        *("use_cache", "output_router_logits", "pretraining_tp", "use_mamba_kernels", "num_logits_to_keep"),
        *("mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "chunk_size", "mamba_chunk_size", "residual_in_fp32"),
        *("output_hidden_states", "return_dict", "dtype", "chunk_size_feed_forward", "deterministic_flash_attn"),
        # Names, and token ids that the computation does not read.
        *("transformers_version", "architectures", "id2label", "label2id", "problem_type", "num_labels"),
        *("pad_token_id", "eod_token_id", "cls_token_id", "sep_token_id"),
        # Multi-token-prediction layers, which only guess.
        *("num_nextn_predict_layers", "num_mtp_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    )
)
"""Fields that never change an answer."""
EVERYWHERE: Mapping[str, tuple[Any, ...]] = {"per_layer_config": (), "is_encoder_decoder": (False,)}
"""`ConfigKeys.only` of every family that does not read them."""

_BIASED = frozenset({"attention_bias", "hidden_act"})
_SWISH = ("silu", "swish")
_EXPERTS = frozenset({"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"})
_ROUTED = frozenset(
    (
        *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
        *("n_group", "topk_group", "routed_scaling_factor"),
    )
)
_GROUPS = frozenset({"n_group", "topk_group"})
_FIRST_DENSE = frozenset({"first_k_dense_replace"})
_LATENT = _ROUTED | {
    *("attention_bias", "hidden_act", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"),
    *("v_head_dim", "rope_interleave"),
}
_BY_STEP = frozenset({"decoder_sparse_step", "mlp_only_layers"})
_WINDOW_BY_LAYER = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
_NO_WINDOW: Mapping[str, tuple[Any, ...]] = {"use_sliding_window": (False,), "layer_types": ("full_attention",)}
_UNUSED_WINDOW = frozenset({"sliding_window", "max_window_layers"})
"""Fields without effect if `use_sliding_window` is false."""
_GEMMA = frozenset(
    (
        *("attention_bias", "hidden_activation", "layer_types", "sliding_window", "final_logit_softcapping"),
        "use_bidirectional_attention",
    )
)
_DELTA = frozenset(
    (
        *("attention_bias", "full_attention_interval", "layer_types", "partial_rotary_factor"),
        *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
        "linear_value_head_dim",
    )
)
_MULTIPLIED = frozenset({"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"})
_LFM = frozenset({"block_ff_dim", "conv_L_cache", "conv_bias", "layer_types", "norm_eps", "tie_embedding"})

ROWS: Mapping[str, ConfigKeys] = {
    "LlamaForCausalLM": ConfigKeys(_BIASED | {"mlp_bias"}),
    "Llama4ForCausalLM": ConfigKeys(
        _BIASED
        | {
            *("attention_chunk_size", "attn_scale", "attn_temperature_tuning", "floor_scale", "layer_types"),
            *("interleave_moe_layer_step", "intermediate_size_mlp", "moe_layers", "no_rope_layer_interval"),
            *("no_rope_layers", "num_experts_per_tok", "num_local_experts", "use_qk_norm"),
        }
    ),
    "MistralForCausalLM": ConfigKeys(frozenset({"hidden_act", "sliding_window"})),
    "Ministral3ForCausalLM": ConfigKeys(frozenset({"hidden_act", "sliding_window"})),
    "Mistral4ForCausalLM": ConfigKeys(_LATENT | _FIRST_DENSE, aliases={"num_local_experts": "n_routed_experts"}),
    "MixtralForCausalLM": ConfigKeys(
        frozenset({"hidden_act", "sliding_window", "num_local_experts", "num_experts_per_tok"}),
        aliases={"num_experts": "num_local_experts"},
    ),
    "Qwen2ForCausalLM": ConfigKeys(_WINDOW_BY_LAYER | {"hidden_act"}),
    "Qwen3ForCausalLM": ConfigKeys(_WINDOW_BY_LAYER | _BIASED),
    "Qwen2MoeForCausalLM": ConfigKeys(
        _EXPERTS | _BY_STEP | {"hidden_act", "qkv_bias", "shared_expert_intermediate_size"},
        harmless=_UNUSED_WINDOW,
        only=_NO_WINDOW,
    ),
    "Qwen3MoeForCausalLM": ConfigKeys(
        _EXPERTS | _BY_STEP | _BIASED, _UNUSED_WINDOW, only=_NO_WINDOW, aliases={"num_local_experts": "num_experts"}
    ),
    "OlmoeForCausalLM": ConfigKeys(
        _BIASED | {"num_experts", "num_experts_per_tok", "norm_topk_prob"},
        only={"clip_qkv": (), "sliding_window": ()},
        aliases={"num_local_experts": "num_experts"},
    ),
    "GptOssForCausalLM": ConfigKeys(
        frozenset(
            {"attention_bias", "layer_types", "sliding_window", "num_local_experts", "num_experts_per_tok"}
            | {"original_max_position_embeddings"}
        ),
        harmless=frozenset({"hidden_act"}),  # the gate is always the same
        only={"swiglu_alpha": (1.702,), "swiglu_limit": (7,)},
        aliases={"num_experts": "num_local_experts"},
    ),
    "Glm4MoeForCausalLM": ConfigKeys(
        _ROUTED | _FIRST_DENSE | _BIASED | {"use_qk_norm", "partial_rotary_factor"},
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    "DeepseekV2ForCausalLM": ConfigKeys(
        (_LATENT | _FIRST_DENSE) - _GROUPS,
        _GROUPS,  # used only with another topk_method
        only={"mlp_bias": (False,), "topk_method": ("greedy",)},
        aliases={"num_experts": "n_routed_experts"},
    ),
    "DeepseekV3ForCausalLM": ConfigKeys(_LATENT | _FIRST_DENSE, aliases={"num_local_experts": "n_routed_experts"}),
    "Glm4MoeLiteForCausalLM": ConfigKeys(
        _LATENT | {"mlp_layer_types"}, aliases={"num_local_experts": "n_routed_experts"}
    ),
    "GraniteForCausalLM": ConfigKeys(_BIASED | _MULTIPLIED | {"mlp_bias"}),
    "GraniteMoeHybridForCausalLM": ConfigKeys(
        _MULTIPLIED
        | {
            *("attention_bias", "layer_types", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state"),
            *("mamba_expand", "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit"),
            *("num_experts_per_tok", "num_local_experts", "position_embedding_type", "shared_intermediate_size"),
        },
        only={"hidden_act": _SWISH},
        aliases={"layers_block_type": "layer_types"},
    ),
    "SmolLM3ForCausalLM": ConfigKeys(
        _BIASED | {"mlp_bias", "no_rope_layer_interval", "no_rope_layers"}, _UNUSED_WINDOW, only=_NO_WINDOW
    ),
    "Olmo2ForCausalLM": ConfigKeys(_BIASED),
    "Olmo3ForCausalLM": ConfigKeys(_BIASED | {"layer_types", "sliding_window"}),
    "Exaone4ForCausalLM": ConfigKeys(
        frozenset({"hidden_act", "layer_types", "sliding_window", "sliding_window_pattern"})
    ),
    "Glm4ForCausalLM": ConfigKeys(_BIASED | {"partial_rotary_factor"}),
    "SeedOssForCausalLM": ConfigKeys(_BIASED | {"attention_out_bias", "mlp_bias"}),
    "HunYuanDenseV1ForCausalLM": ConfigKeys(_BIASED),
    "ApertusForCausalLM": ConfigKeys(_BIASED),
    "Phi3ForCausalLM": ConfigKeys(
        frozenset({"hidden_act", "sliding_window", "partial_rotary_factor", "original_max_position_embeddings"})
    ),
    "Gemma2ForCausalLM": ConfigKeys(
        _GEMMA | {"sliding_window_pattern", "attn_logit_softcapping", "query_pre_attn_scalar"}
    ),
    "Gemma3ForCausalLM": ConfigKeys(
        _GEMMA | {"sliding_window_pattern", "query_pre_attn_scalar", "rope_local_base_freq"},
        frozenset({"attn_logit_softcapping"}),  # in some configs, but the class ignores it
    ),
    "Gemma3nForCausalLM": ConfigKeys(
        _GEMMA
        | {
            *("activation_sparsity_pattern", "altup_active_idx", "altup_correct_scale", "altup_num_inputs"),
            *("hidden_size_per_layer_input", "laurel_rank", "num_kv_shared_layers", "rope_local_base_freq"),
            "vocab_size_per_layer_input",
        }
    ),
    "Gemma4ForCausalLM": ConfigKeys(
        _GEMMA
        | {
            *("attention_k_eq_v", "enable_moe_block", "global_head_dim", "hidden_size_per_layer_input"),
            *("moe_intermediate_size", "num_experts", "num_global_key_value_heads", "num_kv_shared_layers"),
            *("per_layer_config", "top_k_experts", "use_double_wide_mlp", "vocab_size_per_layer_input"),
        }
    ),
    "Qwen3_5ForCausalLM": ConfigKeys(_DELTA, only={"hidden_act": _SWISH}),
    "Qwen3_5MoeForCausalLM": ConfigKeys(
        _DELTA | (_EXPERTS - {"norm_topk_prob"}) | {"shared_expert_intermediate_size"}, only={"hidden_act": _SWISH}
    ),
    "Qwen3NextForCausalLM": ConfigKeys(
        _DELTA | _EXPERTS | _BY_STEP | {"shared_expert_intermediate_size"}, only={"hidden_act": _SWISH}
    ),
    "Starcoder2ForCausalLM": ConfigKeys(frozenset({"hidden_act", "norm_epsilon", "sliding_window", "use_bias"})),
    "PhiForCausalLM": ConfigKeys(frozenset({"hidden_act", "layer_norm_eps", "qk_layernorm", "partial_rotary_factor"})),
    "StableLmForCausalLM": ConfigKeys(
        frozenset({"hidden_act", "layer_norm_eps", "qk_layernorm", "use_qkv_bias", "use_parallel_residual"})
        | {"partial_rotary_factor"}
    ),
    "GPTNeoXForCausalLM": ConfigKeys(
        frozenset({"attention_bias", "hidden_act", "layer_norm_eps", "use_parallel_residual", "partial_rotary_factor"}),
        frozenset({"num_key_value_heads", "is_decoder"}),
        aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    ),
    "CohereForCausalLM": ConfigKeys(_BIASED | {"layer_norm_eps", "logit_scale", "use_qk_norm"}),
    "Cohere2ForCausalLM": ConfigKeys(
        _BIASED | {"layer_norm_eps", "layer_types", "logit_scale", "sliding_window", "sliding_window_pattern"}
    ),
    "Lfm2ForCausalLM": ConfigKeys(
        _LFM | {"block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of", "full_attn_idxs"},
        only={"hidden_act": _SWISH},
    ),
    "Lfm2MoeForCausalLM": ConfigKeys(
        _LFM | _EXPERTS | {"num_dense_layers", "routed_scaling_factor", "use_expert_bias"}, only={"hidden_act": _SWISH}
    ),
    "NemotronHForCausalLM": ConfigKeys(
        _ROUTED
        | {
            *("conv_kernel", "hybrid_override_pattern", "layer_norm_epsilon", "layers_block_type"),
            *("mamba_head_dim", "mamba_num_heads", "mamba_proj_bias", "mlp_bias", "moe_latent_size", "n_groups"),
            *("moe_shared_expert_intermediate_size", "ssm_state_size", "time_step_min", "use_bias", "use_conv_bias"),
        },
        # The class reads head sizes and time_step_min instead of the first two, and ignores the others.
        frozenset({"expand", "time_step_limit", "attention_bias", "sliding_window"}),
        only={"mlp_hidden_act": ("relu2",), "mamba_hidden_act": _SWISH},
        aliases={
            **{"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
            **{"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"},
            **{"mamba_expand": "expand", "mamba_dt_min": "time_step_min", "mamba_dt_max": "time_step_max"},
            **{"mamba_dt_limit": "time_step_limit", "mamba_dt_init_floor": "time_step_floor"},
        },
    ),
    "Mamba2ForCausalLM": ConfigKeys(
        frozenset(
            (
                *("conv_kernel", "expand", "layer_norm_epsilon", "n_groups", "num_heads", "state_size"),
                *("time_step_limit", "use_bias", "use_conv_bias"),
            )
        ),
        frozenset({"time_step_min", "time_step_rank"}),  # used to initialise training, and by Mamba 1
        only={"hidden_act": _SWISH},
    ),
}
"""Architecture -> its fields. A multimodal model uses the row of its text part."""

_ENCODER = frozenset(
    ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act")
) | {"max_position_embeddings", "layer_norm_eps", "tie_word_embeddings", "bos_token_id", "eos_token_id"}
_BERT = ConfigKeys(
    _ENCODER | {"type_vocab_size", "position_embedding_type"},
    only={"is_decoder": (False,), "add_cross_attention": (False,)},
)
ENCODER_ROWS: Mapping[str, ConfigKeys] = {
    "Bert": _BERT,
    "Roberta": _BERT,
    "XLMRoberta": _BERT,
    "ModernBert": ConfigKeys(
        _ENCODER
        | {
            *("hidden_activation", "norm_eps", "norm_bias", "layer_types", "rope_parameters", "local_attention"),
            *("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"),
            *("classifier_pooling", "classifier_bias", "classifier_activation", "attention_bias", "mlp_bias"),
        },
        frozenset({"decoder_bias", "sparse_prediction"}),  # of the language-model head, which is not used
        only={"rope_scaling": ()},
    ),
    "NomicBert": ConfigKeys(_ENCODER | {"type_vocab_size", "rope_parameters", "head_dim"}),
}
"""Family of encoders -> its fields."""


def decoder_row(architecture: str) -> ConfigKeys:
    """Return the row of an architecture of `FAMILIES`."""
    return ROWS[without_part(architecture).replace("ForConditionalGeneration", "ForCausalLM")]


def understood(config: Fields, architecture: str, row: ConfigKeys) -> Fields:
    """Return the config with each field under one name.

    Raise `ModelError` naming an unsupported field that changes numbers, `ModelFileError` if two names of a field have
    different values.
    """
    # Fields that the class of this family does not read, although it is read for others.
    values = {name: value for name, value in config.values.items() if name not in row.harmless & COMMON}
    for other, name in row.aliases.items():
        if values.get(other) is None:
            continue
        if values.get(name, values[other]) not in (None, values[other]):
            raise config.error(other, f"what {name} says ({values[name]!r:.80}), or absent")
        values[name] = values.pop(other)
    found = Fields(values, config.path, config.prefix)
    for name, allowed in {**EVERYWHERE, **row.only}.items():
        if name not in row.used and found.has(name):
            _check(found, name, allowed, architecture)
    return found


def _check(config: Fields, name: str, allowed: tuple[Any, ...], architecture: str) -> None:
    value = config.values[name]
    if any(one not in allowed for one in (value if isinstance(value, list) else [value])):
        known = f" other than {allowed[0]}" if allowed else ""
        raise ModelError(f"{config.path}: {config.prefix}{name}{known} is not supported for {architecture}")
