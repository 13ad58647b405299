"""Routed experts on the CPU, all else on a device of torch: hidden rows cross through host memory.

    device: ... router ─ rows to the host ─ shared expert ───────────── rows to the device ─ add ...
    CPU:                                  └─ the chosen experts' sum ──┘

A program is recorded as for one device. Each call of `experts` whose matrices are the CPU's becomes two: `send_rows`,
which hands the rows to the CPU, and `take_rows` before the first call that touches their sum. What stands between them
is computed meanwhile. Copies are made in the order of the device's own work, and the CPU waits for those to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from cairn.kernels.base import Kernels
from cairn.kernels.program import Interpreted, KernelCall, Program, Size, Slot
from cairn.kernels.torch.torch_kernels import TorchKernels
from cairn.kernels.torch.weights import TorchMatrix

Tensor = Any


class HostCopies:
    """Copies between a device and host memory, in the order in which they and the device's work were submitted."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._later = device.type == "cuda"
        """Whether copies are done later than they are submitted."""

    def memory(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """Return zeroed host memory for copies, pinned where that lets the device copy by itself."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self._later)

    def fetch(self, source: Tensor, target: Tensor) -> None:
        """Submit a copy from the device."""
        target.copy_(source, non_blocking=self._later)

    def give(self, source: Tensor, target: Tensor) -> None:
        """Submit a copy to the device. Its source may change once what `mark` returned afterwards was called."""
        target.copy_(source, non_blocking=self._later)

    def mark(self) -> Callable[[], None]:
        """Return a function that waits until all that was submitted so far is done."""
        if not self._later:
            return _nothing
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        wait: Callable[[], None] = event.synchronize
        return wait


def _nothing() -> None:
    return


class HostRows:
    """Host memory for the rows of one step; layers of the same sizes share it, since they run one after another."""

    def __init__(self, copies: HostCopies, inputs: Sequence[Tensor], out: Tensor) -> None:
        """Allocate as much as the device's `inputs` x[M, H], chosen[M, T] and shares[M, T], and `out`[M, H], take."""
        self._copies = copies
        self._inputs = [copies.memory(tuple(one.shape), one.dtype) for one in inputs]
        self._out = copies.memory(tuple(out.shape), out.dtype)
        self.slots = [Slot("tokens", one.numpy()) for one in (*self._inputs, self._out)]
        """What a program of the CPU's kernels reads and writes: x, chosen, shares and out."""

    def fetch(self, inputs: Sequence[Tensor]) -> Callable[[], None]:
        """Submit copies of a step's rows from the device; return what waits for them."""
        for source, target in zip(inputs, self._inputs, strict=True):
            self._copies.fetch(source, target[: len(source)])
        return self._copies.mark()

    def give(self, out: Tensor) -> None:
        """Submit a copy of the sum to the device."""
        self._copies.give(self._out[: len(out)], out)


class HostLayer:
    """One layer's experts on the CPU."""

    def __init__(self, rows: HostRows, program: Program) -> None:
        self.rows = rows
        self.apart = False
        """Whether the device has something to do meanwhile."""
        self._program = program

    def compute(self, count: int, arrived: Callable[[], None]) -> None:
        """Wait for the rows and compute their sum, on any thread."""
        arrived()
        sizes: Mapping[Size, int] = {"tokens": count}
        with np.errstate(all="ignore"):
            self._program.replay(sizes)


class CpuExperts:
    """`kernels.base.Kernels` of a device, but for the routed experts of some layers."""

    def __init__(
        self, own: TorchKernels, host: Kernels, layers: Sequence[int], copies: HostCopies | None = None
    ) -> None:
        """`host`: the CPU's kernels for the experts of `layers`."""
        self._own, self._host, self._layers = own, host, tuple(layers)
        self._copies = copies or HostCopies(own.device)
        self._rows: dict[tuple[tuple[int, ...], ...], HostRows] = {}
        self._thread = ThreadPoolExecutor(1, "cairn-cpu-experts")
        self._waiting: Future[None] | None = None
        """The sum that is being computed beside the device's work."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    @property
    def numerics(self) -> tuple[object, ...]:
        """See `Kernels`: of both kernel sets, and the CPU's layers."""
        return (*self._own.numerics, "experts of the CPU", self._layers, *self._host.numerics)

    def kernels_of(self, layer: int) -> Kernels:
        """Return the kernels that a layer's experts are packed for."""
        return self._host if layer in self._layers else self._own

    def program(self, calls: Sequence[KernelCall]) -> Program:
        """Record calls as a program. One with experts of the CPU runs kernel by kernel: no graph can hold them."""
        if not any(map(_on_host, calls)):
            return self._own.program(calls)
        return Interpreted(self, self._divided(calls))

    def send_rows(self, x: Tensor, chosen: Tensor, shares: Tensor, layer: HostLayer) -> None:
        """Hand rows x[M, H] with their chosen experts and shares to the CPU."""
        self._settle()
        arrived = layer.rows.fetch((x, chosen, shares))
        if layer.apart:
            self._waiting = self._thread.submit(layer.compute, len(x), arrived)
        else:
            layer.compute(len(x), arrived)

    def take_rows(self, out: Tensor, layer: HostLayer) -> None:
        """out[M, H] = the sum that the CPU has computed."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.result()
        layer.rows.give(out)

    def close(self) -> None:
        """Free threads and memory."""
        self._settle()
        self._thread.shutdown()
        self._rows.clear()
        self._own.close()
        self._host.close()

    def _settle(self) -> None:
        """Wait for a sum that nobody took, because the device failed in between: it uses the rows' memory."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.exception()

    def _divided(self, calls: Sequence[KernelCall]) -> list[KernelCall]:
        """Return the calls with experts of the CPU in two parts each."""
        made: list[KernelCall] = []
        pending: KernelCall | None = None
        begun = 0
        for call in calls:
            if pending is not None and (_on_host(call) or any(one is pending.arguments[0] for one in call.arguments)):
                pending.arguments[1].apart = len(made) > begun
                made.append(pending)
                pending = None
            if not _on_host(call):
                made.append(call)
                continue
            *inputs, gate_up, activation, down, out = call.arguments
            layer = self._layer(inputs, (gate_up, activation, down), out)
            made.append(KernelCall("send_rows", (*inputs, layer)))
            pending, begun = KernelCall("take_rows", (out, layer)), len(made)
        return made if pending is None else [*made, pending]

    def _layer(self, inputs: Sequence[Slot], weights: tuple[Any, ...], out: Slot) -> HostLayer:
        """Record one layer's experts for the CPU."""
        arrays = [one.array for one in (*inputs, out)]
        sizes = tuple(tuple(one.shape) for one in arrays)
        if sizes not in self._rows:
            self._rows[sizes] = HostRows(self._copies, arrays[:-1], arrays[-1])
        rows = self._rows[sizes]
        *read, written = rows.slots
        return HostLayer(rows, self._host.program([KernelCall("experts", (*read, *weights, written))]))


def _on_host(call: KernelCall) -> bool:
    """Tell whether a call is of experts whose matrices are the CPU's."""
    return call.kernel == "experts" and not isinstance(call.arguments[3][0], TorchMatrix)
