"""The ARM kernels compute the same bits as those for x86; a program without Python runs both, the former in qemu.

Speed on ARM is not measured here. On an ARM machine the program runs natively and compares with the portable kernels.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/cairn/kernels/csrc"
ON_ARM = platform.machine() in ("aarch64", "arm64")
CROSS = "aarch64-linux-gnu-g++"
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64") or ""
ARM_VARIANTS = ["portable", "neon", "neoni8mm"]


def needs(*programs: str) -> None:
    """Skip the test if a program that it needs is missing."""
    missing = [program for program in programs if not shutil.which(program)]
    if missing:
        pytest.skip(
            f"{' and '.join(missing)} not found: Debian has g++-aarch64-linux-gnu, qemu-user-static, cmake, ninja-build"
        )


def built(folder: Path, *options: str) -> str:
    """Build `bits.cpp` with these compiler options; return the program's path."""
    configure = ["cmake", "-S", SOURCES, "-B", folder, "-G", "Ninja", "-DCAIRN_BITS=ON", *options]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", folder, "-j2"], check=True, capture_output=True)
    return str(folder / "bits")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory, prove: bool) -> tuple[str, Path]:
    """Return a program for this machine, and the file of bits that its kernels computed."""
    if not prove:
        pytest.skip("two minutes of compiling and emulating: make prove-neon")
    needs("cmake", "ninja")
    variant = "portable" if ON_ARM else "avx2"
    if not ON_ARM and " avx2 " not in Path("/proc/cpuinfo").read_text().replace("\n", " "):
        pytest.skip("the bits that others are compared with are those of avx2, which this CPU lacks")
    folder = tmp_path_factory.mktemp("bits")
    program = built(folder / "here", f"-DCAIRN_VARIANTS={'all' if ON_ARM else variant}")
    file = folder / "golden"
    done = run(program, "write", file, variant)
    assert done.returncode == 0, done.stdout + done.stderr
    return program, file


def test_a_single_other_bit_is_found(golden: tuple[str, Path], tmp_path: Path) -> None:
    program, file = golden
    variant = "portable" if ON_ARM else "avx2"
    assert run(program, "compare", file, variant).returncode == 0
    other = bytearray(file.read_bytes())
    other[-1] ^= 1
    (tmp_path / "other").write_bytes(other)
    assert run(program, "compare", tmp_path / "other", variant).returncode == 1


def test_arm_computes_the_bits_of_x86(golden: tuple[str, Path], tmp_path: Path) -> None:
    program, file = golden
    command: list[str | Path] = [program]
    if not ON_ARM:
        needs(CROSS, QEMU or "qemu-aarch64-static")
        cross = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={CROSS}")
        command = [QEMU, built(tmp_path, *cross, "-DCAIRN_VARIANTS=all")]
    for variant in ARM_VARIANTS:
        if ON_ARM and variant != "portable" and variant not in this_cpu(tmp_path, []):
            continue
        done = run(*command, "compare", file, variant)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "0 with other bits" in done.stdout


def this_cpu(folder: Path, emulator: list[str]) -> list[str]:
    """Return the variants that run on this CPU or on the emulated one, the fastest first."""
    compiler = CROSS if emulator else "c++"
    program = folder / "this_cpu"
    if not program.exists():
        subprocess.run([compiler, "-static", SOURCES / "this_cpu.cpp", "-o", program], check=True)
    return run(*emulator, program).stdout.split(";")


@pytest.mark.parametrize(
    ("cpu", "variants"),
    [
        ("cortex-a72", ["portable"]),
        ("cortex-a76", ["neon", "portable"]),
        ("neoverse-n1", ["neon", "portable"]),
        ("max", ["neoni8mm", "neon", "portable"]),
    ],
)
def test_arm_cpus_get_what_they_can_run(cpu: str, variants: list[str], tmp_path: Path) -> None:
    needs(CROSS, QEMU or "qemu-aarch64-static")
    assert this_cpu(tmp_path, [QEMU, "-cpu", cpu]) == variants
