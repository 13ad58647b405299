"""Every number format of GGUF against the gguf package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import quants

from cairn.models import dequant
from cairn.models.dequant import KINDS, dequantize

QUANTISED = {number: kind for number, kind in KINDS.items() if kind.dtype is None}


@pytest.mark.parametrize("number", QUANTISED, ids=[kind.name for kind in QUANTISED.values()])
def test_random_blocks_give_the_bits_of_the_gguf_package(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes are random, so scales are denormal, infinite and NaN too; slices of any size join without a seam."""
    kind, twin = KINDS[number], gguf.GGMLQuantizationType(number)
    assert (kind.name, gguf.GGML_QUANT_SIZES[twin]) == (twin.name, (kind.values, kind.bytes))
    monkeypatch.setattr(dequant, "SLICE", 256 * 300)
    blocks = np.random.default_rng(number).integers(0, 256, (5000, kind.bytes), dtype=np.uint8)
    got = dequantize(kind, blocks)
    with np.errstate(all="ignore"):
        want = quants.dequantize(blocks, twin).reshape(-1)
    numbers = ~np.isnan(want)
    assert numbers.mean() > 0.9 and got.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(got), ~numbers)
    np.testing.assert_array_equal(got[numbers].view(np.uint32), want[numbers].view(np.uint32))
