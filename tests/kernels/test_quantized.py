"""Products with quantized weights in numpy, against plain arithmetic in float64."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from cairn.kernels.base import BLOCK, GROUP, Quantized
from cairn.kernels.codebooks import ROW_FORMATS, RowBlocks
from cairn.kernels.quantized import activation_codes, dequantized, rounded
from cairn.kernels.reference import ReferenceKernels
from cairn.models.quantization.dequant import IQ4


def quantized(out: int, inner: int, bits: Literal[4, 8], scale: Any, minimum: Any, seed: int = 0) -> Quantized:
    """Return random codes over their whole range; `scale` and `minimum` are types, or None for no minimum."""
    rng = np.random.default_rng(seed)
    low, high, dtype = (0, 16, np.uint8) if bits == 4 else (-128, 128, np.int8)
    codes: Any = rng.integers(low, high, (out, inner)).astype(dtype)
    groups = (out, inner // GROUP)
    lowest = None if minimum is None else rng.standard_normal(groups).astype(minimum)
    return Quantized(bits, codes, (0.1 * rng.standard_normal(groups)).astype(scale), lowest)


def meaning(x: Any, weights: list[Any]) -> Any:
    """Return x @ weights in float64, with rounded activations for quantized parts."""
    parts = []
    for one in weights:
        if isinstance(one, RowBlocks):
            parts.append(rounded(x).astype(np.float64) @ one.values().astype(np.float64).T)
        elif isinstance(one, Quantized):
            scale, minimum = one.scale.astype(np.float64), 0 if one.minimum is None else one.minimum.astype(np.float64)
            if one.block_scale is not None:
                scale *= np.repeat(one.block_scale, scale.shape[1] // one.block_scale.shape[1], axis=1)
            if one.block_minimum is not None:
                minimum *= np.repeat(one.block_minimum, BLOCK // GROUP, axis=1)
            codes = one.codes.astype(np.float64).reshape(*scale.shape, -1)
            codes -= 32 if one.bits == 6 else 8 if one.bits == 4 and one.minimum is None else 0
            values = codes * scale[..., None] + np.asarray(minimum)[..., None]
            parts.append(rounded(x).astype(np.float64) @ values.reshape(one.shape).T)
        else:
            parts.append(x.astype(np.float64) @ np.asarray(one).astype(np.float64).T)
    return np.concatenate(parts, axis=1)


def in_blocks(out: int, inner: int, bits: Literal[4, 5, 6], seed: int = 0) -> Quantized:
    """Return random codes and integer scales over their whole range, in super-blocks."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (out, inner), dtype=np.uint8)
    supers: Any = (0.01 * rng.standard_normal((2, out, inner // BLOCK))).astype(np.float16)
    if bits == 6:
        whole = rng.integers(-128, 128, (out, inner // 16), dtype=np.int8)
        return Quantized(6, codes, whole, None, supers[0])
    both = rng.integers(0, 64, (2, out, inner // GROUP), dtype=np.uint8)
    return Quantized(bits, codes, both[0], both[1], supers[0], supers[1])


def in_table_blocks(out: int, inner: int, seed: int = 0) -> Quantized:
    """Return random table indexes and integer scales over their whole range."""
    rng = np.random.default_rng(seed)
    whole = rng.integers(-32, 32, (out, inner // GROUP), dtype=np.int8)
    supers = (0.01 * rng.standard_normal((out, inner // BLOCK))).astype(np.float16)
    return Quantized(8, IQ4[rng.integers(0, 16, (out, inner))], whole, None, supers, table="iq4")


def in_rows(kind: str, out: int, inner: int, seed: int = 0) -> RowBlocks:
    """Return random codebook rows, signs and scales."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (out, inner // BLOCK, ROW_FORMATS[kind].bytes), dtype=np.uint8)
    blocks[:, :, :2] = (0.01 * rng.standard_normal((out, inner // BLOCK, 1))).astype(np.float16).view(np.uint8)
    return RowBlocks(kind, blocks.reshape(out, -1))


FORMS = [
    (4, np.float16, None),
    (4, np.float32, None),
    (4, np.float16, np.float16),
    (4, np.float32, np.float32),
    (8, np.float16, None),
    (8, np.float32, None),
    (8, np.float32, np.float32),
    (8, np.float16, np.float32),
]


@pytest.mark.parametrize(("bits", "scale", "minimum"), FORMS)
def test_the_reference_multiplies_the_decoded_numbers(bits: Any, scale: Any, minimum: Any) -> None:
    kernels = ReferenceKernels()
    x: Any = np.random.default_rng(1).standard_normal((9, 96), dtype=np.float32)
    parts = [quantized(20, 96, bits, scale, minimum), np.ones((7, 96), np.float32), quantized(5, 96, 8, scale, None, 3)]
    bias = np.arange(20, dtype=np.float32)
    got = np.zeros((9, 32), np.float32)
    kernels.project_add(x, kernels.matrix(parts, [bias, None, None]), got)
    want = meaning(x, parts) + np.concatenate([bias, np.zeros(12)])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
    alone = np.zeros((1, 32), np.float32)
    kernels.project_add(x[4:5], kernels.matrix(parts, [bias, None, None]), alone)
    assert alone.tobytes() == got[4:5].tobytes()
    kernels.close()


def test_activations_are_rounded_to_the_nearest_code_ties_to_even() -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, :6] = [127, 0.5, 1.5, -2.5, -127, 63.49]
    codes, scale = activation_codes(x)
    assert codes[0, :6].tolist() == [127, 0, 2, -2, -127, 63] and scale[0].tolist() == [1, 0]
    y: Any = np.random.default_rng(0).standard_normal((5, 96), dtype=np.float32)
    step = np.repeat(np.abs(y.reshape(5, 3, 32)).max(-1) / 127, 32, axis=1)
    assert (np.abs(rounded(y) - y) <= 0.5001 * step).all()


def test_a_group_without_numbers_is_nan_and_a_tiny_one_is_zero() -> None:
    x = np.zeros((4, 64), np.float32)
    x[0, 3], x[1, 40], x[2, 0], x[3, 7] = np.nan, -np.inf, 1e-38, 3e38
    got = rounded(x)
    assert np.isnan(got[0, :32]).all() and not got[0, 32:].any()
    assert np.isnan(got[1, 32:]).all() and not got[1, :32].any()
    assert not got[2].any() and np.isclose(got[3, 7], 3e38, rtol=1e-6)


def test_four_bits_without_a_minimum_are_centred_on_eight() -> None:
    codes = np.arange(32, dtype=np.uint8)[None] % 16
    plain = Quantized(4, codes, np.full((1, 1), 0.5, np.float16))
    np.testing.assert_array_equal(dequantized(plain)[0], 0.5 * (codes[0].astype(float) - 8))
    lowest = Quantized(4, codes, np.full((1, 1), 0.5, np.float16), np.full((1, 1), -3, np.float32))
    np.testing.assert_array_equal(dequantized(lowest)[0], 0.5 * codes[0] - 3)


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_the_reference_multiplies_super_blocks(bits: Any) -> None:
    kernels = ReferenceKernels()
    x: Any = np.random.default_rng(1).standard_normal((9, 512), dtype=np.float32)
    parts = [in_blocks(20, 512, bits), quantized(5, 512, 8, np.float16, None, 3)]
    got = np.zeros((9, 25), np.float32)
    kernels.project_add(x, kernels.matrix(parts, [None, None]), got)
    want = meaning(x, parts)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
    kernels.close()


def test_misshapen_super_blocks_are_refused() -> None:
    four, six = in_blocks(2, 512, 4), in_blocks(2, 512, 6)
    assert four.minimum is not None
    for fields, message in (
        ((4, four.codes[:, :288], four.scale, four.minimum, four.block_scale, four.block_minimum), "multiple of 256"),
        ((8, four.codes.view(np.int8), four.scale, four.minimum, four.block_scale, four.block_minimum), "4 to 6 bits"),
        ((4, four.codes, four.scale, None, four.block_scale), "have minima"),
        ((6, six.codes, six.scale, six.scale, six.block_scale, six.block_scale), "none with 6"),
        ((6, six.codes, six.scale[:, :16], None, six.block_scale), "in / 16"),
        ((4, four.codes, four.scale + np.uint8(64), four.minimum, four.block_scale, four.block_minimum), "below 64"),
        ((5, four.codes, four.scale, four.minimum), "need a block_scale"),
        ((4, four.codes, four.scale, four.minimum, six.scale, four.block_minimum), "block_scale of super-blocks"),
    ):
        with pytest.raises(ValueError, match=message):
            Quantized(*fields)  # type: ignore[arg-type]
    tabled = in_table_blocks(2, 512)
    for scale in (tabled.scale + np.int8(64), tabled.scale - np.int8(33)):
        with pytest.raises(ValueError, match="scales of super-blocks of iq4 are from -32 to 31"):
            Quantized(8, tabled.codes, scale, None, tabled.block_scale, table="iq4")
    for blocks in (np.zeros((2, 65), np.uint8), np.zeros((2, 66), np.int8), np.zeros(66, np.uint8)):
        with pytest.raises(ValueError, match=r"blocks of iq2_xxs are bytes \[out, in / 256 \* 66\]"):
            RowBlocks("iq2_xxs", blocks)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bits", "codes", "scale", "message"),
    [
        (4, np.zeros((2, 32), np.int8), np.zeros((2, 1), np.float32), "uint8"),
        (8, np.zeros((2, 32), np.uint8), np.zeros((2, 1), np.float32), "int8"),
        (8, np.zeros((2, 33), np.int8), np.zeros((2, 1), np.float32), "multiple of 32"),
        (8, np.zeros((2, 32), np.int8), np.zeros((2, 2), np.float32), "scale"),
        (8, np.zeros((2, 32), np.int8), np.zeros((2, 1), np.float64), "scale"),
    ],
)
def test_misshapen_parts_are_refused(bits: Any, codes: Any, scale: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quantized(bits, codes, scale)
