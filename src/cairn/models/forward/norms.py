"""Norms of hidden states and heads: by their root mean square, or by mean and variance (layer norms)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cairn.kernels.base import Array, Kernels, Matrix
from cairn.types.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A layer norm's weight and bias."""

    weight: Array
    bias: Array | None


Norm = Array | LayerNorm
"""The weight of a root-mean-square norm, or a layer norm."""


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """A layer norm of `heads` heads of `size` numbers each in rows of queries, keys and values, from `first` on."""

    first: int
    heads: int
    size: int
    norm: LayerNorm


def build_norm(kernels: Kernels, spec: ModelSpec, weights: Mapping[str, Any], name: str) -> Norm:
    """Pack the norm called `name`."""
    weight = kernels.vector(weights[f"{name}.weight"])
    if not spec.layer_norms:
        return weight
    return LayerNorm(weight, kernels.vector(weights[f"{name}.bias"]) if f"{name}.bias" in weights else None)


def build_head_norms(
    kernels: Kernels, spec: ModelSpec, weights: Mapping[str, Any], prefix: str
) -> tuple[HeadNorm, ...]:
    """Pack the layer norms of a layer's queries and keys; () if it has none."""
    if not (spec.qk_norm and spec.layer_norms):
        return ()
    places = (("q", 0, spec.heads), ("k", spec.heads, spec.kv_heads))
    built = [build_norm(kernels, spec, weights, f"{prefix}self_attn.{part}_norm") for part, _, _ in places]
    return tuple(
        HeadNorm(first, heads, spec.head_dim, norm) for (_, first, heads), norm in zip(places, built, strict=True)
    )


def run_norm(k: Kernels, norm: Norm, eps: float, x: Any, out: Any) -> None:
    """Norm x[M, H] to `out`, which may be `x`."""
    if isinstance(norm, LayerNorm):
        k.layer_norm(x, norm.weight, norm.bias, eps, out)
    else:
        k.norm(x, norm, eps, out)


def run_head_norms(k: Kernels, norms: Sequence[HeadNorm], eps: float, qkv: Any) -> None:
    """Norm heads of qkv[M, (Q + 2K) D] in place."""
    for own in norms:
        k.layer_norm_heads(qkv, own.first, own.heads, own.size, own.norm.weight, own.norm.bias, eps)


def run_logits(k: Kernels, norm: Norm, eps: float, head: Matrix, hidden: Any, wanted: Any, logits: Any) -> None:
    """Compute the logits of the wanted tokens from their last hidden states."""
    if isinstance(norm, LayerNorm):
        k.layer_logits(hidden, wanted, norm.weight, norm.bias, eps, head, logits)
    else:
        k.logits(hidden, wanted, norm, eps, head, logits)
