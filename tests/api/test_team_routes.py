"""The routes of teams over a real socket, on the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from cairn.config.values import Secret, TenantKeys
from tests.agents.house import talking_model
from tests.api.homes import home, plain
from tests.api.process import served

MEMBERS = [{"name": name, "role": f"The {name}.", "max_tokens": 8, "temperature": 0.8} for name in ("ada", "bob", "cy")]
TEAM: dict[str, Any] = {
    "id": "t",
    "system": "Work together.",
    "members": MEMBERS,
    "topology": {"kind": "broadcast"},
    "seed": 5,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("models") / "tiny")


async def test_a_team_from_creation_to_deletion(folder: Path) -> None:
    async with home(folder) as (_, http):
        made = await http.post("/v1/teams", json=TEAM)
        assert made.status_code == 201, made.text
        body = made.json()
        assert (body["id"], body["rounds"], body["state"], body["seed"]) == ("t", 0, "idle", 5)
        assert [member["agent"] for member in body["members"]] == ["t.ada", "t.bob", "t.cy"]
        posted = await http.post("/v1/teams/t/messages", json={"content": "psst", "to": ["bob"]})
        assert posted.status_code == 201 and posted.json()["to"] == ["bob"]
        spoken = await http.post("/v1/teams/t/messages", json={"content": "Yes?", "from": "cy"})
        assert spoken.json()["sender"] == "cy"
        streamed = await http.post("/v1/teams/t/rounds", json={"content": "Begin.", "stream": True})
        result = plain(streamed.text)
        assert result[0] == {"type": "round.started", "round": 1, "topology": "broadcast", "resumed": False}
        assert {event["member"] for event in result if event["type"] == "turn.done"} == {"ada", "bob", "cy"}
        assert result[-1] == {"type": "round.done", "round": 1, "decision": None}
        again = await http.get(f"/v1/requests/{streamed.headers['x-request-id']}/events", params={"after": 3})
        assert plain(again.text) == result[3:]
        vote = {"question": "Done?", "options": ["yes", "no"]}
        body = (await http.post("/v1/teams/t/rounds", json={"rounds": 2, "vote": vote})).json()
        assert body["rounds"] == 3 and [entry["round"] for entry in body["entries"] if entry["type"] == "vote"] == [
            2,
            3,
        ]
        ranked = vote | {"options": ["x", "y", "z"], "rule": "ranked"}
        voted = (await http.post("/v1/teams/t/votes", json=ranked)).json()
        assert voted["object"] == "team.vote" and voted["decision"] in "xyz" and len(voted["ballots"]) == 3
        shown = (await http.get("/v1/teams/t")).json()
        assert shown["report"]["shared_tokens"] > 0 and shown["report"]["cached_tokens"] > 0
        assert shown["decision"] == voted["decision"]
        of_ada = (await http.get("/v1/teams/t/transcript", params={"member": "ada"})).json()
        whole = (await http.get("/v1/teams/t/transcript")).json()
        assert "psst" in str(whole) and "psst" not in str(of_ada)
        page = (await http.get("/v1/teams/t/transcript", params={"format": "markdown"})).text
        assert page.startswith("# t\n") and "**user** whispers to bob\n\n> psst" in page and "## Round 3" in page
        forked = await http.post("/v1/teams/t/fork", json={"round": 1, "id": "u"})
        assert forked.status_code == 201 and forked.json()["origin"] == "t" and forked.json()["rounds"] == 1
        back = await http.post("/v1/teams/t/rollback", json={"round": 2})
        assert back.json()["rounds"] == 2
        quiet = await http.post("/v1/teams/t/interrupt")
        assert quiet.json()["interrupted"] is False
        listed = (await http.get("/v1/teams", params={"limit": 1})).json()
        assert [item["id"] for item in listed["data"]] == ["u"] and listed["has_more"]
        assert (await http.delete("/v1/teams/t")).json()["deleted"] is True
        assert (await http.get("/v1/teams/t")).status_code == 404
        assert (await http.get("/v1/agents/t.ada")).status_code == 404
        assert (await http.get("/v1/agents/u.ada")).status_code == 200


async def test_an_interrupted_round_goes_on_with_the_next(folder: Path) -> None:
    async with home(folder) as (_, http):
        await http.post("/v1/teams", json=TEAM)
        long = asyncio.create_task(http.post("/v1/teams/t/rounds", json={"rounds": 900}))
        while (await http.get("/v1/teams/t")).json()["rounds"] < 2:
            await asyncio.sleep(0.01)
        busy = await http.post("/v1/teams/t/rounds")
        assert busy.status_code == 409 and "at work" in busy.text
        assert (await http.post("/v1/teams/t/interrupt")).json()["interrupted"] is True
        body = (await long).json()
        assert body["interrupted"] is True
        await http.post("/v1/teams/t/rounds")
        after = (await http.get("/v1/teams/t")).json()
        assert after["state"] == "idle" and after["rounds"] == body["rounds"] + 1


WRONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("", {"members": []}, "1 to 32"),
    ("", {"members": [{"name": "x y"}]}, "members[0].name"),
    ("", {"members": [{"name": "ada"}, {"name": "ada"}]}, "two members ada"),
    ("", {"members": [{"name": "ada", "tool": 1}]}, "members[0].tool is not a field"),
    ("", {"members": [{"name": "ada"}], "topology": {"kind": "debate"}}, "topology.sides is missing"),
    ("", {"members": [{"name": "ada"}], "topology": {"kind": "free", "first": "bob"}}, "no member"),
    ("", {"members": [{"name": "ada"}], "topology": {"judge": "ada"}}, "not for the topology round_robin"),
    ("", {"members": [{"name": "ada"}], "rule": "coordinator"}, "must name the member who decides"),
    ("/t/rounds", {"rounds": 1001}, "1000 rounds at most"),
    ("/t/rounds", {"vote": {"question": "?", "options": ["x"]}}, "2 to 32"),
    ("/t/messages", {"content": "x", "to": ["eve"]}, "no member eve"),
    ("/t/votes", {"question": "?", "options": ["x", "x"]}, "'x' twice"),
    ("/t/votes", {"question": "?", "options": list("abcdefg"), "rule": "ranked"}, "2 to 6"),
)


SCHEMA = {"properties": {"n": {"type": "integer"}}, "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


async def test_members_have_tools_of_their_own_and_share_their_beginning(folder: Path) -> None:
    long = {"name": "facts", "text": "Every member knows this. " * 40}
    members = [member | {"tools": [TOOL]} for member in MEMBERS[:2]] + MEMBERS[2:]
    async with home(folder) as (_, http):
        made = await http.post("/v1/teams", json=TEAM | {"members": members, "documents": [long]})
        assert [member["tools"] for member in made.json()["members"]] == [["look"], ["look"], []]
        calls = 0
        for _ in range(12):
            body = (await http.post("/v1/teams/t/rounds", json={})).json()
            if body["state"] != "waiting":
                if body["rounds"] >= 2 and calls:
                    break
                continue
            assert all(
                json.loads(call["arguments"]).keys() <= {"n"} and call["tool"] == "look" for call in body["calls"]
            )
            calls += len(body["calls"])
            results = [{"call_id": call["call_id"], "content": "A stone."} for call in body["calls"]]
            given = (await http.post("/v1/teams/t/tool_results", json={"results": results})).json()
            assert given["calls"] == [] and given["state"] == "interrupted"
        assert calls and body["rounds"] >= 2
        shown = (await http.get("/v1/teams/t")).json()
        assert shown["report"]["shared_tokens"] > 200, "a member's tools come behind the shared prefix"
        for name, sees in (("ada", True), ("cy", False)):
            response = await http.get("/v1/teams/t/transcript", params={"member": name, "format": "markdown"})
            assert ("A stone." in response.text) <= sees
        lost = {"results": [{"call_id": "call-9", "content": ""}]}
        answer = await http.post("/v1/teams/t/tool_results", json=lost)
        assert answer.status_code == 404 and "waits for no result" in answer.text
        bad = {"type": "function", "function": {"name": "look", "parameters": {"type": "nonsense"}}}
        answer = await http.post("/v1/teams", json=TEAM | {"id": "u", "members": [MEMBERS[0] | {"tools": [bad]}]})
        assert answer.status_code == 400 and "members[0].tools[0].function.parameters" in answer.text


async def test_rounds_are_cancelled_by_the_id_of_their_request(folder: Path) -> None:
    async with home(folder) as (_, http):
        await http.post("/v1/teams", json=TEAM | {"members": [member | {"max_tokens": 200} for member in MEMBERS]})
        name = {"X-Request-ID": "my-rounds"}
        body = {"rounds": 500, "stream": True}
        async with http.stream("POST", "/v1/teams/t/rounds", json=body, headers=name) as answer:
            id = answer.headers["x-cairn-request-id"]
            lines = answer.aiter_lines()
            async for line in lines:
                if "round.done" in line:
                    break
            assert (await http.get(f"/v1/requests/{id}")).json()["state"] == "running"
            ended = (await http.post("/v1/requests/my-rounds/cancel")).json()
            assert ended["cancelled"] is True and ended["id"] == id
            rest = [line async for line in lines if line.startswith("data")]
        assert '"interrupted"' in rest[-2] and rest[-1] == "data: [DONE]"
        assert (await http.get(f"/v1/requests/{id}")).json()["state"] == "cancelled"
        assert (await http.post(f"/v1/requests/{id}/cancel")).json()["cancelled"] is False
        shown = (await http.get("/v1/teams/t")).json()
        assert shown["state"] in ("interrupted", "idle") and 1 <= shown["rounds"] < 500


async def test_invalid_input_is_named_in_the_error(folder: Path) -> None:
    async with home(folder) as (_, http):
        await http.post("/v1/teams", json=TEAM)
        for path, body, said in WRONG:
            answer = await http.post("/v1/teams" + path, json=body)
            assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text


async def test_no_tenant_sees_anothers_teams(folder: Path) -> None:
    keys = tuple(TenantKeys(name, (Secret(f"key-{name}-0123456789"),)) for name in ("one", "two"))
    async with home(folder, tenants=keys) as (_, http):
        mine, other = ({"authorization": f"Bearer key-{name}-0123456789"} for name in ("one", "two"))
        assert (await http.post("/v1/teams", json=TEAM, headers=mine)).status_code == 201
        assert (await http.get("/v1/teams/t", headers=other)).status_code == 404
        assert (await http.post("/v1/teams/t/rounds", headers=other)).status_code == 404
        assert (await http.delete("/v1/teams/t", headers=other)).status_code == 404
        assert (await http.get("/v1/teams", headers=other)).json()["data"] == []
        assert (await http.get("/v1/teams/t", headers=mine)).status_code == 200


def said_by(url: str) -> list[tuple[int, str, str]]:
    with urllib.request.urlopen(url + "/v1/teams/t/transcript") as response:
        entries = json.load(response)["entries"]
    return [(entry["round"], entry["member"], entry["content"]) for entry in entries if entry["type"] == "turn"]


def test_a_killed_server_goes_on_with_the_round_and_says_the_same(folder: Path, tmp_path: Path) -> None:
    members = [member | {"max_tokens": 200} for member in MEMBERS]
    team = TEAM | {"members": members, "topology": {"kind": "round_robin"}}
    cut = str(tmp_path / "cut")
    with served(model=str(folder), agents_dir=cut) as server:
        server.post("/v1/teams", team)
        server.post("/v1/teams/t/rounds", {"rounds": 2})
        expected = said_by(server.url)
        with urllib.request.urlopen(urllib.request.Request(server.url + "/v1/teams/t", method="DELETE")):
            pass
        server.post("/v1/teams", team)
        body = json.dumps({"rounds": 2, "stream": True}).encode()
        asked = urllib.request.Request(server.url + "/v1/teams/t/rounds", body, {"Content-Type": "application/json"})
        acknowledged = []
        with contextlib.suppress(OSError), urllib.request.urlopen(asked) as stream:
            for line in stream:
                event = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: {") else {}
                if event.get("type") == "turn.done":
                    acknowledged.append((event["round"], event["member"], event["content"]))
                if len(acknowledged) == 1 and event.get("type") == "turn.delta":
                    server.signal_all(signal.SIGKILL)
                    break
        assert server.wait() == -signal.SIGKILL
    with served(model=str(folder), agents_dir=cut) as server:
        assert said_by(server.url)[: len(acknowledged)] == acknowledged and acknowledged
        with urllib.request.urlopen(server.url + "/v1/teams/t") as response:
            assert json.load(response)["state"] == "interrupted"
        server.post("/v1/teams/t/rounds", {"rounds": 2})
        assert said_by(server.url) == expected
