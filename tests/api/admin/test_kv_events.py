"""GET /v1/cache/events: the KV that is held, in vLLM's words, to the administrator alone, and only while he reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from cairn.api.admin import kv_events
from cairn.api.http.auth import salts
from cairn.cluster.kv_events import AllBlocksCleared, BlockStored, KVEventBatch, TextBlocks
from cairn.cluster.router.kv_index import HeldBlocks, KnownText, KvIndex
from cairn.cluster.text_prefixes import text_prefixes
from cairn.config.config import Config
from cairn.config.values import Secret, TenantKeys
from cairn.frontend import text_blocks
from tests.agents.house import house, talking_model
from tests.api.sockets import Site, site

CHATS = "/v1/chat/completions"
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "TICK", 0.02)
    monkeypatch.setattr(kv_events, "AGAIN", 0.0)


@contextlib.asynccontextmanager
async def home(folder: Path, **options: Any) -> AsyncIterator[tuple[Site, httpx.AsyncClient]]:
    config = Config(**options)
    async with house(folder, salts(config)) as at, site(at.service, config) as web, web.http() as http:
        yield web, http


class Reader:
    """Reads the stream as a router does."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()
        self.held, self.index, self.last, self.cleared = HeldBlocks(), KvIndex(), "", 0
        self.parents: dict[int, int | None] = {}

    async def next(self) -> None:
        """Take one event."""
        id, name = "", ""
        async for line in self._lines:
            field, _, value = line.partition(": ")
            if field == "id":
                id = value
            elif field == "event":
                name = value
            elif field == "data":
                if name == "texts":
                    self.index.learn(msgspec.json.decode(value, type=TextBlocks).texts)
                else:
                    self._take(msgspec.json.decode(value, type=KVEventBatch))
                self.last = id
                return
        raise EOFError

    def _take(self, batch: KVEventBatch) -> None:
        for one in batch.events:
            self.cleared += isinstance(one, AllBlocksCleared)
            if isinstance(one, BlockStored):
                assert one.token_ids == [] and one.block_size == 16
                before = one.parent_block_hash
                for block in one.block_hashes:
                    self.parents[block], before = before, block
        self.held.apply(batch.events)

    async def until_held(self, text: str, key: bytes = b"") -> None:
        """Read until all blocks of a chat's prompt are told, but those of its last words."""
        async with asyncio.timeout(60):
            while cached(self, text, key) < len(text):  # the tokenizer's tokens are bytes
                await self.next()

    async def until(self, texts: int = 1, blocks: int = 0) -> None:
        """Read until so many texts are known, and more than so many blocks."""
        async with asyncio.timeout(60):
            while len(self.index) < texts or len(self.held.blocks) <= blocks:
                await self.next()


@contextlib.asynccontextmanager
async def reading(http: httpx.AsyncClient, after: str = "", **headers: str) -> AsyncIterator[Reader]:
    path = "/v1/cache/events" + (f"?after={after}" if after else "")
    async with http.stream("GET", path, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        yield Reader(response)


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "ignore_eos": True}


async def ask(http: httpx.AsyncClient, text: str, **headers: str) -> dict[str, Any]:
    found = await http.post(CHATS, json=chat(text), headers=headers)
    assert found.status_code == 200, found.text
    usage: dict[str, Any] = found.json()["usage"]
    return usage


OTHER = "Something else. " * 40
STORY = "Once upon a time there was a stone. " * 30


def known(reader: Reader, text: str, key: bytes = b"") -> KnownText:
    """What a router knows of a chat."""
    body = json.dumps(chat(text), ensure_ascii=False, separators=(",", ":")).encode()
    headers = {b"authorization": b"Bearer " + key} if key else {}
    return reader.index.known(text_prefixes(CHATS, headers, body))


def cached(reader: Reader, text: str, key: bytes = b"") -> int:
    """Tokens of a chat's prompt that a router thinks the server has."""
    return reader.index.held(reader.held, known(reader, text, key), 0.0).cached


async def test_a_reader_gets_all_blocks_and_then_what_changes(folder: Path) -> None:
    async with home(folder) as (_, http):
        async with reading(http) as reader:
            usage = await ask(http, STORY)
            await reader.until_held(STORY)
            assert reader.cleared == 1 and 0 < usage["prompt_tokens"] - cached(reader, STORY) <= 32
            assert None in reader.parents.values()
            assert all(one is None or one in reader.parents for one in reader.parents.values()), "a tree"
            shared = cached(reader, STORY + "And then it rained.")
            assert usage["prompt_tokens"] - 200 < shared < usage["prompt_tokens"]
            assert cached(reader, "Another story. " + STORY) == 0
        async with reading(http) as other:
            await other.until_held(STORY)
            assert other.cleared == 1 and cached(other, STORY) == cached(reader, STORY)


async def test_a_reader_that_comes_back_gets_what_it_missed(folder: Path) -> None:
    async with home(folder) as (web, http), reading(http) as stays:
        async with reading(http) as reader:
            await ask(http, STORY)
            await reader.until_held(STORY)
            last, seen = reader.last, reader.held.blocks.keys()
        await ask(http, OTHER)
        await stays.until_held(OTHER)
        async with reading(http, after=last) as again:
            await again.until_held(OTHER)
            assert again.cleared == 0 and cached(again, STORY) == 0, "only what it missed"
            assert not seen & again.held.blocks.keys()
        web.app._kv._feed._events.clear()  # as they are after many more
        async with reading(http, after=last) as late:
            await late.until_held(OTHER)
            assert late.cleared == 1 and cached(late, STORY), "all is told again"
            assert seen <= late.held.blocks.keys()


async def test_what_is_told_at_once_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "PIECE", 2)
    monkeypatch.setattr(kv_events, "KEPT_BYTES", 2000)
    async with home(folder) as (web, http):
        for number in range(6):
            await ask(http, f"{number} " + OTHER)
        async with reading(http) as reader:
            async with asyncio.timeout(60):
                while not reader.held.blocks:
                    await reader.next()
            feed = web.app._kv._feed
            assert sum(len(one.data) for one in feed._events) <= 2000 + 1000 and reader.cleared == 1


async def test_evicted_blocks_are_told(folder: Path) -> None:
    async with home(folder) as (web, http), reading(http) as reader:
        await ask(http, STORY)
        await reader.until()
        before, turn = set(reader.held.blocks), 0
        while before <= reader.held.blocks.keys():  # fill the pool until something leaves it
            turn += 1
            assert turn < 200
            await ask(http, f"{turn} " + "filling up " * 120)
            await reader.until(len(reader.index) + 1)
        assert web.app.service is not None
        assert len(reader.held.blocks) <= web.app.service.info.blocks[0]


async def test_only_the_administrator_may_read(folder: Path) -> None:
    tenants = (TenantKeys("a", (Secret("key-a"),)), TenantKeys("b", (Secret("key-b"),)))
    async with home(folder, tenants=tenants, admin_key=Secret("admin")) as (_, http):
        for headers in ({}, {"Authorization": "Bearer key-a"}, {"Authorization": "Bearer wrong"}):
            assert (await http.get("/v1/cache/events", headers=headers)).status_code == 401
        async with reading(http, **ADMIN) as reader:
            one = await ask(http, STORY, Authorization="Bearer key-a")
            await reader.until_held(STORY, b"key-a")
            assert cached(reader, STORY, b"key-a") > one["prompt_tokens"] - 48
            assert cached(reader, STORY, b"key-b") == 0 and cached(reader, STORY) == 0
            two = await ask(http, STORY, Authorization="Bearer key-b")
            assert two["prompt_tokens_details"]["cached_tokens"] == 0
            await reader.until_held(STORY, b"key-b")
            one_has, two_has = (set(known(reader, STORY, key).blocks) for key in (b"key-a", b"key-b"))
            assert not one_has & two_has, "the same text has other hashes for another tenant"


async def test_no_text_and_no_token_is_told(folder: Path) -> None:
    async with home(folder) as (_, http), http.stream("GET", "/v1/cache/events") as response:
        await ask(http, "stone " * 200)
        seen = ""
        async for line in response.aiter_lines():
            seen += line
            if '"token_ids":' in seen and 'data: {"texts"' in seen:  # in either order
                break
        assert '"token_ids":[]' in seen and '"token_ids":[1' not in seen
        assert not re.search("[a-z ]{12}", seen.replace("parent_block_hash", "")), "no text"


async def test_nothing_is_done_while_nobody_follows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "GRACE", 0.05)
    named = []
    real = text_blocks.text_blocks
    monkeypatch.setattr(kv_events, "text_blocks", lambda *given: named.append(1) or real(*given))
    async with home(folder) as (web, http):
        await ask(http, STORY)
        assert not named
        async with reading(http) as reader:
            await ask(http, STORY + "x")
            await reader.until()
        assert named
        async with asyncio.timeout(60):
            while web.app._kv._task is not None:
                await asyncio.sleep(0.02)
        assert not web.app._kv._feed._events, "nobody can be sent them any more"
        named.clear()
        await ask(http, STORY + "y")
        assert not named
        async with reading(http, after=reader.last) as again:
            await again.until_held(STORY + "x")
            assert again.cleared == 1, "what changed meanwhile was not noted, so all is told"


async def test_a_long_text_is_digested_on_a_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "INLINE_BYTES", 100)
    monkeypatch.setattr(kv_events, "INLINE", 10)
    threads = []

    def recorded(*given: Any) -> Any:
        threads.append(threading.get_ident())
        return text_prefixes(*given)

    monkeypatch.setattr(kv_events, "text_prefixes", recorded)
    async with home(folder) as (_, http), reading(http) as reader:
        await ask(http, STORY)
        await reader.until_held(STORY)
        assert cached(reader, STORY) and threads and threading.get_ident() not in threads


async def test_a_place_that_is_none_is_a_new_reader_and_a_long_one_an_error(folder: Path) -> None:
    async with home(folder) as (_, http):
        for after in ("x", "-", "0000000000000000-5", "\uff11-1"):
            async with reading(http, after=after) as reader:
                await reader.next()
                assert reader.cleared == 1
        refused = await http.get("/v1/cache/events?after=" + "9" * 100)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "after"
        assert (await http.head("/v1/cache/events")).status_code == 200


async def test_a_stream_without_news_shows_that_it_lives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MOST_SILENCE", 0.1)
    async with home(folder) as (_, http), http.stream("GET", "/v1/cache/events") as response:
        async with asyncio.timeout(60):
            lines = response.aiter_lines()
            while "still here" not in await anext(lines):
                pass


async def test_readers_are_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MOST_READERS", 1)
    async with home(folder) as (_, http), reading(http) as reader:
        await reader.next()
        refused = await http.get("/v1/cache/events")
        assert refused.status_code == 429 and "retry-after" in refused.headers
