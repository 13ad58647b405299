"""The place where a mixture's experts are computed: by the memory plan or by the option, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: kernels on devices are not tested")

from cairn.cli.doctor import _fit
from cairn.config.config import Config, draft_options
from cairn.engine import cpu_experts, memory
from cairn.engine import needs as needs_of
from cairn.engine.cpu_experts import divided, sentence, settled
from cairn.engine.load_engine import check_files, load_engine
from cairn.engine.memory import WeightMemory, beside_weights, check_memory, pool_blocks, weight_memory
from cairn.engine.needs import needs
from cairn.frontend.device_fallback import DeviceFallback
from cairn.models.packing.weight_format import HeldWeights
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.system.posix import SystemClock
from cairn.types.errors import ModelError
from cairn.types.model_spec import ModelSpec
from cairn.worker import wire
from tests.tiny_models import KERNELS, MODELS, write_model

OPTIONS: dict[str, Any] = {
    "device": "torch-cpu",
    "kernels": KERNELS[0],
    "weights": "int4",
    "kv_gb": 0.001,
    "step_tokens": 64,
    "max_running": 4,
    "threads": 1,
}
SIZES = {"hidden_size": 64, "moe_intermediate_size": 128, "num_experts": 16}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", **MODELS["qwen 3 moe"] | SIZES)


def opened(model: Path) -> tuple[ModelSpec, HeldWeights]:
    spec = load_spec(model)
    return spec, HeldWeights(open_weights(model, spec), "int4")


def planted(monkeypatch: pytest.MonkeyPatch, device: int | None, machine: int = 1 << 40) -> None:
    """Give the device memory of its own, and the machine so much."""
    for module in (memory, cpu_experts, needs_of):
        monkeypatch.setattr(module, "free_memory", lambda name: device)
    monkeypatch.setattr(memory, "memory_available", lambda: machine)


def sizes(model: Path, config: Config) -> tuple[int, int]:
    """Return the device bytes that the model takes with all of its experts, and with none."""
    spec, weights = opened(model)
    whole = weight_memory(spec, weights, "torch")
    beside = sum(beside_weights(spec, config, pool_blocks(spec, config, 0, whole)))
    return whole.held + beside, whole.held - whole.experts + beside


def test_experts_go_to_the_cpu_where_the_device_has_no_room_for_them(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a byte sooner, and not if even the rest does not fit."""
    config, (spec, weights) = Config(**OPTIONS), opened(model)
    whole, rest = sizes(model, config)
    layers = spec.experts.layers  # type: ignore[union-attr]
    for free, wanted in ((whole, ()), (whole - 1, layers), (rest, layers), (rest - 1, ())):
        planted(monkeypatch, free)
        assert divided(spec, config, weights).cpu_layers == wanted, free
        off = Config(**OPTIONS, cpu_experts="off")
        assert divided(spec, off, weights).cpu_layers == (), "it was forbidden"
    planted(monkeypatch, None, whole - 1)
    assert divided(spec, config, weights).cpu_layers == (), "the device has no memory of its own"


def test_a_model_larger_than_the_device_is_loaded_and_says_where_its_experts_are(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(**OPTIONS)
    whole, rest = sizes(model, config)
    planted(monkeypatch, rest)
    _, engine = load_engine(config, model)
    assert "the CPU computes the experts of 2 layers, 0.00 GB, with " in engine.info.device_text
    assert engine.info.cpu_experts == "all"
    engine.close()
    planted(monkeypatch, whole)
    _, engine = load_engine(config, model)
    assert "experts" not in engine.info.device_text and engine.info.cpu_experts == "off"
    engine.close()
    planted(monkeypatch, rest - 1)
    with pytest.raises(ModelError, match=r"needs .* weights, .* KV pool"):
        load_engine(config, model)


def test_experts_on_the_cpu_must_fit_the_machines_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, (spec, weights) = Config(**OPTIONS), opened(model)
    _, rest = sizes(model, config)
    planted(monkeypatch, rest)
    found = divided(spec, config, weights)
    assert found.apart >= found.on_cpu == found.experts > 0
    planted(monkeypatch, rest, found.apart)
    load_engine(config, model)[1].close()
    planted(monkeypatch, rest, found.apart - 1)
    with pytest.raises(ModelError, match=r"the experts that the CPU computes need .* of the machine's memory"):
        load_engine(config, model)


def test_held_weights_count_once_if_device_and_machine_share_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, None)
    (spec, weights), config = opened(model), Config(**OPTIONS, cpu_experts="all")
    found, whole = divided(spec, config, weights), weight_memory(spec, weights, "torch")
    assert found.apart == 0 and found.held == whole.held - whole.experts + found.on_cpu
    assert (found.streamed, found.head, found.share) == (whole.streamed, whole.head, whole.share)
    check_memory(spec, config, pool_blocks(spec, config, 0, found), 1 << 40, found)


def test_the_needs_of_a_model_count_both_memories(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When models share the machine, the pool is sized by the device's memory and the experts by the machine's."""
    config = Config(**OPTIONS)
    _, rest = sizes(model, config)
    planted(monkeypatch, rest)
    spec, weights = opened(model)
    found = divided(spec, config, weights)
    got = needs(config, model, 1 << 40)
    assert got.weights == found.held + found.apart and got.blocks == pool_blocks(spec, config, rest, found)


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({}, {"device": "cpu"}, "the device is the CPU, which computes all of the model; leave cpu_experts out"),
        ({}, {"device": "auto"}, "the device is the CPU"),
        ({}, {"device": "mlx-cpu"}, "device mlx-cpu has the machine's own memory; leave cpu_experts out"),
        (MODELS["llama 2"], {}, "the model has no experts; leave cpu_experts out"),
        ({}, {"tp": 2}, "tp is 2, and each rank holds a part of all experts"),
        ({}, {"cpu_experts": "3"}, "cpu_experts is 3, but the model has 2 layers; use a number up to that, or all"),
        (
            MODELS["deepseek 3"],
            {"cpu_experts": "1"},
            "experts begin in layer 2; use a number from there to 2, or all",
        ),
        ({}, {"experts": "mapped"}, "experts that the CPU computes beside a device cannot be mapped"),
    ],
)
def test_impossible_placements_are_refused_in_a_sentence(
    fields: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", **(fields or MODELS["qwen 3 moe"]))
    config = Config(**OPTIONS | {"cpu_experts": "all"} | options)
    with pytest.raises(ModelError, match=message):
        load_engine(config, folder)
    if "experts" not in options:  # which is no fault of the files
        with pytest.raises(ModelError, match=message):
            check_files(config, folder)


def test_a_choice_is_made_again_by_its_name(model: Path) -> None:
    """A worker that replaces another computes the same, however much memory is free then."""
    part = WeightMemory(1, 0, cpu_layers=(0,), on_cpu=2 * 10**9)
    for option, memory_, name in (
        ("auto", part, "all"),
        ("1", part, "1"),
        ("all", part, "all"),
        ("auto", WeightMemory(1, 0), "off"),
        ("off", WeightMemory(1, 0), "off"),
    ):
        assert settled(Config(device="torch-cpu", cpu_experts=option), memory_) == name
    assert settled(Config(device="cpu"), WeightMemory(1, 0)) == ""
    assert sentence(Config(kernels="reference"), part).startswith("the CPU computes the experts of 1 layer, 2.00 GB")
    assert draft_options(Config(draft_model="small", cpu_experts="all")).cpu_experts == "auto"


def test_doctor_says_whose_experts_the_cpu_computes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(**OPTIONS)
    whole, rest = sizes(model, config)
    for free, said in ((whole, False), (rest, True)):
        planted(monkeypatch, free)
        lines = _fit(str(model), config)
        assert lines.startswith("fits: ") and ("the CPU computes the experts of 2 layers" in lines) == said
    dense = write_model(model.parent / "dense", **MODELS["llama 2"])
    others = _fit(str(dense), Config(**OPTIONS, cpu_experts="all"))
    assert others == "no: dense: cpu_experts is all, but the model has no experts; leave cpu_experts out"


def test_the_cpu_that_stands_in_for_a_device_computes_all_of_the_model(model: Path) -> None:
    """Also if only its experts were requested there; otherwise no worker could ever load it."""
    fallback = DeviceFallback(SystemClock())
    load = wire.LoadModel(Config(**OPTIONS, cpu_experts="all"), str(model))
    assert fallback.load(load).config.cpu_experts == "all"
    for _ in range(2):
        fallback.failed("no answer")
    moved = fallback.load(load).config
    assert (moved.device, moved.cpu_experts) == ("cpu", "auto")
    load_engine(moved, model)[1].close()
