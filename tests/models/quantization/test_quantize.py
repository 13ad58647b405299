"""Codes of GGUF's packed types, and rounding to codes."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from gguf import quants

from cairn.kernels.codebooks import RowBlocks
from cairn.kernels.native import form_of, packed_bytes
from cairn.kernels.quantized import dequantized
from cairn.models.quantization import dequant, quantize
from cairn.models.quantization.dequant import KINDS, BlockFormat
from cairn.models.quantization.quantize import rounded, unpack

PACKED = {number: kind for number, kind in KINDS.items() if kind.dtype is None}
EXACT = {number: kind for number, kind in PACKED.items() if kind.exact}


def random_blocks(kind: BlockFormat, count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (count, kind.bytes), dtype=np.uint8)


@pytest.mark.parametrize("number", EXACT, ids=[kind.name for kind in EXACT.values()])
def test_codes_mean_exactly_what_the_gguf_package_says(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random bytes give denormal, infinite and NaN scales too; slices join without a seam."""
    kind = EXACT[number]
    monkeypatch.setattr(quantize, "SLICE", 256 * 300)
    blocks = random_blocks(kind, 3000)
    held, error = unpack(kind, blocks, (1000, 3 * kind.values))
    with np.errstate(all="ignore"):
        got = dequantized(held)
        if kind.name == "Q1_0":  # which the package lacks
            want = dequant.dequantize(kind, blocks).reshape(got.shape)
        else:
            want = quants.dequantize(blocks, gguf.GGMLQuantizationType(number)).reshape(got.shape)
    assert error == 0
    if isinstance(held, RowBlocks):
        assert held.kind == kind.rows and held.blocks.tobytes() == blocks.tobytes()
        np.testing.assert_array_equal(got, want)
        return
    assert held.bits == kind.bits
    if kind.turn is not None and kind.scaled[1]:
        # Types converted to codes with a minimum give other numbers where the scale is infinite.
        got, want = got[np.isfinite(want)], want[np.isfinite(want)]
        assert len(got) > 0.8 * held.codes.size
    np.testing.assert_array_equal(got, want)
    assert (str(held.scale.dtype), "" if held.minimum is None else str(held.minimum.dtype)) == kind.scaled


def test_every_scale_of_q3_k_fits_its_codes() -> None:
    """The product of a scale and a number reaches 128, which int8 can hold only as -128."""
    kind = KINDS[11]
    blocks = np.zeros((2, kind.bytes), np.uint8)
    blocks[:, 108:110] = np.array([1.5], np.float16).view(np.uint8)  # scales are -32, numbers -4
    blocks[1, 0] = 1  # but for one, which is 0
    held, _ = unpack(kind, blocks, (2, 256))
    want = quants.dequantize(blocks, gguf.GGMLQuantizationType.Q3_K).reshape(2, 256)
    assert want[0, 0] == 192 and want[1, 0] == 0
    np.testing.assert_array_equal(dequantized(held), want)


def test_super_blocks_are_held_in_the_bits_of_the_file() -> None:
    """Codes take a byte each in between; integer scales and floats stay those of the file, not multiplied out."""
    for name, bits in (("Q4_K", 4), ("Q5_K", 5), ("Q6_K", 6)):
        kind = next(kind for kind in PACKED.values() if kind.name == name)
        held, _ = unpack(kind, random_blocks(kind, 6), (3, 512))
        assert held.bits == bits and held.block_scale is not None and held.block_scale.shape == (3, 2)
        assert held.codes.max() < 1 << bits and held.scale.dtype == (np.int8 if bits == 6 else np.uint8)
        assert held.rows(lambda rows: rows[::-1]).codes.tobytes() == held.codes[::-1].tobytes()


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS", "IQ4_NL"])
def test_iq_types_are_held_as_small_as_their_file(name: str) -> None:
    """Whole panels of 16 outputs keep the file's very bytes, and nothing is rounded."""
    kind = next(kind for kind in PACKED.values() if kind.name == name)
    blocks = random_blocks(kind, 32 * 512 // kind.values)
    held, error = unpack(kind, blocks, (32, 512))
    assert error == 0 and packed_bytes([(32, 512, form_of(held))]) == blocks.nbytes


@pytest.mark.parametrize(
    ("name", "places", "most"),
    [("Q2_K", (80, 82), 0.0044), ("IQ1_M", (), 0.0034)],
)
def test_groups_of_16_are_rounded_to_8_bits_and_the_error_is_returned(
    name: str, places: tuple[int, ...], most: float
) -> None:
    """`most` is the largest cost that docs/quantisation.md states, with any scale as likely as any other."""
    number, kind = next((number, kind) for number, kind in PACKED.items() if kind.name == name)
    blocks = random_blocks(kind, 1000, 3)
    for at in places:
        blocks[:, at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
    if name == "IQ1_M":  # whose scale is in the high half of its last eight bytes
        blocks[:, 49:56:2] = blocks[:, 49:56:2] & 15 | np.array([0x10, 0xF0, 0x10, 0x20], np.uint8)
    held, error = unpack(kind, blocks, (500, 512))
    want = quants.dequantize(blocks, gguf.GGMLQuantizationType(number)).reshape(500, 512)
    difference = dequantized(held) - want
    assert held.bits == 8 and 0.8 * most < error < most
    assert error == pytest.approx(np.sqrt(np.square(difference).sum() / np.square(want).sum()), rel=1e-3)


@pytest.mark.parametrize(("bits", "most"), [(8, 0.0056), (4, 0.0825)])
def test_rounding_keeps_gaussian_numbers_close_and_says_how_close(bits: Any, most: float) -> None:
    x: Any = 0.02 * np.random.default_rng(1).standard_normal((600, 320), dtype=np.float32)
    held, error = rounded(lambda begin, end: x[begin:end], (600, 320), bits)
    assert held.scale.dtype == np.float16 and held.minimum is None
    got = dequantized(held)
    assert error == pytest.approx(np.sqrt(np.square(got - x).sum() / np.square(x).sum()), rel=1e-3)
    assert 0 < error < most


def test_four_bits_with_a_search_are_closer_than_without() -> None:
    x: Any = np.random.default_rng(2).standard_normal((400, 256), dtype=np.float32)
    _, error = rounded(lambda begin, end: x[begin:end], (400, 256), 4)
    groups = x.reshape(-1, 32)
    scale = groups[np.arange(len(groups)), np.abs(groups).argmax(axis=1)] / -8
    plain = np.clip(np.rint(groups / scale[:, None]), -8, 7) * scale[:, None]
    assert error < 0.95 * np.sqrt(np.square(plain - groups).sum() / np.square(groups).sum())


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_that_codes_can_hold_are_held_exactly(bits: Any) -> None:
    low, high = (-8, 8) if bits == 4 else (-127, 128)
    x: Any = np.random.default_rng(3).integers(low, high, (40, 96)).astype(np.float32)
    x[:, ::32] = low  # the end of the scale in every group
    held, error = rounded(lambda begin, end: 0.25 * x[begin:end], (40, 96), bits)
    assert error == 0
    np.testing.assert_array_equal(dequantized(held), 0.25 * x)


@pytest.mark.parametrize("bits", [4, 8])
def test_extremes_are_rounded_in_their_own_group(bits: Any) -> None:
    x: Any = np.random.default_rng(4).standard_normal((6, 64), dtype=np.float32)
    x[0, 3], x[1, 40], x[2] = np.nan, np.inf, 0
    x[3] *= 1e-30
    x[4] *= 1e9
    held, error = rounded(lambda begin, end: x[begin:end], (6, 64), bits)
    got = dequantized(held)
    assert held.scale.dtype == np.float32, "float16 has no such scale"
    assert np.isnan(got[0, :32]).all() and np.isfinite(got[0, 32:]).all()
    assert np.isnan(got[1, 32:]).all() and np.isfinite(got[1, :32]).all()
    assert not got[2].any() and 0 < error < 0.2
    for row in (3, 4, 5):
        np.testing.assert_allclose(got[row], x[row], atol=0.13 * np.abs(x[row]).max())


def test_groups_far_smaller_than_others_keep_float16_scales() -> None:
    x: Any = np.random.default_rng(6).standard_normal((4, 64), dtype=np.float32)
    x[1] *= 1e-5
    x[2] *= 1e-9
    held, _ = rounded(lambda begin, end: x[begin:end], (4, 64), 8)
    assert held.scale.dtype == np.float16
    assert np.abs(dequantized(held) - x).max() < 0.02
    tiny, error = rounded(lambda begin, end: 1e-5 * x[begin:end], (4, 64), 8)
    assert tiny.scale.dtype == np.float32 and error < 0.006


def test_slices_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    x: Any = np.random.default_rng(5).standard_normal((100, 64), dtype=np.float32)
    whole, error = rounded(lambda begin, end: x[begin:end], (100, 64), 4)
    monkeypatch.setattr(quantize, "_SLICE", 64 * 7)
    monkeypatch.setattr(dequant, "SLICE", 64 * 7)
    parts, again = rounded(lambda begin, end: x[begin:end], (100, 64), 4)
    assert parts.codes.tobytes() == whole.codes.tobytes() and parts.scale.tobytes() == whole.scale.tobytes()
    assert again == pytest.approx(error)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_error_of_numbers_whose_squares_overflow_is_a_number(bits: Any) -> None:
    x: Any = 1e30 * np.random.default_rng(5).standard_normal((8, 64), dtype=np.float32)
    _, error = rounded(lambda begin, end: x[begin:end], (8, 64), bits)
    assert 0 < error < 0.1
