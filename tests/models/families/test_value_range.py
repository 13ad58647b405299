"""The bound on a model's keys and values: never exceeded, and not far above the largest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cairn.config.config import Config
from cairn.engine.recorded import RecordedEngine
from cairn.frontend.service import Service
from cairn.models.families.value_range import HALF, ROUNDING, fits_half, reach
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from tests.service.tiny import make_model
from tests.tiny_models import KERNELS, MODELS, Driver, load, prompt, random_tensors, stored, write_config, write_model


def written(folder: Path, factors: dict[str, float], **fields: Any) -> Path:
    """Write a tiny model, some of whose tensors are multiplied."""
    tensors = random_tensors(write_config(folder, **fields))
    for name in tensors:
        tensors[name] *= np.float32(next((factor for end, factor in factors.items() if name.endswith(end)), 1.0))
    save_file(stored(load_spec(folder), tensors), folder / "model.safetensors")
    return folder


def largest(engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the largest key or value of some hundred tokens."""
    driver = Driver(engine, monkeypatch)
    tokens = prompt(120)
    driver.step([driver.row(tokens, 0, 120, driver.tables(120), 119)])
    # States are held in float32, whatever the type of KV is.
    kept = [pool for pool, group in zip(engine._kv, engine.info.groups, strict=True) if group.kind != "state"]
    return max(float(np.abs(pool.astype(np.float32)).max()) for pool in kept)


@pytest.mark.parametrize("name", MODELS)
def test_no_key_and_no_value_passes_the_reach(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path, {"proj.bias": 40.0}, **MODELS[name])
    spec = load_spec(folder)
    reached = reach(spec, open_weights(folder, spec))
    if not spec.pre_norms:  # the input of attention is unbounded
        assert reached == np.inf and not fits_half(reached)
        return
    if all(group.kind == "state" for group in spec.groups):  # there are neither keys nor values
        assert reached == 0.0
        return
    most = largest(load(folder, kv_dtype="f32"), monkeypatch)
    assert reached / ROUNDING / 8 < most <= reached / ROUNDING


@pytest.mark.parametrize("form", ["int8", "int4", "bf16"])
@pytest.mark.parametrize("kind", KERNELS)
def test_rounded_weights_stay_within_the_reach(
    kind: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst prompt there is: one whose normalised vector has the direction of a row."""
    fields = {"hidden_size": 64, "num_hidden_layers": 1, "rms_norm_eps": 1e-12, "architecture": "LlamaForCausalLM"}
    tensors = random_tensors(write_config(tmp_path, **fields))
    layer = "model.layers.0."
    tensors[layer + "input_layernorm.weight"][:] = 1.0
    tensors["model.embed_tokens.weight"][:] = tensors[layer + "self_attn.v_proj.weight"][3]
    tensors[layer + "self_attn.k_proj.weight"] *= np.float32(0.01)
    save_file(tensors, tmp_path / "model.safetensors")
    spec = load_spec(tmp_path)
    plain = reach(spec, open_weights(tmp_path, spec)) / ROUNDING
    most = largest(load(tmp_path, kernels=kind, weights=form, kv_dtype="f32"), monkeypatch)
    assert 0.6 * plain < most < 1.2 * plain


@pytest.mark.parametrize("end", ["self_attn.v_proj.weight", "self_attn.k_norm.weight", "input_layernorm.weight"])
def test_a_model_that_may_leave_f16_is_held_in_bf16(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16 its rows would end in an error, for numbers that are not finite (known failure 50)."""
    folder = written(tmp_path / "large", {end: 50_000.0})
    info = load(folder, kv_dtype="f16").info
    assert info.kv_dtype == "bfloat16" and info.note.startswith(f"{load_spec(folder).name}: KV is held in bf16")
    assert info.identity == load(folder, kv_dtype="bf16").info.identity, "its stored KV is the same"
    assert load(folder, kv_dtype="f32").info.note == load(folder, kv_dtype="bf16").info.note == ""
    usual = load(write_model(tmp_path / "usual"), kv_dtype="f16")
    assert (usual.info.kv_dtype, usual.info.note) == ("float16", "")
    assert largest(usual, monkeypatch) < HALF


async def test_the_start_says_that_kv_is_held_in_bf16(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A user who asked for f16 explicitly sees it where the server says what it loads."""
    for factor, reported in ((50_000.0, True), (1.0, False)):
        folder = written(make_model(tmp_path / str(factor)), {"v_proj.weight": factor})
        with caplog.at_level("INFO", "cairn.frontend.service"):
            config = Config(model=str(folder), kv_dtype="f16", kv_gb=0.05, kv_disk=False, threads=1)
            service = await Service.start(config, in_process=True)
            await service.close()
        assert any("KV is held in bf16: keys or values may reach" in said for said in caplog.messages) is reported
        caplog.clear()


@pytest.mark.parametrize("broken", [np.inf, np.nan, 1e30])
def test_weights_that_are_no_numbers_have_no_reach(broken: float, tmp_path: Path) -> None:
    tensors = random_tensors(write_config(tmp_path))
    tensors["model.layers.0.self_attn.v_proj.weight"][3, 5] = broken
    spec = load_spec(tmp_path)
    assert not fits_half(reach(spec, tensors))


def test_the_largest_half_is_held(tmp_path: Path) -> None:
    assert fits_half(HALF) and not fits_half(np.nextafter(HALF, np.inf))
    assert float(np.float16(HALF)) == HALF == float(np.finfo(np.float16).max)


def test_f16_is_nearer_to_f32_than_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path)
    tokens, errors = prompt(100), {}
    exact = Driver(load(folder, kv_dtype="f32"), monkeypatch)
    truth = exact.logits(tokens, [100], exact.tables(100))
    for dtype in ("bf16", "f16"):
        driver = Driver(load(folder, kv_dtype=dtype), monkeypatch)
        errors[dtype] = float(np.abs(driver.logits(tokens, [100], driver.tables(100)) - truth).max())
    assert 0 < errors["f16"] < errors["bf16"] / 3
