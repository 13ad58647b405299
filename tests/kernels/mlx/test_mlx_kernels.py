"""Every kernel in MLX compared with the reference, on MLX's CPU."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed: its kernels are not tested")

import mlx.core as mx

from cairn.kernels.base import EFFECTS, Packed, Quantized
from cairn.kernels.codebooks import ROW_FORMATS
from cairn.kernels.mlx.cells import from_numpy
from cairn.kernels.mlx.mlx_kernels import MlxKernels
from cairn.kernels.mlx.weights import CodedPart, FloatPart, stacked
from cairn.kernels.quantized import dequantized
from cairn.kernels.reference import ReferenceKernels
from cairn.models.quantization.dequant import FP4
from tests.kernels.arguments import Call, Weights, calls, quantized
from tests.kernels.test_quantized import in_rows, in_table_blocks


def results(call: Call, kernels: ReferenceKernels | MlxKernels) -> list[np.ndarray]:
    arguments = call.given(kernels)
    with np.errstate(all="ignore"):
        getattr(kernels, call.kernel)(*arguments)
    changed = [np.asarray(kernels.fetch(arguments[place]), np.float64) for place in EFFECTS[call.kernel].changes]
    kernels.close()
    return changed


def bound(call: Call) -> float:
    """Return the noise of another order of sums; with packed weights also of the rounded activations, which MLX has
    not.
    """
    packed = [part for argument in call.arguments if isinstance(argument, Weights) for part in argument.parts]
    return 0.02 if any(isinstance(part, Packed) for part in packed) else 2e-4


@pytest.mark.parametrize("kernel", sorted(EFFECTS))
def test_a_kernel_equals_the_reference(kernel: str) -> None:
    for call in (call for call in calls() if call.kernel == kernel):
        for ours, theirs in zip(results(call, MlxKernels("cpu")), results(call, ReferenceKernels()), strict=True):
            most = bound(call) * np.abs(theirs).max(initial=1e-9)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=most, err_msg=str(call.arguments)[:300])


@pytest.mark.parametrize("kernel", sorted(EFFECTS))
def test_narrow_products_are_within_the_rounding_of_their_weights(kernel: str) -> None:
    """As on a GPU: activations are rounded to the weights' type, bfloat16 or float16."""
    for call in (call for call in calls() if call.kernel == kernel):
        kernels = MlxKernels("cpu", narrow=True)
        for ours, theirs in zip(results(call, kernels), results(call, ReferenceKernels()), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=0.02 * np.abs(theirs).max(initial=1e-9))


def test_narrow_products_hold_numbers_beyond_float16() -> None:
    """And very small ones in other rows of the batch."""
    rng = np.random.default_rng(3)
    weights = (rng.standard_normal((24, 64)) / 8).astype(np.float16)
    x = (rng.standard_normal((3, 64)) * np.array([[1e6], [1], [1e-6]])).astype(np.float32)
    call = Call("project", (x, Weights([weights]), np.zeros((3, 24), np.float32)))
    ours, theirs = results(call, MlxKernels("cpu", narrow=True))[0], results(call, ReferenceKernels())[0]
    assert (np.abs(ours - theirs).max(axis=1) < 2e-3 * np.abs(theirs).max(axis=1)).all()


@pytest.mark.parametrize("kernel", ["attention", "latent_attention"])
@pytest.mark.parametrize("single", [False, True])
def test_memory_that_a_row_does_not_see_may_hold_anything(kernel: str, single: bool) -> None:
    """Non-finite numbers behind its end, and in other sequences' blocks."""
    for call in (call for call in calls() if call.kernel == kernel):
        query, kv, layer, rows, tables, *more = call.arguments
        if single:  # the last token of each row
            rows = np.array(
                [[at, 1, start + count - 1] for at, (_, count, start) in enumerate(rows.tolist())], np.int32
            )
            query = query[: len(rows)]
            out = next(at for at, one in enumerate(more) if isinstance(one, np.ndarray))
            more[out] = more[out][: len(rows)]
        known = np.zeros((len(kv), kv.shape[4]), bool)
        for (_, count, start), table in zip(rows.tolist(), tables.tolist(), strict=True):
            for position in range(start + count):
                known[table[position // 16], position % 16] = table[position // 16] >= 0
        outputs = []
        for outside in (0, np.nan, np.inf):
            pool = np.where(known[:, None, None, None, :, None], kv.astype(np.float32), outside).astype(kv.dtype)
            asked = Call(kernel, (query, pool, layer, rows, tables, *more))
            outputs.append(results(asked, MlxKernels("cpu"))[0])
        assert np.isfinite(outputs[0]).all()
        np.testing.assert_array_equal(outputs[1], outputs[0])
        np.testing.assert_array_equal(outputs[2], outputs[0])


def held(part: Packed) -> tuple[CodedPart | FloatPart, np.ndarray]:
    """Return how a matrix is stored, and its numbers."""
    kernels = MlxKernels("cpu")
    made = kernels.matrix([part], [None])
    with kernels.active():
        return made.parts[0], np.array(made.rows(mx.arange(len(part))))


@pytest.mark.parametrize("kind", ["q8_0", "q8 minimum", "q4_0", "q4_1", "q4_k", "q5_k"])
def test_codes_in_groups_of_32_are_held_as_they_are(kind: str) -> None:
    """Their scales are exact; dequantising is one multiplication and one addition in float32."""
    rng = np.random.default_rng(3)
    part = quantized(rng, 24, 256, kind)
    weight, numbers = held(part)
    assert isinstance(weight, CodedPart) and weight.bits == part.bits and weight.group == 32
    wanted = dequantized(part)
    assert np.abs(numbers - wanted).max() <= 2e-5 * np.abs(wanted).max()


def test_neighbouring_groups_with_equal_scales_are_joined() -> None:
    """As in a matrix whose file has groups of 64 or 128."""
    rng = np.random.default_rng(3)
    part = quantized(rng, 24, 256, "q4_1")
    for size in (64, 128):
        for one in (part.scale, part.minimum):
            assert one is not None
            one[...] = np.repeat(one[:, :: size // 32], size // 32, axis=1)
        weight, numbers = held(part)
        assert isinstance(weight, CodedPart) and weight.group == size
        np.testing.assert_allclose(numbers, dequantized(part), rtol=0, atol=1e-6)


def test_mxfp4_is_held_in_its_four_bits() -> None:
    """And 4-bit codes with other scales use eight."""
    rng = np.random.default_rng(3)
    codes = FP4[rng.integers(0, 16, (24, 64))]
    scale = np.ldexp(np.float32(1), rng.integers(-90, 90, (24, 2))).astype(np.float32)
    part = Quantized(8, codes, scale, table="fp4")
    weight, numbers = held(part)
    assert isinstance(weight, CodedPart) and (weight.mode, weight.bits) == ("mxfp4", 4)
    np.testing.assert_array_equal(numbers, dequantized(part))
    low = Quantized(8, codes, np.full((24, 2), 2.0**-8, np.float32), table="fp4")
    x = rng.standard_normal((3, 64)).astype(np.float32)
    for call in (
        Call("project", (x, Weights([low]), np.zeros((3, 24), np.float32))),
        Call("embed", (Weights([low]), np.array([3, 0, 23], np.int32), np.zeros((3, 64), np.float32))),
    ):
        for narrow in (False, True):
            ours, theirs = results(call, MlxKernels("cpu", narrow=narrow))[0], results(call, ReferenceKernels())[0]
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=0.02 * np.abs(theirs).max())
    weight, numbers = held(Quantized(8, codes, 3 * scale, table="fp4"))
    assert isinstance(weight, CodedPart) and (weight.mode, weight.bits) == ("affine", 8)


def test_experts_whose_scales_have_other_types_are_joined_as_codes() -> None:
    """One has scales that bfloat16 holds, and groups of 64."""
    rng = np.random.default_rng(3)
    first, second = (quantized(rng, 64, 64, "q4_1") for _ in range(2))
    for one in (second.scale, second.minimum):
        assert one is not None
        one[...] = 2.0**-6
    kernels = MlxKernels("cpu")
    matrices = [kernels.matrix([one], [None]) for one in (first, second)]
    assert len({matrix.parts[0].group for matrix in matrices}) == 2
    numbers = [dequantized(one) for one in (first, second)]
    with kernels.active():
        joined = stacked(matrices)
        assert isinstance(joined.parts[0], CodedPart) and stacked(matrices) is joined
        x = rng.standard_normal((3, 64)).astype(np.float32)
        which = np.array([[0, 1], [1, 0], [1, 1]], np.int32)
        made = np.array(joined.product(from_numpy(x)[:, None], from_numpy(which)))
    for row, choice in enumerate(which.tolist()):
        for place, expert in enumerate(choice):
            np.testing.assert_allclose(made[row, place], numbers[expert] @ x[row], rtol=0, atol=1e-4)


def test_six_bits_in_groups_of_16_become_float16() -> None:
    part = quantized(np.random.default_rng(3), 24, 256, "q6_k")
    weight, numbers = held(part)
    assert isinstance(weight, FloatPart) and weight.weight.dtype == mx.float16
    np.testing.assert_array_equal(numbers, dequantized(part).astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("part", [in_table_blocks(20, 512), *(in_rows(kind, 20, 512) for kind in ROW_FORMATS)])
def test_iq_weights_are_the_numbers_of_their_file(part: Packed) -> None:
    """As 8-bit codes in groups of 32, or in float16."""
    weight, numbers = held(part)
    wanted = dequantized(part)
    most = 2e-5 if isinstance(weight, CodedPart) else 2.0**-11
    assert np.abs(numbers - wanted).max() <= most * np.abs(wanted).max()
