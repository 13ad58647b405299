"""Servers started by a benchmark: they end with it, whenever it is interrupted."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest


def test_a_benchmark_that_ends_while_a_server_starts_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    serving = importlib.import_module("serving")
    started: list[Any] = []

    def told_to_end(server: Any) -> bool:
        started.append(server.process)
        raise SystemExit("told to end")

    monkeypatch.setattr(serving.Server, "ready", told_to_end)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(SystemExit, match="told to end"):
        serving.Server("cairn", command, "/", "model", tmp_path)
    (process,) = started
    try:
        assert process.poll() is not None
    finally:
        process.kill()
        process.wait()
