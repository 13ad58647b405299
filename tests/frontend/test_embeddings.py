"""Embedding and reranking: limits of a call, and a decoder's embeddings beside chats, caches and worker deaths."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.engine.fake import FakeEngine
from cairn.engine.load_engine import load_engine
from cairn.frontend import embeddings
from cairn.frontend.embeddings import MAX_READ, EmbeddingCall, _encoded_pairs, vectors
from cairn.frontend.service import Service
from cairn.types.errors import InvalidRequest, Overloaded
from tests.service.tiny import collect, config, request, serving, until


class Blind:
    """A tokenizer that must not see a caller's text."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        assert special, "a caller's text was tokenized"
        return [1]


@pytest.mark.parametrize(
    ("query", "text", "instruction"),
    [("q" * 500_000, "t", None), ("q", "t" * 500_000, None), ("q", "t", "i" * 500_000)],
)
async def test_query_and_instruction_count_once_for_each_text(query: str, text: str, instruction: str | None) -> None:
    service: Any = SimpleNamespace(
        name="m",
        tokenizer=Blind(),
        info=SimpleNamespace(context=8192),
        spec=SimpleNamespace(longest_text=8192, judge=object(), vocab=100, kind="rerank"),
    )
    asking = EmbeddingCall(truncate=True, field="documents", instruction=instruction)
    with pytest.raises(InvalidRequest, match=f"more than {MAX_READ} characters, the limit of a call"):
        await _encoded_pairs(service, [(query, text)] * 2_048, asking)


def oracle(service: Service) -> FakeEngine:
    _, engine = load_engine(service._config, Path(service._config.model))
    assert isinstance(engine, FakeEngine)
    return engine


async def test_states_are_right_beside_chats_and_over_cached_prefixes(folder: Path) -> None:
    async with serving(folder) as service:
        truth = oracle(service)
        texts = [f"{'the same beginning of each ' * (n % 7)}text {n}" for n in range(60)]
        chats = [asyncio.create_task(collect(service.generate(request(service, texts[n], 40)))) for n in range(5)]
        for at_once in (1, 7, 256):
            states, tokens = await vectors(service, texts, EmbeddingCall(at_once=at_once))
            ids = [service.tokenizer.encode(text) for text in texts]
            assert [one.tobytes() for one in states] == [truth.oracle_vector(one) for one in ids]
            assert tokens == sum(map(len, ids))
        assert [len(chat.tokens) for chat in await asyncio.gather(*chats)] == [40] * 5
        assert service.metrics.prefix_hits > 0
        (long,), _ = await vectors(service, ["long " * 300], EmbeddingCall())
        assert long.tobytes() == truth.oracle_vector(service.tokenizer.encode("long " * 300)), "in several steps"


async def test_texts_in_flight_survive_a_killed_worker(folder: Path) -> None:
    texts = [f"{n} is a text of some length " * (1 + n % 50) for n in range(150)]
    service = await Service.start(config(folder))
    try:
        asked = asyncio.create_task(vectors(service, texts, EmbeddingCall(at_once=100)))
        await until(lambda: service.stats().running > 0)
        pid = service.stats().worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        states, _ = await asked
        truth = oracle(service)
        want = [truth.oracle_vector(service.tokenizer.encode(text)) for text in texts]
        assert [one.tobytes() for one in states] == want
        assert service.stats().worker_restarts == 1
    finally:
        await service.close()


async def test_a_full_queue_refuses_the_first_and_waits_with_the_rest(folder: Path) -> None:
    async with serving(folder, max_queue=4, max_running=2) as service:
        texts = [f"text {n}" for n in range(40)]
        states, _ = await vectors(service, texts, EmbeddingCall(at_once=4))
        assert len(states) == 40
        with pytest.raises(Overloaded):
            await vectors(service, texts, EmbeddingCall(at_once=40))


async def test_a_cancelled_call_leaves_nothing_behind(folder: Path) -> None:
    async with serving(folder) as service:
        task = asyncio.create_task(vectors(service, ["text " * 200] * 50, EmbeddingCall()))
        await until(lambda: service.stats().running + service.stats().waiting > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not service._flights)


async def test_ids_out_of_range_are_named(folder: Path) -> None:
    async with serving(folder) as service:
        for ids, said in (([5, 288], "input holds token id 288"), ([-1], "input holds token id -1")):
            with pytest.raises(InvalidRequest, match=said):
                await vectors(service, [ids], EmbeddingCall())


async def test_a_call_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(folder) as service:
        monkeypatch.setattr(embeddings, "MAX_TOKENS", 100)
        read: list[int] = []
        encode = service.tokenizer.encode

        def noted(text: str) -> list[int]:
            read.append(len(text))
            return encode(text)

        monkeypatch.setattr(service.tokenizer, "encode", noted)
        with pytest.raises(InvalidRequest, match="input has more than 100 tokens together"):
            await vectors(service, ["a text"] * 1000, EmbeddingCall())
        assert len(read) == 17, "no more is encoded than needed"
        monkeypatch.setattr(embeddings, "MAX_TOKENS", 1 << 20)
        (_,), tokens = await vectors(service, ["x" * (1 << 20)], EmbeddingCall(truncate=True))
        assert tokens == 2048 and read[-1] == 64 * 2048
