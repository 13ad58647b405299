"""Runs the kernel tests with address and undefined-behaviour sanitizers in the native code (GCC or Clang).

    python -m tests.kernels.sanitize [pytest's arguments]

The module is built with the sanitizers into a folder of its own, which takes precedence over the installed one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "sanitized"
TESTS = ["tests/kernels", "tests/engine/test_cpu.py", "tests/models/forward/test_decoder.py"]
RUN = """
import sys
import cairn.kernels
cairn.kernels.__path__.insert(0, sys.argv[1])
from cairn.kernels import _native
assert _native.__file__.startswith(sys.argv[1]), _native.__file__
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


def build() -> None:
    """Configure and compile; fast if nothing changed."""
    configure = [
        "cmake",
        "-S",
        ROOT / "src/cairn/kernels/csrc",
        "-B",
        BUILD,
        "-DCAIRN_SANITIZE=ON",
        "-DCAIRN_TILE_MODEL=ON",
    ]
    configure += [f"-DCAIRN_OUTPUT={BUILD}", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", BUILD, "-j2"], check=True)


def runtime() -> str:
    """Return the libraries to preload: the sanitizer, and the C++ library, where it looks for exceptions."""
    libraries = []
    for name in ("libasan.so", "libstdc++.so"):
        ask = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
        libraries.append(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    return " ".join(libraries)


def main() -> int:
    build()
    # Python leaks by design. NaN, infinities and division by zero are defined by IEEE 754.
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime(),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", RUN, str(BUILD), "-p", "no:cacheprovider", "-q", *(sys.argv[1:] or TESTS)]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
