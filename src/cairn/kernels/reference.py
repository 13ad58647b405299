"""The kernels in numpy: the meaning of every kernel, and an engine that works everywhere.

How the law of the same answer is kept:

    matrices    BLAS sees only tiles of exactly 8 rows, zero-padded, times a panel of the matrix of one fixed width.
                The panels are narrow enough for OpenBLAS's kernels for small matrices, which neither repack nor use
                threads (and run twice as fast here). Whether a tile's rows are independent of each other and of their
                place is measured for each shape (`tile_rows`); a shape that fails gets one row a call.
    attention   scores, sums and products run over spans of 64 positions aligned at multiples of 64, each span by
                itself; span results are then added in order. A maximum has no order. Spans that a position does not
                see add exact zeros, so neither padding nor neighbours change a bit.
    the rest    elementwise, or a sum along one contiguous row.

BLAS is pinned to one thread while kernels exist, so the number of threads cannot change a split; threads work on
different tiles instead.
"""

# The methods of ReferenceKernels are documented where their meaning is declared, in kernels.base.
# ruff: noqa: D102

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from cairn.types import RopeScaling

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

TILE = 8
"""Rows of activations in one BLAS call."""
SPAN = 64
"""Positions in one span of attention: a multiple of the block size."""

_SMALL = 1_000_000
"""OpenBLAS takes its small-matrix path up to about this many multiplications (100 cubed)."""
_WORTH_THREADS = 16_000_000
"""Multiplications in one projection below which handing work to threads costs more than it saves."""
_SCORES = 1 << 20
"""Most attention scores computed at once; keeps the working set near the cache."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A packed matrix: panels[C, in, width], zero-padded to C * width >= out columns."""

    panels: Floats
    bias: Floats | None
    out: int
    rows: int
    """Rows of a tile for this shape: `TILE`, or 1 where that was not stable."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Frequencies [D/2] in radians a position, and the factor on cosine and sine."""

    frequencies: Floats
    factor: float


@functools.cache
def tile_rows(inner: int, width: int, transposed: bool = False) -> int:
    """`TILE` if [8, inner] @ [inner, width] gives each row the same bits at any place beside any neighbours, else 1.

    `transposed`: the right side is stored as [width, inner], as keys are.
    """
    rng = np.random.default_rng(0)
    right = rng.standard_normal((width, inner) if transposed else (inner, width), dtype=np.float32)
    right = right.T if transposed else right
    tile = rng.standard_normal((TILE, inner), dtype=np.float32)
    want = np.matmul(tile, right)
    turned = np.stack([np.roll(tile, shift, axis=0) for shift in range(TILE)])
    alone = np.zeros((TILE, TILE, inner), np.float32)
    alone[np.arange(TILE), np.arange(TILE)[::-1]] = tile
    same = all(np.array_equal(np.roll(got, -shift, axis=0), want) for shift, got in enumerate(np.matmul(turned, right)))
    return TILE if same and np.array_equal(np.matmul(alone, right)[np.arange(TILE), np.arange(TILE)[::-1]], want) else 1


def frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> Rope:
    """Rotary frequencies as transformers' `modeling_rope_utils` defines them for each kind of scaling."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = (1.0 / np.power(float(theta), exponents.astype(np.float64)).astype(np.float32)).astype(np.float32)
    if scaling.kind == "linear":
        return Rope(plain / np.float32(scaling.factor), 1.0)
    if scaling.kind == "llama3":
        return Rope(_llama3(plain, scaling), 1.0)
    if scaling.kind == "yarn":
        return Rope(_yarn(plain, head_dim, theta, scaling), _yarn_factor(scaling))
    return Rope(plain, 1.0)


def _llama3(plain: Floats, scaling: RopeScaling) -> Floats:
    """Long waves are slowed by `factor`, short ones kept, those between blended by how often they turn."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_context * plain.astype(np.float64) / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    blended: Floats = ((1 - blend) * plain / scaling.factor + blend * plain).astype(np.float32)
    return blended


def _yarn(plain: Floats, head_dim: int, theta: float, scaling: RopeScaling) -> Floats:
    """Dimensions that turn more than `beta_fast` times are kept, fewer than `beta_slow` slowed, a ramp between."""

    def dimension(turns: float) -> float:
        wave = scaling.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    blended: Floats = (plain / scaling.factor * ramp + plain * (1 - ramp)).astype(np.float32)
    return blended


def _yarn_factor(scaling: RopeScaling) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)


def _silu(x: Floats) -> Floats:
    out: Floats = x / (1 + np.exp(-x))
    return out


def _gelu_tanh(x: Floats) -> Floats:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * (x * x * x))
    out: Floats = np.float32(0.5) * x * (1 + np.tanh(inner))
    return out


ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {"silu": _silu, "gelu_tanh": _gelu_tanh}


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """x / rms(x) * weight along the last axis."""
    mean = np.square(x).sum(axis=-1, keepdims=True) / np.float32(x.shape[-1])
    out: Floats = weight * (x * (1 / np.sqrt(mean + np.float32(eps))))
    return out


class ReferenceKernels:
    """`kernels.base.Kernels` in numpy, float32 throughout. Each method's meaning is stated there."""

    def __init__(self, threads: int = 1) -> None:
        self._blas = threadpool_limits(limits=1, user_api="blas")
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="cairn-kernel") if threads > 1 else None

    def allocate(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        return np.zeros(shape, dtype)

    def first(self, array: NDArray[Any], count: int) -> NDArray[Any]:
        return array[:count]

    def vector(self, source: NDArray[Any]) -> Floats:
        return np.array(source, np.float32)

    def table(self, source: NDArray[Any]) -> NDArray[Any]:
        # Copied: a mapped file that shrinks while the engine runs would kill the process.
        return np.array(source)

    def matrix(self, weights: Sequence[NDArray[Any]], biases: Sequence[NDArray[Any] | None]) -> Matrix:
        inner, out = weights[0].shape[1], sum(weight.shape[0] for weight in weights)
        widest = min(256, max(16, _SMALL // (TILE * inner) // 16 * 16))
        count = -(-out // widest)
        width = -(-out // count // 16) * 16
        panels = np.zeros((count, inner, width), np.float32)
        at = 0
        for weight in weights:
            for panel in range(count):
                low, high = max(panel * width, at), min((panel + 1) * width, at + len(weight))
                if low < high:
                    panels[panel, :, low - panel * width : high - panel * width] = weight[low - at : high - at].T
            at += len(weight)
        bias = None
        if any(one is not None for one in biases):
            parts = [np.zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
            bias = np.concatenate([np.asarray(part, np.float32) for part in parts])
        return Matrix(panels, bias, out, tile_rows(inner, width))

    def rope(self, head_dim: int, theta: float, scaling: RopeScaling) -> Rope:
        return frequencies(head_dim, theta, scaling)

    def embed(self, table: NDArray[Any], tokens: Ints, hidden: Floats) -> None:
        hidden[:] = table[tokens]

    def rope_angles(self, rope: Rope, positions: Ints, angles: Floats) -> None:
        # The product is rounded to float32, as transformers does, before the exact cosine is taken.
        turned = (positions.astype(np.float32)[:, None] * rope.frequencies).astype(np.float64)
        angles[:, 0] = np.cos(turned) * rope.factor
        angles[:, 1] = np.sin(turned) * rope.factor

    def norm_project(self, hidden: Floats, norm: Floats, eps: float, matrix: Matrix, out: Floats) -> None:
        out[:] = self._project(rms_norm(hidden, norm, eps), matrix)

    def rope_write(
        self,
        qkv: Floats,
        angles: Floats,
        q_norm: Floats | None,
        k_norm: Floats | None,
        eps: float,
        kv: Floats,
        layer: int,
        slots: Ints,
        query: Floats,
    ) -> None:
        _, heads, size = query.shape
        kv_heads, block_tokens = kv.shape[3], kv.shape[4]
        split = qkv.reshape(len(qkv), -1, size)
        q, k, v = split[:, :heads], split[:, heads : heads + kv_heads], split[:, heads + kv_heads :]
        if q_norm is not None:
            q = rms_norm(np.ascontiguousarray(q), q_norm, eps)
        if k_norm is not None:
            k = rms_norm(np.ascontiguousarray(k), k_norm, eps)
        _rotate(q, angles, query)
        keys = np.empty((len(qkv), kv_heads, size), np.float32)
        _rotate(k, angles, keys)
        block, offset = np.divmod(slots, block_tokens)
        kv[block, layer, 0, :, offset] = keys
        kv[block, layer, 1, :, offset] = v

    def attention(
        self,
        query: Floats,
        kv: Floats,
        layer: int,
        rows: Ints,
        tables: Ints,
        window: int,
        scale: float,
        out: Floats,
    ) -> None:
        heads, size = query.shape[1:]
        kv_heads = kv.shape[3]
        fan = heads // kv_heads
        tile = min(tile_rows(size, SPAN, transposed=True), tile_rows(SPAN, size))
        for piece in _pieces(rows.tolist(), heads, window):
            tokens = piece.tokens
            # [R, K, count * fan] query rows a key-value head, padded to whole tiles.
            rows_of = query[tokens].reshape(len(tokens), piece.count, kv_heads, fan, size).transpose(0, 2, 1, 3, 4)
            tiles = -(-piece.count * fan // tile)
            q = np.zeros((len(tokens), kv_heads, tiles * tile, size), np.float32)
            q[:, :, : piece.count * fan] = rows_of.reshape(len(tokens), kv_heads, -1, size)
            keys, values = _gather(kv, layer, tables, piece, window)
            seen = _seen(piece, fan, tiles * tile, window)
            got = _attend(q.reshape(len(tokens), kv_heads, tiles, tile, size), keys, values, seen, scale)
            got = got.reshape(len(tokens), kv_heads, -1, size)[:, :, : piece.count * fan]
            got = got.reshape(len(tokens), kv_heads, piece.count, fan, size).transpose(0, 2, 1, 3, 4)
            out[tokens] = got.reshape(len(tokens), piece.count, heads * size)

    def project_add(self, x: Floats, matrix: Matrix, hidden: Floats) -> None:
        hidden += self._project(x, matrix)

    def gated_mlp(
        self, hidden: Floats, norm: Floats, eps: float, gate_up: Matrix, activation: str, down: Matrix
    ) -> None:
        both = self._project(rms_norm(hidden, norm, eps), gate_up)
        gate, up = both[:, : gate_up.out // 2], both[:, gate_up.out // 2 :]
        hidden += self._project(ACTIVATIONS[activation](gate) * up, down)

    def logits(self, hidden: Floats, wanted: Ints, norm: Floats, eps: float, head: Matrix, out: Floats) -> None:
        out[:] = self._project(rms_norm(hidden[wanted], norm, eps), head)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._blas.restore_original_limits()

    def _project(self, x: Floats, matrix: Matrix) -> Floats:
        """x[M, in] @ matrix + bias as [M, out], tile by tile."""
        count, inner, width = matrix.panels.shape
        tiles = -(-len(x) // matrix.rows)
        padded = np.zeros((tiles * matrix.rows, inner), np.float32)
        padded[: len(x)] = x
        left = padded.reshape(1, tiles, matrix.rows, inner)
        got = np.empty((tiles * matrix.rows, count * width), np.float32)
        # The same numbers seen as [panel, tile, row, column], so that each product lands where it belongs.
        target = got.reshape(tiles, matrix.rows, count, width).transpose(2, 0, 1, 3)
        if self._pool is None or tiles * TILE * matrix.panels.size < _WORTH_THREADS:
            np.matmul(left, matrix.panels[:, None], out=target)
        else:
            step = -(-count // self._threads)
            parts = [slice(at, at + step) for at in range(0, count, step)]
            work = [self._pool.submit(np.matmul, left, matrix.panels[p, None], out=target[p]) for p in parts]
            for part in work:
                part.result()
        got = got[: len(x), : matrix.out]
        return got if matrix.bias is None else got + matrix.bias


def _rotate(x: Floats, angles: Floats, out: Floats) -> None:
    """Turn the pairs (i, i + D/2) of x[M, heads, D] by their angles."""
    half = x.shape[-1] // 2
    cos, sin = angles[:, None, 0], angles[:, None, 1]
    out[..., :half] = x[..., :half] * cos - x[..., half:] * sin
    out[..., half:] = x[..., half:] * cos + x[..., :half] * sin


@dataclass(frozen=True, slots=True)
class _Piece:
    """Query positions computed in one go: R rows with `count` tokens each, over `spans` spans from `base` on."""

    tokens: NDArray[np.intp]
    """[R, count] places in the step."""
    rows: list[int]
    starts: NDArray[np.intp]
    """[R] position of each row's first token here."""
    base: NDArray[np.intp]
    """[R] first position of the first span."""
    count: int
    spans: int


def _pieces(rows: list[list[int]], heads: int, window: int) -> Iterator[_Piece]:
    """Cut a step into pieces of bounded size. How it is cut changes no result: every query is independent."""
    alone: dict[int, list[tuple[int, int, int, int]]] = {}
    for row, (first, count, start) in enumerate(rows):
        at = 0
        while at < count:
            base = max(0, start + at - window + 1) // SPAN * SPAN if window else 0
            fit = max(TILE, _SCORES // (heads * (start + count - base + SPAN)))
            taken = min(fit, count - at)
            spans = -(-(start + at + taken - base) // SPAN)
            if count == 1:
                # One-token rows of similar length share a piece; the power of two bounds the padding.
                alone.setdefault(1 << (spans - 1).bit_length(), []).append((row, first, start, base))
            else:
                tokens = np.arange(first + at, first + at + taken)[None]
                yield _Piece(tokens, [row], np.array([start + at]), np.array([base]), taken, spans)
            at += taken
    for spans, members in alone.items():
        fit = max(1, _SCORES // (heads * TILE * spans * SPAN))
        for low in range(0, len(members), fit):
            table, first, start, base = np.array(members[low : low + fit]).T
            longest = int((start - base).max()) // SPAN + 1
            yield _Piece(first[:, None], table.tolist(), start, base, 1, longest)


def _gather(kv: Floats, layer: int, tables: Ints, piece: _Piece, window: int) -> tuple[Floats, Floats]:
    """Keys and values [R, K, spans, SPAN, D] of a piece's positions, from the blocks of its rows' tables.

    Values that no query of the piece may see are zeroed: a weight of zero would not silence a NaN that an earlier
    owner left in a block. Keys need not be: scores are masked by replacing them.
    """
    kv_heads, block_tokens, size = kv.shape[3:]
    wanted = piece.base[:, None] // block_tokens + np.arange(piece.spans * SPAN // block_tokens)
    inside = wanted < tables.shape[1]
    ids = tables[np.array(piece.rows)[:, None], np.where(inside, wanted, 0)]
    known = inside & (ids >= 0)
    # The pool as one run of [block_tokens * D] pieces in the order (block, layer, key or value, head): a plain `take`
    # copies them twenty times faster than indexing by (block, layer, which, head) does.
    pieces = kv.reshape(-1, block_tokens * size)
    keys_at = (np.where(known, ids, 0)[:, None, :] * kv.shape[1] + layer) * 2 * kv_heads + np.arange(kv_heads)[:, None]
    shape = (len(piece.rows), kv_heads, piece.spans, SPAN, size)
    keys = pieces.take(keys_at, axis=0).reshape(shape)
    values = pieces.take(keys_at + kv_heads, axis=0).reshape(shape)
    positions = piece.base[:, None] + np.arange(piece.spans * SPAN)
    hidden = positions >= (piece.starts + piece.count)[:, None]
    hidden |= np.repeat(~known, block_tokens, axis=1)
    if window:
        hidden |= positions <= (piece.starts - window)[:, None]
    for row, at in np.argwhere(hidden.reshape(len(piece.rows), piece.spans, SPAN).any(axis=2)):
        values[row, :, at, hidden[row, at * SPAN : (at + 1) * SPAN]] = 0
    return keys, values


def _seen(piece: _Piece, fan: int, padded: int, window: int) -> NDArray[np.bool_]:
    """[R, 1, spans, query rows, SPAN]: which positions each query row may see. Padding rows see what the last does."""
    query = np.minimum(np.arange(padded) // fan, piece.count - 1)
    at = (piece.starts[:, None] + query)[:, None, None, :, None]
    positions = piece.base[:, None, None] + np.arange(piece.spans * SPAN).reshape(piece.spans, SPAN)
    spread = positions[:, None, :, None, :]
    seen = spread <= at
    return seen & (spread > at - window) if window else seen


def _attend(q: Floats, keys: Floats, values: Floats, seen: NDArray[np.bool_], scale: float) -> Floats:
    """q[R, K, T, tile, D] over keys and values [R, K, spans, SPAN, D]: softmax(q k * scale) v, as q's shape."""
    rows, _, tiles, tile, _ = q.shape
    spans = keys.shape[2]
    scores = np.matmul(q[:, :, None], keys.swapaxes(-1, -2)[:, :, :, None])
    scores *= np.float32(scale)
    np.copyto(scores, np.float32(-np.inf), where=~seen.reshape(rows, 1, spans, tiles, tile, SPAN))
    scores -= scores.max(axis=(2, 5), keepdims=True)
    weights = np.exp(scores, out=scores)
    sums, mixed = weights.sum(axis=-1), np.matmul(weights, values[:, :, :, None])
    total, out = sums[:, :, 0], mixed[:, :, 0]
    for span in range(1, spans):
        total, out = total + sums[:, :, span], out + mixed[:, :, span]
    attended: Floats = out / total[..., None]
    return attended
