"""Bounds on products of fields that are each in range, and sizes that are counted without making every name."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cairn.models.safetensors import weights
from cairn.models.safetensors.weights import expected_tensors, open_weights, parameters
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelFileError
from cairn.types.model_spec import MAX_BY_LAYER
from tests.gguf_files import write_gguf
from tests.tiny_models import MODELS, write_config, write_model

DEEP = {"num_hidden_layers": 4096}


@pytest.mark.parametrize(
    ("model", "changes", "field"),
    [
        ("qwen 3 moe", {"num_experts": 4096}, "num_experts (4096) in 4096 layers (num_hidden_layers)"),
        ("mixtral", {"num_local_experts": 33}, "num_local_experts (33) in 4096 layers (num_hidden_layers)"),
        ("gemma 4 moe", {"num_experts": 4096}, "num_experts (4096) in 4096 layers"),
        ("deepseek 3", {"n_routed_experts": 4096}, "n_routed_experts (4096) in 409"),
        ("deepseek 3", {"num_attention_heads": 40}, "num_attention_heads (40) in 4096 layers (num_hidden_layers)"),
    ],
)
def test_a_config_that_means_millions_of_tensors_is_refused(
    model: str, changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    """A config of 500 bytes would otherwise take all memory for names before the weights are looked at."""
    fields = {name: value for name, value in MODELS[model].items() if name != "layer_types"}
    with pytest.raises(ModelFileError) as caught:
        load_spec(write_config(tmp_path, **fields | DEEP | changes), identify=False)
    assert field in str(caught.value) and f"the most is {MAX_BY_LAYER}" in str(caught.value)


def test_experts_in_few_layers_and_published_sizes_are_not_refused(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 94, "num_experts": 1024, "num_experts_per_tok": 8}
    spec = load_spec(write_config(tmp_path, **MODELS["qwen 3 moe"] | sizes), identify=False)
    assert spec.experts is not None and spec.experts.count == 1024
    few = DEEP | {"num_experts": 4096, "decoder_sparse_step": 128}
    spec = load_spec(write_config(tmp_path, **MODELS["qwen 3 moe"] | few), identify=False)
    assert spec.experts is not None and len(spec.experts.layers) == 32


@pytest.mark.parametrize(
    ("model", "changes", "field"),
    [
        ("qwen 3 moe", {"expert_count": 4096}, "qwen3moe.expert_count (4096) in 4096 layers (qwen3moe.block_count)"),
        ("deepseek 3", {"attention.head_count": 40}, "deepseek2.attention.head_count (40) in 4096 layers"),
    ],
)
def test_a_gguf_file_that_means_millions_of_tensors_is_refused(
    model: str, changes: dict[str, int], field: str, tmp_path: Path
) -> None:
    path = write_gguf(write_model(tmp_path / "m", **MODELS[model]), tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    prefix = field.partition(".")[0]
    for name, value in {"block_count": 4096, **changes}.items():
        key = f"{prefix}.{name}".encode()
        at = data.index(struct.pack("<Q", len(key)) + key) + 8 + len(key)
        assert struct.unpack_from("<I", data, at) == (4,), "not a number of 32 bits"
        struct.pack_into("<I", data, at + 4, value)
    path.write_bytes(data)
    with pytest.raises(ModelFileError) as caught:
        load_spec(path, identify=False)
    assert field in str(caught.value) and f"the most is {MAX_BY_LAYER}" in str(caught.value)


@pytest.mark.parametrize("model", ["llama 2", "qwen 3 moe", "gemma 4 moe", "gemma 3n", "deepseek 3", "nemotron h moe"])
def test_parameters_are_counted_without_the_names_of_all_tensors(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_spec(write_config(tmp_path, **MODELS[model]), identify=False)
    whole = sum(map(math.prod, expected_tensors(spec).values()))

    def named(spec: Any) -> Any:
        raise AssertionError("it makes a name for each tensor")

    monkeypatch.setattr(weights, "expected_tensors", named)
    assert parameters(spec) == whole


@pytest.mark.parametrize("shape", [(8, 48), (1,), ()])
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("qwen 3 next", "model.layers.0.linear_attn.in_proj_qkvz.weight"),
        ("qwen 3 next", "model.layers.0.linear_attn.in_proj_ba.weight"),
        ("gpt-oss", "model.layers.0.mlp.experts.gate_up_proj"),
        ("gpt neox", "gpt_neox.layers.0.attention.query_key_value.weight"),
        ("phi 4", "model.layers.0.self_attn.qkv_proj.weight"),
        ("command-r", "model.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_a_fused_tensor_of_another_shape_is_refused_by_name(
    model: str, name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write_model(tmp_path, **MODELS[model])
    spec = load_spec(folder, identify=False)
    tensors = load_file(folder / "model.safetensors")
    assert name in tensors
    save_file(tensors | {name: np.ones(shape, np.float32)}, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"layers\.0\."):
        open_weights(folder, spec)
