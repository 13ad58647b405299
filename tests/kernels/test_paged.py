"""Attention over paged KV in numpy, against plain softmax attention."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cairn.kernels import paged
from cairn.kernels.blas import TILE
from cairn.kernels.kv_codes import numbers, stored
from cairn.kernels.paged import SPAN, attend
from cairn.types.model_spec import BLOCK_TOKENS
from tests.kernels.arguments import random


def first_seen(at: int, window: int) -> int:
    """Return the first visible position: of the window, or of the piece if the window is negative."""
    return at - at % -window if window < 0 else max(0, at - window + 1) if window else 0


def naive_attention(query: Any, keys: Any, values: Any, at: int, window: int, scale: float) -> Any:
    """Compute one position in float64: query [Q, D]; keys, values [tokens, K, D]."""
    low = first_seen(at, window)
    fan = query.shape[0] // keys.shape[1]
    out = []
    for head in range(query.shape[0]):
        k, v = (x[low : at + 1, head // fan].astype(np.float64) for x in (keys, values))
        scores = k @ query[head].astype(np.float64) * scale
        weights = np.exp(scores - scores.max())
        out.append(weights @ v / weights.sum())
    return np.concatenate(out)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 16), (6, 2, 10), (8, 1, 6), (9, 1, 32), (4, 2, 64)])
@pytest.mark.parametrize("window", [0, 1, 5, 16, 70, -24, -64])
def test_attention(heads: int, kv_heads: int, size: int, window: int) -> None:
    """Chunks and decodes in one call, each with its own mask: chunked prefill once ignored the window's mask.

    Known failure 36.
    """
    rng = np.random.default_rng(0)
    rows = [(0, 1, 0), (1, 1, 131), (2, 37, 50), (39, 1, 63), (40, 64, 0), (104, 1, 64), (105, 3, 126)]
    tokens, width = 108, 12
    kv = np.full((width * len(rows), 3, 2, kv_heads, BLOCK_TOKENS, size), np.nan, np.float32)
    tables = np.full((len(rows), width), -1, np.int32)
    ids = rng.permutation(len(kv))
    query, out = random(tokens, heads, size, seed=4), np.empty((tokens, heads * size), np.float32)
    want = np.empty_like(out)
    for number, (first, count, start) in enumerate(rows):
        end = start + count
        keys, values = random(end, kv_heads, size, seed=number), random(end, kv_heads, size, seed=number + 50)
        low = first_seen(start, window) // BLOCK_TOKENS
        # A table may mark passed blocks as gone, or still name them although they have another owner.
        tables[number, :low] = -1 if number % 2 else ids[number * width : number * width + low]
        for block in range(low, -(-end // BLOCK_TOKENS)):
            tables[number, block] = one = ids[number * width + block]
            part = slice(block * BLOCK_TOKENS, min(end, (block + 1) * BLOCK_TOKENS))
            kv[one, 1, 0, :, : part.stop - part.start] = keys[part].transpose(1, 0, 2)
            kv[one, 1, 1, :, : part.stop - part.start] = values[part].transpose(1, 0, 2)
        for place in range(count):
            want[first + place] = naive_attention(query[first + place], keys, values, start + place, window, 0.3)
    attend(query, kv, 1, np.array(rows, np.int32), tables, window, 0.3, out)
    np.testing.assert_allclose(out, want, atol=1e-5)
    for number, (first, count, start) in enumerate(rows):
        alone = np.empty((count, heads * size), np.float32)
        row = np.array([(0, count, start)], np.int32)
        attend(query[first : first + count], kv, 1, row, tables[number : number + 1], window, 0.3, alone)
        assert alone.tobytes() == out[first : first + count].tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_kv_of_16_bits_is_read_exactly(dtype: Any) -> None:
    kv, query = random(20, 1, 2, 2, BLOCK_TOKENS, 16).astype(dtype), random(70, 4, 16)
    tables, rows = np.arange(20, dtype=np.int32)[None], np.array([(0, 70, 60)], np.int32)
    results = []
    for pool in (kv, kv.astype(np.float32)):
        results.append(np.empty((70, 64), np.float32))
        attend(query, pool, 0, rows, tables, 0, 0.25, results[-1])
    assert results[0].tobytes() == results[1].tobytes()


def test_kv_of_8_bits_is_read_as_codes_times_scales() -> None:
    """Numbers are codes times their scales, for keys and values; a scale that nobody sees may be NaN."""
    plain, query = random(20, 1, 2, 2, BLOCK_TOKENS, 16), random(70, 4, 16)
    tables, rows = np.arange(20, dtype=np.int32)[None], np.array([(0, 70, 60)], np.int32)
    kv = stored(plain, np.dtype(np.int8))
    assert kv.nbytes * 3.2 == plain.nbytes and 0 < np.abs(numbers(kv) - plain).max() < 0.02
    kv[9:, ..., 16:] = -1
    results = []
    for pool in (kv, np.nan_to_num(numbers(kv))):
        results.append(np.empty((70, 64), np.float32))
        attend(query, pool, 0, rows, tables, 0, 0.25, results[-1])
    assert results[0].tobytes() == results[1].tobytes()


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("window", [0, 70])
def test_attention_is_cut_into_pieces_without_a_trace(window: int, both: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, query = random(20, 1, 2, 2, BLOCK_TOKENS, 16), random(300, 4, 16)
    tables, rows = np.arange(20, dtype=np.int32)[None], np.array([(0, 300, 0)], np.int32)
    whole, pieces = np.empty((300, 64), np.float32), np.empty((300, 64), np.float32)
    attend(query, kv, 0, rows, tables, window, 0.25, whole, both=both)
    monkeypatch.setattr(paged, "_SCORES", 1)
    monkeypatch.setattr(paged, "_SPANS", 2)
    assert len(list(paged._pieces(rows.tolist(), 4, window, both))) > 30
    attend(query, kv, 0, rows, tables, window, 0.25, pieces, both=both)
    assert whole.tobytes() == pieces.tobytes()


class Pages:
    """Keys and values that are already gathered."""

    def __init__(self, keys: Any, values: Any) -> None:
        self.keys, self.values = lambda spans: keys[:, :, spans], lambda spans: values[:, :, spans]


def test_adding_span_results_is_a_sum_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short context gives the same bits when the spans of a longer one are empty, or come in parts."""
    q, keys, values = random(1, 2, 1, TILE, 16), random(1, 2, 5, SPAN, 16), random(1, 2, 5, SPAN, 16, seed=1)
    seen = np.zeros((1, 1, 5, TILE, SPAN), bool)
    seen[:, :, 1:3] = True
    seen[:, :, 3, :, :9] = True
    part = slice(1, 4)
    pages: Any = Pages(keys[:, :, part], values[:, :, part])
    short = paged._attend(q, pages, seen[:, :, part], 0.2)
    pages = Pages(keys, values)
    assert paged._attend(q, pages, seen, 0.2).tobytes() == short.tobytes()
    monkeypatch.setattr(paged, "_SPANS", 2)
    assert paged._attend(q, pages, seen, 0.2).tobytes() == short.tobytes()
