from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.laws.planted_bugs import BUGS

ROOT = Path(__file__).parents[2]


def test_every_planted_bug_still_fits_the_source() -> None:
    assert len(BUGS) >= 40
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    for bug in BUGS:
        ast.parse(bug.source())


def test_the_laws_find_planted_bugs(figure: Callable[[str, str], None]) -> None:
    """Every kind of bug that the laws are there for, applied in turn, in processes of their own."""
    command = [sys.executable, "-m", "tests.laws.planted_bugs"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    score = done.stdout.strip().splitlines()[-1]
    assert score.startswith("planted bugs found: ")
    figure("planted bugs", score.removeprefix("planted bugs found: "))
    found, total = (int(word) for word in score.split(": ")[1].split(" in ")[0].split(" of "))
    assert total >= 40
    assert found * 40 >= total * 38
