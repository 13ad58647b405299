"""docs/performance.md is what its figures make: nobody edits a number. Known failure 49: figures that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import report

ROW: dict[str, Any] = {"shape": "s", "kind": "Q4_0", "name": "decode 8", "work": "decode", "size": 8, "depth": 0}
MACHINE = {"cpu": "C", "cores": 2, "threads": 2, "sets": ["avx2"], "memory": 2**34, "load": 0.1, "kernels": "avx2"}


def cpu(**row: Any) -> dict[str, Any]:
    """Figures of one row."""
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
        found = cpu(goal=3.0, ratio=speed / 40, cairn=[speed], llama=[40.0])
        (tmp_path / "cpu.json").write_text(json.dumps(found))
        pages.append(report.page(tmp_path, "by hand"))
    assert "| 100 | 40 | 2.50x | 3x |" in pages[0]
    assert "| 120 | 40 | **3.00x** | 3x |" in pages[1]
    assert "| 320 | 31% | 12% |" in pages[0], "8 sequences of 1 GB at 40 GB/s"
    assert all(page.endswith("by hand") for page in pages)


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


def test_every_peer_row_of_the_committed_figures_was_measured_in_all_rounds() -> None:
    for path in (report.DOCS / "performance").glob("cpu.json"):
        found = json.loads(path.read_text())
        for row in found["rows"]:
            assert len(row["cairn"]) == len(row["llama"]) == found["rounds"]
            assert all(speed > 0 for speed in row["cairn"] + row["llama"])
        native = ("avx512f" in found["machine"]["sets"]) == ("AVX512 = 1" in found["llama.cpp"]["system"])
        assert native, "the peer was not built for the machine"
