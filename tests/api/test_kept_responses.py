"""Stored responses: they equal the first answer, and their agents are not other clients' agents."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from openai.types.responses import response as types

from cairn.api.chat.cache_diagnosis import Divergence, response_diagnostics
from cairn.api.openai.responses_schemas import ResponseBody
from cairn.engine.fake import FakeEngine
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
