"""What llama.cpp's converter writes of layers that keep a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

DELTA = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}
TILED = ("qwen35", "qwen35moe")
"""Where neighbouring heads have keys of different heads."""


def keys(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """Metadata below the architecture's name."""
    if "linear_num_value_heads" not in config:
        return {}
    size = config["head_dim"]
    rope = config.get("rope_parameters") or {}
    factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
    found: dict[str, Any] = {
        "ssm.conv_kernel": config.get("linear_conv_kernel_dim", 4),
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "full_attention_interval": config.get("full_attention_interval", 4),
        "rope.dimension_count": int(size * factor),
    }
    if arch in TILED:
        found["rope.dimension_sections"] = [11, 11, 10, 0]
    if "layer_types" in config:
        found["attention.recurrent_layers"] = [kind == "linear_attention" for kind in config["layer_types"]]
    return found


def tensor(config: Mapping[str, Any], arch: str, name: str, array: np.ndarray) -> tuple[str, np.ndarray] | None:
    """Name and numbers in the file of a tensor of such a layer; None for another one."""
    before, mixer, rest = name.partition(".linear_attn.")
    if not mixer:
        return None
    if arch in TILED:
        array = tiled(config, rest, array)
    if rest == "A_log":
        array = -np.exp(array)
    return f"blk.{before.rpartition('.')[2]}.{DELTA[rest]}", array.squeeze()


def tiled(config: Mapping[str, Any], rest: str, array: np.ndarray) -> np.ndarray:
    """The heads of values in the order in which those of keys repeat."""
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size, keys = config["linear_value_head_dim"], 2 * key_heads * config["linear_key_head_dim"]
    order = np.arange(heads).reshape(key_heads, -1).T.reshape(-1)
    values = (order[:, None] * size + np.arange(size)).reshape(-1)
    if rest in ("in_proj_qkv.weight", "conv1d.weight"):
        return np.concatenate([array[:keys], array[keys:][values]])
    if rest == "in_proj_z.weight":
        return array[values]
    if rest == "out_proj.weight":
        return np.ascontiguousarray(array[:, values])
    return array if rest == "norm.weight" else array[order]
