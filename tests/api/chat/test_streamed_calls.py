"""Calls on the real engine: streamed piece by piece where the dialect can, and what becomes of cut or broken ones."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cairn.config.config import Config
from cairn.engine.recorded import RecordedEngine
from cairn.frontend.service import Service
from cairn.text.tokens.gguf import CONTROL
from tests.api.chat.test_order import data, post
from tests.api.sockets import Site, site
from tests.scripted_model import CHATML, write_scripted

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "write", "parameters": SCHEMA}}
FLAT = {"type": "function", "name": "write", "parameters": SCHEMA}
OWN = {"name": "write", "input_schema": SCHEMA}
WORDS = [f"word{number} " for number in range(20)]
CALL = [
    "<tool_call>",
    "\n",
    '{"name": "write", ',
    '"arguments": ',
    '{"text": "',
    *WORDS,
    '"}',
    "}",
    "\n",
    "</tool_call>",
]
BROKEN = [*CALL[:10], '" oops', *CALL[10:]]
XML = ["<tool_call>", "\n", "<function=write>", "\n", "<parameter=text>", "\n", *WORDS, "\n", "</parameter>", "\n",
       "</function>", "\n", "</tool_call>"]  # fmt: skip
TEMPLATE = "{# {{ tools | tojson }} <tool_call>FORM #}{% for t in tools or [] %}{{ t }}{% endfor %}" + CHATML
WHOLE = json.dumps({"text": "".join(WORDS)})
CUT = 14
"""Token limit that cuts the answer within the arguments."""
PATHS = {
    "/v1/chat/completions": {"messages": HI, "tools": [TOOL], "temperature": 0, "max_tokens": 99},
    "/v1/messages": {"messages": HI, "tools": [OWN], "temperature": 0, "max_tokens": 99},
    "/v1/responses": {"input": "hi", "store": False, "tools": [FLAT], "temperature": 0, "max_output_tokens": 99},
    "/api/chat": {"messages": HI, "tools": [TOOL], "options": {"temperature": 0, "num_predict": 99}},
}


@contextlib.asynccontextmanager
async def saying(path: Path, pieces: list[str]) -> AsyncIterator[Site]:
    template = TEMPLATE.replace("FORM", "<function=" if pieces is XML else "")
    write_scripted(path, pieces, template=template, kinds=dict.fromkeys(("<tool_call>", "</tool_call>"), CONTROL))
    service = await Service.start(Config(model=str(path), kv_gb=0.05, kv_disk=False), in_process=True)
    try:
        async with site(service) as scripted:
            yield scripted
    finally:
        await service.close()


def asked(path: str, tokens: int = 99) -> dict[str, Any]:
    body = PATHS[path]
    if "options" in body:
        return body | {"options": body["options"] | {"num_predict": tokens}}
    return body | {name: tokens for name in ("max_tokens", "max_output_tokens") if name in body}


class Heard:
    """Collect what a client assembles from the answer to one request."""

    def __init__(self) -> None:
        self.text = self.name = self.reason = ""
        self.pieces: list[str] = []

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


def chats(chunks: list[dict[str, Any]], heard: Heard) -> None:
    for choice in (one["choices"][0] for one in chunks):
        said = choice.get("delta") or choice.get("message") or {}
        heard.text += said.get("content") or ""
        for call in said.get("tool_calls") or ():
            heard.name += call["function"].get("name", "")
            heard.pieces += [call["function"]["arguments"]] * bool(call["function"]["arguments"])
        heard.reason = choice["finish_reason"] or heard.reason


def messages(chunks: list[dict[str, Any]], heard: Heard) -> None:
    for one in chunks:
        for block in (*one.get("content", ()), one.get("content_block", {})):
            heard.text += block.get("text", "")
            heard.name += block.get("name", "")
            heard.pieces += [json.dumps(block["input"])] if block.get("input") else []
        delta = one.get("delta", one)
        heard.text += delta.get("text", "")
        heard.pieces += [delta["partial_json"]] if delta.get("partial_json") else []
        heard.reason = delta.get("stop_reason") or heard.reason


def responses(chunks: list[dict[str, Any]], heard: Heard) -> None:
    if "output" not in chunks[0]:
        heard.pieces = [one["delta"] for one in chunks if one["type"] == "response.function_call_arguments.delta"]
    heard.text = "".join(one["delta"] for one in chunks if one.get("type") == "response.output_text.delta")
    (last,) = (chunks[-1].get("response") or chunks[-1])["output"][-1:]
    assert last["type"] == "function_call" and last["status"] == chunks[-1].get("response", chunks[-1])["status"]
    heard.name, heard.reason = last["name"], last["status"]
    heard.pieces = heard.pieces or [last["arguments"]]
    assert heard.arguments == last["arguments"]


def ollama(chunks: list[dict[str, Any]], heard: Heard) -> None:
    for one in chunks:
        heard.text += one["message"]["content"]
        for call in one["message"].get("tool_calls") or ():
            heard.name += call["function"]["name"]
            heard.pieces.append(json.dumps(call["function"]["arguments"]))
        heard.reason = one.get("done_reason", "")


READ = dict(zip(PATHS, (chats, messages, responses, ollama), strict=True))


async def heard(at: Site, path: str, *, stream: bool, tokens: int = 99) -> Heard:
    text, collected = await post(at, path, asked(path, tokens) | {"stream": stream}), Heard()
    lines = [json.loads(line) for line in text.splitlines()] if stream and path == "/api/chat" else None
    READ[path](lines or (data(text) if stream else [json.loads(text)]), collected)
    return collected


@pytest.mark.parametrize("pieces", [CALL, XML], ids=["JSON", "tags"])
async def test_names_and_arguments_come_as_they_are_written(
    pieces: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = RecordedEngine.decode

    def slow(self: RecordedEngine, rows: Any) -> Any:
        time.sleep(0.015)
        return decode(self, rows)

    monkeypatch.setattr(RecordedEngine, "decode", slow)
    async with saying(tmp_path / "m.gguf", pieces) as at:
        for path in PATHS:
            streamed, whole = await heard(at, path, stream=True), await heard(at, path, stream=False)
            assert streamed.arguments == whole.arguments == WHOLE and streamed.name == "write", path
            assert len(streamed.pieces) >= (len(WORDS) / 2 if path != "/api/chat" else 1)
            assert streamed.reason == whole.reason and streamed.text == whole.text == ""
            assert streamed.reason in ("tool_calls", "tool_use", "completed", "stop")


@pytest.mark.parametrize("pieces", [CALL, XML], ids=["JSON", "tags"])
async def test_a_cut_call_ends_with_the_length_reason(pieces: list[str], tmp_path: Path) -> None:
    """Dialects with argument pieces show a part of it; it never becomes content."""
    reasons = ("length", "max_tokens", "incomplete", "length")
    async with saying(tmp_path / "m.gguf", pieces) as at:
        for path, reason in zip(PATHS, reasons, strict=True):
            for stream in (True, False):
                result = await heard(at, path, stream=stream, tokens=CUT)
                assert (result.reason, result.text) == (reason, ""), path
                if path == "/api/chat":  # arguments are an object there, so half of one cannot be sent
                    assert (result.name, result.arguments) == ("", "")
                else:
                    assert result.name == "write" and '{"text": "word0 word' in result.arguments.replace("\\", ""), path
                    assert len(result.arguments) < len(WHOLE)


async def test_a_broken_call_is_sent_as_written(tmp_path: Path) -> None:
    async with saying(tmp_path / "m.gguf", BROKEN) as at:
        for path in PATHS:
            for stream in (True, False):
                result = await heard(at, path, stream=stream)
                assert result.name == "write" and "oops" in result.arguments and result.text == "", path
                assert result.reason in ("tool_calls", "tool_use", "completed", "stop")


@pytest.mark.parametrize("tokens", [CUT, 99], ids=["cut", "broken"])
async def test_a_session_continues_after_a_call_with_invalid_json(tokens: int, tmp_path: Path) -> None:
    """Its KV is reused, too."""
    async with saying(tmp_path / "m.gguf", BROKEN) as at, at.http() as http:
        path = "/v1/chat/completions"
        first = (await http.post(path, json=asked(path, tokens))).json()
        message = first["choices"][0]["message"]
        (call,) = message["tool_calls"]
        with pytest.raises(ValueError, match=r"."):
            json.loads(call["function"]["arguments"])
        result = {"role": "tool", "tool_call_id": call["id"], "content": "these arguments are no JSON"}
        more = (await http.post(path, json=asked(path, 1) | {"messages": [*HI, message, result]})).json()
        known = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
        assert more["usage"]["prompt_tokens_details"]["cached_tokens"] >= (known - 1) // 16 * 16
        path = "/v1/responses"
        first = (await http.post(path, json=asked(path, tokens))).json()
        (item,) = first["output"]
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "no JSON"}
        items = [{"role": "user", "content": "hi"}, item, result]
        answer = await http.post(path, json=asked(path, 1) | {"input": items})
        assert answer.status_code == 200 and answer.json()["usage"]["input_tokens_details"]["cached_tokens"] >= 16
