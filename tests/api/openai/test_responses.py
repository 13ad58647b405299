"""OpenAI's Responses API: wire shapes, prompts, errors, and stored responses."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cairn.agents.agents import Agents
from cairn.api.chat.parse import parse
from cairn.api.http.auth import salts
from cairn.api.openai.responses_schemas import ResponseBody, Tools, chat_of
from cairn.config.config import Config
from cairn.engine.fake import FakeEngine
from cairn.system.posix import SystemClock, SystemFiles, SystemRng
from cairn.types.errors import CairnError, ContextTooLong, GenerationFailed, Overloaded
from cairn.types.outputs import Delta, FinishReason, TokenKind, ToolCallDelta
from tests.api.process import Served, served
from tests.api.scripted import Heard, ScriptedService, done
from tests.api.sockets import Site, site
from tests.scripted_model import CONTROLS, write_scripted
from tests.service.tiny import TEMPLATE, make_model, serving

TOOL = {"type": "function", "name": "weather", "description": "of a place", "parameters": {"type": "object"}}
CALL = ToolCallDelta(index=0, id="call_1", name="weather", arguments='{"place": "Oslo"}')
STEPS = [
    Delta(reasoning="h", tokens=(1,), kinds=bytes([TokenKind.REASONING])),
    Delta(reasoning="m", tokens=(2,), kinds=bytes([TokenKind.REASONING])),
    Delta(text="Hel", tokens=(3,)),
    Delta(text="lo", tokens=(4,)),
    Delta(tool_calls=(CALL,), tokens=(5,)),
    done(FinishReason.TOOL_CALLS, prompt=2, completion=5),
]


def body(**more: Any) -> dict[str, Any]:
    return {"model": "gpt-any", "input": "hi", "store": False, **more}


async def post(at: Site, value: Any, path: str = "/v1/responses") -> httpx.Response:
    async with at.http() as http:
        return await http.post(path, json=value)


def events(text: str) -> list[Any]:
    """Return the events of a stream without comments; fail unless their numbers rise by one."""
    results = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(("id: ", ":"))]
        if not lines:
            continue
        kind, data = lines
        value = json.loads(data.removeprefix("data: "))
        assert kind == "event: " + value["type"]
        results.append(value)
    numbers = [value["sequence_number"] for value in results]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return results


KNOWN = {get_args(kind.model_fields["type"].annotation)[0] for kind in get_args(get_args(ResponseStreamEvent)[0])}
"""Event types that the client library knows."""


# ------------------------------------------------------------------------------------------------------- the answers


async def test_response_object() -> None:
    async with site(ScriptedService(lambda request: list(STEPS))) as at:
        answer = await post(at, body(tools=[TOOL], include=["reasoning.encrypted_content"]))
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    TypeAdapter(Response).validate_python(reply)
    assert reply["id"].startswith("resp_") and reply["object"] == "response" and reply["status"] == "completed"
    reasoning, message, call = reply["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}] and reasoning["summary"] == []
    assert message["content"][0]["text"] == "Hello" and message["status"] == "completed"
    assert (call["type"], call["call_id"], call["name"]) == ("function_call", "call_1", "weather")
    assert call["arguments"] == '{"place": "Oslo"}'
    assert reply["usage"]["output_tokens_details"] == {
        "reasoning_tokens": 2,
        "accepted_prediction_tokens": 1,
        "rejected_prediction_tokens": 2,
    }
    assert reply["usage"]["input_tokens_details"]["cached_tokens"] == 0 and reply["usage"]["total_tokens"] == 7


@pytest.mark.parametrize("summary", [None, "auto"])
async def test_stream_of_all_kinds_of_items(summary: str | None) -> None:
    async with site(ScriptedService(lambda request: list(STEPS))) as at:
        answer = await post(at, body(stream=True, tools=[TOOL], reasoning={"summary": summary, "effort": "high"}))
    chunks = events(answer.text)
    kinds = [value["type"] for value in chunks]
    thought = [
        "response.reasoning_summary_part.added" if summary else "response.content_part.added",
        *[f"response.reasoning_{'summary_text' if summary else 'text'}.delta"] * 2,
        f"response.reasoning_{'summary_text' if summary else 'text'}.done",
        "response.reasoning_summary_part.done" if summary else "response.content_part.done",
    ]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        *thought,
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds) <= KNOWN
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for value in chunks:
        adapter.validate_python(value)
    items = [value["item"] for value in chunks if value["type"] == "response.output_item.done"]
    assert chunks[-1]["response"]["output"] == items and chunks[-1]["response"]["usage"]["output_tokens"] == 5
    assert [value["output_index"] for value in chunks if value["type"] == "response.output_item.added"] == [0, 1, 2]


async def test_an_answer_that_was_cut_is_incomplete() -> None:
    async with site(ScriptedService(lambda request: [Delta(text="x"), done(FinishReason.LENGTH)])) as at:
        whole = (await post(at, body(max_output_tokens=1))).json()
        last = events((await post(at, body(stream=True, max_output_tokens=1))).text)[-1]
    assert last["type"] == "response.incomplete"
    for response in (whole, last["response"]):
        assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_silent_streams_get_heartbeat_events() -> None:
    service = ScriptedService(lambda request: [0.35, Delta(text="hi", tokens=(1,)), done()])
    async with site(service, Config(heartbeat=0.1)) as at:
        kinds = [value["type"] for value in events((await post(at, body(stream=True))).text)]
    assert kinds.count("response.in_progress") >= 3 and kinds[-1] == "response.completed"


async def test_tools_of_a_namespace_and_of_free_text_are_called_by_their_own_names() -> None:
    calls = (
        ToolCallDelta(index=0, id="c0", name="agents__spawn", arguments='{"n": 1}'),
        ToolCallDelta(index=1, id="c1", name="apply_patch", arguments='{"input": "*** Begin"}'),
    )
    service = ScriptedService(lambda request: [Delta(tool_calls=calls, tokens=(1,)), done(FinishReason.TOOL_CALLS)])
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    tools = [
        {"type": "namespace", "name": "agents", "description": "d", "tools": [{"type": "function", "name": "spawn"}]},
        {"type": "custom", "name": "apply_patch", "description": "patches", "format": grammar},
        {"type": "web_search"},
    ]
    async with site(service) as at:
        answer = await post(at, body(tools=tools))
        assert "tools[2] is ignored" in answer.headers["x-cairn-warning"]
        spawn, patch = answer.json()["output"]
        streamed = events((await post(at, body(tools=tools, stream=True))).text)
    assert (spawn["name"], spawn["namespace"], spawn["arguments"]) == ("spawn", "agents", '{"n": 1}')
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", "*** Begin")
    assert [one["function"]["name"] for one in service.prompts[0][1]] == ["agents__spawn", "apply_patch"]
    assert "start: /x/" in service.prompts[0][1][1]["function"]["description"]
    assert [value["input"] for value in streamed if value["type"] == "response.custom_tool_call_input.done"] == [
        "*** Begin"
    ]
    assert {value["type"] for value in streamed} <= KNOWN


async def test_a_free_text_tool_follows_its_grammar_or_gives_a_warning() -> None:
    """A Lark grammar without recursion becomes a pattern; for any other one the client gets a warning that it does not
    apply.
    """
    nested = 'start: "(" start ")" | "x"\n'

    def custom(syntax: Any, definition: Any = "[a-z]+") -> dict[str, Any]:
        form = {"type": "grammar", "syntax": syntax, "definition": definition}
        return {"type": "custom", "name": f"of_{syntax}", "format": form}

    async with site(ScriptedService()) as at:
        spoken = custom("lark", nested) | {"name": "spoken"}
        answer = await post(at, body(tools=[custom("regex"), custom("lark", "start: X+\nX: /[a-z]/\n"), spoken]))
        assert answer.status_code == 200
        assert answer.headers["x-cairn-warning"] == (
            "tools[2]: the model reads this grammar and is not held to it: it comes back to its rule start"
        )
        (_, (regex, lark, function), *_), wanted = at.app.service.prompts[0], at.app.service.wanted[0]  # type: ignore[union-attr]
        assert regex["function"]["parameters"]["properties"]["input"]["pattern"] == "^(?:[a-z]+)$"
        pattern = lark["function"]["parameters"]["properties"]["input"]["pattern"]
        assert re.fullmatch(pattern, "abc") and not re.fullmatch(pattern, "a1")
        assert "start: X+" in lark["function"]["description"] and nested in function["function"]["description"]
        assert "pattern" not in function["function"]["parameters"]["properties"]["input"]
        assert wanted.choice.strict == ("of_regex", "of_lark")
        for wrong, field in ((custom("ebnf"), "syntax"), (custom("lark", 5), "definition")):
            refused = await post(at, body(tools=[wrong]))
            assert refused.status_code == 400 and refused.json()["error"]["param"] == f"tools[0].format.{field}"


async def test_a_warning_that_no_header_can_hold_is_still_sent() -> None:
    async with site(ScriptedService(lambda request: list(STEPS))) as at:
        answer = await post(at, body(tools=[{"type": "a\r\nx-evil: 1\0"}]))
    assert answer.status_code == 200 and "x-evil" not in answer.headers
    assert "a tool of type a??x-evil: 1? runs on a server" in answer.headers["x-cairn-warning"]


# ------------------------------------------------------------------------------------------------------- the prompts


def read(value: dict[str, Any]) -> dict[str, Any]:
    heard: Any = Heard()
    result = parse(ResponseBody, value, Config())
    return chat_of(result, Tools(result.tools, heard), heard)


def test_texts_and_parts_of_equal_text_are_the_same_chat() -> None:
    plain = read(body(instructions="be kind"))
    part = {"type": "input_text", "text": "hi", "prompt_cache_breakpoint": {}}
    assert read(body(instructions="be kind", input=[{"role": "user", "content": "hi"}])) == plain
    item = {"type": "message", "role": "user", "content": [part], "id": "msg_1", "status": "completed"}
    assert read(body(instructions="be kind", input=[item])) == plain
    assert [message["role"] for message in plain["messages"]] == ["system", "user"]


async def test_the_items_of_an_answer_come_back_as_the_message_that_was_sampled() -> None:
    """Whatever fields are included, and wherever developer messages stand."""
    service = ScriptedService(lambda request: list(STEPS))
    async with site(service) as at:
        for more in (
            {},
            {"reasoning": {"summary": "auto"}},
            {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}},
        ):
            output = (await post(at, body(tools=[TOOL], **more))).json()["output"]
            result = {"type": "function_call_output", "call_id": "call_1", "output": "rain", "id": "fco_1"}
            late = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "late"}]}
            again = body(tools=[TOOL], input=[{"role": "user", "content": "hi"}, *output, result, late], **more)
            assert (await post(at, again)).status_code == 200
            _, answer, tool, developer = service.prompts[-1][0]
            remembered = service.remembered[-1][3]
            assert answer == remembered and answer["reasoning_content"] == "hm"
            assert tool == {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
            assert developer["content"] == "late"


def test_reasoning_of_another_maker_is_passed_over() -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAABo..."}
    chat = read(body(input=[{"role": "user", "content": "hi"}, item, {"role": "assistant", "content": "yes"}]))
    assert chat["messages"][1] == {"role": "assistant", "content": "yes"}


def test_choices_and_formats_are_those_of_a_chat() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    chat = read(body(tools=[TOOL], tool_choice={"type": "function", "name": "weather"}, text={"format": form}))
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert chat["response_format"]["json_schema"] == {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert "response_format" not in read(body(text={"format": {"type": "text"}, "verbosity": "low"}))


# -------------------------------------------------------------------------------------------------------- the errors


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Overloaded("full", retry_after=3.0), 429, "rate_limit_exceeded"),
        (GenerationFailed("no"), 500, "server_error"),
        (ContextTooLong("long", field="prompt"), 400, "context_length_exceeded"),
    ],
)
async def test_failures_have_the_codes_that_clients_know(error: CairnError, status: int, code: str) -> None:
    async with site(ScriptedService(lambda request: [error])) as at:
        assert (await post(at, body())).status_code == status
    async with site(ScriptedService(lambda request: [Delta(text="h"), 0.01, error])) as at:
        last = events((await post(at, body(stream=True))).text)[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == code
    if not isinstance(error, Overloaded | ContextTooLong):
        async with site(ScriptedService(lambda request: [0.01, error])) as at:
            at_once = events((await post(at, body(stream=True))).text)
        assert [one["type"] for one in at_once] == ["response.created", "response.in_progress", "response.failed"]
    if isinstance(error, Overloaded):
        assert "try again in 3 s" in last["response"]["error"]["message"]


async def test_what_is_too_long_fails_in_the_stream_where_clients_look_for_it(tmp_path: Path) -> None:
    async with serving(make_model(tmp_path / "tiny")) as service, site(service) as at:
        long = body(input="x" * 5000, stream=True)
        answer = await post(at, long)
        created, _, last = events(answer.text)
        assert answer.status_code == 200 and created["type"] == "response.created"
        assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "context_length_exceeded"
        whole = await post(at, long | {"stream": False})
        assert whole.status_code == 400 and whole.json()["error"]["code"] == "context_length_exceeded"
        assert whole.json()["error"]["param"] == "input"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"input": 5}, "input must be"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "judge", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": 5}]}, "input[0].id must be a text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0] is an image"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": []}, "input is empty"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": 3}]}, "tools[0].tools"),
        ({"background": True}, "background needs a response that is stored"),
        ({"conversation": "conv_1"}, "conversation needs a response that is stored"),
        ({"previous_response_id": "resp_0000000000000001"}, "previous_response_id"),
        ({"max_output_tokens": "many"}, "max_output_tokens"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"input": [{"role": "user", "content": [{"type": []}]}]}, "input[0].content[0].type"),
        ({"tools": [{"type": "custom", "name": "c", "description": 5}]}, "tools[0].description"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": 5}}, "tool_choice names a tool"),
        ({"temperature": 99}, "temperature"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    ],
)
async def test_a_body_that_is_wrong_is_refused_by_name(more: dict[str, Any], said: str) -> None:
    async with site(ScriptedService()) as at:
        answer = await post(at, body(**more))
        assert answer.status_code == 400, answer.text
        assert said in answer.json()["error"]["message"]


FIELDS = st.sampled_from(
    ["type", "text", "role", "content", "id", "name", "input", "call_id", "output", "arguments", "summary", "tools"]
)
KINDS = ["message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "input_text", "namespace"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "text", "user", "assistant", *KINDS]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=12,
)
PARTS = st.dictionaries(
    st.sampled_from(["instructions", "tools", "tool_choice", "reasoning", "text", "metadata", "include"]),
    JSON,
    max_size=3,
)


@settings(max_examples=60 if settings.default.derandomize else 150, suppress_health_check=list(HealthCheck))
@given(JSON, PARTS)
def test_any_body_becomes_a_chat_or_an_error(given_input: Any, parts: dict[str, Any]) -> None:
    try:
        result = read(body(input=given_input) | parts)
    except CairnError as error:
        assert 400 <= error.status < 500
    else:
        assert isinstance(result["messages"], list)


# ---------------------------------------------------------------------------------------------- responses that are kept


@asynccontextmanager
async def keeping(folder: Path, model: Path, site_config: Config | None = None, **options: Any) -> AsyncIterator[Site]:
    """Yield a site that stores responses in a folder."""
    async with serving(model, **options) as service, site(service, site_config) as at:
        clock = SystemClock()
        agents = await Agents.open(service, SystemFiles(), folder, clock, SystemRng(), Config(), salts(Config()))
        at.app.state.attribution.opened(agents)
        try:
            yield at
        finally:
            await agents.close()


def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every token take 20 ms."""
    decode = FakeEngine.decode

    def slow(self: FakeEngine, rows: Any) -> Any:
        time.sleep(0.02)
        return decode(self, rows)

    monkeypatch.setattr(FakeEngine, "decode", slow)


def kept(**more: Any) -> dict[str, Any]:
    return {"input": "hi", "max_output_tokens": 8, "temperature": 0, **more}


async def test_a_response_goes_on_from_another_and_is_found_in_the_cache(tmp_path: Path) -> None:
    rules = "An agent's rules are long. " * 6
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny")) as at, at.http() as http:
        one = (await post(at, kept(instructions=rules, metadata={"a": "b"}))).json()
        assert one["store"] is True
        shown = (await http.get(f"/v1/responses/{one['id']}")).json()
        for name in ("status", "output", "instructions", "metadata", "created_at", "previous_response_id"):
            assert shown[name] == one[name], name
        assert shown["usage"]["input_tokens"] == one["usage"]["input_tokens"]
        two = (await post(at, kept(instructions=rules, input="more", previous_response_id=one["id"]))).json()
        other = (await post(at, kept(instructions=rules, input="else", previous_response_id=one["id"]))).json()
        for later in (two, other):
            before = one["usage"]["total_tokens"]
            assert later["usage"]["input_tokens_details"]["cached_tokens"] >= before - 16 - 1
        items = (await http.get(f"/v1/responses/{two['id']}/input_items")).json()
        texts = [item["content"][0]["text"] for item in items["data"]]
        assert texts == ["more", one["output"][0]["content"][0]["text"], "hi"], "all items it was made from, last first"
        changed = (await post(at, kept(instructions="Other rules.", input="x", previous_response_id=two["id"]))).json()
        count = {"instructions": "Other rules.", "input": "x", "previous_response_id": two["id"]}
        counted = (await post(at, count, "/v1/responses/input_tokens")).json()
        assert counted["input_tokens"] == changed["usage"]["input_tokens"] > 40
        aside = (await post(at, kept(store=False, instructions=rules, previous_response_id=one["id"]))).json()
        assert aside["store"] is False
        assert (await http.get(f"/v1/responses/{aside['id']}")).status_code == 404
        assert (await http.delete(f"/v1/responses/{one['id']}")).json()["deleted"] is True
        assert (await http.get(f"/v1/responses/{one['id']}")).status_code == 404
        gone = await post(at, kept(previous_response_id=one["id"]))
        assert gone.status_code == 400 and gone.json()["error"]["code"] == "previous_response_not_found"
        three = await post(at, kept(instructions=rules, previous_response_id=two["id"]))
        assert three.status_code == 200, "later responses stay"


async def test_a_response_reports_what_differs_from_another(tmp_path: Path) -> None:
    rules = "An agent's rules are long. " * 4
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny")) as at:
        one = (await post(at, kept(instructions=rules))).json()
        assert "prompt_cache_diagnostics" not in one
        same = kept(instructions=rules, prompt_cache_options={"comparison_response_id": one["id"]})
        for more, kind, reason in (
            ({"input": "more", "previous_response_id": one["id"]}, "cache_hit", None),
            ({}, "cache_hit", None),
            ({"instructions": "Other rules."}, "cache_miss", "input_changed"),
            ({"instructions": "x", "text": {"verbosity": "low"}}, "cache_miss", "verbosity_changed"),
            ({"prompt_cache_options": {"comparison_response_id": "resp_1"}}, "comparison_response_not_found", None),
        ):
            answer = (await post(at, same | more)).json()
            TypeAdapter(Response).validate_python(answer)
            prompt_cache_diagnostics = answer["prompt_cache_diagnostics"]
            assert (prompt_cache_diagnostics["type"], prompt_cache_diagnostics.get("reason")) == (kind, reason)


async def test_a_conversation_is_compacted_to_items_that_stand_for_it(tmp_path: Path) -> None:
    service = ScriptedService(lambda request: [Delta(text="They said hi.", tokens=(1,)), done()])
    service.info.context = 4096
    said = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
    ]
    async with site(service) as at:
        answer = (
            await post(at, {"model": "any", "input": said, "instructions": "rules"}, "/v1/responses/compact")
        ).json()
        assert answer["object"] == "response.compaction" and answer["usage"]["total_tokens"] > 0
        developer, item = answer["output"]
        assert developer["role"] == "developer" and item["type"] == "compaction"
        asked = [message["role"] for message in service.prompts[-1][0]]
        assert asked == ["system", "developer", "user", "assistant", "user"]
        await post(at, body(input=[*answer["output"], {"role": "user", "content": "more"}]))
        kept, summary, more = service.prompts[-1][0]
        assert kept == {"role": "developer", "content": "be kind"} and more["content"] == "more"
        assert summary == {"role": "user", "content": "Summary of the conversation so far:\nThey said hi."}
        foreign = {"type": "compaction", "encrypted_content": "gAAAA"}
        assert (await post(at, body(input=[foreign]))).status_code == 400


async def test_events_are_read_again_from_any_of_them_on(tmp_path: Path) -> None:
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny")) as at, at.http() as http:
        all_events = events((await post(at, kept(stream=True))).text)
        id = all_events[0]["response"]["id"]
        for after in (-1, 0, 3, len(all_events) - 2):
            query = "?stream=true" + ("" if after < 0 else f"&starting_after={after}")
            again = events((await http.get(f"/v1/responses/{id}{query}")).text)
            assert again == all_events[after + 1 :], after
        assert (await http.get(f"/v1/responses/{id}?starting_after=x")).status_code == 400


async def test_a_response_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch)
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny")) as at:
        reader: list[Any] = []

        async def read_stream() -> None:
            async with at.http() as http, http.stream("POST", "/v1/responses", json=kept(**LONG)) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        reader.append(json.loads(line.removeprefix("data: ")))

        task = asyncio.create_task(read_stream())
        while len(reader) < 5:
            await asyncio.sleep(0.01)
        id = reader[0]["response"]["id"]
        async with at.http() as http:
            assert (await http.get(f"/v1/responses/{id}")).json()["status"] == "in_progress"
            assert (await http.post(f"/v1/responses/{id}/cancel", json={})).json()["status"] == "cancelled"
        await task
        assert reader[-1]["type"] == "response.failed"
        refused = await post(at, kept(previous_response_id=id))
        assert refused.status_code == 409


async def test_a_response_in_the_background_needs_no_reader(tmp_path: Path) -> None:
    """Nobody reads it for longer than the grace period."""
    service = make_model(tmp_path / "tiny")
    async with keeping(tmp_path / "agents", service, site_config=Config(reconnect_grace=0.05)) as at, at.http() as http:
        asked = kept(background=True, max_output_tokens=600)
        queued = (await post(at, asked)).json()
        assert queued["status"] == "queued" and queued["output"] == []
        while (response := (await http.get(f"/v1/responses/{queued['id']}")).json())["status"] == "in_progress":
            await asyncio.sleep(0.02)
        assert response["status"] in ("completed", "incomplete") and response["background"] is True
        assert response["usage"]["output_tokens"] > 0
        streamed = events((await post(at, asked | {"stream": True})).text)
        kinds = [value["type"] for value in streamed]
        assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
        assert (await post(at, asked | {"store": False})).status_code == 400


async def test_a_prewarming_request_fills_the_cache_and_has_no_output(tmp_path: Path) -> None:
    text = "What is asked later. " * 10
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny")) as at, at.http() as http:
        warm = (await post(at, kept(input=text, prompt_cache_options={"prewarm": True}))).json()
        assert warm["status"] == "completed" and warm["output"] == [] and warm["usage"]["output_tokens"] == 0
        assert (await http.get(f"/v1/responses/{warm['id']}")).status_code == 404
        usage = (await post(at, kept(input=text))).json()["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] >= usage["input_tokens"] - 16


async def test_a_client_that_sends_everything_again_finds_the_answers_as_they_were_sampled(tmp_path: Path) -> None:
    """Also after a restart: the sampled token ids are in the log beside the turn."""
    pieces = ["<think>", "I see", ".", "</think>", "\n\n", "The sky", " is", " blue."]
    kinds = dict.fromkeys([*CONTROLS], 3) | {"<think>": 4, "</think>": 4}
    path = write_scripted(tmp_path / "said.gguf", pieces, template=TEMPLATE + "{# <think> #}", kinds=kinds)
    say = [{"role": "user", "content": "hi"}]
    async with keeping(tmp_path / "agents", path, engine="cpu") as at:
        say += (await post(at, kept(input=say, max_output_tokens=50))).json()["output"]
    async with keeping(tmp_path / "agents", path, engine="cpu") as at, at.http() as http:
        again = await post(at, kept(input=[*say, {"role": "user", "content": "more"}]))
        agent = (await http.get(f"/v1/agents/{again.json()['id']}/turns")).json()["data"][0]
        whole = at.app.state.attribution.open()
        ids = await whole.context("default", again.json()["id"])
        assert at.app.service is not None
        text = at.app.service.tokenizer.decode(ids, skip_special=False)
    assert text.count("<think>I see.</think>") == 2, "a template without reasoning did not render it"
    assert agent["messages"][1]["reasoning_content"] == "I see."


async def test_a_conversation_is_continued_by_name(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny")
    async with keeping(tmp_path / "agents", model) as at:
        client = at.openai()
        begun: list[Any] = [{"type": "message", "role": "user", "content": "before"}]
        made = await client.conversations.create(items=begun, metadata={"a": "b"})
        assert made.id.startswith("conv_") and made.metadata == {"a": "b"}
        ask: dict[str, Any] = {"model": "any", "conversation": made.id, "max_output_tokens": 8, "temperature": 0}
        one = await client.responses.create(input="first", **ask)
        assert one.conversation is not None and one.conversation.id == made.id
        await client.conversations.items.create(made.id, items=[{"role": "user", "content": "aside"}])
        two = await client.responses.create(input="second", **ask)
        assert one.usage is not None and two.usage is not None
        assert two.usage.input_tokens_details.cached_tokens >= one.usage.total_tokens - 17
        with pytest.raises(openai.BadRequestError, match="conversation"):
            await client.responses.create(input="x", store=False, **ask)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(input="x", previous_response_id=one.id, **ask)
        await client.close()
    async with keeping(tmp_path / "agents", model) as at:  # a restart
        client = at.openai()
        items = [item async for item in await client.conversations.items.list(made.id, order="asc")]
        texts = [item.content[0].text for item in items if item.type == "message" and item.role == "user"]
        assert texts == ["before", "first", "aside", "second"]
        assert len(items) == 6
        empty = await client.conversations.create()
        with pytest.raises(openai.NotFoundError, match="no item"):
            await client.conversations.items.delete(items[0].id, conversation_id=empty.id)  # type: ignore[arg-type]
        result = await client.conversations.items.retrieve(items[2].id, conversation_id=made.id)  # type: ignore[arg-type]
        assert result == items[2]
        await client.conversations.items.delete(items[0].id, conversation_id=made.id)  # type: ignore[arg-type]
        left = [item async for item in await client.conversations.items.list(made.id, order="asc", limit=2)]
        assert len(left) == 5
        # The same list of ids names the same items after a deletion.
        await client.conversations.items.delete(items[4].id, conversation_id=made.id)  # type: ignore[arg-type]
        left = [item async for item in await client.conversations.items.list(made.id, order="asc")]
        assert left == [items[1], items[2], items[3], items[5]]
        await client.conversations.items.delete(items[5].id, conversation_id=made.id)  # type: ignore[arg-type]
        added = await client.conversations.items.create(made.id, items=[{"role": "user", "content": "late"}])
        assert added.data[0].id not in {item.id for item in items}, "no id is given out twice"
        counted = await client.responses.input_tokens.count(model="any", input="x", conversation=made.id)
        alone = await client.responses.input_tokens.count(model="any", input="x")
        assert counted.input_tokens > alone.input_tokens
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_tokens.count(model="any", input="x", conversation="conv_0")
        assert (await client.conversations.update(made.id, metadata={"c": "d"})).metadata == {"c": "d"}
        await client.responses.create(model="any", input="third", conversation=made.id, max_output_tokens=4)
        left = [item async for item in await client.conversations.items.list(made.id, order="asc")]
        assert [one.id for one in left[:4]] == [items[1].id, items[2].id, items[3].id, added.data[0].id]
        assert len({one.id for one in left}) == len(left)
        async with at.http() as http:
            route, last = f"/v1/conversations/{made.id}/items", left[3].id
            before = (await http.get(route, params={"order": "asc", "limit": 2, "before": last})).json()
        assert [one["id"] for one in before["data"]] == [one.id for one in left[1:3]] and before["has_more"] is True
        await client.conversations.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(made.id)
        assert (await client.responses.retrieve(two.id)).id == two.id, "its responses stay"
        await client.close()


async def test_a_conversation_is_locked_while_a_response_runs_and_passes_over_one_that_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch)
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny")) as at, at.http() as http:
        conversation = (await post(at, {}, "/v1/conversations")).json()["id"]
        first = kept(conversation=conversation, max_output_tokens=4)
        assert (await post(at, first)).status_code == 200
        running = (await post(at, kept(conversation=conversation, background=True, max_output_tokens=900))).json()
        refused = await post(at, first)
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "conversation_locked"
        await http.post(f"/v1/responses/{running['id']}/cancel")
        again = await post(at, first)
        assert again.status_code == 200, again.text
        items = (await http.get(f"/v1/conversations/{conversation}/items?order=asc")).json()["data"]
        assert [item["role"] for item in items] == ["user", "assistant"] * 2


async def test_erasing_the_last_response_restores_the_conversation_before_it(tmp_path: Path) -> None:
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny")) as at, at.http() as http:
        items = f"/v1/conversations/{(await post(at, {}, '/v1/conversations')).json()['id']}/items"
        ask = kept(conversation=items.split("/")[3])
        await post(at, ask)
        last = (await post(at, ask)).json()
        assert len((await http.get(items)).json()["data"]) == 4
        await http.delete(f"/v1/responses/{last['id']}")
        assert len((await http.get(items)).json()["data"]) == 2
        added = await post(at, {"items": [{"role": "user", "content": "more"}]}, items)
        assert [item["content"][0]["text"] for item in added.json()["data"]] == ["more"]
        assert (await post(at, ask)).status_code == 200


async def test_memory_for_a_conversation_is_bounded(tmp_path: Path) -> None:
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny")) as at:
        path = f"/v1/conversations/{(await post(at, {}, '/v1/conversations')).json()['id']}"
        item = {"role": "user", "content": "x" * 3_000_000}
        assert (await post(at, {"items": [item]}, path + "/items")).status_code == 200
        more = await post(at, {"items": [item]}, path + "/items")
        assert more.status_code == 400 and more.json()["error"]["param"] == "items"
        for where in (path, "/v1/conversations"):
            long = await post(at, {"metadata": {"a": "x" * 513}}, where)
            assert long.status_code == 400 and "metadata.a" in long.text


async def test_a_response_and_a_conversation_are_exported_and_imported(tmp_path: Path) -> None:
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny")) as at, at.http() as http:
        conversation = (await post(at, {"items": [{"role": "user", "content": "x" * 900}]}, "/v1/conversations")).json()
        one = (await post(at, kept())).json()
        for id in (conversation["id"], one["id"]):
            file = (await http.get(f"/v1/agents/{id}/export")).content
            headers = {"content-type": "application/octet-stream"}
            made = await http.post(f"/v1/agents/import?id={id[:4]}_2", content=file, headers=headers)
            assert made.status_code in (200, 201), made.text
        assert len((await http.get("/v1/conversations/conv_2/items")).json()["data"]) == 1
        shown = (await http.get("/v1/responses/resp_2")).json()
        assert shown["id"] == "resp_2" and shown["output"][0]["content"] == one["output"][0]["content"]
        assert (await post(at, kept(previous_response_id="resp_2", conversation=None))).status_code == 200
        repeated = {"type": "auto", "more": "x" * (1 << 22)}
        assert (await post(at, kept(tools=[TOOL], tool_choice=repeated))).status_code == 400


async def test_an_agent_with_a_responses_id_is_not_a_response(tmp_path: Path) -> None:
    """Nor is it a conversation. Clients choose agents' names and metadata, so these prove nothing."""
    looks: list[dict[str, str]] = [
        {"object": "response"},
        {"object": "response", "root": "r", "head": "{}", "called": "{}", "include": ""},
        {"object": "conversation", "state": "x"},
        {"object": "conversation", "metadata": "{}", "state": '{"head": "", "more": 5}', "before": "[]"},
    ]
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny")) as at, at.http() as http:
        for number, metadata in enumerate(looks):
            kind = metadata["object"]
            id = f"{kind[:4]}_{number}"
            assert (await post(at, {"id": id, "metadata": metadata}, "/v1/agents")).status_code == 201
            shown = await http.get(f"/v1/{kind}s/{id}")
            assert shown.status_code == 404 and f"no {kind} '{id}'" in shown.text
            field = "previous_response_id" if kind == "response" else kind
            assert (await post(at, kept(**{field: id}))).status_code in (400, 404)


LONG: dict[str, Any] = {"stream": True, "max_output_tokens": 1500}


def test_responses_survive_a_server_that_is_killed(tmp_path: Path) -> None:
    folder = str(tmp_path / "agents")
    with served(agents_dir=folder) as server:
        one = server.post("/v1/responses", kept(instructions="Be brief."))
        plain = server.post("/v1/responses", kept(store=False))
        server.signal(signal.SIGKILL)
        server.wait()
    with served(agents_dir=folder) as server:
        with httpx.Client(base_url=server.url, trust_env=False, verify=False, timeout=30) as http:
            shown = http.get(f"/v1/responses/{one['id']}").json()
            assert shown["output"] == one["output"] and shown["status"] == one["status"]
            assert http.get(f"/v1/responses/{plain['id']}").status_code == 404
        two = server.post("/v1/responses", kept(instructions="Be brief.", previous_response_id=one["id"]))
        assert two["usage"]["input_tokens"] > one["usage"]["total_tokens"]
    assert isinstance(server, Served)


# -------------------------------------------------------------------------------------------------------- the client


async def test_the_openai_client(tmp_path: Path) -> None:
    pieces = ["<think>", "I see", ".", "</think>", "\n\n", "The sky", " is", " blue."]
    template = TEMPLATE + "{# enable_thinking <think> #}"
    kinds = dict.fromkeys([*CONTROLS], 3) | {"<think>": 4, "</think>": 4}
    path = write_scripted(tmp_path / "said.gguf", pieces, template=template, kinds=kinds)
    async with keeping(tmp_path / "agents", path, engine="cpu") as at:
        client = at.openai()
        whole = await client.responses.create(model="any", input="hi", temperature=0)
        assert whole.output_text == "The sky is blue." and whole.status == "completed"
        async with client.responses.stream(model="any", input="hi", temperature=0) as stream:
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
            final = await stream.get_final_response()
        assert text == "The sky is blue." and final.output_text == text
        again = await client.responses.create(model="any", input="more", previous_response_id=whole.id, temperature=0)
        assert again.usage is not None and again.usage.input_tokens_details.cached_tokens >= 16
        assert (await client.responses.retrieve(again.id)).output_text == again.output_text
        items = await client.responses.input_items.list(again.id)
        assert [item.type async for item in items] == ["message", "message", "reasoning", "message"]
        count = await client.responses.input_tokens.count(model="any", input="hi")
        assert count.input_tokens == whole.usage.input_tokens if whole.usage else 0
        await client.responses.delete(again.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(again.id)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(model="any", input="x", previous_response_id=again.id)
        await client.close()


async def test_fields_of_open_responses_are_reported_and_sampling_applies(tmp_path: Path) -> None:
    """Open Responses requires five fields in every response; four sampling options are those of chats."""
    service = ScriptedService()
    sampling = {"presence_penalty": 0.5, "frequency_penalty": -0.25, "seed": 7, "stop": ["END"]}
    async with site(service) as at:
        asked = body(max_tool_calls=3, safety_identifier="me", service_tier="flex", **sampling)
        answer = (await post(at, asked)).json()
        plain = (await post(at, body(stop=""))).json()
        wrong = await post(at, body(presence_penalty=9))
    params = service.streams[0].request.sampling
    assert (params.presence_penalty, params.frequency_penalty, params.seed) == (0.5, -0.25, 7)
    assert service.streams[0].request.stop == ("END",) and not service.streams[1].request.stop
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "presence_penalty"
    five = ("presence_penalty", "frequency_penalty", "max_tool_calls", "safety_identifier", "service_tier")
    assert [answer[name] for name in five] == [0.5, -0.25, 3, "me", "default"]
    assert [plain[name] for name in five] == [0.0, 0.0, None, None, "default"]
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny")) as at, at.http() as http:
        made = (await post(at, kept(max_tool_calls=3, presence_penalty=0.5))).json()
        shown = (await http.get(f"/v1/responses/{made['id']}")).json()
        assert [shown[name] for name in five] == [made[name] for name in five] == [0.5, 0.0, 3, None, "default"]


async def test_only_a_response_that_runs_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny")) as at, at.http() as http:
        for more, status in (
            ({}, "incomplete"),
            ({"prompt_cache_options": None, "max_output_tokens": 2000}, "completed"),
        ):
            made = (await post(at, kept(**more))).json()
            assert made["status"] in (status, "incomplete")
            again = await http.post(f"/v1/responses/{made['id']}/cancel")
            assert again.status_code == 400 and f"is {made['status']}" in again.json()["error"]["message"]
        slowly(monkeypatch)
        running = (await post(at, kept(background=True, max_output_tokens=1500))).json()["id"]
        answers = [(await http.post(f"/v1/responses/{running}/cancel")) for _ in range(2)]
        assert [answer.json()["status"] for answer in answers] == ["cancelled"] * 2, (
            "deleting twice is like deleting once"
        )
        assert (await http.post("/v1/responses/resp_00000000000000ff/cancel")).status_code == 404


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/completions", "/v1/chat/completions"])
async def test_a_negative_number_of_tokens_is_refused_by_its_name(path: str) -> None:
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    asked = (
        {"input": "hi", "store": False} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "x"}]}
    )
    asked = {"prompt": "hi"} if path == "/v1/completions" else asked
    async with site(ScriptedService()) as at:
        for most in (-1, -5, -1.0):
            answer = await post(at, asked | {name: most}, path)
            assert answer.status_code == 400 and f"{name} must be from 1" in answer.text, answer.text
        assert (await post(at, asked | {name: 5}, path)).status_code == 200
