"""Chunks as bytes: each is valid JSON in a well-formed event, whatever the model generates."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.api.chat.openai_chunks import ChatChunks, TextChunks, TextLogprobs, chat_logprobs, usage_object
from cairn.api.http.sse import DONE, HEARTBEAT, error_event
from cairn.text.tokens.json_texts import texts_in
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import InvalidRequest, Overloaded, Unauthorized
from cairn.types.outputs import Delta, TokenLogprob, ToolCallDelta
from cairn.types.stats import CacheReport, Differs, Miss
from tests.api.scripted import Bytes, ScriptedService, done
from tests.api.sockets import events, site
from tests.text import text_models

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


LINES = "a\u2028b\u2029c\u0085d\u00e9e\x0bf\x0cg\x1ch"
r"""Every line break known to Python except \n and \r."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
        ("/v1/responses", {"input": "hi", "store": False}),
        ("/api/chat", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/api/generate", {"prompt": "hi"}),
        ("/completion", {"prompt": "hi"}),
    ],
)
async def test_a_line_stays_one_line_for_every_reader(path: str, body: dict[str, Any]) -> None:
    """httpx's `iter_lines` and clients that use `splitlines` also split at U+2028 and its kin, in the middle of
    JSON.
    """
    service = ScriptedService(lambda request: [Delta(text=LINES, tokens=(1,)), done()])
    async with site(service) as at, at.http() as http:
        text = (await http.post(path, json=body | {"stream": True})).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.removeprefix("data: ").startswith("{")]
    assert all(isinstance(json.loads(line), dict) for line in lines)
    assert json.dumps(LINES) in [json.dumps(value) for line in lines for value in texts_in(json.loads(line))]


@given(TEXTS, st.integers(0, 3))
def test_any_text_survives_the_text_chunks(text: str, index: int) -> None:
    chunks = TextChunks(HEAD | {"object": "text_completion"}, 4, False)
    one, two, three = events(
        chunks.text(index, text) + chunks.text(index, text, {"x": 1}) + chunks.finish(index, done(), "length")
    )
    assert one["choices"] == [{"index": index, "text": text, "logprobs": None, "finish_reason": None}]
    assert two["choices"] == [{"index": index, "text": text, "logprobs": {"x": 1}, "finish_reason": None}]
    assert three["choices"] == [{"index": index, "text": "", "logprobs": None, "finish_reason": "length"}]


def test_an_empty_delta_is_no_chunk() -> None:
    assert ChatChunks(HEAD, 1, False, Bytes()).delta(0, Delta(tokens=(1,))) == b""


@given(st.lists(st.tuples(st.integers(0, 299), st.floats(max_value=0)), max_size=5))
def test_logprobs_are_finite_json(pairs: list[tuple[int, float]]) -> None:
    entries = [TokenLogprob(token, value, tuple(pairs)) for token, value in pairs]
    parsed = json.loads(json.dumps(chat_logprobs(entries, (), Bytes()), allow_nan=False))
    assert len(parsed["content"]) == len(pairs)
    for entry, (token, _) in zip(parsed["content"], pairs, strict=True):
        assert bytes(entry["bytes"]) == Bytes().token_bytes(token) and len(entry["top_logprobs"]) == len(pairs)


def test_text_offsets_count_characters_not_bytes() -> None:
    logprobs = TextLogprobs(Bytes(), 0)
    for token in "h\u00e9y".encode():
        logprobs.add(token, TokenLogprob(token, float("-inf")))
    result = logprobs.take()
    assert result["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "y"] and result["top_logprobs"] is None
    assert result["token_logprobs"] == [-9999.0] * 4
    assert logprobs.take()["tokens"] == []


def test_tokens_that_read_alike_do_not_hide_each_other() -> None:
    """Halves of characters all decode to U+FFFD, and a tokenizer may have two tokens with one text."""
    logprobs = TextLogprobs(Bytes(), 3)
    likely, unlikely = 0xC3, 0xA9
    logprobs.add(unlikely, TokenLogprob(unlikely, -5.0, ((likely, -0.1), (104, -2.0), (0xC4, -3.0))))
    logprobs.add(104, TokenLogprob(104, -2.0, ((likely, -0.1), (unlikely, -5.0), (104, -2.0))))
    result = logprobs.take()
    assert result["top_logprobs"] == [
        {"bytes:\\xc3": -0.1, "h": -2.0, "bytes:\\xc4": -3.0, "bytes:\\xa9": -5.0},
        {"bytes:\\xc3": -0.1, "bytes:\\xa9": -5.0, "h": -2.0},
    ]
    assert result["tokens"] == ["bytes:\\xa9", "h"]
    asked = TextLogprobs(Twins(), 20)
    asked.add(120, TokenLogprob(120, -3.0, tuple((token, -0.1 * token) for token in range(110, 130))))
    (top,) = asked.take()["top_logprobs"]
    assert len(top) == 20 and top["token_id:121"] == -0.1 * 121, "as many as were asked for"


class Twins(Bytes):
    """A tokenizer whose odd tokens decode like the even ones before them."""

    def token_bytes(self, id: int) -> bytes:
        return super().token_bytes(id & ~1)


def offsets(tokenizer: Any, tokens: Sequence[int]) -> list[int]:
    logprobs = TextLogprobs(tokenizer, 0)
    for token in tokens:
        logprobs.add(token, TokenLogprob(token, -1.0))
    text_offset: list[int] = logprobs.take()["text_offset"]
    return text_offset


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (b"h\xc3\xa9y", [0, 1, 1, 2]),
        (b"\xc3hi", [0, 1, 2]),
        (b"\xe2\x82hi", [0, 0, 1, 2]),
        (b"\xe2\x82\xc3\xa9!", [0, 0, 1, 1, 2]),
        (b"\xc3\xc3h", [0, 1, 2]),
        (b"\x80\x80h", [0, 1, 2]),
        (b"a\xffb", [0, 1, 2]),
        (b"\xf0\x80a", [0, 1, 2]),
    ],
)
def test_a_token_begins_after_the_incomplete_character(raw: bytes, wanted: list[int], tmp_path: Path) -> None:
    """Bytes that wait for a character that never completes come out with the next token, in front of its text."""
    folder = text_models.write_model(tmp_path, text_models.byte_level(), text_models.QWEN_CONFIG)
    tokenizer = Tokenizer.load(folder)
    one = {tokenizer.token_bytes(token): token for token in range(256)}
    assert offsets(tokenizer, [one[bytes([byte])] for byte in raw]) == wanted


def test_a_token_begins_behind_a_run_of_bytes(tmp_path: Path) -> None:
    """SentencePiece decodes a run of byte tokens when it ends; an invalid run becomes one U+FFFD per byte."""
    folder = text_models.write_model(tmp_path, text_models.sentencepiece(), text_models.LLAMA2_CONFIG)
    tokenizer = Tokenizer.load(folder)
    word = tokenizer.encode("the lazy")[-1]
    run = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in b"\xc3\xc3"]
    assert offsets(tokenizer, [word, *run, word])[-1] == len(tokenizer.decode([word, *run]))


def merged(one: Any, other: Any) -> Any:
    """Add two usages as LangChain's ChatOpenAI does (`_update_token_usage`).

    Numbers are added, objects merged, and missing keys count as 0; of anything else the later value wins.
    """
    if isinstance(other, int):
        assert isinstance(one, int), (one, other)
        return one + other
    if isinstance(other, dict):
        assert isinstance(one, dict), (one, other)
        return {name: merged(one.get(name, 0), value) for name, value in other.items()}
    return other


def test_clients_that_add_up_usages_can_add_up_any_two() -> None:
    """ChatOpenAI.generate([a, b]) failed where one answer's `miss` was null and the next one's an object."""
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
        (event,) = events(error_event(error))
        expected: dict[str, Any] = {"message": "a", "type": kind, "param": error.field, "code": error.code}
        assert event == {"error": expected}
