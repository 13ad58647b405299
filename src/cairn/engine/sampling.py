"""From logits to tokens: what a step's rows ask of its logits, and what they are told. Below the waist.

Each row is decided by its own numbers alone, and its randomness is a hash of (seed, choice, position), so a request
gets the same tokens, bit for bit, alone and in any batch, and options never make a request unbatchable. What a line of
logits gives is in `kernels.vocabulary`. Log-probabilities are of the raw distribution, before a grammar, bias,
penalties, temperature and filters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.extras import choose
from cairn.kernels.vocabulary import GREEDY_BELOW, NUMPY, ONE, Line, Sampler, TokenChoice
from cairn.types.errors import NOTHING_LEFT, TOO_COMPLEX
from cairn.types.outputs import TokenLogprob
from cairn.types.sampling_params import SamplingParams
from cairn.types.step import Row, RowResult

NOT_FINITE = "the model produced logits that are not finite numbers"

Floats = NDArray[np.float32]


def sample(rows: Sequence[Row], logits: Floats, sampler: Sampler = NUMPY) -> list[RowResult]:
    """Decide every row of a step.

    `logits` is float32 [n, vocab]: for each row that wants logits its positions logits_from..end-1, in row order, and
    nothing for the others. It is not changed. A row that samples gets a token, positions before the last give
    `prompt_logprobs`, and a row whose logits are not finite gets `error` while the others go on. The draw uses the
    position of the new token, len(row.tokens).
    """
    total = sum(0 if row.logits_from is None else row.end - row.logits_from for row in rows)
    if total != len(logits):
        raise ValueError(f"rows want {total} positions of logits, got {len(logits)}")
    if total == len(rows) and all(row.samples and row.mask is None and _plain_greedy(row.sampling) for row in rows):
        return [RowResult(token) if token >= 0 else RowResult(error=NOT_FINITE) for token in sampler.greedy(logits)]
    masks = [row.mask.wait() if row.samples and row.mask is not None else None for row in rows]
    lines = [line for row, mask in zip(rows, masks, strict=True) for line in _lines(row, mask)]
    choices = choose(sampler, lines, logits) if total else []
    results, at = [], 0
    for row, mask in zip(rows, masks, strict=True):
        count = 0 if row.logits_from is None else row.end - row.logits_from
        found = _result(row, logits[at : at + count], choices[at : at + count])
        results.append(RowResult(error=TOO_COMPLEX) if mask == b"" else found)
        at += count
    return results


def _plain_greedy(params: SamplingParams) -> bool:
    """Whether the highest raw logit is the answer and nothing else was asked for."""
    return (
        params.temperature < GREEDY_BELOW
        and not params.logprobs
        and not params.logit_bias
        and not params.min_tokens
        and params.extras is None
        and not params.needs_history
    )


def _lines(row: Row, mask: bytes | None) -> list[Line]:
    """What a row asks of its positions, each in turn."""
    if row.logits_from is None:
        return []
    params = row.sampling
    last = Line(row, params.top_logprobs if params.logprobs else None, mask)
    scored = min(row.end, len(row.tokens) - 1) - row.logits_from
    return [Line(None, params.top_logprobs)] * scored + ([last] if row.samples else [])


def _result(row: Row, logits: Floats, choices: Sequence[TokenChoice]) -> RowResult:
    """Put a row's answer together from its wanted positions."""
    if not choices:
        return RowResult()
    if not all(choice.finite for choice in choices):
        return RowResult(error=NOT_FINITE)
    last = choices[-1]
    if row.samples and last.token is None:
        return RowResult(error=NOTHING_LEFT)
    first = row.end - len(choices)
    prompt = tuple(
        _logprob(logits[n], row.tokens[first + n + 1], choice)
        for n, choice in enumerate(choices)
        if first + n + 1 < len(row.tokens)
    )
    chosen = _logprob(logits[-1], last.token, last) if row.sampling.logprobs and last.token is not None else None
    return RowResult(last.token, chosen, prompt, mu=last.mu)


def _logprob(logits: Floats, token: int, choice: TokenChoice) -> TokenLogprob:
    """log softmax of one raw row [vocab] at `token`, and its most likely tokens."""
    total = choice.peak + math.log(choice.mass / ONE)
    best = tuple((one, float(logits[one]) - total) for one in choice.top)
    return TokenLogprob(token, float(logits[token]) - total, best)
