"""Layers that differ within a model (Gemma 4): what is read from files, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cairn.engine.memory import block_bytes
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelError
from tests.tiny_models import MODELS, load, write_config, write_model

E = MODELS["gemma 4 e"]


def test_groups_have_pages_of_their_own(tmp_path: Path) -> None:
    spec = load_spec(write_model(tmp_path, **MODELS["gemma 4"]))
    assert [group.kind for group in spec.groups] == ["full", "window"]
    assert [spec.page(group) for group in (0, 1)] == [(2, 1, 16, 24), (2, 2, 16, 16)]
    assert block_bytes(spec, "float32") == (2 * 2 * 16 * 24 * 4, 2 * 2 * 2 * 16 * 16 * 4)
    assert spec.head_dims == (24, 16)
    engine = load(tmp_path)
    assert [pool.shape[1:] for pool in engine._kv] == [(2, 2, 1, 16, 24), (2, 2, 2, 16, 16)]
    engine.close()


def test_layers_that_share_keys_and_values_keep_none(tmp_path: Path) -> None:
    spec = load_spec(write_model(tmp_path, **E))
    assert [group.layers for group in spec.groups] == [(2,), (0, 1)]
    assert [spec.kv_layer(layer) for layer in range(6)] == [0, 1, 2, 1, 1, 2]
    assert [spec.group_of(layer) for layer in range(6)] == [1, 1, 0, 1, 1, 0]


def test_unread_tensors_of_such_layers_are_set_aside(tmp_path: Path) -> None:
    spec = load_spec(write_model(tmp_path, **E))
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.4.self_attn.{name}.weight"] = np.ones((3, 3), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    assert "model.layers.4.self_attn.k_proj.weight" not in open_weights(tmp_path, spec)
    tensors["model.layers.4.self_attn.k_proj.bias"] = tensors["model.layers.4.self_attn.o_proj.bias"] = np.ones(3)
    save_file({key: array.astype(np.float32) for key, array in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.4\.self_attn\.o_proj\.bias' is not part"):
        open_weights(tmp_path, spec)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "experts of whom nobody knows how many": ({"enable_moe_block": True, "num_experts": 4}, "moe_intermediate_size"),
    "fewer inputs than tokens": ({"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input must be at least"),
    "none that writes": ({"num_kv_shared_layers": 5}, "num_kv_shared_layers must be so small"),
    "a window at the end": ({"layer_types": ["full_attention"] + ["sliding_attention"] * 5}, "last entry"),
    "heads that do not fit": ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "do not fit"),
    "another scaling": (
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}, "sliding_attention": {}}},
        "'yarn' is not supported",
    ),
    "both directions": ({"use_bidirectional_attention": True}, "does not generate text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_would_change_a_number_are_refused_by_name(name: str, tmp_path: Path) -> None:
    fields, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        load_spec(write_config(tmp_path, **E | fields))


@pytest.mark.parametrize("fields", [{"num_kv_shared_layers": 2}, {"use_double_wide_mlp": False}])
def test_a_fact_changes_the_identity(fields: dict[str, Any], tmp_path: Path) -> None:
    folder = write_model(tmp_path, **E)
    first = load_spec(folder).identity
    write_config(folder, **E | fields)
    assert load_spec(folder).identity != first
