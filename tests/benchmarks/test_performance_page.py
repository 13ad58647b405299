"""docs/performance.md: generated from recorded figures, never edited by hand (known failure 49)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report

ROW: dict[str, Any] = {"shape": "s", "kind": "Q4_0", "name": "decode 8", "work": "decode", "size": 8, "depth": 0}
MACHINE = {"cpu": "C", "cores": 2, "threads": 2, "sets": ["avx2"], "memory": 2**34, "load": 0.1, "kernels": "avx2"}


def cpu(**row: Any) -> dict[str, Any]:
    """Return the figures of one row."""
    file = {"shape": "s", "kind": "Q4_0", "bytes": 10**9, "load_seconds": {"cairn": 1, "llama": 1}}
    file |= {"peak": {"cairn": 1, "llama": 1}, "check": {"largest": 0.1, "same": 3, "steps": 4}}
    about = {"machine": MACHINE | {"read": 4e10, "arithmetic": 5e11}, "rounds": 3, "steps": 8}
    return {**about, "llama.cpp": {"version": "0", "system": "AVX"}, "files": [file], "rows": [ROW | row]}


def test_the_page_is_what_its_figures_make() -> None:
    path = report.DOCS / "performance.md"
    assert path.read_text() == report.page(report.DOCS / "performance", report.by_hand(path))


def test_a_changed_figure_changes_the_page(tmp_path: Path) -> None:
    pages = []
    for speed in (100.0, 120.0):
        result = cpu(goal=3.0, ratio=speed / 40, cairn=[speed], llama=[40.0])
        (tmp_path / "cpu.json").write_text(json.dumps(result))
        pages.append(report.page(tmp_path, "by hand"))
    assert "| 100 | 40 | 2.50x | 3x |" in pages[0]
    assert "| 120 | 40 | **3.00x** | 3x |" in pages[1]
    assert "| 320 | 31% | 12% |" in pages[0], "8 sequences of 1 GB at 40 GB/s"
    assert all(page.endswith("by hand") for page in pages)


def test_a_machine_without_avx512_has_a_table_without_goals(tmp_path: Path) -> None:
    (tmp_path / "cpu-avx2.json").write_text(json.dumps(cpu(goal=3.0, ratio=2.5, cairn=[100.0], llama=[40.0])))
    text = report.page(tmp_path, "by hand")
    assert "| 100 | 40 | 2.50x |\n" in text and "3x" not in text
    assert "In 1 of 1 rows Cairn is the faster one" in " ".join(text.split())


@pytest.mark.parametrize(("first", "bold"), [(0.1, True), (0.5, False)])
def test_http_ratios_are_to_the_better_of_the_peers(first: float, bold: bool) -> None:
    load = [
        {"server": name, "connections": n, "tok_s": speed, "ttft_p50": wait, "ttft_p99": wait}
        for n in (1, 4, 16)
        for name, speed, wait in (
            ("cairn", 100.0, first),
            ("llama-server, 8 slots", 20.0, 5.0),
            ("llama-server, 16 slots", 25.0, 1.0),
            ("llama_cpp.server", 50.0, 0.01),
        )
    ]
    text = report.load_table(load)
    assert text.count("**4.00x** (goal 4x)") == 1 and text.count(" 4.00x (goal 5x)") == 1
    assert text.count(f"**{first:.2f}x**") == (3 if bold else 0)


def http(first: float) -> dict[str, Any]:
    """Return the figures of two rounds; Cairn's first token comes after `first` seconds where a prefix is cached."""
    names = ("cairn", "llama-server, 8 slots")
    load = [
        {"server": name, "connections": n, "tok_s": speed, "ttft_p50": 2 / speed, "ttft_p99": 3 / speed}
        for n in (1, 4, 16)
        for name, speed in zip(names, (90.0, 30.0), strict=True)
        for _ in range(2)
    ]
    prefix = [
        {"server": name, "new": new, "another connection": known}
        for name, new, known in zip(names, (1.0, 4.0), (first, 8.0), strict=True)
    ]
    context = [{"server": name, "new": new, "ready again": 1.0} for name, new in zip(names, (1.0, 2.0), strict=True)]
    beside = [
        {"server": name, "short": short, "whole": 2 * short, "long": 10.0}
        for name, short in zip(names, (first, 8.0), strict=True)
    ]
    return {
        "machine": MACHINE,
        "load_after": 0.2,
        "rounds": 2,
        "beside": beside,
        "type": "Q4_0",
        "load": load,
        "prefix": prefix,
        "context": [context[0] | {"after restart": 0.1}, context[1]],
        "start_seconds": dict.fromkeys(names, 1.0),
        "peak": dict.fromkeys(names, 10**9),
    }


@pytest.mark.parametrize(("first", "cell"), [(0.05, "**reached** (60 ms)"), (0.07, "missed (60 ms)")])
def test_known_prefixes_are_held_to_their_goal(first: float, cell: str, tmp_path: Path) -> None:
    (tmp_path / "http.json").write_text(json.dumps(http(first)))
    text = report.page(tmp_path, "by hand")
    assert f"| 2,000 tokens, another connection | {first * 1000:.0f} | 8,000 | 0.01x | {cell} |" in text
    assert "| 4,000 tokens, new | 1,000 | 2,000 | 0.50x | 0.50x (goal 0.35x) |" in text
    assert "| 4,000 tokens, after restart | 100 |  |  |  |" in text
    assert f"| short, all 16 | {2 * first:.1f} | 16.0 | 0.01x |\n| long, first token | 10.0 | 10.0 | 1.00x |" in text
    assert "**3.00x** (goal 1.5x) | **0.33x** (goal 0.4x)" in text
    assert f"]({report.HTTP_CHART})" in text


def test_the_http_chart_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.draw_http(http(0.05), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("own", "start", "words"), [(1.41e9, 1.4, "reached"), (1.50e9, 1.6, "missed")])
def test_start_and_memory_are_held_to_their_goals(own: float, start: float, words: str) -> None:
    results = {
        "machine": MACHINE,
        "file": "f",
        "first_start": 5.0,
        "starts": [start, 9.0, 0.1],
        "weights": 300_000_000,
        "pool": 10**9,
        "tokens": 8000,
        "processes": {"worker": {"peak": 1_600_000_000, "own": own, "files": 20_000_000}},
    }
    text = " ".join(report.footprint_text(results).split())
    assert f"after {start:.2f} s from then on" in text
    assert f"{(own + 20e6 - 1.3e9) / 1e6:.0f} MB beside them" in text
    assert text.count(words) == 2
    assert "300 MB at its peak" in text


def test_every_peer_row_of_the_committed_figures_was_measured_in_all_rounds() -> None:
    for path in (report.DOCS / "performance").glob("cpu*.json"):
        parsed = json.loads(path.read_text())
        for row in parsed["rows"]:
            assert len(row["cairn"]) == len(row["llama"]) == parsed["rounds"]
            assert all(speed > 0 for speed in row["cairn"] + row["llama"])
        native = ("avx512f" in parsed["machine"]["sets"]) == ("AVX512 = 1" in parsed["llama.cpp"]["system"])
        assert native, "the peer was not built for the machine"
