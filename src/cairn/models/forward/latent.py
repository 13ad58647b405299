"""The forward pass of multi-head latent attention (MLA).

    normed -> project -> (norm -> project) -> queries
    normed -> project -> norm and rotate -> written to the cache, once per token
    queries through each head's key matrix -> attention over the latents -> through each head's value matrix

A head's keys and values are products of the latent, but they are never computed: the query is multiplied with the key
matrix instead, and the attention output with the value matrix. Prefill and decode do the same, so a token's numbers do
not depend on how many are computed together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from cairn.kernels.base import Array, Kernels, Matrix
from cairn.models.families.latent_spec import KEYS, VALUES
from cairn.types.model_spec import Latent, ModelSpec

Pack = Callable[..., Matrix]
"""Packs the matrices of these names (below a layer), with their biases."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """One layer's packed weights."""

    facts: Latent
    query_down: Matrix | None
    """None: queries are projected from the hidden state directly."""
    query_norm: Array | None
    query: Matrix
    kv: Matrix
    kv_norm: Array
    keys: tuple[Matrix, ...]
    values: tuple[Matrix, ...]
    """`keys` and `values` have a matrix for each head."""
    out: Matrix


@dataclass(frozen=True, slots=True)
class LatentBuffers:
    """Additional buffers of a step; empty for a model without latents."""

    low: Any
    """float32 [M, query rank]"""
    queries: Any
    """float32 [M, Q D]"""
    kv: Any
    """float32 [M, rank + turned]"""
    query: Any
    """float32 [M, Q, rank + turned]"""
    mixed: Any
    """float32 [M, Q, rank]"""
    attended: Any
    """float32 [M, Q V]"""

    def map(self, make: Callable[[Any], Any]) -> LatentBuffers:
        """Return the buffers mapped through `make`."""
        return LatentBuffers(**{one.name: make(getattr(self, one.name)) for one in fields(self)})


def build_latent(matrix: Pack, vector: Callable[[str], Array], spec: ModelSpec, latent: Latent) -> LatentAttention:
    """Pack one layer's weights."""
    low = latent.query_rank > 0
    return LatentAttention(
        facts=latent,
        query_down=matrix("self_attn.q_a_proj") if low else None,
        query_norm=vector("self_attn.q_a_layernorm.weight") if low else None,
        query=matrix("self_attn.q_b_proj" if low else "self_attn.q_proj"),
        kv=matrix("self_attn.kv_a_proj_with_mqa"),
        kv_norm=vector("self_attn.kv_a_layernorm.weight"),
        keys=tuple(matrix(f"{KEYS}.{head}") for head in range(spec.heads)),
        values=tuple(matrix(f"{VALUES}.{head}") for head in range(spec.heads)),
        out=matrix("self_attn.o_proj"),
    )


def _shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of each buffer, without its first axis."""
    latent, heads = spec.latent, spec.heads
    if latent is None:
        return {"low": (0,), "queries": (0,), "kv": (0,), "query": (0, 0), "mixed": (0, 0), "attended": (0,)}
    kept = latent.rank + spec.turned
    return {
        "low": (latent.query_rank,),
        "queries": (heads * spec.head_dim,),
        "kv": (kept,),
        "query": (heads, kept),
        "mixed": (heads, latent.rank),
        "attended": (heads * latent.value,),
    }


def allocate_latent(kernels: Kernels, spec: ModelSpec, tokens: int) -> LatentBuffers:
    """Allocate buffers for steps of at most `tokens` tokens."""
    return LatentBuffers(
        **{name: kernels.allocate((tokens, *shape), "float32") for name, shape in _shapes(spec).items()}
    )


def latent_numbers(spec: ModelSpec) -> int:
    """Return the numbers per token in the buffers."""
    if spec.latent is None:
        return 0
    kept = spec.latent.rank + spec.turned
    return spec.latent.query_rank + spec.heads * (spec.head_dim + kept + spec.latent.rank + spec.latent.value) + kept


def run_latent(
    k: Kernels,
    layer: LatentAttention,
    x: Any,
    angles: Any,
    kv: Array,
    index: int,
    slots: Any,
    rows: Any,
    tables: Any,
    members: Any,
    scale: float,
    scaling: tuple[Any, float, float] | None,
    b: LatentBuffers,
    out: Any,
) -> None:
    """Set out[M, H] to the attention of x[M, H]; write the latents to `slots` of layer `index` of the cache `kv`.

    `scaling`: the tokens' positions, and how queries are scaled by them.
    """
    how = layer.facts
    if layer.query_down is None:
        k.project(x, layer.query, b.queries)
    else:
        k.project(x, layer.query_down, b.low)
        k.norm(b.low, layer.query_norm, how.eps, b.low)
        k.project(b.low, layer.query, b.queries)
    k.project(x, layer.kv, b.kv)
    k.latent_write(b.kv, angles, how.neighbours, layer.kv_norm, how.eps, kv, index, slots)
    k.latent_queries(b.queries, layer.keys, angles, how.neighbours, b.query)
    if scaling is not None:
        k.scale_queries(b.query, *scaling)
    k.latent_attention(b.query, kv, index, rows, tables, scale, b.mixed, members)
    k.latent_values(b.mixed, layer.values, b.attended)
    k.project(b.attended, layer.out, out)
