"""Native products with quantized weights in every variant that runs here, against plain arithmetic, in any batch.

Float32 sums over groups, each an exact integer times two scales, may differ from float64 by a few units in the last
place of the sum of magnitudes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cairn.kernels.base import GROUP, Quantized
from cairn.kernels.codebooks import ROW_FORMATS
from cairn.kernels.native import NativeKernels, form_of, packed_bytes
from cairn.kernels.quantized import activation_codes
from cairn.kernels.reference import ReferenceKernels
from cairn.models.quantization.dequant import FP4, IQ4
from tests.kernels.arguments import random
from tests.kernels.test_quantized import FORMS, in_blocks, in_rows, in_table_blocks, meaning, quantized
from tests.tiny_models import KERNELS

VARIANTS = [name for name in KERNELS if name != "reference"]

if not VARIANTS:
    pytest.skip("the native kernels were not compiled", allow_module_level=True)


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> Any:
    made = NativeKernels(request.param, threads=2)
    yield made
    made.close()


def product(kernels: Any, x: Any, parts: list[Any], biases: list[Any] | None = None) -> Any:
    out = np.zeros((len(x), sum(len(part) for part in parts)), np.float32)
    kernels.project_add(x, kernels.matrix(parts, biases or [None] * len(parts)), out)
    return out


def each_row_is_its_own(kernels: Any, parts: list[Any], x: Any) -> None:
    """Check 37 rows against plain arithmetic, and that each has the same bits alone as in any batch."""
    outs = [len(part) for part in parts]
    biases = [random(outs[0], seed=9), *[None for _ in outs[1:]]]
    matrix = kernels.matrix(parts, biases)
    whole = np.zeros((37, sum(outs)), np.float32)
    kernels.project_add(x, matrix, whole)
    want = meaning(x, parts)
    want[:, : outs[0]] += biases[0]
    np.testing.assert_allclose(whole, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())
    cuts = [0, *np.cumsum([1, 2, 3, 4, 5, 6, 7]), 37]
    for low, high in [*pairwise(cuts), *((1, 1 + rows) for rows in range(8, 35))]:
        part = np.zeros((high - low, sum(outs)), np.float32)
        kernels.project_add(x[low:high].copy(), matrix, part)
        assert part.tobytes() == whole[low:high].tobytes(), (low, high)


@pytest.mark.parametrize(("bits", "scale", "minimum"), FORMS)
@pytest.mark.parametrize(("inner", "outs"), [(32, [1]), (96, [16]), (64, [33, 7]), (1024, [50]), (352, [5, 30])])
def test_a_product_follows_the_codes_and_each_row_is_independent(
    kernels: Any, bits: Any, scale: Any, minimum: Any, inner: int, outs: list[int]
) -> None:
    """Rows 1 to 37, odd numbers of groups, outputs that are no multiple of 16."""
    parts = [quantized(out, inner, bits, scale, minimum, seed) for seed, out in enumerate(outs)]
    each_row_is_its_own(kernels, parts, random(37, inner, seed=20))


@pytest.mark.parametrize("bits", [4, 5, 6])
@pytest.mark.parametrize(("inner", "outs"), [(256, [1]), (768, [33, 7]), (1024, [50])])
def test_super_blocks_are_multiplied_by_their_integer_scales(
    kernels: Any, bits: Any, inner: int, outs: list[int]
) -> None:
    """Rows 1 to 37, odd numbers of super-blocks, outputs that are no multiple of 16."""
    parts = [in_blocks(out, inner, bits, seed) for seed, out in enumerate(outs)]
    each_row_is_its_own(kernels, parts, random(37, inner, seed=20))


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_every_code_and_integer_scale_of_a_super_block_is_in_its_place(kernels: Any, bits: Any) -> None:
    """One activation at a time sees one column of codes, and all integer scales in turn."""
    part = in_blocks(40, 512, bits)
    x = 127 * np.eye(512, dtype=np.float32)
    want = meaning(x, [part])
    np.testing.assert_allclose(product(kernels, x, [part]), want, rtol=1e-6, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_the_largest_sums_of_super_blocks_are_exact(kernels: Any, bits: Any) -> None:
    """All codes and integer scales at their ends: nothing saturates, and a group's sum is an exact float."""
    one = np.ones((16, 2), np.float16)
    signs = np.where(np.arange(512) % 3 == 0, -127, 127)
    x = np.stack([np.full(512, 127), np.full(512, -127), signs]).astype(np.float32)
    x[:, GROUP:] = 0  # one group, since the sum of several would be rounded
    for code, whole in ((0, -128), ((1 << bits) - 1, -128), (0, 127), ((1 << bits) - 1, 63)):
        codes = np.full((16, 512), code, np.uint8)
        codes[8:, ::2] = 0
        if bits == 6:
            part = Quantized(6, codes, np.full((16, 32), whole, np.int8), None, one)
        else:
            number = np.full((16, 16), min(63, abs(whole)), np.uint8)
            part = Quantized(bits, codes, number, np.zeros_like(number), one, one)
        weights = codes.astype(np.int64) - (32 if bits == 6 else 0)
        want = x.astype(np.int64) @ (weights * int(part.scale[0, 0])).T
        np.testing.assert_array_equal(product(kernels, x, [part]), want)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_sums_are_exact(kernels: Any, bits: Any) -> None:
    """All codes and activations at either end of their range: nothing saturates, and floats hold the sum."""
    ends = (0, 15) if bits == 4 else (-128, 127)
    for end in ends:
        codes = np.full((16, 64), end, np.uint8 if bits == 4 else np.int8)
        codes[8:, ::2] = ends[0]
        minimum = np.zeros((16, 2), np.float32)
        for lowest in (None, minimum):
            part = Quantized(bits, codes, np.ones((16, 2), np.float32), lowest)
            signs = np.where(np.arange(64) % 3 == 0, -127, 127)
            x = np.stack([np.full(64, 127), np.full(64, -127), signs]).astype(np.float32)
            taken = 8 if bits == 4 and lowest is None else 0
            want = x.astype(np.int64) @ (codes.astype(np.int64) - taken).T
            np.testing.assert_array_equal(product(kernels, x, [part]), want)


def test_every_code_is_in_its_place(kernels: Any) -> None:
    """One activation at a time sees one column of codes."""
    for bits in (4, 8):
        part = quantized(40, 96, bits, np.float32, None)  # type: ignore[arg-type]
        x = 127 * np.eye(96, dtype=np.float32)
        np.testing.assert_allclose(product(kernels, x, [part]), meaning(x, [part]), rtol=1e-6)


@pytest.mark.parametrize("scale", [np.float16, np.float32])
@pytest.mark.parametrize(("table", "values"), [("fp4", FP4), ("iq4", IQ4)])
def test_codes_of_a_table_are_bytes_in_half_the_memory(kernels: Any, table: Any, values: Any, scale: Any) -> None:
    """Products of any height and looked-up rows have the same bits as with values in bytes."""
    rng = np.random.default_rng(3)
    codes, scales = values[rng.integers(0, 16, (33, 96))], rng.uniform(0.5, 2, (33, 3)).astype(scale)
    codes[:2, :16] = values
    small, wide = Quantized(8, codes, scales, table=table), Quantized(8, codes, scales)
    each_row_is_its_own(kernels, [small], random(37, 96, seed=5))
    x = np.concatenate([random(20, 96, seed=6), 127 * np.eye(96, dtype=np.float32)])
    for rows in (1, 7, 16, len(x)):
        assert product(kernels, x[:rows], [small]).tobytes() == product(kernels, x[:rows], [wide]).tobytes()
    made = kernels.matrix([small], [None])
    assert made.nbytes == packed_bytes([(33, 96, form_of(small))]) < packed_bytes([(33, 96, form_of(wide))])
    results = []
    for one in (small, wide):
        hidden = np.zeros((33, 96), np.float32)
        kernels.embed(kernels.table(one), np.arange(33, dtype=np.int32), hidden)
        results.append(hidden.tobytes())
    assert results[0] == results[1] == (codes * np.repeat(scales.astype(np.float32), 32, axis=1)).tobytes()


def test_super_blocks_of_a_table_equal_its_groups_in_less_memory(kernels: Any) -> None:
    """The same bits as with a float for each integer scale, in no more memory than the file takes."""
    small = in_table_blocks(48, 768)
    assert small.block_scale is not None
    scale = small.scale.astype(np.float32) * np.repeat(small.block_scale.astype(np.float32), 8, axis=1)
    each_row_is_its_own(kernels, [small, in_table_blocks(7, 768, 1)], random(37, 768, seed=5))
    x = np.concatenate([random(20, 768, seed=6), 127 * np.eye(768, dtype=np.float32)])
    for rows in (1, 7, 16, len(x)):
        want = product(kernels, x[:rows], [Quantized(8, small.codes, scale, table="iq4")])
        assert product(kernels, x[:rows], [small]).tobytes() == want.tobytes()
    made = kernels.matrix([small], [None])
    assert made.nbytes == packed_bytes([(48, 768, form_of(small))]) == 48 * 3 * 136


@pytest.mark.parametrize("kind", ROW_FORMATS)
@pytest.mark.parametrize(("inner", "outs"), [(256, [1]), (768, [33, 7]), (1024, [50])])
def test_rows_of_a_codebook_equal_their_decoded_blocks(kernels: Any, kind: str, inner: int, outs: list[int]) -> None:
    """Rows 1 to 37 (beyond the rows that share a decoded block), odd numbers of blocks and of outputs."""
    parts = [in_rows(kind, out, inner, seed) for seed, out in enumerate(outs)]
    each_row_is_its_own(kernels, parts, random(37, inner, seed=20))
    x = random(300, inner, seed=21)
    whole = product(kernels, x, parts)
    for low, high in ((0, 128), (60, 261), (299, 300)):
        assert product(kernels, x[low:high], parts).tobytes() == whole[low:high].tobytes()


@pytest.mark.parametrize("kind", ROW_FORMATS)
def test_every_row_and_sign_of_a_codebook_is_in_its_place(kernels: Any, kind: str) -> None:
    """One activation at a time sees one column; a matrix is as small as its file."""
    part, form = in_rows(kind, 48, 512), ROW_FORMATS[kind]
    x = 127 * np.eye(512, dtype=np.float32)
    want = meaning(x, [part])
    np.testing.assert_allclose(product(kernels, x, [part]), want, rtol=1e-6, atol=1e-6 * np.abs(want).max())
    made = kernels.matrix([part], [None])
    assert made.nbytes == packed_bytes([(48, 512, form_of(part))]) == 48 * 2 * form.bytes
    assert len(np.unique(np.abs(form.meaning(part.blocks.reshape(-1, form.bytes))[0]))) == len(np.unique(form.rows))


@pytest.mark.parametrize("kind", ["iq2_xxs", "iq3_xxs"])
def test_rows_with_a_scale_a_group_are_multiplied_as_codes_of_8_bits(kernels: Any, kind: str) -> None:
    """The same bits as the same numbers in bytes, which take four times the memory."""
    part, form = in_rows(kind, 33, 512), ROW_FORMATS[kind]
    codes, scale = form.meaning(part.blocks.reshape(-1, form.bytes))
    wide = Quantized(8, codes.reshape(33, 512), scale.reshape(33, -1))
    x = random(70, 512, seed=6)
    for rows in (1, 7, 16, 70):
        assert product(kernels, x[:rows], [part]).tobytes() == product(kernels, x[:rows], [wide]).tobytes()


def test_activations_are_rounded_as_the_reference_rounds_them(kernels: Any) -> None:
    """Ties, denormals, huge numbers and groups of zeros, seen through weights that single them out."""
    x = np.zeros((6, 64), np.float32)
    x[0, :6] = [127, 0.5, 1.5, -2.5, -127, 63.49]
    x[1, :3], x[1, 32:35] = [1e-40, -1e-38, 0], [1e-29, 2e-29, -3e-30]
    x[2, :2] = [3e38, -1e38]
    x[3] = random(64)
    x[4] = -0.0
    x[5] = np.float32(2.0**-100) * np.arange(64) / 31
    codes, scale = activation_codes(x)
    part = Quantized(8, np.eye(64, dtype=np.int8), np.ones((64, 2), np.float32))
    want = codes.astype(np.float64) * np.repeat(scale.astype(np.float64), GROUP, axis=1)
    np.testing.assert_array_equal(product(kernels, x, [part]), want.astype(np.float32))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_without_numbers_is_nan_and_leaves_its_neighbours_alone(kernels: Any, bits: Any, bad: float) -> None:
    part, x = quantized(40, 96, bits, np.float16, None), random(9, 96)
    clean = product(kernels, x, [part])
    x[4, 35] = bad
    dirty = product(kernels, x, [part])
    assert np.isnan(dirty[4]).all()
    assert np.delete(dirty, 4, 0).tobytes() == np.delete(clean, 4, 0).tobytes()


def test_scales_and_minima_at_their_ends(kernels: Any) -> None:
    """Zero, subnormal halves and the largest half; codes of a group with scale zero add nothing."""
    part = quantized(17, 64, 4, np.float16, np.float16)
    part.scale[:5, 0] = [0, 6e-8, -6e-8, 65504, -65504]
    assert part.minimum is not None
    part.minimum[5:8, 1] = [6e-8, 65504, 0]
    x = random(3, 64)
    want = meaning(x, [part])
    np.testing.assert_allclose(product(kernels, x, [part]), want, rtol=1e-4, atol=1e-4)


def test_parts_of_any_types_in_one_matrix(kernels: Any) -> None:
    """Q4_K_M files mix types within what is one matrix here. Each part's outputs are those it has alone."""
    parts: list[Any] = [
        quantized(20, 256, 4, np.float16, None),
        quantized(7, 256, 4, np.float16, None, 1),
        quantized(33, 256, 4, np.float32, np.float16, 2),
        random(9, 256),
        quantized(16, 256, 8, np.float16, None, 3),
        in_blocks(20, 256, 4, 7),
        in_blocks(19, 256, 6, 8),
        in_blocks(9, 256, 5, 9),
        in_table_blocks(17, 256, 10),
        *(in_rows(kind, 5, 256, 11) for kind in ROW_FORMATS),
        random(5, 256, seed=4).astype(np.float16),
        random(18, 256, seed=5).astype(ml_dtypes.bfloat16),
    ]
    biases = [random(len(part), seed=n) if n % 2 else None for n, part in enumerate(parts)]
    x = random(21, 256, seed=6)
    got = product(kernels, x, parts, biases)
    at = 0
    for part, bias in zip(parts, biases, strict=True):
        assert product(kernels, x, [part], [bias]).tobytes() == got[:, at : at + len(part)].tobytes()
        at += len(part)
    meaningful = ReferenceKernels()
    want = product(meaningful, x, parts, biases)
    meaningful.close()
    np.testing.assert_allclose(got, want, atol=0.1, rtol=0.02)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gated_mlp_and_logits_with_quantised_weights(kernels: Any, activation: str) -> None:
    """The other entry points: a norm before, a gate between, and rows chosen for logits."""
    meaningful = ReferenceKernels()
    hidden, norm = random(21, 64), 1 + 0.1 * random(64, seed=1)
    both = [quantized(96, 64, 4, np.float16, None, n) for n in (2, 3)]
    down = [quantized(64, 96, 8, np.float16, None, 4)]
    results = []
    for one in (kernels, meaningful):
        state = hidden.copy()
        one.gated_mlp(state, norm, 1e-6, one.matrix(both, [None, None]), activation, one.matrix(down, [None]))
        out = np.empty((2, 192), np.float32)
        one.logits(hidden, np.array([20, 3], np.int32), norm, 1e-6, one.matrix(both, [None, None]), out)
        through = np.empty((21, 192), np.float32)
        one.norm_project(hidden, norm, 1e-6, one.matrix(both, [None, None]), through)
        assert through[[20, 3]].tobytes() == out.tobytes()
        results.append((state, out))
    meaningful.close()
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-3, atol=2e-2)
    # A code of the gated values may round the other way: one step of one of 96 inputs.
    assert np.abs(results[0][0] - results[1][0]).max() < 0.01 * np.abs(results[1][0]).max()
    for row in (0, 20):
        alone = hidden[row : row + 1].copy()
        gate_up = kernels.matrix(both, [None, None])
        kernels.gated_mlp(alone, norm, 1e-6, gate_up, activation, kernels.matrix(down, [None]))
        assert alone.tobytes() == results[0][0][row : row + 1].tobytes()


def test_threads_do_not_change_a_bit() -> None:
    x = random(65, 512)
    parts = [quantized(200, 512, bits, np.float16, None) for bits in (4, 8)]
    parts += [in_blocks(200, 512, bits) for bits in (4, 6)]
    for variant in VARIANTS:
        results = []
        for threads in (1, 2, 3):
            made = NativeKernels(variant, threads)
            results.append(product(made, x, parts).tobytes())
            made.close()
        assert len(set(results)) == 1


def test_packed_matrices_take_the_counted_bytes(kernels: Any) -> None:
    for parts in (
        [quantized(20, 64, 4, np.float16, None), random(7, 64), quantized(9, 64, 4, np.float32, np.float16)],
        [quantized(20, 96, 8, np.float16, None), quantized(20, 96, 8, np.float16, None)],
        [in_blocks(20, 768, 4), in_blocks(9, 768, 4), in_blocks(9, 768, 5), in_blocks(17, 768, 6)],
        [random(5, 33).astype(np.float16), random(5, 33).astype(np.float32)],
    ):
        counted = packed_bytes([(*part.shape, form_of(part)) for part in parts])
        assert kernels.matrix(parts, [None] * len(parts)).nbytes == counted
