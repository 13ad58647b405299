"""Layers that keep a state: what configs and GGUF files may say of them, and what is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file, save_file

from cairn.models.packing.gguf_writer import write_gguf as write_again
from cairn.models.packing.weight_format import HeldWeights
from cairn.models.safetensors.weights import expected_tensors, open_weights
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelError, ModelFileError
from tests.gguf_files import write_gguf
from tests.tiny_models import BFLOAT16, MODELS, write_config, write_model

QWEN = MODELS["qwen 3.5"]
GRANITE = MODELS["granite 4 hybrid"]
LFM = MODELS["lfm 2"]
NEMOTRON = MODELS["nemotron h moe"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (QWEN | {"linear_num_value_heads": 3}, "3 recurrent heads are no multiple of 2 key heads"),
        (QWEN | {"linear_conv_kernel_dim": 17}, "linear_conv_kernel_dim must be a whole number from 2 to 16"),
        (QWEN | {"linear_key_head_dim": 2048}, "linear_key_head_dim must be a whole number from 1 to 1024"),
        (
            QWEN | {"layer_types": ["conv"] * 4},
            "layer_types must be a list of 4 entries, each full_attention or linear",
        ),
        (QWEN | {"layer_types": ["linear_attention"]}, "layer_types must be a list of 4 entries"),
        (GRANITE | {"layer_types": None}, "layer_types must be a list of 4 entries, each attention or mamba"),
        (GRANITE | {"mamba_d_head": 5}, "8 recurrent heads of 5 are not mamba_expand"),
        (GRANITE | {"time_step_limit": [1]}, "time_step_limit must be a list of the least and the greatest step"),
        (GRANITE | {"time_step_limit": [2.0, 1.0]}, "time_step_limit must be a list"),
        (GRANITE | {"position_embedding_type": "alibi"}, "position_embedding_type must be rope or nope"),
        (LFM | {"layer_types": None, "full_attn_idxs": [9]}, "layer_types must be a list of 4 entries"),
        (NEMOTRON | {"moe_latent_size": 8}, "moe_latent_size other than 0 is not supported"),
        (NEMOTRON | {"mlp_hidden_act": "silu"}, "mlp_hidden_act other than relu2 is not supported"),
        (NEMOTRON | {"use_bias": True}, "use_bias other than mamba_proj_bias is not supported"),
        (NEMOTRON | {"layers_block_type": ["mamba"] * 4 + ["conv"]}, "layers_block_type must be the kinds of 5 layers"),
        (NEMOTRON | {"layers_block_type": None, "hybrid_override_pattern": "M-?"}, "hybrid_override_pattern must be"),
    ],
)
def test_impossible_state_settings_are_refused_by_name(fields: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path, **fields)
    with pytest.raises(ModelError, match=sentence):
        load_spec(folder)


def test_layers_fall_into_groups(tmp_path: Path) -> None:
    spec = load_spec(write_config(tmp_path / "qwen", **QWEN))
    assert [(group.kind, group.layers) for group in spec.groups] == [("full", (3,)), ("state", (0, 1, 2))]
    assert spec.groups[1].numbers == spec.recurrence.numbers  # type: ignore[union-attr]
    spec = load_spec(write_config(tmp_path / "nemotron", **NEMOTRON))
    assert [(group.kind, group.layers) for group in spec.groups] == [("full", (2,)), ("state", (0, 4))]
    assert spec.mlp_layers == (1, 3) and not spec.has_mlp(0) and not spec.attends(1) and spec.attends(2)
    spec = load_spec(write_config(tmp_path / "none", **QWEN | {"layer_types": ["full_attention"] * 4}))
    assert [group.kind for group in spec.groups] == ["full"] and spec.recurrence is None and spec.output_gate


def test_every_layer_has_its_own_tensors(tmp_path: Path) -> None:
    names = set(expected_tensors(load_spec(write_config(tmp_path, **NEMOTRON))))
    layer = "model.layers.{}."
    for number, own in enumerate(["mixer.decay", "mlp.gate.weight", "self_attn.q_proj.weight", "mlp.gate.weight"]):
        found = {name for name in names if name.startswith(layer.format(number))}
        assert layer.format(number) + own in found and layer.format(number) + "input_layernorm.weight" in found
        parts = {name.removeprefix(layer.format(number)).split(".")[0] for name in found}
        assert parts == {own.split(".")[0], "input_layernorm"}


@pytest.mark.parametrize("form", ["stored", "bf16", "int8", "int4"])
def test_parameters_that_steer_a_state_are_never_rounded(form: Any, tmp_path: Path) -> None:
    folder = write_model(tmp_path, dtype=BFLOAT16, **QWEN | {"hidden_size": 64})
    source = open_weights(folder, load_spec(folder))
    held = HeldWeights(source, form)
    for name in ("in_proj_a.weight", "in_proj_b.weight", "decay", "dt_bias", "conv.weight", "norm.weight"):
        full = f"model.layers.1.mixer.{name}"
        exact = np.asarray(held[full], np.float32)
        assert np.array_equal(exact, np.asarray(source[full], np.float32)), name
    assert held.outline("model.layers.1.mixer.in_proj_a.weight").dtype == "float32"


def test_a_missing_and_an_unknown_tensor_are_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path, **QWEN)
    tensors = load_file(folder / "model.safetensors")
    array = tensors.pop("model.layers.1.linear_attn.A_log")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"model\.layers\.1\.mixer\.decay of shape \[4\] is missing"):
        open_weights(folder, load_spec(folder))
    save_file(tensors | {"model.layers.3.linear_attn.A_log": array}, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"layers\.3\.mixer\.decay' is not part of a Qwen3_5ForCausalLM"):
        open_weights(folder, load_spec(folder))


def test_layers_that_guess_further_tokens_are_set_aside_in_gguf(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **QWEN)
    more = {
        "blk.4.attn_norm.weight": np.ones(48, np.float32),
        "blk.4.nextn.eh_proj.weight": np.ones((4, 8), np.float32),
    }
    extra = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    path = write_gguf(folder, tmp_path / "m.gguf", extra=extra, more=more)
    spec = load_spec(path)
    assert spec.layers == 4 and [group.layers for group in spec.groups] == [(3,), (0, 1, 2)]
    assert not any("layers.4." in name for name in open_weights(path, spec))


@pytest.mark.parametrize("name", ["qwen 3.5", "granite 4 hybrid, dense", "lfm 2"])
def test_quantizing_a_file_leaves_parameters_that_steer_a_state(name: str, tmp_path: Path) -> None:
    fields = MODELS[name] | {"hidden_size": 64, "mamba_proj_bias": False, "time_step_limit": None}
    path = write_gguf(write_model(tmp_path / "model", **fields), tmp_path / "m.gguf")
    write_again(path, load_spec(path), tmp_path / "small.gguf", "Q8_0", {}, lambda done, total: None)
    kinds = {
        tensor.name.split(".", 2)[-1]: tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "small.gguf").tensors
    }
    exact = {kind for kind in kinds if re.match(r"ssm_(conv1d|a|d|norm|alpha|beta)\b|shortconv\.conv\b", kind)}
    assert exact and all(kinds[kind] == Type.F32 for kind in exact)
    assert kinds["attn_q.weight"] == Type.Q8_0
    open_weights(tmp_path / "small.gguf", load_spec(tmp_path / "small.gguf"))


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"qwen35.ssm.inner_size": 81}, "4 recurrent heads do not divide 81 values"),
        ({"qwen35.ssm.conv_kernel": 1}, "ssm.conv_kernel must be a whole number from 2 to 16"),
        ({"qwen35.attention.recurrent_layers": [True, False]}, "attention.recurrent_layers must be a list of 4"),
        ({"qwen35.ssm.conv_kernel": 5}, r"ssm_conv1d.weight has the shape \[128, 4\], expected \[128, 5\]"),
    ],
)
def test_gguf_that_makes_no_sense_is_named(extra: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    path = write_gguf(write_model(tmp_path / "model", **QWEN), tmp_path / "m.gguf", extra=extra)
    with pytest.raises(ModelError, match=sentence):
        open_weights(path, load_spec(path))
