"""The benchmark of teams: its checks catch violations."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("teams")


def test_a_prefix_computed_twice_and_a_round_without_batches_are_reported(script: Any) -> None:
    good = script.Figures(prompt=8 * 2050, computed=2000 + 8 * 60, seconds=1.0, at_once=7.5)
    assert script.faults(good, 2000, 8) == []
    (twice,) = script.faults(good._replace(computed=2 * 2000 + 8 * 60), 2000, 8)
    assert "with its beginning once there are at most" in twice
    (alone,) = script.faults(good._replace(at_once=1.0), 2000, 8)
    assert "went on with 1.0 of 8 members" in alone
