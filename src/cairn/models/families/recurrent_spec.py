"""Recurrent layers (delta rule, Mamba 2, short convolutions) in configs, and their tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from cairn.models.families.family import Family
from cairn.models.families.moe_spec import layer_kinds
from cairn.models.files import Fields
from cairn.types.errors import ModelError
from cairn.types.model_spec import MAX_HEAD_DIM, CacheGroup, ModelSpec, Recurrence

MOST_REACH = 16
MAX_HEADS = 1 << 12
MIXER = "mixer."
"""Prefix of a recurrent layer's own tensors, below the layer."""
_EXACT = (f".{MIXER}in_proj_a.weight", f".{MIXER}in_proj_b.weight")
_ATTENDS = ("full_attention", "attention")


def recurrence(config: Fields, family: Family, layers: int, hidden: int) -> Recurrence | None:
    """Return the recurrent layers of a config; None if there are none."""
    if not family.recurrence:
        return None
    found = _RULES[family.recurrence](config, layers, hidden)
    if found is not None and found.key_heads and found.heads % found.key_heads:
        raise ModelError(f"{config.path}: {found.heads} recurrent heads are no multiple of {found.key_heads} key heads")
    return found


def _listed(config: Fields, layers: int, *others: str) -> list[int] | None:
    """Return the layers that `layer_types` gives one of the `others` names; None without a list.

    All other layers must be attention.
    """
    key = "layer_types" if config.has("layer_types") else "layers_block_type"
    if not config.has(key):
        return None
    kinds = config.values[key]
    known = (*_ATTENDS, *others)
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise config.error(key, f"a list of {layers} entries, each {_ATTENDS[0]} or {others[0]}")
    return [layer for layer, kind in enumerate(kinds) if kind in others]


def _delta(config: Fields, layers: int, hidden: int) -> Recurrence | None:
    limited = _listed(config, layers, "linear_attention")
    if limited is None:
        period = config.integer("full_attention_interval", 1, 1 << 12, 4)
        limited = [layer for layer in range(layers) if (layer + 1) % period]
    if not limited:
        return None
    return Recurrence(
        kind="delta",
        layers=tuple(limited),
        reach=config.integer("linear_conv_kernel_dim", 2, MOST_REACH, 4),
        heads=config.integer("linear_num_value_heads", 1, MAX_HEADS, 32),
        value_size=config.integer("linear_value_head_dim", 1, MAX_HEAD_DIM, 128),
        key_heads=config.integer("linear_num_key_heads", 1, MAX_HEADS, 16),
        key_size=config.integer("linear_key_head_dim", 1, MAX_HEAD_DIM, 128),
    )


def _mamba2(config: Fields, layers: int, hidden: int) -> Recurrence | None:
    limited = _listed(config, layers, "mamba", "linear_attention")
    if limited is None:
        raise config.error("layer_types", f"a list of {layers} entries, each {_ATTENDS[1]} or mamba")
    if not limited:
        return None
    heads = config.integer("mamba_n_heads", 1, MAX_HEADS, 128)
    inner = config.integer("mamba_expand", 1, 1 << 6, 2) * hidden
    own = config.values.get("mamba_d_head", "auto")
    size = inner // heads if own == "auto" else config.integer("mamba_d_head", 1, MAX_HEAD_DIM)
    if heads * size != inner:
        raise ModelError(f"{config.path}: {heads} recurrent heads of {size} are not mamba_expand * hidden_size")
    return Recurrence(
        kind="mamba2",
        layers=tuple(limited),
        reach=config.integer("mamba_d_conv", 2, MOST_REACH, 4),
        heads=heads,
        value_size=size,
        key_heads=config.integer("mamba_n_groups", 1, heads, 1),
        key_size=config.integer("mamba_d_state", 1, MAX_HEAD_DIM, 256),
        conv_bias=config.flag("mamba_conv_bias", True),
        bias=config.flag("mamba_proj_bias", False),
        step_limits=_limits(config),
    )


def _nemotron(config: Fields, layers: int, hidden: int) -> Recurrence | None:
    limited = [layer for layer, kind in enumerate(layer_kinds(config, layers)) if kind == "mamba"]
    if not limited:
        return None
    bias = config.flag("mamba_proj_bias", False)
    if config.flag("use_bias", False) != bias:
        raise ModelError(f"{config.path}: use_bias other than mamba_proj_bias is not supported")
    heads = config.integer("mamba_num_heads", 1, MAX_HEADS, 128)
    return Recurrence(
        kind="mamba2",
        layers=tuple(limited),
        reach=config.integer("conv_kernel", 2, MOST_REACH, 4),
        heads=heads,
        value_size=config.integer("mamba_head_dim", 1, MAX_HEAD_DIM, 64),
        key_heads=config.integer("n_groups", 1, heads, 8),
        key_size=config.integer("ssm_state_size", 1, MAX_HEAD_DIM, 128),
        conv_bias=config.flag("use_conv_bias", True),
        bias=bias,
        step_limits=(config.number("time_step_min", 0.0, 1e6, 0.001), math.inf),
    )


def _mamba(config: Fields, layers: int, hidden: int) -> Recurrence:
    """Return the recurrence of a model that consists of Mamba 2 layers only."""
    heads = config.integer("num_heads", 1, MAX_HEADS)
    size = config.integer("head_dim", 1, MAX_HEAD_DIM)
    if heads * size != config.integer("expand", 1, 1 << 6, 2) * hidden:
        raise ModelError(f"{config.path}: {heads} recurrent heads of {size} are not expand * hidden_size")
    return Recurrence(
        kind="mamba2",
        layers=tuple(range(layers)),
        reach=config.integer("conv_kernel", 2, MOST_REACH, 4),
        heads=heads,
        value_size=size,
        key_heads=config.integer("n_groups", 1, heads, 8),
        key_size=config.integer("state_size", 1, MAX_HEAD_DIM, 128),
        conv_bias=config.flag("use_conv_bias", True),
        bias=config.flag("use_bias", False),
        step_limits=_limits(config),
    )


def mlp_layers(config: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers that are only an MLP."""
    return tuple(layer for layer, kind in enumerate(layer_kinds(config, layers)) if kind in ("mlp", "moe"))


def _limits(config: Fields) -> tuple[float, float] | None:
    """Return the least and the greatest time step; None if they are unlimited."""
    found = config.values.get("time_step_limit")
    if found is None:
        return None
    numbers = isinstance(found, list) and len(found) == 2 and all(isinstance(one, int | float) for one in found)
    if not numbers or not 0 <= found[0] <= found[1]:
        raise config.error("time_step_limit", "a list of the least and the greatest step")
    return None if (found[0], found[1]) == (0, math.inf) else (float(found[0]), float(found[1]))


def _conv(config: Fields, layers: int, hidden: int) -> Recurrence | None:
    limited = _listed(config, layers, "conv")
    if limited is None:
        attend = config.values.get("full_attn_idxs")
        if not isinstance(attend, list) or any(type(one) is not int or not 0 <= one < layers for one in attend):
            raise config.error("layer_types", f"a list of {layers} entries, each {_ATTENDS[0]} or conv")
        limited = sorted(set(range(layers)).difference(attend))
    if not limited:
        return None
    bias = config.flag("conv_bias", False)
    reach = config.integer("conv_L_cache", 2, MOST_REACH, 3)
    return Recurrence(kind="conv", layers=tuple(limited), reach=reach, value_size=hidden, conv_bias=bias, bias=bias)


_RULES: dict[str, Callable[[Fields, int, int], Recurrence | None]] = {
    "delta": _delta,
    "mamba2": _mamba2,
    "conv": _conv,
    "nemotron": _nemotron,
    "mamba": _mamba,
}
"""`Family.recurrence` -> reader of its config."""


def with_state(
    groups: tuple[CacheGroup, ...], found: Recurrence | None, idle: tuple[int, ...] = ()
) -> tuple[CacheGroup, ...]:
    """Return the cache groups without recurrent layers, plus the group of these. `idle` layers keep nothing."""
    if found is None and not idle:
        return groups
    apart = {*idle, *(found.layers if found else ())}
    kept = []
    for group in groups:
        layers = tuple(layer for layer in group.layers if layer not in apart)
        if layers:
            kept.append(msgspec.structs.replace(group, layers=layers))
    if found is not None:
        kept.append(CacheGroup(kind="state", layers=found.layers, numbers=found.numbers))
    return tuple(kept)


def recurrent_tensors(spec: ModelSpec, found: Recurrence) -> dict[str, tuple[int, ...]]:
    """Return name (below the layer) and shape of a recurrent layer's own tensors.

    Convolutions are [reach C], the oldest token's first; `decay` is -exp(A_log).
    """
    hidden, inner, channels = spec.hidden, found.inner, found.channels
    shapes: dict[str, tuple[int, ...]] = {"conv.weight": (found.reach * channels,)}
    if found.kind == "delta":
        shapes |= {
            "in_proj_qkv.weight": (channels, hidden),
            "in_proj_z.weight": (inner, hidden),
            "in_proj_b.weight": (found.heads, hidden),
            "in_proj_a.weight": (found.heads, hidden),
        }
    else:
        shapes["in_proj.weight"] = (found.projected, hidden)
    if found.kind != "conv":
        weights = found.value_size if found.kind == "delta" else inner
        shapes |= {"decay": (found.heads,), "dt_bias": (found.heads,), "norm.weight": (weights,)}
    if found.kind == "mamba2":
        shapes["D"] = (found.heads,)
    shapes["out_proj.weight"] = (hidden, inner)
    if found.conv_bias:
        shapes["conv.bias"] = (channels,)
    if found.bias:
        shapes |= {"in_proj.bias": (found.projected,), "out_proj.bias": (hidden,)}
    return {MIXER + name: shape for name, shape in shapes.items()}


def is_step(name: str) -> bool:
    """Return whether a tensor controls how a state decays or updates.

    Its rounding error would accumulate over all tokens.
    """
    return name.endswith(_EXACT)
