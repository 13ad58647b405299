"""Log-probabilities in every dialect that has them: with the text of their tokens, content and reasoning apart, none
for calls, tags and stop sequences.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cairn.config.config import Config
from cairn.frontend.service import Service
from cairn.text.tokens.gguf import CONTROL
from tests.api.chat.test_order import data, post
from tests.api.sockets import Site, site
from tests.scripted_model import CHATML, write_scripted

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CALL = ["<tool_call>", "\n", '{"name": "f", ', '"arguments": {}', "}", "\n", "</tool_call>"]
PIECES = ["<think>", "\n", "Let ", "me ", "see", "\n", "</think>", "\n\n", "It ", "is ", "so", ".", "\n", *CALL]
THOUGHT, SAID = ["Let ", "me ", "see"], ["It ", "is ", "so", "."]
TEMPLATE = CHATML + "{# <think> {{ tools | tojson }} <tool_call> #}{% for t in tools or [] %}{{ t }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scripted") / "m.gguf"
    return write_scripted(path, PIECES, template=TEMPLATE, kinds=dict.fromkeys(TAGS, CONTROL))


@pytest.fixture
async def at(model: Path) -> AsyncIterator[Site]:
    service = await Service.start(Config(model=str(model), kv_gb=0.05, kv_disk=False), in_process=True)
    try:
        async with site(service) as scripted:
            yield scripted
    finally:
        await service.close()


def asked(**more: Any) -> dict[str, Any]:
    return {"messages": HI, "tools": [TOOL], "temperature": 0, "max_tokens": 40, **more}


def texts(entries: list[dict[str, Any]] | None) -> list[str]:
    assert all(entry["logprob"] <= 0 for entry in entries or ())
    return [entry["token"] for entry in entries or ()]


async def test_chats(at: Site) -> None:
    body = asked(logprobs=True, top_logprobs=2)
    (choice,) = json.loads(await post(at, "/v1/chat/completions", body))["choices"]
    assert choice["message"]["content"] == "".join(SAID) and choice["message"]["tool_calls"]
    assert choice["message"]["reasoning_content"] == "".join(THOUGHT)
    assert texts(choice["logprobs"]["content"]) == SAID and texts(choice["logprobs"]["reasoning_content"]) == THOUGHT
    assert all(len(entry["top_logprobs"]) == 2 for entry in choice["logprobs"]["content"])
    chunks = [item["choices"][0] for item in data(await post(at, "/v1/chat/completions", body | {"stream": True}))]
    for kind in ("content", "reasoning_content"):
        results = [
            (chunk["delta"][kind], texts((chunk["logprobs"] or {}).get(kind)))
            for chunk in chunks
            if chunk["delta"].get(kind)
        ]
        assert all(scores for _, scores in results), "each chunk with a text has its log-probabilities"
        assert "".join(text for text, _ in results) == "".join(token for _, scores in results for token in scores)
    left = [chunk["logprobs"] for chunk in chunks if not chunk["delta"].get("content")]
    assert all(not (scores or {}).get("content") for scores in left)


async def test_chats_without_reasoning_have_no_logprobs_of_it(at: Site) -> None:
    body = asked(logprobs=True, reasoning={"exclude": True})
    (choice,) = json.loads(await post(at, "/v1/chat/completions", body))["choices"]
    assert texts(choice["logprobs"]["content"]) == SAID and "reasoning_content" not in choice["logprobs"]
    streamed = await post(at, "/v1/chat/completions", body | {"stream": True})
    results = [item["choices"][0]["logprobs"] for item in data(streamed)]
    assert [token for result in results if result for token in texts(result["content"])] == SAID
    assert "see" not in streamed


async def test_responses(at: Site) -> None:
    body = {"input": "hi", "store": False, "temperature": 0, "include": ["message.output_text.logprobs"]}
    body |= {"tools": [TOOL["function"] | {"type": "function"}]}
    events = data(await post(at, "/v1/responses", body | {"stream": True}))
    whole = json.loads(await post(at, "/v1/responses", body))
    for output in (events[-1]["response"]["output"], whole["output"]):
        (message,) = [item for item in output if item["type"] == "message"]
        assert texts(message["content"][0]["logprobs"]) == SAID
    results = [
        (event["delta"], texts(event["logprobs"])) for event in events if event["type"] == "response.output_text.delta"
    ]
    assert all("".join(scores) == text for text, scores in results)
    tokens = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert tokens == PIECES.index("It "), "reasoning and its tags"
    assert events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] == tokens


async def test_ollama(at: Site) -> None:
    body = {"messages": HI, "tools": [TOOL], "options": {"temperature": 0}, "logprobs": True}
    lines = [json.loads(line) for line in (await post(at, "/api/chat", body)).splitlines()]
    whole = json.loads(await post(at, "/api/chat", body | {"stream": False}))
    for chunks in (lines, [whole]):
        assert [token for line in chunks for token in texts(line.get("logprobs"))] == SAID
        assert [token for line in chunks for token in texts(line.get("thinking_logprobs"))] == THOUGHT
    assert all(line.get("logprobs") for line in lines if line["message"]["content"])
    hidden = json.loads(await post(at, "/api/chat", body | {"stream": False, "think": False}))
    assert texts(hidden["logprobs"]) == SAID and "thinking_logprobs" not in hidden


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stop", [None, "so"])
async def test_every_chunk_of_a_text_completion_has_them(at: Site, count: int, echo: bool, stop: str | None) -> None:
    """Also the last chunk, which holds the finish reason."""
    body = {"prompt": ["hi", "you"][: 1 + (count > 1)], "temperature": 0, "max_tokens": 12, "logprobs": count}
    body |= {"echo": echo, "stop": stop, "n": 1 if echo else 2}
    whole = json.loads(await post(at, "/v1/completions", body))["choices"]
    chunks = [chunk["choices"][0] for chunk in data(await post(at, "/v1/completions", body | {"stream": True}))]
    assert all(chunk["logprobs"]["tokens"] for chunk in chunks)
    for choice in whole:
        pieces = [one for one in chunks if one["index"] == choice["index"]]
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [choice["finish_reason"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [value for piece in pieces for value in piece["logprobs"][name]] == choice["logprobs"][name]


async def test_reasoning_is_counted_alike_however_it_is_read(at: Site) -> None:
    """In a stream, as a whole answer, and where all events were there before the first read."""
    body = {"messages": HI, "max_tokens": 40, "temperature": 0, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = json.loads(await post(at, "/v1/messages", body))["usage"]["output_tokens_details"]
    streamed = data(await post(at, "/v1/messages", body | {"stream": True}))
    end = next(one for one in streamed if one["type"] == "message_delta")
    assert whole == end["usage"]["output_tokens_details"] == {"thinking_tokens": PIECES.index("It ")}
