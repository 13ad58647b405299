"""Tokens that native kernels compute together in a tile have the bits that each has alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cairn.kernels.native import NativeKernels
from cairn.kernels.reference import ReferenceKernels
from cairn.types.model_spec import BLOCK_TOKENS
from tests.kernels.test_native import DTYPES, VARIANTS, laid_out, random
from tests.kernels.test_quantized import quantized
from tests.tiny_models import KERNELS


@functools.cache
def on_two_threads(variant: str) -> Any:
    """Return kernels shared by the whole file; their threads end when the cached object does."""
    return ReferenceKernels(2) if variant == "reference" else NativeKernels(variant, 2)


@pytest.fixture(autouse=True, scope="module")
def ended() -> Iterator[None]:
    yield
    for variant in KERNELS:
        on_two_threads(variant).close()
    on_two_threads.cache_clear()


@np.errstate(all="ignore")
def only_those_who_see_it(
    variant: str, dtype: Any, heads: int, start: int, tokens: int, window: int, bad: float, wrong: dict[int, int]
) -> None:
    """Check that `wrong` values (position -> place) reach only tokens that attend to them; other bits stay the same."""
    kernels = on_two_threads(variant)
    arranged = np.copy if variant == "reference" else laid_out
    kv_heads, size = 2, 24
    blocks = (start + tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    pool = random(blocks, 1, 2, kv_heads, BLOCK_TOKENS, size).astype(dtype)
    table = np.random.default_rng(2).permutation(blocks).astype(np.int32)[None]
    query = random(tokens, heads, size, seed=1)
    for position, place in wrong.items():
        pool[table[0, position // BLOCK_TOKENS], 0, 1, :, position % BLOCK_TOKENS, place] = bad
    kv, out = arranged(pool), np.empty((tokens, heads * size), np.float32)
    rows = np.array([[0, tokens, start]], np.int32)
    kernels.attention(query, kv, 0, rows, table, window, 0.4, out)
    clean = np.where(np.isfinite(pool.astype(np.float32)), pool, 0).astype(dtype)
    want = np.empty_like(out)
    kernels.attention(query, arranged(clean), 0, rows, table, window, 0.4, want)
    for place in range(tokens):
        position = start + place
        seen = [at for at in wrong if at <= position and (not window or at > position - window)]
        numbers = np.isfinite(out[place].reshape(heads, size))
        assert numbers.all(axis=0).tolist() == [column not in {wrong[at] for at in seen} for column in range(size)]
        assert np.array_equal(out[place].reshape(heads, size)[numbers], want[place].reshape(heads, size)[numbers])
        alone = np.empty((1, heads * size), np.float32)
        row = np.array([[0, 1, position]], np.int32)
        kernels.attention(query[place : place + 1].copy(), kv, 0, row, table, window, 0.4, alone)
        assert np.array_equal(alone[0], out[place], equal_nan=True)


@pytest.mark.parametrize("variant", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 6, 33])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_nan_reaches_only_rows_that_attend_to_it(variant: str, dtype: Any, window: int, bad: float) -> None:
    """A tile multiplies what any of its tokens sees; 0 * inf must not reach the others (known failure 36)."""
    only_those_who_see_it(variant, dtype, 6, 30, 60, window, bad, {39: 3, 40: 3, 61: 0, 64: 23})


@pytest.mark.parametrize("variant", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [2, 4, 8])
@pytest.mark.parametrize(
    ("start", "tokens", "window"), [(62, 4, 0), (50, 40, 0), (59, 9, 0), (125, 4, 64), (120, 12, 61), (60, 80, 64)]
)
def test_a_tile_across_the_end_of_a_span(
    variant: str, dtype: Any, heads: int, start: int, tokens: int, window: int
) -> None:
    """Some of its rows see nothing of a span that holds a NaN (known failure 36)."""
    for bad in {64, 65, start - window + 1, start + tokens - 1} & set(range(start + tokens)):
        only_those_who_see_it(variant, dtype, heads, start, tokens, window, np.nan, {bad: 5})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_are_rounded_alike_in_any_pieces(variant: str, threads: int) -> None:
    """Few rows are rounded in pieces of a tile, many rows a tile at a time.

    Groups and pairs of bfloat16 in one matrix, after a norm, a gate or nothing.
    """
    kernels, rows, inner = NativeKernels(variant, threads), 243, 544
    parts = [
        quantized(40, inner, 4, np.float16, None, 1),
        random(24, inner, seed=2).astype(ml_dtypes.bfloat16),
        quantized(48, inner, 8, np.float16, None, 3),
    ]
    matrix, norm = kernels.matrix(parts, [None] * 3), 1 + 0.1 * random(inner, seed=4)
    wide = kernels.matrix([quantized(2 * inner, inner, 4, np.float16, None, 5)], [None])
    back = kernels.matrix([quantized(inner, inner, 8, np.float16, None, 6)], [None])
    x = random(rows, inner, seed=7)

    def all_ways(x: Any) -> list[Any]:
        through, added, gated = (np.zeros((len(x), width), np.float32) for width in (112, 112, inner))
        kernels.norm_project(x, norm, 1e-6, matrix, through)
        kernels.project_add(x, matrix, added)
        gated += x
        kernels.gated_mlp(gated, norm, 1e-6, wide, "silu", back)
        return [through, added, gated]

    whole = all_ways(x)
    for low, high in [(0, 1), (1, 3), (3, 12), (12, 29), (29, 43), (43, 59), (59, 66), (66, 200), (200, 243)]:
        for part, all_rows in zip(all_ways(x[low:high].copy()), whole, strict=True):
            assert part.tobytes() == all_rows[low:high].tobytes(), (low, high)
    kernels.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_panel_is_dealt_out_once(variant: str) -> None:
    """Threads share each matrix that one is packed of: small ones, ends within a panel, more threads than panels."""
    x, sums = random(64, 96), []
    for outs in ([7], [37, 5, 200, 1, 90], [16, 16], [530, 40, 40]):
        parts = [quantized(out, 96, 4 + 4 * (at % 3 == 2), np.float16, None, at) for at, out in enumerate(outs)]
        for threads in (1, 2, 3, 7):
            kernels, out = NativeKernels(variant, threads), np.zeros((64, sum(outs)), np.float32)
            kernels.project_add(x, kernels.matrix(parts, [None] * len(parts)), out)
            sums.append(out.tobytes())
            kernels.close()
        assert len(set(sums[-4:])) == 1, outs
        assert np.all(out)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_are_turned_and_stored_alike_in_any_pieces(variant: str, dtype: Any) -> None:
    """With few tokens each thread takes heads, with many it takes whole tokens."""
    heads, kv_heads, size, tokens = 4, 2, 8, 400
    kernels, qkv = NativeKernels(variant, 2), random(tokens, (heads + 2 * kv_heads) * size)
    slots = np.random.default_rng(3).permutation(26 * BLOCK_TOKENS)[:tokens].astype(np.int32)
    angles, norm = random(tokens, 2, size // 2, seed=1), 1 + random(size, seed=2)
    results = []
    for step in (tokens, 150, 9, 1):
        kv = np.zeros((26, 1, 2, kv_heads, BLOCK_TOKENS, size), dtype)
        query = np.zeros((tokens, heads, size), np.float32)
        for low in range(0, tokens, step):
            some = slice(low, low + step)
            kernels.rope_write(qkv[some], angles[some], norm, norm, 1e-6, kv, 0, slots[some], query[some])
        results.append((query.tobytes(), kv.tobytes()))
    assert len(set(results)) == 1
    kernels.close()
