"""Collections: add documents (read, chunk, embed), search them, and answer questions from them with citations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from cairn.frontend.embeddings import EmbeddingCall, finished, scores, vectors
from cairn.frontend.request_options import SamplingOptions
from cairn.frontend.service import Service
from cairn.rag.chunking import Section, UnreadableDocument, chunks, sections
from cairn.rag.citations import CitationFilter
from cairn.rag.definition import (
    BINARY,
    MAX_BYTES,
    MAX_CHUNKS,
    Collection,
    NewDocument,
    Search,
    SearchHit,
    StoredDocument,
)
from cairn.rag.document_store import DocumentStore, bytes_of
from cairn.rag.extract_parent import Extractor, aside
from cairn.text.grammar.grammar import ANYTHING
from cairn.text.render.fair_semaphore import FairSemaphore
from cairn.types.errors import Conflict, InvalidRequest, Overloaded, TooLarge
from cairn.types.outputs import Delta
from cairn.workflows.answerer import PATIENCE, Answerer, Asker

if TYPE_CHECKING:
    from cairn.frontend.embeddings import Vector

AT_ONCE = 64
"""Chunks embedded in one call."""
JUDGED = 20
"""Least number of candidates given to a reranker, so that it can lift what the vectors ranked low."""
QUERY_PROMPTS, DOCUMENT_PROMPTS = ("query", "search_query"), ("document", "passage", "search_document")
"""Prompt names that embedding models use for questions and for documents."""
NO_ANSWER = "There is no answer in the documents."
TOLD = (
    "Answer from the sources below and from nothing else, and name the source of each statement by its number in "
    "brackets, such as [1]. If they do not answer the question, say so."
)
REMINDED = "Name the sources of your answer by their numbers, such as [1]."
"""Repeated after the question: small models forget text before the sources."""
Heard = Callable[[int, int], object]
Room = Callable[[str, int], AbstractAsyncContextManager[None]]
"""Reserves bytes of a tenant's quota while they are written; entering it raises if the quota has no room."""


def endless(tenant: str, size: int) -> AbstractAsyncContextManager[None]:
    """Return a reservation of an unlimited quota."""
    return nullcontext()


class Embedder(NamedTuple):
    """An embedding model and the caller it works for."""

    service: Service
    asking: EmbeddingCall

    async def made(
        self, texts: Sequence[str], prompts: Sequence[str], heard: Callable[[int], object] = lambda done: None
    ) -> list[Vector]:
        """Return a unit vector for each text, prefixed by the first of `prompts` that the model has.

        `heard` is called with the number of vectors made so far.
        """
        known = self.service.spec.embedding.prompts
        name = next((one for one in prompts if one in known), None)
        asking = self.asking if name is None else replace(self.asking, prompt_name=name)
        found: list[Vector] = []
        for at in range(0, len(texts), AT_ONCE):
            patience = PATIENCE if found else 1  # a queue that is full for a moment does not undo what was embedded
            found += await self._vectors(texts[at : at + AT_ONCE], asking, patience)
            heard(len(found))
        return found

    async def _vectors(self, texts: Sequence[str], asking: EmbeddingCall, patience: int) -> list[Vector]:
        """Return a unit vector for each text; ask up to `patience` times while the queue is full."""
        while True:
            try:
                made, _ = await vectors(self.service, texts, asking)
                return finished(made)
            except Overloaded as error:
                patience -= 1
                if not patience:
                    raise
                await asyncio.sleep(min(error.retry_after or 1.0, 5.0))


class Reranker(NamedTuple):
    """A reranking model and the caller it works for."""

    service: Service
    asking: EmbeddingCall

    async def best(self, question: str, found: Sequence[SearchHit], count: int) -> list[SearchHit]:
        """Return the `count` best hits by this model's scores."""
        if not found:
            return []
        texts = [f"{one.chunk.heading}\n{one.chunk.text}".strip() for one in found]
        judged, _ = await scores(self.service, [(question, text) for text in texts], self.asking)
        told = [msgspec.structs.replace(one, judged=score) for one, score in zip(found, judged, strict=True)]
        return sorted(told, key=lambda one: (-(one.judged or 0.0), one.chunk.key))[:count]


class SourcedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer with its sources."""

    answer: str
    answered: bool
    """False if no chunk was near enough to the question or the answer cites no source."""
    sources: list[dict[str, Any]]
    """The chunks given to the model, numbered from 1; `cited` says which the answer names."""
    citations_removed: int = 0
    """Number of brackets and numbers removed because they named no source."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = "stop"
    reranked_by: str | None = None
    """Name of the reranking model; None if none was used."""


class Collections:
    """The collections of a server. Slow work runs on other threads."""

    def __init__(self, store: DocumentStore, answerer: Answerer) -> None:
        self.store, self._answerer = store, answerer
        self._extractor = Extractor()
        self._eraser = FairSemaphore(each=1, what="the eraser of documents")
        """Lets one erasure at a time rewrite an index, in turn among tenants: all others wait for the database."""

    async def add(
        self,
        tenant: str,
        id: str,
        embedder: Embedder,
        new: NewDocument,
        room: Room = endless,
        heard: Heard = lambda done, all: None,
    ) -> StoredDocument:
        """Read, chunk and embed a document, and store it.

        `heard` is called with the number of chunks embedded and their total. `room` reserves the document's bytes and
        may raise. Raise TooLarge above MAX_BYTES, InvalidRequest if the document cannot be read, holds no text or has
        too many chunks.
        """
        field = new.field
        if new.size > MAX_BYTES:
            raise TooLarge(f"{field} has {new.size} bytes; the limit of a document is {MAX_BYTES}", field=field)
        collection = await asyncio.to_thread(self.store.collection, tenant, id)
        found = await self._read(tenant, new)
        chunk, overlap = new.sizes or (collection.chunk, collection.overlap)
        pieces = await asyncio.to_thread(lambda: list(islice(chunks(found, chunk, overlap), MAX_CHUNKS + 1)))
        if not pieces:
            raise InvalidRequest(f"{field} holds no text that could be found", field=field)
        if len(pieces) > MAX_CHUNKS:
            raise InvalidRequest(f"{field} has more than {MAX_CHUNKS} chunks, the limit", field=field)
        texts = [f"{piece.heading}\n{piece.text}" if piece.heading else piece.text for piece in pieces]
        spec = embedder.service.spec
        async with room(tenant, await asyncio.to_thread(bytes_of, new, pieces, spec.width)):
            made = await embedder.made(texts, DOCUMENT_PROMPTS, lambda done: heard(done, len(texts)))
            model = (embedder.service.name, spec.identity, len(made[0]))
            return await asyncio.to_thread(self.store.add, collection, new, pieces, made, model)

    async def remove(self, tenant: str, id: str, document: str) -> None:
        """Erase a document with its chunks."""
        store = self.store
        await self._eraser.run(tenant, lambda: store.remove(store.collection(tenant, id), document))

    async def delete(self, tenant: str, id: str) -> None:
        """Erase a collection with its documents and vectors."""
        await self._eraser.run(tenant, self.store.delete, tenant, id)

    async def _read(self, tenant: str, new: NewDocument) -> list[Section]:
        """Return a document's sections; formats with complex parsers are read in a helper process."""
        if not isinstance(new.content, str):
            return await self._extractor.read(tenant, new.kind, new.content, new.field)
        if new.kind not in ("html", *BINARY):
            try:
                return await asyncio.to_thread(sections, new.content, new.kind)
            except UnreadableDocument as error:
                raise InvalidRequest(f"{new.field}: {error}", field=new.field) from None
        data = new.content.encode("utf-8", "replace")
        with await asyncio.to_thread(aside, data) as file:
            return await self._extractor.read(tenant, new.kind, file, new.field)

    async def search(
        self,
        tenant: str,
        id: str,
        embedder: Embedder,
        question: str,
        wanted: Search,
        judge: Reranker | None = None,
    ) -> list[SearchHit]:
        """Return the chunks that fit a question best; with `judge`, reranked from at least JUDGED candidates.

        Raise Conflict if the collection's vectors are of another model.
        """
        collection = await asyncio.to_thread(self.store.collection, tenant, id)
        if not collection.chunks:
            return []
        _check_model(collection, embedder.service)
        (vector,) = await embedder.made([question], QUERY_PROMPTS)
        if judge is None:
            return await asyncio.to_thread(self.store.search, collection, question, vector, wanted)
        wider = msgspec.structs.replace(wanted, top_k=max(JUDGED, wanted.top_k))
        found = await asyncio.to_thread(self.store.search, collection, question, vector, wider)
        return await judge.best(question, found, wanted.top_k)

    async def ask(
        self,
        asker: Asker,
        question: str,
        found: Sequence[SearchHit],
        options: SamplingOptions,
        emit: Callable[[dict[str, Any]], object],
        reranked_by: str | None = None,
    ) -> SourcedAnswer:
        """Answer a question from the chunks of a search, with citations.

        The prompt has the sources in document order and the question last, so questions that find the same sources
        share a prefix. `emit` gets the events `sources`, `answer.delta` and `answer.done`.
        """
        ordered = sorted(found, key=lambda one: one.chunk.key)
        sources = [{"number": number, **one.plain(), "cited": False} for number, one in enumerate(ordered, 1)]
        emit({"type": "sources", "sources": sources})
        if not sources:
            answer = SourcedAnswer(answer=NO_ANSWER, answered=False, sources=[], reranked_by=reranked_by)
            emit({"type": "answer.done", **msgspec.to_builtins(answer)})
            return answer
        checked, said = CitationFilter(len(sources), strict=True), list[str]()

        def tell(text: str) -> None:
            if text:
                said.append(text)
                emit({"type": "answer.delta", "content": text})

        def hear(delta: Delta) -> None:
            tell(checked.push(delta.text))

        answered = await self._answerer.answer(asker, _messages(question, sources), options, ANYTHING, hear)
        tell(checked.finish())
        for source in sources:
            source["cited"] = source["number"] in checked.cited
        answer = SourcedAnswer(
            answer="".join(said),
            answered=bool(checked.cited),
            sources=sources,
            citations_removed=checked.removed,
            prompt_tokens=answered.prompt_tokens,
            cached_tokens=answered.cached_tokens,
            completion_tokens=answered.completion_tokens,
            finish_reason=answered.finish_reason,
            reranked_by=reranked_by,
        )
        emit({"type": "answer.done", **msgspec.to_builtins(answer)})
        return answer


def _messages(question: str, sources: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    told = [TOLD]
    for one in sources:
        where = f"{one['name']}: {one['heading']}" if one["heading"] else one["name"]
        told.append(f"[{one['number']}] ({where})\n{one['text']}")
    return [{"role": "system", "content": "\n\n".join(told)}, {"role": "user", "content": f"{question}\n\n{REMINDED}"}]


def _check_model(collection: Collection, service: Service) -> None:
    if collection.identity != service.spec.identity:
        raise Conflict(
            f"collection {collection.id} was embedded by the model {collection.model}, not by {service.name}; name "
            "that model, or make the collection anew"
        )
