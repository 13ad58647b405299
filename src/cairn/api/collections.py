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
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from cairn.api.agent_attribution import AgentAttribution
from cairn.api.agent_schemas import check_metadata
from cairn.api.collection_schemas import (
    PATH,
    AskCollectionBody,
    CollectionBody,
    CollectionDocumentBody,
    SearchBody,
    collection_object,
    collection_of,
    document_object,
    document_of_form,
)
from cairn.api.generation import check_model
from cairn.api.json_body import read_json, read_nothing
from cairn.api.lists import LISTED, MOST_LISTED, page, parameters
from cairn.api.multipart import is_form, upload
from cairn.api.parse import parse
from cairn.api.reply import Call
from cairn.api.resumable import EventLogs
from cairn.api.work_events import Emit, answer
from cairn.config import Config
from cairn.errors import InvalidRequest, Unavailable
from cairn.rag.collections import Collections, Embedder, SourcedAnswer
from cairn.rag.definition import MAX_BYTES, NewDocument, check_name
from cairn.rag.document_store import DocumentStore
from cairn.service.embeddings import AT_ONCE, Asking, check_embeds
from cairn.service.models import Models
from cairn.service.service import Service
from cairn.workflows.answerer import Asker, ServiceAnswerer

Endpoint = Callable[[Call, Service], Awaitable[None]]
FILE = "collections.sqlite"


class CollectionRoutes:
    """The routes of collections. `registry` are the models of the server, once there are any."""

    def __init__(self, config: Config, logs: EventLogs, attribution: AgentAttribution, folder: Path) -> None:
        """`folder`: the one of the token log; the collections lie beside it, and whoever holds the one has both."""
        self._config, self._logs, self._attribution = config, logs, attribution
        self._file = folder.with_name(folder.name + "-collections") / FILE
        self.registry: Models | None = None
        self._opened: Collections | None = None
        self._opening = asyncio.Lock()

    def routes(self, path: str) -> dict[str, Endpoint] | None:
        """The methods of a path, or None."""
        if path == PATH:
            return {"POST": self.create, "GET": self.list}
        id, _, rest = path.removeprefix(PATH + "/").partition("/")
        if not path.startswith(PATH + "/") or not id:
            return None
        document = rest.removeprefix("documents/")
        if document != rest and document and "/" not in document:
            return {"GET": self.show_document, "DELETE": self.delete_document}
        known: dict[str, dict[str, Endpoint]] = {
            "": {"GET": self.show, "DELETE": self.delete},
            "documents": {"POST": self.add, "GET": self.documents},
            "search": {"POST": self.search},
            "ask": {"POST": self.ask},
        }
        return known.get(rest) if rest or not path.endswith("/") else None

    async def create(self, call: Call, service: Service) -> None:
        """POST /v1/collections: {"id", "chunk", "overlap", "metadata"}, all optional."""
        store = (await self._open()).store
        body = parse(CollectionBody, await read_nothing(call, self._config), self._config, call)
        check_metadata(body.metadata)
        id = f"collection-{call.id}" if body.id is None else check_name(body.id, "a collection's id")
        made = await asyncio.to_thread(store.create, call.tenant, id, *body.sizes(), body.metadata or {})
        await call.json(collection_object(made), 201)

    async def list(self, call: Call, service: Service) -> None:
        """GET /v1/collections, most recently created first."""
        found = await asyncio.to_thread((await self._open()).store.collections, call.tenant)
        await call.json(_page(call, [collection_object(one) for one in found]))

    async def show(self, call: Call, service: Service) -> None:
        """GET /v1/collections/{id}: how much it holds."""
        store = (await self._open()).store
        await call.json(collection_object(await asyncio.to_thread(store.collection, call.tenant, collection_of(call))))

    async def delete(self, call: Call, service: Service) -> None:
        """DELETE /v1/collections/{id}: answered when its text is overwritten on the disk."""
        store, id = (await self._open()).store, collection_of(call)
        await asyncio.to_thread(store.delete, call.tenant, id)
        await call.json({"id": id, "object": "collection.deleted", "deleted": True})

    async def add(self, call: Call, service: Service) -> None:
        """POST /v1/collections/{id}/documents: {"name", "text" or "data", "type", "id", "metadata", "embedding_model",
        "stream"}, or a form with a `file`."""
        if is_form(call):
            async with upload(call, self._config, self._file.parent, MAX_BYTES) as form:
                body = parse(CollectionDocumentBody, document_of_form(form), self._config, call)
                await self._add(call, body, form.file, form.size)
            return
        body = parse(CollectionDocumentBody, await read_json(call, self._config), self._config, call)
        content = body.content()
        if isinstance(content, str):
            await self._add(call, body, content, len(content.encode("utf-8", "replace")))
            return
        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.seek(0)
            await self._add(call, body, file, len(content))

    async def _add(self, call: Call, body: CollectionDocumentBody, content: str | BinaryIO, size: int) -> None:
        collections, id = await self._open(), collection_of(call)
        check_metadata(body.metadata)
        if not 1 <= len(body.name) <= 256:
            raise InvalidRequest("name must have 1 to 256 characters", field="name")
        new = NewDocument(
            id=f"document-{call.id}" if body.id is None else check_name(body.id, "a document's id"),
            name=body.name,
            kind=body.kind(),
            content=content,
            size=size,
            metadata=dict(body.metadata or {}),
            field="file" if is_form(call) else "data" if body.text is None else "text",
        )
        await asyncio.to_thread(collections.store.collection, call.tenant, id)
        added: list[dict[str, Any]] = []

        async def work(emit: Emit) -> None:
            def heard(done: int, all: int) -> None:
                emit({"type": "document.embedding", "embedded": done, "chunks": all})

            async with self.embedder(call.salt, call.share, body.embedding_model, new.field) as embedder:
                made = await collections.add(call.tenant, id, embedder, new, heard)
            added.append(document_object(made))
            emit({"type": "document.done", "document": added[0]})

        if body.stream:
            await answer(call, self._logs, self._config, work, stream=True, whole=dict)
            return
        await work(lambda event: None)
        await call.json(added[0], 201)

    async def documents(self, call: Call, service: Service) -> None:
        """GET /v1/collections/{id}/documents, in the order in which they were added."""
        store = (await self._open()).store

        def found() -> list[dict[str, Any]]:
            collection = store.collection(call.tenant, collection_of(call))
            return [document_object(one) for one in store.documents(collection)]

        await call.json(_page(call, await asyncio.to_thread(found)))

    async def show_document(self, call: Call, service: Service) -> None:
        """GET /v1/collections/{id}/documents/{document}: a document, without its text."""
        store = (await self._open()).store

        def found() -> dict[str, Any]:
            collection = store.collection(call.tenant, collection_of(call))
            return document_object(store.document(collection, _document_of(call)))

        await call.json(await asyncio.to_thread(found))

    async def delete_document(self, call: Call, service: Service) -> None:
        """DELETE /v1/collections/{id}/documents/{document}: answered when its text is overwritten on the disk."""
        store, id = (await self._open()).store, _document_of(call)
        await asyncio.to_thread(lambda: store.remove(store.collection(call.tenant, collection_of(call)), id))
        await call.json({"id": id, "object": "collection.document.deleted", "deleted": True})

    async def search(self, call: Call, service: Service) -> None:
        """POST /v1/collections/{id}/search: {"query", "top_k", "min_score", "filters", "embedding_model"}."""
        collections = await self._open()
        body = parse(SearchBody, await read_json(call, self._config), self._config, call)
        wanted = body.wanted()
        async with self.embedder(call.salt, call.share, body.embedding_model, "query") as embedder:
            found = await collections.search(call.tenant, collection_of(call), embedder, body.query, wanted)
        await call.json({"object": "list", "data": [one.plain() for one in found]})

    async def ask(self, call: Call, service: Service) -> None:
        """POST /v1/collections/{id}/ask: {"query", "top_k", "min_score", "filters", "model", "stream"} and sampling.

        The answer's citations are checked; nothing near enough to the question is an answer that says so.
        """
        collections = await self._open()
        body = parse(AskCollectionBody, await read_json(call, self._config), self._config, call)
        check_model(body.model, service)
        service.check_generates()
        wanted = body.wanted()
        async with self.embedder(call.salt, call.share, body.embedding_model, "query") as embedder:
            found = await collections.search(call.tenant, collection_of(call), embedder, body.query, wanted)
        asker = Asker(call.tenant, call.salt, call.share, service)
        answers: list[SourcedAnswer] = []

        async def work(emit: Emit) -> None:
            answers.append(await collections.ask(asker, body.query, found, body.options(), emit))

        def whole() -> dict[str, Any]:
            said = msgspec.to_builtins(answers[0]) if answers else {}
            return {"object": "collection.answer", "model": service.name, **said}

        await answer(call, self._logs, self._config, work, stream=bool(body.stream), whole=whole)

    # -------------------------------------------------------------------------------------------------------- within

    async def bytes_of(self, tenant: str) -> int:
        """How many bytes a tenant's collections take; those that nobody has asked for since the start are not looked
        at."""
        return 0 if self._opened is None else await asyncio.to_thread(self._opened.store.bytes_of, tenant)

    async def _open(self) -> Collections:
        """The collections, once the folder beside them is this server's."""
        self._attribution.open()
        async with self._opening:
            if self._opened is None:
                agents = self._attribution.open()
                store = await asyncio.to_thread(DocumentStore, self._file, agents.journals.now)
                self._opened = Collections(store, ServiceAnswerer(self._config))
            return self._opened

    @contextlib.asynccontextmanager
    async def embedder(self, salt: bytes, share: str, name: str | None, field: str) -> AsyncIterator[Embedder]:
        """The model that makes vectors: the one that is named, else the first of those for embeddings; on a server
        with one model that one."""
        if self.registry is None:
            raise Unavailable("the model is still being loaded; ask again shortly", retry_after=2.0)
        async with self.registry.using(self.registry.find(name, "embed")) as service:
            check_model(name, service)
            check_embeds(service)
            asking = Asking(
                salt=salt,
                share=share,
                timeout=self._config.request_timeout,
                at_once=max(1, min(AT_ONCE, self._config.max_queue // 2)),
                truncate=True,
                field=field,
            )
            yield Embedder(service, asking)


def _document_of(call: Call) -> str:
    return call.path.rpartition("/")[2]


def _page(call: Call, data: list[dict[str, Any]]) -> dict[str, Any]:
    asked = parameters(call, ("limit", "after"))
    limit = asked.get("limit", str(LISTED))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MOST_LISTED):
        raise InvalidRequest(f"limit must be 1 to {MOST_LISTED}", field="limit")
    return page(data, int(limit), asked.get("after"))
