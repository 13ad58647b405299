"""OpenAI's vector stores, under /v1/vector_stores: the collections of /v1/collections by other names.

POST /v1/vector_stores                        GET  /v1/vector_stores?limit=&order=&after=
GET  /v1/vector_stores/{id}                   POST, DELETE /v1/vector_stores/{id}
POST /v1/vector_stores/{id}/search
POST /v1/vector_stores/{id}/files             GET  /v1/vector_stores/{id}/files?limit=&order=&after=&filter=
GET  /v1/vector_stores/{id}/files/{file}      POST, DELETE /v1/vector_stores/{id}/files/{file}
GET  /v1/vector_stores/{id}/files/{file}/content
POST /v1/vector_stores/{id}/file_batches      GET  /v1/vector_stores/{id}/file_batches/{batch}
POST /v1/vector_stores/{id}/file_batches/{batch}/cancel
GET  /v1/vector_stores/{id}/file_batches/{batch}/files?limit=&order=&after=&filter=
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from cairn.api.chat.paging import LISTED, MOST_LISTED, parameters
from cairn.api.chat.parse import parse
from cairn.api.chat.state import ServerState
from cairn.api.http.body import read_json, read_nothing
from cairn.api.http.call import HTTPCall
from cairn.api.http.routes import Route
from cairn.api.native.agent_schemas import NoBody
from cairn.api.openai.files import listed
from cairn.api.openai.vector_store_schemas import (
    AttachBody,
    AttributesBody,
    BatchBody,
    StoreSearchBody,
    VectorStoreBody,
    VectorStoreChangeBody,
    attachment_object,
    attributes_of,
    batch_object,
    result_object,
    store_object,
)
from cairn.frontend.service import Service
from cairn.rag.attachments import Attachment
from cairn.rag.definition import CHUNK, OVERLAP, Collection
from cairn.rag.vector_stores import FIELD, Embedders, VectorStores
from cairn.types.errors import InvalidRequest, NotFound

PATH = "/v1/vector_stores"
STATES = ("in_progress", "completed", "failed", "cancelled")


class VectorStoreRoutes:
    """The routes of vector stores."""

    def __init__(self, state: ServerState) -> None:
        self._config, self._library = state.config, state.library

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("POST", "/v1/vector_stores", self.create, VectorStoreBody, keeps=True),
            Route("GET", "/v1/vector_stores", self.list, query=("limit", "order", "after", "before")),
            Route("GET", "/v1/vector_stores/{id}", self.show),
            Route("POST", "/v1/vector_stores/{id}", self.change, VectorStoreChangeBody),
            Route("DELETE", "/v1/vector_stores/{id}", self.delete),
            Route("POST", "/v1/vector_stores/{id}/search", self.search, StoreSearchBody),
            Route("POST", "/v1/vector_stores/{id}/files", self.attach, AttachBody, keeps=True),
            Route(
                "GET", "/v1/vector_stores/{id}/files", self.files, query=("limit", "order", "after", "before", "filter")
            ),
            Route("GET", "/v1/vector_stores/{id}/files/{file}", self.show_file),
            Route("POST", "/v1/vector_stores/{id}/files/{file}", self.change_file, AttributesBody),
            Route("DELETE", "/v1/vector_stores/{id}/files/{file}", self.detach),
            Route("GET", "/v1/vector_stores/{id}/files/{file}/content", self.content),
            Route("POST", "/v1/vector_stores/{id}/file_batches", self.batch, BatchBody, keeps=True),
            Route("GET", "/v1/vector_stores/{id}/file_batches/{batch}", self.show_batch),
            Route("POST", "/v1/vector_stores/{id}/file_batches/{batch}/cancel", self.cancel, NoBody),
            Route(
                "GET",
                "/v1/vector_stores/{id}/file_batches/{batch}/files",
                self.files,
                query=("limit", "order", "after", "before", "filter"),
            ),
        ]

    # --------------------------------------------------------------------------------------------------------- stores

    async def create(self, call: HTTPCall, service: Service) -> None:
        """Create a vector store, which is a collection."""
        stores, collections = await self._library.stores(), await self._library.open()
        body = parse(VectorStoreBody, await read_nothing(call, self._config), self._config, call)
        body.check()
        self._library.check_embedder()
        id, wanted = f"vs_{call.id}", body.wanted()
        for one in wanted:
            await asyncio.to_thread(stores.files.get, call.tenant, one.file)
        args = (call.tenant, id, CHUNK, OVERLAP, body.metadata or {}, body.name or "")
        await asyncio.to_thread(collections.store.create, *args)
        if wanted:
            await stores.attach(call.tenant, id, wanted, self._embedders(call))
        await call.json(await self._store(stores, call.tenant, id))

    async def list(self, call: HTTPCall, service: Service) -> None:
        """List the vector stores: all collections. The newest comes first unless `order` is asc."""
        stores, collections = await self._library.stores(), await self._library.open()
        asked = parameters(call, ("limit", "order", "after", "before"))
        found = await asyncio.to_thread(collections.store.collections, call.tenant)
        data = await asyncio.to_thread(
            lambda: [store_object(one, stores.attachments.counts(one)) for one in reversed(found)]
        )
        await call.json(listed(asked, data, LISTED, MOST_LISTED))

    async def show(self, call: HTTPCall, service: Service) -> None:
        """Return a vector store: how much it holds, and the states of its files."""
        stores = await self._library.stores()
        await call.json(await self._store(stores, call.tenant, call.path_part(PATH)))

    async def change(self, call: HTTPCall, service: Service) -> None:
        """Change the name or the metadata of a vector store. Absent fields stay."""
        stores, collections = await self._library.stores(), await self._library.open()
        body = parse(VectorStoreChangeBody, await read_json(call, self._config), self._config, call)
        body.check()
        id = call.path_part(PATH)
        await asyncio.to_thread(collections.store.change, call.tenant, id, body.name, body.metadata)
        await call.json(await self._store(stores, call.tenant, id))

    async def delete(self, call: HTTPCall, service: Service) -> None:
        """Delete a vector store. Answered when its text is overwritten on the disk; files stay."""
        stores, id = await self._library.stores(), call.path_part(PATH)
        await stores.delete(call.tenant, id)
        await call.json({"id": id, "object": "vector_store.deleted", "deleted": True})

    async def search(self, call: HTTPCall, service: Service) -> None:
        """Return the passages that fit a query best."""
        body = parse(StoreSearchBody, await read_json(call, self._config), self._config, call)
        queries, search = body.queries(), body.search()
        if body.rewrite_query:
            call.warn("rewrite_query: ignored, the query is searched unchanged")
        rerank = None if body.ranking_options is None else body.ranking_options.rerank
        found = await self._library.search(call, [call.path_part(PATH)], queries, search, rerank)
        data = [result_object(one) | {"content": [{"type": "text", "text": one.chunk.text}]} for one in found]
        kind = "vector_store.search_results.page"
        await call.json({"object": kind, "search_query": queries, "data": data, "has_more": False, "next_page": None})

    # ---------------------------------------------------------------------------------------------------------- files

    async def attach(self, call: HTTPCall, service: Service) -> None:
        """Put a file into a vector store. It is read in the background."""
        stores, id = await self._library.stores(), call.path_part(PATH)
        body = parse(AttachBody, await read_json(call, self._config), self._config, call)
        await stores.attach(call.tenant, id, [body.wanted()], self._embedders(call))
        await call.json(await self._file(stores, call.tenant, id, body.file_id))

    async def files(self, call: HTTPCall, service: Service) -> None:
        """List the files of a vector store or of a batch.

        The newest comes first unless `order` is asc; `filter` selects a state.
        """
        stores = await self._library.stores()
        asked = parameters(call, ("limit", "order", "after", "before", "filter"))
        batch = call.path_part(PATH, 2) if call.path_part(PATH, 1) == "file_batches" else ""
        store, found = await stores.listed(call.tenant, call.path_part(PATH), batch)
        _check_batch(batch, found)
        if (state := asked.get("filter")) is not None:
            if state not in STATES:
                raise InvalidRequest(f"filter must be one of {', '.join(STATES)}", field="filter")
            found = [one for one in found if one.state == state]
        sizes = await self._sizes(store)
        data = [attachment_object(store, one, sizes.get(one.file, 0)) for one in found]
        await call.json(listed(asked, data, LISTED, MOST_LISTED))

    async def show_file(self, call: HTTPCall, service: Service) -> None:
        """Return the state of a file, and why it could not be read."""
        stores = await self._library.stores()
        await call.json(await self._file(stores, call.tenant, call.path_part(PATH), call.path_part(PATH, 2)))

    async def change_file(self, call: HTTPCall, service: Service) -> None:
        """Replace the attributes of a file."""
        stores, id, file = await self._library.stores(), call.path_part(PATH), call.path_part(PATH, 2)
        body = parse(AttributesBody, await read_json(call, self._config), self._config, call)
        await stores.note(call.tenant, id, file, attributes_of(body.attributes))
        await call.json(await self._file(stores, call.tenant, id, file))

    async def detach(self, call: HTTPCall, service: Service) -> None:
        """Remove a file from a vector store. Answered when its text there is overwritten; the file stays."""
        stores, file = await self._library.stores(), call.path_part(PATH, 2)
        await stores.detach(call.tenant, call.path_part(PATH), file)
        await call.json({"id": file, "object": "vector_store.file.deleted", "deleted": True})

    async def content(self, call: HTTPCall, service: Service) -> None:
        """Return the text of a file, chunk by chunk."""
        collections = await self._library.open()

        def found() -> list[dict[str, Any]]:
            store = collections.store.collection(call.tenant, call.path_part(PATH))
            return [{"type": "text", "text": text} for text in collections.store.texts(store, call.path_part(PATH, 2))]

        data = await asyncio.to_thread(found)
        kind = "vector_store.file_content.page"
        await call.json({"object": kind, "data": data, "has_more": False, "next_page": None})

    # -------------------------------------------------------------------------------------------------------- batches

    async def batch(self, call: HTTPCall, service: Service) -> None:
        """Put several files into a vector store."""
        stores, id, batch = await self._library.stores(), call.path_part(PATH), f"vsfb_{call.id}"
        body = parse(BatchBody, await read_json(call, self._config), self._config, call)
        wanted = body.wanted()
        if not wanted:
            raise InvalidRequest("file_ids is empty; it must hold at least one", field="file_ids")
        await stores.attach(call.tenant, id, wanted, self._embedders(call), batch)
        store, found = await stores.listed(call.tenant, id, batch)
        if not found:  # all of them are there already, and no batch of their own
            raise InvalidRequest("file_ids: the vector store has all of these files already", field="file_ids")
        await call.json(batch_object(store, batch, found))

    async def show_batch(self, call: HTTPCall, service: Service) -> None:
        """Return the states of a batch's files."""
        stores, batch = await self._library.stores(), call.path_part(PATH, 2)
        store, found = await stores.listed(call.tenant, call.path_part(PATH), batch)
        _check_batch(batch, found)
        await call.json(batch_object(store, batch, found))

    async def cancel(self, call: HTTPCall, service: Service) -> None:
        """Cancel a batch. Files that are not read yet stay out."""
        stores, id, batch = await self._library.stores(), call.path_part(PATH), call.path_part(PATH, 2)
        parse(NoBody, await read_nothing(call, self._config), self._config)
        _check_batch(batch, (await stores.listed(call.tenant, id, batch))[1])
        await stores.cancel(call.tenant, id, batch)
        collection, attached = await stores.listed(call.tenant, id, batch)
        await call.json(batch_object(collection, batch, attached))

    # --------------------------------------------------------------------------------------------------------- within

    def _embedders(self, call: HTTPCall) -> Embedders:
        salt, share = call.salt, call.share
        self._library.check_embedder()
        return lambda: self._library.embedder(salt, share, None, FIELD)

    async def _store(self, stores: VectorStores, tenant: str, id: str) -> dict[str, Any]:
        collections = await self._library.open()

        def found() -> dict[str, Any]:
            store = collections.store.collection(tenant, id)
            return store_object(store, stores.attachments.counts(store))

        return await asyncio.to_thread(found)

    async def _file(self, stores: VectorStores, tenant: str, id: str, file: str) -> dict[str, Any]:
        store, one = await stores.one(tenant, id, file)
        return attachment_object(store, one, (await self._sizes(store)).get(file, 0))

    async def _sizes(self, store: Collection) -> dict[str, int]:
        collections = await self._library.open()
        with contextlib.suppress(NotFound):
            return {one.id: one.size for one in await asyncio.to_thread(collections.store.documents, store)}
        return {}


def _check_batch(batch: str, found: Sequence[Attachment]) -> None:
    if batch and not found:
        raise NotFound(f"there is no batch {batch[:64]}", field="batch_id")
