"""The forward pass of a mixture of experts.

normed -> project to scores -> route -> the chosen experts' sum -> projected normed -> the shared expert's gates -> gate
-> project -> added to projected, through its own gate if it has one

Experts beside an MLP (Gemma 4) read the hidden state that it reads, through their own norms:

hidden -> norm -> scale -> project to scores -> route hidden -> norm -> the chosen experts' sum -> norm -> added to the
normed output of the MLP
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cairn.kernels.base import Array, Kernels, Matrix
from cairn.models.families.moe_spec import (
    BESIDE_NORM,
    BESIDE_POST_NORM,
    CORRECTION,
    MLP_POST_NORM,
    ROUTER_SCALE,
    SHARE_SCALE,
)
from cairn.types.model_spec import Experts

Pack = Callable[..., Matrix]
"""Packs the matrices of these names (below a layer), with their biases."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The expert that all tokens use."""

    gate_up: Matrix
    down: Matrix
    gate: Matrix | None
    """Weighs its output; None: the output is added unweighted."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """One layer's packed experts."""

    facts: Experts
    router: Matrix
    correction: Array | None
    gate_up: tuple[Matrix, ...]
    """Only up if experts are not gated."""
    down: tuple[Matrix, ...]
    shared: Shared | None


@dataclass(frozen=True, slots=True)
class Beside:
    """One layer's experts beside its MLP."""

    mixture: Mixture
    router_norm: Array
    scale: float
    """Scale of the router's input."""
    share_scale: Array
    """Scale of each expert's share."""
    norm: Array
    mlp_post_norm: Array
    post_norm: Array


@dataclass(frozen=True, slots=True)
class MixtureBuffers:
    """Additional buffers of mixtures; all layers share them."""

    scores: Any
    """float32 [M, E]"""
    chosen: Any
    """int32 [M, T]"""
    shares: Any
    """float32 [M, T]"""
    shared: Any
    """float32 [M, H]: output of the shared expert, or of experts beside an MLP."""
    shared_gate: Any
    """float32 [M, 1]"""
    gates: Any
    """float32 [M, 2S] of a shared expert of width S"""
    gated: Any
    """float32 [M, S]"""

    def map(self, make: Callable[[Any], Any]) -> MixtureBuffers:
        """Return the buffers mapped through `make`."""
        every = (self.scores, self.chosen, self.shares, self.shared, self.shared_gate, self.gates, self.gated)
        return MixtureBuffers(*map(make, every))


def build_mixture(matrix: Pack, vector: Callable[[str], Array], experts: Experts) -> Mixture:
    """Pack one layer's experts."""
    shared = None
    if experts.shared:
        shared = Shared(
            gate_up=matrix(*_first(experts, "mlp.shared_expert")),
            down=matrix("mlp.shared_expert.down_proj"),
            gate=matrix("mlp.shared_expert_gate") if experts.shared_gate else None,
        )
    names = [f"mlp.experts.{number}" for number in range(experts.count)]
    return Mixture(
        facts=experts,
        router=matrix("mlp.gate"),
        correction=vector(CORRECTION) if experts.correction else None,
        gate_up=tuple(matrix(*_first(experts, name)) for name in names),
        down=tuple(matrix(f"{name}.down_proj") for name in names),
        shared=shared,
    )


def build_beside(matrix: Pack, vector: Callable[[str], Array], experts: Experts | None, hidden: int) -> Beside | None:
    """Pack one layer's experts beside its MLP; None without."""
    if experts is None or not experts.beside:
        return None
    return Beside(
        mixture=build_mixture(matrix, vector, experts),
        router_norm=vector(ROUTER_SCALE),
        scale=1 / math.sqrt(hidden),
        share_scale=vector(SHARE_SCALE),
        norm=vector(BESIDE_NORM),
        mlp_post_norm=vector(MLP_POST_NORM),
        post_norm=vector(BESIDE_POST_NORM),
    )


def is_expert(name: str) -> bool:
    """Return whether a tensor belongs to a routed expert, which a step reads only if its tokens choose it."""
    return ".mlp.experts." in name


def _first(experts: Experts, name: str) -> list[str]:
    """Return the names of the matrices that an expert's input is multiplied with."""
    return [f"{name}.gate_proj", f"{name}.up_proj"] if experts.gated else [f"{name}.up_proj"]


def allocate_mixture(kernels: Kernels, experts: Experts | None, hidden: int, tokens: int) -> MixtureBuffers:
    """Allocate buffers for steps of at most `tokens` tokens; empty ones for a model without experts."""
    count, chosen = (experts.count, experts.chosen) if experts else (0, 0)
    width = experts.shared if experts else 0
    wide = hidden if experts and (width or experts.beside or experts.weighs_input) else 0
    return MixtureBuffers(
        scores=kernels.allocate((tokens, count), "float32"),
        chosen=kernels.allocate((tokens, chosen), "int32"),
        shares=kernels.allocate((tokens, chosen), "float32"),
        shared=kernels.allocate((tokens, wide), "float32"),
        shared_gate=kernels.allocate((tokens, 1 if width else 0), "float32"),
        gates=kernels.allocate((tokens, 2 * width), "float32"),
        gated=kernels.allocate((tokens, width), "float32"),
    )


def mixture_numbers(experts: Experts | None, hidden: int) -> int:
    """Return the numbers per token in the buffers and in what kernels hold while they run."""
    if experts is None:
        return 0
    held = experts.count + 2 * experts.chosen + (hidden + 1 + 3 * experts.shared if experts.shared else 0)
    held += hidden if experts.beside or experts.weighs_input else 0
    return held + 2 * hidden + 4 * experts.ffn


def run_beside(
    k: Kernels, own: Beside, activation: str, eps: float, hidden: Any, b: MixtureBuffers, normed: Any, out: Any
) -> None:
    """Replace out[M, H], the MLP's output for hidden[M, H], by its norm plus the normed output of the experts."""
    layer, how = own.mixture, own.mixture.facts
    k.norm(out, own.mlp_post_norm, eps, out)
    k.norm(hidden, own.router_norm, eps, normed)
    k.scale(normed, own.scale)
    k.project(normed, layer.router, b.scores)
    k.route(b.scores, None, how.scores, how.normed, how.scale, how.groups, how.chosen_groups, b.chosen, b.shares)
    k.scale_shares(b.shares, b.chosen, own.share_scale)
    k.norm(hidden, own.norm, eps, normed)
    k.experts(normed, b.chosen, b.shares, layer.gate_up, activation, layer.down, b.shared)
    k.norm(b.shared, own.post_norm, eps, b.shared)
    k.add(b.shared, out)


def run_mixture(k: Kernels, layer: Mixture, activation: str, x: Any, b: MixtureBuffers, out: Any) -> None:
    """Set out[M, H] to the output of the experts for x[M, H]."""
    how = layer.facts
    rule = (how.scores, how.normed, how.scale, how.groups, how.chosen_groups)
    k.project(x, layer.router, b.scores)
    k.route(b.scores, layer.correction, *rule, b.chosen, b.shares)
    inputs = x
    if how.weighs_input:
        inputs = b.shared  # free until the shared expert writes it below
        k.scale_tokens(x, b.shares, inputs)
    k.experts(inputs, b.chosen, b.shares, layer.gate_up, activation, layer.down, out)
    if layer.shared is None:
        return
    if how.gated:
        k.project(x, layer.shared.gate_up, b.gates)
        k.gate(b.gates, activation, b.gated)
    else:
        k.project(x, layer.shared.gate_up, b.gated)
        k.activate(b.gated, activation, b.gated)
    k.project(b.gated, layer.shared.down, b.shared)
    if layer.shared.gate is None:
        k.add(b.shared, out)
        return
    k.project(x, layer.shared.gate, b.shared_gate)
    k.add_gated(b.shared, b.shared_gate, out)
