"""The kernel tests with every address and every undefined step of the native code checked (GCC or Clang):

    python -m tests.kernels.sanitize [pytest's arguments]

The module is built with the sanitizers into a folder of its own and takes the place of the installed one there.
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
    """Configure and compile; fast where nothing changed."""
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
    """What Python must load before all else: the sanitizer, and the C++ library, in which it looks for exceptions."""
    found = []
    for name in ("libasan.so", "libstdc++.so"):
        ask = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
        found.append(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    return " ".join(found)


def main() -> int:
    build()
    # Python leaks by design. NaN, infinities and division by zero are IEEE's and not undefined.
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
