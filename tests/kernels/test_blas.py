"""Matrix products through BLAS: correct, and each row independent of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cairn.kernels import blas
from cairn.kernels.blas import TILE, pack, project, tile_rows
from tests.kernels.arguments import random

SHAPES = [
    (1, 1),
    (7, 5),
    (48, 160),
    (63, 65),
    (64, 1000),
    (96, 300),
    (256, 512),
    (640, 256),
    (1031, 77),
    (1024, 230),
    (3072, 100),
]


@pytest.mark.parametrize(("inner", "out"), SHAPES)
@pytest.mark.parametrize("rows", [TILE, 1])
def test_projection(inner: int, out: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has the same bits alone, in any place and in any batch, also with one row a call."""
    if rows == 1:
        monkeypatch.setattr(blas, "tile_rows", lambda *shape: 1)
    weight, bias, x = random(out, inner), random(out, seed=1), random(41, inner, seed=2)
    cut = out // 3
    matrix = pack([weight[:cut], weight[cut:]], [None, bias[cut:]])
    assert matrix.rows == rows
    whole = project(x, matrix, None, 1)
    want = x.astype(np.float64) @ weight.T.astype(np.float64) + np.where(np.arange(out) < cut, 0, bias)
    np.testing.assert_allclose(whole, want, atol=1e-5 * inner**0.5 * 3)
    for low, high in [(0, 1), (3, 11), (40, 41), (5, 41), (17, 18)]:
        assert project(x[low:high], matrix, None, 1).tobytes() == whole[low:high].tobytes()


def test_no_shape_needs_one_row_a_call_here_and_the_check_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {tile_rows(inner, 256) for inner, _ in SHAPES} == {TILE}
    real = np.matmul

    def depends_on_its_place(left: Any, right: Any, **options: Any) -> Any:
        got = real(left, right, **options)
        got[..., -1, :] *= np.float32(1 + 1e-7)
        return got

    monkeypatch.setattr(blas.np, "matmul", depends_on_its_place)
    assert tile_rows(91, 16) == 1
