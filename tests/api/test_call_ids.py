"""Follow-up turns with call ids rewritten for templates that require nine characters, or Kimi's form, in every
dialect.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.config.config import Config
from cairn.frontend.service import Service
from tests.api.sockets import site
from tests.scripted_model import write_scripted
from tests.text.chat.test_call_ids import KIMI, REFUSING

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
F = {"type": "function", "function": {"name": "f", "description": "f", "parameters": SCHEMA}}
MODELS = {
    "nine": (REFUSING, ["[TOOL_CALLS]", '[{"name": "f", "arguments": {"x": 1}}]']),
    "kimi": (
        KIMI,
        [
            *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>"),
            *('{"x": 1}', "<|tool_call_end|>", "<|tool_calls_section_end|>"),
        ],
    ),
}


@pytest.fixture(params=MODELS)
async def http(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    template, pieces = MODELS[request.param]
    kinds = {piece: 3 for piece in pieces if piece[0] in "<[" and piece[-1] in ">]" and '"' not in piece}
    model = write_scripted(tmp_path / "m.gguf", pieces, template=template, kinds=kinds)
    service = await Service.start(Config(model=str(model), kv_gb=0.05, kv_disk=False), in_process=True)
    async with site(service) as at, at.http() as client:
        yield client
    await service.close()


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_chat_completions(http: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "tools": [F]}
    history: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    for _ in range(3):
        response = await post(http, "/v1/chat/completions", body | {"messages": history})
        message = response["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"x": 1}
        history += [message, {"role": "tool", "tool_call_id": call["id"], "content": "7"}]
    assert len({one["tool_call_id"] for one in history if one["role"] == "tool"}) == 3


async def test_messages(http: httpx.AsyncClient) -> None:
    tool = {"name": "f", "description": "f", "input_schema": SCHEMA}
    body: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": 40, "tools": [tool]}
    history: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    for _ in range(3):
        content = (await post(http, "/v1/messages", body | {"messages": history}))["content"]
        (use,) = [one for one in content if one["type"] == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "7"}
        history += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]


async def test_responses(http: httpx.AsyncClient) -> None:
    tool = {"type": "function", "name": "f", "description": "f", "parameters": SCHEMA}
    body: dict[str, Any] = {"temperature": 0, "max_output_tokens": 40, "tools": [tool], "store": False}
    history: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    for _ in range(3):
        output = (await post(http, "/v1/responses", body | {"input": history}))["output"]
        (call,) = [one for one in output if one["type"] == "function_call"]
        history += [*output, {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}]


async def test_ollama(http: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"model": "m", "tools": [F], "stream": False, "options": {"temperature": 0}}
    history: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    for _ in range(3):
        message = (await post(http, "/api/chat", body | {"messages": history}))["message"]
        (call,) = message["tool_calls"]
        call.pop("id", None)  # Ollama's clients send none
        history += [message, {"role": "tool", "tool_name": "f", "content": "7"}]
