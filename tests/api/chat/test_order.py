"""Order of text and calls: text behind a call stays behind it, in streams and whole answers of every ordered
dialect.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cairn.frontend.request_state import joined
from cairn.text.chat.messages import MessageBuilder, plain, said_of
from cairn.types.outputs import Delta, Event, FinishReason, ToolCallDelta
from tests.api.openai.test_responses import keeping
from tests.api.scripted import ScriptedService, done
from tests.api.sockets import Site, site
from tests.scripted_model import CONTROLS, write_scripted
from tests.text import text_models

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def call(index: int, arguments: str = '{"city": "Oslo"}') -> ToolCallDelta:
    return ToolCallDelta(index=index, id=f"call_{index}", name="weather", arguments=arguments)


SAID = [
    Delta(text="First ", tokens=(1,)),
    Delta(text="this.", tokens=(2,)),
    Delta(tool_calls=(call(0, '{"city": '),), tokens=(3,)),
    Delta(tool_calls=(ToolCallDelta(index=0, arguments='"Oslo"}'),), tokens=(4,)),
    Delta(text="Then that.", tokens=(5,)),
    Delta(tool_calls=(call(1),), tokens=(6,)),
    Delta(tool_calls=(call(2),), tokens=(7,)),
    Delta(text="At last.", tokens=(8,)),
]
ORDER = ["First this.", "call_0", "Then that.", "call_1", "call_2", "At last."]


def service(*, together: bool) -> ScriptedService:
    """Return a scripted service; with `together` all events arrive in one batch."""
    steps: list[Any] = (
        [joined([*SAID, done(FinishReason.TOOL_CALLS)])] if together else [*SAID, done(FinishReason.TOOL_CALLS)]
    )
    return ScriptedService(lambda request: list(steps))


async def post(at: Site, path: str, body: dict[str, Any]) -> str:
    async with at.http() as http:
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.text


def data(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


def in_order(pieces: list[tuple[str, str]]) -> list[str]:
    """Join adjacent pieces of text; a call is represented by its id, once."""
    order: list[str] = []
    texts = False
    for kind, value in pieces:
        if kind == "text" and texts:
            order[-1] += value
        elif value:
            order.append(value)
        texts = kind == "text"
    return order


@pytest.mark.parametrize("together", [False, True])
async def test_chats(together: bool) -> None:
    async with site(service(together=together)) as at:
        chunks = data(await post(at, "/v1/chat/completions", {"messages": HI, "tools": [TOOL], "stream": True}))
    results = []
    for delta in (chunk["choices"][0]["delta"] for chunk in chunks):
        results += [("text", delta["content"])] if delta.get("content") else []
        results += [("call", tool_call.get("id", "")) for tool_call in delta.get("tool_calls", ())]
    assert in_order(results) == ORDER


@pytest.mark.parametrize("together", [False, True])
async def test_messages(together: bool) -> None:
    body = {"messages": HI, "max_tokens": 99}
    async with site(service(together=together)) as at:
        events = data(await post(at, "/v1/messages", body | {"stream": True}))
        whole = json.loads(await post(at, "/v1/messages", body))["content"]
    results = []
    for event in events:
        if event.get("content_block", {}).get("type") == "tool_use":
            results.append(("call", event["content_block"]["id"]))
        elif event.get("delta", {}).get("type") == "text_delta":
            results.append(("text", event["delta"]["text"]))
    assert in_order(results) == ORDER
    assert [block.get("text") or block["id"] for block in whole] == ORDER
    assert [block["input"] for block in whole if block["type"] == "tool_use"] == [{"city": "Oslo"}] * 3


@pytest.mark.parametrize("together", [False, True])
async def test_responses(together: bool) -> None:
    body = {"input": "hi", "store": False}
    async with site(service(together=together)) as at:
        events = data(await post(at, "/v1/responses", body | {"stream": True}))
        whole = json.loads(await post(at, "/v1/responses", body))["output"]

    def shown(items: list[dict[str, Any]]) -> list[str]:
        return [item["call_id"] if item["type"] == "function_call" else item["content"][0]["text"] for item in items]

    assert shown([event["item"] for event in events if event["type"] == "response.output_item.done"]) == ORDER
    assert shown(events[-1]["response"]["output"]) == shown(whole) == ORDER
    assert [item["arguments"] for item in whole if item["type"] == "function_call"] == ['{"city": "Oslo"}'] * 3


@pytest.mark.parametrize("together", [False, True])
async def test_ollama(together: bool) -> None:
    async with site(service(together=together)) as at:
        lines = [json.loads(line) for line in (await post(at, "/api/chat", {"messages": HI})).splitlines()]
        whole = json.loads(await post(at, "/api/chat", {"messages": HI, "stream": False}))["message"]
    results = []
    for message in (line["message"] for line in lines):
        results += [("text", message["content"])] if message["content"] else []
        results += [("call", tool_call["id"]) for tool_call in message.get("tool_calls", ())]
        assert all(
            tool_call["function"]["arguments"] == {"city": "Oslo"} for tool_call in message.get("tool_calls", ())
        )
    assert in_order(results) == ORDER
    assert whole["content"] == "First this.Then that.At last." and len(whole["tool_calls"]) == 3


PIECES = [
    "First.",
    "<tool_call>",
    '{"name": "weather", "arguments": {"city": "Oslo"}}',
    "</tool_call>",
    "Then",
    " that.",
]


async def test_a_kept_response_is_shown_in_the_order_of_its_answer(tmp_path: Path) -> None:
    kinds = dict.fromkeys([*CONTROLS], 3) | dict.fromkeys(("<tool_call>", "</tool_call>"), 4)
    model = write_scripted(tmp_path / "m.gguf", PIECES, template=text_models.QWEN_TEMPLATE, kinds=kinds)
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    async with keeping(tmp_path / "agents", model, engine="cpu") as at, at.http() as http:
        body = {"input": "hi", "tools": [tool], "temperature": 0}
        made = json.loads(await post(at, "/v1/responses", body))
        shown = (await http.get(f"/v1/responses/{made['id']}")).json()
        assert [item["type"] for item in made["output"]] == ["message", "function_call", "message"]
        assert shown["output"] == made["output"]
        again = json.loads(
            await post(at, "/v1/responses", body | {"input": "more", "previous_response_id": made["id"]})
        )
        assert again["usage"]["input_tokens_details"]["cached_tokens"] >= made["usage"]["total_tokens"] - 17
        await http.post("/v1/agents", json={"id": "a", "tools": [TOOL]})
        await http.post("/v1/agents/a/turns", json={"messages": HI, "temperature": 0})
        (turn,) = (await http.get("/v1/agents/a/turns")).json()["data"]
        assert turn["answer"].keys() == {"role", "content", "tool_calls"}


def test_deltas_are_joined_as_far_as_their_order_allows() -> None:
    events: list[Event] = [
        Delta(reasoning="a", tokens=(1,)),
        Delta(text="b", tokens=(2,)),
        Delta(tokens=(3,)),
        Delta(text="c", tool_calls=(call(0),), tokens=(4,)),
        Delta(tool_calls=(call(1),), tokens=(5,)),
        Delta(text="d", tokens=(6,)),
        Delta(reasoning="e", tokens=(7,)),
        done(),
    ]
    first, second, third, end = joined(events)
    assert isinstance(first, Delta) and isinstance(second, Delta) and isinstance(third, Delta) and end == events[-1]
    assert (first.reasoning, first.text, len(first.tool_calls), first.tokens) == ("a", "bc", 2, (1, 2, 3, 4, 5))
    assert (second.text, second.tokens, third.reasoning, third.tokens) == ("d", (6,), "e", (7,))


def test_a_message_keeps_an_order_that_is_not_the_usual_one() -> None:
    said = MessageBuilder()
    for delta in SAID:
        said.add(delta)
    kept = json.loads(json.dumps(said.kept()))
    assert plain(kept) == said.message() and "order" not in said.message()
    assert said_of(kept).parts() == said.parts() and len(said.parts()) == len(ORDER)
    usual = MessageBuilder()
    usual.add(Delta(reasoning="a", text="b", tool_calls=(call(0),)))
    assert usual.kept() == usual.message() and said_of(usual.message()).parts() == usual.parts()
    assert not said_of(None) and not MessageBuilder()
