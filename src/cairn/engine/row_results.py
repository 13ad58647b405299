"""From a step's logits to its rows' results: sampled tokens, log-probabilities and errors.

A row's result depends on its own numbers alone, and its randomness is a hash of (seed, choice, position). So a request
gets the same tokens, bit for bit, alone and in any batch, and requests with any options can share a batch. How a token
is drawn from a line of logits, with temperature, top-k and the rest, is defined in `kernels.sampling`. Logits stay
there; only the sampler's choices come here. Log-probabilities are those of the raw distribution, before a grammar,
bias, penalties, temperature and filters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cairn.kernels.extras import choose
from cairn.kernels.sampling import GREEDY_BELOW, NUMPY, ONE, Line, Sampler, TokenChoice
from cairn.types.errors import NOTHING_LEFT, TOO_COMPLEX
from cairn.types.outputs import TokenLogprob
from cairn.types.step import Row, RowResult

NOT_FINITE = "the model produced logits that are not finite numbers"


class LogitsQuestion:
    """The positions of a step whose logits are wanted, a line for each, in the order of rows and positions.

    Lines are answered in slices of any size (`answer`), from which the rows' results are built (`results`).
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        """List the lines of these rows, which have no pending tokens. Wait for the rows' masks."""
        self._rows = rows
        self._tokens: list[int] = []
        self._choices: list[TokenChoice] = []
        self._greedy = all(map(_plain_greedy, rows))
        """Whether each row asks for the highest logit of one position and nothing else."""
        if self._greedy:
            self.count = len(rows)
            return
        self._counts = [0 if row.logits_from is None else row.end - row.logits_from for row in rows]
        self.count = sum(self._counts)
        self._masks = [_masks(row) for row in rows]
        self._lines = [line for row, mask in zip(rows, self._masks, strict=True) for line in _lines(row, mask)]

    def answer(self, sampler: Sampler, logits: Any, count: int) -> None:
        """Let the sampler choose for the next `count` lines, whose logits are `logits` [count, vocab]."""
        if self._greedy:
            self._tokens += sampler.greedy(logits)
        elif count:
            at = len(self._choices)
            self._choices += choose(sampler, self._lines[at : at + count], logits)

    def results(self) -> list[RowResult]:
        """Return the rows' results, once all lines are answered.

        A row that samples gets a `token`, earlier positions give its `prompt_logprobs`, and guesses its `more`. A row
        whose logits are not finite gets an `error`, which concerns no other row.
        """
        if self._greedy:
            return [RowResult(token) if token >= 0 else RowResult(error=NOT_FINITE) for token in self._tokens]
        results, at = [], 0
        for row, masks, count in zip(self._rows, self._masks, self._counts, strict=True):
            results.append(_result(row, masks, self._choices[at : at + count]))
            at += count
        return results


def sample(rows: Sequence[Row], logits: Any, sampler: Sampler = NUMPY) -> list[RowResult]:
    """Return the results of all rows of a step at once.

    `logits`: float32 [n, vocab], for positions logits_from..end-1 of each row that wants logits, in row order. It is
    not changed.
    """
    question = LogitsQuestion(rows)
    if question.count != len(logits):
        raise ValueError(f"rows want {question.count} positions of logits, got {len(logits)}")
    question.answer(sampler, logits, question.count)
    return question.results()


def _plain_greedy(row: Row) -> bool:
    """Return whether a row wants the token with the highest raw logit of one position and nothing else."""
    params = row.sampling
    return (
        row.logits_from == row.end - 1
        and row.samples
        and row.mask is None
        and not row.draft
        and params.temperature < GREEDY_BELOW
        and not params.logprobs
        and not params.logit_bias
        and not params.min_tokens
        and params.extras is None
        and params.repetition_penalty == 1
        and params.presence_penalty == 0
        and params.frequency_penalty == 0
    )


def _scored(row: Row) -> int:
    """Return how many of a row's wanted positions precede a known token, and so give its log-probability."""
    assert row.logits_from is not None
    return max(0, min(row.end, len(row.tokens) - row.draft - 1) - row.logits_from)


def _masks(row: Row) -> tuple[bytes | None, ...]:
    """Wait for a row's masks; return that of each token that it samples."""
    if not row.samples:
        return ()
    if row.draft:
        waiting = (row.mask, *(row.masks or (None,) * row.draft))
        return tuple(None if mask is None else mask.wait() for mask in waiting)
    return (None if row.mask is None else row.mask.wait(),)


def _lines(row: Row, masks: Sequence[bytes | None]) -> list[Line]:
    """Return a line for each position whose logits a row wants; `masks` of those that it samples."""
    if row.logits_from is None:
        return []
    params, first = row.sampling, row.logits_from
    drawn = first + _scored(row)
    scored = [Line(None, params.top_logprobs, asked=(row.tokens[place + 1],)) for place in range(first, drawn)]
    if not row.samples:
        return scored
    top = params.top_logprobs if params.logprobs else None
    places = range(drawn, row.end)
    return scored + [Line(row, top, mask, place + 1) for place, mask in zip(places, masks, strict=True)]


def _result(row: Row, masks: Sequence[bytes | None], choices: Sequence[TokenChoice]) -> RowResult:
    """Put a row's result together from the choices of its wanted positions."""
    if not choices:
        return RowResult()
    if masks and masks[0] == b"":
        return RowResult(error=TOO_COMPLEX)
    scored = _scored(row)
    known = choices[: scored + 1]
    if not all(choice.finite for choice in known):
        return RowResult(error=NOT_FINITE)
    assert row.logits_from is not None
    first = row.logits_from + 1
    prompt = tuple(_logprob(row.tokens[first + n], choice) for n, choice in enumerate(choices[:scored]))
    if not row.samples:
        return RowResult(prompt_logprobs=prompt)
    sampled, *more = (
        RowResult(error=TOO_COMPLEX) if mask == b"" else _drawn(row, choice, prompt if not n else ())
        for n, (choice, mask) in enumerate(zip(choices[scored:], masks, strict=True))
    )
    if more and not sampled.error:
        return RowResult(sampled.token, sampled.logprob, prompt, mu=sampled.mu, more=tuple(more))
    return sampled


def _drawn(row: Row, choice: TokenChoice, prompt: tuple[TokenLogprob, ...]) -> RowResult:
    """Make a result of the choice of one position that samples."""
    if not choice.finite:
        return RowResult(error=NOT_FINITE)
    if choice.token is None:
        return RowResult(error=NOTHING_LEFT)
    logprob = _logprob(choice.token, choice) if row.sampling.logprobs else None
    return RowResult(choice.token, logprob, prompt, mu=choice.mu)


def _logprob(token: int, choice: TokenChoice) -> TokenLogprob:
    """Return log softmax of one raw line at `token`, whose logit is the choice's last, and at the best tokens."""
    total = choice.peak + math.log(choice.mass / ONE)
    best = tuple((one, logit - total) for one, logit in zip(choice.top, choice.logits, strict=False))
    return TokenLogprob(token, choice.logits[-1] - total, best)
