"""`sampling.Sampler` in C++ (csrc/sampler.cpp): the same tokens, bit for bit, for a fraction of the time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.sampling import GREEDY_BELOW, Line, TokenChoice, divisor, logits_of, lowest
from cairn.types.request import SamplingExtras

Floats = NDArray[np.float32]


class NativeSampler:
    """`sampling.Sampler` over the kernels' threads. Calls must not overlap."""

    def __init__(self, native: Any) -> None:
        """Wrap `native`, a `_native.Sampler`."""
        self._native = native

    def greedy(self, logits: Floats) -> list[int]:
        """`Sampler.greedy`."""
        tokens = np.empty(len(logits), np.int64)
        self._native.greedy(logits, tokens)
        return tokens.tolist()

    def choose(self, lines: Sequence[Line], logits: Floats) -> list[TokenChoice]:
        """`Sampler.choose`."""
        answers = self._native.choose([_asked(line) for line in lines], logits)
        choices = [TokenChoice(*answer) for answer in answers]
        for number, (line, choice) in enumerate(zip(lines, choices, strict=True)):
            if line.top is not None and choice.finite:
                known = logits_of(logits[number], line, choice.top, choice.token)
                choices[number] = choice._replace(logits=known)
        return choices

    def takes(self, extras: SamplingExtras) -> bool:
        """Return False: the host applies them."""
        return False

    def line(self, logits: Floats, number: int) -> Floats:
        """`Sampler.line`."""
        copied: Floats = logits[number].copy()
        return copied


def _asked(line: Line) -> tuple[Any, ...]:
    """Convert a line to the arguments of `_native.Sampler.choose`."""
    row, top = line.row, -1 if line.top is None else line.top
    if row is None:
        return (top, None)
    params, tokens, output, length = row.sampling, None, row.prompt_len, line.length
    if params.needs_history:
        tokens = line.history
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
        (params.seed, row.choice, length),
        params.logit_bias,
        params.stop_token_ids if length - output < params.min_tokens else (),
        tokens,
        0 if params.repetition_penalty != 1 else output,
        output,
        line.mask or None,
    )
