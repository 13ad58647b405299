"""A model over several ranks: near one rank's numbers, the same KV through pages, and an end when a rank dies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: no device but the CPU is tested")

from cairn.config.config import Config
from cairn.engine.parallel import ParallelEngine
from cairn.engine.shards import ShardedWeights, check_parallel
from cairn.models.spec.config import load_spec
from cairn.types.errors import DeviceError, ModelError
from tests.tiny_models import MODELS, Driver, load, prompt, write_model

BOUND = 2e-4
LENGTH = 37


def parallel(folder: Path, ranks: int, **options: object) -> ParallelEngine:
    config = Config(model=str(folder), device="torch-cpu", kv_dtype="f32", tp=ranks, kv_gb=0.002, threads=1, **options)
    return ParallelEngine.load(load_spec(folder), folder, config)


@pytest.mark.parametrize("name", ["llama 2", "gpt-oss", "mixtral", "gemma 3", "phi 2", "gpt neox"])
def test_two_ranks_are_near_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, tokens = write_model(tmp_path, **MODELS[name]), prompt(LENGTH)
    one = Driver(load(folder, kernels="reference", kv_dtype="f32"), monkeypatch)
    theirs = one.logits(tokens, [LENGTH], one.tables(LENGTH))
    one.engine.close()
    engine = parallel(folder, 2)
    driver = Driver(engine, monkeypatch)  # type: ignore[arg-type]
    ours = driver.logits(tokens, [20, 1, 16], first := driver.tables(LENGTH))
    assert np.abs(ours - theirs).max() <= BOUND * np.abs(theirs).max()
    fresh, driver.seen = driver.tables(LENGTH), []
    for group, size in enumerate(engine.info.block_bytes):
        pages = engine.read_blocks(group, first[group][:1]).wait()
        assert [len(page) for page in pages] == [size]
        engine.write_blocks(group, fresh[group][:1], pages).wait()
        with pytest.raises(ValueError, match="has"):
            engine.write_blocks(group, fresh[group][:1], [pages[0][:-1]])
    driver.step([driver.row(tokens, 16, LENGTH, fresh, 16)])
    assert np.abs(driver.seen[0][1] - theirs[16:]).max() <= BOUND * np.abs(theirs).max()
    engine.close()


def test_a_rank_that_dies_ends_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, tokens = write_model(tmp_path, **MODELS["llama 2"]), prompt(LENGTH)
    engine = parallel(folder, 2)
    driver = Driver(engine, monkeypatch)  # type: ignore[arg-type]
    driver.logits(tokens, [LENGTH], driver.tables(LENGTH))
    engine._others[0].process.kill()
    engine._others[0].process.wait()
    with pytest.raises(DeviceError):
        driver.logits(tokens, [LENGTH], driver.tables(LENGTH))
    engine.close()


def test_what_cannot_be_cut_is_refused_by_name(tmp_path: Path) -> None:
    refused = {
        **{"qwen 3.5": "recurrent layers", "deepseek 3": "latents", "llama 2": "no multiple of it"},
        "stablelm, parallel, norms of heads": "a norm for each head",
    }
    for name, why in refused.items():
        spec = load_spec(write_model(tmp_path / name, **MODELS[name]))
        with pytest.raises(ModelError, match=why):
            check_parallel(spec, 3)
    with pytest.raises(ModelError, match="ranks compute with torch: use --device"):
        ParallelEngine.load(spec, tmp_path, Config(device="cpu", tp=2))


def test_the_parts_of_all_ranks_are_the_whole() -> None:
    rng = np.random.default_rng(1)
    layer = "model.layers.0."
    whole = {
        f"{layer}self_attn.q_proj.weight": rng.standard_normal((8, 4)),
        f"{layer}mlp.experts.3.down_proj.weight": rng.standard_normal((4, 8)),
        f"{layer}self_attn.o_proj.bias": rng.standard_normal(4),
        f"{layer}self_attn.q_norm.weight": rng.standard_normal(4),
    }
    parts = [ShardedWeights(whole, rank, 2) for rank in range(2)]
    found = {name: [part[name] for part in parts] for name in whole}
    names = list(whole)
    np.testing.assert_array_equal(np.concatenate(found[names[0]]), whole[names[0]])
    np.testing.assert_array_equal(np.concatenate(found[names[1]], axis=1), whole[names[1]])
    np.testing.assert_array_equal(np.sum(found[names[2]], axis=0), whole[names[2]])
    np.testing.assert_array_equal(found[names[3]][1], whole[names[3]])
    assert parts[0].take_partial([found[names[1]][0]]) and not parts[0].take_partial([found[names[1]][0]])
