"""The rotary settings of a config.json.

Field names and defaults are those of transformers (`modeling_rope_utils.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from cairn.kernels.elementary import log_of
from cairn.models.families.family import Family
from cairn.models.files import Fields
from cairn.types.errors import ModelError, ModelFileError
from cairn.types.model_spec import MAX_CONTEXT, MAX_HEAD_DIM, RopeScaling, RotaryPositions

ROPE_SCALINGS: dict[str, Literal["none", "linear", "llama3", "yarn"]] = {
    "default": "none",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
}
"""`rope_type` in configs -> `RopeScaling.kind`."""
UNKNOWN_ROPE = frozenset({"mrope_section", "llama_4_scaling_beta"})
"""Rotary settings that only some families support; they change every number."""


_LONG = ("longrope", "su", "yarn")
"""Names of longrope in files of Phi-3."""


def long_rope(config: Fields, family: Family) -> RopeScaling | None:
    """Return `ModelSpec.long_rope`; None if one scaling serves every context length."""
    old, new = config.object("rope_scaling"), config.object("rope_parameters")
    rope = new if new.values else old
    if not family.long_rope or rope.text("rope_type", rope.text("type", "default")) not in _LONG:
        return None
    return _longrope(config, rope, config.integer("max_position_embeddings", 2, MAX_CONTEXT))[1]


def _longrope(config: Fields, rope: Fields, trained: int) -> tuple[RopeScaling, RopeScaling]:
    """Return the scalings for contexts up to the original training length and for longer ones."""
    place = rope if rope.has("original_max_position_embeddings") else config
    original = place.integer("original_max_position_embeddings", 2, MAX_CONTEXT)
    factor = rope.number("factor", 1e-3, 1e6, trained / original)
    usual = 1.0 if factor <= 1 else math.sqrt(1 + log_of(factor) / log_of(original))
    weight = rope.number("attention_factor", 1e-6, 1e6, usual)
    short, long = (
        RopeScaling(factors=_divisors(rope, name), attention_factor=weight, original_context=original)
        for name in ("short_factor", "long_factor")
    )
    return short, long


def _divisors(rope: Fields, name: str) -> tuple[float, ...]:
    found = rope.values.get(name)
    if not isinstance(found, list) or not all(type(one) in (int, float) and 1e-3 <= one <= 1e6 for one in found):
        raise rope.error(name, "a list of numbers from 0.001 to 1e+06")
    return tuple(map(float, found))


def check_divisors(config: Fields, scalings: Iterable[RopeScaling | None], turned: int) -> None:
    """Raise `ModelFileError` if a scaling does not have one factor for each rotated pair."""
    for one in scalings:
        if one is not None and one.factors and len(one.factors) != turned // 2:
            raise ModelFileError(
                f"{config.path}: short_factor and long_factor must have {turned // 2} numbers, found {len(one.factors)}"
            )


def stretched(config: Fields, family: Family) -> float:
    """Return the base of the factor by which the family scales theta; 1 for none."""
    new = config.object("rope_parameters")
    rope = new if new.values else config.object("rope_scaling")
    return rope.number("alpha", 1e-3, 1e9, 1.0) if family.stretched else 1.0


def unturned(config: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers without positions: those listed with 0, or every n-th."""
    flags = config.values.get("no_rope_layers")
    if flags in (None, []):  # both mean the pattern to transformers' Llama 4
        interval = config.integer("no_rope_layer_interval", 1, 1 << 12, 4)
        flags = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(flags, list) or len(flags) != layers or any(one not in (0, 1) for one in flags):
        raise config.error("no_rope_layers", f"a list of {layers} entries, each 0 or 1")
    return tuple(layer for layer, turned in enumerate(flags) if not turned)


def query_scaling(config: Fields) -> tuple[float, float] | None:
    """Return `ModelSpec.query_scaling`; None if the config does not set it."""
    rope = config.object("rope_parameters" if config.object("rope_parameters").values else "rope_scaling")
    if not rope.has("llama_4_scaling_beta"):
        return None
    return (
        rope.number("llama_4_scaling_beta", 0.0, 1e3),
        float(rope.integer("original_max_position_embeddings", 1, MAX_CONTEXT)),
    )


def unturned_scaling(config: Fields) -> tuple[float, float] | None:
    """Return `ModelSpec.unturned_scaling`."""
    if not config.flag("attn_temperature_tuning", True):
        return None
    return config.number("attn_scale", 0.0, 1e3, 0.1), float(config.integer("floor_scale", 1, MAX_CONTEXT, 8192))


def rotary(config: Fields, head_dim: int) -> int | None:
    """Return `ModelSpec.rotary`."""
    rope = config.object("rope_parameters")
    place = rope if rope.has("partial_rotary_factor") else config
    turned = int(head_dim * place.number("partial_rotary_factor", 0.0, 1.0, 1.0))
    if turned % 2 or not turned:
        raise config.error("partial_rotary_factor", "an even part of the head size")
    return None if turned == head_dim else turned


_BY_TYPE = ("full_attention", "sliding_attention")


def by_type(config: Fields) -> bool:
    """Return whether `rope_parameters` has settings for each type of layer."""
    return any(kind in config.object("rope_parameters").values for kind in _BY_TYPE)


def global_positions(config: Fields) -> Fields:
    """Return the config with the rotary settings of layers without a window, if there are two sets."""
    if not by_type(config):
        return config
    if config.object("rope_scaling").values:
        raise ModelError(
            f"{config.path}: rope_scaling is set beside rope_parameters for each layer type; keep one of them"
        )
    kinds = config.object("rope_parameters").values
    own = {"rope_parameters": kinds.get("full_attention"), "rope_scaling": None}
    return Fields({**config.values, **own}, config.path, config.prefix)


def local_positions(config: Fields, family: Family) -> RotaryPositions:
    """Return the rotary positions of layers with a window, if they have their own."""
    theta = config.values.get("rope_local_base_freq") if family.local_rope else family.defaults["rope_theta"]
    settings = config.object("rope_parameters").values.get("sliding_attention")
    own = {"rope_parameters": settings, "rope_scaling": None, "rope_theta": theta}
    scaling, theta, _ = rope_scaling(Fields({**config.values, **own}, config.path, config.prefix), family)
    return RotaryPositions(theta=theta, scaling=scaling)


def _kind(rope: Fields, family: Family) -> str:
    """Return the name of the scaling."""
    named = rope.text("rope_type", rope.text("type", "default"))
    return "default" if family.stretched and named == "dynamic" and rope.has("alpha") else named


def _check_part(config: Fields, rope: Fields, family: Family) -> None:
    """Raise `ModelError` if the config rotates only a part of each head and the family does not support it."""
    own = 1.0
    if family.latent:  # may restate the ratio of its head sizes
        turned = config.integer("qk_rope_head_dim", 2, MAX_HEAD_DIM)
        own = turned / (turned + config.integer("qk_nope_head_dim", 1, MAX_HEAD_DIM))
    for place in (rope, config):
        if not family.rotary and place.number("partial_rotary_factor", 0.0, 1.0, 1.0) not in (1.0, own):
            raise ModelError(f"{config.path}: partial_rotary_factor other than 1 is not supported")


def rope_scaling(config: Fields, family: Family) -> tuple[RopeScaling, float, int]:
    """Return rope scaling, theta, and the context length that the scaling gives."""
    old, new = config.object("rope_scaling"), config.object("rope_parameters")
    rope = new if new.values else old
    if new.values and old.values and new.values != old.values:
        raise ModelError(f"{config.path}: rope_scaling and rope_parameters say different things; keep one of them")
    for key, value in rope.values.items():
        known = family.query_scaling if key == "llama_4_scaling_beta" else family.sections
        if isinstance(value, dict) or (key in UNKNOWN_ROPE and not known):
            raise ModelError(f"{config.path}: {key[:80]} in its rotary settings is not supported")
    theta = (rope if rope.has("rope_theta") else config).number("rope_theta", 1.0, 1e15, 10000.0)
    trained = config.integer("max_position_embeddings", 2, MAX_CONTEXT)  # at least a prompt token and a generated one
    _check_part(config, rope, family)
    named = _kind(rope, family)
    if family.long_rope and named in _LONG:
        return _longrope(config, rope, trained)[0], theta, trained
    if named not in ROPE_SCALINGS:
        raise ModelError(
            f"{config.path}: rope scaling {named[:80]!r} is not supported; supported are {', '.join(ROPE_SCALINGS)}"
        )
    kind = ROPE_SCALINGS[named]
    if kind == "none":
        return RopeScaling(), theta, trained
    original = trained
    if kind != "linear":
        outer = config if config.has("original_max_position_embeddings") else rope
        original = outer.integer("original_max_position_embeddings", 1, MAX_CONTEXT, trained)
    implied = trained / original if kind == "yarn" and not rope.has("factor") else None
    factor = rope.number("factor", 1e-3, 1e6, implied)
    scaling = RopeScaling(
        kind=kind,
        factor=factor,
        original_context=original,
        low_freq_factor=rope.number("low_freq_factor", 1e-6, 1e6) if kind == "llama3" else 1.0,
        high_freq_factor=rope.number("high_freq_factor", 1e-6, 1e6) if kind == "llama3" else 4.0,
        beta_fast=rope.number_or_zero("beta_fast", 1e-6, 1e6, 32.0),
        beta_slow=rope.number_or_zero("beta_slow", 1e-6, 1e6, 1.0),
        attention_factor=rope.number("attention_factor", 1e-6, 1e6) if rope.has("attention_factor") else None,
        mscale=rope.number("mscale", 0.0, 1e6) if rope.has("mscale") else None,
        mscale_all_dim=rope.number("mscale_all_dim", 0.0, 1e6) if rope.has("mscale_all_dim") else None,
        truncate=rope.flag("truncate", True),
    )
    if kind == "yarn" and theta <= 1:
        raise config.error("rope_theta", "more than 1 for yarn")
    if scaling.low_freq_factor > scaling.high_freq_factor:
        raise rope.error("low_freq_factor", f"at most high_freq_factor ({scaling.high_freq_factor:g})")
    # llama3 configs state the scaled length; linear and yarn ones may still state the length before scaling.
    scaled = trained if kind == "llama3" else max(trained, math.floor(original * factor))
    return scaling, theta, min(scaled, MAX_CONTEXT)
