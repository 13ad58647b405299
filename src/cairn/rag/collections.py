"""Collections as their callers use them: documents are read, cut and embedded; questions are searched and answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from cairn.frontend.embeddings import Asking, finished, scores, vectors
from cairn.frontend.requests import SamplingOptions
from cairn.frontend.service import Service
from cairn.rag.chunking import chunks
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
from cairn.rag.extractor import Extractor, aside
from cairn.rag.outline import Section, UnreadableDocument
from cairn.rag.reading import sections
from cairn.text.grammar.grammar import ANYTHING
from cairn.types.errors import Conflict, InvalidRequest, TooLarge
from cairn.types.outputs import Delta
from cairn.workflows.answerer import Answerer, Asker

if TYPE_CHECKING:
    from cairn.frontend.embeddings import Vector

AT_ONCE = 64
"""Chunks that are embedded in one go."""
JUDGED = 20
"""Chunks that a model for reranking judges at least: it finds among them what the vectors put further down."""
QUERY_PROMPTS, DOCUMENT_PROMPTS = ("query", "search_query"), ("document", "passage", "search_document")
"""What models call the words that they put before questions and before documents."""
NO_ANSWER = "There is no answer in the documents."
TOLD = (
    "Answer from the sources below and from nothing else, and name the source of each statement by its number in "
    "brackets, such as [1]. If they do not answer the question, say so."
)
REMINDED = "Name the sources of your answer by their numbers, such as [1]."
"""Stands behind the question: small models have forgotten by then what stands before the sources."""
Heard = Callable[[int, int], object]
Room = Callable[[str, int], AbstractAsyncContextManager[None]]
"""Counts bytes of a tenant while they are being written; entering it raises where the tenant may not keep them."""


def endless(tenant: str, size: int) -> AbstractAsyncContextManager[None]:
    """Return room without a bound."""
    return nullcontext()


class Embedder(NamedTuple):
    """What makes vectors, and for whom."""

    service: Service
    asking: Asking

    async def made(
        self, texts: Sequence[str], prompts: Sequence[str], heard: Callable[[int], object] = lambda done: None
    ) -> list[Vector]:
        """The vectors of texts, of length 1; the first of `prompts` that the model knows stands before each. `heard` is
        told how many are made."""
        known = self.service.spec.embedding.prompts
        name = next((one for one in prompts if one in known), None)
        asking = self.asking if name is None else _named(self.asking, name)
        found: list[Vector] = []
        for at in range(0, len(texts), AT_ONCE):
            made, _ = await vectors(self.service, texts[at : at + AT_ONCE], asking)
            found += finished(made)
            heard(len(found))
        return found


def _named(asking: Asking, prompt: str) -> Asking:
    return replace(asking, prompt_name=prompt)


class Reranker(NamedTuple):
    """A model that judges how well a text answers a question, and for whom."""

    service: Service
    asking: Asking

    async def best(self, question: str, found: Sequence[SearchHit], count: int) -> list[SearchHit]:
        """The best of what was found, by this model's scores."""
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
    """False: nothing in the documents was near enough to the question, or the answer names no source."""
    sources: list[dict[str, Any]]
    """The chunks that were given, by their number from 1; `cited` says which are named in the answer."""
    citations_removed: int = 0
    """Brackets and numbers in the answer that named no source."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = "stop"
    reranked_by: str | None = None
    """The model that has put the sources in order before the best were taken; None for none."""


class Collections:
    """The collections of a server. What is slow runs on other threads."""

    def __init__(self, store: DocumentStore, answerer: Answerer) -> None:
        self.store, self._answerer = store, answerer
        self._extractor = Extractor()

    async def add(
        self,
        tenant: str,
        id: str,
        embedder: Embedder,
        new: NewDocument,
        room: Room = endless,
        heard: Heard = lambda done, all: None,
    ) -> StoredDocument:
        """Read, cut and embed a document. `heard` is told how many of its chunks are embedded, of how many. Raises what
        `room` does for the bytes that the document will take.

        TooLarge for one that is, InvalidRequest for one that cannot be read or holds no text.
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

    async def _read(self, tenant: str, new: NewDocument) -> list[Section]:
        """The sections of a document. What a stranger's file can do to its reader it does in a process of its own."""
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
        """The chunks that fit a question best; with a judge it takes them from more. Conflict where their vectors are
        of another model."""
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
        """Answer a question from chunks that were found, with citations that name them.

        Sources stand in the order of their documents and the question last, so questions that find the same sources
        share the beginning of their prompts.
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
            f"the vectors of collection {collection.id} are of the model {collection.model}, and {service.name} is "
            "asked; name that model, or make the collection anew"
        )
