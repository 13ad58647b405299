"""From logits to tokens: the one sampler that every engine uses, below the waist.

    logits row -> bias -> penalties -> banned stop tokens -> temperature -> top-k -> top-p -> min-p -> one draw

Each row is decided by its own numbers alone. Elementwise work runs over all rows at once, every reduction runs inside
one row in an order that depends on the vocabulary only, and the draw is a hash of (seed, choice, position). So a
request gets the same tokens, bit for bit, alone and in any batch, and options never make a request unbatchable.
Log-probabilities are of the raw distribution, before anything above was applied.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cairn.engine.base import Row, RowResult
from cairn.types import SamplingParams, TokenLogprob

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing float32 logits by them leaves nothing but the maximum anyway."""

NOT_FINITE = "the model produced logits that are not finite numbers"
NOTHING_LEFT = "logit_bias or penalties left no token that could be chosen"

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SLICE = 32

Floats = NDArray[np.float32]


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on nothing but its arguments.

    Each argument is absorbed in turn by the finaliser of splitmix64 (Steele, Lea, Flood: "Fast splittable
    pseudorandom number generators", 2014).
    """
    state = 0
    for word in (seed, choice, position):
        state = (state + word + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return float(state >> 11) * 2.0**-53


def sample(rows: Sequence[Row], logits: Floats) -> list[RowResult]:
    """Decide every row of a step.

    `logits` is float32 [n, vocab]: for each row that wants logits its positions logits_from..end-1, in row order, and
    nothing for the others. It is not changed. A row that samples gets a token, positions before the last give
    `prompt_logprobs`, and a row whose logits are not finite gets `error` while the others go on. The draw uses the
    position of the new token, len(row.tokens).
    """
    spans, total = [], 0
    for row in rows:
        start = total
        total += 0 if row.logits_from is None else row.end - row.logits_from
        spans.append((start, total))
    if total != len(logits):
        raise ValueError(f"rows want {total} positions of logits, got {len(logits)}")
    if total == 0:
        return [RowResult() for _ in rows]
    with np.errstate(all="ignore"):
        if total == len(rows) and all(row.samples and _plain_greedy(row.sampling) for row in rows):
            return _greedy(logits)
        finite = np.isfinite(logits.min(axis=1)) & np.isfinite(logits.max(axis=1))
        good = [start == stop or bool(finite[start:stop].all()) for start, stop in spans]
        drawing = [i for i, row in enumerate(rows) if good[i] and row.samples]
        drawn = _choose([rows[i] for i in drawing], logits[[spans[i][1] - 1 for i in drawing]])
        tokens = dict(zip(drawing, drawn, strict=True))
        return [
            _result(row, logits[start:stop], tokens.get(i)) if good[i] else RowResult(error=NOT_FINITE)
            for i, (row, (start, stop)) in enumerate(zip(rows, spans, strict=True))
        ]


def _plain_greedy(params: SamplingParams) -> bool:
    """Whether the highest raw logit is the answer and nothing else was asked for."""
    return (
        params.temperature < GREEDY_BELOW
        and not params.logprobs
        and not params.logit_bias
        and not params.min_tokens
        and not params.needs_history
    )


def _greedy(logits: Floats) -> list[RowResult]:
    """The fast path: one row of logits a row, the lowest id among the highest logits."""
    tokens = logits.argmax(axis=1)
    # argmax stops at the first NaN or +inf, so the chosen value shows them; only -inf needs a second look.
    finite = np.isfinite(logits[np.arange(len(logits)), tokens]) & np.isfinite(logits.min(axis=1))
    return [
        RowResult(token=token) if good else RowResult(error=NOT_FINITE)
        for token, good in zip(tokens.tolist(), finite.tolist(), strict=True)
    ]


def _result(row: Row, logits: Floats, token: int | None) -> RowResult:
    """Put a row's answer together; `logits` are its wanted positions, finite. `token` is None where none was drawn."""
    first = row.logits_from
    if first is None:
        return RowResult()
    if row.samples and token is None:
        return RowResult(error=NOTHING_LEFT)
    params = row.sampling
    prompt = tuple(
        _logprob(logits[p - first], row.tokens[p + 1], params.top_logprobs)
        for p in range(first, min(row.end, len(row.tokens) - 1))
    )
    chosen = _logprob(logits[-1], token, params.top_logprobs) if params.logprobs and token is not None else None
    return RowResult(token=token, logprob=chosen, prompt_logprobs=prompt)


def _choose(rows: list[Row], logits: Floats) -> list[int | None]:
    """One token a row from `logits` [len(rows), vocab], which are overwritten; None where no token is possible."""
    if not rows:
        return []
    for row, values in zip(rows, logits, strict=True):
        _adjust(row, values)
    best = logits.argmax(axis=1)
    peak = logits[np.arange(len(rows)), best]
    tokens: list[int | None] = [
        token if ok else None for token, ok in zip(best.tolist(), np.isfinite(peak).tolist(), strict=True)
    ]
    hot = [i for i, row in enumerate(rows) if tokens[i] is not None and row.sampling.temperature >= GREEDY_BELOW]
    whole = [i for i in hot if not _filters(rows[i].sampling, logits.shape[1])]
    for i in hot:
        params = rows[i].sampling
        if _filters(params, logits.shape[1]):
            scaled = (logits[i] - peak[i]) / np.float32(params.temperature)
            tokens[i] = _draw_kept(scaled, params, _draw(rows[i]))
    for begin in range(0, len(whole), _SLICE):
        part = whole[begin : begin + _SLICE]
        temperature = np.array([rows[i].sampling.temperature for i in part], np.float32)
        scaled = (logits[part] - peak[part, None]) / temperature[:, None]
        for i, token in zip(part, _draw_whole(scaled, [_draw(rows[i]) for i in part]), strict=True):
            tokens[i] = token
    return tokens


def _draw(row: Row) -> float:
    return uniform(row.sampling.seed, row.choice, len(row.tokens))


def _filters(params: SamplingParams, vocab: int) -> bool:
    return 0 < params.top_k < vocab or params.top_p < 1 or params.min_p > 0


def _adjust(row: Row, logits: Floats) -> None:
    """Apply logit_bias, penalties and min_tokens in place to one row [vocab].

    As transformers and vLLM do it: repetition counts prompt and output, presence and frequency only the output.
    """
    params = row.sampling
    vocab = len(logits)
    for token, bias in params.logit_bias:
        if token < vocab:
            logits[token] += np.float32(bias)
    if params.repetition_penalty != 1:
        seen = np.fromiter(set(row.tokens), np.int64)
        values = logits[seen]
        penalty = np.float32(params.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(row.tokens[row.prompt_len :])
        ids = np.fromiter(counts.keys(), np.int64)
        times = np.fromiter(counts.values(), np.float32)
        logits[ids] -= np.float32(params.frequency_penalty) * times + np.float32(params.presence_penalty)
    if len(row.tokens) - row.prompt_len < params.min_tokens:
        logits[[token for token in params.stop_token_ids if token < vocab]] = -np.inf


def _lanes(vocab: int) -> int:
    """Columns that a row of logits is dealt into, a power of two near the root of `vocab`."""
    return 1 << (vocab.bit_length() // 2)


def _draw_whole(scaled: Floats, draws: list[float]) -> list[int]:
    """Draw one token a row of `scaled` [rows, vocab], whose maxima are 0, with weight exp(scaled).

    A running sum over the vocabulary is slow in numpy. So token t is dealt to column t mod lanes, a column is drawn by
    its sum, then a token within the column: the same distribution for two short running sums.
    """
    count, vocab = scaled.shape
    lanes = _lanes(vocab)
    weights = np.zeros((count, -(-vocab // lanes) * lanes), np.float32)
    np.exp(scaled, out=weights[:, :vocab])
    dealt = weights.reshape(count, -1, lanes)
    columns = np.cumsum(dealt.sum(axis=1), axis=1, dtype=np.float64)
    tokens = []
    for sums, table, u in zip(columns, dealt, draws, strict=True):
        column = _invert(sums, u)
        before = float(sums[column - 1]) if column else 0.0
        inner = min((u * float(sums[-1]) - before) / (float(sums[column]) - before), 1.0)
        tokens.append(_invert(np.cumsum(table[:, column], dtype=np.float64), inner) * lanes + column)
    return tokens


def _by_rank(values: Floats, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """`ids` (ascending) ordered by their `values`, highest first, equal values by id.

    Value and id become one integer, the value's bits mapped so that integers order as floats do: sorting integers is
    several times faster here than a stable argsort.
    """
    bits = (np.float32(0) - values).view(np.int32).astype(np.int64)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return np.sort((bits << 32) | ids) & 0xFFFFFFFF


def _ranked(scaled: Floats, count: int) -> NDArray[np.int64]:
    """The ids of the `count` highest of one row [vocab], ordered by rank; `count` <= vocab."""
    vocab = len(scaled)
    lanes = _lanes(vocab)
    if count > lanes:
        return _by_rank(scaled, np.arange(vocab))[:count]
    # The count-th highest of any `lanes` distinct tokens is a lower bound: take each column's maximum.
    heads = scaled[: vocab // lanes * lanes].reshape(-1, lanes).max(axis=0)
    kept = np.flatnonzero(scaled >= np.partition(heads, lanes - count)[lanes - count])
    return _by_rank(scaled[kept], kept)[:count]


def _nucleus(scaled: Floats, top_p: float) -> tuple[NDArray[np.int64], float]:
    """The ids that hold the `top_p` most likely mass of one row [vocab] by rank, perhaps some more, and the whole mass.

    They are looked for among the highest few first. Failing that, tokens below (1 - top_p) / vocab of the mass are
    dropped before sorting: all of them together are less than the tail that top-p cuts.
    """
    weights = np.exp(scaled)
    mass = float(weights.sum(dtype=np.float64))
    few = _ranked(scaled, _lanes(len(scaled)))
    if float(weights[few].sum(dtype=np.float64)) >= top_p * mass:
        return few, mass
    kept = np.flatnonzero(weights >= mass * (1 - top_p) / len(scaled))
    return _by_rank(scaled[kept], kept), mass


def _draw_kept(scaled: Floats, params: SamplingParams, u: float) -> int:
    """Draw among the tokens that top-k, then top-p, then min-p keep. `scaled` is one row [vocab] with maximum 0.

    Each filter keeps a prefix of the tokens ordered by logit, equal ones by id.
    """
    vocab = len(scaled)
    lowest = math.log(params.min_p) if params.min_p > 0 else -math.inf
    mass = None
    if 0 < params.top_k < vocab:
        kept = _ranked(scaled, params.top_k)
    elif params.top_p < 1:
        kept, mass = _nucleus(scaled, params.top_p)
    else:
        kept = np.flatnonzero(scaled >= lowest)
        kept = _by_rank(scaled[kept], kept)
    running = np.cumsum(np.exp(scaled[kept]), dtype=np.float64)
    count = len(kept)
    if params.top_p < 1:
        # A token stays while the mass before it is short of top_p; the first always stays.
        goal = params.top_p * (float(running[-1]) if mass is None else mass)
        count = min(count, int(np.searchsorted(running, goal, side="left")) + 1)
    if params.min_p > 0:
        count = min(count, int(np.count_nonzero(scaled[kept] >= lowest)))
    return int(kept[_invert(running[:count], u)])


def _invert(running: NDArray[np.float64], u: float) -> int:
    """The index that `u` in [0, 1) falls on, given running sums of weights; never one of weight 0."""
    index = int(np.searchsorted(running, u * running[-1], side="right"))
    return index if index < len(running) else int(np.searchsorted(running, running[-1], side="left"))


def _logprob(logits: Floats, token: int, top: int) -> TokenLogprob:
    """log softmax of one raw row [vocab] at `token`, and its `top` most likely tokens, equal ones by id."""
    peak = logits.max()
    total = float(peak) + math.log(float(np.exp(logits - peak).sum(dtype=np.float64)))
    best = tuple((int(i), float(logits[i]) - total) for i in _ranked(logits, min(top, len(logits)))) if top else ()
    return TokenLogprob(token, float(logits[token]) - total, best)
