"""Sampling on a torch device: `kernels.sampling` in torch, with the same bits.

Lines of logits stay on the device. To the host go flags, tokens, sums of weights, and the logits of the few tokens that
penalties, biases and log-probabilities name. Every step is one elementwise operation of float32, or a sum of integers,
as `kernels.sampling` defines them.

Of `kernels.extras` DRY, bad words, allowed tokens and XTC are here. Typical, n-sigma, the dynamic temperature and
mirostat are sums of float64 in numpy's order: of their lines, one at a time, a copy goes to the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cairn.kernels.extras import adjust_more, adjusted, cuts_top
from cairn.kernels.sampling import (
    GREEDY_BELOW,
    LOG2E,
    LOWEST,
    ONE,
    POWERS,
    ROUND,
    Line,
    TokenChoice,
    adjust,
    bits_of,
    divisor,
    filters,
    lowest,
)
from cairn.types.request import SamplingExtras

Tensor = Any
Floats = NDArray[np.float32]

_SLICE = 16
"""Lines that are drawn at once: each takes some 50 bytes a token of the vocabulary meanwhile."""


class TorchSampler:
    """`kernels.sampling.Sampler` over tensors."""

    def greedy(self, logits: Tensor) -> list[int]:
        """`Sampler.greedy`."""
        finite = logits.amin(dim=1).isfinite() & logits.amax(dim=1).isfinite()
        # argmax returns the first of equal ones.
        tokens: list[int] = torch.where(finite, logits.argmax(dim=1), -1).tolist()
        return tokens

    def choose(self, lines: Sequence[Line], logits: Tensor) -> list[TokenChoice]:
        """`Sampler.choose`."""
        if all(map(_plain, lines)):
            best = self.greedy(logits)
            pairs = zip(lines, best, strict=True)
            return [TokenChoice(token >= 0, token if line.row and token >= 0 else None) for line, token in pairs]
        finite = (logits.amin(dim=1).isfinite() & logits.amax(dim=1).isfinite()).tolist()
        tokens: dict[int, int | None] = {}
        drawing = [i for i, line in enumerate(lines) if finite[i] and line.row is not None]
        for begin in range(0, len(drawing), _SLICE):
            part = drawing[begin : begin + _SLICE]
            values = logits[_places(part, logits)]
            tokens.update(zip(part, _tokens([lines[i] for i in part], values), strict=True))
        choices = [TokenChoice(good, tokens.get(i)) for i, good in enumerate(finite)]
        asking = [i for i, line in enumerate(lines) if finite[i] and line.top is not None]
        for begin in range(0, len(asking), _SLICE):
            part = asking[begin : begin + _SLICE]
            described = _described([lines[i] for i in part], logits[_places(part, logits)], [choices[i] for i in part])
            for number, choice in zip(part, described, strict=True):
                choices[number] = choice
        return choices

    def takes(self, extras: SamplingExtras) -> bool:
        """`Sampler.takes`."""
        summed = extras.typical_p < 1 or extras.top_n_sigma > 0 or extras.dynatemp_range or extras.mirostat
        return not summed

    def line(self, logits: Tensor, number: int) -> Floats:
        """`Sampler.line`."""
        copied: Floats = logits[number].to("cpu", copy=True).numpy()
        return copied


def weigh(scaled: Tensor) -> Tensor:
    """`sampling.weigh` in torch. Float32 holds a weight before it is rounded, so float64 is not needed."""
    power = scaled.clamp(min=float(LOWEST)) * float(LOG2E)
    turned = power + float(ROUND)
    power -= turned - float(ROUND)
    value = power * float(POWERS[0])
    for term in POWERS[1:-1]:
        value += float(term)
        value *= power
    value += float(POWERS[-1])
    bits = value.view(torch.int32) + (turned.view(torch.int32) << 23)
    return (bits.view(torch.float32) * float(ONE)).round_().to(torch.int64)


def _plain(line: Line) -> bool:
    """Tell whether a line only needs its highest logit."""
    if line.top is not None:
        return False
    if line.row is None:
        return True
    params = line.row.sampling
    changed = params.logit_bias or params.needs_history or params.min_tokens or line.mask or params.extras is not None
    return params.temperature < GREEDY_BELOW and not changed


def _places(numbers: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=like.device)


def _column(numbers: Sequence[float], like: Tensor, kind: torch.dtype) -> Tensor:
    return torch.tensor(numbers, dtype=kind, device=like.device)[:, None]


def _tokens(lines: Sequence[Line], values: Tensor) -> list[int | None]:
    """Sample one token for each line from `values` [len(lines), vocab], which are overwritten; None if impossible."""
    _adjust(lines, values)
    _mask(lines, values)
    best = values.argmax(dim=1)
    peak = values.gather(1, best[:, None])
    pairs = zip(best.tolist(), peak[:, 0].isfinite().tolist(), strict=True)
    tokens: list[int | None] = [token if possible else None for token, possible in pairs]
    rows = [line.row for line in lines if line.row is not None]
    hot = [i for i, row in enumerate(rows) if tokens[i] is not None and row.sampling.temperature >= GREEDY_BELOW]
    if hot:
        at = _places(hot, values)
        drawn = _draw([lines[i] for i in hot], values[at] - peak[at])
        for number, token in zip(hot, drawn, strict=True):
            tokens[number] = token
    return tokens


def _adjust(lines: Sequence[Line], values: Tensor) -> None:
    """`sampling.adjust`, on the host for the tokens whose logits change, which alone go there and back."""
    vocab = values.shape[1]
    named = [_named(line, vocab) for line in lines]
    if not any(map(len, named)):
        return
    flat = np.concatenate([ids + number * vocab for number, ids in enumerate(named)])
    places = torch.from_numpy(flat).to(values.device)
    known, at, scratch = values.view(-1)[places].cpu().numpy(), 0, np.zeros(vocab, np.float32)
    for line, ids in zip(lines, named, strict=True):
        if len(ids):
            scratch[ids] = known[at : at + len(ids)]
            with np.errstate(all="ignore"):
                (adjust if _extras(line) is None else adjust_more)(line, scratch)
            known[at : at + len(ids)] = scratch[ids]
            at += len(ids)
    values.view(-1)[places] = torch.from_numpy(known).to(values.device)


def _named(line: Line, vocab: int) -> NDArray[np.int64]:
    """Return the tokens whose logits bias, penalties and bans change, in order."""
    row = line.row
    assert row is not None
    params = row.sampling
    ids = {token for token, _ in params.logit_bias if token < vocab}
    if params.repetition_penalty != 1:
        ids.update(line.history)
    elif params.presence_penalty or params.frequency_penalty:
        ids.update(line.history[row.prompt_len :])
    if line.length - row.prompt_len < params.min_tokens:
        ids.update(token for token in params.stop_token_ids if token < vocab)
    if params.extras is not None:
        ids |= adjusted(line, vocab)
    return np.array(sorted(ids), np.int64)


def _extras(line: Line) -> SamplingExtras | None:
    return None if line.row is None else line.row.sampling.extras


def _mask(lines: Sequence[Line], values: Tensor) -> None:
    """Make the tokens impossible that the lines' masks forbid, or that are not among those allowed."""
    every = [(number, _open(line, values.shape[1])) for number, line in enumerate(lines)]
    masked = [(number, mask) for number, mask in every if mask is not None]
    if not masked:
        return
    given = np.stack([mask for _, mask in masked])
    packed = torch.from_numpy(given).to(values.device)
    bits = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=values.device)) & 1
    forbidden = bits.reshape(len(masked), -1)[:, : values.shape[1]] == 0
    at = _places([number for number, _ in masked], values)
    values[at] = values[at].masked_fill(forbidden, -math.inf)


def _open(line: Line, vocab: int) -> NDArray[np.uint8] | None:
    """Return a bit for each token that mask and allowed tokens leave; None if they leave all."""
    size, extras = -(-vocab // 8), _extras(line)
    found = np.frombuffer(line.mask, np.uint8, size) if line.mask else None
    if extras is None or not extras.allowed_token_ids:
        return found
    allowed = np.zeros(8 * size, np.bool_)
    allowed[[token for token in extras.allowed_token_ids if token < vocab]] = True
    packed = np.packbits(allowed, bitorder="little")
    return packed if found is None else packed & found


def _draw(lines: Sequence[Line], relative: Tensor) -> list[int]:
    """Draw one token for each line, from logits relative to the highest [len(lines), vocab]."""
    params = [line.row.sampling for line in lines if line.row is not None]
    vocab = relative.shape[1]
    scaled = relative / _column([float(divisor(one)) for one in params], relative, torch.float32)
    weights, ids = weigh(scaled), None
    cut = [number for number, one in enumerate(params) if filters(one, vocab) or one.extras is not None]
    if cut:
        at = _places(cut, relative)
        ids = torch.arange(vocab, device=relative.device).repeat(len(lines), 1)
        late = _column([one.temperature_last for one in params], relative, torch.bool)
        seen = torch.where(late, relative, scaled)[at]
        weights[at], ids[at] = _filtered([lines[number] for number in cut], seen, scaled[at], weights[at], late[at])
    running = weights.cumsum(dim=1)
    totals: list[int] = running[:, -1].tolist()
    goals = [bits_of(line) * total >> 53 for line, total in zip(lines, totals, strict=True)]
    places = (running <= _column(goals, relative, torch.int64)).sum(dim=1)
    found: list[int] = (places if ids is None else ids.gather(1, places[:, None])[:, 0]).tolist()
    return found


def _filtered(
    lines: Sequence[Line], seen: Tensor, scaled: Tensor, weights: Tensor, late: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weights of the tokens that top-k, top-p, min-p and XTC keep, in the order of the draw, and their ids.

    `seen`: what the filters look at [lines, vocab]; `scaled` what is drawn from, and its `weights`, by id. Lines with
    extras are always drawn by rank.
    """
    count, vocab = seen.shape
    params = [line.row.sampling for line in lines if line.row is not None]
    more = [one.extras is not None for one in params]
    ranks = [own or 0 < one.top_k < vocab or one.top_p < 1 for own, one in zip(more, params, strict=True)]
    if any(ranks):
        by_rank = _column(ranks, seen, torch.bool)
        values, order = seen.sort(dim=1, descending=True, stable=True)
    else:
        by_rank, values, order = None, seen, torch.arange(vocab, device=seen.device).repeat(count, 1)
    keep = values >= _column([float(lowest(one)) for one in params], seen, torch.float32)
    if by_rank is not None:
        mass, place = weigh(values), torch.arange(vocab, device=seen.device)[None]
        most = [one.top_k if 0 < one.top_k < vocab else vocab for one in params]
        within = place < _column(most, seen, torch.int64)
        running = mass.where(within, 0).cumsum(dim=1)
        totals: list[int] = running[:, -1].tolist()
        pairs = zip(params, totals, strict=True)
        goals = [math.ceil(one.top_p * total) if one.top_p < 1 else 1 << 62 for one, total in pairs]
        before = (running < _column(goals, seen, torch.int64)).sum(dim=1, keepdim=True)
        keep &= within & (place <= before)
        weights = _without_top(lines, keep, mass, order, scaled, weights)
    kept = torch.zeros_like(keep).scatter_(1, order, keep)
    by_id = weights.where(kept, 0)
    ids = torch.arange(vocab, device=seen.device).repeat(count, 1)
    if by_rank is None:
        return by_id, ids
    # Ranked after the temperature, tokens are drawn by rank; their order changes where a draw falls.
    drawn_by_rank = by_rank & (~late | _column(more, seen, torch.bool))
    return by_id.gather(1, order).where(drawn_by_rank, by_id), order.where(drawn_by_rank, ids)


def _without_top(
    lines: Sequence[Line], keep: Tensor, mass: Tensor, order: Tensor, scaled: Tensor, weights: Tensor
) -> Tensor:
    """Apply XTC to `keep`, by rank as `mass` and `order` are; return the weights by id, where it removed the likeliest.

    A token is above the threshold from some weight on, which the host finds from the mass that is kept.
    """
    cutting = [(number, extras) for number, line in enumerate(lines) if (extras := _extras(line)) is not None]
    cutting = [(number, extras) for number, extras in cutting if cuts_top(lines[number], extras)]
    if not cutting:
        return weights
    at = _places([number for number, _ in cutting], keep)
    kept = keep[at] & scaled[at].gather(1, order[at]).isfinite()
    totals: list[int] = mass[at].where(kept, 0).sum(dim=1).tolist()
    least = [_least(total, extras.xtc_threshold) for total, (_, extras) in zip(totals, cutting, strict=True)]
    above = (kept & (mass[at] >= _column(least, keep, torch.int64))).sum(dim=1, keepdim=True)
    kept &= torch.arange(keep.shape[1], device=keep.device)[None] >= above - 1
    keep[at] = kept
    left = scaled[at].masked_fill(~torch.zeros_like(kept).scatter_(1, order[at], kept), -math.inf)
    weights = weights.clone()
    weights[at] = weigh(left - left.amax(dim=1, keepdim=True))
    return weights


def _least(total: int, threshold: float) -> int:
    """Return the least weight whose share of the total, in float64, reaches the threshold."""
    whole, found = float(total), math.ceil(threshold * total)
    while found > 0 and float(found - 1) / whole >= threshold:
        found -= 1
    while float(found) / whole < threshold:
        found += 1
    return found


def _described(lines: Sequence[Line], logits: Tensor, choices: Sequence[TokenChoice]) -> list[TokenChoice]:
    """Add to the choices what their lines ask of the raw distribution of `logits` [len(lines), vocab]."""
    vocab = logits.shape[1]
    peaks = logits.amax(dim=1, keepdim=True)
    highest: list[float] = peaks[:, 0].tolist()
    masses: list[int] = weigh(logits - peaks).sum(dim=1).tolist()
    counts = [min(line.top or 0, vocab) for line in lines]
    order: list[list[int]] = [[]] * len(lines)
    if most := max(counts):
        order = logits.sort(dim=1, descending=True, stable=True)[1][:, :most].tolist()
    ids = [
        (*best[:count], *line.asked, *(() if choice.token is None else (choice.token,)))
        for line, choice, best, count in zip(lines, choices, order, counts, strict=True)
    ]
    flat = [number * vocab + one for number, those in enumerate(ids) for one in those]
    known, at, found = logits.reshape(-1)[_places(flat, logits)].tolist(), 0, list[TokenChoice]()
    for number, (choice, those) in enumerate(zip(choices, ids, strict=True)):
        own = tuple(known[at : at + len(those)])
        at += len(those)
        top = tuple(those[: counts[number]])
        found.append(choice._replace(peak=highest[number], mass=masses[number], top=top, logits=own))
    return found
