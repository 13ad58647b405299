"""What a text's pooled state goes through before it is a vector or a score: sentence-transformers' Dense modules, or
the two rows of the output by which a decoder judges.

A module's weights are `linear.weight` [out, in] and `linear.bias` in a model.safetensors of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.base import Array, Kernels, Matrix
from cairn.models.files import WEIGHTS
from cairn.models.safetensors.weights import open_tensors
from cairn.types.errors import ModelFileError
from cairn.types.model_spec import ModelSpec
from cairn.types.pooling_spec import Dense

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ProjectionStep:
    """One matrix in float32, and what follows it."""

    weight: Floats
    bias: Floats | None
    activation: str


def open_projection(spec: ModelSpec, folder: Path, weights: Mapping[str, Any]) -> tuple[ProjectionStep, ...]:
    """The steps of a model; `weights` are its tensors as its files have them. Raises `ModelFileError`."""
    if spec.judge is not None:
        name = "judge.weight" if spec.judge.apart else "model.embed_tokens.weight" if spec.tied else "lm_head.weight"
        yes, no = _rows(weights, name, (spec.judge.yes, spec.judge.no))
        return (ProjectionStep((yes - no)[None], None, ""),)
    return tuple(
        ProjectionStep(np.asarray(weights[f"{dense.place}.weight"], np.float32), None, dense.activation)
        if dense.inside
        else _dense(folder / dense.place / WEIGHTS, dense)
        for dense in spec.embedding.dense
    )


def projection_bytes(spec: ModelSpec) -> int:
    """Bytes that the steps take."""
    judge = spec.hidden if spec.judge is not None else 0
    return 4 * (judge + sum((dense.inputs + 1) * dense.outputs for dense in spec.embedding.dense))


def _rows(weights: Mapping[str, Any], name: str, rows: tuple[int, int]) -> Floats:
    found: Floats = np.asarray(weights[name][list(rows)], np.float32)
    return found


def _dense(path: Path, dense: Dense) -> ProjectionStep:
    expected: dict[str, tuple[int, ...]] = {"linear.weight": (dense.outputs, dense.inputs)}
    if dense.bias:
        expected["linear.bias"] = (dense.outputs,)
    found = open_tensors(path)
    for name, shape in expected.items():
        if name not in found:
            raise ModelFileError(f"{path}: the tensor {name} of shape {list(shape)} is missing")
        if found[name].shape != shape or found[name].dtype.kind == "i":
            raise ModelFileError(
                f"{path}: the tensor {name} has the shape {list(found[name].shape)} and the type {found[name].dtype}, "
                f"expected floats of shape {list(shape)} from config.json"
            )
    unknown = next((name for name in found if name not in expected), None)
    if unknown is not None:
        raise ModelFileError(f"{path}: the tensor {unknown[:120]!r} is not part of a Dense module")
    weight, bias = (
        found[name].astype(np.float32) if name in found else None for name in ("linear.weight", "linear.bias")
    )
    assert weight is not None
    return ProjectionStep(weight, bias, dense.activation)


class Projection:
    """The steps over pooled states, with the same kernels as the model and under the same law."""

    def __init__(self, kernels: Kernels, steps: tuple[ProjectionStep, ...]) -> None:
        self._kernels = kernels
        self._steps: list[tuple[Matrix, int, str]] = [
            (kernels.matrix([one.weight], [one.bias]), len(one.weight), one.activation) for one in steps
        ]

    def __call__(self, states: Floats) -> Floats:
        """states[N, H] -> [N, W]"""
        for matrix, width, activation in self._steps:
            made: Array = np.empty((len(states), width), np.float32)
            self._kernels.project(np.ascontiguousarray(states), matrix, made)
            if activation:
                self._kernels.activate(made, activation, made)
            states = made
        return states
