"""Tiny models some of whose layers keep a state: their configs, and the layout of their files."""

from __future__ import annotations

from typing import Any

import numpy as np

from cairn.types.model_spec import ModelSpec, Recurrence

RECURRENT: dict[str, dict[str, Any]] = {
    "qwen 3.5": {
        "architecture": "Qwen3_5ForCausalLM",
        **{"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "rms_norm_eps": 1e-6},
        **{"linear_key_head_dim": 12, "linear_value_head_dim": 20, "full_attention_interval": 4},
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            **{"mrope_section": [2, 1, 1], "mrope_interleaved": True},
        },
    },
    "qwen 3.5, one head of keys": {
        "architecture": "Qwen3_5ForCausalLM",
        **{"num_hidden_layers": 3, "linear_num_key_heads": 1, "linear_num_value_heads": 3, "tie_word_embeddings": True},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 3, "head_dim": 20},
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        **{"attention_bias": True, "partial_rotary_factor": 0.4},
    },
    "qwen 3.5 moe": {
        "architecture": "Qwen3_5MoeForCausalLM",
        **{
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "full_attention_interval": 2,
        },
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 24, "partial_rotary_factor": 0.5},
        **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        "shared_expert_intermediate_size": 40,
    },
    "qwen 3 next": {
        "architecture": "Qwen3NextForCausalLM",
        **{"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "mlp_only_layers": [2]},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 12, "partial_rotary_factor": 0.25},
        **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        "shared_expert_intermediate_size": 40,
    },
    "lfm 2": {
        "architecture": "Lfm2ForCausalLM",
        **{"num_hidden_layers": 4, "conv_L_cache": 3, "block_multiple_of": 8, "block_ff_dim": 100, "norm_eps": 1e-5},
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "tie_word_embeddings": True,
    },
    "lfm 2, biases": {
        "architecture": "Lfm2ForCausalLM",
        **{"num_hidden_layers": 3, "conv_L_cache": 5, "block_auto_adjust_ff_dim": False, "full_attn_idxs": [0]},
        **{"conv_bias": True, "tie_word_embeddings": True},
    },
    "lfm 2 moe": {
        "architecture": "Lfm2MoeForCausalLM",
        **{"num_hidden_layers": 4, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        **{"num_dense_layers": 1, "routed_scaling_factor": 1.2, "tie_word_embeddings": True},
        "layer_types": ["conv", "full_attention", "conv", "conv"],
    },
    "granite 4 hybrid": {
        "architecture": "GraniteMoeHybridForCausalLM",
        **{"num_hidden_layers": 4, "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 56},
        **{"intermediate_size": 24, "mamba_n_heads": 8, "mamba_d_state": 12, "mamba_n_groups": 2},
        **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 1.5},
        **{"layer_types": ["mamba", "mamba", "attention", "mamba"], "position_embedding_type": "nope"},
    },
    "granite 4 hybrid, dense": {
        "architecture": "GraniteMoeHybridForCausalLM",
        **{"num_hidden_layers": 3, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 56},
        **{"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_d_conv": 3, "mamba_proj_bias": True},
        **{"layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": "rope"},
        "time_step_limit": [0.001, 0.8],
    },
    "nemotron h": {
        "architecture": "NemotronHForCausalLM",
        **{"hybrid_override_pattern": "M-M*M-", "num_hidden_layers": 6, "head_dim": 16, "layer_norm_epsilon": 1e-5},
        **{"mamba_num_heads": 6, "mamba_head_dim": 10, "ssm_state_size": 12, "n_groups": 2},
    },
    "mamba 2": {
        "architecture": "Mamba2ForCausalLM",
        **{"num_hidden_layers": 3, "num_heads": 6, "head_dim": 16, "state_size": 12, "n_groups": 2, "expand": 2},
        **{"conv_kernel": 4, "use_bias": True, "layer_norm_epsilon": 1e-5, "time_step_limit": [0.01, 2.0]},
    },
    "nemotron h moe": {
        "architecture": "NemotronHForCausalLM",
        "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"],
        **{"num_hidden_layers": 5, "head_dim": 16, "layer_norm_epsilon": 1e-5, "conv_kernel": 3},
        **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1},
        **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1},
        **{"moe_shared_expert_intermediate_size": 40, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
    },
}


def as_stored(spec: ModelSpec, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors under the names and in the shapes of the family's own files."""
    assert spec.recurrence is not None
    if spec.architecture in ("NemotronHForCausalLM", "Mamba2ForCausalLM"):
        return dict(nemotron(spec.recurrence, name, array) for name, array in tensors.items())
    tensors = dict(recurrent(spec.recurrence, name, array) for name, array in tensors.items())
    if spec.architecture == "Qwen3NextForCausalLM":
        return joined_projections(spec, tensors)
    if spec.architecture.startswith("Lfm2"):
        return {liquid(name): array for name, array in tensors.items()}
    return granite_experts(spec, tensors) if spec.architecture == "GraniteMoeHybridForCausalLM" else tensors


def joined_projections(spec: ModelSpec, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Join Qwen3-Next's projections of each key head."""
    assert spec.recurrence is not None
    heads, keys = spec.recurrence.key_heads, spec.recurrence.key_heads * spec.recurrence.key_size
    joined = {}

    def woven(*parts: np.ndarray) -> np.ndarray:
        return np.concatenate([part.reshape(heads, -1, spec.hidden) for part in parts], axis=1).reshape(-1, spec.hidden)

    for name, array in tensors.items():
        stem = name.rpartition("in_proj_")[0]
        if name.endswith("in_proj_qkv.weight"):
            gates = tensors[f"{stem}in_proj_z.weight"]
            joined[f"{stem}in_proj_qkvz.weight"] = woven(array[:keys], array[keys : 2 * keys], array[2 * keys :], gates)
        elif name.endswith("in_proj_b.weight"):
            joined[f"{stem}in_proj_ba.weight"] = woven(array, tensors[f"{stem}in_proj_a.weight"])
        elif not name.endswith(("in_proj_z.weight", "in_proj_a.weight")):
            joined[name] = array
    return joined


LIQUID = {
    ".input_layernorm.": ".operator_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".o_proj.": ".out_proj.",
    ".q_norm.": ".q_layernorm.",
    ".k_norm.": ".k_layernorm.",
    ".mlp.gate.e_score_correction_bias": ".feed_forward.expert_bias",
    ".mlp.": ".feed_forward.",
    ".gate_proj.": ".w1.",
    ".up_proj.": ".w3.",
    ".down_proj.": ".w2.",
    "model.norm.": "model.embedding_norm.",
}


def liquid(name: str) -> str:
    """Return LFM2's name of a tensor."""
    for ours, theirs in LIQUID.items():
        name = name.replace(ours, theirs)
    return name


def granite_experts(spec: ModelSpec, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Join Granite's experts in one tensor, and the shared expert (or the MLP) in two."""
    joined, parts = {}, "mlp.shared_expert." if spec.experts else "mlp."
    for name, array in tensors.items():
        layer = name[: name.find(parts)] if parts in name else ""
        if layer and name.endswith(f"{parts}gate_proj.weight"):
            joined[f"{layer}shared_mlp.input_linear.weight"] = np.concatenate(
                [array, tensors[name.replace("gate", "up")]]
            )
        elif layer and name.endswith(f"{parts}down_proj.weight"):
            joined[f"{layer}shared_mlp.output_linear.weight"] = array
        elif name.endswith("mlp.gate.weight"):
            layer, every = name.removesuffix("mlp.gate.weight"), range(spec.experts.count)  # type: ignore[union-attr]
            moe, own = f"{layer}block_sparse_moe.", f"{layer}mlp.experts."
            joined[f"{moe}router.layer.weight"] = array
            up = [[tensors[f"{own}{module}.{half}_proj.weight"] for half in ("gate", "up")] for module in every]
            joined[f"{moe}input_linear.weight"] = np.stack([np.concatenate(both) for both in up])
            joined[f"{moe}output_linear.weight"] = np.stack(
                [tensors[f"{own}{module}.down_proj.weight"] for module in every]
            )
        elif ".mlp." not in name:
            joined[name] = array
    return joined


MIXERS = {"delta": "linear_attn.", "mamba2": "mamba.", "conv": "conv."}


def recurrent(facts: Recurrence, name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """Return a tensor of a layer that keeps a state as files have it."""
    before, mixer, rest = name.partition(".mixer.")
    if not mixer:
        return name, array
    if rest == "decay":
        rest, array = "A_log", np.log(-array)
    if rest == "conv.weight":
        array = np.ascontiguousarray(array.reshape(facts.reach, 1, facts.channels).transpose(2, 1, 0))
    rest = rest if facts.kind == "conv" else rest.replace("conv.", "conv1d.")
    return f"{before}.{MIXERS[facts.kind]}{rest}", array


NEMOTRON = {
    "model.embed_tokens.": "backbone.embeddings.",
    "model.norm.": "backbone.norm_f.",
    "model.layers.": "backbone.layers.",
    ".input_layernorm.": ".norm.",
    ".self_attn.": ".mixer.",
    ".mlp.shared_expert.": ".mixer.shared_experts.",
    ".mlp.": ".mixer.",
}


def nemotron(facts: Recurrence, name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """Return a tensor of Nemotron-H, which calls every kind of layer a mixer."""
    name, array = recurrent(facts, name, array)
    for ours, theirs in (NEMOTRON | {f".{MIXERS[facts.kind]}": ".mixer."}).items():
        name = name.replace(ours, theirs)
    return name, array
