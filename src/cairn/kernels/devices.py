"""Devices by name: what each is, whether it can be used here, and the kernels that compute on it.

`cpu` computes with the native kernels, or with numpy where those were not compiled. All others compute with the kernels
in `kernels.torch`, which need torch: `torch-cpu` is the CPU through torch, there to test those kernels anywhere.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cairn.config.config import DEVICE, DEVICES
from cairn.kernels.base import Kernels
from cairn.kernels.choose import chosen, described, load_kernels
from cairn.types.errors import CairnError, NoDevice

CPU = "cpu"
TORCH = "torch"
"""The name of a kernel set, beside those that `kernels.choose` knows."""
KEEPS_ANSWERS = frozenset({CPU})
"""Devices whose kernels give a request the same bits alone, in any batch, in chunks and from a cache."""


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What one device is, and whether it can be used."""

    name: str
    """As `--device` takes it."""
    title: str
    """What the machine calls it."""
    memory: int | None
    """Bytes of its memory that are free; None where it uses the machine's."""
    driver: str
    kernels: str
    """What computes on it, in words."""
    trouble: str = ""
    """Why it cannot be used, and what to do; empty where it can."""

    @property
    def sentence(self) -> str:
        """All of it for a person."""
        if self.trouble:
            return f"no: {self.trouble}"
        memory = "" if self.memory is None else f", {self.memory / 1e9:.2f} GB of its memory free"
        driver = f", {self.driver}" if self.driver else ""
        bits = "" if self.name in KEEPS_ANSWERS else "; a neighbour in a step may move the last bits of an answer"
        return f"{self.title}: {self.kernels}{driver}{memory}{bits}"


def resolved(wanted: str) -> str:
    """Return the device that `wanted` means: `auto` is the CPU, others are themselves. Raises `NoDevice` for a name
    that no device has.

    `auto` takes no device whose kernels do not keep the answers of `KEEPS_ANSWERS`: nobody asked for another answer.
    """
    if wanted == "auto":
        return CPU
    if not DEVICE.fullmatch(wanted):
        raise NoDevice(f"device is {wanted[:60]!r}, which is unknown; use {DEVICES}", field="device")
    return wanted


def kernel_set(device: str, kernels: str) -> str:
    """Return the name of what computes on a device: `torch`, or one of the CPU's sets. Raises `ModelError` where that
    does not run here."""
    return chosen(kernels) if resolved(device) == CPU else TORCH


def report(device: str, kernels: str = "auto") -> DeviceReport:
    """Say what a device is and whether it can be used; raises `NoDevice` for a name that no device has."""
    name = resolved(device)
    if name == CPU:
        try:
            return DeviceReport(CPU, "the CPU", None, "", described(kernels))
        except CairnError as error:
            return DeviceReport(CPU, "the CPU", None, "", "", str(error))
    trouble = _no_torch()
    if trouble:
        return DeviceReport(name, name, None, "", "", trouble)
    torch = _torch()
    kind, _, index = name.partition(":")
    find: Callable[[Any, str, int], DeviceReport] = {"torch-cpu": _torch_cpu, "mps": _mps}.get(kind, _gpu)
    return find(torch, kind, int(index or 0))


def reports(kernels: str = "auto") -> list[DeviceReport]:
    """Report on the CPU and on every device that torch sees, or on the reason why it sees none."""
    found = [report(CPU, kernels)]
    if _no_torch():
        return [*found, report("torch-cpu")]
    torch = _torch()
    kind = "rocm" if torch.version.hip else "cuda"
    found.append(report("torch-cpu"))
    found += [report(f"{kind}:{number}") for number in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append(report("mps"))
    return found


def load(device: str, kernels: str, threads: int) -> Kernels:
    """Return the kernels of a device, on so many threads of the CPU where they use it.

    Raises `NoDevice` where it cannot be used, or where it computes other numbers than the CPU does.
    """
    name = resolved(device)
    if name == CPU:
        return load_kernels(kernels, threads)
    told = report(name)
    if told.trouble:
        raise NoDevice(f"device {name} cannot be used: {told.trouble}", field="device")
    from cairn.kernels.self_test import worst
    from cairn.kernels.torch.torch_kernels import TorchKernels

    try:
        made = TorchKernels(_torch_name(name), threads)
        kernel, share = worst(made)
    except (CairnError, RuntimeError) as error:
        raise NoDevice(f"device {name} failed its self-test ({error}); use --device cpu", field="device") from error
    if not share <= 1:
        made.close()
        raise NoDevice(
            f"device {name} failed its self-test: {kernel} is off by {share:.3g} times what is allowed; "
            "update its driver, or use --device cpu",
            field="device",
        )
    return made


def free_memory(device: str) -> int | None:
    """Return the bytes of a device's own memory that are free; None where it uses the machine's."""
    return report(device).memory if resolved(device) != CPU else None


def _no_torch() -> str:
    """Return why torch cannot be used, or nothing."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed; install Cairn with the extra gpu (pip install 'cairn-llm[gpu]')"
    return ""


def _torch() -> Any:
    # Imported here: only where a device that needs it is asked for.
    import torch

    return torch


def _torch_name(name: str) -> str:
    """Return torch's name of a device: it calls AMD's GPUs cuda too."""
    if name == "torch-cpu":
        return "cpu"
    return f"cuda:{name.partition(':')[2] or 0}" if name.startswith(("cuda", "rocm")) else name


def _torch_cpu(torch: Any, kind: str, index: int) -> DeviceReport:
    return DeviceReport(kind, "the CPU", None, f"torch {torch.__version__}", "plain torch, to test it")


def _mps(torch: Any, kind: str, index: int) -> DeviceReport:
    if not torch.backends.mps.is_available():
        return DeviceReport(kind, kind, None, "", "", "torch finds no Apple GPU here; use --device cpu")
    return DeviceReport(kind, "Apple GPU", None, f"torch {torch.__version__}", "plain torch")


def _gpu(torch: Any, kind: str, index: int) -> DeviceReport:
    """Report on an NVIDIA or AMD GPU."""
    name = f"{kind}:{index}"
    built, other = ("rocm" if torch.version.hip else "cuda" if torch.version.cuda else ""), {"cuda": "CUDA"}
    wanted = other.get(kind, "ROCm")

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
        title = torch.cuda.get_device_name(index)
    except RuntimeError as error:
        return no(f"it does not answer ({str(error).splitlines()[0][:200]}); check the driver, or use --device cpu")
    version = torch.version.hip or torch.version.cuda
    return DeviceReport(name, title, int(free), f"{wanted} {version}", "plain torch")
