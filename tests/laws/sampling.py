"""The law of sampling: a slow, literal sampler says which tokens may come, and the rest of the batch never matters.

One schedule is a few rows of logits with random options: `run(seed)`. The slow sampler computes in float64, so it
cannot decide a token whose border is within 1e-5 of the draw; it then accepts either side.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cairn.kernels.sampling import NUMPY, ONE, Line, TokenChoice
from cairn.types.request import SamplingExtras, SamplingParams
from cairn.types.step import Row

CLOSE = 1e-5
_MASK = (1 << 64) - 1


def lines_of_logits(rng: np.random.Generator, count: int, vocab: int) -> Any:
    """Return logits as models give them, and as they should not: many ties, all equal, huge, one lone peak."""
    out = np.empty((count, vocab), np.float32)
    for line in out:
        kind = rng.integers(8)
        line[:] = rng.normal(0, rng.choice([0.1, 2.0, 8.0]), vocab)
        if kind == 0:
            line[:] = np.round(line)
        elif kind == 1:
            line[:] = rng.choice([0.0, -0.0, 3.5, -1e5])
        elif kind == 2:
            line *= np.float32(1e36)
        elif kind == 3:
            line[rng.integers(vocab)] += 60
        elif kind == 4:
            line[:] = np.sort(line)[:: rng.choice([1, -1])]
        elif kind == 5:
            line *= np.float32(1e-39)
    return out


def random_row(rng: np.random.Generator, vocab: int) -> Row:
    """Return a row with a random mixture of options, also at their limits."""

    def maybe(chance: float, off: Any, *values: Any) -> Any:
        return values[rng.integers(len(values))] if rng.random() < chance else off

    tokens = [int(one) for one in rng.integers(0, vocab, rng.integers(1, 40))]
    ids = [int(one) for one in rng.integers(0, vocab + 3, 6)]
    big = maybe(0.1, 1.0, 1e30)
    biases = tuple((one, float(rng.normal(0, 5) * big)) for one in ids)
    params = SamplingParams(
        max_tokens=99,
        temperature=maybe(0.8, 0.0, 1e-6, 1e-5, 0.1, 0.7, 1.0, 1.0, 2.0, 1e4, 1e300),
        top_k=maybe(0.4, 0, 1, 2, 5, 40, 300, vocab - 1, vocab, vocab + 1),
        top_p=maybe(0.4, 1.0, 1e-300, 1e-9, 0.1, 0.5, 0.9, 0.99, 1 - 1e-9, 1 - 2.0**-53),
        min_p=maybe(0.3, 0.0, 1e-300, 1e-12, 1e-3, 0.1, 0.5, 1.0),
        temperature_last=maybe(0.3, False, True),
        repetition_penalty=maybe(0.3, 1.0, 0.5, 1.1, 2.0, 1e30, 1e-30),
        presence_penalty=maybe(0.2, 0.0, 0.5, -2.0, 1e30),
        frequency_penalty=maybe(0.2, 0.0, 0.7, -2.0, 1e30),
        logit_bias=maybe(0.3, (), biases),
        seed=int(rng.integers(-(1 << 63), 1 << 63)) * maybe(0.1, 1, 1 << 70),
        logprobs=maybe(0.3, False, True),
        top_logprobs=maybe(0.5, 0, 1, 3, 20, vocab + 5),
        prompt_logprobs=False,
        stop_token_ids=tuple(ids[: rng.integers(6)]),
        min_tokens=maybe(0.3, 0, 3, 1000),
    )
    output = int(rng.integers(1, len(tokens) + 1))
    return Row(tokens, 0, len(tokens), (), len(tokens) - 1, output, params, int(rng.integers(3)))


def line_of(row: Row, mask: bytes | None = None) -> Line:
    return Line(row, row.sampling.top_logprobs if row.sampling.logprobs else None, mask)


def random_mask(rng: np.random.Generator, vocab: int) -> bytes | None:
    """Return None for half of the rows, else a bit mask that allows few, half or all tokens."""
    bits = rng.random((vocab + 31) // 32 * 32) < rng.choice([0.02, 0.5, 1.0])
    return np.packbits(bits, bitorder="little").tobytes() if rng.random() < 0.5 else None


def run(seed: int) -> None:
    """Sample some rows with random options; raise AssertionError if a law breaks."""
    rng = np.random.default_rng(seed)
    vocab = int(rng.choice([1, 2, 5, 17, 64, 200]))
    logits = lines_of_logits(rng, 6, vocab)
    rows = [random_row(rng, vocab) for _ in logits]
    masks = [random_mask(rng, vocab) for _ in rows]
    got = NUMPY.choose([line_of(row, mask) for row, mask in zip(rows, masks, strict=True)], logits)
    for number, (row, line, choice) in enumerate(zip(rows, logits, got, strict=True)):
        with np.errstate(all="ignore"):
            check(row, line.astype(np.float64), choice, masks[number])
        alone = NUMPY.choose([line_of(row, masks[number])], logits[number : number + 1])
        assert alone == [choice], f"line {number} alone gives {alone[0]}, in company {choice}"


def check(row: Row, logits: Any, choice: TokenChoice, mask: bytes | None = None) -> None:
    """Check that this choice is allowed by the row's options."""
    params = row.sampling
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.logprobs:
        mass = np.exp(logits - logits.max()).sum()
        assert abs(choice.mass / ONE - mass) <= CLOSE * mass, f"the mass is {mass}, not {choice.mass / ONE}"
        assert list(choice.top) == order[: params.top_logprobs], "the most likely tokens are others"
    values = adjusted(row, logits)
    for token in range(len(values)) if mask is not None else ():
        if not mask[token // 8] >> token % 8 & 1:
            values[token] = -np.inf
    if not np.isfinite(values.max()):
        assert choice.token is None, "a token where none is possible"
        return
    if choice.token is None:
        raise AssertionError("no token where one is possible")
    if params.temperature < 1e-5:
        assert choice.token == values.argmax(), "greedy takes another token"
        return
    relative = (values - values.max()).astype(np.float32)
    scaled = (relative / np.float32(min(params.temperature, 3e38))).astype(float)
    cut = relative.astype(float) if params.temperature_last else scaled
    low, high, kept = interval(row, cut, scaled, choice.token)
    if low is None or high is None:
        return
    draw = uniform(params.seed, row.choice, len(row.tokens)) * kept
    assert low - CLOSE * kept <= draw <= high + CLOSE * kept, f"token {choice.token} lies elsewhere than the draw"


def adjusted(row: Row, logits: Any) -> Any:
    """Apply bias, penalties and bans, in float32 as the contract says."""
    params, values = row.sampling, logits.astype(np.float32)
    for token, bias in params.logit_bias:
        if token < len(values):
            values[token] += np.float32(bias)
    for token in set(row.tokens) if params.repetition_penalty != 1 else ():
        penalty = np.float32(params.repetition_penalty)
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    output = row.tokens[row.prompt_len :]
    for token in set(output):
        times = np.float32(output.count(token))
        values[token] -= np.float32(params.frequency_penalty) * times + np.float32(params.presence_penalty)
    if len(output) < params.min_tokens:
        for token in params.stop_token_ids:
            if token < len(values):
                values[token] = -np.inf
    return values


def interval(row: Row, relative: Any, scaled: Any, token: int) -> tuple[float | None, float | None, float]:
    """Return the interval of a token in the kept mass, and that mass; None if a filter's edge is too close to call.

    The cuts look at `relative`, the draw at `scaled`.
    """
    params, weights = row.sampling, np.exp(relative)
    ranked = sorted(range(len(relative)), key=lambda i: (-relative[i], i))
    kept = ranked[: params.top_k] if params.top_k else ranked
    if params.top_p < 1:
        goal, before, count = params.top_p * weights[kept].sum(), 0.0, 0
        while count < len(kept) and (count == 0 or before < goal):
            before += weights[kept[count]]
            count += 1
            if abs(before - goal) < CLOSE * goal:
                return None, None, 0.0
        kept = kept[:count]
    if params.min_p:
        kept = [i for i in kept if relative[i] >= np.float32(math.log(params.min_p))]
    if params.temperature_last or not (0 < params.top_k < len(relative) or params.top_p < 1):
        kept = sorted(kept)
    weights = np.exp(scaled)
    assert token in kept, f"token {token} was cut by a filter"
    at = kept.index(token)
    low = float(weights[kept[:at]].sum())
    return low, low + float(weights[token]), float(weights[kept].sum())


def uniform(seed: int, choice: int, position: int) -> float:
    """Hash the three numbers with splitmix64's finaliser; return a number in [0, 1)."""
    state = 0
    for word in (seed, choice, position):
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


def random_extras(rng: np.random.Generator, vocab: int) -> SamplingExtras:
    """Return random settings of the extra samplers; most of them are off."""

    def maybe(off: Any, *values: Any) -> Any:
        return values[rng.integers(len(values))] if rng.random() < 0.3 else off

    return SamplingExtras(
        typical_p=maybe(1.0, 0.1, 0.5, 0.95),
        top_n_sigma=maybe(0.0, 0.5, 1.0, 3.0),
        xtc_probability=maybe(0.0, 0.5, 1.0),
        dry_multiplier=maybe(0.0, 0.8, 5.0),
        dry_breakers=tuple(int(one) for one in rng.integers(0, vocab, 2)),
        dynatemp_range=maybe(0.0, 0.3, 2.0),
        mirostat=maybe(0, 1, 2),
        allowed_token_ids=maybe((), tuple(int(one) for one in rng.integers(0, vocab, 9))),
        bad_words=maybe((), ((int(rng.integers(vocab)),),)),
    )
