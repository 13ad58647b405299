"""Sampling on MLX's device: greedy lines on the device, all others from a copy on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from cairn.kernels.mlx.cells import Cell, Cut, to_numpy
from cairn.kernels.sampling import GREEDY_BELOW, NUMPY, Line, TokenChoice
from cairn.types.request import SamplingExtras

Array = Any
Floats = NDArray[np.float32]


class MlxSampler:
    """`kernels.sampling.Sampler` over cells.

    The highest logit is found on the device. Lines with a random draw, penalties, bias, a mask or log-probabilities are
    copied to the host and sampled by the reference sampler.
    """

    def __init__(self, active: Callable[[], Any]) -> None:
        """`active`: a context for the kernel set's stream."""
        self._active = active

    def greedy(self, logits: Cell | Cut) -> list[int]:
        """`Sampler.greedy`."""
        with self._active():
            numbers = _numbers(logits)
            finite = mx.isfinite(numbers).all(axis=1)
            # argmax returns the first of equal ones.
            tokens: list[int] = mx.where(finite, mx.argmax(numbers, axis=1).astype(mx.int32), -1).tolist()
        return tokens

    def choose(self, lines: Sequence[Line], logits: Cell | Cut) -> list[TokenChoice]:
        """`Sampler.choose`."""
        best = self.greedy(logits)
        choices = [
            TokenChoice(token >= 0, token if line.row and token >= 0 else None)
            for line, token in zip(lines, best, strict=True)
        ]
        wanted = [number for number, line in enumerate(lines) if choices[number].finite and not _plain(line)]
        if wanted:
            with self._active():
                copied = to_numpy(mx.take(_numbers(logits), mx.array(wanted), axis=0))
            for number, choice in zip(wanted, NUMPY.choose([lines[one] for one in wanted], copied), strict=True):
                choices[number] = choice
        return choices

    def takes(self, extras: SamplingExtras) -> bool:
        """Return False: the host applies them."""
        return False

    def line(self, logits: Cell | Cut, number: int) -> Floats:
        """`Sampler.line`."""
        with self._active():
            return to_numpy(mx.take(_numbers(logits), mx.array(number), axis=0))


def _numbers(logits: Cell | Cut) -> Array:
    return logits.whole() if isinstance(logits, Cell) else logits.value


def _plain(line: Line) -> bool:
    """Tell whether a line only needs its highest logit."""
    if line.top is not None:
        return False
    if line.row is None:
        return True
    params = line.row.sampling
    changed = params.logit_bias or params.needs_history or params.min_tokens or line.mask or params.extras is not None
    return params.temperature < GREEDY_BELOW and not changed
