"""Chunks as bytes: every one is valid JSON in a well-formed event, whatever the model says."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from scripted import Bytes, done
from sockets import events

from cairn.api.sse import (
    DONE,
    HEARTBEAT,
    ChatChunks,
    TextChunks,
    TextLogprobs,
    chat_logprobs,
    error_event,
    usage_object,
)
from cairn.errors import InvalidRequest, Overloaded, Unauthorized
from cairn.figures import CacheReport, Differs, Miss
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


def merged(one: Any, other: Any) -> Any:
    """Two usages as LangChain's ChatOpenAI adds them up (`_update_token_usage`): numbers are added, objects entered,
    and what one of them lacks is 0; of anything else the later one counts."""
    if isinstance(other, int):
        assert isinstance(one, int), (one, other)
        return one + other
    if isinstance(other, dict):
        assert isinstance(one, dict), (one, other)
        return {name: merged(one.get(name, 0), value) for name, value in other.items()}
    return other


def test_clients_that_add_up_usages_can_add_up_any_two() -> None:
    """ChatOpenAI.generate([a, b]) failed where one answer's miss was null and the next one's an object."""
    differs = Differs(position=20, known="cat", given="dog")
    misses = [None, Miss(position=16, reason="evicted"), Miss(position=16, reason="template", differs=differs)]
    reports = [CacheReport(computed=3, pool=16, load=load, miss=miss) for miss in misses for load in (0.0, 0.5)]
    usages = [usage_object([(msgspec.structs.replace(done(), cache=report), True)]) for report in reports]
    for one, other in itertools.product(usages, usages):
        total = merged(one, other)
        assert total["cairn"]["computed"] == 6 and total["cairn"]["miss"] == other["cairn"]["miss"]


def test_error_events() -> None:
    for error, kind in (
        (InvalidRequest("a", field="b"), "invalid_request_error"),
        (Unauthorized("a"), "authentication_error"),
        (Overloaded("a"), "rate_limit_error"),
    ):
        (found,) = events(error_event(error))
        expected: dict[str, Any] = {"message": "a", "type": kind, "param": error.field, "code": error.code}
        assert found == {"error": expected}
