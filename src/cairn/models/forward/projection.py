"""Projections of pooled states into vectors or scores.

They are sentence-transformers' Dense modules, or the two output rows that a decoder judges with. A module's weights are
`linear.weight` [out, in] and `linear.bias` in a model.safetensors of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.base import Array, Kernels
from cairn.kernels.program import Interpreted, Program, Slot
from cairn.models.files import WEIGHTS
from cairn.models.forward.recorder import Recorder
from cairn.models.safetensors.weights import open_tensors
from cairn.types.errors import ModelFileError
from cairn.types.model_spec import Dense, ModelSpec

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ProjectionStep:
    """A float32 matrix and the activation after it."""

    weight: Floats
    bias: Floats | None
    activation: str


def open_projection(spec: ModelSpec, folder: Path, weights: Mapping[str, Any]) -> tuple[ProjectionStep, ...]:
    """Return the projection steps of a model; raise `ModelFileError` for wrong files.

    `weights` are its tensors as its files have them.
    """
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
    """Return the bytes that the steps take."""
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


class Pooled:
    """Gathers states from a step's hidden states, one for each row or text, and runs a recorded program over them."""

    def __init__(self, kernels: Kernels, rows: int, width: int, record: Callable[[Any, Slot], Slot]) -> None:
        """Record a program: `record` makes calls over the states [rows, width] and returns the slot of their result."""
        self._kernels, self._width = kernels, width
        self._states = kernels.allocate((rows, width), "float32")
        self._places = kernels.allocate((rows,), "int32")
        self._which: NDArray[np.int32] = kernels.mirror(self._places)
        recorder: Any = Recorder()
        last = record(recorder, Slot("tokens", self._states))
        self._program: Program = kernels.program(recorder.calls)
        self._last = last.array

    def gather(self, hidden: Array, places: Sequence[int]) -> Floats:
        """Return the program's result for the states hidden[places], [len(places), W]."""
        kernels, count = self._kernels, len(places)
        self._which[:count] = places
        kernels.upload([(self._places, self._which[:count])])
        kernels.gather(hidden, kernels.first(self._places, count), kernels.first(self._states, count))
        return self._run(count)

    def of(self, states: Floats) -> Floats:
        """Return the program's result for states[n, width] that were pooled on the host."""
        mirror = self._kernels.mirror(self._states)
        mirror[: len(states)] = states
        self._kernels.upload([(self._states, mirror[: len(states)])])
        return self._run(len(states))

    def close(self) -> None:
        """Free the weights and the buffers."""
        self._program = Interpreted(self._kernels, ())
        self._states = self._places = self._last = self._which = np.empty(0, np.int32)

    def _run(self, count: int) -> Floats:
        self._program.replay({"tokens": count})
        return self._kernels.fetch(self._kernels.first(self._last, count))


def record_projection(kernels: Kernels, rows: int, steps: tuple[ProjectionStep, ...]) -> Callable[[Any, Slot], Slot]:
    """Return a function that records the steps over pooled states.

    They use the model's kernels, so that here too a result does not depend on what else is in the batch.
    """
    packed = [
        (kernels.matrix([one.weight], [one.bias]), kernels.allocate((rows, len(one.weight)), "float32"), one.activation)
        for one in steps
    ]

    def record(k: Any, states: Slot) -> Slot:
        for matrix, made, activation in packed:
            out = Slot("tokens", made)
            k.project(states, matrix, out)
            if activation:
                k.activate(out, activation, out)
            states = out
        return states

    return record
