"""Adapters in the engine: their effect, and that every row's bits are those of its run alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cairn.engine.recorded import RecordedEngine
from cairn.models.safetensors.weights import open_tensors
from cairn.types.errors import ModelError
from cairn.types.step import NO_ADAPTER, Row
from tests.adapter_files import pairs, random_peft, write_peft
from tests.gguf_files import Type as GgufType
from tests.gguf_files import write_gguf
from tests.tiny_models import KERNELS, MODELS, Driver, load, prompt, write_config, write_model


def attach(engine: RecordedEngine, place: Path, scale: float = 1.0) -> tuple[tuple[bytes, float], ...]:
    """Attach an adapter; return the reference to it that rows carry."""
    return ((engine.attach(engine.read_adapter(place)).digest, scale),)


def adapted(row: Row, adapters: tuple[tuple[bytes, float], ...]) -> Row:
    return msgspec.structs.replace(row, adapters=adapters)


def scores(driver: Driver, tokens: list[int], adapters: tuple[tuple[bytes, float], ...] = ()) -> np.ndarray:
    """Return the logits of all positions of a sequence that is computed alone."""
    driver.seen.clear()
    driver.step([adapted(driver.row(tokens, 0, len(tokens), driver.tables(len(tokens)), 0), adapters)])
    return driver.seen[0][1]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ["qwen 3 with window layers", "llama with biases, tied", "gemma 3"])
def test_a_side_path_gives_what_merged_weights_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kernels: str
) -> None:
    base = write_model(tmp_path / "base", **MODELS[name])
    matrices = pairs(base, seed=5)
    place = write_peft(tmp_path / "adapter", matrices, lora_alpha=6)
    merged = {one: np.array(array) for one, array in open_tensors(base / "model.safetensors").items()}
    for module, (down, up) in matrices.items():
        merged[f"{module}.weight"] += 6 / 4 * up @ down
    fields = dict(MODELS[name])
    write_config(tmp_path / "merged", fields.pop("architecture"), **fields)
    from safetensors.numpy import save_file

    save_file(merged, tmp_path / "merged" / "model.safetensors")
    tokens = prompt(40)
    whole = scores(Driver(load(tmp_path / "merged", kernels=kernels), monkeypatch), tokens)
    engine = load(base, kernels=kernels)
    driver = Driver(engine, monkeypatch)
    plain = scores(driver, tokens)
    found = scores(driver, tokens, attach(engine, place))
    np.testing.assert_allclose(found, whole, atol=3e-4, rtol=1e-3)
    assert np.abs(found - plain).max() > 0.05
    half = scores(driver, tokens, attach(engine, place, 0.0))
    assert half.tobytes() == plain.tobytes()


WEIGHTS = [("qwen 3, head size of its own", "f32"), ("llama 3 rope", "bf16"), ("wide", "int8"), ("wide", "int4")]
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("name", "weights"), WEIGHTS)
def test_each_row_of_a_mixed_batch_has_the_bits_of_its_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, weights: str, kernels: str
) -> None:
    base = write_model(tmp_path / "base", **MODELS.get(name, {"architecture": "LlamaForCausalLM", **WIDE}))
    places = [random_peft(tmp_path / str(n), base, n, rank=2 + 3 * n) for n in range(4)]
    places.append(write_peft(tmp_path / "part", pairs(base, ("v_proj", "down_proj"), rank=5, seed=9)))
    untouched = Driver(load(base, kernels=kernels, weights=weights), monkeypatch)
    texts = [prompt(length, seed=length) for length in (3, 17, 30, 9, 24, 12, 20)]
    bare = [scores(untouched, tokens) for tokens in texts]

    engine = load(base, kernels=kernels, weights=weights)
    driver = Driver(engine, monkeypatch)
    known = [attach(engine, place) for place in places]
    uses = [known[0], (), known[1], known[0] + known[3], known[4], (), known[2]]
    alone = [scores(driver, tokens, use) for tokens, use in zip(texts, uses, strict=True)]
    for own, plain, use in zip(alone, bare, uses, strict=True):
        assert (own.tobytes() == plain.tobytes()) == (not use)

    tables = [driver.tables(len(tokens)) for tokens in texts]
    driver.seen.clear()
    rows = [driver.row(tokens, 0, len(tokens) - 2, table, 0) for tokens, table in zip(texts, tables, strict=True)]
    driver.step([adapted(row, use) for row, use in zip(rows, uses, strict=True)])
    for step in (2, 1):  # one token a row
        rows = [
            driver.row(tokens, len(tokens) - step, len(tokens) - step + 1, table, len(tokens) - step)
            for tokens, table in zip(texts, tables, strict=True)
        ]
        driver.step([adapted(row, use) for row, use in zip(rows, uses, strict=True)])
    count = len(texts)
    for number in range(count):
        mixed = np.concatenate([driver.seen[number + part * count][1] for part in range(3)])
        assert mixed.tobytes() == alone[number].tobytes(), number


def test_adapters_come_and_go_and_a_row_without_its_adapter_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_model(tmp_path / "base")
    engine = load(base)
    driver = Driver(engine, monkeypatch)
    first, second = (attach(engine, random_peft(tmp_path / str(n), base, n)) for n in (1, 2))
    assert attach(engine, tmp_path / "1") == first, "the same adapter is attached once"
    tokens = prompt(20)
    wanted = [scores(driver, tokens, use) for use in ((), first, second)]
    engine.detach(first[0][0])
    engine.detach(b"unknown")
    rows = [driver.row(tokens, 0, 20, driver.tables(20), 0) for _ in range(3)]
    driver.seen.clear()
    results = driver.step([adapted(row, use) for row, use in zip(rows, ((), first, second), strict=True)])
    assert [result.error for result in results] == ["", NO_ADAPTER, ""]
    assert driver.seen[0][1].tobytes() == wanted[0].tobytes()
    assert driver.seen[2][1].tobytes() == wanted[2].tobytes()
    attach(engine, tmp_path / "1")
    assert scores(driver, tokens, first).tobytes() == wanted[1].tobytes()
    for adapter in (first, second):
        engine.detach(adapter[0][0])
    assert scores(driver, tokens).tobytes() == wanted[0].tobytes()
    with pytest.raises(ValueError, match="5 adapters; the limit is 4"):
        driver.step([adapted(rows[0], first * 5)])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "qwen 3 moe": ({"targets": ("gate_proj",)}, "mlp.experts.0.gate_proj, which is not supported"),
}


@pytest.mark.parametrize("name", [one for one in REFUSED if one in MODELS])
def test_modules_that_cannot_be_adapted_are_named(tmp_path: Path, name: str) -> None:
    base = write_model(tmp_path / "base", **MODELS[name])
    matrices = pairs(base, REFUSED[name][0]["targets"])
    with pytest.raises(ModelError, match=REFUSED[name][1]):
        load(base).read_adapter(write_peft(tmp_path / "adapter", matrices))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ["llama with biases, tied", "qwen 3, head size of its own"])
def test_on_a_gguf_file_an_adapter_is_what_it_is_on_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kernels: str
) -> None:
    """With unquantized weights to the bit, although a file orders rows differently; with 8 bits but for rounding."""
    base = write_model(tmp_path / "base", **MODELS[name] | WIDE | {"head_dim": 16})
    place, tokens = write_peft(tmp_path / "adapter", pairs(base, seed=5), lora_alpha=6), prompt(40)
    logits = {}
    for kind in (None, GgufType.F32, GgufType.Q8_0):
        model = base if kind is None else write_gguf(base, tmp_path / f"{kind.name}.gguf", kind=kind)
        engine = load(model, kernels=kernels)
        driver = Driver(engine, monkeypatch)
        logits[kind] = scores(driver, tokens), scores(driver, tokens, attach(engine, place))
    (plain, side), (rounded, both) = logits[None], logits[GgufType.Q8_0]
    assert logits[GgufType.F32][1].tobytes() == side.tobytes()
    assert np.abs((both - rounded) - (side - plain)).mean() < 0.1 * np.abs(side - plain).mean()
