"""Limits of workflows: each is named in the error, and workflows within them are checked and filled quickly."""

from __future__ import annotations

import asyncio
import threading
import time
import tracemalloc
from typing import Any

import pytest

from cairn.types.errors import InvalidRequest
from cairn.workflows import paths, prompt_memory, runner
from cairn.workflows.checks import check_workflow
from cairn.workflows.contracts import Breach, check_value
from cairn.workflows.definition import MAX_FILLED, workflow_of
from cairn.workflows.paths import lookup, same
from cairn.workflows.prompt_memory import PromptMemory
from cairn.workflows.templates import Absent, TooLong, filling
from tests.workflows.scripted_answerer import Bench, run
from tests.workflows.test_checks import PLAN, node

SECONDS = 2.0
"""Limit in CPU seconds for checking a workflow; each of these took many times as long, or did not end."""


def check(flow: dict[str, Any]) -> str:
    """Check a workflow; return the error, or an empty text."""
    try:
        check_workflow(workflow_of(flow))
    except InvalidRequest as error:
        return str(error)
    return ""


def listing(values: list[Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": {"enum": values}}, "required": ["x"]}


def nested(depth: int, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = {"all": [leaf]}
    return leaf


PATH = "b." + "x" * 600
CONDITION = {"output": "b", "exists": True}


@pytest.mark.parametrize(
    ("flow", "said"),
    [
        ({"nodes": [node("a", "x" * 262_145)]}, "nodes.a.prompt has 262145 characters; the limit is 262144"),
        ({"system": "x" * 262_145, "nodes": [node("a")]}, "system has 262145 characters; the limit is 262144"),
        ({"roles": {"r": "x" * 262_145}, "nodes": [node("a")]}, "roles.r has 262145 characters"),
        ({"roles": {"r" * 129: ""}, "nodes": [node("a")]}, "has 129 characters; the limit is 128"),
        ({"roles": {f"r{at}": "" for at in range(257)}, "nodes": [node("a")]}, "roles holds 257 entries"),
        ({"inputs": {f"i{at}": "" for at in range(257)}, "nodes": [node("a")]}, "inputs holds 257 entries"),
        ({"nodes": [node("a", needs=["b"] * 257), node("b")]}, "nodes.a.needs holds 257 entries; the limit is 256"),
        ({"nodes": [node("a")], "merge": {"precedence": ["a"] * 257}}, "merge.precedence holds 257 entries"),
        ({"name": "x" * 1001, "nodes": [node("a")]}, "name has 1001 characters; the limit is 1000"),
        ({"nodes": [node("a", role="x" * 129)]}, "nodes.a.role has 129 characters; the limit is 128"),
        ({"nodes": [node("a", "{{ b }}" * 65), node("b")]}, "a.prompt has 65 slots; the limit is 64"),
        ({"nodes": [node("a", "{{ " + " or ".join("b" * 9) + " }}"), node("b")]}, "more than 8 paths, the limit"),
        ({"nodes": [node("a", f"{{{{ {PATH} }}}}"), node("b")]}, "a path has 602 characters; the limit is 512"),
        ({"nodes": [node("a", takes={PATH: "string"}), node("b")]}, "a path has 602 characters"),
        ({"nodes": [node("a", each={"in": PATH}), node("b")]}, "a path has 602 characters"),
        ({"nodes": [node("a", when={"output": PATH, "exists": True}), node("b")]}, "a path has 602 characters"),
        ({"nodes": [node("a", when={"any": [CONDITION] * 65}), node("b")]}, "more than 64 conditions, the limit"),
        ({"nodes": [node("a", when=nested(65, CONDITION)), node("b")]}, "more than 64 conditions, the limit"),
        ({"nodes": [node("a", when={"output": "b", "in": [1] * 1025}), node("b")]}, "holds 1025 values; the limit is"),
        ({"nodes": [node("a", output=listing(list(range(1025))))]}, "enum must be a list of 1 to 1024 values"),
        ({"nodes": [node("a", output={"enum": []})]}, "enum must be a list of 1 to 1024 values"),
        ({"nodes": [node("a", output={"type": "object", "properties": {"x" * 129: {}}})]}, "of at most 128 characters"),
        ({"nodes": [node("a", needs=["b" * 100_000]), node("b")]}, "and there is no such node"),
        ({"nodes": [node("a", each={"in": "item"})]}, "nodes.a.each.in reads item, which it makes itself"),
        ({"nodes": [node("a", each={"in": "index.x"})]}, "nodes.a.each.in reads index.x, which it makes itself"),
    ],
)
def test_a_bound_is_named(flow: dict[str, Any], said: str) -> None:
    result = check(flow)
    assert said in result and len(result) < 600


LONG = "long" * 250_000


@pytest.mark.parametrize(
    "flow",
    [
        {"nodes": [node("a", "{{" * 100_000)]},
        {"nodes": [node("a", "{{ a" * 50_000)]},
        {"nodes": [node("a", "{{ " + "a or " * 50_000 + "}}")]},
        {
            "nodes": [
                node("a", when={"all": [{"output": "b.x", "in": [f"{at}" for at in range(1024)]}] * 60}),
                node("b", output=listing(list(range(1024)))),
            ]
        },
        {"nodes": [node("a", "{{ " + LONG + " }}"), node("b")]},
        {"nodes": [node("a", needs=[LONG]), *(node(f"long{at}") for at in range(200))]},
        {"nodes": [node(LONG)]},
        {"nodes": [node("a", **{LONG: 1})]},
        {"nodes": [node("a", output={LONG: 1})]},
        {"nodes": [node("a", output={"type": "object", "properties": {LONG: {"properties": {}}}})]},
        {"inputs": {LONG: 1}, "nodes": [node("a", "{{ inputs.x }}")]},
        {
            "nodes": [
                {
                    "id": "l",
                    "loop": {
                        "limit": 2,
                        "nodes": [node(f"n{at}", "{{ o.x or o.y }}" * 64) for at in range(250)],
                    },
                },
                node("o", output={"type": "object", "properties": {"x": PLAN, "y": PLAN}, "required": ["x", "y"]}),
            ]
        },
    ],
    ids=[
        "half slots", "open slots", "alternatives", "enum beside in", "path", "needs", "id", "field", "keyword",
        "property", "input", "loop of slots",
    ],
)  # fmt: skip
def test_a_check_takes_little_time(flow: dict[str, Any]) -> None:
    began = time.process_time()
    said = check(flow)
    assert time.process_time() - began < SECONDS
    assert len(said) < 600


@pytest.mark.parametrize(
    ("output", "field"),
    [
        ({"type": ["string", "null"]}, "nodes.a.output.type"),
        ({"type": {}}, "nodes.a.output.type"),
        ({"type": None}, "nodes.a.output.type"),
        ({"type": "object", "properties": {"x": {"type": "string"}}, "required": [[]]}, "nodes.a.output.required"),
        ({"type": "object", "properties": {"x": {"type": "string"}}, "required": "x"}, "nodes.a.output.required"),
        ({"type": "object", "properties": [], "required": []}, "nodes.a.output.properties"),
        ({"type": "string", "minLength": "x"}, "nodes.a.output.minLength"),
        ({"type": "string", "minLength": 1.5}, "nodes.a.output.minLength"),
        ({"type": "string", "minLength": True}, "nodes.a.output.minLength"),
        ({"type": "string", "maxLength": -1}, "nodes.a.output.maxLength"),
        ({"type": "string", "minLength": 10**400}, "nodes.a.output.minLength"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "nodes.a.output.minLength"),
        ({"type": "integer", "minimum": [1]}, "nodes.a.output.minimum"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "nodes.a.output.minimum"),
        ({"type": "array"}, "nodes.a.output.items"),
        ({"type": "array", "items": 3}, "nodes.a.output.items"),
        ({"type": "string", "items": {"type": []}}, "nodes.a.output.items.type"),
        ({"type": "array", "items": {"type": "string"}, "maxItems": {}}, "nodes.a.output.maxItems"),
        ({"enum": {}}, "nodes.a.output.enum"),
        ({"type": "string", "description": 3}, "nodes.a.output.description"),
        ({"type": "object", "properties": {"x": {"type": "y"}}}, "nodes.a.output.x.type"),
        ({"enum": ["a"], "additionalProperties": True}, "nodes.a.output.additionalProperties"),
    ],
)
def test_a_keyword_of_another_kind_is_refused_with_its_field(output: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_workflow(workflow_of({"nodes": [node("a", output=output)]}))
    assert caught.value.field == field and str(caught.value).startswith(field)


LISTS = {"enum": [["a"], ["b", "c"]]}


def test_a_contract_of_lists_is_read_by_conditions_and_fan_outs() -> None:
    made = node("b", output=LISTS)
    assert check({"nodes": [made, node("a", when={"output": "b", "is": ["a"]})]}) == ""
    assert "unreachable" in check({"nodes": [made, node("a", when={"output": "b", "is": ["x"]})]})
    assert check({"nodes": [made, node("a", "{{ item }}", each={"in": "b"})]}) == ""
    assert check({"nodes": [made, node("a", "{{ item.x }}", each={"in": "b"})]}) == ""  # nothing is known of the items
    check_value(LISTS, ["b", "c"], "it")
    check_value({"const": {"x": [1]}}, {"x": [1.0]}, "it")
    with pytest.raises(Breach):
        check_value(LISTS, ["b"], "it")


async def test_a_fan_out_over_a_contract_of_lists_runs() -> None:
    flow = {"nodes": [node("b", output=LISTS), node("a", "{{ item }}", each={"in": "b"})]}
    bench = await run(flow, lambda prompt: ["b", "c"] if prompt == "Go on." else prompt.upper())
    assert bench.state.nodes["a"].output == ["B", "C"]


def test_numbers_among_other_values_may_be_above() -> None:
    flow = {"nodes": [node("b", output={"enum": ["a", 5]}), node("a", when={"output": "b", "above": 3})]}
    assert check(flow) == ""


@pytest.mark.parametrize("id", ["a\n", "a\r", "\na", "", "1a", "a" * 65, "a b"])
def test_an_id_is_a_name_and_nothing_behind_it(id: str) -> None:
    with pytest.raises(InvalidRequest):
        workflow_of({"nodes": [node(id)]})


def test_a_path_may_have_any_digits() -> None:
    assert lookup({"a": ["x"]}, "a." + "0" * 9) == "x"
    with pytest.raises(Absent):
        filling("{{ a." + "1" * 500 + " }}", {"a": ["x"]})
    assert check({"inputs": {"t": []}, "nodes": [node("a", "{{ inputs.t." + "1" * 5000 + " }}")]})
    assert check({"nodes": [node("a", "{{ b." + "1" * 500 + " }}"), node("b", output=LISTS)]})


def test_values_are_the_same_json_or_not() -> None:
    alike: list[tuple[Any, Any]] = [
        (1, 1.0),
        ([1, {"a": 2}], [1.0, {"a": 2.0}]),
        ({}, {}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ]
    other: list[tuple[Any, Any]] = [
        (True, 1),
        (False, 0),
        ([True], [1]),
        (True, [1]),
        ([], {}),
        ("1", 1),
        (None, 0),
        ("a", ["a"]),
    ]
    assert all(same(*pair) for pair in alike) and not any(same(*pair) for pair in other)


# ---------------------------------------------------------------------------------------------------------- filling


def test_a_filled_prompt_is_measured_before_it_is_made() -> None:
    values = {"t": "x" * 1_000_000, "v": [["x" * 100] * 100] * 100}
    assert filling("{{ t }}", values).size("p") == 1_000_000
    for template in ("{{ t }}" * 64, "{{ v }}" * 8):
        tracemalloc.start()
        try:
            with pytest.raises(TooLong, match=f"p has more than {MAX_FILLED} characters once it is filled"):
                filling(template, values).size("p")
            assert tracemalloc.get_traced_memory()[1] < 2_000_000
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("value", ["text", 3, True, None, [], {}, {"a": [1, {"b": "\u00e9"}]}, [[[]]], 1.5])
def test_the_size_is_that_of_the_text(value: Any) -> None:
    result = filling("a {{ v }} b {{v or w}}{c}", {"v": value})
    assert len(result.text()) == result.size("p")


async def test_a_prompt_that_is_too_long_fails_its_node_and_no_other() -> None:
    flow = {
        "inputs": {"t": ""},
        "nodes": [node("a", "{{ inputs.t }}" * 9), node("b", "B"), node("c", "{{ inputs.t }}")],
    }
    bench = await run(flow, lambda prompt: prompt[:1], t="x" * 200_000)
    nodes = bench.state.nodes
    assert [nodes[name].state for name in "abc"] == ["failed", "done", "done"]
    assert nodes["a"].why == f"a.prompt has more than {MAX_FILLED} characters once it is filled, the limit"


async def test_conditions_read_a_long_value_once_and_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    long, read, threads = list(range(5000)), 0, []
    key_of, holds = paths.key_of, runner.holds

    def counted(value: Any) -> Any:
        nonlocal read
        read += value == long
        return key_of(value)

    def noted(*args: Any) -> bool:
        threads.append(threading.get_ident())
        return holds(*args)

    monkeypatch.setattr(paths, "key_of", counted)
    monkeypatch.setattr(runner, "holds", noted)
    unlike = {"output": "inputs.x", "is_not": 1}
    when = {"all": [{"any": [{"output": "inputs.x", "in": [1, 2, [3]]}, unlike]}, unlike]}
    bench = await run({"inputs": {"x": ""}, "nodes": [node("a", when=when)]}, lambda prompt: "yes", x=long)
    assert bench.state.nodes["a"].state == "done" and read == 1
    assert threads and threading.get_ident() not in threads


async def test_items_are_begun_as_places_get_free() -> None:
    """Ten nodes of 256 items are 2,560 answers; there are never more tasks than nodes and slots."""
    flow = {
        "inputs": {"items": list(range(256))},
        "nodes": [node(f"n{at}", "{{ item }}", each={"in": "inputs.items"}) for at in range(10)],
        "at_once": 4,
    }
    most = 0

    def script(prompt: str) -> str:
        nonlocal most
        most = max(most, len(asyncio.all_tasks()))
        return prompt

    bench = await run(flow, script)
    assert bench.answerer.most_at_once == 4
    assert most <= 10 + 4 + 5
    assert bench.state.nodes["n9"].output == [str(item) for item in range(256)]


async def test_prompts_of_all_runs_of_a_tenant_have_room_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_memory, "MAX_HELD", 10)
    room, order = PromptMemory(), []

    async def hold(tenant: str, size: int, name: str, until: asyncio.Event) -> None:
        async with room.hold(tenant, size):
            order.append(name)
            await until.wait()

    async def turns() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    first, last = asyncio.Event(), asyncio.Event()
    tasks = [
        asyncio.create_task(hold(*one))
        for one in (("me", 6, "a", first), ("me", 4, "b", last), ("me", 5, "c", last), ("me", 1, "d", last))
    ]
    other = asyncio.create_task(hold("you", 9, "e", last))
    await turns()
    assert order == ["a", "b", "e"]  # d has to wait behind c
    tasks[2].cancel()
    await turns()
    first.set()
    await turns()
    assert order == ["a", "b", "e", "d"]
    last.set()
    await asyncio.gather(*tasks, other, return_exceptions=True)
    assert room._tenants == {}


async def test_a_run_is_bounded_in_bytes_and_holds_what_a_record_can() -> None:
    bench = Bench(lambda prompt: prompt)
    try:
        flow = {"inputs": {"t": ""}, "nodes": [node("a", "{{ inputs.t }}")]}
        with pytest.raises(InvalidRequest, match="the limit of a run is 4194304"):
            await bench.begin(flow, t="x" * (4 << 20))
        with pytest.raises(InvalidRequest, match="beyond 64 bits"):
            await bench.begin(flow, t=1 << 70)
        await bench.begin(flow, t="x" * 4_000_000)
    finally:
        await bench.close()
