"""Facts about this machine: cores, memory, instruction sets, GPUs; read from files, without importing a GPU library.

`root`: the root of the file system; tests pass one of their own.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_CRITICAL = 4
"""macOS's word for memory so short that it ends processes; 1 is normal, 2 a warning."""

INSTRUCTION_SETS = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
"""Names of /proc/cpuinfo that decide which kernels a CPU can run."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU whose driver is installed."""

    kind: str
    """cuda, rocm or metal."""
    name: str


def cpu_count(root: Path = ROOT) -> int:
    """Return the number of cores that this process may use, by its affinity and its control group's quota; at least 1.

    Hardware threads that share a core count once, because one thread of arithmetic fills a core.
    """
    here = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = len({_read(root / siblings.format(number)) or number for number in here})
    for folder in _control_groups(root, "cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def memory_total(root: Path = ROOT) -> int:
    """Return the bytes of memory that this machine has, or that its control group or `ulimit -v` allows."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder in _control_groups(root, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        if limit.isdecimal():
            total = min(total, int(limit))
    return min(total, address_space(root))


def memory_available(root: Path = ROOT) -> int:
    """Return the bytes that can be allocated without swapping, within what the control group still allows."""
    available = 0
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    if not available:
        # No procfs (macOS): half of what is built in is a safe guess at what is free.
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    for folder in _control_groups(root, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if limit.isdecimal() and used.isdecimal():
            available = min(available, max(0, int(limit) - int(used) + _clean_file_pages(folder)))
    return min(available, address_space(root))


def memory_pressed(ask: Callable[[bytes], int] | None = None) -> bool:
    """Return whether macOS reports that memory is critically short; False on other systems.

    `ask` returns a system value by its name.
    """
    return sys.platform == "darwin" and (ask or _system_value)(b"kern.memorystatus_vm_pressure_level") == _CRITICAL


def _system_value(name: bytes) -> int:
    """Return one of macOS's values; 0 if it has none of that name."""
    value, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    found = ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if found else value.value


def address_space(root: Path = ROOT) -> int:
    """Return the bytes that this process may still map under `ulimit -v`; `sys.maxsize` without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _read(root / "proc/self/statm").split()
    if limit == resource.RLIM_INFINITY or not pages:
        return sys.maxsize
    return max(0, limit - int(pages[0]) * os.sysconf("SC_PAGE_SIZE"))


def _clean_file_pages(folder: Path) -> int:
    """Return the bytes of a control group's clean file pages: they count as used, but are freed on demand."""
    lines = (line.split() for line in _read(folder / "memory.stat").splitlines())
    stat = {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()}
    if "total_inactive_file" in stat:  # version 1, where only these count the groups below it
        cached, dirty = ("total_active_file", "total_inactive_file"), ("total_dirty", "total_writeback")
    else:
        cached, dirty = ("active_file", "inactive_file"), ("file_dirty", "file_writeback")
    return max(0, sum(stat.get(name, 0) for name in cached) - sum(stat.get(name, 0) for name in dirty))


def peak_memory(root: Path = ROOT) -> int:
    """Return the most bytes that this process has held at once."""
    for line in _read(root / "proc/self/status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    # No procfs (macOS, in bytes). Elsewhere not this: it is also the peak of the process that forked this one.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and its parents, version 1 or 2."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = mount / names if names else mount
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth])


def instruction_sets(root: Path = ROOT) -> tuple[str, ...]:
    """Return the CPU's instruction sets among `INSTRUCTION_SETS`; empty if the system does not say."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return tuple(one for one in INSTRUCTION_SETS if one in flags.split())
    return ("asimd",) if platform.machine() == "arm64" else ()


def cpu_name(root: Path = ROOT) -> str:
    """Return the CPU's own name."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def gpus(root: Path = ROOT) -> tuple[Gpu, ...]:
    """Return the GPUs whose drivers are installed, without loading a library."""
    found = []
    for information in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        fields = dict(line.split(":", 1) for line in _read(information).splitlines() if ":" in line)
        found.append(Gpu("cuda", fields.get("Model", "NVIDIA GPU").strip()))
    for node in sorted(root.glob("sys/class/kfd/kfd/topology/nodes/*")):
        properties = dict(line.split(" ", 1) for line in _read(node / "properties").splitlines() if " " in line)
        if properties.get("simd_count", "0").strip() not in ("", "0"):
            found.append(Gpu("rocm", _read(node / "name") or "AMD GPU"))
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        found.append(Gpu("metal", "Apple GPU"))
    return tuple(found)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
