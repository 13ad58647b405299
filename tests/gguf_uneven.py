"""GGUF files of Gemma 4 and 3n, Llama 4, Mistral 4 and Apertus, as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from cairn.models.families.tensor_names import XIELU
from cairn.types.model_spec import ModelSpec

UNEVEN = ("gemma4", "gemma3n")
OWN = (*UNEVEN, "llama4", "apertus")
"""Architectures whose tensors are written by Cairn's names."""
TOGETHER = ("gemma4", "mistral4")
"""Architectures whose experts' gate and up matrices are one tensor."""
NAMES = {
    "mlp.gate.scale": "ffn_gate_inp.scale",
    "mlp.gate.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
}


def keys(config: Mapping[str, Any], spec: ModelSpec, arch: str) -> dict[str, Any]:
    """Return the metadata below the architecture's name."""
    if arch == "llama4":
        assert spec.experts is not None
        step = config["interleave_moe_layer_step"]
        widths = {"feed_forward_length": spec.ffn, "expert_feed_forward_length": spec.experts.ffn}
        return widths | {"interleave_moe_layer_step": step, "expert_used_count": 1}
    if arch == "mistral4":
        assert spec.query_scaling is not None
        beta, length = spec.query_scaling
        return {"attention.temperature_scale": beta, "attention.temperature_length": int(length)}
    if arch not in UNEVEN or spec.uneven is None:
        return {}
    limited = [spec.groups[spec.group_of(layer)].rope is not None for layer in range(spec.layers)]
    whole = next(number for number, group in enumerate(spec.groups) if group.rope is None)
    _, heads, _, size = spec.page(whole)
    fields: dict[str, Any] = {
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": size,
        "rope.freq_base": spec.rope_theta,
        "rope.freq_base_swa": next(group.rope.theta for group in spec.groups if group.rope is not None),
        "attention.sliding_window": next(group.window for group in spec.groups if group.rope is not None),
        "attention.sliding_window_pattern": limited,
        "attention.shared_kv_layers": len(spec.uneven.kv_from),
        "embedding_length_per_layer_input": spec.uneven.inputs,
        "final_logit_softcapping": spec.logit_softcap,
    }
    if arch == "gemma4":
        fields |= dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), spec.head_dim)
        fields["rope.dimension_count_swa"] = spec.head_dim
        if heads != spec.kv_heads:
            fields["attention.head_count_kv"] = [spec.kv_heads if one else heads for one in limited]
    if spec.uneven.wide:
        fields["feed_forward_length"] = [
            spec.ffn * (2 if layer in spec.uneven.wide else 1) for layer in range(spec.layers)
        ]
    if spec.experts is not None:
        fields |= {"expert_count": spec.experts.count, "expert_used_count": spec.experts.chosen}
        fields["expert_feed_forward_length"] = spec.experts.ffn
    if (streams := spec.uneven.streams) is not None:
        fields |= {"altup.active_idx": streams.active, "altup.num_inputs": streams.count}
        sparsity = streams.sparsity or (None,) * spec.layers
        fields["activation_sparsity_scale"] = [float("-inf") if one is None else one for one in sparsity]
    return fields


def constants(tensors: Mapping[str, np.ndarray], arch: str) -> dict[str, Any]:
    """Return metadata that are tensors elsewhere."""
    if arch != "apertus":
        return {}
    fields: dict[str, Any] = {"xielu.beta": 0.5, "xielu.eps": -1e-6}
    for part in ("alpha_p", "alpha_n"):
        fields[f"xielu.{part}"] = [float(one[0]) for name, one in tensors.items() if name.endswith(f"{XIELU}.{part}")]
    return fields


def together(every: Mapping[str, np.ndarray], arch: str) -> dict[str, np.ndarray]:
    """Join the tensors that the file joins, and drop those that are metadata there."""
    joined = {name: array for name, array in every.items() if f"{XIELU}." not in name}
    if arch in TOGETHER:
        for name in [one for one in joined if one.endswith(".mlp.experts.gate_proj.weight")]:
            other = joined.pop(name.replace("gate_proj", "up_proj"))
            joined[name.replace("gate_proj", "gate_up_proj")] = np.concatenate([joined.pop(name), other], axis=1)
    return joined


def named(name: str) -> str | None:
    """Return GGUF's name of a tensor that its package does not know."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    return f"blk.{match[1]}.{NAMES[match[2]]}" if match and match[2] in NAMES else None


def more(spec: ModelSpec, arch: str) -> dict[str, np.ndarray]:
    """Return tensors that nothing reads, and the rope factors."""
    extra: dict[str, np.ndarray] = {}
    if arch == "gemma4":
        extra["rope_freqs.weight"] = np.array(spec.rope_scaling.factors, np.float32)
    if arch == "gemma3n" and spec.uneven is not None:
        kv = spec.kv_heads * spec.head_dim
        for layer in range(spec.layers - len(spec.uneven.kv_from), spec.layers):
            extra |= {f"blk.{layer}.attn_{part}.weight": np.ones((kv, spec.hidden), np.float32) for part in "kv"}
            extra[f"blk.{layer}.attn_k_norm.weight"] = np.ones(spec.head_dim, np.float32)
    return extra
