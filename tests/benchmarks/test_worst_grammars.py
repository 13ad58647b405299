"""The worst known grammars: compiling and following them stays within the documented limits."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cairn.text.grammar.compile_wire import MOST_BYTES, SECONDS
from cairn.worker.grammar_matcher import MOST_GROWTH

REFUSED = ("10 of them", "4,000 optional properties", "60 patterns all at once")
SOME = ("an integer, multipleOf 99,991", "4,000 optional properties", "300 patterns alive everywhere", "any JSON")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("worst_grammars")


async def test_the_worst_grammars_are_refused_or_bounded(
    script: Any, prove: bool, figure: Callable[[str, str], None]
) -> None:
    """All of them, for 1,000 tokens each, with --prove; a few otherwise."""
    results: dict[str, Any] = {}
    names = [*script.worst()] if prove else [*SOME]
    await script.rows(script.table_of("demo"), 1000 if prove else 50, results.__setitem__, names)
    assert len(results) == (20 if prove else 4)
    refused = {name for name, row in results.items() if row.verdict.ended}
    assert refused >= {name for name in REFUSED if name in results} and "any JSON" not in refused
    followed = {name: row.followed for name, row in results.items() if row.followed is not None}
    assert all(row.verdict.seconds < SECONDS + 5 for row in results.values())
    assert all(row.verdict.bytes <= MOST_BYTES for row in results.values())
    assert all(one.grown < MOST_GROWTH for one in followed.values()), followed
    most, slowest = max(one.grown for one in followed.values()), max(one.slowest for one in followed.values())
    held = max(row.verdict.bytes for row in results.values())
    assert slowest < 0.5
    figure(
        f"{len(results)} worst grammars",
        f"{len(refused)} refused within {SECONDS:g} s; the others hold at most {held >> 20} MiB, grow by at most "
        f"{most >> 20} MiB, slowest mask {1e3 * slowest:.0f} ms",
    )
