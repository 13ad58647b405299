"""A model over several ranks: one rank's numbers within rounding, the same KV through pages, and rank death."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: no device but the CPU is tested")

from cairn.config.config import Config
from cairn.engine import parallel as parallel_module
from cairn.engine.load_engine import load_engine
from cairn.engine.memory import WeightMemory, weight_bytes
from cairn.engine.parallel import ParallelEngine
from cairn.engine.rank_group import ShardKernels
from cairn.engine.shards import ShardedWeights, check_parallel, shard_spec
from cairn.kernels.program import Interpreted, KernelCall, Slot
from cairn.kv.pool.blocks import Copy
from cairn.models.packing.weight_format import HeldWeights, form_of
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.scheduler.planned_step import Plan
from cairn.types.errors import DeviceError, DeviceMemoryError, ModelError
from tests.engine.rank_threads import ThreadedRanks
from tests.tiny_models import MODELS, Driver, load, prompt, write_model

BOUND = 2e-4
LENGTH = 37


def parallel(folder: Path, ranks: int, device: str = "cpu") -> ParallelEngine:
    config = Config(model=str(folder), device=device, kv_dtype="f32", tp=ranks, kv_gb=0.002, threads=1)
    return ParallelEngine.load(load_spec(folder), folder, config)


@pytest.mark.parametrize(
    ("name", "device", "ranks"),
    [
        ("llama 2", "torch-cpu", 2),
        ("gpt-oss", "cpu", 2),
        ("deepseek 3", "cpu", 2),
        ("mixtral", "cpu", 4),
        ("phi 2", "cpu", 2),
        ("gpt neox", "torch-cpu", 2),
    ],
)
def test_ranks_are_near_one(
    name: str, device: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU the bits are the same in chunks, from pages read and written, and with threads as ranks."""
    folder, tokens = write_model(tmp_path, **MODELS[name]), prompt(LENGTH)
    one = Driver(load(folder, kernels="reference", kv_dtype="f32"), monkeypatch)
    theirs = one.logits(tokens, [LENGTH], one.tables(LENGTH))
    one.engine.close()
    engine = parallel(folder, ranks, device)
    driver = Driver(engine, monkeypatch)  # type: ignore[arg-type]
    ours = driver.logits(tokens, [20, 1, 16], first := driver.tables(LENGTH))
    assert np.abs(ours - theirs).max() <= BOUND * np.abs(theirs).max()
    exact = device == "cpu"
    if exact:
        threads = ThreadedRanks(folder, ranks)
        beside = Driver(threads, monkeypatch)  # type: ignore[arg-type]
        np.testing.assert_array_equal(beside.logits(tokens, [LENGTH], beside.tables(LENGTH)), ours)
        threads.close()
    fresh = driver.tables(LENGTH)
    for group, size in enumerate(engine.info.block_bytes):
        pages = engine.read_blocks(group, first[group][:1]).wait()
        assert [len(page) for page in pages] == [size]
        parts = {"deepseek 3": 1}.get(name, 2)  # each rank holds a whole latent; of four, two share a key head
        assert size == parts * engine._own.info.block_bytes[group]
        engine.write_blocks(group, fresh[group][:1], pages).wait()
        with pytest.raises(ValueError, match="has"):
            engine.write_blocks(group, fresh[group][:1], [pages[0][:-1]])
    driver = Driver(engine, monkeypatch)  # type: ignore[arg-type]
    driver.step([driver.row(tokens, 16, LENGTH, fresh, 16)])
    assert np.abs(driver.seen[0][1] - theirs[16:]).max() <= BOUND * np.abs(theirs).max()
    if exact:
        np.testing.assert_array_equal(driver.seen[0][1], ours[16:])
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


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *(("step", error) for error in (DeviceMemoryError("short"), MemoryError("short"), ValueError("wrong"))),
        *((call, DeviceMemoryError("short")) for call in ("copy", "read", "write")),
    ],
)
def test_what_fails_in_one_rank_alone_ends_all(
    call: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank is still within the call: what it would add to the next step belongs to another layer."""
    folder, tokens = write_model(tmp_path, **MODELS["llama 2"]), prompt(LENGTH)
    engine = parallel(folder, 2)
    driver = Driver(engine, monkeypatch)  # type: ignore[arg-type]
    tables = driver.tables(LENGTH)
    driver.logits(tokens, [LENGTH], tables)
    pages = engine.read_blocks(0, tables[0][:1]).wait()
    row = driver.row(tokens, 0, LENGTH, driver.tables(LENGTH), LENGTH - 1)
    plan = Plan([row], [], [], [], [Copy(0, 0, 1)] if call == "copy" else [], LENGTH, 0)

    def fail(*given: object) -> None:
        raise error

    place = {"step": (engine._group, "add_up"), "copy": (engine._own, "copy_blocks")}
    place |= {one: (engine._own, f"{one}_blocks") for one in ("read", "write")}
    with monkeypatch.context() as patched:
        patched.setattr(*place[call], fail)
        found: object = None
        if call in ("step", "copy"):
            found = plan.run(engine)
        else:
            with pytest.raises(DeviceError) as caught:
                engine.read_blocks(0, [0]) if call == "read" else engine.write_blocks(0, [0], pages)
            found = caught.value
    assert type(found) is DeviceError and str(error) in str(found)
    assert type(plan.run(engine)) is DeviceError  # also once nothing fails any more
    engine.close()


def test_models_that_ranks_cannot_divide_are_refused_by_name(tmp_path: Path) -> None:
    for name, why in (
        ("qwen 3.5", "Qwen3_5ForCausalLM, as all models with recurrent layers, runs on one rank"),
        ("gemma 4", "Gemma4ForCausalLM, as all models with layers that differ"),
        ("deepseek 3", "tp is 3, but the model has 10 heads, no multiple of it"),
        ("stablelm, parallel, norms of heads", "a norm for each head"),
        ("llama 2", "has 4 heads, no multiple of it"),
    ):
        spec = load_spec(write_model(tmp_path / name, **MODELS[name]))
        with pytest.raises(ModelError, match=why):
            check_parallel(spec, 3)
    with pytest.raises(ModelError, match="mlx has no ranks: use --device cpu, cuda or rocm"):
        ParallelEngine.load(spec, tmp_path, Config(device="mlx", tp=2))


def test_ranks_want_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path, **MODELS["llama 2"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="ranks meet through torch: torch is not installed"):
        load_engine(Config(model=str(folder), tp=2), folder)


def test_buffers_that_pieces_share_are_kept() -> None:
    """A sum cuts a program in two; what one part leaves to the other must not stay in a kernel's registers."""
    made = []

    class Seen:
        """Kernels that record the programs they are given."""

        def matrix(self, weights: object, biases: object) -> object:
            return object()

        def program(self, calls: object) -> object:
            made.append(calls)
            return Interpreted(self, calls)  # type: ignore[arg-type]

    weights: Any = ShardedWeights({"model.layers.0.mlp.down_proj.weight": np.zeros((4, 8))}, 0, 2)
    kernels = ShardKernels(Seen(), weights, None)  # type: ignore[arg-type]
    down = kernels.matrix([weights["model.layers.0.mlp.down_proj.weight"]], [None])
    one, two = (Slot("tokens", np.zeros(1), True) for _ in range(2))
    kernels.program([KernelCall("project", (one, down, two)), KernelCall("add", (two, one))])
    first, second = made
    assert [call.kernel for call in first] == ["project"] and [call.kernel for call in second] == ["add"]
    assert not first[0].arguments[2].passing and second[0].arguments[0] is first[0].arguments[2]


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


@pytest.mark.parametrize("form", ["f32", "bf16"])
def test_memory_is_planned_for_the_ranks_part_of_the_weights_form(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, **MODELS["llama 2"])
    spec, planned = load_spec(folder), list[WeightMemory]()
    monkeypatch.setattr(parallel_module, "check_memory", lambda *given: planned.append(given[-1]))
    monkeypatch.setattr(parallel_module, "RankProcess", NoRank)
    with pytest.raises(NoRankError):
        ParallelEngine.load(spec, folder, Config(tp=2, weights=form, kv_gb=0.002))
    part = shard_spec(spec, 2)
    sharded = ShardedWeights(HeldWeights(open_weights(folder, spec), form_of(spec, form)), 0, 2, part.heads)
    for name in sharded:
        meta, made = sharded.outline(name), sharded[name]
        assert meta.shape == tuple(made.shape), name
    assert planned[0].held <= weight_bytes(part) * {"f32": 1.1, "bf16": 0.6}[form]


class NoRankError(Exception):
    """No other rank is started."""


class NoRank:
    def __init__(self, number: int) -> None:
        raise NoRankError
