"""Compute devices by name: their description, whether they can be used here, and their kernels.

`cpu` uses the native kernels, or numpy if those were not compiled. NVIDIA and AMD GPUs use `kernels.triton` if there is
Triton, and `mlx` uses `kernels.mlx`. Other devices, and GPUs without Triton, use `kernels.torch`.
`torch-cpu` and `mlx-cpu` are the CPU through these libraries, and `triton-cpu` is Triton's interpreter: they are there
to test kernels anywhere.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cairn.config.config import DEVICE, DEVICES
from cairn.kernels.base import Kernels
from cairn.kernels.choose import chosen, described, load_kernels
from cairn.types.errors import CairnError, NoDevice

if TYPE_CHECKING:
    from cairn.kernels.torch.torch_kernels import TorchKernels

CPU = "cpu"
TORCH, TRITON, MLX = ON_DEVICES = ("torch", "triton", "mlx")
"""Names of kernel sets, in addition to those of `kernels.choose`."""
INTERPRETED = "triton-cpu"
METAL = "metal"
"""Value of the option `kernels` for Cairn's own kernels on an Apple GPU."""
NO_TORCH = "torch is not installed; install Cairn with the extra gpu (pip install 'cairn-llm[gpu]')"
KEEPS_ANSWERS = frozenset({CPU})
"""Devices on which a request gets the same bits alone, in any batch, in chunks and from the cache."""


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """Description of a device and whether it can be used."""

    name: str
    """Its name in `--device`."""
    title: str
    """The hardware's name."""
    memory: int | None
    """Free bytes of its own memory; None if it shares the machine's."""
    driver: str
    kernels: str
    """Its kernels, in words."""
    trouble: str = ""
    """Why it cannot be used and what to do; empty if it can."""

    @property
    def sentence(self) -> str:
        """The report as one sentence for people."""
        if self.trouble:
            return f"no: {self.trouble}"
        memory = "" if self.memory is None else f", {self.memory / 1e9:.2f} GB of its memory free"
        driver = f", {self.driver}" if self.driver else ""
        bits = "" if self.name in KEEPS_ANSWERS else "; a neighbour in a step may move the last bits of an answer"
        return f"{self.title}: {self.kernels}{driver}{memory}{bits}"


def resolved(wanted: str) -> str:
    """Return the device's name with `auto` resolved. Raises `NoDevice` for a malformed name.

    `auto` is the CPU: it selects only devices in `KEEPS_ANSWERS`, so that answers never change unasked.
    """
    if wanted == "auto":
        return CPU
    if not DEVICE.fullmatch(wanted):
        raise NoDevice(f"device {wanted[:60]!r} is unknown; use {DEVICES}", field="device")
    return wanted


def kernel_set(device: str, kernels: str) -> str:
    """Return the name of a device's kernel set. Raises `ModelError` if one of the CPU's is unusable here."""
    name = resolved(device)
    if name == CPU:
        return chosen(kernels)
    if name.startswith(MLX):
        return MLX
    return TRITON if uses_triton(name) else TORCH


def uses_triton(name: str) -> bool:
    """Tell whether a device runs the Triton kernels: GPUs of NVIDIA and AMD, if Triton is installed."""
    return name == INTERPRETED or (name.startswith(("cuda", "rocm")) and not _no_triton())


def report(device: str, kernels: str = "auto") -> DeviceReport:
    """Describe a device and whether it can be used. Raises `NoDevice` for a malformed name."""
    name = resolved(device)
    if name == CPU:
        try:
            return DeviceReport(CPU, "the CPU", None, "", described(kernels))
        except CairnError as error:
            return DeviceReport(CPU, "the CPU", None, "", "", str(error))
    if name.startswith(MLX):
        return _mlx_report(name)
    trouble = _no_torch()
    if trouble:
        return DeviceReport(name, name, None, "", "", trouble)
    torch = _torch()
    kind, _, index = name.partition(":")
    known = {"torch-cpu": _torch_cpu, INTERPRETED: _triton_cpu, "mps": _mps}
    find: Callable[[Any, str, int], DeviceReport] = known.get(kind, _gpu)
    return find(torch, kind, int(index or 0))


def reports(kernels: str = "auto") -> list[DeviceReport]:
    """Describe the CPU and every device that mlx and torch see; without one, its CPU with the reason."""
    listed = [report(CPU, kernels), *([] if _no_mlx() else [report(MLX)]), report("mlx-cpu")]
    if _no_torch():
        return [*listed, report("torch-cpu")]
    torch = _torch()
    kind = "rocm" if torch.version.hip else "cuda"
    listed.append(report("torch-cpu"))
    listed += [report(f"{kind}:{number}") for number in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        listed.append(report("mps"))
    return listed


def load(device: str, kernels: str, threads: int, cpu_layers: Sequence[int] = ()) -> Kernels:
    """Load a device's kernels, on so many CPU threads if they use the CPU.

    `cpu_layers`: layers whose routed experts the CPU computes beside a device of torch, with the CPU's `kernels`.

    Raises `NoDevice` if the device cannot be used or fails its self-test against the CPU.
    """
    name = resolved(device)
    if name == CPU:
        return load_kernels(kernels, threads)
    if trouble := report(name).trouble:
        raise NoDevice(f"device {name} cannot be used: {trouble}", field="device")
    from cairn.kernels.self_test import worst

    try:
        loaded = _load_mlx(name, kernels) if name.startswith(MLX) else _kernels(name)(_torch_name(name), threads)
        kernel, share = worst(loaded)
    except NoDevice:
        raise
    except (CairnError, RuntimeError, ValueError) as error:  # ValueError: what Triton says of a tensor elsewhere
        raise NoDevice(f"device {name} failed its self-test ({error}); use --device cpu", field="device") from error
    if not share <= 1:
        loaded.close()
        raise NoDevice(
            f"device {name} failed its self-test: {kernel} is off by {share:.3g} times the tolerance; "
            "update its driver, or use --device cpu",
            field="device",
        )
    return _beside_cpu(loaded, kernels, threads, cpu_layers) if cpu_layers else loaded


def _beside_cpu(loaded: Any, kernels: str, threads: int, layers: Sequence[int]) -> Any:
    """Return a device's kernels with the CPU's for the experts of some layers."""
    from cairn.kernels.torch.cpu_experts import CpuExperts

    try:
        return CpuExperts(loaded, load_kernels(kernels, threads), layers)
    except CairnError:
        loaded.close()
        raise


def _kernels(name: str) -> type[TorchKernels]:
    """Return the class of a device's kernels."""
    if not uses_triton(name):
        from cairn.kernels.torch.torch_kernels import TorchKernels

        return TorchKernels
    if name == INTERPRETED:
        os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is declared, so before Triton is imported
    from cairn.kernels.triton.triton_kernels import TritonKernels

    return TritonKernels


def free_memory(device: str) -> int | None:
    """Return the free bytes of a device's own memory; None if it shares the machine's."""
    return report(device).memory if resolved(device) != CPU else None


def has_own_memory(device: str) -> bool:
    """Tell whether a device's KV pool is not in the machine's memory."""
    return device.partition(":")[0] in ("cuda", "rocm")


def _load_mlx(name: str, kernels: str) -> Kernels:
    from cairn.kernels.mlx import device

    where, metal = device.chosen(name), kernels == METAL
    if metal and where != "gpu":
        raise NoDevice("kernels is metal, but mlx finds no Apple GPU here; leave kernels out", field="kernels")
    return device.load(where, metal)


def _no_mlx() -> str:
    """Return why mlx cannot be used; "" if it can."""
    if importlib.util.find_spec("mlx") is None:
        return "mlx is not installed; install Cairn with the extra mlx (pip install 'cairn-llm[mlx]')"
    try:
        importlib.import_module("cairn.kernels.mlx.device")
    except ImportError as error:
        return f"mlx cannot be loaded ({str(error).splitlines()[0][:200]}); on Linux install mlx[cpu]"
    return ""


def _mlx_report(name: str) -> DeviceReport:
    """Report on an Apple GPU, or on the CPU through mlx."""
    if trouble := _no_mlx():
        return DeviceReport(name, name, None, "", "", trouble)
    from cairn.kernels.mlx import device

    where = device.chosen(name)
    if where == "gpu":
        kernels = "mlx on Metal"
    else:
        kernels = "mlx, to test it" if name != MLX else "mlx, which finds no Apple GPU and computes on the CPU"
    return DeviceReport(name, device.title(where), device.free_memory(where), f"mlx {device.VERSION}", kernels)


def _no_torch() -> str:
    """Return why torch cannot be used; "" if it can."""
    if importlib.util.find_spec("torch") is None:
        return NO_TORCH
    return ""


def _no_triton() -> str:
    """Return why Triton cannot be used; "" if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install it (pip install triton)"
    return ""


def _torch() -> Any:
    # Imported here, because only other devices than the CPU need it.
    import torch

    return torch


def _torch_name(name: str) -> str:
    """Return torch's name for a device; AMD's GPUs are cuda there, too."""
    if name in ("torch-cpu", INTERPRETED):
        return "cpu"
    return f"cuda:{name.partition(':')[2] or 0}" if name.startswith(("cuda", "rocm")) else name


def _torch_cpu(torch: Any, kind: str, index: int) -> DeviceReport:
    return DeviceReport(kind, "the CPU", None, f"torch {torch.__version__}", "plain torch, to test it")


def _triton_cpu(torch: Any, kind: str, index: int) -> DeviceReport:
    driver = f"torch {torch.__version__}"
    return DeviceReport(kind, "the CPU", None, driver, "Triton's interpreter, to test it: slow", _no_triton())


def _mps(torch: Any, kind: str, index: int) -> DeviceReport:
    if not torch.backends.mps.is_available():
        return DeviceReport(kind, kind, None, "", "", "torch finds no Apple GPU here; use --device cpu")
    return DeviceReport(kind, "Apple GPU", None, f"torch {torch.__version__}", "plain torch")


def _gpu(torch: Any, kind: str, index: int) -> DeviceReport:
    """Report on an NVIDIA or AMD GPU."""
    name = f"{kind}:{index}"
    built = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else ""
    wanted = "CUDA" if kind == "cuda" else "ROCm"

    def no(trouble: str) -> DeviceReport:
        return DeviceReport(name, name, None, "", "", trouble)

    if built != kind:
        return no(
            f"torch {torch.__version__} was built without {wanted}; install a torch with {wanted} from pytorch.org"
        )
    count = torch.cuda.device_count()
    if index >= count:
        there = f"torch finds {count} GPUs, {kind}:0 to {kind}:{count - 1}" if count else "torch finds no GPU"
        return no(f"{there}; check the driver, or use --device cpu")
    try:
        free, _ = torch.cuda.mem_get_info(index)
        # What earlier models of this process had, torch keeps for the next.
        free += torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
        title = torch.cuda.get_device_name(index)
    except RuntimeError as error:
        return no(f"it does not answer ({str(error).splitlines()[0][:200]}); check the driver, or use --device cpu")
    version = torch.version.hip or torch.version.cuda
    kernels = "Triton" if uses_triton(name) else "plain torch, since Triton is not installed"
    return DeviceReport(name, title, int(free), f"{wanted} {version}", kernels)
