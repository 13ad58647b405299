"""Multi-head latent attention (MLA) in configs, and its tensors.

Field names are those of transformers' `configuration_deepseek_v3.py`.
"""

from __future__ import annotations

import math
from typing import Any

from cairn.kernels.elementary import log_of
from cairn.models.families.family import Family
from cairn.models.files import Fields
from cairn.types.errors import ModelError
from cairn.types.model_spec import MAX_HEAD_DIM, CacheGroup, Latent, ModelSpec, RopeScaling

KEYS, VALUES = "self_attn.k_b_proj", "self_attn.v_b_proj"
"""Matrices that make a head's keys and values of a latent, one for each head. Keys are [rank, plain], the transpose of
what is stored, because queries are multiplied with them; values are [value, rank]."""


def latent_fields(config: Fields, family: Family, layers: int, rope: RopeScaling) -> dict[str, Any]:
    """Return the spec fields of latent attention; {} for a family without."""
    if not family.latent:
        return {}
    turned = config.integer("qk_rope_head_dim", 2, MAX_HEAD_DIM)
    heads = config.integer("num_attention_heads", 1, 1 << 14)
    config.check_by_layer("heads", "num_attention_heads", heads, "num_hidden_layers", layers)
    latent = Latent(
        rank=config.integer("kv_lora_rank", 1, MAX_HEAD_DIM),
        query_rank=config.integer("q_lora_rank", 1, 1 << 20) if config.has("q_lora_rank") else 0,
        plain=config.integer("qk_nope_head_dim", 1, MAX_HEAD_DIM),
        value=config.integer("v_head_dim", 1, MAX_HEAD_DIM),
        neighbours=config.flag("rope_interleave", True),
        bias=config.flag("attention_bias", False),
    )
    if turned % 2:
        raise config.error("qk_rope_head_dim", "an even number, because rotary positions rotate pairs")
    return spec_fields(config, latent, turned, layers, rope)


def spec_fields(config: Fields, latent: Latent, turned: int, layers: int, rope: RopeScaling) -> dict[str, Any]:
    """Return the spec fields of these latents, which are stored with `turned` rotary numbers."""
    size, stored = latent.plain + turned, latent.rank + turned
    if max(size, stored) > MAX_HEAD_DIM:
        raise ModelError(
            f"{config.path}: a head size of {max(size, stored)} is not supported; the most is {MAX_HEAD_DIM}"
        )
    mscale = 1.0
    if rope.kind != "none" and rope.mscale_all_dim and rope.factor > 1:
        mscale = 0.1 * rope.mscale_all_dim * log_of(rope.factor) + 1.0
    return {
        "latent": latent,
        "head_dim": size,
        "rotary": turned,
        "attention_scale": mscale * mscale / math.sqrt(size),
        "groups": (CacheGroup(kind="full", layers=tuple(range(layers)), kv_heads=1, head_dim=stored, once=True),),
    }


def latent_tensors(spec: ModelSpec, latent: Latent) -> dict[str, tuple[int, ...]]:
    """Return name (below the layer) and shape of the tensors of latent attention."""
    query, kept = spec.heads * spec.head_dim, latent.rank + spec.turned
    found: dict[str, tuple[int, ...]] = {}
    if latent.query_rank:
        found["self_attn.q_a_proj.weight"] = (latent.query_rank, spec.hidden)
        found["self_attn.q_a_layernorm.weight"] = (latent.query_rank,)
        found["self_attn.q_b_proj.weight"] = (query, latent.query_rank)
    else:
        found["self_attn.q_proj.weight"] = (query, spec.hidden)
    found["self_attn.kv_a_proj_with_mqa.weight"] = (kept, spec.hidden)
    found["self_attn.kv_a_layernorm.weight"] = (latent.rank,)
    if latent.bias:
        found["self_attn.kv_a_proj_with_mqa.bias"] = (kept,)
        if latent.query_rank:
            found["self_attn.q_a_proj.bias"] = (latent.query_rank,)
    for head in range(spec.heads):
        found[f"{KEYS}.{head}.weight"] = (latent.rank, latent.plain)
        found[f"{VALUES}.{head}.weight"] = (latent.value, latent.rank)
    found["self_attn.o_proj.weight"] = (spec.hidden, spec.heads * latent.value)
    if spec.out_bias:
        found["self_attn.o_proj.bias"] = (spec.hidden,)
    return found
