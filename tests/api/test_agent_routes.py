"""The routes of agents over a real socket, on the fake engine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.agents.agents import Agents
from cairn.agents.kv import AgentKv
from cairn.agents.pending_writes import PendingWrites
from cairn.agents.portable import MEDIA_TYPE
from cairn.agents.request_contexts import MOST_CONTEXTS
from cairn.agents.turn_tree import Agent
from cairn.api.chat.attribution import ACCOUNT_TTL
from cairn.api.http.auth import salts
from cairn.config.config import Config
from cairn.config.values import Secret, TenantKeys
from cairn.engine.fake import FakeEngine
from cairn.frontend.request_options import SamplingOptions
from cairn.frontend.service import Service
from cairn.kv.disk.chunk_file import parse_name
from cairn.text.grammar.grammar import ToolChoice, Wanted
from cairn.types.request import Request
from tests.agents.house import hear, house, talking_model
from tests.agents.test_portable import forged, with_agent, with_turn
from tests.api.homes import open_house
from tests.api.sockets import request_bytes, site
from tests.text.walks import accepts

TURN = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("models") / "tiny")


def chunk_files(store: Path) -> list[Path]:
    return [path for path in store.rglob("*") if parse_name(path.name) is not None]


def held_back(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make the engine's steps take 20 ms until the returned event is set."""
    quick, prefill = threading.Event(), FakeEngine.prefill

    def slow(self: FakeEngine, rows: Any) -> Any:
        quick.wait(0.02)
        return prefill(self, rows)

    monkeypatch.setattr(FakeEngine, "prefill", slow)
    return quick


HI = [{"role": "user", "content": "hi"}]


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **TURN, **more}


def chunks(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_an_agent_from_creation_to_deletion(folder: Path) -> None:
    async with open_house(folder) as (_, _, http):
        made = await http.post("/v1/agents", json={"id": "ada", "system": "You remember.", "metadata": {"a": "b"}})
        assert made.status_code == 201 and made.json()["id"] == "ada" and made.json()["state"] == "idle"
        first = await http.post("/v1/agents/ada/turns", json=ask("My name is Ada."))
        assert first.status_code == 200, first.text
        body = first.json()
        assert body["object"] == "chat.completion" and body["choices"][0]["finish_reason"] == "length"
        assert (body["agent"], body["turn"]) == ("ada", 1) == (first.headers["x-cairn-agent"], 1)
        streamed = await http.post("/v1/agents/ada/turns", json=ask("And now?", stream=True))
        said = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks(streamed.text) if c["choices"])
        assert streamed.headers["x-cairn-turn"] == "2" and "cairn" in chunks(streamed.text)[-1]
        turns = (await http.get("/v1/agents/ada/turns")).json()["data"]
        assert all(one["timing"]["prefill"] > 0 and one["finish_detail"] == "" for one in turns)
        assert [turn["number"] for turn in turns] == [1, 2] and turns[1]["answer"]["content"] == said
        assert turns[1]["cached_tokens"] > 0
        shown = (await http.get("/v1/agents/ada")).json()
        assert shown["messages"] == [{"role": "system", "content": "You remember."}] and shown["metadata"] == {"a": "b"}
        assert shown["turns"] == 2 and shown["tokens"] > 0 and shown["savings"]["requests"] == 2
        forked = await http.post("/v1/agents/ada/fork", json={"turn": 1, "id": "bob"})
        assert forked.status_code == 201 and forked.json()["origin"] == "ada"
        back = await http.post("/v1/agents/ada/rollback", json={"turn": 1})
        assert back.json()["head"] == 1
        listed = (await http.get("/v1/agents?limit=1")).json()
        assert [item["id"] for item in listed["data"]] == ["bob"] and listed["has_more"]
        rest = (await http.get("/v1/agents", params={"after": listed["next"]})).json()
        assert [item["id"] for item in rest["data"]] == ["ada"] and not rest["has_more"] and rest["next"] is None
        gone = await http.delete("/v1/agents/ada")
        assert gone.json() == {"id": "ada", "object": "agent.deleted", "deleted": True}
        assert (await http.get("/v1/agents/ada")).status_code == 404
        assert (await http.get("/v1/agents/bob/turns")).json()["data"][0]["number"] == 1


async def test_a_turn_is_what_the_whole_conversation_would_be_as_a_chat(folder: Path) -> None:
    async with open_house(folder) as (_, _, http):
        await http.post("/v1/agents", json={"id": "ada", "system": "You remember."})
        messages: list[Any] = [{"role": "system", "content": "You remember."}]
        for text in ("one", "two", "three"):
            messages.append({"role": "user", "content": text})
            turn = (await http.post("/v1/agents/ada/turns", json=ask(text))).json()
            chat = await http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, **TURN})
            assert turn["choices"] == chat.json()["choices"]
            messages.append(turn["choices"][0]["message"])


async def test_a_turn_goes_on_when_its_client_has_left_and_can_be_followed(folder: Path) -> None:
    async with open_house(folder) as (_, _, http):
        await http.post("/v1/agents", json={"id": "ada"})
        long = ask("Tell me a story", stream=True, max_tokens=1900)
        async with http.stream("POST", "/v1/agents/ada/turns", json=long) as response:
            number = response.headers["x-request-id"]
            await anext(response.aiter_lines())
        conflict = await http.post("/v1/agents/ada/turns", json=ask("hello?"))
        assert conflict.status_code == 409 and number in conflict.json()["error"]["message"]
        rest = await http.get(f"/v1/requests/{number}/events")
        assert rest.text.rstrip().endswith("[DONE]")
        (turn,) = (await http.get("/v1/agents/ada/turns")).json()["data"]
        assert turn["state"] == "finished" and turn["completion_tokens"] == 1900 and turn["request"] == number


async def test_without_a_reader_it_is_interrupted_after_the_grace_and_can_be_resumed(folder: Path) -> None:
    async with open_house(folder, reconnect_grace=0.1) as (_, _, http):
        await http.post("/v1/agents", json={"id": "ada"})
        long = ask("Tell me a story", stream=True, max_tokens=1900)
        async with http.stream("POST", "/v1/agents/ada/turns", json=long) as response:
            await anext(response.aiter_lines())
        for _ in range(400):
            (turn,) = (await http.get("/v1/agents/ada/turns")).json()["data"]
            if turn["state"] != "running":
                break
            await asyncio.sleep(0.01)
        assert turn["state"] == "interrupted" and 0 < turn["completion_tokens"] < 1900
        resumed = await http.post("/v1/agents/ada/resume", json={})
        assert resumed.status_code == 200 and resumed.json()["usage"]["completion_tokens"] == 1900
        said = turn["answer"]["content"].rstrip("\ufffd")  # it may have ended within a character
        assert resumed.json()["choices"][0]["message"]["content"].startswith(said)
        assert (await http.post("/v1/agents/ada/resume", json={})).status_code == 409


@pytest.mark.parametrize("stream", [False, True])
async def test_a_resumed_answer_has_log_probabilities_of_all_its_tokens_or_of_none(folder: Path, stream: bool) -> None:
    async with open_house(folder, reconnect_grace=0.1) as (at, _, http):
        await http.post("/v1/agents", json={"id": "ada"})
        long = ask("Tell me a story", stream=True, max_tokens=1900, logprobs=True, top_logprobs=2)
        async with http.stream("POST", "/v1/agents/ada/turns", json=long) as response:
            await anext(response.aiter_lines())
        while at.agents.get("default", "ada").state == "running":
            await asyncio.sleep(0.01)
        (turn,) = await at.agents.turns("default", "ada")
        assert 0 < turn.completion_tokens < 1900
        resumed = await http.post("/v1/agents/ada/resume", json={"stream": stream})
        parts = chunks(resumed.text) if stream else [resumed.json()]
        assert parts[-1]["usage"]["completion_tokens"] == 1900
        assert [
            choice["logprobs"] for chunk in parts for choice in chunk["choices"] if choice["logprobs"] is not None
        ] == []


async def test_a_client_that_waits_for_a_whole_answer_and_leaves_cancels_nothing_at_once(folder: Path) -> None:
    async with open_house(folder) as (_, _, http):
        await http.post("/v1/agents", json={"id": "ada"})
        waiting = asyncio.create_task(http.post("/v1/agents/ada/turns", json=ask("long", max_tokens=1500)))
        while not (await http.get("/v1/agents/ada/turns")).json()["data"]:
            await asyncio.sleep(0.01)
        waiting.cancel()
        for _ in range(1000):
            (turn,) = (await http.get("/v1/agents/ada/turns")).json()["data"]
            if turn["state"] != "running":
                break
            await asyncio.sleep(0.01)
        assert waiting.cancelled()
        assert turn["state"] == "finished" and turn["completion_tokens"] == 1500


async def test_a_turn_that_is_being_written_down_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, sync = asyncio.Event(), PendingWrites.sync

    async def late(pending: PendingWrites, *records: Any) -> None:
        await held.wait()
        await sync(pending, *records)

    async with open_house(folder) as (_, _, http):
        await http.post("/v1/agents", json={"id": "ada"})
        monkeypatch.setattr(PendingWrites, "sync", late)
        waiting = asyncio.create_task(http.post("/v1/agents/ada/turns", json=ask("x", max_tokens=4)))
        while not (turns := (await http.get("/v1/agents/ada/turns")).json()["data"]):
            await asyncio.sleep(0.01)
        assert [turn["state"] for turn in turns] == ["running"]
        held.set()
        assert (await waiting).status_code == 200


async def test_a_cancelled_turn_is_interrupted(folder: Path) -> None:
    async with open_house(folder) as (_, _, http):
        await http.post("/v1/agents", json={"id": "ada"})
        async with http.stream("POST", "/v1/agents/ada/turns", json=ask("x", stream=True, max_tokens=1900)) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            await http.post(f"/v1/requests/{stream.headers['x-request-id']}/cancel", json={})
            rest = "\n".join([line async for line in lines])
        assert "cancelled" in rest and "[DONE]" not in rest
        (turn,) = (await http.get("/v1/agents/ada/turns")).json()["data"]
        assert turn["state"] == "interrupted"


WRONG: list[tuple[str, Any, int, str]] = [
    ("/v1/agents", {"id": "../../etc"}, 400, "1 to 64 letters"),
    ("/v1/agents", {"id": "import"}, 400, "1 to 64 letters"),
    ("/v1/agents", {"id": "ada"}, 409, "there is an agent ada already"),
    ("/v1/agents", {"pins": True}, 400, "pins"),
    ("/v1/agents", {"ttl": -1}, 400, "ttl"),
    ("/v1/agents", {"ttl": 0.999}, 400, "ttl"),
    ("/v1/agents", {"system": "a", "messages": [{"role": "system", "content": "b"}]}, 400, "either system"),
    ("/v1/agents", {"metadata": {"a": "b" * 600}}, 400, "metadata.a"),
    ("/v1/agents/ada/turns", {"messages": []}, 400, "messages"),
    ("/v1/agents/ada/turns", {"messages": [{"role": "assistant", "content": "x"}]}, 400, "new messages only"),
    ("/v1/agents/ada/turns", ask("x", n=2), 400, "n must be 1"),
    ("/v1/agents/ada/turns", ask("x", temperature=99), 400, "temperature"),
    ("/v1/agents/ada/turns", ask("word " * 2000), 400, "2048 tokens"),
    ("/v1/agents/nobody/turns", ask("x"), 404, "no agent nobody"),
    ("/v1/agents/a b/turns", ask("x"), 400, "1 to 64 letters"),
    ("/v1/agents/ada/fork", {"turn": 5}, 404, "no turn 5"),
    ("/v1/agents/ada/rollback", {}, 400, "turn is missing"),
    ("/v1/agents/ada/rollback", {"turn": -1}, 404, "no turn -1"),
    ("/v1/agents/ada/resume", {}, 409, "only an interrupted one"),
    ("/v1/agents/ada/nothing", {}, 404, "no route"),
    ("/v1/agents/ada/", {}, 405, "is not for POST"),
]


async def test_an_agent_is_given_other_metadata(folder: Path) -> None:
    async with open_house(folder) as (at, _, http):
        await at.agents.create("default", id="ada", metadata={"title": "One", "kind": "test"})
        response = await http.patch("/v1/agents/ada", json={"metadata": {"title": "Two"}})
        assert response.status_code == 200 and response.json()["metadata"] == {"title": "Two"}
        assert (await http.get("/v1/agents/ada")).json()["metadata"] == {"title": "Two"}
        for path, body, status, word in (
            ("ada", {}, 400, "metadata is missing"),
            ("ada", {"metadata": {"title": "x" * 600}}, 400, "metadata.title is longer than 512 characters"),
            ("ada", {"metadata": {"title": 5}}, 400, "metadata"),
            ("ada", {"id": "eve", "metadata": {}}, 400, "id"),
            ("nobody", {"metadata": {}}, 404, "no agent nobody"),
        ):
            refused = await http.patch(f"/v1/agents/{path}", json=body)
            assert (refused.status_code, word in refused.text) == (status, True), refused.text


async def test_invalid_input_is_named_in_the_error(folder: Path) -> None:
    async with open_house(folder) as (at, _, http):
        await at.agents.create("default", id="ada")
        at.service.strict = True
        for path, body, status, word in [*WRONG, ("/v1/agents", {"model": "gpt"}, 404, "there is no model")]:
            response = await http.post(path, json=body)
            said = response.json()["error"]["message"]
            assert (response.status_code, word in said) == (status, True), (path, body, response.text)
        assert (await at.agents.turns("default", "ada")) == ()


async def test_a_number_that_the_log_cannot_hold_is_named(folder: Path) -> None:
    async with open_house(folder) as (_, _, http):
        said = [{"role": "system", "content": "You count."}]
        function = {"name": "count", "parameters": {"maximum": 1 << 64}}
        for messages in (None, said):
            body = {"id": "ada", "messages": messages, "tools": [{"type": "function", "function": function}]}
            response = await http.post("/v1/agents", json=body)
            assert response.status_code == 400 and response.json()["error"]["param"] == "tools", response.text
        assert (await http.get("/v1/agents")).json()["data"] == []


async def test_a_request_whose_fields_are_all_optional_needs_no_body(folder: Path) -> None:
    async with open_house(folder) as (at, _, http):
        await at.agents.create("default", id="ada")
        await at.say("ada", "one")
        for order in ("pin", "unpin", "prefetch", "evict"):
            assert (await http.post(f"/v1/agents/ada/{order}")).status_code == 200, order
        assert (await http.post("/v1/agents/ada/fork")).json()["origin"] == "ada"
        assert (await http.post("/v1/agents")).status_code == 201
        resumed = await http.post("/v1/agents/ada/resume")
        assert resumed.status_code == 409 and "only an interrupted one" in resumed.text
        for path in ("ada/rollback", "ada/turns"):  # these routes need one
            assert (await http.post(f"/v1/agents/{path}")).status_code == 415
        for order in ("pin", "resume", "fork"):
            assert (await http.post(f"/v1/agents/ada/{order}", content=b"x=1")).status_code == 415


async def test_the_turns_of_an_agent_are_listed_in_pages(folder: Path) -> None:
    async with open_house(folder) as (at, _, http):
        await at.agents.create("default", id="ada")
        for text in ("one", "two", "three"):
            await at.say("ada", text)
        whole = (await http.get("/v1/agents/ada/turns")).json()
        assert [turn["number"] for turn in whole["data"]] == [1, 2, 3] and whole["has_more"] is False
        listed, after = [], 0
        for more in (True, False):
            page = (await http.get(f"/v1/agents/ada/turns?limit=2&after={after}")).json()
            assert page["has_more"] is more
            listed, after = [*listed, *page["data"]], page["next"]
        assert listed == whole["data"] and after is None
        assert (await http.get("/v1/agents/ada/turns?after=3")).json()["data"] == []
        for query in ("limit=0", "limit=101", "after=x", "after=-1", f"after={'0' * 20}5", "page=2"):
            assert (await http.get(f"/v1/agents/ada/turns?{query}")).status_code == 400, query


async def test_a_turn_counts_for_its_own_agent_only(folder: Path) -> None:
    async with open_house(folder) as (at, _, http):
        for id in ("ada", "bob"):
            await at.agents.create("default", id=id)
        requests: list[tuple[str, dict[str, Any], dict[str, str]]] = [
            ("metadata.agent", {"metadata": {"agent": "bob"}}, {}),
            ("prompt_cache_key", {"prompt_cache_key": "bob"}, {}),
            ("X-Cairn-Agent", {}, {"x-cairn-agent": "bob"}),
        ]
        for field, more, headers in requests:
            other = await http.post("/v1/agents/ada/turns", json=ask("x", **more), headers=headers)
            assert other.status_code == 400 and other.json()["error"]["param"] == field, other.text
        assert (await at.agents.turns("default", "ada")) == ()
        for _, more, headers in requests:
            text = json.dumps(ask("x", **more)).replace("bob", "ada")
            headers = {"content-type": "application/json"} | {name: "ada" for name in headers}
            assert (await http.post("/v1/agents/ada/turns", content=text, headers=headers)).status_code == 200
        assert len(await at.agents.turns("default", "ada")) == 3


async def test_odd_parameters_of_the_list_are_refused(folder: Path) -> None:
    async with open_house(folder) as (_, _, http):
        for query in ("limit=0", "limit=101", "limit=0000000011000", "limit=x", "page=2", "after=", "a&b", "limit"):
            response = await http.get("/v1/agents?" + query)
            assert response.status_code == 400, query


async def test_tenants_have_their_own_agents(folder: Path) -> None:
    tenants = tuple(TenantKeys(name, (Secret(name * 4),)) for name in ("ada", "bob"))
    async with open_house(folder, tenants=tenants) as (_, _, http):
        mine, other = ({"authorization": f"Bearer {name * 4}"} for name in ("ada", "bob"))
        assert (await http.post("/v1/agents", json={"id": "x"})).status_code == 401
        await http.post("/v1/agents", json={"id": "x"}, headers=mine)
        turn = await http.post("/v1/agents/x/turns", json=ask("a long enough message for whole blocks"), headers=mine)
        assert turn.status_code == 200
        calls = [("GET", ""), ("DELETE", ""), ("GET", "/turns"), ("POST", "/turns"), ("POST", "/fork")]
        for method, rest in calls:
            body = ask("x") if rest == "/turns" else {}
            response = await http.request(
                method, "/v1/agents/x" + rest, json=body if method == "POST" else None, headers=other
            )
            assert response.status_code == 404, (method, rest)
        assert (await http.get("/v1/agents", headers=other)).json()["data"] == []
        await http.post("/v1/agents", json={"id": "x"}, headers=other)
        same = await http.post("/v1/agents/x/turns", json=ask("a long enough message for whole blocks"), headers=other)
        assert same.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_server_without_agents_says_why(folder: Path) -> None:
    async with open_house(folder) as (_, web, http):
        web.app.state.attribution.agents = None
        response = await http.get("/v1/agents")
        assert response.status_code == 503 and "keeps no agents" in response.json()["error"]["message"]


async def test_an_agent_moves_to_another_server_as_a_file(folder: Path) -> None:
    async with (
        open_house(folder) as (_, _, http),
        open_house(folder, max_body_mib=1, max_import_mib=2) as (_, _, other),
    ):
        await http.post("/v1/agents", json={"id": "ada", "system": "You remember. " * 40_000})
        await http.post("/v1/agents", json={"id": "small", "system": "You remember."})
        await http.post("/v1/agents/small/turns", json=ask("one"))
        file = await http.get("/v1/agents/small/export")
        assert file.status_code == 200 and "small.cairn" in file.headers["content-disposition"]
        octets = {"content-type": "application/octet-stream"}
        moved = await other.post("/v1/agents/import?id=bob", content=file.content, headers=octets)
        assert moved.status_code == 201 and moved.json()["id"] == "bob", moved.text
        both = [
            await client.post(f"/v1/agents/{id}/turns", json=ask("two"))
            for client, id in ((http, "small"), (other, "bob"))
        ]
        assert both[0].json()["choices"] == both[1].json()["choices"]
        wrong = await other.post("/v1/agents/import", content=file.content[:-9], headers=octets)
        assert wrong.status_code == 400 and "damaged or cut off" in wrong.text
        for change, field in (
            (with_agent(metadata={"a": "x" * 100_000}), "metadata.a"),
            (with_agent(ttl=1e11), "ttl"),
            (with_turn(1, messages=({"role": "alien", "content": "x"},)), "messages[0].role"),
            (with_turn(1, messages=({"role": "user", "content": "x", "tool_call_id": "1"},)), "tool_call_id"),
            (with_turn(0, tools=({"evil": 1},)), "tools[0]"),
        ):
            bad = await other.post("/v1/agents/import?id=bad", content=forged(file.content, change), headers=octets)
            assert bad.status_code == 400 and field in bad.text, bad.text
        assert (await other.post("/v1/agents/import", content=file.content)).status_code == 415
        assert (await other.post("/v1/agents/import?name=x", content=b"", headers=octets)).status_code == 400
        assert (await other.post("/v1/agents/import", content=bytes(3 << 19), headers=octets)).status_code == 400
        assert (await other.post("/v1/agents/import", content=bytes(3 << 20), headers=octets)).status_code == 413
        assert (await other.post("/v1/agents", content=bytes(3 << 19), headers=octets)).status_code == 413


async def test_where_the_kv_of_an_agent_lies_is_shown_and_moved(folder: Path) -> None:
    async with open_house(folder) as (_, _, http):
        await http.post("/v1/agents", json={"id": "ada", "system": "You remember. " * 20, "pin": True})
        await http.post("/v1/agents/ada/turns", json=ask("one"))
        shown = (await http.get("/v1/agents/ada")).json()
        assert shown["pinned"] and shown["kv"]["pool"] >= 100 and shown["kv"]["disk"] == 0
        assert (await http.post("/v1/agents/ada/prefetch", json={})).json()["kv"]["pool"] == shown["kv"]["pool"]
        refused = await http.post("/v1/agents/ada/evict", json={"disk": True})
        assert refused.status_code == 409 and "unpin" in refused.text
        assert (await http.post("/v1/agents/ada/unpin", json={})).json()["pinned"] is False
        assert (await http.post("/v1/agents/ada/evict", json={"disk": True})).json()["kv"]["pool"] == 0
        assert (await http.post("/v1/agents/ada/pin", json={"x": 1})).status_code == 400
        assert (await http.post("/v1/agents/ada/pin", json={})).json()["pinned"] is True


async def test_ordinary_requests_count_for_the_agent_they_name(folder: Path) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 3}
    async with open_house(folder) as (_, web, http):
        await http.post("/v1/agents", json={"id": "ada"})

        async def counted() -> int:
            return int((await http.get("/v1/agents/ada")).json()["savings"]["requests"])

        calls: list[tuple[dict[str, Any], dict[str, str], int]] = [
            ({}, {}, 0),
            ({}, {"X-Cairn-Agent": "ada"}, 1),
            ({"metadata": {"agent": "ada"}}, {}, 2),
            ({"prompt_cache_key": "ada"}, {}, 3),
            ({"prompt_cache_key": "user-42/../x"}, {}, 3),
            ({"metadata": {"agent": "nobody"}, "prompt_cache_key": "ada"}, {}, 4),
            ({"stream": True}, {"X-Cairn-Agent": "ada"}, 5),
        ]
        for more, headers, count in calls:
            assert (await http.post("/v1/chat/completions", json=chat | more, headers=headers)).status_code == 200
            assert await counted() == count, (more, headers)
        bad = await http.post("/v1/chat/completions", json=chat, headers={"X-Cairn-Agent": "no id"})
        assert bad.status_code == 400 and bad.json()["error"]["param"] == "X-Cairn-Agent"
        web.app.state.attribution.agents = None
        assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
        without = await http.post("/v1/chat/completions", json=chat, headers={"X-Cairn-Agent": "ada"})
        assert without.status_code == 503


async def test_an_unknown_name_opens_an_account(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an account is an agent without turns that expires on its own."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 3}
    text = {"prompt": "hi", "max_tokens": 3}
    durable, generate = list[bool](), Service.generate

    def spied(self: Service, request: Request, *more: Any, **named: Any) -> Any:
        durable.append(request.durable)
        return generate(self, request, *more, **named)

    monkeypatch.setattr(Service, "generate", spied)
    async with open_house(folder) as (_, _, http):

        async def opened() -> dict[str, int]:
            data = (await http.get("/v1/agents")).json()["data"]
            assert all(item["turns"] == 0 and item["ttl"] == 7 * 86_400 for item in data)
            return {item["id"]: item["savings"]["requests"] for item in data}

        calls: list[tuple[str, dict[str, Any], dict[str, str]]] = [
            ("bob", {}, {"X-Cairn-Agent": "bob"}),
            ("bob", {"store": False}, {"X-Cairn-Agent": "bob"}),
            ("eve", {"prompt_cache_key": "eve"}, {}),
            ("eve", {"metadata": {"agent": "dan"}, "prompt_cache_key": "eve"}, {}),
            ("dan", {"metadata": {"agent": "dan"}}, {}),
            ("s-1", {}, {"X-Claude-Code-Session-Id": "s-1"}),
            ("s-2", {}, {"x-session-id": "s-2"}),
            ("s-3", {}, {"session-id": "s-3"}),
            ("s-4", {"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s-4"})}}, {}),
            ("s-5", {"metadata": {"user_id": "user_abc_account_x_session_s-5"}}, {}),
            ("", {"metadata": {"user_id": "{no JSON"}}, {}),
            ("eve", {"prompt_cache_key": "eve"}, {"session-id": "s-9"}),
            ("bob", {"prompt_cache_key": "eve"}, {"session-id": "s-9", "X-Cairn-Agent": "bob"}),
            ("", {"prompt_cache_key": "no id"}, {}),
            ("", {"prompt_cache_key": "private", "store": False}, {}),
        ]
        wanted: dict[str, int] = {}
        for name, more, headers in calls:
            for path, body in (("chat/completions", chat), ("completions", text)):
                answer = await http.post(f"/v1/{path}", json=body | more, headers=headers)
                assert answer.status_code == 200, answer.text
                wanted |= {name: wanted.get(name, 0) + 1} if name else {}
                assert await opened() == wanted
                assert durable.pop() == bool(name) and not durable, "its KV is stored first"
        for name, path, body in (
            ("s-6", "messages", {"messages": HI, "metadata": {"user_id": '{"session_id": "s-6"}'}, "max_tokens": 3}),
            ("s-7", "messages", {"messages": HI, "max_tokens": 3}),
        ):
            session = {"X-Claude-Code-Session-Id": name} if name == "s-7" else {}
            assert (await http.post(f"/v1/{path}", json=body, headers=session)).status_code == 200
            wanted[name] = 1
            assert await opened() == wanted, "the rule is every dialect's"
        talk = [*HI, {"role": "assistant", "content": "yes"}, *HI]
        for path in ("chat/completions", "messages"):
            durable.clear()
            assert (await http.post(f"/v1/{path}", json={"messages": talk, "max_tokens": 3})).status_code == 200
            assert durable == [True], "a request with an earlier answer continues that agent"
        wrong = await http.post("/v1/chat/completions", json=chat | {"n": 99}, headers={"X-Cairn-Agent": "joe"})
        assert wrong.status_code == 400 and await opened() == wanted, "an empty request opens no account"
        answers = [http.post("/v1/chat/completions", json=chat, headers={"X-Cairn-Agent": "two"}) for _ in range(2)]
        assert [one.status_code for one in await asyncio.gather(*answers)] == [200, 200]
        assert (await opened())["two"] == 2
        monkeypatch.setattr("cairn.agents.agent_service.MAX_AGENTS", 4)
        answer = await http.post("/v1/chat/completions", json=chat, headers={"X-Cairn-Agent": "joe"})
        assert answer.status_code == 200 and "joe" not in await opened(), "served, without an account"


async def test_requests_that_open_an_account_again_at_once_share_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request finds the name free while the first one is still removing the expired account."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "prompt_cache_key": "ada"}
    removing, go_on, drop = asyncio.Event(), asyncio.Event(), AgentKv.drop

    async def slow(self: AgentKv, agent: Agent) -> bool:
        removing.set()
        await go_on.wait()
        return await drop(self, agent)

    async with open_house(folder) as (at, _, http):
        assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
        at.clock.ahead = ACCOUNT_TTL + 60
        with monkeypatch.context() as patched:
            patched.setattr(AgentKv, "drop", slow)
            first = asyncio.ensure_future(http.post("/v1/chat/completions", json=chat))
            await removing.wait()
            second = await http.post("/v1/chat/completions", json=chat)
            go_on.set()
            assert ((await first).status_code, second.status_code) == (200, 200), first.result().text
        (account,) = (await http.get("/v1/agents")).json()["data"]
        assert (account["id"], account["savings"]["requests"]) == ("ada", 2)


async def test_an_account_that_is_deleted_while_it_is_opened_costs_no_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "prompt_cache_key": "ada"}
    create = Agents.create

    async def deleted(self: Agents, tenant: str, *, id: str, ttl: float) -> None:
        await create(self, tenant, id=id, ttl=ttl)
        await self.delete(tenant, id)

    monkeypatch.setattr(Agents, "create", deleted)
    async with open_house(folder) as (_, _, http):
        assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
        assert (await http.get("/v1/agents")).json()["data"] == []


async def test_answers_of_store_false_are_kept_where_the_server_says_so(folder: Path) -> None:
    """The sampled token ids are then in the log, and are found again after a restart."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "store": False, "prompt_cache_key": "pi", **TURN}
    for store_kv, kept in (("asked", 0), ("always", 1)):
        async with open_house(folder, store_kv=store_kv) as (at, _, http):
            assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
            assert len(at.agents._replays._kept) == kept
            assert len((await http.get("/v1/agents")).json()["data"]) == kept, "an account too"


async def test_refused_requests_do_not_push_out_computed_ones(folder: Path) -> None:
    """The number of requests remembered per agent is limited; refused requests must not push out computed ones, whose
    KV is deleted with the agent.
    """
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 3}
    async with open_house(folder) as (at, _, http):
        await http.post("/v1/agents", json={"id": "ada"})
        named = {"X-Cairn-Agent": "ada"}
        assert (await http.post("/v1/chat/completions", json=chat, headers=named)).status_code == 200
        at.service.info = msgspec.structs.replace(at.service.info, pool_tokens=16)
        for n in range(MOST_CONTEXTS):
            for more in ({}, {"stream": True}):
                body = chat | {"messages": [{"role": "user", "content": f"{n}: " + "hi " * 40}]} | more
                assert (await http.post("/v1/chat/completions", json=body, headers=named)).status_code == 400
        left = at.agents.kv._request_contexts.take(at.agents.chats.named("default", "ada"))
        assert len(left) == 1


async def test_a_request_that_ended_early_still_belongs_to_its_agent(folder: Path) -> None:
    """Its KV is deleted with the agent; otherwise chunks would stay that nobody is told of."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi " * 40}], "ignore_eos": True, "stream": True}
    async with open_house(folder) as (at, _, http):
        await http.post("/v1/agents", json={"id": "ada"})
        for more in ({}, {"X-Cairn-Resumable": "1"}):
            body = chat | {"max_tokens": 1500}
            headers = {"X-Cairn-Agent": "ada"} | more
            async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
                async for _ in answer.aiter_lines():
                    break
                if more:
                    await http.post(f"/v1/requests/{answer.headers['x-request-id']}/cancel")
            agent, kv = at.agents.chats.named("default", "ada"), at.agents.kv
            async with asyncio.timeout(10):
                while not (left := kv._request_contexts.take(agent)):
                    await asyncio.sleep(0.01)
            assert [len(one.ids) > 60 for one in left] == [True]


async def test_kv_of_unread_output_is_deleted_with_the_agent(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker may have computed and stored far more than the stream had sent before its client left."""
    quick = held_back(monkeypatch)
    asked = {"model": "tiny", "prompt": "hello", "max_tokens": 300, "n": 8, "logprobs": 20, "stream": True}
    body = json.dumps(asked | {"ignore_eos": True, "temperature": 0}).encode()
    async with (
        house(folder, salts(Config()), kv_dir=str(tmp_path / "kv"), stream_buffer_kib=4) as at,
        site(at.service, at.config) as web,
        web.http() as http,
    ):
        web.app.state.attribution.agents = at.agents
        await http.post("/v1/agents", json={"id": "ada"})
        agent, kv = at.agents.chats.named("default", "ada"), at.agents.kv
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", web.port))
            slow.sendall(request_bytes("POST", "/v1/completions", body, "X-Cairn-Agent: ada"))
            async with asyncio.timeout(30):
                # 20 of each choice are far more than what is sent to a client that does not read
                for count in (20, 300):
                    while at.service.metrics.generation_tokens < 8 * count:
                        await asyncio.sleep(0.01)
                    quick.set()
        async with asyncio.timeout(10):
            while agent.key not in kv._request_contexts._of:
                await asyncio.sleep(0.01)
        await at.service.flush()
        assert len(chunk_files(tmp_path / "kv")) >= 4
        assert (await http.delete("/v1/agents/ada")).status_code == 200
        await kv.settled()
        await at.service.flush()
        assert chunk_files(tmp_path / "kv") == []


@pytest.mark.parametrize("cut", [False, True])
async def test_the_text_of_a_deleted_agent_is_in_no_miss_report(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    """Reasons for a cache miss are found by comparing with the tenant's last contexts, and this one ends after the
    deletion.
    """
    quick = held_back(monkeypatch)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Code: SWORDFISH"}], "max_tokens": 1000}
    async with open_house(folder) as (at, _, http):
        await http.post("/v1/agents", json={"id": "ada"})
        agent = at.agents.chats.named("default", "ada")
        more = {"stream": True, "ignore_eos": True}
        headers = {"X-Cairn-Agent": "ada"}
        async with http.stream("POST", "/v1/chat/completions", json=body | more, headers=headers) as answer:
            lines = answer.aiter_lines()
            while "content" not in await anext(lines):
                pass
            assert (await http.delete("/v1/agents/ada")).status_code == 200
            assert at.service.stats().running == 1
            if not cut:
                quick.set()
                assert [line async for line in lines if line][-1] == "data: [DONE]"
        quick.set()
        async with asyncio.timeout(10):
            while agent.open_requests:
                await asyncio.sleep(0.01)
        await at.agents.kv.settled()
        body |= {"messages": [{"role": "user", "content": "Code: which one?"}], "max_tokens": 1}
        asked = await http.post("/v1/chat/completions", json=body)
        assert asked.status_code == 200 and "SWORDFISH" not in asked.text, asked.text


@pytest.mark.parametrize("resumable", [False, True])
async def test_an_agent_does_not_expire_while_a_request_in_its_name_runs(folder: Path, resumable: bool) -> None:
    """However long the request takes and however it ends; afterwards the agent's time begins again."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "stream": True}
    headers = {"X-Cairn-Agent": "ada"} | ({"X-Cairn-Resumable": "1"} if resumable else {})
    async with open_house(folder) as (at, _, http):

        def named() -> list[str]:
            return [agent.id for agent in at.agents.page("default").agents]

        await http.post("/v1/agents", json={"id": "ada", "ttl": 60})
        ada = at.agents._find("default", "ada")
        path, body = "/v1/chat/completions", chat | {"max_tokens": 1500}
        refused = await http.post(path, json=body | {"n": 99}, headers=headers)
        assert refused.status_code == 400 and ada.open_requests == 0
        async with http.stream("POST", path, json=body, headers=headers) as answer:
            async for _ in answer.aiter_lines():
                break
            assert ada.open_requests == 1
            at.clock.ahead += 61
            await at.agents.tend()
            assert named() == ["ada"]
            if resumable:
                await http.post(f"/v1/requests/{answer.headers['x-request-id']}/cancel")
        async with asyncio.timeout(10):
            while ada.open_requests:
                await asyncio.sleep(0.01)
        await at.agents.tend()
        assert named() == ["ada"]
        at.clock.ahead += 59
        assert (await http.post(path, json=body | {"max_tokens": 1}, headers=headers)).status_code == 200
        at.clock.ahead += 59
        await at.agents.tend()
        assert named() == ["ada"] and ada.open_requests == 0
        at.clock.ahead += 2
        await at.agents.tend()
        assert named() == []


async def test_an_agents_first_messages_are_checked_like_its_turns(folder: Path, tmp_path: Path) -> None:
    """Some templates require a user message, which a new agent does not have yet; others write messages in a way that
    hides the marks by which tools are recognised.
    """
    asked = "messages | selectattr('role', 'equalto', 'user') | list"
    wants = "{% if not " + asked + " %}{{ raise_exception('no user') }}{% endif %}"
    picky = talking_model(tmp_path / "tiny")
    settings = json.loads((picky / "tokenizer_config.json").read_text())
    (picky / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": wants + "{{ messages }}"}))
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    async with open_house(picky) as (_, _, http):
        assert (await http.post("/v1/agents", json={"id": "ada", "system": "Be brief."})).status_code == 201
        refused = await http.post("/v1/agents", json={"id": "eve", "tools": [tool]})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages[0].content"
    async with open_house(folder) as (_, _, http):
        body = {"system": "Be brief.", "messages": [{"role": "tool", "content": "y"}]}
        refused = await http.post("/v1/agents", json=body)
        assert refused.json()["error"]["param"] == "messages[0].tool_call_id"


async def test_an_answer_that_must_not_be_stored_is_not(folder: Path) -> None:
    async with open_house(folder) as (at, _, http):
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **TURN}
        await at.agents.writer.sync()
        before = sum(map(len, at.files.files().values()))
        await http.post("/v1/chat/completions", json=chat | {"store": False})
        await at.agents.writer.sync()
        assert sum(map(len, at.files.files().values())) == before
        await http.post("/v1/chat/completions", json=chat)
        await at.agents.writer.sync()
        assert sum(map(len, at.files.files().values())) > before
        await http.post("/v1/agents", json={"id": "ada"})
        refused = await http.post("/v1/agents/ada/turns", json=ask("x", store=False))
        assert refused.status_code == 400 and "store" in refused.text


async def test_the_kv_of_what_must_not_be_stored_stays_off_the_disk(folder: Path, tmp_path: Path) -> None:
    """Stored chunks hold token ids: of a chat that has an answer in it, and of a text that is sent twice."""
    async with house(folder, kv_dir=str(tmp_path / "kv")) as at, site(at.service) as web, web.http() as http:
        long = "What nobody may find on the disk when the day is over. " * 8
        said = [{"role": role, "content": long} for role in ("user", "assistant", "user")]
        chat = {"model": "tiny", "messages": said, **TURN}
        text = {"model": "tiny", "prompt": long, **TURN}
        for store, stored in ((False, False), (True, True)):
            for body, path in ((chat, "/v1/chat/completions"), (text, "/v1/completions")):
                before = len(chunk_files(tmp_path / "kv"))
                for _ in range(2):
                    assert (await http.post(path, json=body | {"store": store})).status_code == 200
                assert (await http.post("/v1/cache/flush")).status_code == 200
                assert (len(chunk_files(tmp_path / "kv")) > before) is stored


async def test_a_changed_chat_reports_where_it_changed(folder: Path) -> None:
    """The chat is edited, rendered anew or sent by another tenant; the answer is whole or streamed."""
    keys = (TenantKeys(name="acme", keys=(Secret("k1"),)), TenantKeys(name="other", keys=(Secret("k2"),)))
    async with open_house(folder, tenants=keys) as (at, _, http):
        said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "My cat is called Tom."}]

        async def ask(messages: list[dict[str, str]], key: str = "k1", **more: Any) -> Any:
            body = {"model": at.service.name, "messages": messages, "max_tokens": 2, **more}
            response = await http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
            assert response.status_code == 200, response.text
            usage = chunks(response.text)[-1] if more.get("stream") else response.json()["usage"]
            return next(iter(usage["cairn"]["miss"]), None)

        assert (await ask(said, store=False))["reason"] == "never seen"
        await ask(said)
        for name, more in (("dog", {"stream": True}), ("hen", {})):
            edited = [said[0], {"role": "user", "content": f"My {name} is called Tom."}]
            result = await ask(edited, **more)
            assert result["reason"] == "different tokens" and result["differs"]["given"].startswith(name + " is")
            assert result["differs"]["known"][:3] in ("cat", "dog")
        tool = {"type": "function", "function": {"name": "feed", "parameters": {}}}
        again = await ask(said, tools=[tool])
        assert again["reason"] == "template" and again["differs"]["position"] < 40
        strange = await ask(edited, "k2")
        assert strange == {"position": 0, "reason": "never seen"}


async def test_a_damaged_agent_is_shown_with_what_can_be_done(folder: Path) -> None:
    async with open_house(folder) as (at, _, http):
        await http.post("/v1/agents", json={"id": "ada", "system": "You remember."})
        for text in ("the first message", "the second message"):
            assert (await http.post("/v1/agents/ada/turns", json=ask(text))).status_code == 200
        assert (await http.get("/v1/agents/ada")).json()["damage"] is None
        for path, data in at.files.files().items():
            if (where := data.find(b"the second message")) >= 0:
                at.files.damage(path, where)
        refused = await http.post("/v1/agents/ada/turns", json=ask("more"))
        sentence = "turn 2 of agent ada cannot be read: the token log is damaged there; "
        sentence += "roll back to turn 1, or delete the agent"
        assert refused.status_code == 409 and "retry-after" not in refused.headers
        assert (refused.json()["error"]["code"], refused.json()["error"]["message"]) == ("damaged", sentence)
        shown = (await http.get("/v1/agents/ada")).json()
        assert (shown["damage"], shown["kv"], shown["turns"]) == (sentence, None, 2)
        assert shown["messages"] == [{"role": "system", "content": "You remember."}]
        turns = (await http.get("/v1/agents/ada/turns")).json()["data"]
        assert [turn["state"] for turn in turns] == ["finished", "damaged"]
        assert (await http.get("/v1/agents/ada/export")).json()["error"]["code"] == "damaged"
        assert (await http.post("/v1/agents/ada/rollback", json={"turn": 1})).status_code == 200
        assert (await http.get("/v1/agents/ada/export")).status_code == 200
        assert (await http.post("/v1/agents/ada/turns", json=ask("more"))).status_code == 200
        assert (await http.delete("/v1/agents/ada")).status_code == 200


SHORT = SamplingOptions(temperature=0, max_tokens=12)


async def test_a_strict_tool_of_an_agent_binds_in_every_turn_and_wherever_the_agent_goes(folder: Path) -> None:
    """The schema applies in the agent's turns, in its forks, after a restart and in an import elsewhere, without
    changing the prompt's tokens.
    """
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    function = {"name": "count", "parameters": schema}
    loose = {"type": "function", "function": function}
    strict = {"type": "function", "function": function | {"strict": True}}
    call = '<tool_call>\n{"name": "count", "arguments": {"n": %s}}\n</tool_call>'

    async with open_house(folder) as (at, _, http):

        async def held(id: str) -> bool:
            running = await at.begin(id, "How many?", options=SHORT)
            heard = await hear(running)
            assert heard.done is not None
            grammar = running.request.grammar
            if grammar:
                assert accepts(grammar, call % "1") and accepts(grammar, "None.")
                assert not accepts(grammar, call % '"one"')
            return bool(grammar)

        for id, tool in (("ada", strict), ("bob", loose)):
            made = await http.post("/v1/agents", json={"id": id, "system": "Count.", "tools": [tool]})
            assert made.status_code == 201 and "x-cairn-warning" not in made.headers
            assert (await http.get(f"/v1/agents/{id}")).json()["tools"] == [tool]
        first = await http.post("/v1/agents/ada/turns", json=ask("How many?", ignore_eos=False))
        other = await http.post("/v1/agents/bob/turns", json=ask("How many?", ignore_eos=False))
        assert first.status_code == 200, first.text
        assert first.json()["usage"]["prompt_tokens"] == other.json()["usage"]["prompt_tokens"]
        assert await held("ada") and not await held("bob")
        await http.post("/v1/agents/ada/fork", json={"id": "eve"})
        file = (await http.get("/v1/agents/ada/export")).content
        moved = await http.post("/v1/agents/import?id=fay", content=file, headers={"content-type": MEDIA_TYPE})
        assert moved.status_code == 201, moved.text
        assert await held("eve") and await held("fay")
        await at.again()
        assert await held("ada") and await held("eve") and await held("fay")
        one = await at.begin("ada", "How many?", options=SHORT, wanted=Wanted(choice=ToolChoice(parallel=False)))
        await hear(one)
        assert not accepts(one.request.grammar, f"{call % 1}\n{call % 2}")


async def test_a_strict_tool_that_cannot_be_held_to_is_refused_when_the_agent_is_made(folder: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "array", "uniqueItems": True}}}
    function = {"name": "count", "parameters": schema}
    async with open_house(folder) as (_, _, http):
        for strict, status in ((True, 400), (False, 201)):
            tool = {"type": "function", "function": function | {"strict": strict}}
            made = await http.post("/v1/agents", json={"tools": [tool]})
            assert made.status_code == status, made.text
            assert status == 201 or made.json()["error"]["param"] == "tools"


async def test_a_turn_has_timings_if_asked_for(folder: Path) -> None:
    async with open_house(folder) as (_, _, http):
        await http.post("/v1/agents", json={"id": "ada", "system": "You remember all that you were ever told."})
        assert "timings" not in (await http.post("/v1/agents/ada/turns", json=ask("one"))).json()
        more = {"timings_per_token": True, "return_progress": True}
        timed = chunks((await http.post("/v1/agents/ada/turns", json=ask("two", stream=True, **more))).text)
        first, second = (one["prompt_progress"] for one in timed if "prompt_progress" in one)
        last = timed[-1]["timings"]
        assert first["processed"] == first["cache"] and second["processed"] == second["total"] == first["total"]
        assert second["cache"] == last["cache_n"] == first["total"] - last["prompt_n"] > 0
        assert last["predicted_n"] == 12 and last["predicted_ms"] > 0
        whole = (await http.post("/v1/agents/ada/turns", json=ask("three", timings_per_token=True))).json()
        assert whole["timings"]["predicted_n"] == 12
