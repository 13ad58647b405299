"""Gemma 4 and 3n in configs: layers of different shapes.

Head sizes differ by cache group, later layers share the KV of earlier ones, values may be keys, and layers have
per-layer inputs. Field names are those of transformers' `configuration_gemma4.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import msgspec
import numpy as np

from cairn.models.families.family import Family
from cairn.models.files import Fields
from cairn.types.errors import ModelError
from cairn.types.model_spec import MAX_CONTEXT, MAX_HEAD_DIM, NEVER, CacheGroup, ModelSpec, RopeScaling, Streams, Uneven

INPUTS = "model.embed_tokens_per_layer.weight"
INPUTS_PROJECTION = "model.per_layer_model_projection.weight"
INPUTS_NORM = "model.per_layer_projection_norm.weight"


MAX_HEADS = 1 << 14
_OVERRIDES = frozenset({"head_dim", "num_key_value_heads"})
"""Fields that `per_layer_config` may set."""


def global_heads(config: Fields) -> tuple[int, int]:
    """Return size and number of KV heads of the layers without a window.

    Newer configs state them in `per_layer_config` for each such layer, older ones in separate fields.
    """
    if "per_layer_config" in config.values:
        listed = config.object("per_layer_config").values
        overrides: Any = next(iter(listed.values()), {})
        if (
            any(one != overrides for one in listed.values())
            or not isinstance(overrides, dict)
            or not overrides.keys() <= _OVERRIDES
        ):
            raise config.error(
                "per_layer_config", "head_dim and num_key_value_heads alone, the same for all layers of full_attention"
            )
        own = Fields({**config.values, **overrides}, config.path, config.prefix)
        return own.integer("head_dim", 2, MAX_HEAD_DIM, 256), own.integer("num_key_value_heads", 1, MAX_HEADS, 4)
    heads = "num_key_value_heads"
    if config.flag("attention_k_eq_v", False) and config.has("num_global_key_value_heads"):
        heads = "num_global_key_value_heads"
    return config.integer("global_head_dim", 2, MAX_HEAD_DIM, 512), config.integer(heads, 1, MAX_HEADS, 4)


def _check_overrides(config: Fields, whole: Sequence[int]) -> None:
    """Raise `ModelFileError` if `per_layer_config` names other layers than those without a window."""
    listed = config.object("per_layer_config").values
    if listed and set(listed) != set(map(str, whole)):
        layers = ", ".join(map(str, whole))[:80]
        raise config.error("per_layer_config", f"about the layers of full_attention ({layers}) and no others")


def proportional(config: Fields, family: Family) -> tuple[RopeScaling, float, int]:
    """Return rope scaling, theta and context length of the layers without a window.

    Only the first pairs of a head are rotated, with the frequencies that they have among all pairs.
    """
    rope = config.object("rope_parameters").object("full_attention")
    named = rope.text("rope_type", "default")
    known = ("default",) if family.streams else ("default", "proportional")
    if family.streams and config.object("rope_scaling").values:
        raise ModelError(f"{config.path}: rope_scaling is set, which is not supported")
    if named not in known:
        raise ModelError(f"{config.path}: rope scaling {named[:80]!r} is not supported; supported is proportional")
    size, _ = global_heads(config)
    pairs = size // 2
    part = rope.number("partial_rotary_factor", 0.0, 1.0, 1.0) if named == "proportional" else 1.0
    factor = rope.number("factor", 1e-3, 1e6, 1.0) if named == "proportional" else 1.0
    turned = int(part * size // 2)
    factors = (factor,) * turned + (NEVER,) * (pairs - turned)
    scaling = RopeScaling() if set(factors) == {1.0} else RopeScaling(factors=factors)
    context = config.integer("max_position_embeddings", 2, MAX_CONTEXT)
    place = rope if rope.has("rope_theta") else config
    return scaling, place.number("rope_theta", 1.0, 1e15, 1e6), context


def uneven_fields(config: Fields, family: Family, groups: tuple[CacheGroup, ...], layers: int) -> dict[str, Any]:
    """Return the spec fields of layers that differ; {} for other families. `groups` hold all layers."""
    if not family.uneven:
        return {}
    hidden, vocab = config.integer("hidden_size", 1, 1 << 20), config.integer("vocab_size", 1, 1 << 22)
    same = config.flag("attention_k_eq_v", False)
    whole = next((group.layers for group in groups if group.rope is None), ())
    shared = config.integer("num_kv_shared_layers", 0, layers - 1, 0)
    inputs = config.integer("hidden_size_per_layer_input", 0, 1 << 16, 256)
    rows = config.integer("vocab_size_per_layer_input", 1, 1 << 22, 262_144) if inputs else 0
    if inputs and rows < vocab and not family.streams:  # with streams, ids beyond the table read its first row
        raise config.error("vocab_size_per_layer_input", f"at least vocab_size ({vocab})")
    none_writes = config.error("num_kv_shared_layers", "so small that a layer of each kind has keys and values")
    uneven = Uneven(
        kv_from=sources(groups, layers - shared, layers, none_writes),
        keys_as_values=whole if same else (),
        wide=tuple(range(layers - shared, layers)) if config.flag("use_double_wide_mlp", False) else (),
        inputs=inputs,
        input_rows=rows,
        streams=_streams(config, layers) if family.streams else None,
    )
    if family.streams:
        size, heads = config.integer("head_dim", 2, MAX_HEAD_DIM), config.integer("num_key_value_heads", 1, MAX_HEADS)
    else:
        size, heads = global_heads(config)
        _check_overrides(config, whole)
    if size % 2 or config.integer("num_attention_heads", 1, MAX_HEADS) % heads:
        raise ModelError(f"{config.path}: {heads} key-value heads of {size} numbers do not fit the query heads")
    return {
        "uneven": uneven,
        "embedding_scale": math.sqrt(hidden),
        "attention_scale": 1.0,
        "logit_softcap": config.number_or_zero("final_logit_softcapping", 1e-3, 1e6, 0.0),
        "groups": shared_groups(groups, layers - shared, heads, size),
    }


def shared_groups(groups: Sequence[CacheGroup], first: int, kv_heads: int, head_dim: int) -> tuple[CacheGroup, ...]:
    """Return the groups without the layers from `first` on, which share KV.

    Groups without a window get their own head count and size.
    """
    own = {"kv_heads": kv_heads, "head_dim": head_dim}
    return tuple(
        msgspec.structs.replace(
            group,
            layers=tuple(layer for layer in group.layers if layer < first),
            **({} if group.rope is not None else own),
        )
        for group in groups
    )


def one_width(config: Fields) -> int:
    """Return the MLP width of all layers; raise `ModelError` if a list of widths differs."""
    listed = config.values.get("intermediate_size")
    if isinstance(listed, list):
        if len(set(map(str, listed))) != 1:
            raise ModelError(f"{config.path}: an intermediate_size that differs by layer is not supported")
        return Fields({"intermediate_size": listed[0]}, config.path).integer("intermediate_size", 1, 1 << 22)
    return config.integer("intermediate_size", 1, 1 << 22)


def _streams(config: Fields, layers: int) -> Streams:
    count = config.integer("altup_num_inputs", 2, 16, 4)
    listed = config.values.get("activation_sparsity_pattern")
    if listed is None:
        sparse = 10 if layers > 10 else 0
        listed = [0.95] * sparse + [0.0] * (layers - sparse)
    shares = [listed] * layers if isinstance(listed, int | float) else listed
    numbers = isinstance(shares, list) and all(type(one) in (int, float) and 0 <= one < 1 for one in shares)
    if not numbers or len(shares) != layers:
        raise config.error("activation_sparsity_pattern", f"a list of {layers} numbers from 0 to less than 1")
    return Streams(
        count=count,
        active=config.integer("altup_active_idx", 0, count - 1, 0),
        rank=config.integer("laurel_rank", 1, 1 << 16, 64),
        # Rounded to float32, the kernels' precision: further digits depend on the C library.
        sparsity=tuple(float(np.float32(NormalDist().inv_cdf(one))) if one else None for one in shares)
        if any(shares)
        else (),
        scaled=config.flag("altup_correct_scale", True),
    )


def sources(groups: Sequence[CacheGroup], first: int, layers: int, none_writes: ModelError) -> tuple[int, ...]:
    """Return for each layer from `first` on the layer whose KV it reads: the last earlier one of its cache group.

    Raise `none_writes` if there is none.
    """
    found = []
    for layer in range(first, layers):
        alike = next(group.layers for group in groups if layer in group.layers)
        before = [one for one in alike if one < first]
        if not before:
            raise none_writes
        found.append(before[-1])
    return tuple(found)


def uneven_tensors(spec: ModelSpec, uneven: Uneven) -> dict[str, tuple[int, ...]]:
    """Return name and shape of the tensors outside the layers except embedding, last norm and output."""
    found: dict[str, tuple[int, ...]] = {}
    if uneven.inputs:
        wide = spec.layers * uneven.inputs
        found[INPUTS] = (uneven.input_rows, wide)
        found[INPUTS_PROJECTION] = (wide, spec.hidden)
        found[INPUTS_NORM] = (uneven.inputs,)
    if uneven.streams is not None:
        found |= stream_tensors(spec, uneven.streams)
    return found


def uneven_layer(spec: ModelSpec, uneven: Uneven, layer: int) -> dict[str, tuple[int, ...]]:
    """Return name (below the layer) and shape of a layer's tensors except its experts'."""
    _, kv_heads, _, size = spec.page(spec.group_of(layer))
    query, kv, hidden = spec.heads * size, kv_heads * size, spec.hidden
    ffn = 2 * spec.ffn if layer in uneven.wide else spec.ffn
    matrices = {"q_proj": (query, hidden)}
    if layer < spec.layers - len(uneven.kv_from):
        matrices["k_proj"] = (kv, hidden)
        if layer not in uneven.keys_as_values:
            matrices["v_proj"] = (kv, hidden)
    found: dict[str, tuple[int, ...]] = {f"self_attn.{name}.weight": shape for name, shape in matrices.items()}
    if spec.qkv_bias:
        found |= {f"self_attn.{name}.bias": shape[:1] for name, shape in matrices.items()}
    if spec.out_bias:
        found["self_attn.o_proj.bias"] = (hidden,)
    found["self_attn.o_proj.weight"] = (hidden, query)
    found["self_attn.q_norm.weight"] = (size,)
    if "k_proj" in matrices:
        found["self_attn.k_norm.weight"] = (size,)
    found |= {"mlp.gate_proj.weight": (ffn, hidden), "mlp.up_proj.weight": (ffn, hidden)}
    found["mlp.down_proj.weight"] = (hidden, ffn)
    places = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    found |= {f"{place}_layernorm.weight": (hidden,) for place in places}
    if uneven.streams is None:
        found["layer_scalar"] = (1,)
    else:
        found |= stream_layer_tensors(spec, uneven.streams)
    if uneven.inputs:
        found["per_layer_input_gate.weight"] = (uneven.inputs, hidden)
        found["per_layer_projection.weight"] = (hidden, uneven.inputs)
        found["post_per_layer_input_norm.weight"] = (hidden,)
    return found


STREAMS, MERGES = "model.altup_projections", "model.altup_unembed_projections"
"""Matrices that make the streams of the embedding and that merge them: one for each but the first."""


def stream_tensors(spec: ModelSpec, streams: Streams) -> dict[str, tuple[int, ...]]:
    """Return name and shape of the tensors that make and merge streams."""
    square = (spec.hidden, spec.hidden)
    places = (STREAMS, MERGES)
    return {f"{place}.{number}.weight": square for place in places for number in range(streams.count - 1)}


def stream_layer_tensors(spec: ModelSpec, streams: Streams) -> dict[str, tuple[int, ...]]:
    """Return name (below the layer) and shape of a layer's stream tensors."""
    hidden, count = spec.hidden, streams.count
    return {
        "altup.correct_output_scale": (hidden,),
        "altup.correction_coefs.weight": (count, count),
        "altup.prediction_coefs.weight": (count * count, count),
        "altup.modality_router.weight": (count, hidden),
        "altup.router_norm.weight": (hidden,),
        "laurel.linear_left.weight": (streams.rank, hidden),
        "laurel.linear_right.weight": (hidden, streams.rank),
        "laurel.post_laurel_norm.weight": (hidden,),
    }
