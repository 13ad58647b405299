"""Files that are read into vector stores in the background, beside a full queue, a failing disk and deletions."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cairn.frontend.embeddings import EmbeddingCall
from cairn.rag import collections, vector_stores
from cairn.rag.attachments import Attachments, WantedFile
from cairn.rag.collections import AT_ONCE, Collections, Embedder
from cairn.rag.document_store import DocumentStore
from cairn.rag.file_store import FileStore
from cairn.rag.vector_stores import VectorStores
from cairn.types.errors import Overloaded

SERVICE = cast(
    Any, SimpleNamespace(spec=SimpleNamespace(embedding=SimpleNamespace(prompts={}), identity=b"1", width=3))
)
SERVICE.name = "m"


class Bench:
    """A vector store `c` and one file of a hundred chunks; `made` counts the vectors, `refuse` fails a call."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = DocumentStore(folder / "c.sqlite", lambda: 1000.0)
        files = FileStore(folder / "f.sqlite", lambda: 1000.0)
        self.attachments = Attachments(self.store.database, lambda: 1000.0)
        self.stores = VectorStores(Collections(self.store, cast(Any, None)), files, self.attachments)
        self.store.create("me", "c", 200, 0, {})
        text = b"some words here. " * 1200
        files.add("me", "file", "a.txt", "assistants", io.BytesIO(text), len(text))
        self.made, self.calls, self.refuse = 0, 0, 0
        self.going = asyncio.Event()
        monkeypatch.setattr(collections, "vectors", self.vectors)

    async def vectors(self, service: object, texts: Sequence[str], asking: object) -> tuple[list[Any], int]:
        self.calls += 1
        if self.calls == self.refuse:
            raise Overloaded("the queue is full", retry_after=0.01)
        await self.going.wait()
        self.made += len(texts)
        return [np.ones(3, np.float32)] * len(texts), 1

    @contextlib.asynccontextmanager
    async def embedder(self) -> AsyncIterator[Embedder]:
        yield Embedder(SERVICE, EmbeddingCall())

    async def attach(self) -> asyncio.Task[None]:
        await self.stores.attach("me", "c", [WantedFile("file")], self.embedder)
        (task,) = self.stores._tasks.values()
        return task

    def state(self) -> str:
        return self.attachments.get(self.store.collection("me", "c"), "file").state


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    made = Bench(tmp_path, monkeypatch)
    yield made
    made.store.close()
    made.stores.files.close()


async def test_a_queue_that_is_full_for_a_moment_keeps_what_was_embedded(bench: Bench) -> None:
    bench.refuse = 2
    bench.going.set()
    await (await bench.attach())
    assert bench.state() == "completed" and bench.made > AT_ONCE and bench.calls == 3


async def test_the_end_of_a_file_is_recorded_once_the_disk_takes_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_stores, "RETRY_SECONDS", 0.01)
    tries, end = 0, bench.attachments.end

    def counted(*args: Any) -> None:
        nonlocal tries
        tries += 1
        end(*args)

    monkeypatch.setattr(bench.attachments, "end", counted)
    task = await bench.attach()
    bench.store.database._db.execute("PRAGMA query_only=ON")  # as a disk that refuses writes
    bench.going.set()
    while tries < 2:
        assert not task.done()
        await asyncio.sleep(0.01)
    assert bench.state() == "in_progress"
    bench.store.database._db.execute("PRAGMA query_only=OFF")
    await task
    assert bench.state() == "failed"
    await (await bench.attach())
    assert bench.state() == "completed"


async def test_a_deleted_store_reads_its_files_no_further(bench: Bench) -> None:
    task = await bench.attach()
    while not bench.calls:
        await asyncio.sleep(0.01)
    await bench.stores.delete("me", "c")
    assert task.cancelled() and not bench.stores._tasks
    assert not bench.made and not bench.store.collections("me")


async def test_erasures_take_one_thread_and_turns_among_tenants(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    at_once = most = 0
    lock = threading.Lock()

    def remove(collection: str, document: str) -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.01)
        order.append(document)
        with lock:
            at_once -= 1

    monkeypatch.setattr(bench.store, "collection", lambda tenant, id: id)
    monkeypatch.setattr(bench.store, "remove", remove)
    removals = [bench.stores._collections.remove("me", "c", f"mine {number}") for number in range(4)]
    await asyncio.gather(*removals, bench.stores._collections.remove("you", "c", "yours"))
    assert most == 1 and order.index("yours") <= 2
