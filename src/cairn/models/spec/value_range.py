"""How large a key or a value of a model can become, whatever is asked of it.

A normalised vector of H numbers has the length sqrt(H), but for its weights; so no product of it with a row w is beyond
sqrt(H) times the length of w times those weights (Cauchy and Schwarz). Nor is a key, whose numbers are turned in pairs,
beyond the length of its pair. This holds for every prompt, so that a type of KV that holds it never overflows.
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
"""How much longer rounding can make a row and a vector together: to 4 bits by groups 1.38 times the one, to 8 bits 1.03
times the other, and the rest is spare."""


def reach(spec: ModelSpec, weights: Mapping[str, NDArray[Any]]) -> float:
    """A number that no key and no value passes; infinite or NaN for weights that are. Reads the weights of both.

    `weights` are those of `open_weights`, before they are rounded for the kernels; that is in `ROUNDING`.
    """
    with np.errstate(all="ignore"):
        ropes = [(spec.turned_in(group), spec.rope(group)) for group in range(len(spec.groups))]
        turned = max(abs(frequencies(size, rope.theta, rope.scaling).factor) for size, rope in ropes)
        layers = sorted(layer for group in spec.groups if group.kind != "state" for layer in group.layers)
        bounds = [_layer(spec, weights, layer, turned) for layer in layers]
    return float(ROUNDING * np.max(bounds, initial=0.0))  # not Python's, which loses NaN


def fits_half(reached: float) -> bool:
    """Whether float16 holds keys and values up to that."""
    return reached <= HALF


def _layer(spec: ModelSpec, weights: Mapping[str, NDArray[Any]], layer: int, turned: float) -> float:
    prefix = f"model.layers.{layer}."
    if not spec.pre_norms:
        return math.inf  # nothing bounds what attention takes
    if spec.uneven is not None:  # keys are normed, and values without a weight
        weight = np.abs(_wide(weights[f"{prefix}self_attn.k_norm.weight"]))
        return math.sqrt(len(weight)) * float(np.max([1.0, turned * np.maximum(*np.split(weight, 2)).max()]))
    norm = _wide(weights[f"{prefix}input_layernorm.weight"])
    if spec.latent is not None:
        return _latent(spec, spec.latent, weights, prefix, norm, turned)
    if spec.qk_norm:
        size = spec.head_dim * (spec.kv_heads if spec.qk_norm_whole else 1)
        keys = np.float32(math.sqrt(size)) * np.abs(_wide(weights[f"{prefix}self_attn.k_norm.weight"]))
        pairs = np.maximum(*np.split(keys.reshape(-1, spec.head_dim), 2, axis=1))
    else:
        keys = _products(spec, weights, f"{prefix}self_attn.k_proj", norm)
        squares = np.square(keys, dtype=np.float64).reshape(-1, spec.head_dim)
        pairs = np.sqrt(np.add(*np.split(squares, 2, axis=1)))
    if spec.turned != spec.head_dim:  # other pairs; a pair is no longer than its larger number twice over
        pairs = np.float32(math.sqrt(2)) * keys
    if spec.plain_norm:  # a key that is normed without a weight may be longer than it was
        pairs = np.maximum(pairs, np.float32(math.sqrt(spec.head_dim)))
    values = _products(spec, weights, f"{prefix}self_attn.v_proj", norm)
    return float(np.max([values.max(), turned * pairs.max()]))


def _latent(
    spec: ModelSpec, latent: Latent, weights: Mapping[str, NDArray[Any]], prefix: str, norm: Floats, turned: float
) -> float:
    """Of what is kept of a token: a normalised latent, and products that are turned in pairs."""
    kept = np.float32(math.sqrt(latent.rank)) * np.abs(_wide(weights[f"{prefix}self_attn.kv_a_layernorm.weight"]))
    name = f"{prefix}self_attn.kv_a_proj_with_mqa"
    rows = _wide(weights[f"{name}.weight"])[latent.rank :] * norm
    found: Floats = np.float32(math.sqrt(spec.hidden)) * np.sqrt(np.einsum("oi,oi->o", rows, rows))
    if latent.bias:
        found = found + np.abs(_wide(weights[f"{name}.bias"])[latent.rank :])
    return float(np.max([kept.max(), turned * math.sqrt(2) * found.max()]))


def _products(spec: ModelSpec, weights: Mapping[str, NDArray[Any]], name: str, norm: Floats) -> Floats:
    """What each output of a projection of a normalised vector is at most."""
    rows = _wide(weights[f"{name}.weight"]) * norm
    found: Floats = np.float32(math.sqrt(spec.hidden)) * np.sqrt(np.einsum("oi,oi->o", rows, rows))
    return found + np.abs(_wide(weights[f"{name}.bias"])) if spec.qkv_bias else found


def _wide(array: NDArray[Any]) -> Floats:
    wide: Floats = array.astype(np.float32, copy=False)
    return wide
