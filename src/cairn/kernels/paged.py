"""Paged attention in numpy, in an order of operations that depends on positions only.

Scores, sums and products are computed for each span of 64 positions, aligned at multiples of 64; the spans' results are
then added in order. (A maximum has no order.) Spans that a position does not see add exact zeros, so neither padding
nor neighbours change a bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.kernels import kv_codes
from cairn.kernels.blas import TILE, tile_rows
from cairn.kernels.elementary import exp, tanh
from cairn.types.model_spec import MAX_CONTEXT

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

SPAN = 64
"""Positions in a span; a multiple of the block size."""

_SCORES = 1 << 20
"""Most attention scores computed at once, so that the working set stays near the cache."""
_SPANS = 64
"""Most spans of keys or values gathered at once, which bounds the copy for a long context."""


def attend(
    query: Floats,
    kv: NDArray[Any],
    layer: int,
    rows: Ints,
    tables: Ints,
    window: int,
    scale: float,
    out: Floats,
    cap: float = 0.0,
    both: bool = False,
    sinks: Floats | None = None,
    rank: int = 0,
) -> None:
    """Compute `kernels.base.Kernels.attention`. `rank`: for latents, the size of the normed part."""
    heads, size = query.shape[1:]
    kv_heads = kv.shape[3]
    fan = heads // kv_heads
    tile = min(tile_rows(size, SPAN, transposed=True), tile_rows(SPAN, size))

    def compute(piece: _Piece) -> None:
        tokens = piece.tokens
        # [R, K, count * fan] query rows for each key-value head, padded to whole tiles.
        rows_of = query[tokens].reshape(len(tokens), piece.count, kv_heads, fan, size).transpose(0, 2, 1, 3, 4)
        tiles = -(-piece.count * fan // tile)
        q = np.zeros((len(tokens), kv_heads, tiles * tile, size), np.float32)
        q[:, :, : piece.count * fan] = rows_of.reshape(len(tokens), kv_heads, -1, size)
        q = q.reshape(len(tokens), kv_heads, tiles, tile, size)
        seen = _seen(piece, fan, tiles * tile, window, both)
        sink = None
        if sinks is not None:
            sink = sinks.reshape(kv_heads, fan)[:, np.arange(tiles * tile) % fan].reshape(kv_heads, tiles, tile)
        got = _attend(q, _Pages(kv, layer, tables, piece, window, both, rank), seen, scale, cap, sink)
        got = got.reshape(len(tokens), kv_heads, -1, size)[:, :, : piece.count * fan]
        got = got.reshape(len(tokens), kv_heads, piece.count, fan, size).transpose(0, 2, 1, 3, 4)
        out[tokens] = got.reshape(len(tokens), piece.count, heads * size)

    for piece in _pieces(rows.tolist(), heads, window, both):
        compute(piece)
        if piece.count > 1 and not np.isfinite(out[piece.tokens]).all():
            # A weight of zero times a NaN or infinity that only another token of the piece sees is NaN.
            for at in range(piece.count):
                token = piece.tokens[:, at : at + 1]
                compute(replace(piece, tokens=token, starts=piece.starts + at, count=1))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries computed at once: R rows with `count` tokens each, over `spans` spans from `base` on."""

    tokens: NDArray[np.intp]
    """[R, count] indexes of tokens in the step."""
    rows: list[int]
    starts: NDArray[np.intp]
    """[R] position of each row's first token here."""
    base: NDArray[np.intp]
    """[R] first position of the first span."""
    count: int
    spans: int
    lengths: NDArray[np.intp]
    """[R] positions of each row."""


def _pieces(rows: list[list[int]], heads: int, window: int, both: bool) -> Iterator[_Piece]:
    """Cut a step into pieces of bounded size. The cuts change no result, since queries are independent."""
    alone: dict[int, list[tuple[int, int, int, int]]] = {}
    for row, (first, count, start) in enumerate(rows):
        at, length = 0, start + count
        while at < count:
            base = max(0, _first_seen(start + at, window)) // SPAN * SPAN if window else 0
            fit = max(TILE, _SCORES // (heads * (start + count - base + SPAN)))
            taken = min(fit, count - at)
            end = start + at + taken
            if both:
                end = min(length, end + window - 1) if window else length
            spans = -(-(end - base) // SPAN)
            if count == 1 and not both:
                # One-token rows of similar length share a piece; the power of two bounds the padding.
                alone.setdefault(1 << (spans - 1).bit_length(), []).append((row, first, start, base))
            else:
                tokens = np.arange(first + at, first + at + taken)[None]
                yield _Piece(tokens, [row], np.array([start + at]), np.array([base]), taken, spans, np.array([length]))
            at += taken
    for spans, members in alone.items():
        fit = max(1, _SCORES // (heads * TILE * spans * SPAN))
        for low in range(0, len(members), fit):
            table, first, start, base = np.array(members[low : low + fit]).T
            longest = int((start - base).max()) // SPAN + 1
            yield _Piece(first[:, None], table.tolist(), start, base, 1, longest, start + 1)


class _Pages:
    """Keys and values of a piece's positions, gathered from the blocks in its rows' tables."""

    def __init__(
        self, kv: NDArray[Any], layer: int, tables: Ints, piece: _Piece, window: int, both: bool, rank: int
    ) -> None:
        self._kv_heads, self._block_tokens, self._width = kv.shape[3:]
        self._rank = rank
        wanted = piece.base[:, None] // self._block_tokens + np.arange(piece.spans * SPAN // self._block_tokens)
        inside = wanted < tables.shape[1]
        ids = tables[np.array(piece.rows)[:, None], np.where(inside, wanted, 0)]
        # Missing blocks lie before the window or after the last token, which `_hidden` covers below.
        ids = np.where(inside & (ids >= 0), ids, 0)
        # The pool as a list of [block_tokens * width] parts in the order (block, layer, key or value, head): a plain
        # `take` of them is twenty times faster than indexing by (block, layer, which, head).
        self._parts = kv.reshape(-1, self._block_tokens * self._width)
        first = (ids[:, None, :] * kv.shape[1] + layer) * kv.shape[2] * self._kv_heads
        self._keys_at = first + np.arange(self._kv_heads)[:, None]
        # A latent is both key and value.
        self._values_at = self._keys_at + (self._kv_heads if kv.shape[2] == 2 else 0)
        positions = piece.base[:, None] + np.arange(piece.spans * SPAN)
        hidden = positions >= (_ends(piece, window) if both else piece.starts + piece.count)[:, None]
        if window:
            hidden |= positions < _first_seen(piece.starts, window)[:, None]
        self._hidden = hidden.reshape(len(piece.rows), piece.spans, SPAN)

    def keys(self, spans: slice) -> Floats:
        """Return keys [R, K, spans, SPAN, D]. Hidden positions hold garbage: their scores are replaced."""
        return self._take(self._keys_at, spans)

    def values(self, spans: slice) -> Floats:
        """Return values [R, K, spans, SPAN, D], zero at positions that no query of the piece sees.

        A weight of zero would not cancel a NaN that an earlier owner left in a block.
        """
        values = self._take(self._values_at, spans)
        hidden = self._hidden[:, spans]
        for row, span in np.argwhere(hidden.any(axis=2)):
            values[row, :, span, hidden[row, span]] = 0
        return values

    def _take(self, parts: NDArray[np.intp], spans: slice) -> Floats:
        blocks = SPAN // self._block_tokens
        at = parts[..., spans.start * blocks : spans.stop * blocks]
        found = self._parts.take(at, axis=0).reshape(*at.shape[:2], -1, SPAN, self._width)
        return kv_codes.numbers(found, self._rank)


def _ends(piece: _Piece, window: int) -> NDArray[np.intp]:
    """Return [R] ends of what the piece's queries see in both directions."""
    return np.minimum(piece.lengths, piece.starts + piece.count - 1 + window) if window else piece.lengths


def _seen(piece: _Piece, fan: int, padded: int, window: int, both: bool) -> NDArray[np.bool_]:
    """Return [R, 1, spans, query rows, SPAN]: the positions that each query row sees; padding rows as the last one."""
    query = np.minimum(np.arange(padded) // fan, piece.count - 1)
    at = (piece.starts[:, None] + query)[:, None, None, :, None]
    positions = piece.base[:, None, None] + np.arange(piece.spans * SPAN).reshape(piece.spans, SPAN)
    spread = positions[:, None, :, None, :]
    if both:
        ends = piece.lengths[:, None, None, None, None]
        seen = spread < np.minimum(ends, at + (window or MAX_CONTEXT))
    else:
        seen = spread <= at
    return seen & (spread >= _first_seen(at, window)) if window else seen


def _first_seen(at: Any, window: int) -> Any:
    """Return the first position that position `at` sees (may be below 0): see `kernels.base.Kernels.attention`."""
    return at - at % -window if window < 0 else at - window + 1


def softcap(x: Floats, cap: float) -> None:
    """Compute x = cap tanh(x / cap) in place."""
    x /= np.float32(cap)
    x[:] = tanh(x)
    x *= np.float32(cap)


def _attend(
    q: Floats, pages: _Pages, seen: NDArray[np.bool_], scale: float, cap: float = 0.0, sinks: Floats | None = None
) -> Floats:
    """Return softmax(q k * scale) v for q[R, K, T, tile, D] over the spans that `seen` covers, in q's shape.

    The softmax includes the scores sinks[K, T, tile].
    """
    rows, _, tiles, tile, _ = q.shape
    count = seen.shape[2]
    parts = [slice(at, min(at + _SPANS, count)) for at in range(0, count, _SPANS)]
    scores = np.empty((*q.shape[:2], count, tiles, tile, SPAN), np.float32)
    for part in parts:
        keys = pages.keys(part).swapaxes(-1, -2)
        np.matmul(q[:, :, None], keys[:, :, :, None], out=scores[:, :, part])
    scores *= np.float32(scale)
    if cap:
        softcap(scores, cap)
    np.copyto(scores, np.float32(-np.inf), where=~seen.reshape(rows, 1, count, tiles, tile, SPAN))
    most = scores.max(axis=(2, 5), keepdims=True)
    if sinks is not None:
        most = np.maximum(most, sinks[:, None, :, :, None])
    scores -= most
    weights = exp(scores)
    sums = weights.sum(axis=-1)
    total, out = np.zeros_like(sums[:, :, 0]), np.zeros_like(q)
    if sinks is not None:
        total += exp(sinks - most[:, :, 0, :, :, 0])
    for part in parts:
        mixed = np.matmul(weights[:, :, part], pages.values(part)[:, :, :, None])
        for span in range(part.start, part.stop):
            total += sums[:, :, span]
            out += mixed[:, :, span - part.start]
    out /= total[..., None]
    return out
