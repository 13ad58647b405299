"""Paged attention in torch, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cairn.types.model_spec import BLOCK_TOKENS

Tensor = Any

_SCORES = 1 << 24
"""Most scores computed at once."""


def attend(
    query: Tensor,
    kv: Tensor,
    layer: int,
    rows: NDArray[np.int32],
    tables: NDArray[np.int32],
    window: int,
    scale: float,
    out: Tensor,
    cap: float = 0.0,
    both: bool = False,
    sinks: Tensor | None = None,
) -> None:
    """Compute `Kernels.attention`, with rows and tables on the host."""
    heads = query.shape[1]
    for (first, count, start), table in zip(rows.tolist(), tables, strict=False):
        end = start + count
        low = _lowest(start, window, both) // BLOCK_TOKENS * BLOCK_TOKENS
        keys, values = _pages(kv, layer, table, low, end)
        step = max(1, _SCORES // (end - low) // heads)
        for at in range(0, count, step):
            stop = min(count, at + step)
            seen = _seen(start + at, start + stop, low, end, window, both, query.device)
            part = _attended(query[first + at : first + stop], keys, values, seen, scale, cap, sinks)
            out[first + at : first + stop] = part.reshape(stop - at, -1)


def _lowest(start: int, window: int, both: bool) -> int:
    """Return the lowest position that a row's first token sees."""
    if not window:
        return 0
    if window < 0:
        return start - start % -window
    return max(0, start - window + 1)


def _pages(kv: Tensor, layer: int, table: NDArray[np.int32], low: int, end: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [K, end - low, D] in float32; those of missing blocks are zero."""
    ids = torch.from_numpy(table[low // BLOCK_TOKENS : -(-end // BLOCK_TOKENS)].astype(np.int64)).to(kv.device)
    found = kv[ids.clamp(min=0), layer].float()  # [n, 2 or 1, K, 16, D]
    found = torch.where((ids >= 0).reshape(-1, 1, 1, 1, 1), found, 0.0)
    found = found.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : end - low]
    return found[0], found[-1]


def _seen(first: int, stop: int, low: int, end: int, window: int, both: bool, device: Any) -> Tensor:
    """Return [stop - first, end - low]: whether each position in [first, stop) sees each position in [low, end)."""
    own = torch.arange(first, stop, device=device)[:, None]
    other = torch.arange(low, end, device=device)[None]
    if both:
        return (other - own).abs() < window if window > 0 else torch.ones_like(own + other, dtype=torch.bool)
    seen = other <= own
    if window > 0:
        seen &= other > own - window
    elif window < 0:
        seen &= other >= own - own % -window
    return seen


def _attended(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, cap: float, sinks: Tensor | None
) -> Tensor:
    """Return attention [n, heads, value size] of query[n, heads, D]."""
    count, heads, size = query.shape
    fan = heads // len(keys)
    split = query.reshape(count, len(keys), fan, size).permute(1, 2, 0, 3)  # [K, fan, n, D]
    scores = split @ keys[:, None].transpose(-1, -2) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is None:
        shares = torch.softmax(scores, dim=-1)
    else:
        ends = sinks.reshape(len(keys), fan, 1, 1)
        peak = torch.maximum(scores.amax(dim=-1, keepdim=True), ends)
        weights = torch.exp(scores - peak)
        shares = weights / (weights.sum(dim=-1, keepdim=True) + torch.exp(ends - peak))
    return (shares @ values[:, None]).permute(2, 0, 1, 3).reshape(count, heads, -1)
