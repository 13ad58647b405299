"""Planted bugs: every one still fits the source, and the simulators find them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.laws import planted_bugs
from tests.laws.planted_bugs import BUGS

ROOT = Path(__file__).parents[2]


def test_every_planted_bug_still_fits_the_source() -> None:
    assert len(BUGS) >= 40
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    for bug in BUGS:
        bug.tree()


HARNESS = """
from cairn.kv.pool.blocks import BlockPool

def run(seed):
    if ALWAYS or "with a bug" in BlockPool.take.__code__.co_filename:
        raise AssertionError(f"seed {seed}: a law")
"""
SCORE = """
import sys
from tests.laws import planted_bugs

planted_bugs.SIMULATORS = ()
planted_bugs.LAWS[planted_bugs.BLOCKS] = "harness"
planted_bugs.SCHEDULES["harness"] = 3
sys.exit(planted_bugs.main([planted_bugs.BUGS[0].name]))
"""


@pytest.mark.parametrize("always", [False, True])
def test_a_bug_is_found_only_by_a_schedule_that_passes_without_it(tmp_path: Path, always: bool) -> None:
    """Otherwise a harness that breaks on everything would find every bug."""
    (tmp_path / "harness.py").write_text(HARNESS.replace("ALWAYS", str(always)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", SCORE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == always, done.stdout + done.stderr
    assert f"planted bugs found: {1 - always} of 1 in " in done.stdout
    assert ("NOT COUNTED, for without the bug: seed 0: a law" in done.stdout) == always


def test_half_of_the_bugs_are_of_every_kind_and_drawn_by_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hunted = planted_bugs.half(BUGS)
    laws = [planted_bugs.LAWS.get(bug.file, planted_bugs.SCHEDULERS) for bug in hunted]
    assert set(laws) == set(planted_bugs.SIMULATORS) and len(BUGS) <= 2 * len(hunted) <= len(BUGS) + len(set(laws))
    assert planted_bugs.half(BUGS) == hunted
    shutil.copytree(planted_bugs.SOURCE, tmp_path / "cairn", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    monkeypatch.setattr(planted_bugs, "SOURCE", tmp_path / "cairn")
    for file in {bug.file for bug in BUGS}:
        with (tmp_path / "cairn" / file).open("a") as end:
            end.write("# changed\n")
    assert len(set(planted_bugs.half(BUGS)) - set(hunted)) > 40


def test_the_laws_find_planted_bugs(prove: bool, figure: Callable[[str, str], None]) -> None:
    """Applies each kind of bug that the laws are for, each in a process of its own.

    Half of them are hunted, each starting at the schedule that found it last; with `make prove` all are, from the first
    schedule on.
    """
    command = [sys.executable, "-m", "tests.laws.planted_bugs", "--prove" if prove else "--half"]
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
