"""Models whose experts run on the CPU beside a device: near the reference, same bits in every schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: kernels on devices are not tested")

from cairn.engine.recorded import RecordedEngine
from cairn.kernels import devices
from cairn.kernels.torch import cpu_experts
from cairn.models.spec.config import load_spec
from tests.tiny_models import BFLOAT16, KERNELS, MODELS, Driver, load, prompt, write_config, write_model

BOUND = 2e-4
"""Largest error of a logit as a share of the largest logit: another order of float32 sums, through all layers."""
LENGTH = 37
OFTEN = {"mixtral", "qwen 3 moe", "qwen 2 moe, shared expert", "gpt-oss", "deepseek 3", "llama 4", "gemma 4 moe"}
"""Families tested each time on torch's CPU; the others by `make prove`."""
SLOW = {"qwen 2 moe, shared expert"}
"""Families tested each time in Triton's interpreter."""
MIXTURES = [
    name for name, fields in MODELS.items() if any("expert" in one and fields[one] not in (None, 0) for one in fields)
]
FOUND = [
    pytest.param(one, marks=pytest.mark.skipif(bool(trouble), reason=f"{one}: {trouble}"))
    for one in ("torch-cpu", devices.INTERPRETED)
    for trouble in (devices.report(one).trouble,)
]


def logits(monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any) -> np.ndarray:
    """Return the logits of one prompt in one step."""
    driver = Driver(load(folder, kv_dtype="f32", **options), monkeypatch)
    result = driver.logits(prompt(LENGTH), [LENGTH], driver.tables(LENGTH))
    driver.engine.close()
    return result


def close(ours: np.ndarray, theirs: np.ndarray, bound: float = BOUND) -> bool:
    return bool(np.abs(ours - theirs).max() <= bound * np.abs(theirs).max())


def test_every_family_with_experts_is_among_those_tried(tmp_path: Path) -> None:
    specs = {name: load_spec(write_config(tmp_path / str(at), **MODELS[name])) for at, name in enumerate(MODELS)}
    assert {name for name, spec in specs.items() if spec.experts is not None} == set(MIXTURES) >= OFTEN >= SLOW


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("device", FOUND)
def test_a_mixture_with_its_experts_on_the_cpu_answers_as_one_device_does(
    device: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prove: bool
) -> None:
    """Near the reference.

    In the interpreter the bits are the same in one step, in chunks, from a cache and in a batch.
    """
    if not prove and name not in (OFTEN if device == "torch-cpu" else SLOW):
        pytest.skip("only with --prove")
    folder, tokens = write_model(tmp_path, **MODELS[name]), prompt(LENGTH)
    theirs = logits(monkeypatch, folder, kernels="reference")
    engine = load(folder, device=device, kv_dtype="f32", cpu_experts="all")
    layers = load_spec(folder).experts.layers  # type: ignore[union-attr]
    assert f"the CPU computes the experts of {len(layers)} layer" in engine.info.device_text
    assert engine.info.cpu_experts == "all"
    driver = Driver(engine, monkeypatch)
    whole = driver.logits(tokens, [LENGTH], first := driver.tables(LENGTH))
    assert close(whole, theirs)

    def same(got: np.ndarray, wanted: np.ndarray) -> None:
        if device == devices.INTERPRETED:
            np.testing.assert_array_equal(got, wanted)
        assert close(got, wanted)

    same(driver.logits(tokens, [19, 1, 1, 16], driver.tables(LENGTH)), whole)
    fresh, driver.seen = driver.tables(LENGTH), []
    if not any(group.kind == "state" for group in engine.info.groups):
        for group, copied in enumerate(zip(first, fresh, strict=True)):
            engine.copy_blocks(group, [(copied[0][0], copied[1][0])]).wait()
        other = driver.row(prompt(9, seed=5), 0, 9, driver.tables(9), 0)
        driver.step([driver.row(tokens, 16, LENGTH, fresh, 16), other])
        same(driver.seen[0][1], whole[16:])
    engine.close()


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_experts_stay_packed_for_the_cpus_kernels(
    kernels: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each CPU variant has a packed form of its own, so the logits are near those of the CPU alone."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "dtype": BFLOAT16}
    folder = write_model(tmp_path, **MODELS["qwen 2 moe, shared expert"] | sizes)
    packed: list[Any] = []
    real = cpu_experts.HostLayer.compute

    def seen(self: Any, count: int, arrived: Any) -> None:
        packed.append(self._program.calls[0].arguments[3][0])
        real(self, count, arrived)

    monkeypatch.setattr(cpu_experts.HostLayer, "compute", seen)
    ours = logits(monkeypatch, folder, device="torch-cpu", cpu_experts="all", weights=weights, kernels=kernels)
    theirs = logits(monkeypatch, folder, weights=weights, kernels=kernels)
    assert close(ours, theirs, 0.03)
    if kernels != "reference":
        bits = {"bf16": 16, "int8": 9, "int4": 5}[weights]
        assert packed and all(one.memory().nbytes * 8 <= 2 * 64 * 64 * bits for one in packed)


def test_the_experts_of_the_first_layers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path, **MODELS["qwen 3 moe"] | {"num_hidden_layers": 4})
    counts: list[int] = []
    real = cpu_experts.CpuExperts.send_rows
    monkeypatch.setattr(
        cpu_experts.CpuExperts, "send_rows", lambda self, x, *more: counts.append(len(x)) or real(self, x, *more)
    )
    theirs = logits(monkeypatch, folder, kernels="reference")
    for wanted, layers in (("off", 0), ("auto", 0), ("1", 1), ("3", 3), ("4", 4), ("all", 4)):
        counts.clear()
        got = logits(monkeypatch, folder, device="torch-cpu", cpu_experts=wanted)
        assert close(got, theirs) and counts == [LENGTH] * layers, wanted


def identity(folder: Path, **options: Any) -> bytes:
    engine: RecordedEngine = load(folder, **options)
    engine.close()
    return engine.info.identity


def test_kv_keys_name_which_experts_the_cpu_computes_and_with_what(tmp_path: Path) -> None:
    """CPU results differ from the device's in bits, so KV stored with another split must not be found."""
    folder = write_model(tmp_path, **MODELS["qwen 3 moe"])
    own = [{"cpu_experts": "off"}, {"cpu_experts": "1"}, *({"cpu_experts": "all", "kernels": one} for one in KERNELS)]
    identities = [identity(folder, device="torch-cpu", **options) for options in own]
    assert len({*identities, identity(folder)}) == len(own) + 1
    assert identity(folder, device="torch-cpu", cpu_experts="2", kernels=KERNELS[0]) == identities[2], (
        "that is all of them"
    )
