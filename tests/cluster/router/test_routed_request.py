"""What a request names, by which the router sends it on; long bodies are read off the event loop."""

from __future__ import annotations

import json
import threading
import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest

from cairn.cluster.router import routed_request
from cairn.cluster.router.prefill import _for_one_token
from cairn.cluster.router.routed_request import RoutedRequest, read_request
from cairn.cluster.text_prefixes import PromptFields, TextPrefixes, prefixes_of

CHATS = "/v1/chat/completions"
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
SCOPE = {"method": "POST", "path": CHATS, "headers": []}
MORE = [{"role": "assistant", "content": "This."}, {"role": "user", "content": "And?"}]


def request(body: Any, path: str = CHATS, headers: Mapping[bytes, bytes] | None = None) -> RoutedRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return RoutedRequest("POST", path, [*(headers or {}).items()], data)


def test_a_conversation_that_is_sent_again_has_the_same_key() -> None:
    key = request({"messages": QUESTION}).key
    assert key and key == request({"messages": QUESTION + MORE, "stream": True}).key
    assert key != request({"messages": MORE}).key
    assert key != request({"messages": QUESTION}, headers={b"x-api-key": b"other"}).key
    assert request({"input": QUESTION}, "/v1/responses").key == request({"input": QUESTION + MORE}, "/v1/responses").key
    long = "stone " * 200
    assert request({"prompt": long}).key == request({"prompt": long + "more"}).key != request({"prompt": "stone"}).key


def test_a_name_counts_more_than_the_beginning() -> None:
    one = request({"messages": QUESTION, "prompt_cache_key": "ada"})
    assert one.named and one.key == request({"messages": MORE, "prompt_cache_key": "ada"}).key
    assert one.key == request({"messages": MORE, "metadata": {"session_id": "ada"}}).key
    assert not request({"messages": QUESTION}).named


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": {}}', b'{"messages": 1, "prompt": [1]}', b"\xff"])
def test_a_body_without_a_beginning_has_no_key(body: bytes) -> None:
    assert request(body).key == b"" and not request(body).named


async def test_a_long_body_is_read_on_another_thread_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def recorded(headers: Mapping[bytes, bytes], fields: PromptFields) -> TextPrefixes:
        threads.append(threading.get_ident())
        return prefixes_of(headers, fields)

    monkeypatch.setattr(routed_request, "prefixes_of", recorded)
    short, long = ({"messages": [{"role": "user", "content": "x" * size}]} for size in (100, routed_request.INLINE))
    for body in (short, long):
        found = await read_request(SCOPE, json.dumps(body).encode(), by_kv=True)
        assert found.text() == found.text() and found.text().digests
    assert len(threads) == 2 and threads[0] == threading.get_ident() != threads[1]
    named = json.dumps({**long, "prompt_cache_key": "ada"}).encode()
    await read_request(SCOPE, named, by_kv=True)
    await read_request(SCOPE, json.dumps(long).encode(), by_kv=False)
    assert len(threads) == 2, "no text is digested that decides nothing"


SIZE = 1 << 21
WIDE = {
    "objects in a field": b'{"metadata":[%b0]}' % (b"[]," * (SIZE // 3)),
    "objects in a seed": b'{"seed":[%b0]}' % (b"{}," * (SIZE // 3)),
    "a name of objects": b'{"prompt_cache_key":[%b0]}' % (b"{}," * (SIZE // 3)),
    "messages": b'{"messages":[%b{}]}' % (b"{}," * (SIZE // 3)),
    "tokens": b'{"prompt":[%b0]}' % (b"0," * (SIZE // 2)),
    "items": b'{"input":[%b0]}' % (b"0," * (SIZE // 2)),
    "fields": b"{%b}" % b",".join(b'"%d":0' % n for n in range(SIZE // 8)),
}


@pytest.mark.parametrize("kind", WIDE)
def test_a_body_is_never_taken_apart_into_objects(kind: str) -> None:
    """Making millions of them would hold the interpreter's lock, and so every other request, for seconds."""
    body = WIDE[kind]
    tracemalloc.start()
    try:
        found = request(body)
        assert not found.followable
        assert not found.named and found.belongs_to == []
        found.key, found.text()
        _for_one_token(body)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 8 * len(body), "copies of the bytes; objects would be 20 times as much"


def test_a_very_long_conversation_is_known_by_how_it_begins() -> None:
    first = [{"role": "user", "content": "0," * (1 << 16)}]
    key = request({"messages": first + MORE}).key
    assert key and key == request({"messages": first + MORE + MORE}).key
    assert key != request({"messages": [{"role": "user", "content": "1," * (1 << 16)}, *MORE]}).key


def test_half_a_surrogate_in_a_name_breaks_nothing() -> None:
    for body in (b'{"id":"\\ud800"}', b'{"metadata":{"agent":"\\ud800"}}', b'{"previous_response_id":"\\ud800"}'):
        found = request(body, "/v1/agents")
        assert isinstance(found.key, bytes) and isinstance(found.belongs_to, list)
