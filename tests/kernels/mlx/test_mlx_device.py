"""MLX's devices: what is reported, and how much memory is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed: its devices are not tested")

import mlx.core as mx

from cairn.config.config import Config
from cairn.engine.memory import kv_dtype, weight_memory
from cairn.kernels import devices
from cairn.kernels.mlx import device
from cairn.kernels.mlx.mlx_kernels import MlxKernels
from cairn.models.packing.weight_format import HeldWeights
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelError, NoDevice
from tests.tiny_models import MODELS, load, write_model

GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "recommended", "taken", "left"),
    [
        (16, 11, 0, 11),  # what Metal recommends
        (16, 15, 0, 14),  # an eighth is left to the system
        (8, 7, 0, 6),  # and 2 GiB at least
        (64, 48, 40, 8),
        (64, 48, 60, 0),
    ],
)
def test_unified_memory_keeps_a_reserve(memory: int, recommended: int, taken: int, left: int) -> None:
    info = {"memory_size": memory * GIB, "max_recommended_working_set_size": recommended * GIB}
    assert device.free_unified(info, taken * GIB) == left * GIB


def test_an_apple_gpu_is_reported_with_its_memory_and_its_limit_is_wired(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would be on a Mac; nothing here runs on one."""
    info = {"memory_size": 32 * GIB, "max_recommended_working_set_size": 22 * GIB, "device_name": "Example M9"}
    wired: list[int] = []
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda kind: info)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 2 * GIB)
    monkeypatch.setattr(mx, "set_wired_limit", wired.append)
    monkeypatch.setattr(device, "MlxKernels", lambda name, metal: (name, metal))
    assert devices.free_memory("mlx") == 20 * GIB and devices.free_memory("mlx-cpu") is None
    assert devices.report("mlx").sentence.startswith(f"Example M9: mlx on Metal, mlx {mx.__version__}, 21.47 GB of its")
    assert device.load(device.chosen("mlx"), True) == ("gpu", True) and wired == [22 * GIB]
    assert device.load(device.chosen("mlx-cpu")) == ("cpu", False) and len(wired) == 1


@pytest.mark.skipif(mx.metal.is_available(), reason="an Apple GPU is here")
def test_without_an_apple_gpu_mlx_is_the_cpu_and_says_so() -> None:
    assert "which finds no Apple GPU and computes on the CPU" in devices.report("mlx").sentence
    assert devices.free_memory("mlx") is None and not devices.report("mlx-cpu").trouble


def test_an_mlx_that_cannot_be_loaded_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("libmlx.so: cannot open shared object file\nmore")

    monkeypatch.setattr(devices.importlib, "import_module", broken)
    assert "mlx cannot be loaded (libmlx.so: cannot open shared object file)" in devices.report("mlx").trouble
    with pytest.raises(NoDevice, match=r"on Linux install mlx\[cpu\]"):
        devices.load("mlx", "auto", 1)


def held(built: Any) -> int:
    """Return the bytes of a model's arrays."""
    return sum(one.nbytes for one in built)


@pytest.mark.parametrize("form", ["stored", "f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama 2", "olmoe", "deepseek 3"])
def test_weights_take_the_memory_that_was_estimated(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, **{**MODELS[name], "hidden_size": 64, "intermediate_size": 128})
    spec = load_spec(folder)
    result = weight_memory(spec, HeldWeights(open_weights(folder, spec), form), "mlx")
    made: list[Any] = []
    # The self-test makes matrices, too
    monkeypatch.setattr("cairn.kernels.self_test.worst", lambda kernels: ("norm", 0.0))
    for packing in ("vector", "matrix", "table"):
        before = getattr(MlxKernels, packing)

        def counted(self: MlxKernels, *given: Any, before: Any = before) -> Any:
            made.append(before(self, *given))
            return made[-1]

        monkeypatch.setattr(MlxKernels, packing, counted)
    engine = load(folder, device="mlx-cpu", weights=form)
    arrays: dict[int, Any] = {}
    for one in made:
        joined = getattr(one, "joined", None)
        parts = joined.parts if joined is not None else getattr(one, "parts", None)
        if parts is None:
            arrays[id(one)] = one
        for part in parts or ():
            for field in ("weight", "codes", "scale", "bias"):
                if hasattr(part, field):
                    arrays[id(getattr(part, field))] = getattr(part, field)
    engine.close()
    # The estimate's maximum: scales in bfloat16 and groups of 64 take less.
    assert 0.7 * result.held < held(arrays.values()) <= result.held + 4096, (result, held(arrays.values()))


def test_kv_of_8_bits_is_for_the_cpu(tmp_path: Path) -> None:
    spec = load_spec(write_model(tmp_path))
    with pytest.raises(ModelError, match="kv_dtype q8 is for device cpu; use kv_dtype auto on mlx-cpu"):
        kv_dtype(spec, Config(device="mlx-cpu", kv_dtype="q8"))


def test_pages_have_the_bytes_of_their_numbers() -> None:
    """For every type, and in the layout that another pool accepts."""
    for dtype in ("float32", "float16", "bfloat16"):
        kernels = MlxKernels("cpu")
        pools = [kernels.allocate((4, 2, 2, 3, 16, 8), dtype) for _ in range(2)]
        numbers = np.random.default_rng(1).standard_normal((4, 2, 2, 3, 16, 8)).astype(np.float32)
        mirror = kernels.mirror(pools[0])
        mirror[...] = numbers
        kernels.upload([(pools[0], mirror)])
        pages = kernels.read_pages(pools[0], [1, 3])
        assert {page.nbytes for page in pages} == {2 * 2 * 3 * 16 * 8 * mirror.itemsize}
        kernels.write_pages(pools[1], [3, 1], pages)
        np.testing.assert_array_equal(kernels.fetch(pools[1])[[3, 1]], mirror[[1, 3]])
        assert not kernels.fetch(pools[1])[[0, 2]].any() and kernels.read_pages(pools[0], []) == []
