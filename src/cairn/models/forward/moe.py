"""The forward pass of a mixture of experts.

normed -> project to scores -> route -> the chosen experts' sum -> projected
normed -> the shared expert's gates -> gate -> project -> added to projected, through its own gate where it has one

Where they stand beside an MLP (Gemma 4), they take the hidden state that it takes, through norms of their own:

hidden -> norm -> scale -> project to scores -> route
hidden -> norm -> the chosen experts' sum -> norm -> added to what the MLP gave, normed
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cairn.kernels.base import Array, Kernels, Matrix
from cairn.models.spec.moe_spec import (
    BESIDE_NORM,
    BESIDE_POST_NORM,
    CORRECTION,
    MLP_POST_NORM,
    ROUTER_SCALE,
    SHARE_SCALE,
)
from cairn.types.model_spec import Experts

Pack = Callable[..., Matrix]
"""Packs the matrices of these names below a layer, with their biases."""


@dataclass(frozen=True, slots=True)
class Shared:
    """An expert that all tokens go through."""

    gate_up: Matrix
    down: Matrix
    gate: Matrix | None
    """What lets it through; None: it is added as it is."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """One layer's experts as the kernels packed them."""

    facts: Experts
    router: Matrix
    correction: Array | None
    gate_up: tuple[Matrix, ...]
    """Without gates where there are none."""
    down: tuple[Matrix, ...]
    shared: Shared | None


@dataclass(frozen=True, slots=True)
class Beside:
    """One layer's experts beside its MLP."""

    mixture: Mixture
    router_norm: Array
    scale: float
    """What the router takes is multiplied with."""
    share_scale: Array
    """What each expert's share is multiplied with."""
    norm: Array
    mlp_post_norm: Array
    post_norm: Array


@dataclass(frozen=True, slots=True)
class MixtureBuffers:
    """What the mixtures of a step need beside the buffers of other layers; they share one."""

    scores: Any
    """float32 [M, E]"""
    chosen: Any
    """int32 [M, T]"""
    shares: Any
    """float32 [M, T]"""
    shared: Any
    """float32 [M, H]: what the shared expert gives, or experts beside an MLP."""
    shared_gate: Any
    """float32 [M, 1]"""
    gates: Any
    """float32 [M, 2S] of a shared expert of the width S"""
    gated: Any
    """float32 [M, S]"""

    def map(self, make: Callable[[Any], Any]) -> MixtureBuffers:
        """The buffers with something made of each."""
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
    """Pack one layer's experts beside its MLP; None where there are none."""
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
    """Whether a tensor is of one of many experts, of which a step reads those that its tokens chose."""
    return ".mlp.experts." in name


def _first(experts: Experts, name: str) -> list[str]:
    """The matrices that an expert's input goes through."""
    return [f"{name}.gate_proj", f"{name}.up_proj"] if experts.gated else [f"{name}.up_proj"]


def allocate_mixture(kernels: Kernels, experts: Experts | None, hidden: int, tokens: int) -> MixtureBuffers:
    """Buffers for steps of at most `tokens` tokens; empty ones for a model without experts."""
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
    """Numbers for each token in the buffers, and in what kernels hold while they run."""
    if experts is None:
        return 0
    held = experts.count + 2 * experts.chosen + (hidden + 1 + 3 * experts.shared if experts.shared else 0)
    held += hidden if experts.beside or experts.weighs_input else 0
    return held + 2 * hidden + 4 * experts.ffn


def run_beside(
    k: Kernels, own: Beside, activation: str, eps: float, hidden: Any, b: MixtureBuffers, normed: Any, out: Any
) -> None:
    """out[M, H], what the MLP gives of hidden[M, H], becomes its norm and that of what the experts give together."""
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
    """out[M, H] = what the experts make of x[M, H]."""
    how = layer.facts
    rule = (how.scores, how.normed, how.scale, how.groups, how.chosen_groups)
    k.project(x, layer.router, b.scores)
    k.route(b.scores, layer.correction, *rule, b.chosen, b.shares)
    taken = x
    if how.weighs_input:
        taken = b.shared  # which the shared expert writes later
        k.scale_tokens(x, b.shares, taken)
    k.experts(taken, b.chosen, b.shares, layer.gate_up, activation, layer.down, out)
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
