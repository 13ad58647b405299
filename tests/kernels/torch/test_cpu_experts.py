"""Experts on the CPU beside a device: the division of work, and synchronisation of every copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: kernels on devices are not tested")

import torch

from cairn.kernels.choose import load_kernels
from cairn.kernels.program import KernelCall, Slot
from cairn.kernels.torch import cpu_experts
from cairn.kernels.torch.cpu_experts import CpuExperts, HostCopies
from cairn.kernels.torch.storage import TorchStorage
from cairn.kernels.torch.torch_kernels import TorchKernels

TOKENS, HIDDEN, WIDE, COUNT, CHOSEN = 12, 16, 24, 5, 2


class DelayedCopies(HostCopies):
    """A slow GPU.

    Copies to the host happen only when they are waited for; copies to the device read their source until then.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.submitted: list[Callable[[], None]] = []

    def fetch(self, source: Any, target: Any) -> None:
        then = source.clone()  # what the device's earlier work produced
        self.submitted.append(lambda: target.copy_(then))

    def give(self, source: Any, target: Any) -> None:
        target.copy_(source)
        then = source.clone()

        def read() -> None:
            assert torch.equal(source, then), "host memory was overwritten while it was copied to the device"

        self.submitted.append(read)

    def mark(self) -> Callable[[], None]:
        count = len(self.submitted)

        def wait() -> None:
            for done in self.submitted[:count]:
                done()
            self.submitted[:count] = []

        return wait


class Model:
    """Two layers of experts, the first with a shared one, over a device's kernels."""

    def __init__(self, kernels: CpuExperts) -> None:
        self.kernels, rng = kernels, np.random.default_rng(3)
        own = kernels
        self.x = own.allocate((TOKENS, HIDDEN), "float32")
        self.chosen = own.allocate((TOKENS, CHOSEN), "int32")
        self.shares = own.allocate((TOKENS, CHOSEN), "float32")
        self.out, self.shared = (own.allocate((TOKENS, HIDDEN), "float32") for _ in range(2))
        x, chosen, shares, out, shared = (
            Slot("tokens", one) for one in (self.x, self.chosen, self.shares, self.out, self.shared)
        )

        def matrix(layer: int, rows: int, columns: int) -> Any:
            values = rng.standard_normal((rows, columns)).astype(np.float32) / 4
            return kernels.kernels_of(layer).matrix([values], [None])

        calls: list[KernelCall] = []
        for layer in range(2):
            up = tuple(matrix(layer, 2 * WIDE, HIDDEN) for _ in range(COUNT))
            down = tuple(matrix(layer, HIDDEN, WIDE) for _ in range(COUNT))
            calls.append(KernelCall("experts", (x, chosen, shares, up, "silu", down, out)))
            if layer == 0:
                calls.append(KernelCall("activate", (x, "relu2", shared)))
                calls.append(KernelCall("add", (shared, out)))
            calls.append(KernelCall("add", (out, x)))
        self.program = kernels.program(calls)

    def run(self, first: int, last: int) -> np.ndarray:
        """Compute rows `first` to `last` of the same inputs as one step."""
        rng, count = np.random.default_rng(7), last - first
        values = rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
        chosen = np.sort(np.array([rng.permutation(COUNT)[:CHOSEN] for _ in range(TOKENS)], np.int32))
        shares = rng.random((TOKENS, CHOSEN)).astype(np.float32)
        for array, source in ((self.x, values), (self.chosen, chosen), (self.shares, shares)):
            array[:count] = torch.from_numpy(source[first:last])
        self.program.replay({"tokens": count, "rows": 1, "logits": 0, "blocks": 1})
        result: np.ndarray = self.kernels.fetch(self.x[:count])
        return result


@pytest.fixture
def made() -> Iterator[Callable[..., Model]]:
    opened: list[CpuExperts] = []

    def make(layers: tuple[int, ...] = (0, 1), copies: HostCopies | None = None, kernels: str = "auto") -> Model:
        opened.append(CpuExperts(TorchKernels("cpu", 1), load_kernels(kernels, 1), layers, copies))
        return Model(opened[-1])

    yield make
    for kernels in opened:
        kernels.close()


def test_all_on_the_device_some_and_none_are_near(made: Callable[..., Model]) -> None:
    wanted = made(()).run(0, TOKENS)
    for layers in ((0,), (1,), (0, 1)):
        np.testing.assert_allclose(made(layers).run(0, TOKENS), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_row_has_the_same_bits_alone_and_beside_others(kernels: str, made: Callable[..., Model]) -> None:
    model = made(kernels=kernels)
    whole = model.run(0, TOKENS)
    for first, last in ((0, 1), (3, 9), (TOKENS - 1, TOKENS)):
        np.testing.assert_array_equal(model.run(first, last), whole[first:last])


def test_the_device_works_while_the_cpu_computes_experts(
    made: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer has a shared expert. In the second, the thread that drives the device computes, too."""
    model, seen = made(), list[str]()
    order = [call.kernel for call in model.program.calls]
    assert order == [
        *("send_rows", "activate", "take_rows", "add", "add"),
        *("send_rows", "take_rows", "add"),
    ]
    real = cpu_experts.HostLayer.compute

    def compute(self: Any, count: int, arrived: Callable[[], None]) -> None:
        seen.append(threading.current_thread().name)
        real(self, count, arrived)

    monkeypatch.setattr(cpu_experts.HostLayer, "compute", compute)
    model.run(0, 3)
    assert seen[0].startswith("cairn-cpu-experts") and seen[1] == threading.current_thread().name


def test_late_copies_change_nothing_and_a_missing_wait_is_caught(
    made: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known failure 18: on a stream where everything is late, each missing wait must show."""
    wanted = made().run(0, TOKENS)
    late = made(copies=DelayedCopies())
    for _ in range(2):  # the second step finds the first one's rows in the host's memory
        np.testing.assert_array_equal(late.run(0, TOKENS), wanted)
        np.testing.assert_array_equal(late.run(4, 5), wanted[4:5])
    monkeypatch.setattr(DelayedCopies, "mark", lambda self: cpu_experts._nothing)
    hasty = made(copies=DelayedCopies())
    assert not np.array_equal(hasty.run(0, TOKENS), wanted)


def test_memory_that_is_still_copied_is_not_written(made: Callable[..., Model]) -> None:
    """A check of the stand-in: it must catch a host that computes before its last sum was copied."""
    copies = DelayedCopies()
    source, target = torch.zeros(4), torch.zeros(4)
    copies.give(source, target)
    wait = copies.mark()
    source += 1
    with pytest.raises(AssertionError, match="overwritten"):
        wait()


def test_a_step_that_fails_in_between_leaves_nothing_behind(
    made: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device runs out of memory while the CPU computes: the next step waits for that, and computes its own rows."""
    model = made()
    wanted, busy, go = model.run(0, TOKENS), list[int](), threading.Event()
    compute, fetch, settle = cpu_experts.HostLayer.compute, cpu_experts.HostRows.fetch, CpuExperts._settle

    def slow(self: Any, *given: Any) -> None:
        busy.append(1)
        go.wait(60)
        compute(self, *given)
        busy.pop()

    def watched(self: Any, *given: Any) -> Any:
        assert not busy, "rows that the CPU still reads were overwritten"
        return fetch(self, *given)

    monkeypatch.setattr(cpu_experts.HostRows, "fetch", watched)
    with monkeypatch.context() as patch:
        patch.setattr(cpu_experts.HostLayer, "compute", slow)
        patch.setattr(TorchKernels, "activate", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            model.run(3, 9)
    monkeypatch.setattr(CpuExperts, "_settle", lambda self: (go.set(), settle(self))[1])
    np.testing.assert_array_equal(model.run(0, TOKENS), wanted)


def test_an_error_of_the_cpu_is_the_steps(made: Callable[..., Model], monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    monkeypatch.setattr(cpu_experts.HostLayer, "compute", lambda *_: (_ for _ in ()).throw(OSError("the disk")))
    with pytest.raises(OSError, match="the disk"):
        model.run(0, 2)


def test_every_thread_that_drives_a_gpu_selects_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the thread's current GPU, which is the first unless something else is selected."""
    selected: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: selected.append((threading.current_thread().name, device))
    )
    second = torch.device("cuda:1")
    storage = TorchStorage("cuda:1")
    stream = storage.stream()
    stream.submit(lambda: None).wait()
    stream.close()
    assert selected == [(threading.current_thread().name, second), ("cairn-cuda:1", second)]


def test_a_mark_is_set_behind_the_work_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Any] = []

    class Event:
        def record(self, stream: Any) -> None:
            recorded.append(stream)

        def synchronize(self) -> None:
            recorded.append("waited")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    HostCopies(torch.device("cuda:1")).mark()()
    assert recorded == ["the stream of cuda:1", "waited"]
