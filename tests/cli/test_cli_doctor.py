"""`cairn doctor` on models: it reports what an engine would find."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cairn.cli.doctor import _fit, folders
from cairn.config.config import Config
from cairn.config.resolve import resolve
from cairn.kv.pool.cache import Cache
from tests.quantized_models import awq, float8, write_quantized
from tests.tiny_models import MODELS, load, write_model

WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "head_dim": 16, "max_position_embeddings": 4096}
CONFIG = Config(step_tokens=256, max_running=16, threads=1, kv_gb=0.05)


@pytest.mark.parametrize("kinds", [["full_attention"] * 2, ["sliding_attention", "full_attention"]])
def test_the_pools_tokens_are_those_of_its_full_layers(kinds: list[str], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", **WINDOWS, layer_types=kinds)
    engine = load(folder)
    tokens = Cache(engine.info).longest
    engine.close()
    assert tokens > 4096
    assert f" of KV pool holds {tokens:,} tokens, context 4,096" in _fit(str(folder), CONFIG)


def test_a_pool_of_windows_alone_holds_any_context(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", **WINDOWS, layer_types=["sliding_attention"] * 2)
    assert " of KV pool holds any context, context 4,096" in _fit(str(folder), CONFIG)
    assert "tokens/s" not in _fit(str(folder), CONFIG), "nothing is measured on this machine"
    small = msgspec.structs.replace(CONFIG, context=64)
    assert " of KV pool holds any context, context 64" in _fit(str(folder), small)


def test_document_formats_are_listed_with_missing_packages(tmp_path: Path) -> None:
    _, folder = write_quantized(tmp_path / "awq", awq(32), {"quant_method": "awq", "bits": 4})
    said = _fit(str(folder), msgspec.structs.replace(CONFIG, weights="stored"), rate=1e9)
    assert said.startswith("fits: ") and " of weights (stored); " in said
    assert said.endswith("; Qwen3ForCausalLM in AWQ, F32") and "; an answer has at most about " in said
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    _, folder = write_quantized(tmp_path / "fp8", float8(32, 32), config)
    said = _fit(str(folder), msgspec.structs.replace(CONFIG, weights="stored"))
    assert " of weights (stored, FP8 rounded to 8 bits with an error below 1 %); " in said
    text = (folder / "config.json").read_text().replace('"fp8"', '"hqq"')
    (folder / "config.json").write_text(text)
    said = _fit(str(folder), CONFIG)
    assert said.startswith("no: ") and "the method 'hqq' is not supported for safetensors; supported are fp8" in said


def test_experts_on_the_disk_are_listed_apart_from_memory(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", **MODELS["qwen 3 moe"])
    said = _fit(str(folder), msgspec.structs.replace(CONFIG, experts="mapped"), rate=1e9)
    if "cannot be mapped" not in said:  # by the reference kernels
        assert " of weights and " in said and " of experts on the disk (f32); " in said
        assert " tokens/s here while its experts are in memory; Qwen3MoeForCausalLM in F32" in said


def test_folders_are_those_that_a_server_with_these_options_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_DATA_HOME": str(tmp_path / "data")}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    usual = dict(folders(resolve({}, env), env))
    assert usual["agents"] == f"{tmp_path}/data/cairn/agents (nothing yet)"
    assert usual["KV"] == f"{tmp_path}/cache/cairn/kv (nothing yet)"
    assert usual["other models"] == f"{tmp_path}/cache/cairn/models (nothing yet)"
    assert usual["packed weights"].startswith(f"{tmp_path}/cache/cairn/")
    assert usual["options"] == f"no file; {tmp_path}/.config/cairn/cairn.toml would be read"
    (tmp_path / "cairn.toml").write_text(f'agents_dir = "{tmp_path}/mine"\nkv_dir = "{tmp_path}/kv"\n')
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.log").write_bytes(bytes(5000))
    named = dict(folders(resolve({}, env), env))
    assert named["options"] == f"{tmp_path}/cairn.toml"
    assert named["agents"] == f"{tmp_path}/mine (5.0 kB)"
    assert named["collections, files"] == f"{tmp_path}/mine-collections (nothing yet)"
    assert named["KV"] == f"{tmp_path}/kv (nothing yet)"
    assert dict(folders(resolve({"kv_disk": False}, env), env))["KV"] == "not stored on disk"
