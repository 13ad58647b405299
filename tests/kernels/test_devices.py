"""Devices by name: what is reported of them, and every reason why one cannot be used."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from cairn.config.config import Config
from cairn.engine.load_engine import load_engine
from cairn.engine.recorded import RecordedEngine
from cairn.kernels import devices, self_test
from cairn.kernels.reference import ReferenceKernels
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelError, NoDevice
from cairn.types.model_spec import BLOCK_TOKENS
from tests.tiny_models import write_model


def torch_with(
    cuda: str | None, hip: str | None = None, count: int = 0, memory: int | None = 10**9, cached: int = 0
) -> Any:
    """Return a stand-in for torch that was built for GPUs and sees so many of them.

    `cached`: bytes that torch keeps of what a model of this process had.
    """

    def info(index: int) -> tuple[int, int]:
        if memory is None:
            raise RuntimeError("CUDA error: unknown error\nmore lines")
        return memory, 2 * memory

    return SimpleNamespace(
        __version__="9.9",
        version=SimpleNamespace(cuda=cuda, hip=hip),
        cuda=SimpleNamespace(
            device_count=lambda: count,
            mem_get_info=info,
            memory_reserved=lambda index: 3000 + cached,
            memory_allocated=lambda index: 3000,
            get_device_name=lambda index: f"Example {index}",
        ),
        backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: False)),
    )


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Any:
    def plant(torch: Any) -> None:
        monkeypatch.setattr(devices, "_no_torch", lambda: "")
        monkeypatch.setattr(devices, "_torch", lambda: torch)

    return plant


def test_what_torch_keeps_of_an_earlier_model_is_free(planted: Any) -> None:
    planted(torch_with("12.4", count=1, cached=5000))
    assert devices.free_memory("cuda") == 10**9 + 5000


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:1234", "cuda:-1", "cuda:0x1", "mlx:0", "", "cpu:0", "CPU"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    names = "auto, cpu, mlx, mlx-cpu, torch-cpu, triton-cpu, cuda, cuda:N"
    with pytest.raises(NoDevice, match=f"is unknown; use {names}") as caught:
        devices.load(name, "auto", 1)
    assert caught.value.field == "device" and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("torch", "name", "why"),
    [
        (torch_with(None), "cuda:0", "torch 9.9 was built without CUDA; install a torch with CUDA"),
        (torch_with("12.9"), "rocm:0", "torch 9.9 was built without ROCm; install a torch with ROCm"),
        (torch_with("12.9"), "cuda", "torch finds no GPU; check the driver, or use --device cpu"),
        (torch_with("12.9", count=2), "cuda:2", "torch finds 2 GPUs, cuda:0 to cuda:1; check the driver"),
        (torch_with(None, "7.1", count=1), "rocm:5", "torch finds 1 GPUs, rocm:0 to rocm:0"),
        (
            torch_with("12.9", count=1, memory=None),
            "cuda:0",
            r"it does not answer \(CUDA error: unknown error\); check",
        ),
        (torch_with("12.9"), "mps", "torch finds no Apple GPU here; use --device cpu"),
    ],
)
def test_a_device_that_cannot_be_used_says_why_and_what_to_do(torch: Any, name: str, why: str, planted: Any) -> None:
    planted(torch)
    assert devices.report(name).sentence.startswith("no: ")
    with pytest.raises(NoDevice, match=f"device {name} cannot be used: {why}"):
        devices.load(name, "auto", 1)


@pytest.mark.parametrize("missing", ["", "it is missing"])
def test_a_gpu_is_reported_with_memory_and_driver(missing: str, planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(torch_with("12.9", count=2))
    monkeypatch.setattr(devices, "_no_triton", lambda: missing)
    told = devices.report("cuda:1")
    kernels = "plain torch, since Triton is not installed" if missing else "Triton"
    assert told.sentence == (
        f"Example 1: {kernels}, CUDA 12.9, 1.00 GB of its memory free; "
        "a neighbour in a step may move the last bits of an answer"
    )
    assert devices.kernel_set("cuda:1", "auto") == ("torch" if missing else "triton")
    assert devices.free_memory("cuda:1") == 10**9 and devices.free_memory("cpu") is None
    assert [report.name for report in devices.reports()][-3:] == ["torch-cpu", "cuda:0", "cuda:1"]


def test_a_gpu_that_vanishes_between_report_and_load_is_refused(planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(torch_with("12.9", count=1))
    assert not devices.report("cuda:0").trouble
    planted(torch_with("12.9", count=0))
    with pytest.raises(NoDevice, match="torch finds no GPU"):
        devices.load("cuda:0", "auto", 1)


def test_without_torch_every_device_but_the_cpu_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    assert not devices.report("cpu").trouble
    for name in ("torch-cpu", "cuda:1", "rocm", "mps"):
        assert "pip install 'cairn-llm[gpu]'" in devices.report(name).trouble
    assert "pip install 'cairn-llm[mlx]'" in devices.report("mlx").trouble
    assert [report.name for report in devices.reports()] == ["cpu", "mlx-cpu", "torch-cpu"]


def test_auto_is_the_cpu_while_no_other_device_keeps_answers() -> None:
    """Answers must not differ from those that the CPU gives for the same request."""
    assert devices.resolved("auto") == "cpu" and {"cpu"} == devices.KEEPS_ANSWERS


def test_a_cpu_install_never_imports_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from cairn.config.config import Config\n"
        "from cairn.engine.load_engine import load_engine\n"
        "load_engine(Config(threads=1, kv_gb=0.01), Path(sys.argv[1]))[1].close()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(write_model(tmp_path))], check=True)


@pytest.mark.parametrize("kernel", ["norm", "rope_write", "attention", "gate"])
def test_a_kernel_that_computes_wrong_numbers_fails_the_self_test(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class OffByOne(ReferenceKernels):
        """A kernel set that adds a hundredth to the first number one kernel writes."""

    def wrong(self: Any, *arguments: Any) -> None:
        getattr(ReferenceKernels, kernel)(self, *arguments)
        place = {"norm": 3, "rope_write": 5, "attention": 7, "gate": 2}[kernel]
        arguments[place].reshape(-1)[-1] += 0.1

    assert self_test.worst(ReferenceKernels())[1] == 0
    monkeypatch.setattr(OffByOne, kernel, wrong, raising=False)
    name, share = self_test.worst(OffByOne())
    assert share > 1 and name == kernel

    def none(self: Any, *arguments: Any) -> None:
        arguments[3][...] = np.nan

    monkeypatch.setattr(OffByOne, "norm", none)
    assert self_test.worst(OffByOne())[1] == float("inf")


def test_a_device_that_fails_its_self_test_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from cairn.kernels.torch import torch_kernels

    real = torch_kernels.rms_norm
    monkeypatch.setattr(torch_kernels, "rms_norm", lambda x, weight, eps: real(x, weight, eps) * 1.1)
    with pytest.raises(NoDevice, match=r"failed its self-test: \w+.* is off by .* times the tolerance; update its"):
        load_engine(Config(device="torch-cpu", kv_gb=0.01, threads=1), write_model(tmp_path))

    def dies(*arguments: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(torch_kernels, "rms_norm", dies)
    with pytest.raises(NoDevice, match=r"no kernel image is available.*use --device cpu"):
        load_engine(Config(device="torch-cpu", kv_gb=0.01, threads=1), write_model(tmp_path))


def test_a_model_that_fits_the_machine_and_not_the_device_is_refused_with_the_figures(
    planted: Any, tmp_path: Path
) -> None:
    planted(torch_with("12.9", count=1, memory=100_000))
    refused = r"needs .* GB of memory .* 0\.00 GB are free on cuda:0; use --device cpu, a smaller model, or fewer bits"
    with pytest.raises(ModelError, match=refused) as caught:
        load_engine(Config(device="cuda:0", kv_gb=0.01, threads=1), write_model(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wanted", [None, 16384])
def test_a_context_too_large_for_the_device_is_reported_with_figures(
    wanted: int | None, planted: Any, tmp_path: Path
) -> None:
    """The model is served with the context that fits; a longer prompt is refused with the pool's size."""
    folder = write_model(tmp_path, max_position_embeddings=16384)
    planted(torch_with("12.9", count=1, memory=20_000_000))
    spec, config = load_spec(folder), Config(device="cuda:0", context=wanted, max_running=1, step_tokens=64)
    fit = RecordedEngine.fit(spec, folder, config)
    assert fit.blocks[0] * BLOCK_TOKENS < 16384
    notes = [note for note in fit.notes if "context" in note]
    figures = (
        rf"context is 16384, but the KV pool of 0\.00 GB holds {fit.blocks[0] * BLOCK_TOKENS} tokens; the whole "
        r"context needs 0\.\d\d GB, and 0\.02 GB were free on cuda:0 for weights and KV; use --kv-gb for a larger"
    )
    assert [bool(re.search(figures, note)) for note in notes] == ([True] if wanted else [])
    large = msgspec.structs.replace(config, kv_gb=0.2)
    with pytest.raises(ModelError, match=r"0\.02 GB are free on cuda:0; use --kv-gb for a smaller pool"):
        RecordedEngine.fit(spec, folder, large)
    planted(torch_with("12.9", count=1, memory=1_000_000))
    with pytest.raises(
        ModelError, match=r"buffers\), 0\.00 GB are free on cuda:0; use a shorter --context, or smaller"
    ):
        RecordedEngine.fit(spec, folder, config)
