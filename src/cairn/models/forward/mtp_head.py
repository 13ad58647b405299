"""The input of an MTP head, which predicts further tokens: a token's embedding joined with the state before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from cairn.kernels.base import Array, Kernels, Matrix
from cairn.models.families.mtp_spec import EMBEDDING_NORM, JOIN, STATE_NORM
from cairn.types.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Join:
    """Packed weights of the head outside of its layer."""

    matrix: Matrix
    embedding_norm: Array
    state_norm: Array


@dataclass(frozen=True, slots=True)
class JoinBuffers:
    """Additional buffers of a step; empty for a model."""

    before: Any
    """float32 [M, H]: the hidden state of the place before each token."""
    parts: Any
    """float32 [M, 2, H]: both inputs, normed."""
    joined: Any
    """float32 [M, 2 H]: the same memory."""

    def map(self, make: Callable[[Any], Any]) -> JoinBuffers:
        """Return the buffers mapped through `make`."""
        return JoinBuffers(**{one.name: make(getattr(self, one.name)) for one in fields(self)})


def build_join(kernels: Kernels, spec: ModelSpec, weights: Mapping[str, Any]) -> Join | None:
    """Pack the weights; None for a model."""
    if not spec.ahead:
        return None
    matrix = kernels.matrix([weights[JOIN]], [None])
    return Join(matrix, kernels.vector(weights[EMBEDDING_NORM]), kernels.vector(weights[STATE_NORM]))


def allocate_join(kernels: Kernels, spec: ModelSpec, tokens: int) -> JoinBuffers:
    """Allocate buffers for steps of at most `tokens` tokens."""
    hidden = spec.hidden if spec.ahead else 0
    parts = kernels.allocate((tokens, 2, hidden), "float32")
    joined = parts.reshape(tokens, 2 * hidden) if spec.ahead else kernels.allocate((tokens, 0), "float32")
    return JoinBuffers(kernels.allocate((tokens, hidden), "float32"), parts, joined)


def join_numbers(spec: ModelSpec) -> int:
    """Return the numbers per token in the buffers."""
    return 3 * spec.hidden if spec.ahead else 0


def run_join(k: Kernels, own: Join, eps: float, hidden: Any, b: JoinBuffers, normed: Any) -> None:
    """Set hidden[M, H], which holds embeddings, to what the head's layer takes; `normed` is overwritten."""
    k.norm(hidden, own.embedding_norm, eps, normed)
    k.put_stream(normed, 0, b.parts)
    k.norm(b.before, own.state_norm, eps, normed)
    k.put_stream(normed, 1, b.parts)
    k.project(b.joined, own.matrix, hidden)
