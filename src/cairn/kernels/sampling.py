"""Sampling a token from a line of logits, in numpy: the definition of `csrc/sampler.cpp`, and its fallback.

    line -> bias -> penalties -> banned tokens -> temperature -> top-k -> top-p -> min-p -> one draw
    line -> bias -> penalties -> banned tokens -> top-k -> top-p -> min-p -> temperature -> one draw (temperature_last)

Banned are stop tokens before `min_tokens`, and tokens outside a grammar's mask.

The native sampler gives the same tokens, bit for bit, by construction:

    numbers     every elementwise step is float32 multiplications, additions and divisions in a stated order, nothing
                fused, so any machine rounds them alike; the exponential is such a step too (`weigh`)
    sums        weights are integer multiples of 2**-40, so the order of a sum does not matter
    ranks       tokens are ordered by value, equal ones by id, so filters keep the same set everywhere
    the draw    53 random bits times the kept mass, in integers, selects a token from the running sum of weights; by
                rank if top-k or top-p ranked the tokens after the temperature, else by id

A weight has a relative error of up to 3e-6 (2e-7 near the peak), and tokens less likely than 2**-41 of the likeliest
have none. Log-probabilities are of the raw distribution, with the same weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.elementary import log_of
from cairn.types.request import SamplingExtras, SamplingParams
from cairn.types.step import Row

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing float32 logits by them leaves nothing but the maximum anyway."""

ONE = 1 << 40
"""Weight of the likeliest token: the unit of every mass is 1 / ONE."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SLICE = 32
LOWEST = np.float32(-44.0)
LOG2E = np.float32(1.442695)
ROUND = np.float32(12582912.0)
POWERS = [np.float32(x) for x in (0.0013264727, 0.009671513, 0.055507336, 0.24022242, 0.693147, 1.0)]
_SHIFT = 4096.0
_RUN = 64

Floats = NDArray[np.float32]
Weights = NDArray[np.int64]
Ids = NDArray[np.int64]


class Line(NamedTuple):
    """A request for one line of logits [vocab]."""

    row: Row | None
    """The row whose next token is sampled; None if none is."""
    top: int | None = None
    """If a number: return the mass of the raw distribution and its `top` most likely tokens."""
    mask: bytes | None = None
    """The computed `Row.mask`: tokens allowed; None and b"": all."""
    place: int | None = None
    """How many tokens of the row precede the sampled one; None: all of them."""
    asked: tuple[int, ...] = ()
    """With `top`: further tokens whose logits are wanted."""

    @property
    def length(self) -> int:
        """Position of the sampled token, on which its random bits and `min_tokens` depend."""
        assert self.row is not None
        return len(self.row.tokens) if self.place is None else self.place

    @property
    def history(self) -> Sequence[int]:
        """The tokens before the sampled one."""
        assert self.row is not None
        tokens = self.row.tokens
        return tokens if self.place is None or self.place == len(tokens) else tokens[: self.place]


class TokenChoice(NamedTuple):
    """Result for a line."""

    finite: bool
    """Whether all its logits are finite; if not, no other field is set."""
    token: int | None = None
    """The next token; None if none was requested or none is possible."""
    peak: float = 0.0
    """The highest logit, if the raw distribution was requested."""
    mass: int = 0
    """The sum over the vocabulary of exp(logit - peak), in units of 1 / `ONE`."""
    top: tuple[int, ...] = ()
    """The most likely tokens, best first, equal ones by id."""
    logits: tuple[float, ...] = ()
    """With the raw distribution: the logits of `top`, then of `Line.asked`, then of the sampled token."""
    mu: float | None = None
    """Mirostat's state after the token."""


class Sampler(Protocol):
    """Samples from lines of logits in the kernel set's memory, returning tokens and a few numbers only.

    Each line's result depends on that line alone. `logits` is an array of the sampler's kernel set.
    """

    def greedy(self, logits: Any) -> list[int]:
        """Return the lowest id among the highest of each line of logits [n, vocab]; -1 where one is not finite."""
        ...

    def choose(self, lines: Sequence[Line], logits: Any) -> list[TokenChoice]:
        """Answer each line of logits [len(lines), vocab], without changing them."""
        ...

    def takes(self, extras: SamplingExtras) -> bool:
        """Tell whether `choose` applies these samplers; if not, `kernels.extras` does on the host."""
        ...

    def line(self, logits: Any, number: int) -> Floats:
        """Return a copy of one line, for samplers that only exist on the host (`kernels.extras`)."""
        ...


def random_bits(seed: int, choice: int, position: int) -> int:
    """Return 53 random bits that depend on the arguments only.

    Each argument is absorbed in turn by the finaliser of splitmix64 (Steele, Lea, Flood: "Fast splittable
    pseudorandom number generators", 2014).
    """
    state = 0
    for word in (seed, choice, position):
        state = (state + word + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 11


def weigh(scaled: Floats) -> Weights:
    """Return round(exp(scaled) * ONE) for numbers of at most 0, -inf included, with the same bits everywhere.

    exp(x) = 2**n * 2**f with an integer n and f in [-1/2, 1/2]: 2**f is a polynomial that is exact at 0, n is added to
    its exponent. Adding 2**12 in float64 then rounds to multiples of 2**-40, which are the low bits of the sum.
    """
    power = np.maximum(scaled, LOWEST)
    power *= LOG2E
    turned = power + ROUND
    power -= turned - ROUND
    value = power * POWERS[0]
    for term in POWERS[1:-1]:
        value += term
        value *= power
    value += POWERS[-1]
    bits = value.view(np.int32)
    bits += turned.view(np.int32) << 23
    wide = value.astype(np.float64)
    wide += _SHIFT
    weights: Weights = wide.view(np.int64)
    weights -= np.float64(_SHIFT).view(np.int64)
    return weights


class NumpySampler:
    """`Sampler` in numpy."""

    def greedy(self, logits: Floats) -> list[int]:
        """`Sampler.greedy`."""
        tokens = logits.argmax(axis=1)
        # argmax returns the first NaN or +inf, so the chosen value shows them; only -inf needs a second check.
        finite = np.isfinite(logits[np.arange(len(logits)), tokens]) & np.isfinite(logits.min(axis=1))
        return [token if good else -1 for token, good in zip(tokens.tolist(), finite.tolist(), strict=True)]

    def choose(self, lines: Sequence[Line], logits: Floats) -> list[TokenChoice]:
        """`Sampler.choose`."""
        with np.errstate(all="ignore"):
            finite = (np.isfinite(logits.min(axis=1)) & np.isfinite(logits.max(axis=1))).tolist()
            drawing = [i for i, line in enumerate(lines) if finite[i] and line.row is not None]
            tokens = dict(zip(drawing, _choose([lines[i] for i in drawing], logits[drawing]), strict=True))
            return [
                _described(logits[i], line, tokens.get(i)) if finite[i] else TokenChoice(False)
                for i, line in enumerate(lines)
            ]

    def takes(self, extras: SamplingExtras) -> bool:
        """Return False: those are `kernels.extras`."""
        return False

    def line(self, logits: Floats, number: int) -> Floats:
        """`Sampler.line`."""
        copied: Floats = logits[number].copy()
        return copied


NUMPY = NumpySampler()


def _described(logits: Floats, line: Line, token: int | None) -> TokenChoice:
    if line.top is None:
        return TokenChoice(True, token)
    peak = logits.max()
    best = ranked(logits, min(line.top, len(logits))) if line.top else ()
    top = tuple(int(one) for one in best)
    mass = int(weigh(logits - peak).sum())
    return TokenChoice(True, token, float(peak), mass, top, logits_of(logits, line, top, token))


def logits_of(logits: Floats, line: Line, top: tuple[int, ...], token: int | None) -> tuple[float, ...]:
    """Return `TokenChoice.logits` of one line [vocab]."""
    ids = (*top, *line.asked) if token is None else (*top, *line.asked, token)
    return tuple(logits[list(ids)].tolist())


def _choose(lines: list[Line], logits: Floats) -> list[int | None]:
    """Sample one token for each line from `logits` [len(lines), vocab], which are overwritten; None if impossible."""
    if not lines:
        return []
    rows = [line.row for line in lines if line.row is not None]
    vocab = logits.shape[1]
    for line, values in zip(lines, logits, strict=True):
        adjust(line, values)
        if line.mask:
            values[forbidden(line.mask, vocab)] = -np.inf
    best = logits.argmax(axis=1)
    peak = logits[np.arange(len(rows)), best]
    tokens: list[int | None] = [
        token if ok else None for token, ok in zip(best.tolist(), np.isfinite(peak).tolist(), strict=True)
    ]
    hot = [i for i, row in enumerate(rows) if tokens[i] is not None and row.sampling.temperature >= GREEDY_BELOW]
    for i in hot:
        params = rows[i].sampling
        if filters(params, vocab):
            relative = logits[i] - peak[i]
            draw = _draw_late if params.temperature_last else _draw_kept
            tokens[i] = draw(relative, params, bits_of(lines[i]))
    whole = [i for i in hot if not filters(rows[i].sampling, vocab)]
    for begin in range(0, len(whole), _SLICE):
        part = whole[begin : begin + _SLICE]
        scaled = logits[part] - peak[part, None]
        scaled /= np.array([divisor(rows[i].sampling) for i in part])[:, None]
        for i, token in zip(part, _draw_whole(scaled, [bits_of(lines[i]) for i in part]), strict=True):
            tokens[i] = token
    return tokens


def bits_of(line: Line, salt: int = 0) -> int:
    """Return the random bits for a line's draw; another `salt` gives independent ones."""
    assert line.row is not None
    return random_bits(line.row.sampling.seed ^ salt, line.row.choice, line.length)


def filters(params: SamplingParams, vocab: int) -> bool:
    """Tell whether top-k, top-p or min-p may remove a token."""
    return 0 < params.top_k < vocab or params.top_p < 1 or params.min_p > 0


def divisor(params: SamplingParams) -> np.float32:
    """Return the temperature as a finite float32, so that banned tokens stay at -inf."""
    return np.float32(min(params.temperature, 3e38))


def lowest(params: SamplingParams) -> np.float32:
    """Return the least logit relative to the peak that min-p keeps."""
    return np.float32(log_of(params.min_p) if params.min_p > 0 else -math.inf)


def adjust(line: Line, logits: Floats) -> None:
    """Apply logit_bias, penalties and min_tokens in place to one line [vocab].

    As in transformers and vLLM, repetition counts prompt and output, presence and frequency only the output.
    """
    row, vocab = line.row, len(logits)
    assert row is not None
    params, history = row.sampling, line.history
    for token, bias in params.logit_bias:
        if token < vocab:
            logits[token] += np.float32(bias)
    if params.repetition_penalty != 1:
        seen = np.fromiter(set(history), np.int64)
        values = logits[seen]
        penalty = np.float32(params.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(history[row.prompt_len :])
        ids = np.fromiter(counts.keys(), np.int64)
        times = np.fromiter(counts.values(), np.float32)
        logits[ids] -= np.float32(params.frequency_penalty) * times + np.float32(params.presence_penalty)
    if line.length - row.prompt_len < params.min_tokens:
        logits[[token for token in params.stop_token_ids if token < vocab]] = -np.inf


def forbidden(mask: bytes, vocab: int) -> NDArray[np.bool_]:
    """Return flags [vocab] of the tokens that a mask forbids."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=vocab, bitorder="little")
    forbidden: NDArray[np.bool_] = bits == 0
    return forbidden


def _draw_whole(scaled: Floats, bits: Sequence[int]) -> list[int]:
    """Draw one token for each row of `scaled` [rows, vocab], whose maxima are 0.

    A running sum over the vocabulary is slow in numpy, so one over the sums of short runs finds the run, then one
    within the run finds the token.
    """
    count, vocab = scaled.shape
    weights = np.zeros((count, -(-vocab // _RUN) * _RUN), np.int64)
    weights[:, :vocab] = weigh(scaled)
    runs = weights.reshape(count, -1, _RUN)
    tokens = []
    for sums, table, random in zip(np.cumsum(runs.sum(axis=2), axis=1), runs, bits, strict=True):
        goal = random * int(sums[-1]) >> 53
        run = int(np.searchsorted(sums, goal, side="right"))
        before = int(sums[run - 1]) if run else 0
        tokens.append(run * _RUN + int(np.searchsorted(np.cumsum(table[run]), goal - before, side="right")))
    return tokens


def _draw_kept(relative: Floats, params: SamplingParams, bits: int) -> int:
    """Draw among the tokens that top-k, then top-p, then min-p keep. `relative` is one row [vocab] with maximum 0."""
    scaled = relative / divisor(params)
    kept = _kept(scaled, params)
    return _drawn(kept, scaled[kept], bits)


def _draw_late(relative: Floats, params: SamplingParams, bits: int) -> int:
    """Draw as `_draw_kept` does, but apply the temperature after the filters."""
    kept = np.sort(_kept(relative, params))
    return _drawn(kept, relative[kept] / divisor(params), bits)


def _drawn(kept: Ids, scaled: Floats, bits: int) -> int:
    running = np.cumsum(weigh(scaled))
    return int(kept[np.searchsorted(running, bits * int(running[-1]) >> 53, side="right")])


def _kept(scaled: Floats, params: SamplingParams) -> Ids:
    """Return the ids that the filters keep, in the order of the draw. Each keeps a prefix of the ranked tokens."""
    vocab, least = len(scaled), lowest(params)
    mass = None
    if 0 < params.top_k < vocab:
        kept = ranked(scaled, params.top_k)
    elif params.top_p < 1:
        kept, mass = _nucleus(scaled, params.top_p)
    else:
        return np.flatnonzero(scaled >= least)
    if params.top_p < 1:
        # A token is kept while the mass before it is below top_p; the first one always is.
        running = np.cumsum(weigh(scaled[kept]))
        goal = math.ceil(params.top_p * (int(running[-1]) if mass is None else mass))
        kept = kept[: int(np.searchsorted(running, goal, side="left")) + 1]
    return kept[scaled[kept] >= least]


def _lanes(vocab: int) -> int:
    """Return into how many columns `ranked` splits a row of logits: a power of two near the root of `vocab`."""
    return 1 << (vocab.bit_length() // 2)


def by_rank(values: Floats, ids: Ids) -> Ids:
    """Sort `ids` (ascending) by their `values`, highest first, equal values by id.

    Value and id are combined into one integer, with the value's bits mapped so that integers sort as floats do: sorting
    integers is several times faster than a stable argsort.
    """
    bits = (np.float32(0) - values).view(np.int32).astype(np.int64)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return np.sort((bits << 32) | ids) & 0xFFFFFFFF


def ranked(scaled: Floats, count: int) -> Ids:
    """Return the ids of the `count` highest of one row [vocab], ordered by rank; `count` <= vocab."""
    vocab = len(scaled)
    lanes = _lanes(vocab)
    if count > lanes:
        return by_rank(scaled, np.arange(vocab))[:count]
    # The count-th highest of any `lanes` distinct tokens is a lower bound; taken are the columns' maxima.
    heads = scaled[: vocab // lanes * lanes].reshape(-1, lanes).max(axis=0)
    kept = np.flatnonzero(scaled >= np.partition(heads, lanes - count)[lanes - count])
    return by_rank(scaled[kept], kept)[:count]


def _nucleus(scaled: Floats, top_p: float) -> tuple[Ids, int]:
    """Return ids by rank that hold at least `top_p` of the mass of one row [vocab], and the whole mass.

    The highest few are tried first.
    """
    weights = weigh(scaled)
    mass = int(weights.sum())
    few = ranked(scaled, _lanes(len(scaled)))
    if int(weights[few].sum()) >= top_p * mass:
        return few, mass
    kept = np.flatnonzero(weights)
    return by_rank(scaled[kept], kept), mass
