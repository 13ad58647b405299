"""Every family on every device found, beside the reference kernels: logits within bounds, and clear tokens equal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cairn.kernels import devices
from tests.tiny_models import MODELS, Driver, load, prompt, write_model

FOUND = [
    pytest.param(report.name, marks=pytest.mark.skipif(bool(report.trouble), reason=f"{report.name}: {report.trouble}"))
    for report in devices.reports()
    if report.name not in (devices.CPU, devices.MLX)  # another family's name for the same model
]
BOUND = 2e-4
"""Largest error of a logit as a share of the largest logit: another order of float32 sums, through all layers."""
LENGTH = 70
OFTEN = {
    *("llama 2", "gemma 3", "gemma 4 e", "glm 4.7 flash", "qwen 3 with window layers", "olmoe", "nemotron h"),
    *("qwen 3.5, one head of keys", "lfm 2, biases", "deepseek 3", "phi 4", "llama 4"),
    *("phi 2", "stablelm, parallel, norms of heads"),
}
"""Families tested each time; the others by `make prove`."""


def close(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference, as a share of the largest number."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device", FOUND)
def test_logits_are_those_of_the_reference(
    device: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prove: bool
) -> None:
    """In one step, in chunks, from a cache and in a batch.

    Greedy tokens must be equal if the lead exceeds the bound.
    """
    assert set(MODELS) >= OFTEN
    if not prove and name not in OFTEN:
        pytest.skip("only with --prove")
    folder, tokens = write_model(tmp_path, **MODELS[name]), prompt(LENGTH)
    reference = Driver(load(folder, kernels="reference", kv_dtype="f32"), monkeypatch)
    theirs = reference.logits(tokens, [LENGTH], reference.tables(LENGTH))
    reference.engine.close()
    engine = load(folder, device=device, kv_dtype="f32")
    driver = Driver(engine, monkeypatch)
    whole = driver.logits(tokens, [LENGTH], first := driver.tables(LENGTH))
    chunked = driver.logits(tokens, [33, 1, 14, 22], driver.tables(LENGTH))
    assert close(whole, theirs) <= BOUND and close(chunked, theirs) <= BOUND
    lead = np.diff(np.sort(theirs, axis=1)[:, -2:], axis=1)[:, 0]
    clear = lead > 2 * BOUND * np.abs(theirs).max()
    assert clear.sum() > LENGTH // 2
    assert (whole.argmax(axis=1) == theirs.argmax(axis=1))[clear].all()
    fresh, driver.seen = driver.tables(LENGTH), []
    states = [group.kind == "state" for group in engine.info.groups]
    for group, copied in enumerate(zip(first, fresh, strict=True)):
        if not states[group]:
            engine.copy_blocks(group, [(copied[0][0], copied[1][0])]).wait()
    if not any(states):
        driver.step(
            [driver.row(tokens, 16, LENGTH, fresh, 16), driver.row(prompt(9, seed=5), 0, 9, driver.tables(9), 0)]
        )
        assert close(driver.seen[0][1], theirs[16:]) <= BOUND
    engine.close()


@pytest.mark.parametrize("device", FOUND)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_narrow_kv_and_narrow_weights_are_within_a_wider_bound(
    device: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values may be rounded the other way near a tie."""
    folder, tokens = write_model(tmp_path, **MODELS["llama 2"]), prompt(LENGTH)
    for weights in ("bf16", "int8", "int4"):
        results = []
        for options in ({"kernels": "reference"}, {"device": device}):
            driver = Driver(load(folder, kv_dtype=dtype, weights=weights, **options), monkeypatch)
            results.append(driver.logits(tokens, [LENGTH], driver.tables(LENGTH)))
            driver.engine.close()
        assert close(results[1], results[0]) <= 0.03, weights


@pytest.mark.parametrize("device", FOUND)
@pytest.mark.parametrize("name", ["llama 2", "olmoe", "lfm 2, biases"])
def test_tensors_of_different_types_in_one_file(
    device: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also tensors that one kernel reads together, such as queries, keys and values."""
    folder, tokens = write_model(tmp_path, **MODELS[name]), prompt(LENGTH)
    path, types = folder / "model.safetensors", (np.float32, ml_dtypes.bfloat16, np.float16)
    stored = sorted(load_file(path).items())
    mixed = {name: value.astype(types[number % 3]) for number, (name, value) in enumerate(stored)}
    save_file(mixed, path)
    results = []
    for options in ({"kernels": "reference"}, {"device": device}):
        driver = Driver(load(folder, kv_dtype="f32", weights="stored", **options), monkeypatch)
        results.append(driver.logits(tokens, [LENGTH], driver.tables(LENGTH)))
        driver.engine.close()
    assert close(results[1], results[0]) <= BOUND


PAGES = """
import sys
from pathlib import Path
from tests.tiny_models import GREEDY, load, prompt
from cairn.types.step import Row

engine = load(Path(sys.argv[1]), device=sys.argv[2])
tokens = prompt(48)
tables = tuple(list(range(3)) for _ in engine.info.groups)
engine.prefill([Row(tokens, 0, 48, tables, None, 48, GREEDY, 0)]).wait()
out = Path(sys.argv[3])
for group in range(len(engine.info.groups)):
    pages = engine.read_blocks(group, [0, 1, 2]).wait()
    (out / f"group {group}").write_bytes(b"".join(pages))
(out / "identity").write_bytes(engine.info.identity)
engine.close()
"""


@pytest.mark.parametrize("device", FOUND)
def test_pages_go_on_in_another_process(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device or kernel set must not find them: the identity names both."""
    folder, out = write_model(tmp_path / "model", **MODELS["qwen 3 with window layers"]), tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-c", PAGES, str(folder), device, str(out)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], env={**os.environ, "OMP_NUM_THREADS": "1"})
    engine = load(folder, device=device)
    assert engine.info.identity == (out / "identity").read_bytes() and engine.info.device == device
    assert engine.info.identity != load(folder).info.identity
    driver = Driver(engine, monkeypatch)
    tables = driver.tables(80)
    for group, size in enumerate(engine.info.block_bytes):
        pages = memoryview((out / f"group {group}").read_bytes())
        parts = [pages[at : at + size] for at in range(0, 3 * size, size)]
        engine.write_blocks(group, tables[group][:3], parts).wait()
        assert b"".join(engine.read_blocks(group, tables[group][:3]).wait()) == bytes(pages)
    tokens = prompt(48) + prompt(32, seed=9)
    cold = driver.logits(tokens, [80], driver.tables(80))
    driver.seen.clear()
    driver.step([driver.row(tokens, 48, 80, tables, 48)])
    assert close(driver.seen[0][1], cold[48:]) <= BOUND
    engine.close()
