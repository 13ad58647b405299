"""OpenAI's files and vector stores with its own client, on the fake engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI

from cairn.api.http import quotas
from cairn.config.values import Secret, TenantKeys, TenantLimits
from cairn.rag import vector_stores
from cairn.rag.attachments import Attachments
from cairn.rag.chunking import Piece
from cairn.rag.definition import NewDocument
from cairn.rag.document_store import DocumentStore
from cairn.rag.file_store import FileStore, StoredFile
from cairn.rag.filters import filter_of
from cairn.system.deadline import DEADLINE
from cairn.system.spans import PRESENT
from cairn.types.errors import Conflict, InvalidRequest
from tests.agents.house import talking_model
from tests.api.homes import home
from tests.rag.document_files import pdf
from tests.service.tiny import make_embedder

CAIRNS = b"# Cairns\n\nA cairn is a heap of stones.\n\n# Bread\n\nBread is made of flour.\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = talking_model(tmp_path_factory.mktemp("models") / "tiny")
    make_embedder(made.parent / "embedder")
    return made


@asynccontextmanager
async def client(folder: Path, tmp_path: Path, **options: Any) -> AsyncIterator[AsyncOpenAI]:
    async with (
        home(folder, folder.parent / "embedder", agents_dir=str(tmp_path / "agents"), **options) as (_, http),
        AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="key", max_retries=0) as made,
    ):
        yield made


async def test_files_are_kept_as_they_were_uploaded(folder: Path, tmp_path: Path) -> None:
    async with client(folder, tmp_path) as ai:
        data = bytes(range(256)) * 9_000  # more than one piece
        one = await ai.files.create(file=("a.bin", data), purpose="user_data")
        two = await ai.files.create(file=("b.md", CAIRNS), purpose="assistants")
        assert (one.bytes, one.filename, one.purpose, one.status) == (len(data), "a.bin", "user_data", "processed")
        assert (await ai.files.content(one.id)).read() == data
        assert [file.id async for file in ai.files.list()] == [two.id, one.id]
        assert [file.id async for file in ai.files.list(purpose="user_data")] == [one.id]
        assert [file.id async for file in ai.files.list(order="asc", limit=1)] == [one.id, two.id]  # page by page
        place = f"{two.created!r}:{two.id}"  # type: ignore[attr-defined]  # as a router asks, for what it has elsewhere
        assert [file.id async for file in ai.files.list(after=place)] == [one.id]
        assert [file.id async for file in ai.files.list(order="asc", after="1.0:x")] == [one.id, two.id]
        assert (await ai.files.retrieve(two.id)) == two
        assert (await ai.files.delete(one.id)).deleted
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            await ai.files.retrieve(one.id)
        kept = b"".join(path.read_bytes() for path in (tmp_path / "agents-collections").iterdir())
        assert data[:256] not in kept and b"heap of stones" in kept
        with pytest.raises(openai.BadRequestError, match="purpose must be one of"):
            await ai.files.create(file=("a", b"x"), purpose="play")  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError, match="is not built: files stay"):
            await ai.files.create(
                file=("a", b"x"), purpose="vision", expires_after={"anchor": "created_at", "seconds": 3600}
            )


async def test_a_connection_is_reused_after_a_file_download(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body ends with the last announced byte.

    Before, a request sent right then was taken for a pipelined one, which closes the connection.
    """
    pieces = FileStore.pieces

    def lingering(store: FileStore, file: StoredFile) -> Iterator[bytes]:
        yield from pieces(store, file)
        time.sleep(0.3)

    monkeypatch.setattr(FileStore, "pieces", lingering)
    async with client(folder, tmp_path) as ai:
        made = [await ai.files.create(file=("a", bytes(size)), purpose="user_data") for size in (0, 10)]
        for one in made:
            assert (await ai.files.content(one.id)).read() == bytes(one.bytes)
            assert len((await ai.files.list()).data) == 2


async def test_what_files_take_counts_against_a_tenants_disk(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "FRESH_SECONDS", 0.0)
    tenants = (TenantKeys("bob", (Secret("key"),), TenantLimits(max_disk_mib=1)),)
    async with client(folder, tmp_path, tenants=tenants) as ai:
        made = await ai.files.create(file=("a.bin", bytes(1 << 20)), purpose="user_data")
        with pytest.raises(openai.APIStatusError, match="max_disk_mib"):
            await ai.files.create(file=("b.bin", b"x"), purpose="user_data")
        with pytest.raises(openai.APIStatusError, match="max_disk_mib"):
            await ai.vector_stores.create(name="more")
        await ai.files.delete(made.id)
        await ai.files.create(file=("b.bin", b"x"), purpose="user_data")


async def test_a_vector_store_from_creation_to_deletion(folder: Path, tmp_path: Path) -> None:
    async with client(folder, tmp_path) as ai:
        store = await ai.vector_stores.create(name="docs", metadata={"a": "b"})
        assert (store.name, store.metadata, store.file_counts.total) == ("docs", {"a": "b"}, 0)
        file = await ai.vector_stores.files.upload_and_poll(
            vector_store_id=store.id, file=("cairns.md", CAIRNS), attributes={"year": 2026, "new": True}
        )
        assert (file.status, file.last_error, file.usage_bytes) == ("completed", None, len(CAIRNS))
        assert file.attributes == {"year": 2026.0, "new": True}
        results = [one async for one in ai.vector_stores.search(store.id, query="flour", max_num_results=2)]
        assert {result.content[0].text for result in results} == {
            "A cairn is a heap of stones.",
            "Bread is made of flour.",
        }
        assert {(result.file_id, result.filename) for result in results} == {(file.id, "cairns.md")}
        old: Any = {"type": "and", "filters": [{"type": "lt", "key": "year", "value": 2000}]}
        assert [one async for one in ai.vector_stores.search(store.id, query="flour", filters=old)] == []
        changed = await ai.vector_stores.files.update(file.id, vector_store_id=store.id, attributes={"year": 1999})
        assert changed.attributes == {"year": 1999.0}
        assert len([one async for one in ai.vector_stores.search(store.id, query="flour", filters=old)]) == 2
        texts = [one.text async for one in ai.vector_stores.files.content(file.id, vector_store_id=store.id)]
        assert texts == ["A cairn is a heap of stones.", "Bread is made of flour."]
        assert (await ai.vector_stores.update(store.id, name="other")).name == "other"
        shown = await ai.vector_stores.retrieve(store.id)
        assert (shown.file_counts.completed, shown.status, shown.usage_bytes) == (1, "completed", len(CAIRNS))
        assert shown.metadata == {"a": "b"}
        assert [one.id async for one in ai.vector_stores.list()] == [store.id]
        again = await ai.vector_stores.files.create(store.id, file_id=file.id)
        assert again.status == "completed"  # it is there already
        assert (await ai.vector_stores.files.delete(file.id, vector_store_id=store.id)).deleted
        assert (await ai.vector_stores.retrieve(store.id)).file_counts.total == 0
        assert (await ai.files.retrieve(file.id)).bytes == len(CAIRNS)
        assert (await ai.vector_stores.delete(store.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await ai.vector_stores.retrieve(store.id)


async def test_files_go_in_together_and_each_says_how_it_ended(folder: Path, tmp_path: Path) -> None:
    async with client(folder, tmp_path) as ai:
        contents = {"a.md": CAIRNS, "b.pdf": pdf(["Stones by the path"]), "c.pdf": b"broken", "d.txt": b"\xff"}
        files = [await ai.files.create(file=item, purpose="assistants") for item in contents.items()]
        store = await ai.vector_stores.create()
        batch = await ai.vector_stores.file_batches.create_and_poll(
            store.id,
            file_ids=[file.id for file in files],
            attributes={"x": "y"},
            chunking_strategy={
                "type": "static",
                "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 20},
            },
            poll_interval_ms=50,
        )
        assert (batch.status, batch.file_counts.completed, batch.file_counts.failed) == ("completed", 2, 2)
        ended = {
            file.id: file async for file in ai.vector_stores.file_batches.list_files(batch.id, vector_store_id=store.id)
        }
        assert [ended[file.id].status for file in files] == ["completed", "completed", "failed", "failed"]
        broken, binary = ended[files[2].id].last_error, ended[files[3].id].last_error
        assert broken is not None and broken.code == "invalid_file" and "cannot be read" in broken.message
        assert binary is not None and "not UTF-8 text" in binary.message
        strategy: Any = ended[files[0].id].chunking_strategy
        assert (strategy.static.max_chunk_size_tokens, strategy.static.chunk_overlap_tokens) == (100, 20)
        failed = [one.id async for one in ai.vector_stores.files.list(store.id, filter="failed", order="asc")]
        assert failed == [files[2].id, files[3].id]
        await ai.files.delete(files[1].id)  # along with its documents in the store
        results = [one async for one in ai.vector_stores.search(store.id, query=["stones", "flour"])]
        assert {result.file_id for result in results} == {files[0].id} and len(results) == 2
        made = await ai.vector_stores.create(file_ids=[files[0].id])
        assert made.file_counts.total == 1
        with pytest.raises(openai.NotFoundError, match="there is no file nothing"):
            await ai.vector_stores.create(file_ids=["nothing"])
        with pytest.raises(openai.BadRequestError, match="has all of these files already"):
            await ai.vector_stores.file_batches.create(store.id, file_ids=[files[0].id])


async def test_a_batch_is_cancelled(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(vector_stores.Collections, "add", never)
    async with client(folder, tmp_path) as ai:
        file = await ai.files.create(file=("a.md", CAIRNS), purpose="assistants")
        store = await ai.vector_stores.create()
        batch = await ai.vector_stores.file_batches.create(store.id, file_ids=[file.id])
        assert batch.status == "in_progress"
        assert (await ai.vector_stores.retrieve(store.id)).status == "in_progress"
        ended = await ai.vector_stores.file_batches.cancel(batch.id, vector_store_id=store.id)
        assert ended.status == "cancelled"
        assert (await ai.vector_stores.files.retrieve(file.id, vector_store_id=store.id)).status == "cancelled"
        monkeypatch.undo()
        again = await ai.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=50)
        assert again.status == "completed"


async def test_background_work_outlives_the_deadline_of_its_call(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[object] = []

    async def add(*_: object) -> None:
        known.extend((DEADLINE.get(), PRESENT.get()))

    monkeypatch.setattr(vector_stores.Collections, "add", add)
    async with client(folder, tmp_path) as ai:
        file = await ai.files.create(file=("a.md", CAIRNS), purpose="assistants")
        store = await ai.vector_stores.create()
        asked = {"X-Request-Timeout": "60", "Server-Timing": "1"}
        await ai.vector_stores.files.create(store.id, file_id=file.id, extra_headers=asked)
        await ai.vector_stores.files.poll(file.id, vector_store_id=store.id, poll_interval_ms=20)
    assert known == [None, None]


async def test_collections_are_vector_stores(folder: Path, tmp_path: Path) -> None:
    async with client(folder, tmp_path) as ai:
        await ai.post("/collections", body={"id": "mine"}, cast_to=object)
        document = {"id": "d", "name": "cairns.md", "text": CAIRNS.decode()}
        await ai.post("/collections/mine/documents", body=document, cast_to=object)
        assert (await ai.vector_stores.retrieve("mine")).file_counts.completed == 1
        assert [one.id async for one in ai.vector_stores.files.list("mine")] == ["d"]
        assert [one.file_id async for one in ai.vector_stores.search("mine", query="stones")] == ["d", "d"]


async def test_no_tenant_sees_anothers_files_and_stores(folder: Path, tmp_path: Path) -> None:
    keys = {name: f"key-{name}-0123456789" for name in ("one", "two")}
    tenants = tuple(TenantKeys(name, (Secret(key),)) for name, key in keys.items())
    async with client(folder, tmp_path, tenants=tenants) as ai:
        mine, other = ai.with_options(api_key=keys["one"]), ai.with_options(api_key=keys["two"])
        file = await mine.files.create(file=("a.md", CAIRNS), purpose="assistants")
        store = await mine.vector_stores.create()
        await mine.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=50)
        theirs = await other.vector_stores.create()
        search: Any = [{"type": "file_search", "vector_store_ids": [store.id]}]
        for asked in (
            lambda: other.files.retrieve(file.id),
            lambda: other.files.delete(file.id),
            lambda: other.files.content(file.id),
            lambda: other.vector_stores.retrieve(store.id),
            lambda: other.vector_stores.delete(store.id),
            lambda: other.vector_stores.files.content(file.id, vector_store_id=store.id),
            lambda: other.vector_stores.files.create(theirs.id, file_id=file.id),
            lambda: other.post(f"/vector_stores/{store.id}/search", body={"query": "stones"}, cast_to=object),
            lambda: other.responses.create(model="any", input="stones", tools=search),
            lambda: other.post(f"/collections/{store.id}/ask", body={"query": "stones"}, cast_to=object),
        ):
            with pytest.raises(openai.NotFoundError):
                await asked()
        assert [one.id async for one in other.files.list()] == []
        assert [one.id async for one in other.vector_stores.list()] == [theirs.id]
        assert (await mine.vector_stores.retrieve(store.id)).file_counts.completed == 1


WRONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("", {"expires_after": {"anchor": "last_active_at", "days": 1}}, "expires_after is not built"),
    ("", {"name": "x" * 257}, "name must have at most 256"),
    ("", {"chunking_strategy": {"type": "static", "static": {}}}, "max_chunk_size_tokens must be 100 to 4096"),
    ("/mine/search", {"query": ""}, "query is empty"),
    ("/mine/search", {"query": "x", "max_num_results": 51}, "max_num_results must be 1 to 50"),
    ("/mine/search", {"query": "x", "filters": {"type": "eq"}}, "filters.key must be a text"),
    ("/mine/search", {"query": "x", "ranking_options": {"ranker": "best"}}, "ranker must be one of"),
    ("/mine/files", {"file_id": "f", "attributes": {"a": []}}, "attributes.a must be a text"),
    ("/mine/files", {"file_id": "f", "attributes": {"a": 10**399}}, "attributes.a: a number has at most 64 bits"),
    ("/mine/search", {"query": "x", "ranking_options": {"score_threshold": 10**399}}, "score_threshold"),
    ("/mine/files", {"file_id": "f", "attributes": {str(at): 1 for at in range(17)}}, "the limit is 16"),
    ("/mine/file_batches", {"file_ids": ["f"] * 2001}, "the limit is 2000"),
    ("/mine/file_batches", {}, "give file_ids, or files"),
)


async def test_invalid_input_is_named_in_the_error(folder: Path, tmp_path: Path) -> None:
    async with client(folder, tmp_path) as ai:
        await ai.post("/collections", body={"id": "mine"}, cast_to=object)
        for path, body, said in WRONG:
            with pytest.raises(openai.BadRequestError) as wrong:
                await ai.post(f"/vector_stores{path}", body=body, cast_to=object)
            assert said in str(wrong.value), wrong.value


def test_filters_compare_and_join() -> None:
    noted: dict[str, Any] = {"year": 1999, "kind": "a", "new": True}

    def fits(kind: str, key: str, value: Any) -> bool:
        return filter_of({"type": kind, "key": key, "value": value})(noted)

    assert fits("eq", "kind", "a") and not fits("ne", "kind", "a") and fits("ne", "other", "a")
    assert fits("gt", "year", 1998) and fits("gte", "year", 1999) and not fits("lt", "year", 1999)
    assert fits("in", "kind", ["b", "a"]) and fits("nin", "kind", ["b"]) and not fits("in", "other", ["a"])
    assert not fits("eq", "new", 1) and fits("eq", "new", True) and not fits("gt", "kind", 1)
    both = {
        "type": "or",
        "filters": [{"type": "eq", "key": "kind", "value": "b"}, {"type": "eq", "key": "new", "value": True}],
    }
    assert filter_of(both)(noted) and not filter_of(both | {"type": "and"})(noted)
    deep: Any = {"type": "eq", "key": "a", "value": 1}
    for _ in range(9):
        deep = {"type": "and", "filters": [deep]}
    for wrong in (deep, {"type": "gt", "key": "a", "value": "x"}, {"type": "near", "key": "a", "value": 1}, []):
        with pytest.raises(InvalidRequest):
            filter_of(wrong)


def test_unfinished_files_are_reported_after_a_restart(tmp_path: Path) -> None:
    store = DocumentStore(tmp_path / "c.sqlite", lambda: 1.0)
    one = store.create("me", "c", 1000, 100, {})
    Attachments(store.database, lambda: 1.0).begin(one, [vector_stores.WantedFile("f")], "")
    store.close()
    store = DocumentStore(tmp_path / "c.sqlite", lambda: 1.0)
    result = Attachments(store.database, lambda: 1.0).get(store.collection("me", "c"), "f")
    assert (result.state, result.code) == ("failed", "server_error") and "the server ended" in result.why
    store.close()


@pytest.mark.parametrize("ending", ["cancelled", "removed", "killed"])
def test_a_file_and_its_state_are_stored_together(tmp_path: Path, ending: str) -> None:
    """Whatever ends an attachment before its document is stored keeps the document out; it can be attached again."""
    store = DocumentStore(tmp_path / "c.sqlite", lambda: 1.0)
    attachments, one = Attachments(store.database, lambda: 1.0), store.create("me", "c", 1000, 100, {})
    document, vectors = NewDocument("f", "f.txt", "txt", "", 5, {}, attached=True), [np.ones(3, np.float32)]

    def put() -> None:
        store.add(one, document, [Piece("", "zebra")], vectors, ("m", b"", 3))

    attachments.begin(one, [vector_stores.WantedFile("f")], "")
    if ending == "cancelled":
        attachments.end(one, "f", "cancelled")
    elif ending == "removed":
        attachments.remove(one, "f")
    else:
        attachments = Attachments(store.database, lambda: 1.0)
    with pytest.raises(Conflict, match="cancelled or removed"):
        put()
    assert store.documents(one) == []
    attachments.begin(one, [vector_stores.WantedFile("f")], "")
    put()
    assert attachments.get(one, "f").state == "completed" and len(store.documents(one)) == 1
    attachments.end(one, "f", "cancelled")
    assert attachments.get(one, "f").state == "completed"
    store.close()


def test_a_file_of_the_first_form_is_brought_to_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cairn.rag import document_store

    forms = document_store.MIGRATIONS
    monkeypatch.setattr(document_store, "MIGRATIONS", forms[:1])
    old = DocumentStore(tmp_path / "c.sqlite", lambda: 1.0)
    with old.database.change() as db:
        db.execute(
            "INSERT INTO collections (tenant, id, created, chunk, overlap, metadata) VALUES ('me','c',1,9,1,'{}')"
        )
    old.close()
    monkeypatch.setattr(document_store, "MIGRATIONS", forms)
    new = DocumentStore(tmp_path / "c.sqlite", lambda: 1.0)
    result = new.collection("me", "c")
    assert (result.name, result.documents) == ("", 0)
    assert NewDocument("d", "d.txt", "txt", "", 1, {}).sizes is None
    new.close()
