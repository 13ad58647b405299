"""A merged adapter: the written folder is the base with the adapter in its weights, complete or absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from cairn.models.adapters.merge import merge
from cairn.models.adapters.read_adapter import read_adapter
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelError
from tests.adapter_files import pairs, random_peft, write_peft
from tests.encoders import write_modules
from tests.tiny_models import BFLOAT16, MODELS, write_model


@pytest.mark.parametrize("name", ["llama with biases, tied", "gemma 3", "glm 4"])
@pytest.mark.parametrize(("number", "dtype"), [("BF16", BFLOAT16), ("F16", np.dtype(np.float16))])
def test_merged_weights_are_the_sum_rounded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: Any, dtype: Any
) -> None:
    monkeypatch.setattr("cairn.models.adapters.merge._ROWS", 7)
    base = write_model(tmp_path / "base", **MODELS[name])
    matrices = pairs(base, seed=2)
    place = write_peft(tmp_path / "adapter", matrices, lora_alpha=6)
    size = merge(base, place, tmp_path / "merged", number)
    files = load_file(tmp_path / "merged" / "model.safetensors")
    assert {array.dtype for array in files.values()} == {np.dtype(dtype)}
    assert size == sum(array.nbytes for array in files.values())
    spec = load_spec(tmp_path / "merged", identify=False)
    parts = read_adapter(place, spec).parts
    before, after = open_weights(base, spec), open_weights(tmp_path / "merged", spec)
    for tensor in before:
        want = np.asarray(before[tensor], np.float32)
        if (part := parts.get(tensor.removesuffix(".weight"))) is not None:
            want = want + part.up @ part.down
        merged = np.asarray(after[tensor], np.float32)
        np.testing.assert_allclose(merged, want, rtol=1e-2 if number == "BF16" else 2e-3, atol=2e-3)


def test_the_base_s_numbers_and_files_are_kept(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", dtype=np.float16)
    tensors = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    homes = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(tensors)}
    for home in set(homes.values()):
        save_file({name: one for name, one in tensors.items() if homes[name] == home}, base / home)
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    (base / "tokenizer.json").write_text("{}")
    (base / "optimizer.bin").write_text("large")
    merge(base, random_peft(tmp_path / "adapter", base, 1), tmp_path / "merged")
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert names == {*homes.values(), "config.json", "tokenizer.json", "model.safetensors.index.json"}
    weights = open_weights(tmp_path / "merged", load_spec(tmp_path / "merged", identify=False))
    assert {str(weight.dtype) for weight in weights.values()} == {"float16"}


def test_the_modules_and_templates_of_the_base_are_kept(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    dense = torch.nn.Linear(48, 24, bias=False)
    write_modules(base, "last", [(dense,)])
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (base / "onnx").mkdir()
    (base / "onnx" / "config.json").write_text("{}")
    merge(base, random_peft(tmp_path / "adapter", base, 1), tmp_path / "merged")
    before, after = (load_spec(folder, identify=False).embedding for folder in (base, tmp_path / "merged"))
    assert before is not None and before.dense and before == after
    for name in ("2_Dense/model.safetensors", "additional_chat_templates/tool_use.jinja"):
        assert (tmp_path / "merged" / name).read_bytes() == (base / name).read_bytes()
    assert not (tmp_path / "merged" / "onnx").exists()


def test_nothing_is_left_of_a_merge_that_fails(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", **MODELS["llama 3 rope"])
    matrices = pairs(base)
    huge = {name: (down, np.full_like(up, 1e6)) for name, (down, up) in matrices.items()}
    with pytest.raises(ModelError, match="beyond the largest of F16; choose BF16"):
        merge(base, write_peft(tmp_path / "huge", huge), tmp_path / "merged", "F16")
    other = write_model(tmp_path / "other", **MODELS["llama 3 rope"] | {"num_hidden_layers": 3})
    with pytest.raises(ModelError, match="made for another model"):
        merge(base, random_peft(tmp_path / "others", other, 0), tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "huge", "other", "others"]
    (tmp_path / "merged").mkdir()
    with pytest.raises(ModelError, match="merged exists already"):
        merge(base, write_peft(tmp_path / "adapter", matrices), tmp_path / "merged")
    with pytest.raises(ModelError, match="merged into a folder of safetensors"):
        merge(tmp_path / "x.gguf", tmp_path / "adapter", tmp_path / "new")
