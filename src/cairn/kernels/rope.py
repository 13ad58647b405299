"""Frequencies of rotary positions, with the scalings that stretch them over longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.elementary import log_of, power_of
from cairn.types.model_spec import RopeScaling

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rope:
    """Frequencies [D/2] in radians a position, and the factor on cosine and sine."""

    frequencies: Floats
    factor: float


def frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> Rope:
    """Return rotary frequencies as transformers' `modeling_rope_utils` defines them for each kind of scaling."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = np.float32(1) / np.array([power_of(theta, float(one)) for one in exponents], np.float32)
    if scaling.factors:
        plain /= np.array(scaling.factors, np.float32)
    if scaling.kind == "linear":
        return Rope(plain / np.float32(scaling.factor), 1.0)
    if scaling.kind == "llama3":
        return Rope(_llama3(plain, scaling), 1.0)
    if scaling.kind == "yarn":
        return Rope(_yarn(plain, head_dim, theta, scaling), _yarn_factor(scaling))
    return Rope(plain, 1.0 if scaling.attention_factor is None else scaling.attention_factor)


def _llama3(plain: Floats, scaling: RopeScaling) -> Floats:
    """Slow long waves by `factor`, keep short ones, and blend those between by how often they turn."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_context * plain.astype(np.float64) / (2 * math.pi)
    # Equal factors, as Llama 4 has them, leave nothing between: a step instead of a slope.
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0) if low < high else (turns > low).astype(np.float64)
    blended: Floats = ((1 - blend) * plain / scaling.factor + blend * plain).astype(np.float32)
    return blended


def _yarn(plain: Floats, head_dim: int, theta: float, scaling: RopeScaling) -> Floats:
    """Keep dimensions that turn more than `beta_fast` times, slow those below `beta_slow`, with a ramp between."""

    def dimension(turns: float) -> float:
        wave = scaling.original_context / (turns * 2 * math.pi)
        return head_dim * log_of(wave) / (2 * log_of(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))  # as Python ints they may be too large for numpy
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    blended: Floats = (plain / scaling.factor * ramp + plain * (1 - ramp)).astype(np.float32)
    return blended


def _yarn_factor(scaling: RopeScaling) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * log_of(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)
