"""Calls that a model writes in another form than its template's, as clients of each dialect see them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.config.config import Config
from cairn.frontend.service import Service
from tests.api.sockets import events, site
from tests.scripted_model import write_scripted
from tests.text.call_templates import TABLE, template

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
F = {"type": "function", "function": {"name": "f", "description": "f", "parameters": SCHEMA}}
ASKED = [{"role": "user", "content": "hi"}]
KINDS = {"<think>": 3, "</think>": 4, "<tool_call>": 4, "</tool_call>": 4}
XML = ["<function=f>\n<parameter=x>\n", "1", "\n</parameter>\n</function>"]
CALLS = {
    "without its opening tag": ("qwen_xml", ["I look.\n", *XML, "\n", "</tool_call>"], "I look.\n", None),
    "in reasoning that never ended": (
        "qwen_xml", ["<think>", "Hm.\n", "<tool_call>", "\n", *XML, "\n", "</tool_call>"], None, "Hm."
    ),
    "a name and JSON": ("glm", ["<tool_call>", "f ", '{"x": 1}', "</tool_call>"], None, None),
}  # fmt: skip
NONE = {
    "in a fence": ("qwen_xml", ["```\n", *XML, "\n```"]),
    "in a line": ("qwen_xml", ["So: ", *XML]),
    "not of the schema": ("qwen_xml", [XML[0], "one", XML[2]]),
    "a name that was not offered": ("glm", ["<tool_call>", "the name\n", "</tool_call>"]),
}


@asynccontextmanager
async def served(folder: Path, form: str, pieces: list[str]) -> AsyncIterator[httpx.AsyncClient]:
    text = template(TABLE[form]) + "{# <think> #}"
    model = write_scripted(folder / "m.gguf", pieces, template=text, kinds={k: KINDS[k] for k in pieces if k in KINDS})
    service = await Service.start(Config(model=str(model), kv_gb=0.05, kv_disk=False), in_process=True)
    async with site(service) as at, at.http() as http:
        yield http
    await service.close()


async def chat(http: httpx.AsyncClient, **more: Any) -> Any:
    body = {"messages": ASKED, "tools": [F], "temperature": 0, "max_tokens": 60} | more
    return await http.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize("name", CALLS)
async def test_every_dialect_gets_the_call(name: str, tmp_path: Path) -> None:
    form, pieces, content, thought = CALLS[name]
    async with served(tmp_path, form, pieces) as http:
        (choice,) = (first := (await chat(http)).json())["choices"]
        message = choice["message"]
        assert (message["content"], message.get("reasoning_content")) == (content, thought)
        assert choice["finish_reason"] == "tool_calls"
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"x": 1})
        chunks = events((await chat(http, stream=True)).text)[:-1]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == (content or "")
        assert sum(len(delta.get("tool_calls") or []) for delta in deltas) == 1
        history = [*ASKED, message, {"role": "tool", "tool_call_id": call["id"], "content": "7"}]
        usage = (await chat(http, messages=history)).json()["usage"]
        whole = first["usage"]["total_tokens"] // 16 * 16 - 16
        assert usage["prompt_tokens_details"]["cached_tokens"] >= whole, "the answer is put back as it was sampled"

        tool = {"name": "f", "description": "f", "input_schema": SCHEMA}
        body: dict[str, Any] = {"model": "m", "messages": ASKED, "tools": [tool], "temperature": 0, "max_tokens": 60}
        answer = (await http.post("/v1/messages", json=body)).json()
        assert answer["stop_reason"] == "tool_use" and answer["content"][-1]["input"] == {"x": 1}

        tool = {"type": "function", "name": "f", "description": "f", "parameters": SCHEMA}
        body = {"input": "hi", "tools": [tool], "temperature": 0, "max_output_tokens": 60, "store": False}
        output = (await http.post("/v1/responses", json=body)).json()["output"]
        assert output[-1]["type"] == "function_call" and json.loads(output[-1]["arguments"]) == {"x": 1}

        body = {"model": "m", "messages": ASKED, "tools": [F], "stream": False, "options": {"temperature": 0}}
        (own,) = (await http.post("/api/chat", json=body)).json()["message"]["tool_calls"]
        assert own["function"]["arguments"] == {"x": 1}


@pytest.mark.parametrize("name", NONE)
async def test_what_only_looks_like_a_call_is_content(name: str, tmp_path: Path) -> None:
    form, pieces = NONE[name]
    async with served(tmp_path, form, pieces) as http:
        (choice,) = (await chat(http)).json()["choices"]
        assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == "".join(pieces)
