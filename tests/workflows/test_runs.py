"""Runs of workflows with scripted answers: every event, retries, loops, fan-outs, merges and restarts."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from cairn.types.errors import Conflict, ContextTooLong, InvalidRequest, NotFound
from cairn.workflows import runner
from cairn.workflows.runner import Merged, merge
from tests.workflows.scripted_answerer import Bench, KilledError, run
from tests.workflows.test_checks import PLAN, node

CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TEST = {
    "type": "object",
    "properties": {"passed": {"type": "boolean"}, "verdict": {"type": "string"}},
    "required": ["passed"],
}
REPAIR: dict[str, Any] = {
    "name": "repair",
    "system": "Work.",
    "roles": {"planner": "You plan.", "coder": "You write code."},
    "inputs": {"task": None},
    "nodes": [
        node("plan", "Task: {{ inputs.task }}", role="planner", output=PLAN),
        node("code", "Write {{ item }} ({{ index }})", role="coder", each={"in": "plan.steps"}, output=CODE),
        {
            "id": "repair",
            "loop": {
                "limit": 3,
                "until": {"output": "test.passed", "is": True},
                "nodes": [
                    node("test", "Test {{ previous.fix.code or code.0.code }}", role="tester", output=TEST),
                    node(
                        "fix",
                        "Fix {{ previous.fix.code or code.0.code }}",
                        role="fixer",
                        output=CODE,
                        when={"output": "test.passed", "is": False},
                    ),
                ],
            },
        },
        node("review", "Review {{ repair.fix.code or code.0.code }}", role="reviewer"),
    ],
}


def answers(prompt: str) -> Any:
    match prompt.split()[0]:
        case "Task:":
            return {"steps": ["one", "two"]}
        case "Write":
            return {"code": f"code {prompt.split()[1]}"}
        case "Test":
            return {"passed": prompt.count("+") >= 2}
        case "Fix":
            return {"code": prompt.removeprefix("Fix ") + "+"}
    return "fine: " + prompt


def shape(events: list[dict[str, Any]]) -> list[str]:
    short = []
    for event in events:
        if event["type"] not in ("node.delta", "node.started"):
            short.append(" ".join([event["type"], *([event["key"]] if "key" in event else [])]))
    return short


async def test_a_run_from_its_task_to_its_result() -> None:
    bench = await run(REPAIR, answers, task="build it")
    assert shape(bench.events) == [
        "run.started",
        "node.done plan",
        "node.done code.0",
        "node.done code.1",
        "node.done code",
        "node.done repair#1/test",
        "node.done repair#1/fix",
        "node.done repair#2/test",
        "node.done repair#2/fix",
        "node.done repair#3/test",
        "node.skipped repair#3/fix",
        "node.done repair",
        "node.done review",
        "run.done",
    ]
    assert bench.events[1] == {"type": "node.started", "node": "plan", "key": "plan", "role": "planner"}
    assert bench.events[2]["type"] == "node.delta" and bench.events[2]["content"] == '{"steps": ["one", "two"]}'
    state = bench.state
    assert state.state == "finished" and state.ended is not None
    assert state.ended.result == {"review": "fine: Review code one++"}
    assert state.nodes["repair"].output == {
        "test": {"passed": True},
        "fix": {"code": "code one++"},
        "runs": 3,
        "done": True,
    }
    assert bench.answerer.chats[0] == [
        {"role": "system", "content": "Work.\n\nYou plan."},
        {"role": "user", "content": "Task: build it"},
    ]
    assert bench.answerer.chats[3][0]["content"] == "Work.\n\nYou are the tester."
    assert state.report == {"prompt_tokens": 90, "computed_tokens": 54, "cached_tokens": 36}


async def test_a_loop_ends_at_its_bound() -> None:
    bench = await run(
        REPAIR, lambda prompt: {"passed": False} if prompt.startswith("Test") else answers(prompt), task="x"
    )
    output = bench.state.nodes["repair"].output
    assert output["runs"] == 3 and output["done"] is False and output["fix"] == {"code": "code one+++"}


async def test_an_answer_that_breaks_its_contract_is_asked_for_again_a_number_of_times() -> None:
    said = iter(["no JSON", {"steps": "one"}, {"steps": ["one"], "more": 1}, {"steps": ["one"]}])
    flow = {"nodes": [node("plan", output=PLAN, retries=3)]}
    bench = await run(flow, lambda prompt: next(said))
    retries = [(event["attempt"], event["why"]) for event in bench.events if event["type"] == "node.retry"]
    assert retries == [
        (1, "the answer is no JSON"),
        (2, "the answer.steps must be of type array"),
        (3, "the answer has a field more that the contract does not know"),
    ]
    assert bench.state.nodes["plan"].output == {"steps": ["one"]} and bench.state.nodes["plan"].attempts == 4
    assert len({seed for _, seed in bench.answerer.asked}) == 4
    assert [one["role"] for one in bench.answerer.chats[-1]] == ["user", *["assistant", "user"] * 3]


async def test_a_retry_that_cannot_be_asked_keeps_the_tokens_of_the_attempts_before() -> None:
    said = iter(["no JSON", "again none"])

    def script(prompt: str) -> str:
        if (text := next(said, None)) is None:
            raise ContextTooLong("the prompt is too long")
        return text

    ended = (await run({"nodes": [node("plan", output=PLAN, retries=3)]}, script)).state.nodes["plan"]
    assert (ended.state, ended.attempts, ended.prompt_tokens, ended.completion_tokens) == ("failed", 2, 20, 4)


@pytest.mark.parametrize("items", [[{}, {"name": "n"}], [{"name": "n"}, {}]])
async def test_an_item_that_fails_fails_its_fan_out_beside_skipped_ones(items: list[dict[str, str]]) -> None:
    flow = {
        "inputs": {"x": ""},
        "nodes": [node("a", "do {{ item.name }}", each={"in": "inputs.x"}, output=PLAN), node("b", "B", needs=["a"])],
    }
    bench = await run(flow, lambda prompt: "no JSON", x=items)
    assert bench.state.nodes["a"].state == "failed" and bench.state.nodes["b"].lost


async def test_a_node_that_fails_fails_the_run_with_the_reason_and_a_resume_tries_it_again() -> None:
    good = [False]
    flow = {
        "nodes": [
            node("a", "A", output=PLAN, retries=1),
            node("b", "B {{ a.steps }}"),
            node("c", "C {{ b }}"),
            node("d", "D"),
        ]
    }
    bench = Bench(
        lambda prompt: "bad" if prompt[0] in "AT" and not good[0] else {"steps": []} if prompt == "A" else prompt
    )
    try:
        await bench.begin(flow)
        ended = await bench.work()
        assert (ended.state, ended.why) == ("failed", "a: the answer is no JSON, 2 times")
        nodes = bench.state.nodes
        assert [nodes[key].state for key in "abcd"] == ["failed", "skipped", "skipped", "done"]
        assert [nodes[key].why for key in "bc"] == ["a failed", "b failed"]
        good[0] = True
        bench.answerer.asked.clear()
        ended = await bench.work()
        assert (ended.state, ended.result) == ("finished", {"c": "C B []", "d": "D"})
        assert [prompt for prompt, _ in bench.answerer.asked] == ["A", "B []", "C B []"]  # d was done
        with pytest.raises(Conflict, match="finished"):
            await bench.work()
    finally:
        await bench.close()


async def test_skipped_nodes_skip_their_dependants_unless_there_is_another_path() -> None:
    flow = {
        "inputs": {"go": False},
        "nodes": [
            node("a", "A", when={"output": "inputs.go", "is": True}),
            node("b", "B {{ a }}"),
            node("c", "C {{ a or inputs.go }}"),
        ],
    }
    bench = await run(flow, lambda prompt: prompt)
    nodes = bench.state.nodes
    assert (nodes["a"].state, nodes["b"].state, nodes["c"].output) == ("skipped", "skipped", "C false")
    assert nodes["b"].why == "a is not there: what makes it was skipped" and bench.state.state == "finished"
    assert (await run(flow, lambda prompt: prompt, go=True)).state.nodes["b"].output == "B A"


async def test_independent_nodes_run_at_once_and_no_more_than_allowed() -> None:
    flow: dict[str, Any] = {"nodes": [node(f"n{number}") for number in range(12)]}
    assert (await run(flow, lambda prompt: prompt)).answerer.most_at_once == 12
    assert (await run(flow | {"at_once": 3}, lambda prompt: prompt)).answerer.most_at_once == 3


async def test_inputs_are_named() -> None:
    bench = Bench(answers)
    try:
        with pytest.raises(InvalidRequest, match=r"inputs\.task is missing"):
            await bench.begin(REPAIR)
        with pytest.raises(InvalidRequest, match=r"inputs\.tusk is no input; inputs are: task"):
            await bench.begin(REPAIR, tusk="x")
    finally:
        await bench.close()


# ------------------------------------------------------------------------------------------------------------- merges

FIELDS = {"type": "object", "properties": {"verdict": {"type": "string"}, "note": {"type": "string"}}}
MERGING: dict[str, Any] = {
    "nodes": [node(name, name, output=FIELDS) for name in ("coder", "tester", "reviewer")],
    "merge": {"precedence": ["reviewer", "tester", "coder"]},
}
SAID = {
    "reviewer": {"verdict": "no"},
    "tester": {"verdict": "yes", "note": "slow"},
    "coder": {"verdict": "no", "note": "quick"},
}


async def test_a_merge_lists_each_conflict_with_both_values_and_why_one_won() -> None:
    ended = (await run(MERGING, SAID.__getitem__)).state.ended
    assert ended is not None and ended.result == {"verdict": "no", "note": "slow"}
    assert ended.sources == {"verdict": "reviewer", "note": "tester"}
    assert [tuple(conflict.values()) for conflict in ended.conflicts] == [
        ("verdict", "reviewer", "no", "tester", "yes", "reviewer comes before tester in merge.precedence"),
        ("note", "tester", "slow", "coder", "quick", "tester comes before coder in merge.precedence"),
    ]


def test_items_of_a_fan_out_are_merged_in_their_order() -> None:
    merged = merge(["a"], {"a": [{"x": 1}, {"x": 2, "y": 3}]})
    assert merged.values == {"x": 1, "y": 3} and merged.conflicts[0].lost == "a.1"
    assert merge(["a"], {"a": [{"x": 1}, {"x": 1.0}]}).conflicts == []


async def results() -> list[Any]:
    """Return the merge's outputs for 25 random orders of completion."""
    outputs = []
    for seed in range(25):
        bench = Bench(SAID.__getitem__)
        bench.answerer.rng = random.Random(seed)
        try:
            await bench.begin(MERGING)
            outputs.append(await bench.work())
        finally:
            await bench.close()
    return outputs


async def test_a_merge_does_not_depend_on_who_was_done_first() -> None:
    result = await results()
    assert all(one == result[0] for one in result)


async def test_a_merge_by_completion_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: inputs are merged in order of completion."""

    def hasty(precedence: Any, outputs: Any) -> Merged:
        return merge([name for name in outputs if name in precedence], outputs)

    monkeypatch.setattr(runner, "merge", hasty)
    result = await results()
    assert any(one != result[0] for one in result)


# ----------------------------------------------------------------------------------------------------------- restarts


async def whole(deaths: list[int]) -> tuple[Any, Any, list[tuple[str, int | None]]]:
    bench = Bench(answers)
    try:
        await bench.begin(REPAIR, task="x")
        for death in itertools.chain(deaths, [None]):
            bench.answerer.die_at = death
            try:
                await bench.work()
            except KilledError:
                before = bench.state.nodes
                await bench.again()
                assert bench.state.state == "interrupted"
                assert before.items() <= bench.state.nodes.items(), "what was acknowledged is lost"
        return bench.state.ended, bench.state.nodes, sorted(bench.answerer.asked, key=str)
    finally:
        await bench.close()


async def test_a_run_goes_on_after_a_crash_at_any_question() -> None:
    ended, nodes, asked = await whole([])
    for death in range(len(asked)):
        result, others, again = await whole([death])
        assert (result, others) == (ended, nodes), death
        assert set(again) == set(asked)  # with the same seeds
        assert len(again) <= len(asked) + 1  # the other item of the fan-out may not have been done
    assert (await whole([1, 2, 3, 5, 6]))[:2] == (ended, nodes)


async def test_a_run_is_erased_and_a_tenants_own() -> None:
    bench = await run(REPAIR, answers, task="a secret task")
    assert any(b"secret" in data for data in bench.files.files().values())
    with pytest.raises(NotFound):
        bench.runs.get("other", "r")
    bench._open()
    await bench.runs.delete("me", "r")
    assert not any(b"secret" in data for data in bench.files.files().values())
    await bench.close()
