"""GGUF files of models some of whose layers keep a state, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cairn.types.model_spec import ModelSpec, Recurrence

SCANS = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj.weight": "ssm_in.weight",
    "conv.weight": "ssm_conv1d.weight",
    "conv.bias": "ssm_conv1d.bias",
    "decay": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}
TILED = ("qwen35", "qwen35moe")
"""Architectures whose neighbouring value heads belong to different key heads."""


def keys(config: Mapping[str, Any], spec: ModelSpec, arch: str) -> dict[str, Any]:
    """Return the metadata below the architecture's name."""
    facts = spec.recurrence
    if facts is None:
        return {}
    fields: dict[str, Any] = {
        "feed_forward_length": spec.experts.ffn if arch == "granitehybrid" and spec.experts else spec.ffn,
        "attention.layer_norm_rms_epsilon": spec.norm_eps,
        "rope.freq_base": spec.rope_theta,
    }
    if facts.kind != "delta":
        fields["attention.head_count_kv"] = [
            0 if layer in facts.layers else spec.kv_heads for layer in range(spec.layers)
        ]
    if spec.mlp_layers:
        width = spec.experts.ffn if spec.experts else spec.ffn
        fields["feed_forward_length"] = [width if layer in spec.mlp_layers else 0 for layer in range(spec.layers)]
        fields |= {"rope.scaling.finetuned": False, "attention.layer_norm_epsilon": spec.norm_eps}
        fields["attention.head_count_kv"] = [
            spec.kv_heads if spec.attends(layer) else 0 for layer in range(spec.layers)
        ]
    if arch == "mamba2":
        fields |= dict.fromkeys(("feed_forward_length", "attention.head_count", "attention.head_count_kv"), 0)
    elif arch == "nemotron_h_moe":
        assert spec.experts is not None
        fields |= {"expert_shared_feed_forward_length": spec.experts.shared, "expert_feed_forward_length": width}
    if facts.kind == "conv":
        fields["shortconv.l_cache"] = facts.reach
    else:
        fields |= {
            "ssm.conv_kernel": facts.reach,
            "ssm.state_size": facts.key_size,
            "ssm.group_count": facts.key_heads,
            "ssm.time_step_rank": facts.heads,
            "ssm.inner_size": facts.inner,
        }
    if facts.kind == "delta":
        fields |= {"rope.dimension_count": spec.turned, "full_attention_interval": 4}
        if "layer_types" in config or config.get("full_attention_interval", 4) != 4:
            fields["attention.recurrent_layers"] = [layer in facts.layers for layer in range(spec.layers)]
    if arch in TILED:
        fields["rope.dimension_sections"] = [11, 11, 10, 0]
    if arch == "lfm2moe":
        assert spec.experts is not None
        fields |= {"leading_dense_block_count": spec.experts.layers[0], "expert_gating_func": 2}
    if arch == "granitehybrid":
        fields |= {
            "rope.scaling.finetuned": not spec.unturned,
            "attention.scale": spec.attention_scale,
            "embedding_scale": spec.embedding_scale,
            "residual_scale": spec.residual_scale,
            "logit_scale": 1 / spec.logit_scale,
            "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        }
    return fields


def tensor(spec: ModelSpec, arch: str, name: str, every: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return one of Cairn's tensors of such a layer under its name and in its layout in the file."""
    before, _, rest = name.partition(".mixer.")
    facts, array = spec.recurrence, every[name]
    assert facts is not None
    layer = f"blk.{before.rpartition('.')[2]}."
    if rest == "conv.weight":
        array = np.ascontiguousarray(array.reshape(facts.reach, -1).T)
    if facts.kind == "conv":
        return {f"{layer}shortconv.{rest}": array}
    if facts.kind == "mamba2" and rest in ("decay", "D"):
        array = array[:, None]
    if facts.kind == "mamba2" and rest == "norm.weight":
        array = array.reshape(facts.key_heads, -1)
    if arch in TILED:
        array = tiled(facts, rest, array)
    if arch == "qwen3next" and rest == "in_proj_b.weight":
        return {f"{layer}ssm_ba.weight": joined(facts, array, every[f"{before}.mixer.in_proj_a.weight"])}
    if arch == "qwen3next" and rest == "in_proj_a.weight":
        return {}
    return {f"{layer}{SCANS[rest]}": array}


def joined(facts: Recurrence, learn: np.ndarray, forget: np.ndarray) -> np.ndarray:
    """Join what each head learns and forgets, in the order of the key heads, as Qwen3-Next has it."""
    parts = [one.reshape(facts.key_heads, -1, one.shape[1]) for one in (learn, forget)]
    return np.concatenate(parts, axis=1).reshape(-1, learn.shape[1])


def tiled(facts: Recurrence, rest: str, array: np.ndarray) -> np.ndarray:
    """Reorder the value heads so that the key heads repeat in turn."""
    size, keys = facts.value_size, 2 * facts.key_heads * facts.key_size
    order = np.arange(facts.heads).reshape(facts.key_heads, -1).T.reshape(-1)
    values = (order[:, None] * size + np.arange(size)).reshape(-1)
    if rest in ("in_proj_qkv.weight", "conv.weight"):
        return np.concatenate([array[:keys], array[keys:][values]])
    if rest == "in_proj_z.weight":
        return array[values]
    if rest == "out_proj.weight":
        return np.ascontiguousarray(array[:, values])
    return array if rest == "norm.weight" else array[order]
