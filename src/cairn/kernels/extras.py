"""Samplers beyond the usual ones, in numpy, the same for all kernels.

    line -> bias -> penalties -> DRY -> banned tokens -> temperature -> n-sigma -> top-k -> typical -> top-p -> min-p
         -> XTC -> one draw

With `temperature_last` the temperature is applied after the cuts, as in `sampling`. Weights, ranks and draws are
those of `sampling`; DRY, n-sigma, typical and the dynamic temperature are computed in float64.

    DRY          subtracts multiplier * base ** (n - allowed length) from a token that would extend a repetition of
                 length n
    n-sigma      keeps logits within n standard deviations of the highest
    typical      keeps the tokens whose surprise is nearest to the entropy, up to this part of the mass
    XTC          with some probability removes all but the least likely of the tokens above a threshold
    dynamic      moves the temperature within a range around the given one: higher with higher entropy
    mirostat     instead of all cuts: keeps the likeliest tokens so that the surprise of those drawn stays near a goal.
                 Its state is one number, which comes with the row and is returned with the token
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.sampling import (
    GREEDY_BELOW,
    Floats,
    Ids,
    Line,
    Sampler,
    TokenChoice,
    Weights,
    adjust,
    bits_of,
    by_rank,
    divisor,
    forbidden,
    logits_of,
    lowest,
    ranked,
    weigh,
)
from cairn.types.request import SamplingExtras, SamplingParams

ZIPF_TOKENS = 100
"""Likeliest tokens to which mirostat 1 fits Zipf's law."""
MAX_REPEAT = 64
"""Longer repetitions count as this long."""
_XTC = 0x5854430000000000
"""Seed salt that makes XTC's random number independent of the draw's."""


def choose(sampler: Sampler, lines: Sequence[Line], logits: Any) -> list[TokenChoice]:
    """Sample lines as `Sampler.choose` does: by the sampler, or here on the host where it does not take the extras."""
    every = [None if line.row is None else line.row.sampling.extras for line in lines]
    special = [number for number, extras in enumerate(every) if extras is not None and not sampler.takes(extras)]
    if not special:
        return sampler.choose(lines, logits)
    plain = [line._replace(row=None) if number in special else line for number, line in enumerate(lines)]
    choices = sampler.choose(plain, logits)
    with np.errstate(all="ignore"):
        for number in special:
            line, choice = lines[number], choices[number]
            if choice.finite:
                values = sampler.line(logits, number)
                token, mu = _token(line, values.copy())
                known = () if line.top is None else logits_of(values, line, choice.top, token)
                choices[number] = choice._replace(token=token, mu=mu, logits=known)
    return choices


def _token(line: Line, logits: Floats) -> tuple[int | None, float | None]:
    """Sample from one line [vocab], which is overwritten; return the token (None if none is possible) and mu."""
    row = line.row
    assert row is not None and row.sampling.extras is not None
    params, extras = row.sampling, row.sampling.extras
    adjust_more(line, logits)
    if extras.allowed_token_ids:
        closed = np.ones(len(logits), np.bool_)
        closed[[token for token in extras.allowed_token_ids if token < len(logits)]] = False
        logits[closed] = -np.inf
    if line.mask:
        logits[forbidden(line.mask, len(logits))] = -np.inf
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        return None, None
    relative = logits - logits[best]
    if params.temperature < GREEDY_BELOW:
        return best, row.mu if extras.mirostat else None
    if extras.mirostat:
        return _steady(relative / _heat(relative, params, extras), line, row.mu, extras)
    late = params.temperature_last
    values = relative if late else relative / _heat(relative, params, extras)
    kept = _cut(values, params, extras)
    kept = _without_top(kept, values, line, extras)
    scaled = relative[kept] / _heat(relative[kept], params, extras) if late else values[kept]
    return int(kept[_drawn(np.cumsum(weigh(scaled - scaled.max())), line)]), None


def _drawn(running: Weights, line: Line) -> int:
    """Draw an index, given the running sum of the weights."""
    return int(np.searchsorted(running, bits_of(line) * int(running[-1]) >> 53, side="right"))


def _steady(scaled: Floats, line: Line, mu: float, extras: SamplingExtras) -> tuple[int, float]:
    """Sample by mirostat (Basu et al., 2021); return the token and its new state. `mu`: allowed surprise in bits."""
    ids = np.flatnonzero(np.isfinite(scaled))
    kept = by_rank(scaled[ids], ids)
    weights = weigh(scaled[kept])
    chances = weights / weights.sum()
    if extras.mirostat == 1:
        count = _zipf_count(chances[chances > 0], len(scaled), mu)
    else:
        count = int(np.searchsorted(-np.log2(np.maximum(chances, 1e-300)), mu, side="right"))
    running = np.cumsum(weights[: max(1, count)])
    drawn = _drawn(running, line)
    surprise = -math.log2(int(weights[drawn]) / int(running[-1]))
    return int(kept[drawn]), extras.mu_after(mu, surprise)


def _zipf_count(chances: NDArray[np.float64], vocab: int, mu: float) -> int:
    """Return how many tokens to keep for a surprise of `mu` bits, by Zipf's law fitted to the likeliest tokens."""
    head = chances[:ZIPF_TOKENS]
    steps = np.log(np.arange(2, len(head) + 1) / np.arange(1, len(head)))
    if not len(steps):
        return 1
    exponent = max(float((steps * np.log(head[:-1] / head[1:])).sum() / (steps * steps).sum()), 1e-3)
    beyond = exponent - 1 if abs(exponent - 1) > 1e-6 else 1e-6
    try:
        return int(min((beyond * 2.0**mu / (1 - float(vocab) ** -beyond)) ** (1 / exponent), vocab))
    except OverflowError:
        return vocab


def repeats(tokens: Sequence[int], extras: SamplingExtras) -> dict[int, float]:
    """Return DRY's penalty for each token that would extend a repetition of the last tokens, back to a breaker."""
    last = extras.dry_penalty_last_n
    history = np.asarray(tokens if last < 0 else tokens[max(0, len(tokens) - last) :], np.int64)
    count, breakers = len(history), set(extras.dry_breakers)
    length, suffix = 0, history[::-1][:MAX_REPEAT].tolist()
    while length < len(suffix) and suffix[length] not in breakers:
        length += 1
    ends = np.flatnonzero(history[: count - 1] == history[-1]) if length else np.empty(0, np.int64)
    penalties: dict[int, float] = {}
    size = 1
    while len(ends):
        if size >= extras.dry_allowed_length:
            penalty = min(extras.dry_multiplier * extras.dry_base ** (size - extras.dry_allowed_length), 1e30)
            for token in set(history[ends + 1].tolist()) - breakers:
                penalties[token] = max(penalties.get(token, 0.0), penalty)
        if size == length:
            break
        ends = ends[ends >= size]
        ends = ends[history[ends - size] == suffix[size]]
        size += 1
    return penalties


def adjust_more(line: Line, logits: Floats) -> None:
    """Apply bias, penalties, DRY and bad words in place to one line [vocab] with extras.

    No other logits change than those of `adjusted`.
    """
    adjust(line, logits)
    penalties, banned = _penalised(line, len(logits))
    for token, penalty in penalties.items():
        logits[token] -= np.float32(penalty)
    logits[banned] = -np.inf


def adjusted(line: Line, vocab: int) -> set[int]:
    """Return the tokens whose logits DRY and bad words change."""
    penalties, banned = _penalised(line, vocab)
    return {*penalties, *banned}


def _penalised(line: Line, vocab: int) -> tuple[dict[int, float], list[int]]:
    """Return DRY's penalties, and the tokens that would complete a bad word after the output so far."""
    row = line.row
    assert row is not None and row.sampling.extras is not None
    extras, output = row.sampling.extras, line.history[row.prompt_len :]
    banned = []
    for word in extras.bad_words:
        before = word[:-1]
        if word[-1] < vocab and (not before or tuple(output[-len(before) :]) == before):
            banned.append(word[-1])
    return repeats(line.history, extras) if extras.dry_multiplier else {}, banned


def _chances(scaled: Floats) -> NDArray[np.float64]:
    weights = weigh(scaled - scaled.max())
    # The sum is of integers, so its order does not matter.
    chances: NDArray[np.float64] = weights / float(int(weights.sum()))
    return chances


def _surprise(chances: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return each token's surprise in nats, and the mean of it: the entropy."""
    surprise = -np.log(np.maximum(chances, 1e-300))
    return surprise, float((chances * surprise).sum())


def _heat(relative: Floats, params: SamplingParams, extras: SamplingExtras) -> np.float32:
    """Return the temperature, moved within its dynamic range by the distribution's entropy."""
    if not extras.dynatemp_range:
        return divisor(params)
    most = math.log(max(2, int(np.isfinite(relative).sum())))
    _, entropy = _surprise(_chances(relative))
    low = max(0.0, params.temperature - extras.dynatemp_range)
    high = params.temperature + extras.dynatemp_range
    heat = low + (high - low) * min(1.0, max(0.0, entropy) / most) ** extras.dynatemp_exponent
    return np.float32(min(max(heat, GREEDY_BELOW), 3e38))


def _cut(values: Floats, params: SamplingParams, extras: SamplingExtras) -> Ids:
    """Return the ids that the cuts keep of one row [vocab] with maximum 0, likeliest first."""
    vocab = len(values)
    if extras.top_n_sigma > 0:
        finite = values[np.isfinite(values)].astype(np.float64)
        values = np.where(values >= -extras.top_n_sigma * float(finite.std()), values, np.float32(-np.inf))
    if 0 < params.top_k < vocab:
        kept = ranked(values, params.top_k)
        kept = kept[np.isfinite(values[kept])]
    else:
        ids = np.flatnonzero(np.isfinite(values))
        kept = by_rank(values[ids], ids)
    if extras.typical_p < 1:
        kept = _typical(kept, values, extras.typical_p)
    if params.top_p < 1:
        running = np.cumsum(weigh(values[kept] - values[kept].max()))
        goal = math.ceil(params.top_p * int(running[-1]))
        kept = kept[: int(np.searchsorted(running, goal, side="left")) + 1]
    likely: Ids = kept[values[kept] - values[kept].max() >= lowest(params)]
    return likely


def _typical(kept: Ids, values: Floats, part: float) -> Ids:
    """Keep the ids whose surprise is nearest to the entropy, up to `part` of the mass and at least one, in order."""
    chances = _chances(values[kept])
    surprise, entropy = _surprise(chances)
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    count = int(np.searchsorted(np.cumsum(chances[order]), part, side="left")) + 1
    return kept[np.sort(order[:count])]


def _without_top(kept: Ids, values: Floats, line: Line, extras: SamplingExtras) -> Ids:
    """Apply XTC: with its probability, remove all but the least likely of the ids at or above the threshold."""
    if not cuts_top(line, extras):
        return kept
    above = int((_chances(values[kept]) >= extras.xtc_threshold).sum())
    return kept[max(0, above - 1) :]


def cuts_top(line: Line, extras: SamplingExtras) -> bool:
    """Tell whether XTC removes tokens of this line: by its probability, if two tokens can be above the threshold."""
    if not extras.xtc_probability or extras.xtc_threshold > 0.5:
        return False
    return bits_of(line, _XTC) * 2.0**-53 < extras.xtc_probability
