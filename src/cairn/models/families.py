"""The architectures of folders that are built. This imports nothing large: whoever starts looks here first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    window: Literal["none", "all", "by layer"] = "none"
    """Which layers `sliding_window` limits."""


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
}


def family_of(config: Fields) -> tuple[str, Family]:
    """The architecture of a config.json, and what it means. Raises `ModelError` naming one that is not built."""
    named = config.values.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise config.error("architectures", "a list with one architecture name")
    if named[0] not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"{config.path}: the architecture {named[0][:80]!r} is not supported; supported are {known}")
    if config.has("quantization_config"):
        raise ModelError(f"{config.path}: quantised safetensors (quantization_config) are not supported")
    return named[0], FAMILIES[named[0]]
