"""A stream goes on from a second answer only if that has the text that was delivered."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cairn.cluster.router.delivered import AnswersDiffer, Delivered
from tests.cluster.router.stubs import Stub, ask, event, head, piece, routed, text_of

DONE = b"data: [DONE]\n\n"


def call(arguments: str, name: str = "", index: int = 0) -> bytes:
    """Return an event of a tool call."""
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return event(tool_calls=[{"index": index, "function": function} | ({"id": "c"} if name else {})])


def delivered(*events: bytes) -> Delivered:
    made = Delivered()
    for one in events:
        made.add(one)
    made.measure()
    return made


def usage() -> bytes:
    return b'data: {"id":"a","choices":[],"usage":{"prompt_tokens":3}}\n\n'


HAD = (event("", role="assistant"), event("It is "), event("so"))
OTHERWISE = {
    "another word": [event("It was so.")],
    "another word later": [event("It is"), event(" no more.")],
    "shorter": [event("It is "), event(finish="stop")],
    "shorter, without a reason": [event("It is "), DONE],
    "another field": [event("It is "), event(reasoning_content="so")],
    "a call instead": [event("It is "), call("{}", "look")],
    "nothing": [event(finish="stop")],
}


@pytest.mark.parametrize("second", OTHERWISE.values(), ids=OTHERWISE)
def test_another_text_is_noticed(second: list[bytes]) -> None:
    had = delivered(*HAD)
    with pytest.raises(AnswersDiffer):
        for one in (HAD[0], *second):
            assert b"was" not in had.rest(one), "nothing of the other answer is passed on"


@pytest.mark.parametrize("second", [[call('{"b', "look")], [call("", "take"), call('{"a": 1}')]])
def test_another_tool_call_is_noticed(second: list[bytes]) -> None:
    had = delivered(event(role="assistant"), call("", "look"), call('{"a'))
    with pytest.raises(AnswersDiffer):
        for one in second:
            had.rest(one)


def test_a_choice_that_ended_has_no_more_text_and_no_other_reason() -> None:
    for second in (event("more"), event(finish="length")):
        had = delivered(event("It"), event(finish="stop"))
        assert had.rest(event("It")) == b""
        with pytest.raises(AnswersDiffer):
            had.rest(second)


def test_an_end_that_was_delivered_is_not_delivered_again() -> None:
    had = delivered(event("It"), event(finish="stop"), usage())
    assert [had.rest(one) for one in (event("I"), event("t"), event(finish="stop"), usage())] == [b""] * 4
    assert had.rest(DONE) == DONE
    had = delivered(event("It"), event(finish="stop"))
    assert had.rest(event("It")) == had.rest(event(finish="stop")) == b"" and b"prompt_tokens" in had.rest(usage())


def test_choices_are_compared_each_by_itself() -> None:
    def of(index: int, text: str) -> bytes:
        return b"data: " + json.dumps({"choices": [{"index": index, "delta": {"content": text}}]}).encode() + b"\n\n"

    had = delivered(of(0, "abc"), of(1, "xyz"))
    news = [had.rest(one) for one in (of(0, "abcd"), of(1, "x"), of(0, "e"), of(1, "yz!"))]
    texts: list[Any] = [json.loads(one[6:])["choices"][0]["delta"]["content"] if one else "" for one in news]
    assert texts == ["d", "", "e", "!"]
    with pytest.raises(AnswersDiffer):
        delivered(of(0, "abc"), of(1, "xyz")).rest(of(1, "abc"))


def test_an_error_of_the_second_replica_reaches_the_client() -> None:
    had = delivered(*HAD)
    assert b"too long" in had.rest(b'data: {"error":{"message":"too long"}}\n\n')
    had.end()


@pytest.mark.parametrize("second", ["I am not at all sure what you are asking.", "The answer", "The answer!"])
async def test_a_stream_is_not_made_of_two_answers(second: str) -> None:
    texts = ["The answer is forty-two, as all know.", second]
    first: list[Stub] = []

    async def answers(
        stub: Stub, path: str, headers: dict[bytes, bytes], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        first.append(stub)
        text = texts[len(first) - 1]
        writer.write(head(200, "text/event-stream", None) + piece(event("", role="assistant")))
        writer.writelines(piece(event(text[at : at + 6])) for at in range(0, 18, 6))
        if len(first) == 1:
            await writer.drain()
            await asyncio.sleep(0.05)
            await stub.die()
            return
        end = b"" if text.endswith("answer") else piece(event(finish="stop")) + piece(DONE)
        writer.write(piece(event(text[18:])) + end + b"0\r\n\r\n")
        await writer.drain()

    async with routed(answers, answers) as (app, _):
        got = await ask(app, "POST", "/v1/chat/completions", {"messages": [], "temperature": 0, "stream": True})
        assert got.status == 200 and text_of(got) == texts[0][:18], "what was delivered, and nothing of the other"
        assert b'"code":"unavailable"' in got.body and DONE not in got.body
        assert (app.counts.lost, app.counts.followed, len(first)) == (1, 0, 2)


def test_a_longer_name_is_another_tool() -> None:
    had = delivered(call("", "look"))
    with pytest.raises(AnswersDiffer):
        had.rest(call("", "looker"))
