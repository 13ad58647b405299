"""The form in which weights are held, and what models compute with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from cairn.kernels.base import Packed, Quantized
from cairn.kernels.codebooks import RowBlocks
from cairn.kernels.quantized import dequantized
from cairn.models.packing.random_weights import shape_spec
from cairn.models.packing.weight_format import HeldWeights, error_line, form_of
from cairn.models.quantization.dequant import KINDS, dequantize
from cairn.models.quantization.tensor_meta import outlines
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from tests.gguf_files import write_gguf
from tests.models.quantization.test_quantize import random_blocks
from tests.tiny_models import BFLOAT16, write_model

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 256}
PACKED = [kind for kind in KINDS.values() if kind.dtype is None]
QUERY, DOWN = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"


def tame(array: np.ndarray, kind: Type) -> np.ndarray:
    """Return random packed rows of the right size, with scales that keep values about as large as `array`'s."""
    one = KINDS[int(kind)]
    blocks = random_blocks(one, array.size // one.values, len(array))
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "TQ1_0": (52,)}
    places |= {"TQ2_0": (64,)}
    halves = places.get(one.name, (0, 2) if one.name in ("Q4_1", "Q5_1") else (0,))

    def scaled(factor: float) -> np.ndarray:
        if one.name == "IQ1_M":  # two bytes of its last eight hold four bits of its scale each
            half = np.array([factor], np.float16).view(np.uint16)[0]
            for place in range(4):
                above = blocks[:, 49 + 2 * place]
                blocks[:, 49 + 2 * place] = above & 15 | np.uint8(half >> 4 * place & 15) << np.uint8(4)
        elif one.name == "MXFP4":
            blocks[:, 0] = 127 + round(np.log2(factor))
        else:
            for at in halves:
                # Minima of Q4_1 and Q5_1 are added, those of K types subtracted, times positive numbers.
                half = (
                    -7.5 * factor
                    if one.name == "Q4_1" and at
                    else -15.5 * factor
                    if at and "_1" in one.name
                    else factor
                )
                blocks[:, at : at + 2] = np.array([half], np.float16).view(np.uint8)
        return blocks

    spread = dequantize(one, scaled(1.0)).std()
    return scaled(float(array.std() / spread)).reshape(len(array), -1).copy()


def packed_model(tmp_path: Path, kind: Any, family: str = "LlamaForCausalLM") -> Path:
    folder = write_model(tmp_path / "hub", family, **SIZES)
    return write_gguf(folder, tmp_path / "model.gguf", kind=kind, packed=tame)


def held(place: Path, form: Any) -> HeldWeights:
    return HeldWeights(open_weights(place, load_spec(place)), form)


def numbers(weight: Any) -> np.ndarray:
    return dequantized(weight) if isinstance(weight, Packed) else np.asarray(weight, np.float32)


def nbytes(weight: Any) -> int:
    return int(weight.nbytes)


def test_auto_holds_a_small_model_in_floats_and_others_as_they_are_stored() -> None:
    assert form_of(shape_spec("demo"), "auto") == "f32" and form_of(shape_spec("qwen3-0.6b"), "auto") == "stored"
    for form in ("stored", "f32", "bf16", "int8", "int4"):
        assert form_of(shape_spec("demo"), form) == form


@pytest.mark.parametrize("kind", PACKED, ids=[kind.name for kind in PACKED])
def test_stored_forms_hold_the_numbers_of_the_file(kind: Any, tmp_path: Path) -> None:
    """Also where llama's rows of q and k are reordered, which moves the codes."""
    path = packed_model(tmp_path, Type[kind.name])
    plain, packed = open_weights(path, load_spec(path)), held(path, "stored")
    known = outlines(packed)
    for name in (QUERY, DOWN, "model.embed_tokens.weight", "model.norm.weight"):
        weight = packed[name]
        if "norm" in name:
            assert isinstance(weight, np.ndarray) and known[name].dtype == "float32"
            continue
        if kind.rows:
            assert isinstance(weight, RowBlocks) and (weight.kind, known[name].form) == (kind.rows, kind.rows)
            assert (
                weight.nbytes == weight.shape[0] * weight.shape[1] // 256 * kind.bytes
                and known[name].bits == weight.bits
            )
            assert known[name].made == weight.nbytes * (2 if name == QUERY else 1)
            np.testing.assert_array_equal(numbers(weight), plain[name])
            continue
        assert isinstance(weight, Quantized) and weight.bits == kind.bits and weight.table == kind.table
        assert known[name].bits == (4 if kind.table else kind.bits)
        # Scales become float32 where they may be too small or too large for float16.
        narrowed = 2 * weight.scale.size if kind.scaled[0] == "float32" and weight.scale.dtype == np.float16 else 0
        assert known[name].made == (nbytes(weight) + narrowed) * (2 if name == QUERY else 1)
        if kind.split is not None:
            np.testing.assert_array_equal(numbers(weight), plain[name])
        else:
            error = np.linalg.norm(numbers(weight) - plain[name]) / np.linalg.norm(plain[name])
            assert 0 < error < 0.01 and packed.errors[name] == pytest.approx(error, rel=1e-3)
    assert bool(packed.errors) == (not kind.exact)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
def test_floats_are_held_in_the_form_that_is_asked_for(dtype: Any, tmp_path: Path) -> None:
    folder = write_model(tmp_path, dtype=dtype, **SIZES)
    plain = open_weights(folder, load_spec(folder))
    limits = {"f32": 0.0, "stored": 0.0, "bf16": 0.003, "int8": 0.006, "int4": 0.09}
    for form, limit in limits.items():
        weights = held(folder, form)
        known = outlines(weights)
        for name in plain:
            one, want = weights[name], np.asarray(plain[name], np.float32)
            error = np.linalg.norm(numbers(one) - want) / np.linalg.norm(want)
            assert error <= limit * (want.ndim > 1), (form, name)
            assert weights.errors.get(name, 0.0) == pytest.approx(error, rel=1e-3)
            dtypes = str(one.codes.dtype) if isinstance(one, Quantized) else str(one.dtype)
            assert (known[name].shape, known[name].dtype) == (one.shape, dtypes)
            if form in ("int8", "int4") and want.ndim > 1:
                assert isinstance(one, Quantized) and known[name].made == nbytes(one)
                eight = form == "int8" or name in ("model.embed_tokens.weight", "lm_head.weight")
                assert one.bits == (8 if eight else 4)
        assert bool(weights.errors) == (limit > 0 and not (form == "bf16" and dtype is BFLOAT16))


def test_matrices_without_groups_of_32_stay_as_they_are(tmp_path: Path) -> None:
    folder = write_model(tmp_path, hidden_size=48, intermediate_size=80, vocab_size=64)
    for name, weight in held(folder, "int4").items():
        assert isinstance(weight, np.ndarray) or not weight.shape[1] % 32, name
        assert str(weight.dtype if isinstance(weight, np.ndarray) else weight.codes.dtype) in ("float32", "uint8")


def test_packed_tensors_are_rounded_again_only_to_fewer_bits(tmp_path: Path) -> None:
    eight = packed_model(tmp_path / "8", Type.Q8_0)
    for form, bits in (("int8", 8), ("int4", 4)):
        weight = held(eight, form)[DOWN]
        assert isinstance(weight, Quantized) and weight.bits == bits
    four = packed_model(tmp_path / "4", Type.Q4_1)
    for form in ("int8", "int4", "stored"):
        weights = held(four, form)
        weight = weights[DOWN]
        assert isinstance(weight, Quantized) and weight.bits == 4 and weight.minimum is not None and not weights.errors
    six = packed_model(tmp_path / "6", Type.Q6_K)
    for form, bits in (("stored", 6), ("int8", 6), ("int4", 4)):
        weight = held(six, form)[DOWN]
        assert isinstance(weight, Quantized) and weight.bits == bits and (weight.block_scale is None) == (bits == 4)
    wide = held(four, "bf16")[DOWN]
    assert isinstance(wide, np.ndarray) and wide.dtype == ml_dtypes.bfloat16


def test_rounded_formats_are_reported_before_anything_is_read(tmp_path: Path) -> None:
    """In each form: the types reported beforehand are exactly those that lose something when read."""
    eight, four = "rounded to 8 bits with an error below 1 %", "rounded to 4 bits with an error of about 8 %"
    two = packed_model(tmp_path / "2", lambda name, array: Type.Q2_K if "down" in name else Type.Q4_K)
    assert held(two, "stored").note() == f"stored, Q2_K {eight}"
    assert held(two, "int8").note() == f"int8, Q2_K {eight}"
    assert held(two, "int4").note() == f"int4, Q2_K {four}"
    assert held(two, "bf16").note() == "bf16, Q2_K and Q4_K rounded to bfloat16 with an error below 0.2 %"
    assert held(two, "f32").note() == "f32"
    six = packed_model(tmp_path / "6", Type.Q6_K)
    assert [held(six, form).note() for form in ("stored", "int8", "int4")] == ["stored", "int8", f"int4, Q6_K {four}"]
    plain = write_model(tmp_path / "plain", dtype=BFLOAT16, **SIZES)
    assert [held(plain, form).note() for form in ("stored", "bf16", "f32")] == ["stored", "bf16", "f32"]
    assert held(plain, "int8").note() == f"int8, BF16 {eight}"
    assert held(plain, "int4").note() == f"int4, BF16 {four}, BF16 {eight}"
    for folder in (two, six, plain):
        for form in ("stored", "f32", "bf16", "int8", "int4"):
            weights = held(folder, form)
            assert len([weights[name] for name in weights]) and bool(weights.errors) == ("rounded" in weights.note())


def test_the_rounding_error_is_reported_in_one_sentence() -> None:
    assert error_line({}, 5) is None
    line = error_line({"a.weight": 0.01, "b.weight": 0.03}, 5)
    assert line == "2 of 5 tensors were rounded: relative error 2.00% in the mean, 3.00% at most (b.weight)"


def test_every_form_has_a_name_that_options_know() -> None:
    from cairn.config.option import options

    (option,) = (option for option in options() if option.name == "weights")
    for name in option.choices:
        assert form_of(msgspec.structs.replace(shape_spec("demo")), name) in ("stored", "f32", "bf16", "int8", "int4")
