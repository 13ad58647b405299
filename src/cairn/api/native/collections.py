"""The routes of collections, under /v1/collections.

POST /v1/collections                        GET    /v1/collections?limit=&after=
GET  /v1/collections/{id}                   DELETE /v1/collections/{id}
POST /v1/collections/{id}/documents         GET    /v1/collections/{id}/documents?limit=&after=
GET  /v1/collections/{id}/documents/{document}    DELETE /v1/collections/{id}/documents/{document}
POST /v1/collections/{id}/search            POST   /v1/collections/{id}/ask
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, BinaryIO

import msgspec

from cairn.api.chat.generation import check_model
from cairn.api.chat.paging import LISTED, MOST_LISTED, page, parameters
from cairn.api.chat.parse import parse
from cairn.api.chat.state import ServerState
from cairn.api.http.body import read_json, read_nothing
from cairn.api.http.call import HTTPCall
from cairn.api.http.multipart import is_form
from cairn.api.http.routes import Route
from cairn.api.native.agent_schemas import check_metadata
from cairn.api.native.collection_schemas import (
    PATH,
    AskCollectionBody,
    CollectionBody,
    CollectionDocumentBody,
    SearchBody,
    collection_object,
    document_object,
    document_of_form,
)
from cairn.api.native.work_events import Emit, answer
from cairn.frontend.service import Service
from cairn.rag.collections import SourcedAnswer
from cairn.rag.definition import NewDocument, SearchHit, check_name
from cairn.rag.extract_parent import aside
from cairn.types.errors import InvalidRequest
from cairn.workflows.answerer import Asker

FORM = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        **{name: {"type": "string"} for name in ("id", "name", "type", "metadata", "embedding_model", "stream")},
    },
}
"""The schema of a document that is uploaded as a form."""


class CollectionRoutes:
    """The routes of collections."""

    def __init__(self, state: ServerState) -> None:
        self._config, self._logs, self._library = state.config, state.logs, state.library

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("POST", "/v1/collections", self.create, CollectionBody, keeps=True, status=201),
            Route("GET", "/v1/collections", self.list, query=("limit", "after")),
            Route("GET", "/v1/collections/{id}", self.show),
            Route("DELETE", "/v1/collections/{id}", self.delete),
            Route(
                "POST",
                "/v1/collections/{id}/documents",
                self.add,
                CollectionDocumentBody,
                keeps=True,
                status=201,
                stream=True,
                form=FORM,
            ),
            Route("GET", "/v1/collections/{id}/documents", self.documents, query=("limit", "after")),
            Route("GET", "/v1/collections/{id}/documents/{document}", self.show_document),
            Route("DELETE", "/v1/collections/{id}/documents/{document}", self.delete_document),
            Route("POST", "/v1/collections/{id}/search", self.search, SearchBody),
            Route("POST", "/v1/collections/{id}/ask", self.ask, AskCollectionBody, model="chat"),
        ]

    async def create(self, call: HTTPCall, service: Service) -> None:
        """Create a collection of documents."""
        store = (await self._library.open()).store
        self._library.check_embedder()
        body = parse(CollectionBody, await read_nothing(call, self._config), self._config, call)
        check_metadata(body.metadata)
        id = f"collection-{call.id}" if body.id is None else check_name(body.id, "a collection's id")
        made = await asyncio.to_thread(store.create, call.tenant, id, *body.sizes(), body.metadata or {})
        await call.json(collection_object(made), 201)

    async def list(self, call: HTTPCall, service: Service) -> None:
        """List the collections, most recently created first."""
        found = await asyncio.to_thread((await self._library.open()).store.collections, call.tenant)
        await call.json(_page(call, [collection_object(one) for one in found]))

    async def show(self, call: HTTPCall, service: Service) -> None:
        """Return a collection, and how much it holds."""
        store = (await self._library.open()).store
        await call.json(collection_object(await asyncio.to_thread(store.collection, call.tenant, call.path_part(PATH))))

    async def delete(self, call: HTTPCall, service: Service) -> None:
        """Delete a collection. Answered when its text is overwritten on the disk."""
        stores, id = await self._library.stores(), call.path_part(PATH)
        await stores.delete(call.tenant, id)
        await call.json({"id": id, "object": "collection.deleted", "deleted": True})

    async def add(self, call: HTTPCall, service: Service) -> None:
        """Add a document, as JSON or as a form with a `file`. With `stream` its progress is reported."""
        if is_form(call):
            async with self._library.upload(call) as form:
                body = parse(CollectionDocumentBody, document_of_form(form), self._config, call)
                await self._add(call, body, form.file, form.size)
            return
        body = parse(CollectionDocumentBody, await read_json(call, self._config), self._config, call)
        content = body.content()
        if isinstance(content, str):
            await self._add(call, body, content, len(content.encode("utf-8", "replace")))
            return
        with await asyncio.to_thread(aside, content) as file:
            await self._add(call, body, file, len(content))

    async def _add(self, call: HTTPCall, body: CollectionDocumentBody, content: str | BinaryIO, size: int) -> None:
        collections, id = await self._library.open(), call.path_part(PATH)
        check_metadata(body.metadata)
        await asyncio.to_thread(collections.store.collection, call.tenant, id)
        self._library.check_embedder(body.embedding_model)
        if not 1 <= len(body.name) <= 256:
            raise InvalidRequest("name must have 1 to 256 characters", field="name")
        document = f"document-{call.id}" if body.id is None else check_name(body.id, "a document's id")
        kind = body.kind()
        if body.stream and not isinstance(content, str):  # the work may outlive its call, which closes the file
            content = os.fdopen(os.dup(content.fileno()), "rb")
        new = NewDocument(
            id=document,
            name=body.name,
            kind=kind,
            content=content,
            size=size,
            metadata=dict(body.metadata or {}),
            field="file" if is_form(call) else "data" if body.text is None else "text",
        )
        added: list[dict[str, Any]] = []

        def room(tenant: str, size: int) -> AbstractAsyncContextManager[None]:
            return self._library.room(call, size)

        async def work(emit: Emit) -> None:
            def heard(done: int, all: int) -> None:
                emit({"type": "document.embedding", "embedded": done, "chunks": all})

            with contextlib.nullcontext() if isinstance(content, str) else content:
                async with self._library.embedder(call.salt, call.share, body.embedding_model, new.field) as embedder:
                    made = await collections.add(call.tenant, id, embedder, new, room, heard)
            added.append(document_object(made))
            emit({"type": "document.done", "document": added[0]})

        if body.stream:
            await answer(call, self._logs, self._config, work, stream=True, whole=dict)
            return
        await work(lambda event: None)
        await call.json(added[0], 201)

    async def documents(self, call: HTTPCall, service: Service) -> None:
        """List the documents in the order in which they were added."""
        store = (await self._library.open()).store

        def found() -> list[dict[str, Any]]:
            collection = store.collection(call.tenant, call.path_part(PATH))
            return [document_object(one) for one in store.documents(collection)]

        await call.json(_page(call, await asyncio.to_thread(found)))

    async def show_document(self, call: HTTPCall, service: Service) -> None:
        """Return a document without its text."""
        store = (await self._library.open()).store

        def found() -> dict[str, Any]:
            collection = store.collection(call.tenant, call.path_part(PATH))
            return document_object(store.document(collection, _document_of(call)))

        await call.json(await asyncio.to_thread(found))

    async def delete_document(self, call: HTTPCall, service: Service) -> None:
        """Delete a document. Answered when its text is overwritten on the disk."""
        collections, id = await self._library.open(), _document_of(call)
        await collections.remove(call.tenant, call.path_part(PATH), id)
        await call.json({"id": id, "object": "collection.document.deleted", "deleted": True})

    async def search(self, call: HTTPCall, service: Service) -> None:
        """Return the passages that fit a query best."""
        body = parse(SearchBody, await read_json(call, self._config), self._config, call)
        found, reranked_by = await self._search(call, body)
        await call.json({"object": "list", "data": [one.plain() for one in found], "reranked_by": reranked_by})

    async def _search(self, call: HTTPCall, body: SearchBody) -> tuple[Sequence[SearchHit], str | None]:
        """Return what was found, and the model that reranked it, if one did."""
        collections, wanted, asked = await self._library.open(), body.wanted(), (call.salt, call.share)
        async with (
            self._library.embedder(*asked, body.embedding_model, "query") as embedder,
            self._library.judge(*asked, body.rerank, body.rerank_model) as judge,
        ):
            found = await collections.search(call.tenant, call.path_part(PATH), embedder, body.query, wanted, judge)
            return found, None if judge is None else judge.service.name

    async def ask(self, call: HTTPCall, service: Service) -> None:
        """Answer a question from the passages that fit it best.

        Its citations are checked. If nothing is near enough to the question, the answer says so.
        """
        collections = await self._library.open()
        body = parse(AskCollectionBody, await read_json(call, self._config), self._config, call)
        check_model(body.model, service)
        service.check_generates()
        found, reranked_by = await self._search(call, body)
        asker = Asker(call.tenant, call.salt, call.share, service)
        answers: list[SourcedAnswer] = []

        async def work(emit: Emit) -> None:
            answers.append(await collections.ask(asker, body.query, found, body.options(), emit, reranked_by))

        def whole() -> dict[str, Any]:
            said = msgspec.to_builtins(answers[0]) if answers else {}
            return {"object": "collection.answer", "model": service.name, **said}

        await answer(call, self._logs, self._config, work, stream=bool(body.stream), whole=whole)


def _document_of(call: HTTPCall) -> str:
    return call.path.rpartition("/")[2]


def _page(call: HTTPCall, data: list[dict[str, Any]]) -> dict[str, Any]:
    asked = parameters(call, ("limit", "after"))
    limit = asked.get("limit", str(LISTED))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MOST_LISTED):
        raise InvalidRequest(f"limit must be 1 to {MOST_LISTED}", field="limit")
    return page(data, int(limit), asked.get("after"))
