"""The routes of collections over a real socket, on the fake engine."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agents.house import talking_model
from tests.api.homes import home, plain
from tests.rag.document_files import docx, paragraph, pdf
from tests.service.tiny import make_embedder

TEXT = "# Cairns\n\nA cairn is a heap of stones.\n\n# Bread\n\nBread is made of flour.\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = talking_model(tmp_path_factory.mktemp("models") / "tiny")
    make_embedder(made.parent / "embedder")
    return made


@asynccontextmanager
async def shelf(folder: Path, tmp_path: Path, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with home(folder, folder.parent / "embedder", agents_dir=str(tmp_path / "agents"), **options) as (_, http):
        yield http


async def test_a_collection_from_creation_to_deletion(folder: Path, tmp_path: Path) -> None:
    async with shelf(folder, tmp_path) as http:
        made = await http.post("/v1/collections", json={"id": "c", "chunk": 200, "metadata": {"a": "b"}})
        assert made.status_code == 201 and (made.json()["chunks"], made.json()["overlap"]) == (0, 50)
        added = await http.post("/v1/collections/c/documents", json={"id": "d", "name": "cairns.md", "text": TEXT})
        assert added.status_code == 201, added.text
        assert (added.json()["type"], added.json()["chunks"]) == ("md", 2)
        page = "<h1>Rivers</h1><p>A river flows.</p>"
        await http.post("/v1/collections/c/documents", json={"name": "r.html", "text": page, "metadata": {"x": "y"}})
        shown = (await http.get("/v1/collections/c")).json()
        assert (shown["documents"], shown["chunks"]) == (2, 3) and shown["dimensions"] > 0
        listed = (await http.get("/v1/collections/c/documents", params={"limit": 1})).json()
        assert [item["id"] for item in listed["data"]] == ["d"] and listed["has_more"]
        hits = (await http.post("/v1/collections/c/search", json={"query": "What is flour for?", "top_k": 3})).json()
        assert len(hits["data"]) == 3 and all(-1.01 <= item["score"] <= 1.01 for item in hits["data"])
        assert {(item["name"], item["heading"]) for item in hits["data"]} == {
            ("cairns.md", "Cairns"),
            ("cairns.md", "Bread"),
            ("r.html", "Rivers"),
        }
        only = {"query": "flour", "filters": {"metadata": {"x": "y"}}}
        assert [item["name"] for item in (await http.post("/v1/collections/c/search", json=only)).json()["data"]] == [
            "r.html"
        ]
        asked = {"query": "What is a cairn?", "min_score": -1, "max_tokens": 12, "seed": 4, "temperature": 0.8}
        answer = (await http.post("/v1/collections/c/ask", json=asked)).json()
        assert answer["object"] == "collection.answer"
        assert answer["answered"] is any(source["cited"] for source in answer["sources"])
        assert [source["number"] for source in answer["sources"]] == [1, 2, 3]
        assert answer["completion_tokens"] <= 12 and answer["prompt_tokens"] > 100
        result = plain((await http.post("/v1/collections/c/ask", json=asked | {"stream": True})).text)
        assert result[0]["type"] == "sources" and len(result[0]["sources"]) == 3
        said = "".join(event["content"] for event in result if event["type"] == "answer.delta")
        assert said == answer["answer"] == result[-1]["answer"]
        assert result[-1]["cached_tokens"] > 100  # the sources come before the question
        nothing = (await http.post("/v1/collections/c/ask", json={"query": "Zebra?", "min_score": 1})).json()
        assert nothing["answered"] is False and nothing["sources"] == [] and "no answer" in nothing["answer"]
        assert (await http.delete("/v1/collections/c/documents/d")).json()["deleted"] is True
        assert (await http.get("/v1/collections/c/documents/d")).status_code == 404
        assert (await http.get("/v1/collections")).json()["data"][0]["documents"] == 1
        assert (await http.delete("/v1/collections/c")).json()["deleted"] is True
        assert (await http.get("/v1/collections/c")).status_code == 404


async def test_documents_of_all_kinds_and_ways(folder: Path, tmp_path: Path) -> None:
    async with shelf(folder, tmp_path) as http:
        await http.post("/v1/collections", json={"id": "c"})
        path = "/v1/collections/c/documents"
        two = pdf(["Stones by the path", "Bread"])
        sent = {"name": "two.pdf", "data": base64.b64encode(two).decode(), "metadata": {"a": "b"}}
        made = (await http.post(path, json=sent)).json()
        assert (made["type"], made["chunks"], made["bytes"], made["metadata"]) == ("pdf", 2, len(two), {"a": "b"})
        word = docx(paragraph("Rivers", "berschrift1") + paragraph("A river flows."))
        form = {"id": "w", "metadata": '{"x": "y"}'}
        made = (await http.post(path, data=form, files={"file": ("dir/river.docx", word)})).json()
        assert made == made | {"id": "w", "name": "river.docx", "type": "docx", "chunks": 1, "metadata": {"x": "y"}}
        hit = {"query": "river", "filters": {"documents": ["w"]}}
        items = (await http.post("/v1/collections/c/search", json=hit)).json()["data"]
        assert [(item["heading"], item["text"]) for item in items] == [("Rivers", "A river flows.")]
        files = {"file": ("long.txt", "\n\n".join("stone " * 150 for _ in range(100)))}
        events = plain((await http.post(path, data={"stream": "true"}, files=files)).text)
        steps = [(event["embedded"], event["chunks"]) for event in events if event["type"] == "document.embedding"]
        assert steps == [(64, 100), (100, 100)] and events[-1]["type"] == "document.done"
        assert events[-1]["document"]["chunks"] == 100
        for content, fields, status, said in WRONG_FILES:
            answer = await http.post(path, data=fields, files={"file": content})
            assert answer.status_code == status and said in answer.json()["error"]["message"], answer.text
        evil = {"origin": "https://evil.example"}
        assert (await http.post(path, files={"file": ("a.txt", "x")}, headers=evil)).status_code == 403
        shown = (await http.get("/v1/collections/c")).json()
        assert shown["documents"] == 3


WRONG_FILES: tuple[tuple[Any, dict[str, str], int, str], ...] = (
    (("a.pdf", b"no pdf"), {}, 400, "file: the PDF cannot be read"),
    (("a.pdf", pdf([""])), {}, 400, "file: no page of the PDF holds text"),
    (("a.txt", b"\xff"), {}, 400, "file: the document is not UTF-8 text"),
    (("a.txt", b"x"), {"type": "exe"}, 400, "type"),
    (("a.txt", b"x"), {"metadata": "[]"}, 400, "must be a JSON object"),
    (("a.txt", b"x"), {"colour": "red"}, 400, "colour is not a field"),
    (("a.txt", b"x"), {"name": "y" * (65 << 10)}, 413, "65536 bytes, the limit"),
)


async def test_a_document_has_so_many_bytes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.api.chat.documents.MAX_BYTES", 100_000)
    async with shelf(folder, tmp_path) as http:
        await http.post("/v1/collections", json={"id": "c"})
        path = "/v1/collections/c/documents"
        answer = await http.post(path, files={"file": ("a.txt", b"x " * 60_000)})
        assert answer.status_code == 413 and "100000 bytes, the limit of a document" in answer.text
        monkeypatch.setattr("cairn.api.chat.documents.MAX_UPLOADS", 0)
        answer = await http.post(path, files={"file": ("a.txt", b"x")})
        assert answer.status_code == 429 and "uploads of yours are under way, the limit" in answer.text
        monkeypatch.setattr("cairn.api.chat.documents.MAX_UPLOADS", 1)
        broken = b"--b\r\nContent-Disposition: form-data; name=file; filename=a.txt\r\n\r\nx"
        kind = {"content-type": "multipart/form-data; boundary=b"}
        answer = await http.post(path, content=broken, headers=kind)
        assert answer.status_code == 400 and "before its last boundary" in answer.text
        answer = await http.post(path, content=b"--b--\r\n", headers=kind)
        assert answer.status_code == 400 and "file" in answer.text


WRONG: tuple[tuple[str, dict[str, Any], int, str], ...] = (
    ("", {"id": "x y"}, 400, "a collection's id has 1 to 64"),
    ("", {"chunk": 50}, 400, "100 to 20000"),
    ("", {"id": "c"}, 409, "a collection c already"),
    ("/c/documents", {"name": "x", "text": " "}, 400, "text holds no text"),
    ("/c/documents", {"name": "x.pdf", "text": "x"}, 400, "a document of type pdf is no text"),
    ("/c/documents", {"name": "x.pdf", "data": "x!"}, 400, "data is not base64"),
    ("/c/documents", {"name": "x"}, 400, "give text, or data"),
    ("/c/search", {"query": "x", "top_k": 51}, 400, "1 to 50, the limit"),
    ("/c/search", {"query": "x", "min_score": 2}, 400, "min_score must be -1 to 1"),
    ("/c/ask", {"query": " "}, 400, "query is empty"),
    ("/nowhere/documents", {"name": "x", "text": "x"}, 404, "no collection nowhere"),
)


async def test_invalid_input_is_named_in_the_error(folder: Path, tmp_path: Path) -> None:
    async with shelf(folder, tmp_path) as http:
        await http.post("/v1/collections", json={"id": "c"})
        for path, body, status, said in WRONG:
            answer = await http.post("/v1/collections" + path, json=body)
            assert answer.status_code == status and said in answer.json()["error"]["message"], answer.text


async def test_without_an_embedding_model_the_error_names_the_command_that_adds_one(
    folder: Path, tmp_path: Path
) -> None:
    """A chat model's vectors ranked right answers last, and nothing said why."""
    commands = "'cairn pull minilm', then start the server with it beside"
    async with home(folder, folder.parent / "embedder", agents_dir=str(tmp_path / "agents")) as (house, http):
        assert (await http.post("/v1/collections", json={"id": "c"})).status_code == 201
        text = {"name": "a.txt", "text": TEXT}
        assert (await http.post("/v1/collections/c/documents", json=text)).status_code == 201
        file = await http.post("/v1/files", files={"file": ("a.md", TEXT.encode())}, data={"purpose": "assistants"})
        chats = await http.post("/v1/collections/c/search", json={"query": "flour", "embedding_model": "m"})
        assert chats.status_code == 400 and chats.json()["error"]["param"] == "embedding_model"
        assert "is no model for embeddings" in chats.text and commands in chats.text
        unknown = await http.post("/v1/collections/c/search", json={"query": "flour", "embedding_model": "nobody"})
        assert unknown.status_code == 404

        house.web.app.service = house.service  # type: ignore[attr-defined]  # the server is started without it
        tool = {"type": "file_search", "vector_store_ids": ["c"]}
        routes: list[tuple[str, dict[str, Any]]] = [
            ("/v1/collections", {"id": "d"}),
            ("/v1/collections/c/documents", text),
            ("/v1/collections/c/documents", text | {"stream": True}),
            ("/v1/collections/c/documents", text | {"embedding_model": "m"}),
            ("/v1/collections/c/search", {"query": "flour"}),
            ("/v1/collections/c/ask", {"query": "flour"}),
            ("/v1/vector_stores", {"name": "d"}),
            ("/v1/vector_stores/c/files", {"file_id": file.json()["id"]}),
            ("/v1/vector_stores/c/file_batches", {"file_ids": [file.json()["id"]]}),
            ("/v1/vector_stores/c/search", {"query": "flour"}),
            ("/v1/responses", {"input": "flour", "tools": [tool]}),
        ]
        for path, body in routes:
            answer = await http.post(path, json=body)
            assert answer.status_code == 400, (path, answer.text)
            assert commands in answer.json()["error"]["message"] and "'cairn serve MODEL " in answer.text
        form = await http.post("/v1/collections/c/documents", files={"file": ("a.md", TEXT.encode())})
        assert form.status_code == 400 and commands in form.text
        assert (await http.get("/v1/collections")).json()["data"][0]["documents"] == 1  # nothing is lost
        assert (await http.post("/v1/embeddings", json={"input": "a text", "model": "m"})).status_code == 200
        assert (await http.delete("/v1/collections/c")).status_code == 200


async def test_what_models_are_for_may_not_be_known_yet(folder: Path, tmp_path: Path) -> None:
    async with home(folder, folder.parent / "embedder", agents_dir=str(tmp_path / "agents")) as (house, http):
        embeds = house.web.app.state.models.models[1]  # type: ignore[attr-defined]
        loaded, embeds.loaded, embeds.spec = embeds.loaded, None, None
        early = await http.post("/v1/collections", json={"id": "c"})
        assert early.status_code == 503 and early.headers["retry-after"]
        embeds.failure = "its files are broken"
        none = await http.post("/v1/collections", json={"id": "c"})
        assert none.status_code == 400 and "this server has none" in none.text
        named = {"query": "flour", "embedding_model": "embeds"}
        embeds.failure, embeds.loaded = "", loaded
        assert (await http.post("/v1/collections", json={"id": "c"})).status_code == 201
        assert (await http.post("/v1/collections/c/search", json=named)).status_code == 200
