"""Layers that keep a state: a snapshot is as good as the tokens behind it, bit for bit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cairn.models.spec.config import load_spec
from cairn.types.step import NO_BLOCK, Row
from tests import tiny_models
from tests.golden.test_same_answer import mixed_batch, same_bits
from tests.tiny_models import GREEDY, KERNELS, MODELS, Driver, prompt, write_model

LENGTH = 150
NAMES = ["qwen 3.5", "lfm 2", "granite 4 hybrid"]
"""One model of each kind: gated delta net, short convolution, Mamba 2."""


@pytest.fixture(params=KERNELS)
def load(request: pytest.FixtureRequest) -> Any:
    return partial(tiny_models.load, kernels=request.param, context=256)


def state_group(driver: Driver) -> int:
    return next(number for number, group in enumerate(driver.engine.info.groups) if group.kind == "state")


def tables_of(driver: Driver, length: int, states: dict[int, int]) -> tuple[Any, ...]:
    """Return fresh KV blocks for a sequence, and a state table with `states` at some of its entries."""
    made = list(driver.tables(length))
    own = [states.get(place, NO_BLOCK) for place in range(-(-length // 16))]
    made[state_group(driver)] = own
    return tuple(made)


def run(driver: Driver, tokens: list[int], start: int, end: int, tables: tuple[Any, ...]) -> np.ndarray:
    driver.seen.clear()
    driver.step([driver.row(tokens, start, end, tables, start)])
    return np.concatenate([logits for _, logits in driver.seen])


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_continues_with_the_same_bits(
    load: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same engine, from another row of the same step, and from a page in another engine; the snapshot stays."""
    folder = write_model(tmp_path, **MODELS[name])
    driver, other = Driver(load(folder), monkeypatch), Driver(load(folder), monkeypatch)
    group, tokens = state_group(driver), prompt(LENGTH)
    for one in (driver, other):
        one.engine._kv[group][:] = np.nan  # unwritten memory must never be read
    cold_tables = tables_of(driver, LENGTH, {1: 7, 3: 3, 9: 5})
    cold = run(driver, tokens, 0, LENGTH, cold_tables)
    pages = [page.tobytes() for page in driver.engine.read_blocks(group, [7, 3]).wait()]
    for place, (hit, source) in enumerate([(32, 7), (64, 3)]):
        mixed = [
            [*old[: hit // 16], *new[hit // 16 :]] for old, new in zip(cold_tables, driver.tables(LENGTH), strict=True)
        ]
        mixed[group] = [NO_BLOCK] * (hit // 16 - 1) + [source] + [NO_BLOCK] * (9 - hit // 16) + [20]
        assert same_bits(run(driver, tokens, hit, LENGTH, tuple(mixed)), cold[hit:])
        fresh = list(other.tables(LENGTH))
        for number, table in enumerate(fresh):
            if number != group:
                kv = driver.engine.read_blocks(number, cold_tables[number][: hit // 16]).wait()
                other.engine.write_blocks(number, table[: hit // 16], kv).wait()
        other.engine.write_blocks(group, [11], [memoryview(pages[place])]).wait()
        fresh[group] = [NO_BLOCK] * (hit // 16 - 1) + [11] + [NO_BLOCK] * (9 - hit // 16) + [12]
        assert same_bits(run(other, tokens, hit, LENGTH, tuple(fresh)), cold[hit:])
    assert [page.tobytes() for page in driver.engine.read_blocks(group, [7, 3]).wait()] == pages


@pytest.mark.parametrize("name", NAMES)
def test_any_batch_gives_the_same_bits(load: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(load(write_model(tmp_path, **MODELS[name]), threads=2), monkeypatch)
    lengths = [1, 2, 15, 16, 17, 33, 64, 90, 130, 201]
    alone = [driver.logits(prompt(n, seed=seed), [n], driver.tables(n)) for seed, n in enumerate(lengths)]
    driver._next = [0] * len(driver._next)
    together = mixed_batch(driver, np.random.default_rng(1), lengths)
    for one, want in enumerate(alone):
        assert same_bits(together[one], want), lengths[one]


def test_a_row_without_a_block_for_its_state_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tiny_models.load(write_model(tmp_path, **MODELS["qwen 3.5"])), monkeypatch)
    tokens = prompt(40)
    for start, states in ((0, {}), (0, {0: 1, 1: 2}), (20, {2: 1}), (32, {0: 3, 2: 1})):
        tables = tables_of(driver, 40, states)
        with pytest.raises(ValueError, match="a row has no block for its state"):
            driver.step([Row(tokens, start, 40, tables, 39, 40, GREEDY, 0)])
    driver.step([Row(tokens, 0, 40, tables_of(driver, 40, {2: 1}), 39, 40, GREEDY, 0)])


def test_a_state_takes_the_bytes_that_the_engine_reports(tmp_path: Path) -> None:
    """Float32 whatever the KV type: for each layer, a convolution's window and a matrix a head."""
    engine = tiny_models.load(write_model(tmp_path, **MODELS["qwen 3.5"]), kv_dtype="bf16")
    (group,) = (group for group in engine.info.groups if group.kind == "state")
    number = engine.info.groups.index(group)
    channels = 2 * 2 * 12 + 4 * 20
    assert group.layers == (0, 1, 2) and group.numbers == 3 * channels + 4 * 12 * 20
    assert engine.info.block_bytes[number] == 4 * group.numbers * 3
    assert engine._kv[number].shape == (engine.info.blocks[number], 3, group.numbers)
    assert str(engine._kv[number].dtype) == "float32"


def test_a_forgotten_token_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test itself: a convolution window that a chunk does not pass on gives other bits."""
    from cairn.kernels import recurrent

    driver = Driver(tiny_models.load(write_model(tmp_path, **MODELS["lfm 2"]), kernels="reference"), monkeypatch)
    tokens = prompt(60)
    whole = driver.logits(tokens, [60], driver.tables(60))
    real = recurrent._before
    monkeypatch.setattr(recurrent, "_before", lambda states, layer, table, start: 0 * real(states, layer, table, start))
    assert not same_bits(driver.logits(tokens, [30, 30], driver.tables(60)), whole)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_only_the_text_part_is_loaded_without_the_draft_head(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3.5 as published: nested, with a vision encoder and a draft head."""
    plain = write_model(tmp_path / "plain", **MODELS["qwen 3.5"])
    config = json.loads((plain / "config.json").read_text())
    nested = tmp_path / "nested"
    nested.mkdir()
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config, "vision_config": {}}
    (nested / "config.json").write_text(json.dumps(outer))
    own = load_file(plain / "model.safetensors")
    tensors = {prefix + name.removeprefix("model."): array for name, array in own.items() if name != "lm_head.weight"}
    tensors |= {"lm_head.weight": own["lm_head.weight"]}
    extra = np.ones((2, 2), np.float32)
    tensors |= {
        "model.visual.blocks.0.attn.qkv.weight": extra,
        "mtp.fc.weight": extra,
        "mtp.layers.0.mlp.x.weight": extra,
    }
    save_file(tensors, nested / "model.safetensors")
    results = []
    for folder in (plain, nested):
        engine = tiny_models.load(folder)
        driver = Driver(engine, monkeypatch)
        results.append(driver.logits(prompt(60), [60], driver.tables(60)))
        assert ("without images" in engine.info.note) == (folder == nested)
        engine.close()
    np.testing.assert_array_equal(*results)


def test_a_model_without_a_state_keeps_its_identity(tmp_path: Path) -> None:
    """New spec fields that change nothing must not become part of the identity, or stored KV would be lost."""
    from cairn.models.spec.config import _facts

    facts = _facts(load_spec(write_model(tmp_path)))
    assert not {"recurrence", "output_gate"} & set(facts)
    assert all("numbers" not in group for group in facts["groups"])
