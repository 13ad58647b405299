"""Answers on MLX's CPU: the same bits alone, in a batch, in chunks and from the cache, if matrix products have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed: its answers are not tested")

import mlx.core as mx

from cairn.engine.recorded import RecordedEngine
from cairn.kernels.mlx import program
from cairn.kernels.mlx.mlx_kernels import MlxKernels
from cairn.kernels.mlx.weights import CodedPart
from tests.quantized_models import mlx, write_quantized
from tests.tiny_models import MODELS, Driver, load, prompt, write_model

OFTEN = {"llama 2", "gemma 3", "olmoe", "deepseek 3", "qwen 3.5, one head of keys", "nemotron h", "gpt-oss"}
"""Families that are always tested; `make prove` tests the others."""
BOUND = 2e-4
"""Largest error of a logit, relative to the largest, where products depend on the batch."""


def products_keep_bits() -> bool:
    """Return whether rows of a matrix product on this machine have the same bits in matrices of other heights."""
    rng = np.random.default_rng(1)
    for inner, out in ((48, 160), (80, 48), (512, 256)):
        x, weight = (mx.array(rng.standard_normal(shape).astype(np.float32)) for shape in ((65, inner), (out, inner)))
        whole = np.array(x @ weight.T)
        if not all(np.array_equal(np.array(x[:rows] @ weight.T), whole[:rows]) for rows in (1, 2, 3, 8, 17, 33)):
            return False
    return True


def equal(ours: np.ndarray, theirs: np.ndarray, bits: bool) -> bool:
    if bits:
        return np.array_equal(ours, theirs)
    return bool(np.abs(ours - theirs).max() <= BOUND * np.abs(theirs).max())


def check(engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch, length: int, bits: bool) -> None:
    driver, tokens = Driver(engine, monkeypatch), prompt(length)
    whole = driver.logits(tokens, [length], driver.tables(length))
    chunked = driver.logits(tokens, [33, 1, 14, 1, length - 49], driver.tables(length))
    assert equal(chunked, whole, bits)
    own, other = driver.tables(length), driver.tables(40)
    driver.seen = []
    first = driver.row(prompt(39, seed=7), 0, 39, other, 0)
    driver.step([first, driver.row(tokens, 0, length - 2, own, 0)])
    assert equal(driver.seen[1][1], whole[:-2], bits)
    driver.seen = []
    pair = [
        driver.row(prompt(40, seed=7), 39, 40, other, 39),
        driver.row(tokens, length - 2, length - 1, own, length - 2),
    ]
    driver.step(pair)
    driver.step([driver.row(tokens, length - 1, length, own, length - 1)])
    assert equal(np.concatenate([driver.seen[1][1], driver.seen[2][1]]), whole[-2:], bits)
    engine.close()


@pytest.mark.parametrize("name", MODELS)
def test_alone_is_batched_is_cached(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prove: bool) -> None:
    """A prompt of 200 tokens whole, in chunks and in batches; its last tokens decoded in batches and alone."""
    assert set(MODELS) >= OFTEN
    if not prove and name not in OFTEN:
        pytest.skip("only with --prove")
    engine = load(write_model(tmp_path, **MODELS[name]), device="mlx-cpu", kv_dtype="f32")
    check(engine, monkeypatch, 200, products_keep_bits())


@pytest.mark.parametrize(
    "options",
    [
        {"kv_dtype": "f32", "weights": "int8"},
        {"kv_dtype": "bf16", "weights": "int4"},
        {"kv_dtype": "bf16", "weights": "bf16"},
    ],
    ids=str,
)
def test_packed_and_narrow_weights_and_long_contexts(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, **{**MODELS["llama 2"], "max_position_embeddings": 1024, "hidden_size": 64})
    engine = load(folder, device="mlx-cpu", step_tokens=1000, **options)
    check(engine, monkeypatch, 900, products_keep_bits())


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (4, 32), (8, 64)])
def test_a_folder_of_mlx_community_is_computed_as_it_is_stored(
    bits: int, group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the folder's group size and scales: logits equal those of the dequantised numbers."""
    plain, packed = write_quantized(
        tmp_path, mlx(bits, group), {"group_size": group, "bits": bits}, num_hidden_layers=2
    )
    results = []
    for folder, options in ((plain, {"kernels": "reference", "weights": "f32"}), (packed, {"device": "mlx-cpu"})):
        engine = load(folder, kv_dtype="f32", **{"weights": "stored", **options})
        driver = Driver(engine, monkeypatch)
        results.append(driver.logits(prompt(40), [40], driver.tables(40)))
        if options.get("device"):
            called = [call for call in engine._body.calls if call.kernel == "project"]
            parts = [part for call in called for part in call.arguments[1].parts if isinstance(part, CodedPart)]
            assert {(part.group, part.bits) for part in parts} == {(group, bits)} and len(parts) == 14
            assert bits == 8 or all(part.scale.dtype == mx.bfloat16 for part in parts)
        engine.close()
    assert np.abs(results[0] - results[1]).max() <= BOUND * np.abs(results[0]).max()


@pytest.fixture
def compiling(prove: bool) -> Iterator[None]:
    """Disable `mx.compile` unless --prove is given: on a CPU it calls a C++ compiler, for 10 s a model."""
    if not prove:
        mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("graphs", [1, 64])
@pytest.mark.parametrize("name", ["llama 2", "gemma 3", "olmoe", "deepseek 3", "nemotron h", "lfm 2, biases"])
def test_a_compiled_step_computes_what_its_operations_do(
    name: str, graphs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: one graph of single tokens is built per size, and run with other blocks and states."""
    monkeypatch.setattr(program, "_GRAPHS", graphs)
    made: list[MlxKernels] = []

    def kernels(name: str, kernels: str, threads: int, layers: tuple[int, ...] = ()) -> MlxKernels:
        made.append(MlxKernels("cpu", compiled=bool(made)))
        return made[-1]

    monkeypatch.setattr("cairn.kernels.devices.load", kernels)
    folder, tokens = write_model(tmp_path, **MODELS[name]), prompt(24)
    results = []
    for _ in range(2):
        engine = load(folder, device="mlx-cpu", kv_dtype="f32")
        driver = Driver(engine, monkeypatch)
        first, second = driver.tables(40), driver.tables(40)
        driver.step([driver.row(tokens, 0, 20, first, None), driver.row(tokens, 0, 9, second, None)])
        for at in range(4):
            one = driver.row(tokens, 20 + at, 21 + at, first, 20 + at)
            driver.step([one, driver.row(tokens, 9 + at, 10 + at, second, 9 + at)])
        results.append(np.concatenate([logits for _, logits in driver.seen]))
        engine.close()
    assert np.abs(results[0] - results[1]).max() <= BOUND * np.abs(results[0]).max()
