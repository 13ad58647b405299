"""Facts of the machine: memory and its limits, cores, instruction sets and GPUs."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from cairn.engine import machine
from cairn.engine.machine import Gpu, cpu_count, cpu_name, gpus, instruction_sets, memory_available, peak_memory

MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_of_the_machine(tmp_path: Path) -> None:
    assert memory_available(put(tmp_path, {"proc/meminfo": MEMINFO})) == 8_000_000 * 1024
    assert 0 < memory_available() < 1 << 48


def test_macos_says_whether_memory_is_critically_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other systems are not asked."""
    asked = []

    def ask(name: bytes) -> int:
        asked.append(name)
        return level

    for platform in ("linux", "darwin"):
        monkeypatch.setattr(machine.sys, "platform", platform)
        for level in (0, 1, 2, 4):
            assert machine.memory_pressed(ask) == (platform == "darwin" and level == 4)
    assert asked == [b"kern.memorystatus_vm_pressure_level"] * 4


def test_the_peak_of_memory_does_not_count_the_parent_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """getrusage also counts the memory of the parent from before the fork."""
    monkeypatch.setattr(machine.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=700))
    assert peak_memory(put(tmp_path, {"proc/self/status": "VmPeak:\t 900 kB\nVmHWM:\t  500 kB\n"})) == 500 * 1024
    for platform, unit in (("linux", 1024), ("darwin", 1)):
        monkeypatch.setattr(machine.sys, "platform", platform)
        assert peak_memory(tmp_path / "none") == 700 * unit


def test_a_control_group_of_version_2_limits_memory_at_any_level(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/pod/box\n",
        "sys/fs/cgroup/pod/box/memory.max": "max\n",
        "sys/fs/cgroup/pod/box/memory.current": "100\n",
        "sys/fs/cgroup/pod/memory.max": "3000000\n",
        "sys/fs/cgroup/pod/memory.current": "2500000\n",
        "sys/fs/cgroup/pod/memory.stat": "anon 5\ninactive_file 40000\nactive_file 7\n",
    }
    assert memory_available(put(tmp_path, files)) == 540_007
    dirty = "anon 5\nfile_dirty 300\nfile_writeback 20\ninactive_file 1000\nactive_file 40000\n"
    put(tmp_path, {"sys/fs/cgroup/pod/memory.stat": dirty})
    assert memory_available(tmp_path) == 500_000 + 41_000 - 320
    put(tmp_path, {"sys/fs/cgroup/pod/memory.stat": "file_dirty 300\ninactive_file 10\nactive_file 10\n"})
    assert memory_available(tmp_path) == 500_000
    put(tmp_path, {"sys/fs/cgroup/pod/memory.current": "9000000"})
    assert memory_available(tmp_path) == 0


def test_a_control_group_of_version_1_limits_memory(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:cpu,cpuacct:/box\n4:memory:/box\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "1000000\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "400000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "500000\n",
    }
    assert memory_available(put(tmp_path, files)) == 600_000
    own = "dirty 1\nwriteback 2\ninactive_file 4\nactive_file 8\n"
    below = "total_dirty 10\ntotal_writeback 20\ntotal_inactive_file 4000\ntotal_active_file 8000\n"
    put(tmp_path, {"sys/fs/cgroup/memory/box/memory.stat": own + below})
    assert memory_available(tmp_path) == 600_000 + 12_000 - 30


def test_without_procfs_half_of_the_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(machine.os, "sysconf", sizes.__getitem__)
    assert memory_available(tmp_path) == 500 * 4096


def test_cores_are_those_that_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: set(range(12)), raising=False)
    assert cpu_count(tmp_path) == 12
    put(tmp_path, {"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/cpu.max": "250000 100000\n"})
    assert cpu_count(tmp_path) == 3
    put(tmp_path, {"sys/fs/cgroup/box/cpu.max": "max 100000\n"})
    assert cpu_count(tmp_path) == 12
    put(tmp_path, {"sys/fs/cgroup/box/cpu.max": "1000 100000\n"})
    assert cpu_count(tmp_path) == 1


def test_hardware_threads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: {0, 1, 2, 4, 6}, raising=False)
    folder = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    put(tmp_path, {folder.format(number): f"{number % 4},{number % 4 + 4}\n" for number in range(8)})
    assert cpu_count(tmp_path) == 3


def test_cpu_and_instruction_sets(tmp_path: Path) -> None:
    text = "processor : 0\nmodel name\t: Test CPU 9\nflags\t\t: fpu sse4_2 avx2 fma avx512f avx512_vnni weird\n"
    put(tmp_path, {"proc/cpuinfo": text})
    assert instruction_sets(tmp_path) == ("sse4_2", "avx2", "fma", "avx512f", "avx512_vnni")
    assert cpu_name(tmp_path) == "Test CPU 9"
    put(tmp_path, {"proc/cpuinfo": "processor: 0\nFeatures\t: fp asimd asimddp i8mm bf16 sve\n"})
    assert instruction_sets(tmp_path) == ("asimd", "asimddp", "i8mm", "bf16", "sve")


def test_gpus_are_found_by_looking_at_files(tmp_path: Path) -> None:
    assert gpus(tmp_path) == ()
    files = {
        "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t Test 9000\nIRQ: 5\n",
        "sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 8\nsimd_count 0\n",
        "sys/class/kfd/kfd/topology/nodes/1/properties": "cpu_cores_count 0\nsimd_count 256\n",
        "sys/class/kfd/kfd/topology/nodes/1/name": "gfx942\n",
    }
    assert gpus(put(tmp_path, files)) == (Gpu("cuda", "Test 9000"), Gpu("rocm", "gfx942"))


def test_a_limit_of_address_space_limits_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ulimit -v`: memory that is free beyond it cannot be allocated."""
    put(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/statm": "1000 7 7 7 0 7 0\n"})
    page = os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr("resource.getrlimit", lambda kind: (1500 * page, -1))
    assert memory_available(tmp_path) == 500 * page
    monkeypatch.setattr("resource.getrlimit", lambda kind: (10, 10))
    assert memory_available(tmp_path) == 0
    monkeypatch.setattr("resource.getrlimit", lambda kind: (resource.RLIM_INFINITY, -1))
    assert memory_available(tmp_path) == 8_000_000 * 1024
