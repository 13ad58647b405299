"""Access to documents for all routes: the server's collections, uploads, and the models that embed and rerank."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from cairn.api.chat.attribution import AgentAttribution
from cairn.api.chat.generation import check_model
from cairn.api.http.call import HTTPCall
from cairn.api.http.multipart import Upload, upload
from cairn.api.http.quotas import Quotas
from cairn.config.config import Config
from cairn.frontend.embeddings import AT_ONCE, EmbeddingCall, check_scores
from cairn.rag.attachments import Attachments
from cairn.rag.collections import Collections, Embedder, Reranker
from cairn.rag.definition import MAX_BYTES, Search, SearchHit
from cairn.rag.document_store import DocumentStore
from cairn.rag.file_store import FileStore
from cairn.rag.vector_stores import VectorStores
from cairn.served_models.loaded_models import Models
from cairn.served_models.served_model import ServedModel
from cairn.types.errors import InvalidRequest, Overloaded, Unavailable
from cairn.workflows.answerer import ServiceAnswerer

MAX_UPLOADS = 8
"""Most forms of one tenant that are received or read at once: each has a file on the disk."""
RETRY = 2.0
EXAMPLE = "minilm"
ADD = (
    f"add one: 'cairn pull {EXAMPLE}', then start the server with it beside the models that it has: 'cairn serve MODEL "
    f"{EXAMPLE}'"
)
"""Advice to the owner of a server without an embedding model."""
FILE, UPLOADS = "collections.sqlite", "files.sqlite"


class Library:
    """The collections of one server."""

    def __init__(
        self,
        config: Config,
        attribution: AgentAttribution,
        quotas: Quotas,
        folder: Path,
        registry: Callable[[], Models],
    ) -> None:
        """Prepare the collections beside `folder`, the token log's, so that its owner has both.

        `registry` returns the models, or raises Unavailable before there are any.
        """
        self._config, self._attribution, self._quotas = config, attribution, quotas
        self.folder = folder.with_name(folder.name + "-collections")
        self._registry = registry
        self._opened: VectorStores | None = None
        self._collections: Collections | None = None
        self._opening = asyncio.Lock()
        self._uploading = Counter[str]()
        """Number of forms being received, by payer."""

    async def open(self) -> Collections:
        """Return the collections, once the folder beside them is this server's."""
        await self.stores()
        assert self._collections is not None
        return self._collections

    async def stores(self) -> VectorStores:
        """Return the collections with their files, as vector stores."""
        agents = self._attribution.open()
        async with self._opening:
            if self._opened is None:
                now = agents.journals.now
                store = await asyncio.to_thread(DocumentStore, self.folder / FILE, now)
                files = await asyncio.to_thread(FileStore, self.folder / UPLOADS, now)
                attachments = await asyncio.to_thread(Attachments, store.database, now)
                self._collections = Collections(store, ServiceAnswerer())
                self._opened = VectorStores(self._collections, files, attachments, self._quotas.room)
            return self._opened

    def troubles(self) -> list[str]:
        """Return why collections or files could not be kept lately, a sentence each."""
        if self._opened is None or self._collections is None:
            return []
        every = (self._collections.store.database, self._opened.files.database)
        return [one.trouble for one in every if one.trouble]

    @contextlib.asynccontextmanager
    async def upload(self, call: HTTPCall) -> AsyncIterator[Upload]:
        """Yield the form of a call, with its file. Raises Overloaded if its tenant sends too many at once."""
        if self._uploading[call.payer] >= MAX_UPLOADS:
            raise Overloaded(f"{MAX_UPLOADS} uploads of yours are under way, the limit", retry_after=RETRY)
        self._uploading[call.payer] += 1
        try:
            async with upload(call, self._config, self.folder, MAX_BYTES) as form:
                yield form
        finally:
            self._uploading[call.payer] -= 1
            self._uploading += Counter()  # those who send nothing are forgotten

    @contextlib.asynccontextmanager
    async def room(self, call: HTTPCall, size: int) -> AsyncIterator[None]:
        """Count `size` bytes against the tenant's quota while they are written, in place of the body's size.

        Raises QuotaExceeded if the tenant may not keep them.
        """
        call.settled()
        async with self._quotas.room(call.tenant, size):
            yield

    async def bytes_of(self, tenant: str) -> int:
        """Return about how many bytes a tenant's collections and files take; 0 if they cannot be opened."""
        if self._opened is None and not (self.folder / FILE).exists():
            return 0
        try:
            files, store = (await self.stores()).files, (await self.open()).store
        except Unavailable:
            return 0
        return await asyncio.to_thread(lambda: files.bytes_of(tenant) + store.bytes_of(tenant))

    @contextlib.asynccontextmanager
    async def embedder(self, salt: bytes, share: str, name: str | None, field: str) -> AsyncIterator[Embedder]:
        """Yield the embedding model: the named one, else the first.

        Raises InvalidRequest for a model of another kind, and if there is none.
        """
        registry = self._registry()
        async with registry.using(_embedding(registry, name)) as service:
            check_model(name, service)
            yield Embedder(service, self._asking(salt, share, field))

    def check_embedder(self, name: str | None = None) -> None:
        """Raise the errors of `embedder` before anything is read."""
        _embedding(self._registry(), name)

    @contextlib.asynccontextmanager
    async def judge(
        self, salt: bytes, share: str, wanted: bool | None, name: str | None
    ) -> AsyncIterator[Reranker | None]:
        """Yield the reranking model: the named one, else one that is loaded, else None.

        Raises InvalidRequest if one is `wanted` and there is none.
        """
        registry = self._registry()
        model = _judging(registry, wanted, name)
        if model is None:
            yield None
            return
        async with registry.using(model) as service:
            check_scores(service)
            yield Reranker(service, self._asking(salt, share, "query"))

    async def search(
        self, call: HTTPCall, ids: Sequence[str], queries: Sequence[str], wanted: Search, rerank: bool | None
    ) -> list[SearchHit]:
        """Return what fits any of the queries best in these collections, each passage once."""
        collections, best = await self.open(), dict[int, SearchHit]()
        async with (
            self.embedder(call.salt, call.share, None, "query") as embedder,
            self.judge(call.salt, call.share, rerank, None) as judge,
        ):
            for id in dict.fromkeys(ids):
                for query in queries:
                    for one in await collections.search(call.tenant, id, embedder, query, wanted, judge):
                        before = best.get(one.chunk.key)
                        if before is None or _worth(one) > _worth(before):
                            best[one.chunk.key] = one
        return sorted(best.values(), key=lambda one: (*(-number for number in _worth(one)), one.chunk.key))[
            : wanted.top_k
        ]

    def _asking(self, salt: bytes, share: str, field: str) -> EmbeddingCall:
        return EmbeddingCall(
            salt=salt,
            share=share,
            timeout=self._config.request_timeout,
            at_once=max(1, min(AT_ONCE, self._config.max_queue // 2)),
            truncate=True,
            field=field,
        )


def _embedding(registry: Models, name: str | None) -> ServedModel:
    """Return the embedding model with this name; without a name the first, loaded ones before others.

    Raises InvalidRequest for another kind of model, and if there is none; Unavailable while that is unknown.
    """
    if name is not None:
        known = [registry.find(name)]
    else:
        known = [one for one in registry.models if one.kind == "embed"]
        known.sort(key=lambda one: one.state != "loaded")
    if known and (known[0].kind == "embed" or known[0].failure):  # its use reports why it is not served
        return known[0]
    if any(not one.kind and not one.failure for one in known or registry.models):
        raise Unavailable("the models' files are still being read; ask again shortly", retry_after=RETRY)
    if known:
        what = f"{known[0].name} is no model for embeddings, and what its vectors find is mostly wrong"
    else:
        what = "collections need a model for embeddings, and this server has none"
    raise InvalidRequest(f"{what}; {ADD}", field="embedding_model")


def _worth(found: SearchHit) -> tuple[float, float]:
    """Return the key by which passages of several searches are sorted."""
    return found.judged or 0.0, found.rank


def _judging(registry: Models, wanted: bool | None, name: str | None) -> ServedModel | None:
    if wanted is False:
        if name is not None:
            raise InvalidRequest("rerank_model names a model, and rerank is false", field="rerank_model")
        return None
    if name is not None:
        named = registry.find(name)
        if named.kind != "rerank":
            raise InvalidRequest(f"{named.name} is no model for reranking", field="rerank_model")
        return named
    known = [one for one in registry.models if one.kind == "rerank"]
    ready = next((one for one in known if one.state == "loaded"), None)
    if ready is None and wanted:
        ready = next(iter(known), None)
        if ready is None:
            raise InvalidRequest("rerank: this server has no model for reranking", field="rerank")
    return ready
