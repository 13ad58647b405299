"""Malicious model files: a typed refusal, or a load within bounds; see `hostile_files`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.hostile_files import FILES, WALL_SECONDS

ROOT = Path(__file__).parents[2]
SOME = (
    "tokenizer.json is a pipe",
    "m.gguf is /dev/zero",
    "a config of 10 million empty lists",
    "5 million equal merges",
    "100,000 added tokens",
    "equal ids",
    "a normaliser that grows",
    "a normaliser of ten thousand steps",
    "a million tensors",
    "texts of holes",
)
"""Files that are made and refused quickly; `make prove` reads all."""


def outcomes(folder: Path, names: list[str]) -> list[dict[str, object]]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.models.hostile_files", str(folder), *names],
        cwd=ROOT,
        env={**os.environ, "RUST_BACKTRACE": "0"},
        capture_output=True,
        text=True,
        timeout=WALL_SECONDS * len(names),
        check=False,
    )
    assert not run.returncode, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_files_that_mean_harm_are_refused_within_bounds(
    tmp_path: Path, prove: bool, figure: Callable[[str, str], None]
) -> None:
    """A pipe hung the start, /dev/zero took all memory, and absurd counts took minutes and gigabytes."""
    results = outcomes(tmp_path, list(FILES) if prove else list(SOME))
    wrong, slowest, largest, refused = [], (0.0, ""), (0.0, ""), 0
    for result in results:
        hostile, name, said = FILES[str(result["name"])], str(result["name"]), str(result["said"])
        cpu, grown = float(str(result["cpu"])), float(str(result["grown"]))
        if hostile.says not in said or cpu > hostile.seconds or grown > hostile.mebibytes:
            wrong.append(result)
        if said != "loaded":
            refused += 1
            slowest, largest = max(slowest, (cpu, name)), max(largest, (grown, name))
    assert not wrong
    figure(
        "hostile model files",
        f"{len(results)}: {refused} refused, the slowest after {slowest[0]:.2f} s of CPU ({slowest[1]}), the largest "
        f"with {max(0.0, largest[0]):.0f} MiB beyond its file ({largest[1]}); the others loaded within bounds",
    )


@pytest.mark.parametrize("ending", ["never", "memory"])
def test_the_harness_detects_unbounded_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """Guards the harness itself: a reader without end, or without a memory bound, is stopped and named."""
    from tests.models import hostile_files

    def read(place: Path) -> str:
        if ending == "memory":
            return str(len(bytes(hostile_files.MEMORY)))
        while True:
            pass

    monkeypatch.setattr(hostile_files, "read", read)
    monkeypatch.setattr(hostile_files, "CPU_SECONDS", 1)
    outcome = hostile_files.bounded(FILES["equal ids"], tmp_path / "m")
    assert outcome["said"] in (
        "the process ended by signal 24",
        "the process ended by signal 9",
        "not typed: MemoryError: ",
    )
