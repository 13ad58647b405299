"""The benchmark of KV types: engines of both types take turns, and the result is the slowdown of one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cairn.config.config import Config
from cairn.engine.bench import Bench


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])


def test_rows_are_measured_in_turns_with_both_types(monkeypatch: pytest.MonkeyPatch) -> None:
    import kv_rows
    from vs_llama_cpp import Row

    turns: list[str] = []
    for name in ("prefill", "decode"):

        def noted(bench: Bench, *args: int, work: object = getattr(Bench, name)) -> object:
            turns.append(bench.engine.info.kv_dtype)
            return work(bench, *args)  # type: ignore[operator]

        monkeypatch.setattr(Bench, name, noted)
    rows = [
        Row("demo", "Q4_0", "prefill", 8, 0.0),
        Row("demo", "Q4_0", "decode", 2, 0.0),
        Row("demo", "BF16", "decode", 1, 0.0, depth=40),
    ]
    results = list(kv_rows.measured(rows, Config(threads=1), rounds=2, steps=2))
    assert [row for row, _ in results] == rows
    assert all(len(times) == 2 and all(len(time) == 3 and min(time) > 0 for time in times) for _, times in results)
    half, plain = "float16", "bfloat16"
    first_each_time = [half, plain, plain, plain, plain, half, plain, half, plain]
    assert turns == first_each_time * 3


def test_the_report_says_how_much_longer_f16_takes() -> None:
    import kv_rows

    assert kv_rows.told([1.02, 2.2, 1.0], [1.0, 2.0, 1.0]) == "+2.0% | +0.0% to +10.0%"
    assert kv_rows.verdict([0.02, -0.1, 0.021]) == "2 of 3 rows are within 2%, the slowest takes +2.1%."
