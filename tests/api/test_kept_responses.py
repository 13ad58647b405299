"""Stored responses: they equal the first answer, and their agents are not other clients' agents."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, get_args

import pytest
from openai.types.responses import response as types

from cairn.api.chat.cache_diagnosis import Divergence, response_diagnostics
from cairn.api.openai.responses_schemas import ResponseBody
from cairn.api.openai.stored_responses import TTL
from cairn.engine.fake import FakeEngine
from cairn.types.errors import Unavailable
from tests.api.homes import home
from tests.api.openai.test_responses import keeping, kept, post
from tests.api.sockets import site
from tests.service.tiny import make_model, serving

GRAMMAR = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
TOOLS = [
    {"type": "function", "name": "f", "description": "F", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "patch", "description": "P", "format": GRAMMAR},
    {
        "type": "namespace",
        "name": "n",
        "tools": [
            {"type": "function", "name": "g", "description": "G", "parameters": {"type": "object"}, "strict": False}
        ],
    },
]


async def test_a_stored_response_equals_the_answer(tmp_path: Path) -> None:
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny")) as at, at.http() as http:
        for more in ({}, {"tools": TOOLS, "temperature": None, "top_p": 0.9}, {"text": {"format": {"type": "text"}}}):
            made = (await post(at, kept(**more))).json()
            shown = (await http.get(f"/v1/responses/{made['id']}")).json()
            assert abs((made["completed_at"] or 0) - (shown["completed_at"] or 0)) <= 1
            made.pop("warnings", None)
            for one in (made, shown):
                one["completed_at"] = None
                for miss in one["usage"]["cairn"]["miss"]:
                    miss.pop("differs", None)  # not stored, as it may quote another agent
            assert shown == made


async def test_a_response_that_failed_says_so_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, steps = FakeEngine.decode, [0]

    def failing(self: FakeEngine, rows: Any) -> Any:
        steps[0] += 1
        if steps[0] > 3:
            raise ValueError("the engine broke")
        return decode(self, rows)

    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny")) as at, at.http() as http:
        monkeypatch.setattr(FakeEngine, "decode", failing)
        answer = await post(at, kept(max_output_tokens=20))
        assert answer.status_code >= 500
        monkeypatch.undo()
        (agent,) = at.app.state.attribution.open().page("default").agents
        shown = (await http.get(f"/v1/responses/{agent.id}")).json()
        assert shown["status"] == "failed" and shown["error"]["code"] == "server_error", shown
        assert shown["error"]["message"] in answer.text


async def test_responses_and_conversations_cannot_be_continued_as_agents(tmp_path: Path) -> None:
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny")) as at, at.http() as http:
        response = (await post(at, kept())).json()["id"]
        conversation = (await http.post("/v1/conversations", json={})).json()["id"]
        mine = (await http.post("/v1/agents", json={"metadata": {"object": "response"}})).json()["id"]
        assert [item["id"] for item in (await http.get("/v1/agents")).json()["data"]] == [mine]
        for id in (response, conversation):
            assert (await http.get(f"/v1/agents/{id}")).status_code == 200, "it can be read"
            for path, body in (
                ("turns", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
                ("fork", {}),
                ("rollback", {"turn": 0}),
                ("resume", {}),
            ):
                refused = await http.post(f"/v1/agents/{id}/{path}", json=body)
                assert refused.status_code == 409 and "at /v1/responses" in refused.text, path
        turn = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        assert (await http.post(f"/v1/agents/{mine}/turns", json=turn)).status_code == 200
        assert (await http.delete(f"/v1/agents/{response}")).status_code == 200


@pytest.mark.parametrize("use", ["items", "metadata", "response"])
async def test_a_use_of_a_conversation_is_a_use_of_its_last_response(tmp_path: Path, use: str) -> None:
    """The response holds the history, so it must not end before the conversation."""
    async with home(make_model(tmp_path / "tiny")) as (at, http):
        path = f"/v1/conversations/{(await http.post('/v1/conversations', json={})).json()['id']}"
        ask = kept(conversation=path.split("/")[3])
        assert (await http.post("/v1/responses", json=ask)).status_code == 200
        at.clock.ahead += TTL * 2 / 3
        if use == "items":
            await http.post(f"{path}/items", json={"items": [{"role": "user", "content": "more"}]})
        elif use == "metadata":
            await http.post(path, json={"metadata": {"title": "x"}})
        else:
            assert (await http.post("/v1/responses", json=ask)).status_code == 200
        await at.again()
        at.web.app.state.attribution.agents = at.agents  # type: ignore[attr-defined]
        at.clock.ahead += TTL * 2 / 3
        await at.agents.tend()
        items = (await http.get(f"{path}/items?order=asc")).json()["data"]
        expected = ["user", "assistant", *{"items": ["user"], "metadata": [], "response": ["user", "assistant"]}[use]]
        assert [item["role"] for item in items] == expected
        assert (await http.post("/v1/responses", json=ask)).status_code == 200
        at.clock.ahead += TTL + 60
        await at.agents.tend()
        assert at.agents.page("default").agents == (), "what nobody uses goes"


async def test_a_use_of_a_conversation_keeps_the_response_before_one_that_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with home(make_model(tmp_path / "tiny")) as (at, http):
        path = f"/v1/conversations/{(await http.post('/v1/conversations', json={})).json()['id']}"
        ask = kept(conversation=path.split("/")[3])
        assert (await http.post("/v1/responses", json=ask)).status_code == 200
        at.clock.ahead += TTL * 2 / 3
        monkeypatch.setattr(FakeEngine, "decode", broken)
        assert (await http.post("/v1/responses", json=ask)).status_code >= 500
        monkeypatch.undo()
        at.clock.ahead += TTL * 2 / 3
        await at.agents.tend()
        items = (await http.get(f"{path}/items?order=asc")).json()["data"]
        assert [item["role"] for item in items] == ["user", "assistant", "user"]
        added = await http.post(f"{path}/items", json={"items": [{"role": "user", "content": "more"}]})
        assert [item["content"][0]["text"] for item in added.json()["data"]] == ["more"], added.text
        items = (await http.get(f"{path}/items?order=asc")).json()["data"]
        assert [item["role"] for item in items] == ["user", "assistant", "user"]


def broken(self: FakeEngine, rows: Any) -> Any:
    raise ValueError("the engine broke")


async def test_a_change_of_a_conversation_brings_back_no_item_that_was_refused(tmp_path: Path) -> None:
    async with home(make_model(tmp_path / "tiny")) as (at, http):
        path = f"/v1/conversations/{(await http.post('/v1/conversations', json={})).json()['id']}"
        gate, began, sync = asyncio.Event(), asyncio.Event(), at.agents._pending.sync

        async def refuse(*_: object) -> None:
            began.set()
            await gate.wait()
            raise Unavailable("refused")

        at.agents._pending.sync = refuse  # type: ignore[method-assign]
        item = {"role": "user", "content": "refused"}
        add = asyncio.create_task(http.post(f"{path}/items", json={"items": [item]}))
        await began.wait()
        at.agents._pending.sync = sync  # type: ignore[method-assign]
        change = asyncio.create_task(http.post(path, json={"metadata": {"title": "x"}}))
        id, lock = path.split("/")[3], at.agents._agents._changing
        agent = at.agents._find("default", id)
        while not lock[agent.key]._waiters:  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)
        gate.set()
        assert (await add).status_code == 503 and (await change).json()["metadata"] == {"title": "x"}
        assert (await http.get(f"{path}/items")).json()["data"] == []
        assert (await http.get(path)).json()["metadata"] == {"title": "x"}


async def test_tools_that_the_template_ignores_give_a_warning(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f"}}]}
    async with serving(make_model(tmp_path / "a")) as service, site(service) as at, at.http() as http:
        answer = await http.post("/v1/chat/completions", json=body | {"max_tokens": 1})
        assert answer.status_code == 200 and "chat template shows no tools" in answer.headers["x-cairn-warning"]
        plain = await http.post("/v1/chat/completions", json={**body, "tools": None, "max_tokens": 1})
        assert "x-cairn-warning" not in plain.headers
    model = make_model(tmp_path / "b")
    async with serving(model, tool_instructions=False) as service, site(service) as at, at.http() as http:
        refused = await http.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"


def test_the_reasons_of_a_miss_are_those_that_the_client_library_knows() -> None:
    known = set(get_args(types.PromptCacheDiagnosticsCacheMiss.model_fields["reason"].annotation))
    assert {*ResponseBody().parts, "input_changed"} <= known
    results = [response_diagnostics(None, 9, 0), response_diagnostics(Divergence(40, 50, None), 50, 0)]
    results += [
        response_diagnostics(Divergence(40, 50, None), 50, 40),
        response_diagnostics(Divergence(5, 9, ""), 9, 0),
    ]
    kinds = [
        types.PromptCacheDiagnosticsComparisonResponseNotFound,
        types.PromptCacheDiagnosticsUnavailable,
        types.PromptCacheDiagnosticsCacheHit,
        types.PromptCacheDiagnosticsCacheMiss,
    ]
    for value, kind in zip(results, kinds, strict=True):
        assert kind.model_validate(value).type == value["type"]
