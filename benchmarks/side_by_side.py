"""Common parts of the benchmarks beside llama.cpp: a process for each side, the machine, model files, medians."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16", "asimddp", "i8mm", "bf16")


class Side:
    """A process that answers lines of JSON, and ends with the block."""

    def __init__(self, python: str, script: str) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([python, str(HERE / script)], stdin=pipe, stdout=pipe, text=True)
        self.script = script
        self.hello = self._answer()

    def __call__(self, work: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": work, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.script} ended with exit code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def machine(threads: int) -> dict[str, Any]:
    """Return the CPU, its features and limits with this many threads, and the current load."""
    from cairn.engine.machine import cpu_name

    flags: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.lower().startswith(("flags", "features")):
            flags |= set(line.partition(":")[2].split())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with Side(sys.executable, "cairn_side.py") as side:
        limits = side("machine", threads=threads)
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "sets": [one for one in SETS if one in flags],
        "memory": pages,
        "load": load(),
        **limits,
    }


def load() -> float:
    """Return the processes that wanted a core, on average over the last minute."""
    return os.getloadavg()[0]


def model_file(folder: Path, shape: str, kind: str, llama: str) -> Path:
    """Return the GGUF file of a shape with random weights, written if missing.

    It is one of `family_models`, BF16, or what llama.cpp makes of that.
    """
    path = folder / f"{shape}-{kind}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    print(f"writing {path}", file=sys.stderr)
    from family_models import SHAPES, write_family  # importable where a benchmark is run, but not in a test

    if shape in SHAPES:
        write_family(partial, shape)
    elif kind == "BF16":
        from cairn.models.packing.random_weights import shape_spec
        from random_models import write_random

        write_random(partial, shape_spec(shape))
    else:
        source = model_file(folder, shape, "BF16", llama)
        with Side(llama, "llama_side.py") as side:
            side("quantize", source=str(source), target=str(partial), kind=kind)
    partial.rename(path)
    return path


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median ratio over the rounds: both sides of a round saw the same machine."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def write_json(path: Path | None, run: dict[str, Any]) -> None:
    """Write the whole run for the pages in docs/."""
    if path is not None:
        path.write_text(json.dumps(run, indent=1) + "\n")
