"""Rows of packed matrices, looked up on every kernel set."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cairn.kernels.base import Packed
from cairn.kernels.choose import load_kernels
from cairn.kernels.quantized import dequantized
from tests.kernels.test_quantized import in_blocks, in_rows, in_table_blocks, quantized
from tests.tiny_models import KERNELS


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "parts",
    [
        [quantized(37, 96, 4, np.float16, None)],
        [quantized(40, 64, 4, np.float32, np.float32), quantized(20, 64, 8, np.float16, None, 1)],
        [quantized(18, 32, 8, np.float16, np.float16)],
        [in_blocks(37, 768, 4)],
        [in_blocks(20, 256, 5), in_blocks(20, 256, 6, 1)],
        [in_blocks(37, 512, 6)],
        [in_table_blocks(37, 768)],
        [in_rows("iq2_xxs", 37, 512), in_rows("iq2_xs", 20, 512, 1), in_rows("iq2_s", 3, 512, 2)],
        [in_rows("iq3_xxs", 20, 256), in_rows("iq3_s", 37, 256, 1)],
        [np.linspace(-1, 1, 37 * 45, dtype=np.float32).reshape(37, 45)],
        [np.linspace(-1, 1, 37 * 45).reshape(37, 45).astype(np.float16)],
        [np.linspace(-1, 1, 37 * 45).reshape(37, 45).astype(ml_dtypes.bfloat16)],
    ],
    ids=[
        "int4",
        "int4 with minima, int8",
        "int8 with minima",
        "q4_k",
        "q5_k, q6_k",
        "q6_k",
        "iq4_xs",
        "iq2",
        "iq3",
        "f32",
        "f16",
        "bf16",
    ],
)
def test_a_matrix_is_a_table_of_its_rows(kernels: str, parts: Any) -> None:
    """An embedding that is also the head is held once; a looked-up row is the weights themselves, bit for bit."""
    one = load_kernels(kernels, 2)
    want = np.concatenate([dequantized(p) if isinstance(p, Packed) else p.astype(np.float32) for p in parts])
    tokens = np.array([0, 15, 16, len(want) - 1, 3, 3, len(want) // 2], np.int32)
    hidden = np.full((len(tokens), want.shape[1]), np.nan, np.float32)
    one.embed(one.matrix(parts, [None] * len(parts)), tokens, hidden)
    np.testing.assert_array_equal(hidden, want[tokens])
    if len(parts) == 1:
        hidden[:] = np.nan
        one.embed(one.table(parts[0]), tokens, hidden)
        np.testing.assert_array_equal(hidden, want[tokens])
    one.close()
