"""Metadata and head layouts that converters write for decoders with layer norms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

NAMES = {
    **{"Starcoder2ForCausalLM": "starcoder2", "PhiForCausalLM": "phi2", "StableLmForCausalLM": "stablelm"},
    **{"GPTNeoXForCausalLM": "gptneox", "CohereForCausalLM": "command-r", "Cohere2ForCausalLM": "cohere2"},
}
_BRIEF = ("phi2", "stablelm", "gptneox")
"""Architectures whose files leave out keys that most others have."""
_NOT_IN_BRIEF = ("attention.key_length", "attention.value_length", "rope.freq_base", "vocab_size")


def keys(config: Mapping[str, Any], arch: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a plain decoder as this architecture has them."""
    if arch not in NAMES.values():
        return fields
    eps = config.get("norm_epsilon", config.get("layer_norm_eps", 1e-5))
    fields = {key: value for key, value in fields.items() if arch not in _BRIEF or key not in _NOT_IN_BRIEF}
    del fields["attention.layer_norm_rms_epsilon"]
    fields["attention.layer_norm_epsilon"] = float(eps)
    if arch in ("stablelm", "gptneox"):
        fields["use_parallel_residual"] = config.get("use_parallel_residual", True)
    if arch == "gptneox":
        size = config["hidden_size"] // config["num_attention_heads"]
        fields["rope.dimension_count"] = int(size * config["rotary_pct"])
        del fields["attention.head_count_kv"]
    if arch in ("command-r", "cohere2"):
        fields |= {"logit_scale": config["logit_scale"], "rope.scaling.type": "none"}
    if arch == "cohere2":
        fields["attention.sliding_window"] = config["sliding_window"]
    return fields


def laid_out(config: Mapping[str, Any], arch: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a folder's tensors laid out as files of this architecture have them, under the folder's names."""
    tensors_out: dict[str, np.ndarray] = {}
    norms: dict[str, dict[int, np.ndarray]] = {}
    for name, array in tensors.items():
        match = re.fullmatch(r"(.+_layernorm)\.norms\.(\d+)\.weight", name)
        if match:
            norms.setdefault(f"{match[1]}.weight", {})[int(match[2])] = array
        elif arch == "gptneox" and ".query_key_value." in name:
            heads = array.reshape(config["num_attention_heads"], 3, -1, *array.shape[1:])
            tensors_out[name] = np.concatenate([heads[:, part].reshape(-1, *array.shape[1:]) for part in range(3)])
        else:
            tensors_out[name] = array
    return tensors_out | {name: np.stack([one[head] for head in sorted(one)]) for name, one in norms.items()}
