"""A LoRA adapter read from its files: two float32 matrices for each matrix of the model that it changes.

Names are those of `safetensors.weights.expected_tensors` without `.weight`. The adapter's own scaling (alpha / rank, or
alpha / sqrt(rank)) is part of the second matrix, so a merged weight is W + up @ down.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.models.safetensors.weights import expected_tensors
from cairn.types.errors import ModelFileError
from cairn.types.model_spec import ModelSpec

MAX_RANK = 512
"""Largest rank of one matrix."""
_VERSION = b"cairn adapter 1"
"""Part of every digest; change it with the meaning of an adapter's numbers."""

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LowRankWeight:
    """What an adapter adds to one matrix [out, in]: up[out, rank] @ down[rank, in]."""

    down: Floats
    up: Floats

    @property
    def rank(self) -> int:
        """Numbers between the two matrices."""
        return len(self.down)


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter, checked against its base."""

    place: Path
    parts: Mapping[str, LowRankWeight]
    """By the name of the matrix, without `.weight`."""
    digest: bytes
    """SHA-256 of the names and numbers: part of every key of KV that was computed with the adapter."""

    @property
    def rank(self) -> int:
        """Its largest rank."""
        return max(part.rank for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all its numbers."""
        return sum(part.down.nbytes + part.up.nbytes for part in self.parts.values())


class AdapterParts:
    """Collects an adapter's pairs of matrices, and checks each against the base."""

    def __init__(self, place: Path, spec: ModelSpec) -> None:
        self._place = place
        self._expected = expected_tensors(spec)
        self._name = spec.name
        self._parts: dict[str, LowRankWeight] = {}

    def add(self, stored: str, name: str, down: NDArray[Any], up: NDArray[Any]) -> None:
        """Add the pair of the matrix `name`, which the file calls `stored`. Raise `ModelFileError` if it does not fit.

        `up` has the adapter's scaling already.
        """
        shape = self._expected.get(f"{name}.weight")
        where = f"{self._place}: the adapter of {stored[:120]!r}"
        if shape is None or len(shape) != 2:
            raise ModelFileError(f"{where} changes no matrix of {self._name}: it was made for another model")
        rank = down.shape[0] if down.ndim == 2 else 0
        if not 1 <= rank <= MAX_RANK or down.shape != (rank, shape[1]) or up.shape != (shape[0], rank):
            raise ModelFileError(
                f"{where} has matrices of {list(down.shape)} and {list(up.shape)}; for {list(shape)} they must be "
                f"[rank, {shape[1]}] and [{shape[0]}, rank], the rank from 1 to {MAX_RANK}"
            )
        if name in self._parts:
            raise ModelFileError(f"{where}: {name} is changed twice")
        down, up = np.ascontiguousarray(down, np.float32), np.ascontiguousarray(up, np.float32)
        if not (np.isfinite(down).all() and np.isfinite(up).all()):
            raise ModelFileError(f"{where} has numbers that are not finite")
        self._parts[name] = LowRankWeight(down, up)

    def adapter(self) -> AdapterWeights:
        """Return the adapter. Raise `ModelFileError` if nothing was added."""
        if not self._parts:
            raise ModelFileError(f"{self._place}: the adapter changes no matrix")
        digest = hashlib.sha256(_VERSION)
        for name, part in sorted(self._parts.items()):
            digest.update(f"{name} {part.down.shape} {part.up.shape}\n".encode())
            digest.update(part.down.data)
            digest.update(part.up.data)
        return AdapterWeights(self._place, self._parts, digest.digest())
