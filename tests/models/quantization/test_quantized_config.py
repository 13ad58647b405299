"""The contents of a quantization_config, and modules whose tensors do not fit each other."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cairn.models.safetensors.weights import open_tensors, open_weights
from cairn.models.spec.config import bytes_by_format, identity_of, load_spec
from cairn.types.errors import ModelError, ModelFileError
from tests.models.test_file_fuzz import bend
from tests.quantized_models import awq, compressed, eight, float8, four, gptq, mlx, write_quantized
from tests.tiny_models import write_config

PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def group(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "the method 'bitsandbytes' is not supported for saf"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "the quant_algo 'W4A8_AWQ' of modelopt"),
        ({"group_size": 64, "bits": 6, "mode": "affine"}, "mlx with 6 bits in groups of 64"),
        ({"group_size": 16, "bits": 4}, "mlx with 4 bits in groups of 16"),
        ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, "mlx in the mode 'mxfp4'"),
        (
            {"group_size": 64, "bits": 4, "model.layers.1.mlp.down_proj": {"group_size": 64, "bits": 3}},
            "mlx with 3 bits",
        ),
        ({"group_size": 64, "bits": 4, "lm_head": {"group_size": 64}}, "bits must be a whole number"),
        ({"quant_method": "mxfp4"}, "the method 'mxfp4'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 in 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two whole numbers"),
        ({"quant_method": "awq", "bits": 3}, "awq with 3 bits"),
        ({"quant_method": "awq", "version": "gemv"}, "the version 'gemv' of awq"),
        ({"quant_method": "gptq", "bits": 3}, "gptq with 3 bits"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "the checkpoint_format 'marlin' of gptq"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:exllamav2"}, "the method 'auto_round:exllamav2'"),
        (PACKED | {"format": "marlin-24"}, "the format 'marlin-24'"),
        (PACKED | {"quantization_status": "frozen"}, "the quantization_status 'frozen'"),
        (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "the sparsity 'sparse-24-bitmask'"),
        (PACKED | group(type="float", num_bits=6), "weights of the type 'float' with 6 bits"),
        (PACKED | group(type="int", num_bits=2), "weights of the type 'int' with 2 bits"),
    ],
)
def test_unsupported_quantisation_is_refused_by_name(config: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    """From the config alone: there are no weights here."""
    folder = write_config(tmp_path, architecture="LlamaForCausalLM", quantization_config=config)
    with pytest.raises(ModelError, match=sentence) as caught:
        load_spec(folder)
    if "must be" not in sentence:
        assert "supported are fp8 (e4m3)" in str(caught.value)


MODULE = "model.layers.1.mlp.up_proj"
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, np.ndarray | None], str]] = {
    "no scale": (
        float8(32, 32),
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        {"weight_scale_inv": None},
        "weight_scale must be numbers",
    ),
    "too few blocks": (
        float8(32, 32),
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        {},
        r"weight_scale_inv must be scales of a matrix \[\d+, \d+\] in blocks of 16 x 16, of outputs, or one, found",
    ),
    "no shape": (compressed(4, 32), PACKED, {"weight_shape": None}, "weight_shape must be present, found nothing"),
    "another shape": (
        compressed(4, 32),
        PACKED,
        {"weight_shape": np.array([128, 72])},
        r"weight_packed must be a matrix \[128, 72\] in words of 4 or 8 bits",
    ),
    "another type": (
        compressed(4, 32),
        PACKED,
        {"weight_packed": np.zeros((128, 8), np.float32)},
        "weight_packed must be of 2 dimensions in int32 or uint8, found float32",
    ),
    "groups that are not whole": (
        eight(0),
        PACKED | {"format": "int-quantized"},
        {"weight_scale": np.ones((128, 5), np.float32)},
        r"weight_scale must be scales of a matrix \[128, 64\], in whole groups",
    ),
    "zero points of others": (
        awq(32),
        {"quant_method": "awq", "bits": 4},
        {"qzeros": np.zeros((1, 16), np.int32)},
        r"qzeros must be of the shape \[2, 16\], found int32 of shape \[1, 16\]",
    ),
    "a group that is not there": (
        gptq(4, 32),
        {"quant_method": "gptq", "bits": 4},
        {"g_idx": np.full(64, 2, np.int32)},
        "g_idx must be a group below 2 for each of 64 inputs",
    ),
    "too many inputs": (
        gptq(4, 32),
        {"quant_method": "gptq", "bits": 4},
        {"qweight": np.zeros((12, 128), np.int32), "g_idx": np.arange(96, dtype=np.int32) // 48},
        r"up_proj\.weight has the shape \[128, 96\], expected \[128, 64\] from config\.json",
    ),
    "scales of another size": (
        four(16, "weight_global_scale"),
        PACKED | {"format": "nvfp4-pack-quantized"},
        {"weight_scale": np.zeros((128, 4), np.uint8)},
        r"weight_scale must be a scale for each 32 of a matrix \[128, 64\], found uint8",
    ),
    "two for all": (
        four(16, "weight_global_scale"),
        PACKED | {"format": "nvfp4-pack-quantized"},
        {"weight_global_scale": np.ones(2, np.float32)},
        "weight_global_scale must be one number in float32",
    ),
    "mlx with wrong groups": (
        mlx(4, 32),
        {"group_size": 64, "bits": 4},
        {},
        "must be numbers of a matrix .* of 4 bits in groups of 64",
    ),
    "mlx without biases": (
        mlx(4, 64),
        {"group_size": 64, "bits": 4},
        {"biases": None},
        "biases must be of 2 dim|present",
    ),
    "mlx of several experts": (
        mlx(4, 64),
        {"group_size": 64, "bits": 4},
        {"weight": np.zeros((2, 128, 8), np.uint32)},
        "weight must be of 2 dimensions",
    ),
    "plain too": (
        awq(32),
        {"quant_method": "awq", "bits": 4},
        {"weight": np.zeros((128, 64), np.float32)},
        "is stored under two names",
    ),
}


def test_modules_that_mlx_packed_in_their_own_way_are_read_so(tmp_path: Path) -> None:
    """The config names them; modules set to false there are plain."""
    own = {"group_size": 32, "bits": 8}
    config = {"group_size": 64, "bits": 4, MODULE: own, "model.layers.0.mlp.up_proj": False}
    plain, folder = write_quantized(tmp_path, mlx(4, 64), config, ignore=("lm_head", "layers.0.mlp.up_proj"))
    tensors, wanted = open_tensors(folder / "model.safetensors"), open_tensors(plain / "model.safetensors")
    parts, values = mlx(8, 32)(np.array(wanted[f"{MODULE}.weight"]), np.random.default_rng(3))
    save_file(tensors | {f"{MODULE}.{end}": array for end, array in parts.items()}, folder / "model.safetensors")
    config_file = folder / "config.json"
    whole = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(whole | {"quantization": whole["quantization_config"]}))
    spec = load_spec(folder)
    np.testing.assert_array_equal(open_weights(folder, spec)[f"{MODULE}.weight"], values)


@pytest.mark.parametrize("name", CASES)
def test_modules_whose_tensors_do_not_fit_are_named(name: str, tmp_path: Path) -> None:
    pack, config, changed, sentence = CASES[name]
    _, folder = write_quantized(tmp_path, pack, config)
    tensors = open_tensors(folder / "model.safetensors")
    for end, array in changed.items():
        if array is None:
            del tensors[f"{MODULE}.{end}"]
        else:
            tensors[f"{MODULE}.{end}"] = array
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=sentence):
        open_weights(folder, load_spec(folder))


def test_parts_may_lie_in_two_files_and_biases_of_zeros_and_scales_of_activations_are_set_aside(tmp_path: Path) -> None:
    _, folder = write_quantized(tmp_path, gptq(4, 32), {"quant_method": "gptq", "bits": 4})
    whole = open_weights(folder, load_spec(folder))
    tensors = open_tensors(folder / "model.safetensors")
    tensors |= {f"{MODULE}.bias": np.zeros(128, np.float16), f"{MODULE}.input_scale": np.ones(1, np.float32)}
    (folder / "model.safetensors").unlink()
    homes = {name: f"{'two' if name.endswith('scales') else 'one'}.safetensors" for name in tensors}
    for home in ("one", "two"):
        part = {name: tensors[name] for name, one in homes.items() if one.startswith(home)}
        save_file(part, folder / f"{home}.safetensors")
    text = str({"weight_map": homes}).replace("'", '"')
    (folder / "model.safetensors.index.json").write_text(text)
    split = open_weights(folder, load_spec(folder))
    assert sorted(split) == sorted(whole)
    for name in whole:
        np.testing.assert_array_equal(split[name], whole[name])


def test_a_group_index_of_minus_one_keeps_the_order(tmp_path: Path) -> None:
    """compressed-tensors writes -1 for every input whose group was never reordered."""
    _, folder = write_quantized(tmp_path, compressed(4, 32), PACKED | group(type="int", num_bits=4))
    whole = open_weights(folder, load_spec(folder))
    tensors = open_tensors(folder / "model.safetensors")
    for name in [tensor for tensor in tensors if tensor.endswith(".weight_shape")]:
        inputs = int(tensors[name][1])
        tensors[name.replace("weight_shape", "weight_g_idx")] = np.full(inputs, -1, np.int32)
    save_file(tensors, folder / "model.safetensors")
    weights = open_weights(folder, load_spec(folder))
    for name in whole:
        np.testing.assert_array_equal(weights[name], whole[name])


def test_bytes_are_counted_by_the_files_formats(tmp_path: Path) -> None:
    """The codes are not converted for that."""
    _, folder = write_quantized(tmp_path, awq(32), {"quant_method": "awq", "bits": 4})
    sizes = bytes_by_format(folder, load_spec(folder))
    tensors = open_tensors(folder / "model.safetensors")
    packed = sum(
        tensor.nbytes for name, tensor in tensors.items() if name.rpartition(".")[2] in ("qweight", "qzeros", "scales")
    )
    assert sizes["AWQ"] == packed and sizes["F32"] == sum(tensor.nbytes for tensor in tensors.values()) - packed


def test_numbers_of_8_bits_without_a_config_that_says_so_are_refused(tmp_path: Path) -> None:
    _, folder = write_quantized(tmp_path, float8(32, 32), {"quant_method": "fp8", "weight_block_size": [32, 32]})
    text = (folder / "config.json").read_text().replace("quantization_config", "other")
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"scale_inv' belongs to quantised weights, but config\.json does not"):
        open_weights(folder, load_spec(folder))


def test_the_configs_reading_of_the_same_bytes_is_part_of_the_identity(tmp_path: Path) -> None:
    """KV computed with zero points one higher belongs to another model."""
    config = {"quant_method": "gptq", "bits": 4}
    _, folder = write_quantized(tmp_path, gptq(4, 32, symmetric=False), config)
    path = folder / "config.json"
    first = identity_of(load_spec(folder), folder)
    changed = json.loads(path.read_text()) | {"quantization_config": config | {"checkpoint_format": "gptq_v2"}}
    path.write_text(json.dumps(changed))
    assert identity_of(load_spec(folder), folder) != first
    path.write_text(json.dumps(changed | {"quantization_config": config | {"tokenizer": "x"}}))
    assert identity_of(load_spec(folder), folder) == first


FUZZED: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp8": (float8(32, 32), {"quant_method": "fp8", "weight_block_size": [32, 32], "fmt": "e4m3"}),
    "compressed": (compressed(4, 32, zeros=True), PACKED | {"ignore": ["lm_head"]} | group(type="int", num_bits=4)),
    "gptq": (gptq(4, 32), {"quant_method": "gptq", "bits": 4, "sym": True, "checkpoint_format": "gptq"}),
}


@pytest.mark.parametrize("name", FUZZED)
def test_bent_configs_and_tensors_load_or_are_a_model_error(name: str, tmp_path: Path) -> None:
    pack, config = FUZZED[name]
    _, folder = write_quantized(tmp_path, pack, config)
    tensors = open_tensors(folder / "model.safetensors")
    whole, loaded = json.loads((folder / "config.json").read_text()), 0
    for seed in range(60):
        rng = random.Random(seed)
        bent, changed = bend(config, rng) if seed % 2 else config, dict(tensors)
        if seed % 2 == 0:
            spot = rng.choice([one for one in changed if MODULE in one])
            other = changed.pop(rng.choice([one for one in changed if "proj" in one]))
            changed[spot] = rng.choice([other, other.reshape(-1), other.reshape(1, *other.shape), other[:1]])
        (folder / "config.json").write_text(json.dumps(whole | {"quantization_config": bent}))
        save_file({one: np.ascontiguousarray(array) for one, array in changed.items()}, folder / "model.safetensors")
        try:
            weights = open_weights(folder, load_spec(folder))
            for weight in weights:
                assert weights[weight].ndim in (1, 2)
            loaded += 1
        except ModelError as error:
            assert len(str(error)) < 1000
    assert 0 < loaded < 60
