"""Checks of workflows: errors are found before anything runs, and named."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from cairn.types.errors import InvalidRequest
from cairn.workflows import checks
from cairn.workflows.checks import check_workflow
from cairn.workflows.definition import workflow_of
from cairn.workflows.templates import Absent, filling

PLAN = {
    "type": "object",
    "properties": {"steps": {"type": "array", "items": {"type": "string"}}, "risk": {"enum": ["low", "high"]}},
    "required": ["steps"],
}


def node(id: str, prompt: str = "Go on.", **more: Any) -> dict[str, Any]:
    return {"id": id, "prompt": prompt, **more}


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([node("a", "{{ planner.x }}"), node("plan")], "unknown dependency: a.prompt names planner"),
        ([node("a", needs=["plam"]), node("plan")], "names plam, and there is no such node; did you mean plan?"),
        ([node("a", "{{ c }}"), node("b", "{{ a }}"), node("c", "{{ b }}")], "has a cycle: a -> c -> b -> a"),
        ([node("a", needs=["a"])], "has a cycle: a -> a"),
        ([node("a", "{{ b.x }}"), node("b")], "missing output: a.prompt reads b.x of b, whose output is a text"),
        ([node("a", "{{ b.stepz }}"), node("b", output=PLAN)], "whose contract has no such output"),
        ([node("a", "{{ b.risk }}"), node("b", output=PLAN)], "does not require"),
        (
            [node("a", takes={"b.steps": "string"}), node("b", output=PLAN)],
            "contract mismatch: a takes b.steps as string",
        ),
        ([node("a", each={"in": "b"}), node("b", output=PLAN)], "must be a list; by its contract b is of type object"),
        ([node("a", "{{ item }}")], "fans out over nothing"),
        ([node("a", "{{ inputs.x }}")], "inputs are: task"),
        ([node("a", "{{ previous.a }}")], "is in no loop"),
        (
            [node("a", when={"output": "b.risk", "is": "medium"}), node("b", output=PLAN)],
            "unreachable node: a never runs",
        ),
        ([node("a", when={"output": "b.risk", "above": 3}), node("b", output=PLAN)], "unreachable node: a"),
        ([node("a", when={"output": "b"}), node("b")], "must be an `output` with one of"),
        ([node("a"), node("a")], "a names two nodes"),
        ([node("item")], "is reserved for templates"),
        ([node("a", "{{ b")], "without its other half"),
        ([node("a", "{{ b; import os }}"), node("b")], "is no path"),
        ([node("a", "")], "nodes.a.prompt is missing"),
        ([node("a", sampling={"tempo": 1})], "nodes.a.sampling has no tempo"),
        ([node("a", retries=9)], "0 to 8, the limit"),
        ([node("a", each={"in": "inputs.task", "limit": 257})], "1 to 256, the limit"),
        ([node(f"n{number}") for number in range(257)], "1 to 256, the limit"),
        ([node("a", output={"type": "object"})], "properties is missing"),
        ([node("a", output={"type": "string", "format": "date"})], "a contract has no format"),
        ([{"id": "a", "loop": {"nodes": [node("b")], "limit": 99}}], "1 to 32, the limit"),
        ([node(f"n{number}") for number in range(257)], "257 nodes; a workflow has 1 to 256, the limit"),
        ([{"id": "a", "prompt": "x", "loop": {"nodes": [node("b")], "limit": 2}}], "a loop has nodes, and no prompt"),
        (
            [{"id": "a", "loop": {"limit": 2, "nodes": [{"id": "b", "loop": {"limit": 1, "nodes": [node("c")]}}]}}],
            "loops are not nested",
        ),
        (
            [{"id": "a", "loop": {"nodes": [node("b", "{{ previous.b }}")], "limit": 2}}],
            "not there when the loop runs first",
        ),
        (
            [{"id": "a", "loop": {"nodes": [node("b", "{{ c }}"), node("c", "{{ b }}")], "limit": 2}}],
            "the loop a has a cycle: b -> c -> b",
        ),
        (
            [{"id": "a", "loop": {"nodes": [node("b")], "limit": 2, "until": {"output": "b.ok", "is": True}}}],
            "missing output: a.loop.until reads b.ok",
        ),
        ([{"id": "a", "prompt": "x", "when": {"output": "b", "eval": "1"}}], "eval"),
    ],
)
def test_invalid_input_is_named_in_the_error(nodes: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_workflow(workflow_of({"inputs": {"task": None}, "nodes": nodes}))
    assert said in str(caught.value)


def test_a_misspelt_key_gets_the_right_one() -> None:
    with pytest.raises(InvalidRequest, match="unknown field `nodez`; did you mean nodes\\?"):
        workflow_of({"nodez": []})


def test_a_merge_names_nodes_with_fields() -> None:
    for names, said in ((["x"], "no such node"), (["a"], "has no fields"), ([], "each once")):
        with pytest.raises(InvalidRequest, match=said):
            check_workflow(workflow_of({"nodes": [node("a")], "merge": {"precedence": names}}))


def test_a_slot_may_be_empty() -> None:
    """An empty text as the last alternative: for an optional field of a contract, and for a loop's first run."""
    nodes = [
        node("plan", "{{ inputs.task }}", output=PLAN),
        node("code", '{{ plan.risk or "" }}'),
        {"id": "repair", "loop": {"nodes": [node("fix", "{{ code }}{{ previous.fix or '' }}")], "limit": 2}},
    ]
    graph = check_workflow(workflow_of({"inputs": {"task": "x"}, "nodes": nodes}))
    assert graph.needs["code"] == {"plan"} and graph.needs["repair"] == {"code"}
    assert filling('a{{ plan.risk or "" }}b', {"plan": {}}).text() == "ab"
    assert filling('a{{ plan.risk or "" }}b', {"plan": {"risk": "low"}}).text() == "alowb"
    with pytest.raises(Absent):
        filling("{{ plan.risk }}", {"plan": {}})
    for wrong in ('{{ "" }}', '{{ "" or plan }}', '{{ plan or "x" }}'):
        with pytest.raises(InvalidRequest, match="is no path"):
            filling(wrong, {})


def test_a_graph_is_in_order_and_knows_what_waits_for_what() -> None:
    nodes = [
        node("review", "{{ code.0.text or plan.steps.0 or inputs.task }} {{ repair.fix or code }}"),
        node("code", "{{ item }} {{ index }}", each={"in": "plan.steps"}, output=PLAN),
        node("plan", "{{ inputs.task }}", output=PLAN),
        {
            "id": "repair",
            "loop": {
                "nodes": [node("fix", "{{ previous.fix or code }}", when={"output": "plan.steps", "exists": True})],
                "limit": 3,
            },
        },
    ]
    with pytest.raises(InvalidRequest, match="whose contract has no such output"):
        check_workflow(workflow_of({"inputs": {"task": "x"}, "nodes": nodes}))
    nodes[0]["prompt"] = "{{ code.0.steps or plan.steps.0 or inputs.task }} {{ repair.fix or code }}"
    graph = check_workflow(workflow_of({"inputs": {"task": "x"}, "nodes": nodes}))
    assert [one.id for one in graph.nodes] == ["plan", "code", "repair", "review"]
    assert graph.needs == {
        "plan": set(),
        "code": {"plan"},
        "repair": {"code", "plan"},
        "review": {"code", "plan", "repair"},
    }


def random_graph(rng: random.Random) -> tuple[list[dict[str, Any]], bool]:
    """Return nodes with random needs, and whether there is a cycle, found by walking from each node."""
    count = rng.randint(1, 9)
    names = [f"n{number}" for number in range(count)]
    needs = {name: rng.sample(names, rng.randint(0, min(2, count))) for name in names}

    def reaches(start: str) -> bool:
        seen: set[str] = set()
        todo = list(needs[start])
        while todo:
            name = todo.pop()
            if name == start:
                return True
            if name not in seen:
                seen.add(name)
                todo += needs[name]
        return False

    return [node(name, needs=needs[name]) for name in names], any(map(reaches, names))


def wrong_verdicts() -> int:
    rng, wrong = random.Random(1), 0
    for _ in range(2_000):
        nodes, cyclic = random_graph(rng)
        try:
            check_workflow(workflow_of({"nodes": nodes}))
            refused = ""
        except InvalidRequest as error:
            refused = str(error)
        wrong += bool(refused) != cyclic
        if refused:
            ring = refused.partition("cycle: ")[2].split(" -> ")
            needs = {one["id"]: one["needs"] for one in nodes}
            assert ring[0] == ring[-1] and len(set(ring)) == len(ring) - 1
            assert all(after in needs[before] for before, after in pairwise(ring))
    return wrong


def test_a_cycle_is_always_refused_and_nothing_else_is() -> None:
    assert wrong_verdicts() == 0


def test_a_check_that_lets_cycles_through_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: a node that waits for itself is accepted."""
    ordered = checks._ordered

    def blind(nodes: Any, needs: Any, where: str) -> Any:
        return ordered(nodes, {name: waits - {name} for name, waits in needs.items()}, where)

    monkeypatch.setattr(checks, "_ordered", blind)
    assert wrong_verdicts() > 0
