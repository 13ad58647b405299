"""Anthropic's Messages API: wire shapes, prompts, errors, and the anthropic client over a real port."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn.api.anthropic.schemas import MessagesBody, chat_of
from cairn.api.chat.parse import parse
from cairn.api.http.call import BodyBudget, HTTPCall
from cairn.config.config import Config
from cairn.config.values import Secret
from cairn.types.errors import CairnError, ContextTooLong, GenerationFailed, Overloaded
from cairn.types.outputs import Delta, Done, FinishReason, TokenKind, ToolCallDelta, Usage
from cairn.types.request import OutputFormat
from cairn.types.stats import CacheReport
from tests.api.scripted import Heard, ScriptedService, done
from tests.api.sockets import Site, answer, request_bytes, site
from tests.scripted_model import CONTROLS, write_scripted
from tests.service.tiny import TEMPLATE, make_model, serving

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "weather", "description": "of a place", "input_schema": {"type": "object", "properties": {}}}
CALL = ToolCallDelta(index=0, id="call_1", name="weather", arguments='{"place": "Oslo"}')


def body(**more: Any) -> dict[str, Any]:
    return {"model": "claude-any", "max_tokens": 64, "messages": HI, **more}


async def post(at: Site, value: Any, path: str = "/v1/messages", **headers: str) -> httpx.Response:
    async with at.http() as http:
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        return await http.post(path, json=value, headers=named)


def events(text: str) -> list[tuple[str, Any]]:
    """Return each event of a stream as (event, data)."""
    results = []
    for block in text.split("\n\n")[:-1]:
        first, _, data = block.partition("\n")
        assert first.startswith("event: ") and data.startswith("data: "), block
        value = json.loads(data.removeprefix("data: "))
        assert value["type"] == first.removeprefix("event: ")
        results.append((value["type"], value))
    return results


# ------------------------------------------------------------------------------------------------------- the answers


async def test_message_object() -> None:
    service = ScriptedService(
        lambda request: [
            Delta(reasoning="hm", tokens=(1, 2), kinds=bytes([TokenKind.REASONING, TokenKind.REASONING_TAG])),
            Delta(text="Hel", tokens=(3,), kinds=bytes([TokenKind.CONTENT])),
            Delta(text="lo", tokens=(4,)),
            Delta(tool_calls=(CALL,), tokens=(5,)),
            done(FinishReason.TOOL_CALLS, prompt=2, completion=5),
        ]
    )
    async with site(service) as at:
        response = await post(at, body(thinking={"type": "enabled", "budget_tokens": 1024}, tools=[TOOL]))
    assert response.status_code == 200 and response.headers["request-id"]
    reply = response.json()
    assert reply["id"].startswith("msg_") and reply["model"] == "scripted"
    assert (reply["type"], reply["role"], reply["stop_reason"]) == ("message", "assistant", "tool_use")
    thinking, text, call = reply["content"]
    assert thinking["thinking"] == "hm" and thinking["signature"]
    assert text == {"type": "text", "text": "Hello"}
    assert call == {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"place": "Oslo"}}
    assert reply["usage"]["output_tokens"] == 5
    assert reply["usage"]["output_tokens_details"] == {"thinking_tokens": 2}


async def test_stream_of_thinking_text_and_a_call() -> None:
    steps = [
        Delta(reasoning="h", tokens=(1,)),
        Delta(reasoning="m", tokens=(2,)),
        Delta(text="Hel", tokens=(3,)),
        Delta(text="lo", tokens=(4,)),
        Delta(tool_calls=(CALL,), tokens=(5,)),
        done(FinishReason.TOOL_CALLS, completion=5),
    ]
    async with site(ScriptedService(lambda request: list(steps))) as at:
        response = await post(at, body(stream=True, thinking={"type": "adaptive"}, tools=[TOOL]))
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert [kind for kind, _ in chunks] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    deltas = [value["delta"]["type"] for kind, value in chunks if kind == "content_block_delta"]
    assert deltas == ["thinking_delta"] * 2 + ["signature_delta"] + ["text_delta"] * 2 + ["input_json_delta"]
    assert [value["index"] for kind, value in chunks if kind == "content_block_start"] == [0, 1, 2]
    assert chunks[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert chunks[-2][1]["usage"]["output_tokens"] == 5


async def test_thinking_is_shown_only_if_asked_for() -> None:
    steps = [Delta(reasoning="hm", tokens=(1,)), Delta(text="Hello", tokens=(2,)), done()]
    service = ScriptedService(lambda request: list(steps))
    async with site(service) as at:
        for more in ({}, {"thinking": {"type": "disabled"}}):
            assert [one["type"] for one in (await post(at, body(**more))).json()["content"]] == ["text"]
            kinds = [kind for kind, _ in events((await post(at, body(stream=True, **more))).text)]
            assert kinds.count("content_block_start") == 1
        assert {args["enable_thinking"] for _, _, _, args in service.prompts} == {False}
        service.prompts.clear()
        await post(at, body(thinking={"type": "enabled", "budget_tokens": 2000}))
        assert service.prompts[0][3] == {"enable_thinking": True}


async def test_omitted_thinking_is_restored_from_its_signature() -> None:
    steps = [Delta(reasoning="a secret thought", tokens=(1,)), Delta(text="Hello", tokens=(2,)), done()]
    service = ScriptedService(lambda request: list(steps))
    omitted = {"type": "adaptive", "display": "omitted"}
    async with site(service) as at:
        whole = (await post(at, body(thinking=omitted))).json()["content"]
        streamed = events((await post(at, body(thinking=omitted, stream=True))).text)
        signature = whole[0]["signature"]
        assert whole[0]["thinking"] == "" and "secret" not in json.dumps(whole)
        assert [value["delta"] for _, value in streamed if value.get("delta", {}).get("type") == "signature_delta"] == [
            {"type": "signature_delta", "signature": signature}
        ]
        history = [*HI, {"role": "assistant", "content": whole}, {"role": "user", "content": "more"}]
        assert (await post(at, body(messages=history))).status_code == 200
    (assistant,) = [message for message in service.prompts[-1][0] if message["role"] == "assistant"]
    assert assistant == {"role": "assistant", "content": "Hello", "reasoning_content": "a secret thought"}


@pytest.mark.parametrize(
    ("reason", "more", "tokens", "want"),
    [
        (FinishReason.STOP, {}, (104, 256), ("end_turn", None)),
        (FinishReason.LENGTH, {"max_tokens": 5}, (104,), ("max_tokens", None)),
        (FinishReason.LENGTH, {"max_tokens": 5000}, (104,), ("model_context_window_exceeded", None)),
        (FinishReason.STOP, {"stop_sequences": ["zz", "ab"]}, (104, 97, 98), ("stop_sequence", "ab")),
        (FinishReason.STOP, {"stop_sequences": ["ab"]}, (104, 256), ("end_turn", None)),
        # "cd" was in the reasoning.
        (FinishReason.STOP, {"stop_sequences": ["cd", "ab"]}, (99, 100, 104, 97, 98), ("stop_sequence", "ab")),
    ],
)
async def test_stop_reasons(reason: FinishReason, more: Any, tokens: Any, want: Any) -> None:
    async with site(ScriptedService(lambda request: [Delta(text="h", tokens=tokens), done(reason)])) as at:
        reply = (await post(at, body(**more))).json()
        assert (reply["stop_reason"], reply["stop_sequence"]) == want
        *_, (_, delta), _ = events((await post(at, body(stream=True, **more))).text)
        assert (delta["delta"]["stop_reason"], delta["delta"]["stop_sequence"]) == want


async def test_a_chat_that_ends_with_an_answer_is_counted_but_not_answered() -> None:
    chat = body(messages=[*HI, {"role": "assistant", "content": "Hello"}])
    async with site(ScriptedService()) as at:
        assert (await post(at, chat)).status_code == 400
        counted = await post(at, chat | {"max_tokens": None}, "/v1/messages/count_tokens")
        assert counted.status_code == 200 and counted.json()["input_tokens"] > 0


async def test_the_parts_of_usage_sum_to_the_prompt() -> None:
    usage = Usage(prompt_tokens=100, completion_tokens=2, cached_tokens=48)
    end = Done(reason=FinishReason.STOP, usage=usage, cache=CacheReport(computed=52, pool=48))
    service = ScriptedService(lambda request: [Delta(text="x", tokens=(1,)), end])
    text = [{"role": "user", "content": "x" * 100}]
    async with site(service) as at:
        used = (await post(at, body(messages=text))).json()["usage"]
        *_, (_, delta), _ = events((await post(at, body(messages=text, stream=True))).text)
    for one in (used, delta["usage"]):
        assert one["cache_read_input_tokens"] == 48 and one["cache_creation_input_tokens"] == 48
        assert one["input_tokens"] == 4 and one["cache_creation"]["ephemeral_5m_input_tokens"] == 48


@pytest.mark.parametrize("size", range(14, 35))
@pytest.mark.parametrize("cached", [0, 16])
async def test_input_tokens_are_never_zero(size: int, cached: int) -> None:
    """Clients read `input_tokens:

    0` as "not counted", so a fully cached prompt of whole blocks reports one token as not cached.
    """
    cached = min(cached, (size - 1) // 16 * 16)
    usage = Usage(prompt_tokens=size, completion_tokens=2, cached_tokens=cached)
    end = Done(reason=FinishReason.STOP, usage=usage, cache=CacheReport(computed=size - cached, pool=cached))
    service = ScriptedService(lambda request: [Delta(text="x", tokens=(1,)), end])
    asked = [{"role": "user", "content": "x" * size}]
    async with site(service) as at:
        used = (await post(at, body(messages=asked))).json()["usage"]
        response = (await post(at, {"input": "x" * size, "store": False}, "/v1/responses")).json()["usage"]
    assert 1 <= used["input_tokens"] <= 16 and used["cache_read_input_tokens"] == cached
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(used[part] for part in parts) == size
    assert response["input_tokens_details"]["cache_write_tokens"] == used["cache_creation_input_tokens"]


async def test_a_message_of_no_tokens_warms_the_cache(tmp_path: Path) -> None:
    text = [{"role": "user", "content": "What is asked later. " * 10}]
    async with serving(make_model(tmp_path / "tiny")) as service, site(service) as at:
        warm = (await post(at, body(messages=text, max_tokens=0))).json()
        assert warm["content"] == [] and warm["stop_reason"] == "max_tokens" and warm["usage"]["output_tokens"] == 0
        usage = (await post(at, body(messages=text, max_tokens=2))).json()["usage"]
        assert usage["cache_read_input_tokens"] > 200 and usage["cache_creation_input_tokens"] == 0


async def test_a_message_reports_what_differs_from_the_one_before(tmp_path: Path) -> None:
    types = pytest.importorskip("anthropic.types")
    known = {
        one.model_fields["type"].annotation for one in get_args(get_args(types.cache_miss_reason.CacheMissReason)[0])
    }
    literals = {get_args(one)[0] for one in known}
    said = set()
    rules = "An agent's rules are long. " * 4
    first = body(max_tokens=2, system=rules, tools=[], messages=[{"role": "user", "content": rules}])
    async with serving(make_model(tmp_path / "tiny")) as service, site(service) as at:
        before = (await post(at, first)).json()
        assert before["diagnostics"] is None
        asked = {"diagnostics": {"previous_message_id": before["id"]}}
        marked = [{"type": "text", "text": rules, "cache_control": {"type": "ephemeral"}}]
        assert (await post(at, first | asked | {"system": marked})).json()["diagnostics"] is None
        for more, reason in (
            ({"system": "Other rules."}, "system_changed"),
            ({"messages": [{"role": "user", "content": "Another question"}]}, "messages_changed"),
            ({"diagnostics": {"previous_message_id": "msg_x"}}, "previous_message_not_found"),
        ):
            cache_miss_reason = (await post(at, first | asked | more)).json()["diagnostics"]["cache_miss_reason"]
            assert cache_miss_reason["type"] == reason
            assert cache_miss_reason.get("cache_missed_input_tokens", 1) > 0
            said.add(reason)
            (_, start), *_ = events((await post(at, first | asked | more | {"stream": True})).text)
            assert start["message"]["diagnostics"]["cache_miss_reason"] == cache_miss_reason
    assert said <= literals


async def test_pings_while_the_prompt_is_read() -> None:
    service = ScriptedService(lambda request: [0.35, Delta(text="hi", tokens=(1,)), done()])
    async with site(service, Config(heartbeat=0.1)) as at:
        kinds = [kind for kind, _ in events((await post(at, body(stream=True))).text)]
    assert kinds[:2] == ["message_start", "ping"] and kinds.count("message_start") == 1
    assert kinds.index("content_block_start") > kinds.index("ping")


# ------------------------------------------------------------------------------------------------------- the prompts


def read(value: dict[str, Any]) -> dict[str, Any]:
    heard: Any = Heard()
    return chat_of(parse(MessagesBody, value, Config()), heard, lambda name: True)


def test_blocks_and_texts_of_equal_text_are_the_same_chat() -> None:
    cached = {"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    late = {"role": "system", "content": "late"}
    plain = read(body(system="be kind", messages=[*HI, late]))
    blocks = [{"type": "text", "text": "late", "cache_control": {"type": "ephemeral"}}]
    said = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {**late, "content": blocks}]
    assert read(body(system=[cached], messages=said)) == plain
    assert [message["role"] for message in plain["messages"]] == ["system", "user", "system"], "in its place"


@pytest.mark.parametrize("version", ["2.1.331.003; cc_entrypoint=cli; cch=ab12f;", "2.1.331.d13;", "1"])
def test_the_attribution_line_is_dropped(version: str) -> None:
    line = f"x-anthropic-billing-header: cc_version={version}"
    text = "You are Claude Code."
    want = read(body(system=text))
    assert read(body(system=[{"type": "text", "text": line}, {"type": "text", "text": text}])) == want
    assert read(body(system=f"{line}\n{text}")) == want
    assert read(body(system=[{"type": "text", "text": f"{line}\n\n{text}"}])) == want
    assert "messages" in want and line not in json.dumps(read(body(system=line)))
    inside = read(body(system=f"{text}\n{line}"))["messages"][0]["content"]
    assert line in inside, "only at the beginning"


def test_the_older_name_of_a_format() -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "string"}}}}
    wanted = read(body(output_config={"format": form}))
    assert wanted["response_format"]["json_schema"]["schema"] == form["schema"]
    assert read(body(output_format=form)) == read(body(output_format=form, output_config={"format": form})) == wanted
    with pytest.raises(CairnError, match=r"output_config\.format and output_format differ"):
        read(body(output_format=form, output_config={"format": {"type": "json_schema", "schema": {}}}))


def test_a_tool_turn() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "whatever"}
    called = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"z": 1, "a": [2]}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "rain"}],
        "is_error": False,
    }
    chat = read(
        body(
            messages=[
                *HI,
                {"role": "assistant", "content": [thought, {"type": "text", "text": "Let me see."}, called]},
                {"role": "user", "content": [result, {"type": "text", "text": "well?"}]},
            ],
            tools=[TOOL | {"defer_loading": False}, {"type": "web_search_20250305", "name": "web_search"}],
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        )
    )
    _, assistant, tool, user = chat["messages"]
    (call,) = assistant["tool_calls"]
    assert assistant["reasoning_content"] == "hm" and assistant["content"] == "Let me see."
    assert call["function"] == {"name": "weather", "arguments": '{"z": 1, "a": [2]}'}, "in the order it was called with"
    assert tool == {"role": "tool", "tool_call_id": "t1", "content": "rain"}
    assert user == {"role": "user", "content": "well?"}
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["weather"]
    assert chat["parallel_tool_calls"] is False and chat["tool_choice"] == "auto"


async def test_what_claude_code_sends_is_accepted(tmp_path: Path) -> None:
    async with serving(make_model(tmp_path / "tiny")) as service, site(service) as at:
        value = body(
            max_tokens=4,
            stream=True,
            metadata={"user_id": json.dumps({"device_id": "d", "session_id": "0f7c3a12-aaaa-bbbb-cccc-0123456789ab"})},
            system=[
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.331.003; cc_entrypoint=cli;"},
                {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            ],
            thinking={"type": "adaptive", "display": "omitted"},
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            output_config={"effort": "high"},
            some_new_beta={"of": "tomorrow"},
        )
        beta = "claude-code-20250219,interleaved-thinking-2025-05-14,tomorrow-2027-01-01"
        response = await post(at, value, "/v1/messages?beta=true", anthropic_beta=beta, anthropic_version="2023-06-01")
        assert response.status_code == 200, response.text
        assert "some_new_beta" in response.headers["x-cairn-warning"]
        assert events(response.text)[-1][0] == "message_stop"


async def test_equal_texts_are_found_in_the_cache_however_they_are_sent(tmp_path: Path) -> None:
    """With a real tokenizer: the second request differs in shape, attribution and cache_control, and nothing is
    computed again.
    """
    long = "An agent's rules are long. " * 8
    first = body(
        max_tokens=2,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.331.003;"},
            {"type": "text", "text": long, "cache_control": {"type": "ephemeral"}},
        ],
        messages=[*HI, {"role": "system", "content": [{"type": "text", "text": long}]}],
    )
    second = body(
        max_tokens=2,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.331.d13;"},
            {"type": "text", "text": long},
        ],
        messages=[*HI, {"role": "system", "content": long}],
    )
    async with serving(make_model(tmp_path / "tiny")) as service, site(service) as at:
        one = (await post(at, first)).json()["usage"]
        two = (await post(at, second)).json()["usage"]
        count = (await post(at, second | {"max_tokens": None}, "/v1/messages/count_tokens")).json()
    size = one["input_tokens"] + one["cache_creation_input_tokens"] + one["cache_read_input_tokens"]
    assert one["cache_read_input_tokens"] == 0 and size > 400
    assert two["cache_read_input_tokens"] >= size - 16 and two["cache_creation_input_tokens"] == 0
    assert count == {"input_tokens": size}


STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
HOISTING = (
    "{% for m in messages if m.role == 'system' %}<|im_start|>system\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


@pytest.mark.parametrize("template", [STRICT, HOISTING])
async def test_a_later_system_message_keeps_its_place_in_any_template(tmp_path: Path, template: str) -> None:
    """Covers templates that raise on a later system message, and templates that move it to the front."""
    folder = make_model(tmp_path / "strict")
    details = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(details | {"chat_template": template}))
    messages = [*HI, {"role": "system", "content": "late"}, {"role": "user", "content": "more"}]
    async with serving(folder) as service:
        prompt = await service.chat.prompt([{"role": "system", "content": "first"}, *messages])
        text = service.tokenizer.decode(prompt.tokens, skip_special=False)
    assert text.index("hi") < text.index("<system-reminder>\nlate\n</system-reminder>") < text.index("more")
    assert text.count("<|im_start|>user") == 1, "consecutive user turns are merged"


# -------------------------------------------------------------------------------------------------------- the errors


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("full", retry_after=3.0), 429, "rate_limit_error"),
        (GenerationFailed("no"), 500, "api_error"),
        (ContextTooLong("long", field="prompt", prompt_tokens=9000, context=128), 400, "invalid_request_error"),
    ],
)
async def test_errors_are_anthropics(error: CairnError, status: int, kind: str) -> None:
    async with site(ScriptedService(lambda request: [error])) as at:
        response = await post(at, body())
        assert response.status_code == status
        reply = response.json()
        assert reply["type"] == "error" and reply["error"]["type"] == kind
        if isinstance(error, ContextTooLong):
            assert reply["error"]["message"] == "prompt is too long: 9000 tokens > 128 maximum"
    async with site(ScriptedService(lambda request: [Delta(text="h", tokens=(1,)), 0.01, error])) as at:
        *_, (name, value) = events((await post(at, body(stream=True))).text)
        assert name == "error" and value["error"]["type"] == kind


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "images"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [*HI, {"role": "assistant", "content": "Well,"}]}, "prefill"),
        ({"messages": []}, "messages"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
        ({"tool_choice": {"type": []}}, "tool_choice.type"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": 99}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"system": [{"type": "image"}]}, "system[0]"),
    ],
)
async def test_a_body_that_is_wrong_is_refused_by_name(more: dict[str, Any], said: str) -> None:
    async with site(ScriptedService()) as at:
        response = await post(at, body(**more))
        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert said in response.json()["error"]["message"]


FIELDS = st.sampled_from(
    ["type", "text", "role", "content", "id", "name", "input", "thinking", "signature", "tool_use_id", "source", "data"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "text", "user", "tool_use", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=12,
)
PARTS = st.dictionaries(
    st.sampled_from(["system", "tools", "tool_choice", "thinking", "output_config", "metadata", "stop_sequences"]),
    JSON,
    max_size=3,
)


@settings(max_examples=60 if settings.default.derandomize else 150, suppress_health_check=list(HealthCheck))
@given(JSON, PARTS)
def test_any_body_becomes_a_chat_or_an_error(messages: Any, parts: dict[str, Any]) -> None:
    heard: Any = Heard()
    try:
        result = chat_of(parse(MessagesBody, body(messages=messages) | parts, Config()), heard, lambda name: True)
    except CairnError as error:
        assert 400 <= error.status < 500
    else:
        assert isinstance(result["messages"], list)


async def test_a_stream_that_is_resumed_keeps_its_dialect() -> None:
    steps = [Delta(text="Hel", tokens=(1,)), 0.01, Delta(text="lo", tokens=(2,)), 0.01, GenerationFailed("no")]
    async with site(ScriptedService(lambda request: list(steps))) as at, at.http() as http:
        whole = await post(at, body(stream=True), x_cairn_resumable="1")
        id = whole.headers["x-request-id"]
        rest = await http.get(f"/v1/requests/{id}/events?after=2")
        assert whole.text.endswith(rest.text) and rest.text.startswith("id: 3\n")
        plain = "".join(line for line in whole.text.splitlines(keepends=True) if not line.startswith("id: "))
        kinds = [kind for kind, _ in events(plain)]
        assert kinds[0] == "message_start" and kinds[-1] == "error"


async def test_keys_of_both_kinds() -> None:
    config = Config(api_key=(Secret("k1"),))
    async with site(ScriptedService(), config) as at:
        assert (await post(at, body(), x_api_key="k1")).status_code == 200
        assert (await post(at, body(), authorization="Bearer k1")).status_code == 200
        refused = await post(at, body())
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"


async def test_what_the_guard_refuses_has_the_same_shape() -> None:
    async with site(ScriptedService(), Config(max_body_mib=1)) as at:
        reader, writer = await at.raw()
        writer.write(request_bytes("POST", "/v1/messages?beta=true", b"", "Content-Length: 9999999"))
        status, _, text = await answer(reader)
        assert status == 413 and json.loads(text)["error"]["type"] == "request_too_large"


# -------------------------------------------------------------------------------------------------------- the client


async def test_the_anthropic_client(tmp_path: Path) -> None:
    anthropic = pytest.importorskip("anthropic")
    pieces = ["<think>", "I see", ".", "</think>", "\n\n", "The sky", " is", " blue."]
    template = TEMPLATE + "{# enable_thinking <think> #}"
    kinds = dict.fromkeys([*CONTROLS], 3) | {"<think>": 4, "</think>": 4}
    path = write_scripted(tmp_path / "said.gguf", pieces, template=template, kinds=kinds)
    async with serving(path, engine="cpu") as service, site(service) as at:
        client = anthropic.AsyncAnthropic(base_url=at.url, api_key="none", max_retries=0)
        asked = {"model": "any", "max_tokens": 100, "messages": HI, "extra_body": {"temperature": 0}}
        thinks = {"type": "enabled", "budget_tokens": 1024}
        whole = await client.messages.create(**asked, thinking=thinks)
        assert [one.type for one in whole.content] == ["thinking", "text"]
        assert whole.content[0].thinking == "I see." and whole.content[1].text == "The sky is blue."
        assert whole.stop_reason == "end_turn" and whole.usage.output_tokens == len(pieces) + 1
        async with client.messages.stream(**asked, thinking=thinks) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == "The sky is blue."
        assert final.content[0] == whole.content[0] and final.content[1].text == whole.content[1].text
        assert final.usage.cache_read_input_tokens is not None
        assert [model.id async for model in await client.models.list()] == [service.name]
        assert (await client.models.retrieve(service.name)).max_input_tokens == service.info.context
        count = await client.messages.count_tokens(model="any", messages=HI)
        assert count.input_tokens > 0
        history = [*HI, {"role": "assistant", "content": final.content}, {"role": "user", "content": "go on"}]
        again = await client.messages.create(**asked | {"messages": history}, thinking=thinks)
        assert again.usage.cache_read_input_tokens >= 16, "the answer came back as it was sampled"
        with pytest.raises(anthropic.BadRequestError, match="tools"):
            await client.messages.create(**asked, tools=[{"name": "a b", "input_schema": {}}])
        await client.close()


async def test_the_budget_of_thinking_bounds_it() -> None:
    service = ScriptedService(lambda request: [Delta(text="ok", tokens=(1,)), done()])
    service.chat.output = OutputFormat(reasoning=True)
    async with site(service) as at:
        for thinking, budget in (
            ({"type": "enabled", "budget_tokens": 1500}, 1500),
            ({"type": "enabled"}, None),
            ({"type": "adaptive"}, None),
            ({"type": "disabled"}, None),
        ):
            service.streams.clear()
            assert (await post(at, body(thinking=thinking))).status_code == 200
            assert service.streams[0].request.reasoning_budget == budget, thinking
        for wrong in (-1, 1.5, True, "many", 1 << 31):
            refused = await post(at, body(thinking={"type": "enabled", "budget_tokens": wrong}))
            assert refused.status_code == 400 and "thinking.budget_tokens" in refused.json()["error"]["message"]


def test_many_blocks_of_one_message_are_joined_once() -> None:
    call = HTTPCall({"type": "http", "path": "/v1/messages", "headers": []}, None, None, 1, BodyBudget(1, 1))  # type: ignore[arg-type]
    text, result = {"type": "text", "text": "x" * 450}, {"type": "tool_result", "tool_use_id": "c", "content": "r"}

    def chat(*messages: dict[str, Any]) -> list[dict[str, Any]]:
        body = MessagesBody(messages=[*messages, {"role": "user", "content": "q"}], max_tokens=1)
        made: list[dict[str, Any]] = chat_of(body, call, lambda name: False)["messages"]
        return made[:-1]

    mixed = chat({"role": "user", "content": [text, text, result, text, result, result, text, text]})
    assert [(one["role"], len(one["content"])) for one in mixed] == [
        ("user", 901),
        ("tool", 1),
        ("user", 450),
        ("tool", 1),
        ("tool", 1),
        ("user", 901),
    ]
    began = time.process_time()
    assert len(chat({"role": "user", "content": [text] * 30_000})[0]["content"]) == 451 * 30_000 - 1
    assert time.process_time() - began < 2.0  # it took half a minute before
