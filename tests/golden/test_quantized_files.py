"""Quantized safetensors equal the same numbers written out, bit for bit, and transformers within 1e-4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cairn.kernels.base import Quantized
from cairn.kernels.quantized import dequantized
from cairn.models.packing.weight_format import HeldWeights
from cairn.models.quantization.tensor_meta import outlines
from cairn.models.safetensors.coded_weights import CodedWeights
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelFileError
from tests.golden.test_families import check
from tests.quantized_models import BFLOAT16, Pack, awq, compressed, eight, float8, four, gptq, mlx, write_quantized
from tests.tiny_models import MODELS, Driver, load, prompt

FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
DEEPSEEK = {k: v for k, v in MODELS["deepseek 3"].items() if k not in ("hidden_size", "intermediate_size", "head_dim")}


def ct(form: str, bits: int, kind: str = "int", **weights: Any) -> dict[str, Any]:
    own = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "group", **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": own, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


CASES: dict[str, tuple[Pack, dict[str, Any], str]] = {
    "fp8 in blocks": (float8(32, 32), FP8, "FP8"),
    "fp8 of outputs": (float8(1, 0, "weight_scale", BFLOAT16), ct("float-quantized", 8, "float"), "FP8"),
    "fp8 with one scale": (float8(0, 0, "weight_scale"), FP8 | {"weight_block_size": None}, "FP8"),
    "int4, groups of 32": (compressed(4, 32), ct("pack-quantized", 4), ""),
    "int4 of outputs, zero points": (compressed(4, 0, zeros=True), ct("pack-quantized", 4), ""),
    "int4, groups that are no neighbours": (compressed(4, 32, order=True), ct("pack-quantized", 4), "INT4"),
    "int4, groups of 16": (compressed(4, 16), ct("pack-quantized", 4), "INT4"),
    "int8 in words": (compressed(8, 64, np.float16), ct("pack-quantized", 8), ""),
    "int8 of outputs": (eight(0), ct("int-quantized", 8), ""),
    "int8, groups with zero points": (eight(32, zeros=True), ct("int-quantized", 8), ""),
    "mxfp4": (four(32, ""), ct("mxfp4-pack-quantized", 4, "float"), ""),
    "nvfp4": (four(16, "weight_global_scale"), ct("nvfp4-pack-quantized", 4, "float"), "NVFP4"),
    "nvfp4 of modelopt": (four(16, "weight_scale_2"), {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
    "fp8 of modelopt": (float8(0, 0, "weight_scale"), {"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8"),
    "awq": (awq(32), AWQ, ""),
    "gptq": (gptq(4, 32), GPTQ, ""),
    "gptq 2, zero points": (
        gptq(4, 64, shift=0, symmetric=False),
        GPTQ | {"checkpoint_format": "gptq_v2", "sym": False},
        "",
    ),
    "gptq of 8 bits": (gptq(8, 32, symmetric=False), GPTQ | {"bits": 8, "sym": False}, ""),
    "mlx": (mlx(4, 64), {"group_size": 64, "bits": 4}, ""),
    "mlx of 8 bits": (mlx(8, 32), {"group_size": 32, "bits": 8, "mode": "affine"}, ""),
    "gptq with desc_act": (gptq(4, 32, order=True), GPTQ | {"desc_act": True}, "GPTQ"),
}
"""How modules are packed, what the config says, and which part is rounded."""


@pytest.mark.parametrize("name", CASES)
def test_unpacked_numbers_match_the_format(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 bit for bit; as stored exactly if groups allow it, else with the stated error."""
    pack, config, rounds = CASES[name]
    plain, packed = write_quantized(tmp_path, pack, config, ignore=("lm_head", "layers.0.mlp.down_proj"))
    tokens, logits = prompt(40, 160), []
    for model in (plain, packed):
        engine = load(model, weights="f32", kernels="reference")
        driver = Driver(engine, monkeypatch)
        logits.append(driver.logits(tokens, [40], driver.tables(40)))
        engine.close()
    np.testing.assert_array_equal(logits[0], logits[1])

    spec = load_spec(packed)
    want, held = open_weights(plain, spec), HeldWeights(open_weights(packed, spec), "stored")
    said = f"stored, {rounds} rounded to 8 bits with an error below 1 %" if rounds else "stored"
    assert held.note() == said
    known = outlines(held)
    coded = 0
    for tensor in want:
        one = held[tensor]
        if not isinstance(one, Quantized):
            np.testing.assert_array_equal(np.asarray(one, np.float32), want[tensor])
            continue
        coded += 1
        assert known[tensor].bits == one.bits and one.nbytes <= known[tensor].made
        if rounds:
            error = np.linalg.norm(dequantized(one) - want[tensor]) / np.linalg.norm(want[tensor])
            assert 0 < error < 0.01 and held.errors[tensor] == pytest.approx(error, rel=1e-3)
        else:
            np.testing.assert_array_equal(dequantized(one), want[tensor])
    assert coded == 13, "seven modules in each of two layers, but for the one that is ignored"


RULES = (
    *("llama 4", "gemma 3n", "gemma 4 e", "gemma 4 moe", "mixtral", "glm 4.5", "deepseek 2 lite", "phi 4", "hunyuan"),
    *("apertus", "qwen 3.5 moe", "qwen 3 next", "lfm 2 moe", "granite 4 hybrid", "nemotron h moe"),
)


@pytest.mark.parametrize("name", RULES)
def test_families_with_rules_of_their_own_find_their_tensors_in_quantised_modules(name: str, tmp_path: Path) -> None:
    """Whether the family splits, rotates or reorders what it stores."""
    config = FP8 | {"weight_block_size": [8, 8]}
    sizes = {"hidden_size": 48, "intermediate_size": 80, "head_dim": 16}  # as in tiny models
    plain, packed = write_quantized(tmp_path, float8(8, 8), config, **{**sizes, **MODELS[name]})
    spec = load_spec(packed)
    want, got = open_weights(plain, spec), open_weights(packed, spec)
    assert isinstance(got, CodedWeights) and sum(got.kind(one)[0] == "FP8" for one in got) >= 7
    for tensor in want:
        np.testing.assert_array_equal(np.asarray(got[tensor], np.float32), np.asarray(want[tensor], np.float32))


def test_experts_that_mlx_joined_are_read_one_by_one(tmp_path: Path) -> None:
    """mlx_lm.convert stacks them: `switch_mlp` instead of `experts.0` and so on."""
    fields = {**MODELS["qwen 3 moe"], "head_dim": 16, "moe_intermediate_size": 64}
    plain, packed = write_quantized(tmp_path, mlx(4, 32), {"group_size": 32, "bits": 4}, **fields)
    stored = load_file(packed / "model.safetensors")
    joined = {name: one for name, one in stored.items() if ".experts." not in name}
    for layer in range(2):
        place = f"model.layers.{layer}.mlp"
        for end in (
            f"{part}_proj.{kind}" for part in ("gate", "up", "down") for kind in ("weight", "scales", "biases")
        ):
            every = [stored[f"{place}.experts.{expert}.{end}"] for expert in range(fields["num_experts"])]
            joined[f"{place}.switch_mlp.{end}"] = np.stack(every)
    save_file(joined, packed / "model.safetensors")
    spec = load_spec(packed)
    want, got = open_weights(plain, spec), open_weights(packed, spec)
    assert isinstance(got, CodedWeights) and set(got) == set(want)
    for tensor in want:
        np.testing.assert_array_equal(np.asarray(got[tensor], np.float32), np.asarray(want[tensor], np.float32))
    del joined["model.layers.1.mlp.switch_mlp.up_proj.biases"]
    save_file(joined, packed / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"switch_mlp\.up_proj\.biases must be present, found nothing"):
        open_weights(packed, spec)


FAMILIES: dict[str, tuple[Pack, dict[str, Any], dict[str, Any]]] = {
    "qwen 3": (awq(64), AWQ, {"architecture": "Qwen3ForCausalLM"}),
    "experts": (float8(32, 32), FP8, {"architecture": "Qwen3MoeForCausalLM", "moe_intermediate_size": 64}),
    "fused": (compressed(4, 32), ct("pack-quantized", 4), {"architecture": "Phi3ForCausalLM", "pad_token_id": 0}),
    "latents": (float8(8, 16), FP8 | {"weight_block_size": [8, 16]}, DEEPSEEK),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_that_split_or_rotate_stored_tensors(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, config, fields = FAMILIES[name]
    fields = {**MODELS["qwen 3 moe"], "head_dim": 16, **fields} if name == "experts" else fields
    plain, packed = write_quantized(tmp_path, pack, config, **{**fields, "hidden_size": 64, "intermediate_size": 128})
    check(plain, monkeypatch)
    spec = load_spec(packed)
    want, got = open_weights(plain, spec), open_weights(packed, spec)
    for tensor in want:
        np.testing.assert_array_equal(np.asarray(got[tensor], np.float32), want[tensor])
    engine = load(packed, weights="stored")
    driver = Driver(engine, monkeypatch)
    logits = driver.logits(prompt(40, 160), [17, 23], driver.tables(40))
    engine.close()
    assert np.isfinite(logits).all()
