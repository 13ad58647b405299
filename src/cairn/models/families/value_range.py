"""Upper bound of the keys and values that a model can produce, for any prompt.

A normed vector of H numbers has at most the length sqrt(H), apart from its weights. So its product with a row w is at
most sqrt(H) times the length of w times those weights (Cauchy-Schwarz), and a norm's bias adds its own product with w.
Rotary positions preserve the length of each pair. A KV type that holds the bound therefore never overflows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.rope import Floats, frequencies
from cairn.types.model_spec import Latent, ModelSpec

HALF = 65_504.0
"""The largest float16."""
ROUNDING = 2.0
"""Factor by which rounding can lengthen a row and a vector together: 4 bits in groups 1.38, 8 bits 1.03; the rest is
spare."""


def reach(spec: ModelSpec, weights: Mapping[str, NDArray[Any]]) -> float:
    """Return a bound of all keys and values; infinite or NaN if weights are.

    `weights` are those of `open_weights`, before rounding for the kernels, which `ROUNDING` covers. Reads the key and
    value weights.
    """
    with np.errstate(all="ignore"):
        ropes = [(spec.turned_in(group), spec.rope(group)) for group in range(len(spec.groups))]
        turned = max(abs(frequencies(size, rope.theta, rope.scaling).factor) for size, rope in ropes)
        layers = sorted(layer for group in spec.groups if group.kind != "state" for layer in group.layers)
        bounds = [_layer(spec, weights, layer, turned) for layer in layers]
    return float(ROUNDING * np.max(bounds, initial=0.0))  # unlike Python's max, it propagates NaN


def fits_half(reached: float) -> bool:
    """Return whether float16 holds keys and values up to this bound."""
    return reached <= HALF


def _layer(spec: ModelSpec, weights: Mapping[str, NDArray[Any]], layer: int, turned: float) -> float:
    prefix = f"model.layers.{layer}."
    if not spec.pre_norms:
        return math.inf  # without a norm, attention's input has no bound
    if spec.uneven is not None:  # keys are normed, and values without a weight
        weight = np.abs(_wide(weights[f"{prefix}self_attn.k_norm.weight"]))
        return math.sqrt(len(weight)) * float(np.max([1.0, turned * np.maximum(*np.split(weight, 2)).max()]))
    norm = _wide(weights[f"{prefix}input_layernorm.weight"])
    bias = _wide(weights[f"{prefix}input_layernorm.bias"]) if spec.norm_bias else None
    if spec.latent is not None:
        return _latent(spec, spec.latent, weights, prefix, norm, turned)
    if spec.qk_norm:
        keys = _normed_keys(spec, weights, f"{prefix}self_attn.k_norm")
        pairs = np.maximum(*np.split(keys.reshape(-1, spec.head_dim), 2, axis=1))
    else:
        keys = _products(spec, weights, f"{prefix}self_attn.k_proj", norm, bias)
        squares = np.square(keys, dtype=np.float64).reshape(-1, spec.head_dim)
        pairs = np.sqrt(np.add(*np.split(squares, 2, axis=1)))
    if spec.turned != spec.head_dim:  # other pairs; a pair is at most sqrt(2) times its larger number
        pairs = np.float32(math.sqrt(2)) * keys
    if spec.plain_norm:  # a norm without a weight may lengthen a key
        pairs = np.maximum(pairs, np.float32(math.sqrt(spec.head_dim)))
    values = _products(spec, weights, f"{prefix}self_attn.v_proj", norm, bias)
    return float(np.max([values.max(), turned * pairs.max()]))


def _latent(
    spec: ModelSpec, latent: Latent, weights: Mapping[str, NDArray[Any]], prefix: str, norm: Floats, turned: float
) -> float:
    """Return the bound of a stored latent and its rotary part."""
    kept = np.float32(math.sqrt(latent.rank)) * np.abs(_wide(weights[f"{prefix}self_attn.kv_a_layernorm.weight"]))
    name = f"{prefix}self_attn.kv_a_proj_with_mqa"
    rows = _wide(weights[f"{name}.weight"])[latent.rank :] * norm
    found: Floats = np.float32(math.sqrt(spec.hidden)) * np.sqrt(np.einsum("oi,oi->o", rows, rows))
    if latent.bias:
        found = found + np.abs(_wide(weights[f"{name}.bias"])[latent.rank :])
    return float(np.max([kept.max(), turned * math.sqrt(2) * found.max()]))


def _normed_keys(spec: ModelSpec, weights: Mapping[str, NDArray[Any]], name: str) -> Floats:
    """Return the bound of each number of normed keys: of one head, or of all of them."""
    size = spec.head_dim * (spec.kv_heads if spec.qk_norm_whole else 1)
    weight = _wide(weights[f"{name}.weight"])
    found: Floats = np.float32(math.sqrt(size)) * np.abs(weight)
    return found + np.abs(_wide(weights[f"{name}.bias"])) if f"{name}.bias" in weights else found


def _products(
    spec: ModelSpec, weights: Mapping[str, NDArray[Any]], name: str, norm: Floats, bias: Floats | None
) -> Floats:
    """Return the bound of each output of a projection of a normed vector; `bias` is the norm's."""
    plain = _wide(weights[f"{name}.weight"])
    rows = plain * norm
    found: Floats = np.float32(math.sqrt(spec.hidden)) * np.sqrt(np.einsum("oi,oi->o", rows, rows))
    if bias is not None:
        found = found + np.abs(plain @ bias)
    return found + np.abs(_wide(weights[f"{name}.bias"])) if spec.qkv_bias else found


def _wide(array: NDArray[Any]) -> Floats:
    wide: Floats = array.astype(np.float32, copy=False)
    return wide
