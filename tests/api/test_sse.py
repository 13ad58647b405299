"""Chunks as bytes: every one is valid JSON in a well-formed event, whatever the model says."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from scripted import Bytes, done
from sockets import events

from cairn.api.sse import DONE, HEARTBEAT, ChatChunks, TextChunks, TextLogprobs, chat_logprobs, error_event
from cairn.errors import InvalidRequest, Overloaded, Unauthorized
from cairn.types import Delta, TokenLogprob, ToolCallDelta

HEAD = {"id": 'a"b', "object": "chat.completion", "created": 1, "model": "m\u2028\n\n", "system_fingerprint": None}
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


@given(TEXTS, TEXTS, TEXTS, st.booleans())
def test_any_text_survives_the_chat_chunks(text: str, reasoning: str, arguments: str, usage: bool) -> None:
    chunks = ChatChunks(HEAD, 2, usage, Bytes())
    call = ToolCallDelta(index=3, id="c", name=text, arguments=arguments)
    data = chunks.first(1) + chunks.delta(1, Delta(text=text, reasoning=reasoning, tool_calls=(call,)))
    data += chunks.finish(1, done(), "stop") + chunks.usage({"total_tokens": 1}) + HEARTBEAT + DONE
    assert b"\n\n\n" not in data and b"\r" not in data
    *found, last = events(data)
    assert last == "[DONE]" and all(chunk["id"] == HEAD["id"] and chunk["model"] == HEAD["model"] for chunk in found)
    assert all(choice["index"] == 1 for chunk in found for choice in chunk["choices"])
    assert all(("usage" in chunk) == usage for chunk in found[:-1])
    deltas = [chunk["choices"][0]["delta"] for chunk in found[1:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == reasoning
    functions = [piece["function"] for delta in deltas for piece in delta.get("tool_calls", ())]
    assert functions == [{"name": text, "arguments": arguments}]


@given(TEXTS, st.integers(0, 3))
def test_any_text_survives_the_text_chunks(text: str, index: int) -> None:
    chunks = TextChunks(HEAD | {"object": "text_completion"}, 4, False)
    one, two, three = events(
        chunks.text(index, text) + chunks.text(index, text, {"x": 1}) + chunks.finish(index, done(), "length")
    )
    assert one["choices"] == [{"index": index, "text": text, "logprobs": None, "finish_reason": None}]
    assert two["choices"] == [{"index": index, "text": text, "logprobs": {"x": 1}, "finish_reason": None}]
    assert three["choices"] == [{"index": index, "text": "", "logprobs": None, "finish_reason": "length"}]


def test_a_delta_that_says_nothing_is_no_chunk() -> None:
    assert ChatChunks(HEAD, 1, False, Bytes()).delta(0, Delta(tokens=(1,))) == b""


@given(st.lists(st.tuples(st.integers(0, 299), st.floats(max_value=0)), max_size=5))
def test_logprobs_are_finite_json(pairs: list[tuple[int, float]]) -> None:
    entries = [TokenLogprob(token, value, tuple(pairs)) for token, value in pairs]
    found = json.loads(json.dumps(chat_logprobs(entries, Bytes()), allow_nan=False))
    assert len(found["content"]) == len(pairs)
    for entry, (token, _) in zip(found["content"], pairs, strict=True):
        assert bytes(entry["bytes"]) == Bytes().token_bytes(token) and len(entry["top_logprobs"]) == len(pairs)


def test_text_offsets_count_characters_not_bytes() -> None:
    logprobs = TextLogprobs(Bytes(), 0)
    for token in "h\u00e9y".encode():
        logprobs.add(token, TokenLogprob(token, float("-inf")))
    found = logprobs.take()
    assert found["tokens"] == ["h", "\ufffd", "\ufffd", "y"] and found["top_logprobs"] is None
    assert found["token_logprobs"] == [-9999.0] * 4
    assert logprobs.take()["tokens"] == []


def test_tokens_that_read_alike_do_not_hide_each_other() -> None:
    """Halves of characters all read U+FFFD: the token's own entry is its own, else the likeliest counts."""
    logprobs = TextLogprobs(Bytes(), 3)
    likely, unlikely = 0xC3, 0xA9
    logprobs.add(unlikely, TokenLogprob(unlikely, -5.0, ((likely, -0.1), (104, -2.0), (0xC4, -3.0))))
    logprobs.add(104, TokenLogprob(104, -2.0, ((likely, -0.1), (unlikely, -5.0), (104, -2.0))))
    assert logprobs.take()["top_logprobs"] == [{"\ufffd": -5.0, "h": -2.0}, {"\ufffd": -0.1, "h": -2.0}]


def test_error_events() -> None:
    for error, kind in (
        (InvalidRequest("a", field="b"), "invalid_request_error"),
        (Unauthorized("a"), "authentication_error"),
        (Overloaded("a"), "rate_limit_error"),
    ):
        (found,) = events(error_event(error))
        expected: dict[str, Any] = {"message": "a", "type": kind, "param": error.field, "code": error.code}
        assert found == {"error": expected}
