"""Written GGUF files hold what their source holds, to the bit where the format can."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file, save_file

from cairn.models.gguf.reader import read_gguf
from cairn.models.gguf.weights import gguf_name, hub_name
from cairn.models.packing import gguf_writer as gguf_writer
from cairn.models.packing.gguf_writer import TYPES, check_written, write_gguf
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelError, ModelFileError
from tests import gguf_files
from tests.tiny_models import Driver, load, prompt, write_model

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 64
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3 tied": {"tie_word_embeddings": True},
    "qwen2 with yarn": {"architecture": "Qwen2ForCausalLM", "rope_scaling": YARN},
    "llama3": {"architecture": "LlamaForCausalLM", "rope_scaling": LLAMA3, "attention_bias": True},
    "llama, linear": {"architecture": "LlamaForCausalLM", "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "mistral": {"architecture": "MistralForCausalLM", "sliding_window": 24},
}


def written(folder: Path, path: Path, kind: str) -> list[gguf_writer.Loss]:
    progress: list[tuple[int, int]] = []
    losses = write_gguf(folder, load_spec(folder), path, kind, {}, lambda done, total: progress.append((done, total)))
    assert progress == sorted(progress) and progress[-1][0] == progress[-1][1] == sum(loss.values for loss in losses)
    return losses


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_written_in_float32_is_the_same_model(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    folder, path = write_model(tmp_path / "m", **SIZES | FAMILIES[name]), tmp_path / "m.gguf"
    losses = written(folder, path, "F32")
    spec, again = load_spec(folder), load_spec(path)
    check_written(spec, again)
    ours, theirs = open_weights(folder, spec), open_weights(path, again)
    assert set(ours) == set(theirs) and all(np.array_equal(ours[our], theirs[our]) for our in ours)
    assert {hub_name(gguf_name(our)) for our in ours} == set(ours)
    assert all(loss.error == loss.worst == 0 for loss in losses)
    drivers = [Driver(load(source, kernels="reference"), monkeypatch) for source in (folder, path)]
    first, second = (driver.greedy(prompt(40), 8) for driver in drivers)
    assert first == second


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_matrices_hold_what_the_gguf_package_makes_of_them(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The reported error is that of the values read back."""
    monkeypatch.setattr(gguf_writer, "SLICE", 640)
    folder, path = write_model(tmp_path / "m", **SIZES), tmp_path / "m.gguf"
    losses = {loss.part: loss for loss in written(folder, path, kind)}
    spec = load_spec(folder)
    check_written(spec, load_spec(path))
    ours, theirs = open_weights(folder, spec), open_weights(path, load_spec(path))
    squares, errors = 0.0, 0.0
    for name, array in ours.items():
        fine = array.ndim == 1 or (name == "lm_head.weight" and kind in ("Q5_1", "Q5_0", "Q4_1", "Q4_0"))
        wanted = Type.F32 if array.ndim == 1 else Type.Q8_0 if fine else Type[kind]
        expected = gguf.quants.dequantize(gguf.quants.quantize(array, wanted), wanted)
        assert np.array_equal(theirs[name].astype(np.float32), expected), name
        if "down_proj" in name:
            squares += float(np.square(array, dtype=np.float64).sum())
            errors += float(np.square(expected - array, dtype=np.float64).sum())
    down = losses["ffn_down"]
    assert (down.type, down.tensors) == (kind, spec.layers) and losses["attn_norm"].error == 0
    assert down.error == pytest.approx(np.sqrt(errors / squares), rel=1e-4) and 0 < down.error < 0.2
    assert read_gguf(path).metadata["general.file_type"] == TYPES[kind]


@pytest.mark.parametrize("parts", [1, 3])
def test_a_gguf_file_is_converted_and_matrices_of_the_right_type_are_kept(parts: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "LlamaForCausalLM", **SIZES)
    extra = {"a.numbers": [1, -2], "a.text": "x", "llama.rope.scaling.type": "none"}
    source = gguf_files.write_gguf(folder, tmp_path / "s.gguf", kind=Type.Q8_0, parts=parts, extra=extra)
    same, small = tmp_path / "same.gguf", tmp_path / "small.gguf"
    losses = written(source, same, "Q8_0")
    before, after = read_gguf(source), read_gguf(same)
    assert len(after.paths) == 1 and all(loss.error == 0 for loss in losses)
    for name in before.tensors:
        assert np.array_equal(before.blocks(name), after.blocks(name))
    for key, value in before.metadata.items():
        if not key.startswith(("split.", "general.")):
            assert np.array_equal(after.metadata[key], value), key
    written(source, small, "Q4_0")
    check_written(load_spec(source), load_spec(small))
    assert read_gguf(small).tensors["blk.0.ffn_up.weight"].kind.name == "Q4_0"
    assert "split.count" not in read_gguf(small).metadata


def test_rows_that_no_block_divides_are_written_in_bfloat16(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", hidden_size=48, intermediate_size=64)
    losses = {loss.part: loss.type for loss in written(folder, tmp_path / "m.gguf", "Q4_0")}
    assert losses["ffn_up"] == "BF16" and losses["ffn_down"] == "Q4_0" and losses["output"] == "BF16"
    check_written(load_spec(folder), load_spec(tmp_path / "m.gguf"))


def test_an_unwritable_model_is_a_short_error(tmp_path: Path, monkeypatch: Any) -> None:
    folder, path = write_model(tmp_path / "m", **SIZES), tmp_path / "m.gguf"
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = 1e6
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"blk.0.ffn_up.weight holds numbers that F16 cannot hold; use BF16"):
        written(folder, path, "F16")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"blk.0.ffn_up.weight holds numbers that are not finite"):
        written(folder, path, "Q8_0")
    gelu = write_model(tmp_path / "g", "MistralForCausalLM", hidden_act="gelu_pytorch_tanh", sliding_window=None)
    with pytest.raises(ModelError, match="this kind of model cannot be written as GGUF"):
        written(gelu, path, "Q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"needs the gguf package; get it with: pip install gguf"):
        written(folder, path, "Q8_0")


@pytest.mark.parametrize("change", [{"head_dim": 8}, {"qk_norm": False}, {"rope_theta": 5e5}, {"eos_ids": (1, 2, 159)}])
def test_a_file_that_says_another_thing_is_seen(change: dict[str, Any], tmp_path: Path) -> None:
    spec = load_spec(write_model(tmp_path / "m"))
    check_written(spec, spec)
    with pytest.raises(ModelError, match="GGUF"):
        check_written(msgspec.structs.replace(spec, **change), msgspec.structs.replace(spec, eos_ids=(1,)))


def test_a_default_that_is_off_is_written_as_one(tmp_path: Path) -> None:
    """-1 means the same as 0, and the format's number has no sign."""
    folder = write_model(tmp_path / "m", **SIZES)
    (folder / "generation_config.json").write_text('{"top_k": -1, "temperature": 0.5}')
    assert load_spec(folder).defaults["top_k"] == -1
    written(folder, tmp_path / "m.gguf", "Q8_0")
    assert load_spec(tmp_path / "m.gguf").defaults == {"top_k": 0, "temperature": 0.5}
