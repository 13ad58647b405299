"""The routes of workflows over a real socket, on the fake engine, whose answers are constrained to their schemas."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.agents.house import talking_model
from tests.api.homes import home, plain
from tests.api.process import served
from tests.workflows.test_checks import node
from tests.workflows.test_runs import REPAIR

SAMPLING = {"temperature": 0.8, "max_tokens": 400}
SHORT = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
LIST = {
    "type": "object",
    "properties": {"steps": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 3}},
    "required": ["steps"],
}
FLOW: dict[str, Any] = {
    "name": "counting",
    "inputs": {"task": None},
    "nodes": [
        node("plan", "Plan {{ inputs.task }}", role="planner", output=LIST, sampling=SAMPLING),
        node("code", "Count {{ item }}", role="coder", each={"in": "plan.steps"}, output=SHORT, sampling=SAMPLING),
        node("talk", "Talk", role="reviewer", sampling=SAMPLING),
        node("sum", "Sum {{ code }}", role="tester", output=SHORT, sampling=SAMPLING),
    ],
    "merge": {"precedence": ["sum", "code"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("models") / "tiny")


async def test_a_run_from_its_check_to_its_deletion(folder: Path) -> None:
    async with home(folder) as (_, http):
        checked = (await http.post("/v1/workflows/check", json={"workflow": FLOW})).json()
        assert checked["order"] == ["plan", "talk", "code", "sum"] and "n_plan --> n_code" in checked["mermaid"]
        body = {"workflow": FLOW, "inputs": {"task": "x"}, "seed": 4}
        streamed = await http.post("/v1/workflows/runs", json=body | {"stream": True})
        result = plain(streamed.text)
        run = streamed.headers["x-cairn-run"]
        assert result[0] == {"type": "run.started", "run": run, "resumed": False}
        assert result[-1]["type"] == "run.done" and result[-1]["state"] == "finished"
        again = await http.get(f"/v1/requests/{streamed.headers['x-request-id']}/events")
        assert plain(again.text) == result
        state = (await http.get(f"/v1/workflows/runs/{run}")).json()
        assert state["state"] == "finished" and 0 <= state["result"]["n"] <= 9 and state["sources"] == {"n": "sum"}
        assert len(state["nodes"]["code"]["output"]) == len(state["nodes"]["plan"]["output"]["steps"]) >= 2
        text = "".join(one.get("content", "") for one in result if one["type"] == "node.delta" and one["key"] == "sum")
        assert json.loads(text) == state["nodes"]["sum"]["output"]
        whole = (await http.post("/v1/workflows/runs", json=body)).json()
        outputs = {key: value["output"] for key, value in whole["nodes"].items()}
        assert outputs == {key: value["output"] for key, value in state["nodes"].items()}  # the same seed
        done = await http.post(f"/v1/workflows/runs/{run}/resume")
        assert done.status_code == 409 and "is finished" in done.text
        picture = await http.get(f"/v1/workflows/runs/{run}/graph", params={"format": "svg"})
        assert picture.headers["content-type"] == "image/svg+xml" and picture.text.startswith("<svg")
        assert (await http.get(f"/v1/workflows/runs/{run}/graph")).text.startswith("flowchart LR")
        listed = (await http.get("/v1/workflows/runs")).json()["data"]
        assert [one["id"] for one in listed] == [whole["id"], run]
        assert (await http.post(f"/v1/workflows/runs/{run}/interrupt")).json()["interrupted"] is False
        assert (await http.delete(f"/v1/workflows/runs/{run}")).json()["deleted"] is True
        assert (await http.get(f"/v1/workflows/runs/{run}")).status_code == 404


async def test_a_run_is_cancelled_by_the_id_of_its_request_and_goes_on_when_it_is_resumed(folder: Path) -> None:
    slow = {"inputs": {}, "nodes": [node(f"n{at}", f"Talk {at}", sampling=SAMPLING) for at in range(20)], "at_once": 1}
    async with home(folder) as (_, http):
        body = {"workflow": slow, "seed": 4, "stream": True}
        async with http.stream("POST", "/v1/workflows/runs", json=body) as answer:
            id, run = answer.headers["x-request-id"], answer.headers["x-cairn-run"]
            lines = answer.aiter_lines()
            async for line in lines:
                if "node.done" in line:
                    break
            assert (await http.post(f"/v1/requests/{id}/cancel")).json()["cancelled"] is True
            rest = [line async for line in lines if line.startswith("data")]
        assert '"interrupted"' in rest[-2] and (await http.get(f"/v1/requests/{id}")).json()["state"] == "cancelled"
        assert (await http.get(f"/v1/workflows/runs/{run}")).json()["state"] == "interrupted"
        resumed = (await http.post(f"/v1/workflows/runs/{run}/resume", json={})).json()
        assert resumed["state"] == "finished" and len(resumed["nodes"]) == 20


async def test_invalid_workflows_are_refused_before_anything_runs(folder: Path) -> None:
    async with home(folder) as (_, http):
        for flow, said in (
            ({"nodes": [node("a", needs=["b"]), node("b", needs=["a"])]}, "workflow has a cycle: a -> b -> a"),
            ({"nodes": [{"id": "a", "promt": "x"}]}, "promt"),
            ({"nodes": "x"}, "nodes"),
            (REPAIR, "inputs.task is missing"),
        ):
            answer = await http.post("/v1/workflows/runs", json={"workflow": flow})
            assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text
        assert (await http.get("/v1/workflows/runs")).json()["data"] == []


def outputs_of(url: str, run: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/v1/workflows/runs/{run}") as response:
        state = json.load(response)
    return {key: value["output"] for key, value in state["nodes"].items()} | {"": state["result"]}


def test_a_killed_server_goes_on_with_the_run_and_says_the_same(folder: Path, tmp_path: Path) -> None:
    flow = FLOW | {"at_once": 1}
    body = {"workflow": flow, "inputs": {"task": "x"}, "seed": 4}
    cut = str(tmp_path / "cut")
    with served(model=str(folder), agents_dir=cut) as server:
        expected = outputs_of(server.url, server.post("/v1/workflows/runs", body)["id"])
        content = json.dumps(body | {"stream": True}).encode()
        asked = urllib.request.Request(server.url + "/v1/workflows/runs", content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked) as stream:
            run = stream.headers["x-cairn-run"]
            for line in stream:
                if b'"node.done"' in line:
                    server.signal_all(signal.SIGKILL)
                    break
        assert server.wait() == -signal.SIGKILL
    with served(model=str(folder), agents_dir=cut) as server:
        assert outputs_of(server.url, run)[""] is None
        server.post(f"/v1/workflows/runs/{run}/resume", {})
        assert outputs_of(server.url, run) == expected
