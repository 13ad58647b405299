"""Every number format of GGUF against the gguf package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import quants

from cairn.models.quantization import dequant
from cairn.models.quantization.dequant import KINDS, OTHER_KINDS, dequantize

QUANTISED = {number: kind for number, kind in KINDS.items() if kind.dtype is None}


OF_THE_PACKAGE = {number: kind for number, kind in QUANTISED.items() if kind.name != "Q1_0"}


@pytest.mark.parametrize("number", OF_THE_PACKAGE, ids=[kind.name for kind in OF_THE_PACKAGE.values()])
def test_random_blocks_give_the_bits_of_the_gguf_package(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random bytes give denormal, infinite and NaN scales too; slices of any size join without a seam."""
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


def test_a_bit_of_q1_0_is_a_sign() -> None:
    """The gguf package knows only its size. The lowest bit of the first byte is the first number's."""
    kind = KINDS[41]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q1_0] == (kind.values, kind.bytes)
    block = np.zeros((1, kind.bytes), np.uint8)
    block[0, :2] = np.array([1.5], np.float16).view(np.uint8)
    block[0, 2], block[0, 17] = 0b101, 0x80
    want = np.full(128, -1.5, np.float32)
    want[[0, 2, 127]] = 1.5
    np.testing.assert_array_equal(dequantize(kind, block), want)


def test_every_type_has_a_number_of_its_own_and_a_name() -> None:
    known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    names = {**{number: kind.name for number, kind in KINDS.items()}, **OTHER_KINDS}
    assert len(names) == len(KINDS) + len(OTHER_KINDS)
    assert not {number: name for number, name in known.items() if names.get(number) != name}
