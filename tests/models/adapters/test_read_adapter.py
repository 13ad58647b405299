"""Adapters read from PEFT folders and GGUF files; refusals name the field or tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cairn.models.adapters.read_adapter import read_adapter
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelError
from tests.adapter_files import pairs, random_peft, write_peft
from tests.gguf_files import permuted
from tests.tiny_models import BFLOAT16, MODELS, write_model

QUERY = "model.layers.0.self_attn.q_proj"


def base_of(folder: Path, name: str = "llama 3 rope") -> Path:
    return write_model(folder / "base", **MODELS[name])


def read(place: Path, base: Path) -> Any:
    return read_adapter(place, load_spec(base, identify=False))


def test_the_digest_is_of_names_and_numbers_alone(tmp_path: Path) -> None:
    base = base_of(tmp_path)
    matrices = pairs(base, rank=4, seed=1)
    first = read(write_peft(tmp_path / "a", matrices), base)
    assert read(write_peft(tmp_path / "b", dict(reversed(matrices.items()))), base).digest == first.digest
    changed = dict(matrices)
    changed[QUERY] = (matrices[QUERY][0], matrices[QUERY][1] + np.float32(1e-6))
    others = [
        write_peft(tmp_path / "c", changed),
        write_peft(tmp_path / "d", matrices, lora_alpha=9),
        write_peft(tmp_path / "e", matrices, use_rslora=True),
        write_peft(tmp_path / "f", {name: one for name, one in matrices.items() if name != QUERY}),
        write_peft(tmp_path / "g", matrices, dtype=BFLOAT16),
    ]
    assert len({first.digest, *(read(one, base).digest for one in others)}) == 6
    assert (first.rank, len(first.parts)) == (4, 14)


def test_scaling_follows_the_config(tmp_path: Path) -> None:
    base = base_of(tmp_path)
    matrices = pairs(base, rank=4)
    up = matrices[QUERY][1]
    for config, factor in (
        ({"lora_alpha": 6}, 6 / 4),
        ({"lora_alpha": 6, "use_rslora": True}, 6 / 2),
        ({"alpha_pattern": {"q_proj": 1}}, 1 / 4),
        ({"alpha_pattern": {r"^model\.layers\.0\.self_attn\.q_proj$": 2}}, 2 / 4),
        ({"alpha_pattern": {"proj": 3}, "lora_alpha": 8}, 8 / 4),
    ):
        place = write_peft(tmp_path / "adapter", matrices, **config)
        np.testing.assert_allclose(read(place, base).parts[QUERY].up, up * np.float32(factor), rtol=1e-6)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only LORA"),
    ({"use_dora": True}, "use_dora is not supported: DoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
    ({"bias": "all"}, "bias 'all' is not supported"),
    ({"lora_bias": True}, "lora_bias is not supported"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out is not supported"),
    ({"target_parameters": ["experts"]}, "target_parameters is not supported"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' is not supported"),
    ({"rank_pattern": {"q_.*": 3}}, "rank_pattern 'q_.*' is not supported: name a module"),
    ({"rank_pattern": {"q_proj": "three"}}, "rank_pattern.q_proj must be a number"),
    ({"rank_pattern": {"q_proj": 3}}, "r must be 4, as the tensors of .*q_proj have it"),
    ({"r": 0}, "r must be a whole number from 1 to 512"),
    ({"lora_alpha": "much"}, "lora_alpha must be a number"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_a_config_that_means_more_is_refused_by_its_field(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    base = base_of(tmp_path)
    place = write_peft(tmp_path / "adapter", pairs(base, rank=4), **config)
    with pytest.raises(ModelError, match=message):
        read(place, base)


TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((4, 160))}, "only lora_A and lora_B of linear"),
    ({f"base_model.model.{QUERY}.lora_magnitude_vector": np.zeros(48)}, "only lora_A and lora_B of linear"),
    ({"base_model.model.lm_head.weight": np.zeros((160, 48))}, "only lora_A and lora_B of linear"),
    ({f"base_model.model.{QUERY}.lora_A.weight": np.zeros((4, 47))}, "must be .rank, 48."),
    ({f"base_model.model.{QUERY}.lora_B.weight": np.zeros((47, 4))}, r"for \[48, 48\] they must be"),
    ({f"base_model.model.{QUERY}.lora_A.weight": np.zeros(4)}, "must be a matrix"),
    ({f"base_model.model.{QUERY}.lora_A.weight": np.full((4, 48), np.nan)}, "numbers that are not finite"),
    ({f"base_model.model.{QUERY}.lora_A.other.weight": np.zeros((4, 48))}, "stored under two names"),
    ({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": np.zeros((4, 48))}, "lora_B of .* is missing"),
    (
        {f"base_model.model.model.layers.9.mlp.up_proj.lora_{half}.weight": np.zeros((4, 4)) for half in "AB"},
        "changes no matrix of .*: it was made for another model",
    ),
]


@pytest.mark.parametrize(("more", "message"), TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    base = base_of(tmp_path)
    path = random_peft(tmp_path / "adapter", base, 0) / "adapter_model.safetensors"
    save_file(load_file(path) | {name: one.astype(np.float32) for name, one in more.items()}, path)
    with pytest.raises(ModelError, match=message):
        read(tmp_path / "adapter", base)


def test_folders_that_are_no_adapters_are_reported(tmp_path: Path) -> None:
    base = base_of(tmp_path)
    place = random_peft(tmp_path / "adapter", base, 0)
    (place / "adapter_model.safetensors").rename(place / "adapter_model.bin")
    with pytest.raises(ModelError, match="a pickle, which is never opened"):
        read(place, base)
    (place / "adapter_model.bin").unlink()
    with pytest.raises(ModelError, match=r"adapter_model.safetensors is missing"):
        read(place, base)
    for other in (base, tmp_path / "nowhere"):
        with pytest.raises(ModelError, match=r"no adapter is there; expected a folder with adapter_config.json"):
            read(other, base)
    (place / "adapter_config.json").write_text("[]")
    with pytest.raises(ModelError, match="expected a JSON object"):
        read(place, base)


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf_adapter(path: Path, base: Path, matrices: dict[str, Any], alpha: float, **keys: Any) -> Path:
    """Write an adapter as llama.cpp's converter does, with rows of q and k in the order of its llama files."""
    config = json.loads((base / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.type", keys.get("type", "adapter"))
    writer.add_string("adapter.type", keys.get("adapter", "lora"))
    writer.add_float32("adapter.lora.alpha", alpha)
    for module, (down, up) in matrices.items():
        _, _, layer, rest = module.split(".", 3)
        name = f"blk.{layer}.{GGUF_NAMES[rest]}.weight"
        last = rest.rpartition(".")[2]
        writer.add_tensor(f"{name}.lora_a", down)
        writer.add_tensor(f"{name}.lora_b", permuted(up, heads[last]) if last in heads else up)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_adapter_is_the_same_adapter(tmp_path: Path) -> None:
    base = base_of(tmp_path)
    matrices = pairs(base, rank=4, seed=3)
    path = write_gguf_adapter(tmp_path / "adapter.gguf", base, matrices, 12.0)
    adapter = read(path, base)
    assert adapter.digest == read(write_peft(tmp_path / "peft", matrices, lora_alpha=12), base).digest
    assert adapter.digest != read(write_gguf_adapter(tmp_path / "other.gguf", base, matrices, 13.0), base).digest
    plain = read(write_gguf_adapter(tmp_path / "plain.gguf", base, matrices, 0.0), base)
    assert plain.digest == read(write_peft(tmp_path / "unscaled", matrices, lora_alpha=4), base).digest


def test_a_gguf_file_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    base = base_of(tmp_path)
    matrices = pairs(base)
    for keys, message in (({"type": "model"}, "general.type is 'model'"), ({"adapter": "x"}, "adapter.type 'x'")):
        with pytest.raises(ModelError, match=message):
            read(write_gguf_adapter(tmp_path / "adapter.gguf", base, matrices, 1.0, **keys), base)
