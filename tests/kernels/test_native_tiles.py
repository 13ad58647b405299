"""What native kernels compute together for several tokens, where it might show: bits are those of each token alone."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.kernels.test_native import DTYPES, VARIANTS, laid_out, random
from tests.kernels.test_quantized import quantized

from cairn.kernels.native import NativeKernels
from cairn.types import BLOCK_TOKENS


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 6, 33])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_value_without_a_number_reaches_only_those_who_see_it(
    variant: str, dtype: Any, window: int, bad: float
) -> None:
    """Known failure 36: a tile multiplies what any of its tokens sees; 0 * inf must not reach the others."""
    kernels, tokens, start = NativeKernels(variant, 2), 60, 30
    pool, table = random(6, 1, 2, 2, BLOCK_TOKENS, 24).astype(dtype), np.array([[4, 0, 5, 2, 1, 3]], np.int32)
    query = random(tokens, 6, 24, seed=1)
    wrong = {39: 3, 40: 3, 61: 0, 64: 23}
    for position, place in wrong.items():
        pool[table[0, position // BLOCK_TOKENS], 0, 1, :, position % BLOCK_TOKENS, place] = bad
    kv, out = laid_out(pool), np.empty((tokens, 6 * 24), np.float32)
    kernels.attention(query, kv, 0, np.array([[0, tokens, start]], np.int32), table, window, 0.4, out)
    clean = np.where(np.isfinite(pool.astype(np.float32)), pool, 0).astype(dtype)
    want = np.empty_like(out)
    kernels.attention(query, laid_out(clean), 0, np.array([[0, tokens, start]], np.int32), table, window, 0.4, want)
    for place in range(tokens):
        position = start + place
        seen = [at for at in wrong if at <= position and (not window or at > position - window)]
        numbers = np.isfinite(out[place].reshape(6, 24))
        assert numbers.all(axis=0).tolist() == [column not in {wrong[at] for at in seen} for column in range(24)]
        np.testing.assert_array_equal(out[place].reshape(6, 24)[numbers], want[place].reshape(6, 24)[numbers])
        alone = np.empty((1, 6 * 24), np.float32)
        row = np.array([[0, 1, position]], np.int32)
        kernels.attention(query[place : place + 1].copy(), kv, 0, row, table, window, 0.4, alone)
        np.testing.assert_array_equal(alone[0], out[place])
    kernels.close()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_are_rounded_alike_in_any_pieces(variant: str, threads: int) -> None:
    """Few rows are rounded in pieces of a tile, many a tile at a time: groups and pairs of bfloat16 in one matrix, with
    a norm, a gate or nothing before."""
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
    for low, high in [(0, 1), (1, 3), (3, 12), (12, 29), (29, 66), (66, 200), (200, 243)]:
        for part, all_rows in zip(all_ways(x[low:high].copy()), whole, strict=True):
            assert part.tobytes() == all_rows[low:high].tobytes(), (low, high)
    kernels.close()
