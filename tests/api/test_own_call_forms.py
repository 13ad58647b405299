"""Models whose call format is in no table, with real arithmetic: calls are recognised, constrained and replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cairn.config.config import Config
from cairn.frontend.service import Service
from tests.api.sockets import events, site
from tests.scripted_model import write_scripted
from tests.text.call_templates import FURTHER, template

CONTROL = 3
F = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"]},
    },
}
SCRIPTS = {
    "other names": ["<|do|>", '[{"tool": "f", "with": {"x": 1}}]', "<|done|>"],
    "numbered": ["<|uses|>", "<|use|>", "f:0", "<|with|>", '{"x": 1}', "<|done|>"],
}


BROKEN = {
    "other names": ["<|do|>", '[{"tool": "f", "with" is 1}]', "<|done|>"],
    "numbered": ["<|uses|>", "<|use|>", "f:0", "<|with|>", "x is 1", "<|done|>"],
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_malformed_call_is_text_with_a_note_and_history_goes_on(name: str, tmp_path: Path) -> None:
    pieces = BROKEN[name]
    kinds = {piece: CONTROL for piece in pieces if piece.startswith("<|")}
    model = write_scripted(tmp_path / "m.gguf", pieces, template=template(FURTHER[name]), kinds=kinds)
    service = await Service.start(Config(model=str(model), kv_gb=0.05, kv_disk=False), in_process=True)
    asked: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    body = {"temperature": 0, "max_tokens": 40, "tools": [F]}
    try:
        async with site(service) as at, at.http() as http:
            response = await http.post("/v1/chat/completions", json=body | {"messages": asked})
            choice, warnings = response.json()["choices"][0], response.json()["warnings"]
            said = choice["message"]["content"]
            assert "tool_calls" not in choice["message"]
            assert (said, choice["finish_reason"]) == ("".join(pieces), "stop"), "nothing of it is lost"
            assert len(warnings) == 1 and "cannot be read as one" in warnings[0]
            stream = await http.post("/v1/chat/completions", json=body | {"messages": asked, "stream": True})
            chunks = events(stream.text)[:-1]
            assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == said
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop" and chunks[-1]["warnings"] == warnings
            answer = {"role": "assistant", "content": said}
            more = [*asked, answer, {"role": "user", "content": "and?"}]
            again = await http.post("/v1/chat/completions", json=body | {"messages": more})
            assert again.status_code == 200, again.text
    finally:
        await service.close()


async def test_a_call_that_breaks_off_behind_its_arguments_is_still_a_call(tmp_path: Path) -> None:
    """What follows the arguments becomes content."""
    pieces = ["<|do|>", '[{"tool": "f", "with": {"x": 1}]', "<|done|>"]
    kinds = {piece: CONTROL for piece in pieces if piece.startswith("<|")}
    model = write_scripted(tmp_path / "m.gguf", pieces, template=template(FURTHER["other names"]), kinds=kinds)
    service = await Service.start(Config(model=str(model), kv_gb=0.05, kv_disk=False), in_process=True)
    asked: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    body = {"temperature": 0, "max_tokens": 40, "tools": [F], "messages": asked}
    try:
        async with site(service) as at, at.http() as http:
            (choice,) = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
            (call,) = choice["message"]["tool_calls"]
            assert call["function"] == {"name": "f", "arguments": '{"x": 1}'}
            assert (choice["message"]["content"], choice["finish_reason"]) == ("]<|done|>", "tool_calls")
            stream = await http.post("/v1/chat/completions", json=body | {"stream": True})
            deltas = [chunk["choices"][0]["delta"] for chunk in events(stream.text)[:-1] if chunk["choices"]]
            assert "".join(delta.get("content") or "" for delta in deltas) == "]<|done|>"
            history = [*asked, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "7"}]
            assert (await http.post("/v1/chat/completions", json=body | {"messages": history})).status_code == 200
    finally:
        await service.close()


@pytest.mark.parametrize(
    ("name", "choice"), [("other names", "auto"), ("other names", "required"), ("numbered", "auto")]
)
async def test_calls_in_a_form_of_its_own(name: str, choice: str, tmp_path: Path) -> None:
    pieces = SCRIPTS[name]
    kinds = {piece: CONTROL for piece in pieces if piece.startswith("<|")}
    model = write_scripted(tmp_path / "m.gguf", pieces, template=template(FURTHER[name]), kinds=kinds)
    service = await Service.start(Config(model=str(model), kv_gb=0.05, kv_disk=False), in_process=True)
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0,
        "max_tokens": 400,  # when its script is not allowed, the model writes as many blanks as the grammar allows
        "tools": [F],
        "tool_choice": choice,
        "parallel_tool_calls": choice == "auto",
    }
    try:
        async with site(service) as at, at.http() as http:
            response = await http.post("/v1/chat/completions", json=body)
            assert response.status_code == 200 and "X-Cairn-Warning" not in response.headers, response.text
            (one,) = response.json()["choices"]
            assert one["finish_reason"] == "tool_calls" and one["message"]["content"] is None
            (call,) = one["message"]["tool_calls"]
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"x": 1})
            stream = await http.post("/v1/chat/completions", json=body | {"stream": True})
            deltas = [chunk["choices"][0]["delta"] for chunk in events(stream.text)[:-1] if chunk["choices"]]
            pieces = [piece for delta in deltas for piece in delta.get("tool_calls") or []]
            assert [piece["id"] for piece in pieces if piece.get("id")] and {piece["index"] for piece in pieces} == {0}
            assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]
            assert not any(delta.get("content") for delta in deltas)
            history = [*body["messages"], one["message"], {"role": "tool", "tool_call_id": call["id"], "content": "7"}]
            again = await http.post("/v1/chat/completions", json=body | {"messages": history, "max_tokens": 30})
            usage, before = again.json()["usage"], response.json()["usage"]
            assert usage["prompt_tokens"] > before["total_tokens"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= before["total_tokens"] // 16 * 16 - 16
    finally:
        await service.close()
