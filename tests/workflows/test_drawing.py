"""Drawings of workflows."""

from __future__ import annotations

import re
import struct
import sys
from xml.etree import ElementTree

import pytest

from cairn.types.errors import Unsupported
from cairn.workflows.definition import workflow_of
from cairn.workflows.drawing import COLOURS, mermaid, png, states_of, svg
from tests.workflows.scripted_answerer import run
from tests.workflows.test_checks import node
from tests.workflows.test_runs import REPAIR, answers


async def test_a_run_is_drawn_with_its_state() -> None:
    flow = workflow_of(REPAIR)
    text = mermaid(flow)
    assert text.startswith("flowchart LR\n") and '  n_plan["plan<br/>planner"]\n' in text
    assert '  subgraph n_repair["repair: at most 3 times"]\n    n_test["test<br/>tester"]\n' in text
    assert "    n_test --> n_fix\n  end\n" in text and "  n_code --> n_repair\n" in text
    state = (await run(REPAIR, answers, task="x")).state
    states = states_of(flow, state.nodes)
    assert states["plan"] == states["repair"] == "done" and states["fix"] == "skipped"
    assert f"  style n_fix fill:{COLOURS['skipped']}\n" in mermaid(flow, states)
    picture = svg(flow, states)
    drawn = ElementTree.fromstring(picture)
    assert len(drawn.findall("{http://www.w3.org/2000/svg}g")) == 6 and COLOURS["skipped"] in picture


def test_boxes_do_not_lie_on_each_other() -> None:
    nodes = [node(f"n{number}", needs=[f"n{number // 2}"] if number > 1 else []) for number in range(1, 20)]
    drawn = ElementTree.fromstring(svg(workflow_of({"nodes": [*REPAIR["nodes"], *nodes], "inputs": {"task": ""}})))
    boxes = [rect for group in drawn.iter("{http://www.w3.org/2000/svg}g") for rect in group if "rect" in rect.tag]
    places = {(box.get("x"), box.get("y")) for box in boxes}
    assert len(places) == len(boxes) == 25


def test_a_name_is_text() -> None:
    picture = svg(workflow_of({"name": "<script>", "nodes": [node("a", role='"><script>')]}))
    assert "<script>" not in picture and ElementTree.fromstring(picture) is not None


def test_a_png_is_drawn_and_refused_by_name_where_nothing_draws_it(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = workflow_of(REPAIR)
    size = re.search(r'width="(\d+)" height="(\d+)"', svg(flow))
    assert size is not None
    drawn = png(flow)
    assert drawn.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", drawn[16:24]) == (2 * int(size[1]), 2 * int(size[2]))
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(Unsupported, match="needs the package resvg-py"):
        png(flow)
