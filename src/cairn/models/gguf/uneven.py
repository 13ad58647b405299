"""Gemma 4 and 3n in GGUF files: layers of different shapes. `uneven_spec` explains the fields."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import numpy as np

from cairn.models.families.moe_spec import BESIDE_NORM, BESIDE_POST_NORM, MLP_POST_NORM, ROUTER_SCALE, SHARE_SCALE
from cairn.models.families.uneven_spec import shared_groups, sources
from cairn.models.files import Fields
from cairn.models.gguf.architectures import PER_LAYER
from cairn.models.gguf.reader import Gguf
from cairn.types.errors import ModelError
from cairn.types.model_spec import MAX_HEAD_DIM, ModelSpec, Streams, Uneven

KEYS = (
    *("attention.shared_kv_layers", "embedding_length_per_layer_input", "attention.key_length_swa"),
    *("attention.value_length_swa", "rope.dimension_count_swa", "rope.freq_base_swa", "final_logit_softcapping"),
    *("attention.sliding_window_pattern", "altup.active_idx", "altup.num_inputs", "activation_sparsity_scale"),
)
"""Metadata keys understood, without the architecture's prefix."""
SOFTCAP = "final_logit_softcapping"
"""Defaults to 30 if the file does not state it, as in llama.cpp and in all published models."""
GLOBAL_HEADS, WIDE, LIMITED = "global_heads", "wide", "attention.sliding_window_pattern"
"""Internal keys: KV heads of layers without a window, and which layers' MLP is twice as wide."""

WHOLE = {
    "ffn_gate_inp.scale": ROUTER_SCALE,
    "ffn_down_exps.scale": SHARE_SCALE,
    "layer_output_scale.weight": "layer_scalar",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "pre_ffw_norm_2.weight": BESIDE_NORM,
    "post_ffw_norm_1.weight": MLP_POST_NORM,
    "post_ffw_norm_2.weight": BESIDE_POST_NORM,
}
"""Layer tensors whose suffix differs too: GGUF's name -> ours."""
NAMES = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
"""Layer tensors that other Gemmas do not have: GGUF's name -> ours."""


def by_layer(found: dict[str, Any]) -> None:
    """Replace per-layer lists by one number and an internal key."""
    limited, heads = found.get(LIMITED), found.get("attention.head_count_kv")
    if isinstance(heads, np.ndarray) and isinstance(limited, np.ndarray) and len(heads) == len(limited):
        own, others = (set(heads[limited.astype(bool) == kind].tolist()) for kind in (True, False))
        if len(own) == len(others) == 1:
            found["attention.head_count_kv"], found[GLOBAL_HEADS] = own.pop(), others.pop()
    widths = found.get("feed_forward_length")
    if isinstance(widths, np.ndarray) and set(widths.tolist()) == {widths.min(), 2 * widths.min()}:
        found["feed_forward_length"], found[WIDE] = int(widths.min()), widths > widths.min()


def head_length(kind: Literal["gemma4", "gemma3n"]) -> str:
    """Return the key of the head size of layers with a window."""
    return "attention.key_length_swa" if kind == "gemma4" else "attention.key_length"


def uneven_spec(keys: Fields, gguf: Gguf, spec: ModelSpec, kind: Literal["gemma4", "gemma3n"]) -> ModelSpec:
    """Return the spec with per-layer shapes from the file; its cache groups hold all layers."""
    layers = spec.layers
    inputs = keys.integer("embedding_length_per_layer_input", 0, 1 << 16, 0)
    shared = keys.integer("attention.shared_kv_layers", 0, layers - 1, 0)
    size = keys.integer("attention.key_length", 2, MAX_HEAD_DIM)
    checks = [("attention.value_length", size), ("rope.dimension_count", size)]
    if kind == "gemma4":
        checks += [("attention.value_length_swa", spec.head_dim), ("rope.dimension_count_swa", spec.head_dim)]
    for name, expected in checks:
        if keys.integer(name, 0, 1 << 20, expected) != expected:
            raise ModelError(f"{keys.path}: {keys.prefix}{name} other than the head size {expected} is not supported")
    wide = keys.values.get(WIDE)
    first = layers - shared
    values = {f"blk.{layer}.attn_v.weight" for layer in range(first)}
    table = gguf.tensors.get(PER_LAYER)
    if inputs and table is None:
        raise ModelError(f"{keys.path}: {PER_LAYER} is missing")
    return msgspec.structs.replace(
        spec,
        uneven=Uneven(
            kv_from=sources(
                spec.groups,
                first,
                layers,
                keys.error("attention.shared_kv_layers", "so small that a layer of each kind has keys and values"),
            ),
            keys_as_values=tuple(layer for layer in range(first) if f"blk.{layer}.attn_v.weight" not in gguf.tensors)
            if values - gguf.tensors.keys()
            else (),
            wide=() if wide is None else tuple(layer for layer in range(layers) if wide[layer]),
            inputs=inputs,
            input_rows=table.shape[0] if inputs and table is not None else 0,
            streams=_streams(keys, gguf, layers) if kind == "gemma3n" else None,
        ),
        post_norms=True,
        rotary=None,
        activation="gelu_tanh",
        embedding_scale=math.sqrt(spec.hidden),
        attention_scale=1.0,
        logit_softcap=keys.number_or_zero(SOFTCAP, 1e-3, 1e6, 0.0) if keys.has(SOFTCAP) else 30.0,
        groups=shared_groups(spec.groups, first, keys.integer(GLOBAL_HEADS, 1, spec.heads, spec.kv_heads), size),
    )


def _streams(keys: Fields, gguf: Gguf, layers: int) -> Streams:
    count = keys.integer("altup.num_inputs", 2, 16, 4)
    listed = keys.values.get("activation_sparsity_scale")
    found: tuple[float | None, ...] = ()
    if isinstance(listed, np.ndarray) and len(listed) == layers and listed.dtype.kind == "f":
        # -inf: the threshold lets everything pass, so there is no sparsity.
        found = tuple(float(one) if math.isfinite(one) else None for one in listed.tolist())
    elif listed is not None and not (isinstance(listed, float) and math.isinf(listed)):
        raise keys.error("activation_sparsity_scale", f"a list of {layers} numbers")
    rank = gguf.tensors.get("blk.0.laurel_l.weight")
    if rank is None:
        raise ModelError(f"{keys.path}: blk.0.laurel_l.weight is missing")
    return Streams(
        count=count,
        active=keys.integer("altup.active_idx", 0, count - 1, 0),
        rank=rank.shape[0],
        sparsity=found if any(one is not None for one in found) else (),
    )
