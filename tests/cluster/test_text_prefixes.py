"""Digests of the beginnings of a request's text: alike where texts begin alike, and told by nobody without the key."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cairn.cluster.text_prefixes import (
    FINE_BYTES,
    FINEST,
    NO_PREFIXES,
    TAIL_BYTES,
    TextPrefixes,
    places,
    text_prefixes,
)

CHATS = "/v1/chat/completions"
KEY = {b"authorization": b"Bearer one"}


def of(body: Any, headers: dict[bytes, bytes] | None = None, path: str = CHATS) -> TextPrefixes:
    return text_prefixes(path, KEY if headers is None else headers, json.dumps(body).encode())


def common(one: TextPrefixes, other: TextPrefixes) -> int:
    """Bytes of text up to which two requests have the same digests."""
    ends = [end for a, b, end in zip(one.digests, other.digests, one.ends, strict=False) if a == b]
    return max(ends, default=0)


def chat(system: str, *texts: str, **fields: Any) -> dict[str, Any]:
    roles = ["user", "assistant"]
    messages = [{"role": "system", "content": system}]
    messages += [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return {"messages": messages, **fields}


LONG = "stone upon stone " * 300


def test_texts_that_begin_alike_have_the_same_first_digests() -> None:
    one, other = of(chat(LONG, "first")), of(chat(LONG, "second"))
    assert len(LONG) - FINEST <= common(one, other) < one.size
    assert one.digests[-1] != other.digests[-1]
    assert one == of(chat(LONG, "first")), "the same text has the same digests in every process"


def test_a_conversation_that_goes_on_keeps_its_digests() -> None:
    before, after = of(chat(LONG, "a" * 2000)), of(chat(LONG, "a" * 2000, "b", "c" * 600))
    assert common(before, after) >= before.size - FINEST and set(before.digests[:-1]) <= set(after.digests)


@pytest.mark.parametrize("fields", [{"model": "other"}, {"tools": [{"type": "function", "function": {"name": "f"}}]}])
def test_another_model_or_other_tools_are_another_text(fields: dict[str, Any]) -> None:
    assert common(of(chat(LONG, "a")), of(chat(LONG, "a", **fields))) == 0


@pytest.mark.parametrize("headers", [{}, {b"authorization": b"Bearer two"}, {b"x-api-key": b"one"}])
def test_another_key_has_other_digests(headers: dict[bytes, bytes]) -> None:
    assert not set(of(chat(LONG, "a")).digests) & set(of(chat(LONG, "a"), headers).digests)


def test_marks_that_clients_move_are_no_text() -> None:
    def marked(at: int) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": [{"type": "text", "text": LONG}]} for _ in range(3)
        ]
        messages[at]["content"][0]["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
        return {"messages": messages}

    assert of(marked(0), path="/v1/messages") == of(marked(2), path="/v1/messages")


def test_prompts_of_texts_and_of_tokens_count_too() -> None:
    tokens = list(range(1000, 3000))
    assert common(of({"prompt": tokens}), of({"prompt": [*tokens, 1, 2]})) > 9_000
    assert common(of({"prompt": LONG}), of({"prompt": LONG + "more"})) > len(LONG) - FINEST
    assert common(of({"input": LONG}, path="/v1/responses"), of({"input": LONG + "x"}, path="/v1/responses")) > 4000


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b'{"messages": []}', b"{}", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_prompt_has_none(body: bytes) -> None:
    assert text_prefixes(CHATS, KEY, body).digests == ()
    assert text_prefixes("/v1/embeddings", KEY, json.dumps(chat(LONG)).encode()) == NO_PREFIXES


@pytest.mark.parametrize("size", [0, 1, FINEST, FINEST + 1, FINE_BYTES, 5 * FINE_BYTES, 1 << 20, 32 << 20])
def test_the_number_of_places_grows_with_the_logarithm(size: int) -> None:
    found = list(places(size))
    assert found == sorted(set(found)) and (not found or found[-1] == size)
    assert len(found) <= 65 + 32 * max(0, (size // FINE_BYTES).bit_length())
    longer = list(places(2 * size + 1000))
    assert set(found[:-1]) <= set(longer), "the places of a text are those of a longer one"


def test_closing_brackets_are_cut_off_however_many() -> None:
    for count in (1, TAIL_BYTES - 1, TAIL_BYTES, TAIL_BYTES + 1, 3 * TAIL_BYTES):
        assert of({"prompt": "text" + "]" * count}) == of({"prompt": "text"})
        assert of({"prompt": "]" * count}) == NO_PREFIXES
