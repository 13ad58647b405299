"""Tiny random models for tests, written to disk as transformers would read them, and a driver of engines.

No torch here: the weights come from numpy, so that tests of the engine run without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import cairn.engine.recorded
from cairn.config.config import Config
from cairn.engine.recorded import RecordedEngine
from cairn.engine.row_results import LogitsQuestion
from cairn.kernels import native
from cairn.kernels.sampling import Sampler
from cairn.models.families.tensor_names import permute
from cairn.models.safetensors.weights import expected_tensors
from cairn.models.spec.config import load_spec
from cairn.types.model_spec import ModelSpec
from cairn.types.request import SamplingParams
from cairn.types.step import Row, RowResult
from tests.recurrent_models import RECURRENT, as_stored

PLAIN: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

MODELS: dict[str, dict[str, Any]] = {
    "llama 2": {"architecture": "LlamaForCausalLM", "num_key_value_heads": 4},
    "llama with biases, tied": {
        "architecture": "LlamaForCausalLM",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama 3 rope": {"architecture": "LlamaForCausalLM", "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "llama 3 rope, new field": {
        "architecture": "LlamaForCausalLM",
        "rope_parameters": {**LLAMA3, "rope_theta": 500000.0},
    },
    "llama linear rope": {"architecture": "LlamaForCausalLM", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama 4": {
        "architecture": "Llama4ForCausalLM",
        **{"num_hidden_layers": 4, "no_rope_layer_interval": 3, "attention_chunk_size": 24, "floor_scale": 20},
        **{"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
        **{"intermediate_size": 40, "intermediate_size_mlp": 80, "attention_bias": False},
        "rope_scaling": {**LLAMA3, "rope_theta": 500000.0},
    },
    "qwen 2, three heads a group": {
        "architecture": "Qwen2ForCausalLM",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "qwen 2 with windows": {
        "architecture": "Qwen2ForCausalLM",
        "use_sliding_window": True,
        "sliding_window": 21,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
    "qwen 2 yarn": {
        "architecture": "Qwen2ForCausalLM",
        "max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    },
    "qwen 3, head size of its own": {
        "architecture": "Qwen3ForCausalLM",
        "head_dim": 20,
        "tie_word_embeddings": True,
    },
    "qwen 3, eight heads a group": {
        "architecture": "Qwen3ForCausalLM",
        "head_dim": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "vocab_size": 171,
        "intermediate_size": 37,
    },
    "qwen 3 with window layers": {
        "architecture": "Qwen3ForCausalLM",
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
    },
    "mistral": {"architecture": "MistralForCausalLM", "sliding_window": 24},
    "mistral without window, gelu": {
        "architecture": "MistralForCausalLM",
        "sliding_window": None,
        "head_dim": 10,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "gemma 2": {
        "architecture": "Gemma2ForCausalLM",
        "head_dim": 16,
        "query_pre_attn_scalar": 9,
        "sliding_window": 20,
        "num_hidden_layers": 3,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma 3": {
        "architecture": "Gemma3ForCausalLM",
        "head_dim": 20,
        "query_pre_attn_scalar": 12,
        "sliding_window": 17,
        "sliding_window_pattern": 3,
        "num_hidden_layers": 4,
        "rope_theta": 50000.0,
        "rope_local_base_freq": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma 3, new fields": {
        "architecture": "Gemma3ForCausalLM",
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": 33,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma 3, windows as long as the context": {
        "architecture": "Gemma3ForCausalLM",
        "head_dim": 16,
        "sliding_window": 512,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 500.0,
    },
    "gemma 3n": {
        "architecture": "Gemma3nForCausalLM",
        **{"num_hidden_layers": 6, "sliding_window": 21, "num_kv_shared_layers": 2, "final_logit_softcapping": 4.0},
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 150, "num_key_value_heads": 1},
        **{"altup_num_inputs": 3, "laurel_rank": 10, "activation_sparsity_pattern": [0.8, 0.5, 0.0, 0.0, 0.3, 0.0]},
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 20000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "gemma 4": {
        "architecture": "Gemma4ForCausalLM",
        **{"num_hidden_layers": 4, "sliding_window": 17, "final_logit_softcapping": 4.0},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        **{"global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 20000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "gemma 4 e": {
        "architecture": "Gemma4ForCausalLM",
        **{"num_hidden_layers": 6, "sliding_window": 21, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        **{"global_head_dim": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 170},
        **{"num_key_value_heads": 1, "use_bidirectional_attention": "vision"},
    },
    "gemma 4 moe": {
        "architecture": "Gemma4ForCausalLM",
        **{"num_hidden_layers": 4, "sliding_window": 17, "final_logit_softcapping": 4.0},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        **{"global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        **{"hidden_size_per_layer_input": 0, "enable_moe_block": True},
        **{"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
    },
    "qwen 3 moe": {
        "architecture": "Qwen3MoeForCausalLM",
        **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True},
    },
    "qwen 3 moe, not normed, some layers dense": {
        "architecture": "Qwen3MoeForCausalLM",
        **{"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": False},
        **{"num_hidden_layers": 4, "mlp_only_layers": [3], "decoder_sparse_step": 2},
    },
    "qwen 2 moe, shared expert": {
        "architecture": "Qwen2MoeForCausalLM",
        **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        **{"shared_expert_intermediate_size": 56, "norm_topk_prob": False},
    },
    "mixtral": {"architecture": "MixtralForCausalLM", "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral with a window": {
        "architecture": "MixtralForCausalLM",
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24, "rope_theta": 1e4},
    },
    "olmoe": {
        "architecture": "OlmoeForCausalLM",
        **{"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False, "intermediate_size": 40},
    },
    "gpt-oss": {
        "architecture": "GptOssForCausalLM",
        **{"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 20, "num_hidden_layers": 3},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            "original_max_position_embeddings": 64,
        },
    },
    "glm 4.5": {
        "architecture": "Glm4MoeForCausalLM",
        **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2},
        **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": True},
        **{"first_k_dense_replace": 1, "num_hidden_layers": 3, "partial_rotary_factor": 0.5, "use_qk_norm": True},
        "attention_bias": True,
    },
    "deepseek 2 lite": {
        "architecture": "DeepseekV2ForCausalLM",
        **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2},
        **{
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.3,
        },
        **{"first_k_dense_replace": 1, "num_hidden_layers": 3, "num_key_value_heads": 4},
        **{"q_lora_rank": None, "kv_lora_rank": 40, "qk_rope_head_dim": 8, "qk_nope_head_dim": 18, "v_head_dim": 14},
        "rope_scaling": {
            **{"type": "yarn", "factor": 8.0, "beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 0.7},
            "original_max_position_embeddings": 64,
        },
    },
    "deepseek 3": {
        "architecture": "DeepseekV3ForCausalLM",
        **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1},
        **{"n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "norm_topk_prob": True},
        **{"routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "num_attention_heads": 10},
        **{"num_key_value_heads": 10, "q_lora_rank": 24, "kv_lora_rank": 64, "qk_rope_head_dim": 16},
        **{"qk_nope_head_dim": 16, "v_head_dim": 20, "attention_bias": True},
    },
    "glm 4.7 flash": {
        "architecture": "Glm4MoeLiteForCausalLM",
        **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1},
        **{"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8},
        **{"mlp_layer_types": ["dense", "sparse", "dense"], "num_hidden_layers": 3, "num_key_value_heads": 4},
        **{"q_lora_rank": 20, "kv_lora_rank": 33, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 32},
    },
    "mistral 4": {
        "architecture": "Mistral4ForCausalLM",
        **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1},
        **{"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.4},
        **{"first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 40},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 20},
        "rope_parameters": {
            **{"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0},
            **{"mscale_all_dim": 1.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1},
            **{"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    },
    "granite": {
        "architecture": "GraniteForCausalLM",
        **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 1.5},
        "tie_word_embeddings": True,
    },
    "smollm 3": {
        "architecture": "SmolLM3ForCausalLM",
        **{"num_hidden_layers": 4, "no_rope_layer_interval": 3},
    },
    "olmo 2": {"architecture": "Olmo2ForCausalLM"},
    "olmo 3": {
        "architecture": "Olmo3ForCausalLM",
        **{"sliding_window": 20, "num_hidden_layers": 3},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "olmo 3, scaled where there is no window": {
        "architecture": "Olmo3ForCausalLM",
        **{"sliding_window": 20, "num_hidden_layers": 4},
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    },
    "exaone 4": {
        "architecture": "Exaone4ForCausalLM",
        **{"num_hidden_layers": 4, "sliding_window": 20, "sliding_window_pattern": 2},
        "rope_scaling": LLAMA3,
    },
    "exaone 4 without a window": {
        "architecture": "Exaone4ForCausalLM",
        **{"num_hidden_layers": 3, "sliding_window": None, "layer_types": ["full_attention"] * 3},
        "tie_word_embeddings": True,
    },
    "glm 4": {"architecture": "Glm4ForCausalLM", "head_dim": 20, "partial_rotary_factor": 0.4, "eos_token_id": 3},
    "seed-oss": {
        "architecture": "SeedOssForCausalLM",
        "attention_bias": True,
        "attention_out_bias": False,
        "head_dim": 20,
    },
    "hunyuan": {
        "architecture": "HunYuanDenseV1ForCausalLM",
        **{"head_dim": 20, "tie_word_embeddings": True},
        "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1},
    },
    "apertus": {
        "architecture": "ApertusForCausalLM",
        "hidden_act": "xielu",
        "rope_parameters": {**LLAMA3, "rope_theta": 12e6},
    },
    "phi 3 with a window": {"architecture": "Phi3ForCausalLM", "sliding_window": 24, "num_key_value_heads": 4},
    "phi 4": {"architecture": "Phi3ForCausalLM", "rope_theta": 250000.0},
    "phi 4 mini": {
        "architecture": "Phi3ForCausalLM",
        **{"partial_rotary_factor": 0.5, "tie_word_embeddings": True, "original_max_position_embeddings": 32},
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.2, 3.0, 9.0]},
    },
    "ministral 3": {
        "architecture": "Ministral3ForCausalLM",
        "head_dim": 20,
        "rope_parameters": {
            **{"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0},
            **{"mscale_all_dim": 1.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1},
            "rope_theta": 1e4,
        },
    },
    "starcoder 2": {
        "architecture": "Starcoder2ForCausalLM",
        **{"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "tie_word_embeddings": True, "rope_theta": 1e5},
    },
    "starcoder 2 with a window, without biases": {
        "architecture": "Starcoder2ForCausalLM",
        **{"hidden_act": "gelu_pytorch_tanh", "sliding_window": 24, "use_bias": False},
    },
    "phi 2": {"architecture": "PhiForCausalLM", "hidden_act": "gelu_new", "partial_rotary_factor": 0.4},
    "phi with norms of queries and keys": {
        "architecture": "PhiForCausalLM",
        **{"hidden_act": "gelu_new", "qk_layernorm": True, "layer_norm_eps": 1e-4, "tie_word_embeddings": True},
    },
    "stablelm": {"architecture": "StableLmForCausalLM", "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "stablelm, parallel, norms of heads": {
        "architecture": "StableLmForCausalLM",
        **{"use_parallel_residual": True, "qk_layernorm": True, "partial_rotary_factor": 0.4},
    },
    "gpt neox": {"architecture": "GPTNeoXForCausalLM", "hidden_act": "gelu", "rotary_pct": 0.4},
    "gpt neox, one after the other": {
        "architecture": "GPTNeoXForCausalLM",
        **{"hidden_act": "gelu_fast", "use_parallel_residual": False, "attention_bias": False, "rotary_pct": 0.5},
        **{"rotary_emb_base": 500, "tie_word_embeddings": True},
    },
    "command-r": {
        "architecture": "CohereForCausalLM",
        **{"logit_scale": 0.6, "use_qk_norm": True, "tie_word_embeddings": True},
    },
    "command-r, biases": {
        "architecture": "CohereForCausalLM",
        **{"logit_scale": 1.2, "attention_bias": True, "rope_theta": 8e4},
    },
    "command-r 7b": {
        "architecture": "Cohere2ForCausalLM",
        **{"logit_scale": 0.7, "num_hidden_layers": 4, "sliding_window": 20, "sliding_window_pattern": 2},
        "tie_word_embeddings": True,
    },
    **RECURRENT,
}
"""Every family, and every unusual shape that its arithmetic could get wrong."""


def write_config(folder: Path, architecture: str = "Qwen3ForCausalLM", **fields: Any) -> Path:
    """Write the config.json of a tiny model; `fields` add to and replace `PLAIN`'s."""
    kinds = {"Llama": "llama", "Mistral": "mistral", "Qwen2": "qwen2", "Qwen3": "qwen3"}
    kinds |= {
        "Gemma2": "gemma2",
        "Gemma3": "gemma3_text",
        "Gemma4": "gemma4_text",
        "Gemma3n": "gemma3n_text",
        "Mixtral": "mixtral",
        "Olmoe": "olmoe",
        "GptOss": "gpt_oss",
    }
    kinds |= {"Qwen2Moe": "qwen2_moe", "Qwen3Moe": "qwen3_moe", "Glm4Moe": "glm4_moe", "Granite": "granite"}
    kinds |= {
        "SmolLM3": "smollm3",
        "Olmo2": "olmo2",
        "Olmo3": "olmo3",
        **{"SeedOss": "seed_oss", "Exaone4": "exaone4", "Glm4": "glm4"},
        "Ministral3": "ministral3",
        **{"Qwen3_5": "qwen3_5_text", "Qwen3_5Moe": "qwen3_5_moe_text", "Qwen3Next": "qwen3_next"},
        **{"Lfm2": "lfm2", "Lfm2Moe": "lfm2_moe", "GraniteMoeHybrid": "granitemoehybrid"},
        "NemotronH": "nemotron_h",
        "Mamba2": "mamba2",
        "Phi3": "phi3",
        "Apertus": "apertus",
        "HunYuanDenseV1": "hunyuan_v1_dense",
        "DeepseekV2": "deepseek_v2",
        "DeepseekV3": "deepseek_v3",
        "Glm4MoeLite": "glm4_moe_lite",
        "Mistral4": "mistral4",
        "Llama4": "llama4_text",
        **{"Starcoder2": "starcoder2", "Phi": "phi", "StableLm": "stablelm", "GPTNeoX": "gpt_neox"},
        **{"Cohere": "cohere", "Cohere2": "cohere2"},
    }
    config = {**PLAIN, "architectures": [architecture], "model_type": kinds[architecture.removesuffix("ForCausalLM")]}
    if architecture.startswith("Gemma"):
        del config["hidden_act"]
        config |= {"head_dim": 16, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
    config |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    if architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM", "Glm4MoeForCausalLM"):
        config["head_dim"] = 16
    if architecture.startswith(("Qwen3_5", "Qwen3Next")):
        config["head_dim"] = 16
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def random_tensors(folder: Path, seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Return tensors for the folder's config, scaled so that logits differ clearly and signals stay in range."""
    rng = np.random.default_rng(seed)
    tensors = {}
    spec = load_spec(folder)
    centred = ("Gemma2", "Gemma3For", "Qwen3_5", "Qwen3Next")
    gemma = spec.architecture.startswith(centred)  # whose norms multiply by 1 + w
    for name, shape in expected_tensors(spec).items():
        values = rng.standard_normal(shape)
        if name.endswith("correction_bias"):
            values = 0.3 * values
        elif name.endswith(("layer_scalar", "mlp.gate.scale", "per_expert_scale", "correct_output_scale")):
            values = 0.9 + 0.2 * values
        elif name.endswith("norm.bias"):
            values = 0.3 * values
        elif "norm" in name:
            values = (0 if gemma and ".mixer." not in name else 1) + 0.3 * values
        elif name.endswith(".decay"):
            values = -np.exp(values - 1)
        elif name.endswith((".D", "dt_bias")):
            values = 0.5 * values
        elif name.endswith("conv.weight"):
            values = 0.6 * values
        elif name.endswith("bias"):
            values = 0.3 * values
        else:
            values = values * (1.2 / np.sqrt(shape[-1]) if "embed" not in name else 0.7)
        tensors[name] = np.ascontiguousarray(values.astype(dtype))
    return tensors


def write_model(folder: Path, architecture: str = "Qwen3ForCausalLM", **fields: Any) -> Path:
    """Write a tiny model in one model.safetensors."""
    seed, dtype = fields.pop("seed", 0), fields.pop("dtype", np.float32)
    write_config(folder, architecture, **fields)
    save_file(stored(load_spec(folder), random_tensors(folder, seed, dtype)), folder / "model.safetensors")
    return folder


NAMES = {
    "Glm4ForCausalLM": {
        ".post_attention_layernorm.": ".post_self_attn_layernorm.",
        ".pre_feedforward_layernorm.": ".post_attention_layernorm.",
        ".post_feedforward_layernorm.": ".post_mlp_layernorm.",
    },
    "MixtralForCausalLM": {
        ".gate_proj.": ".w1.",
        ".up_proj.": ".w3.",
        ".down_proj.": ".w2.",
        ".mlp.": ".block_sparse_moe.",
    },
    "ApertusForCausalLM": {
        ".input_layernorm.": ".attention_layernorm.",
        ".post_attention_layernorm.": ".feedforward_layernorm.",
    },
    "Starcoder2ForCausalLM": {".mlp.up_proj.": ".mlp.c_fc.", ".mlp.down_proj.": ".mlp.c_proj."},
    "PhiForCausalLM": {
        **{".mlp.up_proj.": ".mlp.fc1.", ".mlp.down_proj.": ".mlp.fc2.", ".o_proj.": ".dense."},
        **{".q_norm.": ".q_layernorm.", ".k_norm.": ".k_layernorm.", "model.norm.": "model.final_layernorm."},
    },
    "GPTNeoXForCausalLM": {
        **{".mlp.up_proj.": ".mlp.dense_h_to_4h.", ".mlp.down_proj.": ".mlp.dense_4h_to_h."},
        **{"model.embed_tokens.": "gpt_neox.embed_in.", "model.norm.": "gpt_neox.final_layer_norm."},
        **{"model.layers.": "gpt_neox.layers.", ".self_attn.o_proj.": ".attention.dense."},
    },
    "HunYuanDenseV1ForCausalLM": {".q_norm.": ".query_layernorm.", ".k_norm.": ".key_layernorm."},
    **{
        f"{name}ForCausalLM": {".shared_expert.": ".shared_experts."}
        for name in ("Glm4Moe", "DeepseekV2", "DeepseekV3", "Glm4MoeLite", "Mistral4")
    },
}
"""Tensor names that a family's own files have in place of the usual ones."""


def stored(spec: ModelSpec, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors under the names and in the shapes of the family's own files."""
    for ours, theirs in NAMES.get(spec.architecture, {}).items():
        tensors = {name.replace(ours, theirs): array for name, array in tensors.items()}
    if spec.activation == "xielu":
        constants = {"beta": 0.5, "eps": -1e-6}
        layers = [f"model.layers.{layer}.mlp.act_fn" for layer in range(spec.layers)]
        tensors |= {
            f"{layer}.{name}": np.array(value, np.float32) for layer in layers for name, value in constants.items()
        }
    if spec.latent is not None:
        tensors = joined_latents(spec, tensors)
    tensors = LAYOUTS.get(spec.architecture, lambda _, given: given)(spec, tensors)
    if spec.architecture == "Gemma4ForCausalLM" and spec.experts is not None:
        tensors = stacked_experts(spec, tensors, "experts")
        tensors = {
            name.replace("mlp.gate.weight", "router.proj.weight").replace("mlp.gate.", "router."): array
            for name, array in tensors.items()
        }
    return as_stored(spec, tensors) if spec.recurrence is not None else tensors


def joined_latents(spec: ModelSpec, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Join the matrices that make keys and values of latents, head by head."""
    joined = {name: array for name, array in tensors.items() if "_b_proj." not in name or ".q_b_proj." in name}
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}.self_attn."
        parts = [
            np.concatenate([tensors[f"{prefix}k_b_proj.{head}.weight"].T, tensors[f"{prefix}v_b_proj.{head}.weight"]])
            for head in range(spec.heads)
        ]
        joined[f"{prefix}kv_b_proj.weight"] = np.ascontiguousarray(np.concatenate(parts))
    return joined


def glm_heads(spec: ModelSpec, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Interleave the rotated part of query and key heads, so that pairs are neighbours."""
    turned = {}
    for name, array in tensors.items():
        if ".q_proj." in name or ".k_proj." in name:
            heads = array.reshape(-1, spec.head_dim, *array.shape[1:])
            first = permute(heads[:, : spec.turned].reshape(-1, *array.shape[1:]), spec.turned)
            first = first.reshape(-1, spec.turned, *array.shape[1:])
            array = np.concatenate([first, heads[:, spec.turned :]], axis=1).reshape(array.shape)
        turned[name] = np.ascontiguousarray(array)
    return turned


def neox_heads(spec: ModelSpec, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Join each head's query, key and value in one matrix."""
    joined = {name: array for name, array in tensors.items() if ".self_attn." not in name}
    for name in tensors:
        if ".q_proj." in name:
            parts = [tensors[name.replace(".q_proj.", f".{one}_proj.")] for one in "qkv"]
            heads = np.stack([part.reshape(spec.heads, spec.head_dim, *part.shape[1:]) for part in parts], axis=1)
            own = name.replace(".self_attn.q_proj.", ".attention.query_key_value.")
            joined[own] = np.ascontiguousarray(heads.reshape(-1, *parts[0].shape[1:]))
    return joined


def cohere_heads(spec: ModelSpec, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Interleave query and key heads, and join the norms of all heads in one tensor [heads, D]."""
    joined: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        turned = any(f".{part}_{kind}." in name for part in "qk" for kind in ("proj", "norm"))
        own = permute(array, spec.head_dim) if turned else array
        joined[name] = own.reshape(-1, spec.head_dim) if "k_norm." in name or "q_norm." in name else own
    return joined


def stable_heads(spec: ModelSpec, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Split the norms of heads into a tensor each."""
    split = {name: array for name, array in tensors.items() if "q_norm." not in name and "k_norm." not in name}
    for name in tensors.keys() - split.keys():
        for head, one in enumerate(tensors[name].reshape(-1, spec.head_dim)):
            split[name.replace("_norm.", f"_layernorm.norms.{head}.")] = one
    return split


def fused_rows(tensors: dict[str, np.ndarray], name: str, parts: Sequence[str]) -> dict[str, np.ndarray]:
    """Join a layer's matrices that begin with `parts` as one, called `name`."""
    place = name.partition(".")[0]
    joined: dict[str, np.ndarray] = {}
    for key, array in tensors.items():
        layer, _, own = key.partition(f".{place}.")
        if own.removesuffix("_proj.weight") not in parts:
            joined[key] = array
        elif own == f"{parts[0]}_proj.weight":
            joined[f"{layer}.{name}.weight"] = np.concatenate(
                [tensors[f"{layer}.{place}.{part}_proj.weight"] for part in parts]
            )
    return joined


def stacked_experts(
    spec: ModelSpec, tensors: dict[str, np.ndarray], place: str = "mlp.experts"
) -> dict[str, np.ndarray]:
    """Join all experts in two tensors [E, out, in] a layer, gates above ups."""
    assert spec.experts is not None
    stacked = {name: array for name, array in tensors.items() if ".experts." not in name}
    for layer in spec.experts.layers:
        prefix = f"model.layers.{layer}.mlp.experts."
        every = [
            [tensors[f"{prefix}{number}.{part}_proj.weight"] for part in ("gate", "up", "down")]
            for number in range(spec.experts.count)
        ]
        stacked[f"model.layers.{layer}.{place}.gate_up_proj"] = np.stack([np.concatenate(one[:2]) for one in every])
        stacked[f"model.layers.{layer}.{place}.down_proj"] = np.stack([one[2] for one in every])
    return stacked


def llama_experts(spec: ModelSpec, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Transpose Llama 4's experts, and interleave its heads."""
    turned = {}
    for name, array in stacked_experts(spec, tensors).items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            array = permute(array, spec.head_dim)
        if array.ndim == 3:
            array = np.ascontiguousarray(array.swapaxes(1, 2))
        turned[name.replace(".mlp.gate.", ".feed_forward.router.").replace(".mlp.", ".feed_forward.")] = array
    return turned


def fused_experts(spec: ModelSpec, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Join all experts in one tensor [E, in, out], gates and ups alternating."""
    assert spec.experts is not None
    fused = {
        name.replace(".mlp.gate.", ".mlp.router."): array for name, array in tensors.items() if ".experts." not in name
    }
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}.mlp.experts."

        def every(part: str, prefix: str = prefix) -> np.ndarray:
            return np.stack([tensors[f"{prefix}{number}.{part}"] for number in range(spec.experts.count)])  # type: ignore[union-attr]

        gate_up = np.stack([every("gate_proj.weight"), every("up_proj.weight")], axis=2)
        gate_up = gate_up.reshape(spec.experts.count, -1, spec.hidden)
        fused[f"{prefix}gate_up_proj"] = np.ascontiguousarray(gate_up.swapaxes(1, 2))
        fused[f"{prefix}down_proj"] = np.ascontiguousarray(every("down_proj.weight").swapaxes(1, 2))
        biases = np.stack([every("gate_proj.bias"), every("up_proj.bias")], axis=2)
        fused[f"{prefix}gate_up_proj_bias"] = np.ascontiguousarray(biases.reshape(spec.experts.count, -1))
        fused[f"{prefix}down_proj_bias"] = every("down_proj.bias")
    return fused


def glm_layout(spec: ModelSpec, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return GLM-4's layout: interleaved heads, and gate and up as one matrix."""
    return glm_heads(spec, fused_rows(tensors, "mlp.gate_up_proj", ("gate", "up")))


def phi_layout(spec: ModelSpec, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return Phi-3's layout of fused matrices."""
    fused = fused_rows(tensors, "self_attn.qkv_proj", ("q", "k", "v"))
    return fused_rows(fused, "mlp.gate_up_proj", ("gate", "up"))


LAYOUTS: dict[str, Callable[[ModelSpec, dict[str, np.ndarray]], dict[str, np.ndarray]]] = {
    "Glm4ForCausalLM": glm_layout,
    "Phi3ForCausalLM": phi_layout,
    "GPTNeoXForCausalLM": neox_heads,
    "StableLmForCausalLM": stable_heads,
    **dict.fromkeys(("CohereForCausalLM", "Cohere2ForCausalLM"), cohere_heads),
    "GptOssForCausalLM": fused_experts,
    "Mistral4ForCausalLM": stacked_experts,
    "Llama4ForCausalLM": llama_experts,
}
"""The layouts of families whose own files differ from Cairn's."""

BFLOAT16 = ml_dtypes.bfloat16

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0)
SCORED = SamplingParams(max_tokens=1 << 20, temperature=0, prompt_logprobs=True)


KERNELS = [*(name for name, runs in (native.variants() | native.models()).items() if runs), "reference"]
"""Every kernel set that runs here, the default first, and the variants for tests."""


def load(folder: Path, **options: Any) -> RecordedEngine:
    """Load a model folder into an engine with a small pool."""
    config = Config(**{"step_tokens": 256, "max_running": 16, "threads": 1, "kv_gb": 0.05, **options})
    return RecordedEngine.load(load_spec(folder), folder, config)


class Driver:
    """A runner of sequences through an engine that keeps every logits row the sampler saw."""

    def __init__(self, engine: RecordedEngine, monkeypatch: Any) -> None:
        self.engine = engine
        self.seen: list[tuple[Row, np.ndarray]] = []
        self._next = [0] * len(engine.info.groups)

        before: type[LogitsQuestion] = cairn.engine.recorded.LogitsQuestion

        class Watched(before):  # type: ignore[misc, valid-type]
            """A sampler that keeps the logits of all slices, and hands them out row by row."""

            def __init__(self, rows: Sequence[Row]) -> None:
                super().__init__(rows)
                slices[id(self)] = []
                self._asking = rows

            def answer(self, sampler: Sampler, logits: Any, count: int) -> None:
                slices[id(self)].append(np.stack([sampler.line(logits, number) for number in range(count)]))
                super().answer(sampler, logits, count)

            def results(self) -> list[RowResult]:
                whole, at = np.concatenate(slices.pop(id(self))), 0
                for row in self._asking:
                    if row.logits_from is not None:
                        count = row.end - row.logits_from
                        driver.seen.append((row, whole[at : at + count]))
                        at += count
                return super().results()

        slices, driver = dict[int, list[np.ndarray]](), self
        monkeypatch.setattr(cairn.engine.recorded, "LogitsQuestion", Watched)

    def tables(self, tokens: int) -> tuple[list[int], ...]:
        """Return fresh blocks for a sequence of `tokens` tokens, in a shuffled order."""
        count = -(-tokens // self.engine.info.block_tokens)
        made = []
        for group, at in enumerate(self._next):
            if self.engine.info.groups[group].kind == "state":  # the state that is read and the one that is written
                assert at + 2 <= self.engine.info.blocks[group], "the test's pool is too small"
                made.append([at + place % 2 for place in range(count)])
                self._next[group] = at + 2
                continue
            assert at + count <= self.engine.info.blocks[group], "the test's pool is too small"
            made.append([at + (place * 7) % count if count % 7 else at + place for place in range(count)])
            self._next[group] = at + count
        return tuple(made)

    def step(self, rows: Sequence[Row]) -> list[RowResult]:
        return self.engine.prefill(rows).wait()

    def row(
        self, tokens: Sequence[int], start: int, end: int, tables: tuple[Sequence[int], ...], logits_from: int | None
    ) -> Row:
        return Row(tokens, start, end, tables, logits_from, len(tokens), SCORED if logits_from == start else GREEDY, 0)

    def logits(self, tokens: Sequence[int], chunks: Sequence[int], tables: tuple[Sequence[int], ...]) -> np.ndarray:
        """Return logits [len(tokens), V] of all positions, computed in chunks of the given sizes."""
        self.seen.clear()
        at = 0
        for size in chunks:
            self.step([self.row(tokens, at, at + size, tables, at)])
            at += size
        assert at == len(tokens)
        return np.concatenate([logits for _, logits in self.seen])

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the prompt's continuation by `count` tokens, decoded one by one."""
        tokens = list(prompt)
        tables = self.tables(len(tokens) + count)
        start = 0
        while len(tokens) - start > self.engine.info.max_tokens:
            self.step([self.row(tokens, start, start + self.engine.info.max_tokens, tables, None)])
            start += self.engine.info.max_tokens
        for _ in range(count):
            row = Row(tokens, start, len(tokens), tables, len(tokens) - 1, len(prompt), GREEDY, 0)
            (result,) = self.step([row])
            assert result.token is not None, result.error
            start = len(tokens)
            tokens.append(result.token)
        return tokens[len(prompt) :]


def prompt(length: int, vocab: int = 160, seed: int = 1) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, length)]
