"""`vocabulary.Sampler` in C++ (csrc/sampler.cpp): the same tokens, bit for bit, for a fraction of the time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.vocabulary import GREEDY_BELOW, Line, TokenChoice, divisor, lowest

Floats = NDArray[np.float32]


class NativeSampler:
    """Lines are spread over the team's threads. One thread calls at a time."""

    def __init__(self, native: Any) -> None:
        """`native` is a `_native.Sampler`."""
        self._native = native

    def greedy(self, logits: Floats) -> list[int]:
        """`Sampler.greedy`."""
        tokens = np.empty(len(logits), np.int64)
        self._native.greedy(logits, tokens)
        return tokens.tolist()

    def choose(self, lines: Sequence[Line], logits: Floats) -> list[TokenChoice]:
        """`Sampler.choose`."""
        return [TokenChoice(*told) for told in self._native.choose([_asked(line) for line in lines], logits)]


def _asked(line: Line) -> tuple[Any, ...]:
    """A line as `_native.Sampler.choose` reads it."""
    row, top = line.row, -1 if line.top is None else line.top
    if row is None:
        return (top, None)
    params, tokens, output = row.sampling, None, row.prompt_len
    if params.needs_history:
        tokens = row.tokens
    temperature = params.temperature
    return (
        top,
        (
            0.0 if temperature < GREEDY_BELOW else float(divisor(params)),
            params.top_k,
            params.top_p,
            float(lowest(params)),
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.temperature_last,
        ),
        (params.seed, row.choice, len(row.tokens)),
        params.logit_bias,
        params.stop_token_ids if len(row.tokens) - output < params.min_tokens else (),
        tokens,
        0 if params.repetition_penalty != 1 else output,
        output,
        line.mask or None,
    )
