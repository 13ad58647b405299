"""Addresses and bodies of the collections' routes."""

from __future__ import annotations

import base64
from typing import Any, ClassVar

from cairn.api.http.body import Body, Count, Number, Several, Stop, parse_json
from cairn.api.http.multipart import Upload
from cairn.frontend.request_options import SamplingOptions
from cairn.rag.definition import (
    BINARY,
    CHUNK,
    MAX_FOUND,
    MIN_SCORE,
    OVERLAP,
    Collection,
    DocumentKind,
    Search,
    StoredDocument,
    kind_of,
)
from cairn.types.errors import InvalidRequest

PATH = "/v1/collections"
ANSWER_TOKENS = 512
"""Default limit of an answer's tokens."""


class CollectionBody(Body):
    """POST /v1/collections."""

    id: str | None = None
    chunk: Count = None
    """Characters of a chunk at most."""
    overlap: Count = None
    metadata: dict[str, str] | None = None

    def sizes(self) -> tuple[int, int]:
        """Return the chunk size and overlap in characters."""
        chunk = CHUNK if self.chunk is None else self.chunk
        if not 100 <= chunk <= 20_000:
            raise InvalidRequest(f"chunk must be 100 to 20000 characters; it is {chunk}", field="chunk")
        overlap = min(OVERLAP, chunk // 4) if self.overlap is None else self.overlap
        if not 0 <= overlap <= chunk // 2:
            raise InvalidRequest(f"overlap must be 0 to {chunk // 2}, half a chunk; it is {overlap}", field="overlap")
        return chunk, overlap


class CollectionDocumentBody(Body):
    """POST /v1/collections/{id}/documents as JSON; a form has a `file` instead of `text` and `data`."""

    id: str | None = None
    name: str
    text: str | None = None
    data: str | None = None
    """The bytes of a file, in base64."""
    type: DocumentKind | None = None
    """Default: by the ending of the name, else txt."""
    metadata: dict[str, str] | None = None
    embedding_model: str | None = None
    stream: bool | None = None

    def kind(self) -> DocumentKind:
        """Return the document's type. Raises InvalidRequest if a text cannot be of this type."""
        kind = self.type or kind_of(self.name)
        if self.text is not None and kind in BINARY:
            raise InvalidRequest(
                f"a document of type {kind} is no text; send its bytes as data, or a form", field="type"
            )
        return kind

    def content(self) -> str | bytes:
        """Return the text, or the bytes of a file."""
        if (self.text is None) == (self.data is None):
            raise InvalidRequest("give text, or data in base64, and not both", field="text")
        if self.text is not None:
            return self.text
        try:
            return base64.b64decode(self.data or "", validate=True)
        except ValueError:
            raise InvalidRequest("data is not base64", field="data") from None


def document_of_form(upload: Upload) -> dict[str, Any]:
    """Return a form's fields as a document's body has them."""
    given: dict[str, Any] = {"name": upload.filename, **upload.fields}
    for name in ("text", "data"):
        if name in given:
            raise InvalidRequest(f"{name} cannot be in a form: its file is the document", field=name)
    if "metadata" in given:
        given["metadata"] = parse_json(given["metadata"].encode("utf-8", "replace"), max_depth=2, max_values=64)
    if "stream" in given:
        given["stream"] = {"true": True, "false": False}.get(given["stream"], given["stream"])
    return given


class SearchFilters(Body):
    """Which documents are looked at."""

    documents: Several[str] | None = None
    metadata: dict[str, str] | None = None


class SearchBody(Body):
    """POST /v1/collections/{id}/search."""

    within: ClassVar[dict[str, type[Body]]] = {"filters": SearchFilters}

    query: str
    top_k: Count = None
    min_score: Number = None
    filters: SearchFilters | None = None
    embedding_model: str | None = None
    rerank: bool | None = None
    """Default: rerank if a model for that is loaded."""
    rerank_model: str | None = None

    least: ClassVar[float] = -1.0
    """The least score of a chunk unless the body sets one."""

    def wanted(self) -> Search:
        """Return the search options."""
        top_k = 5 if self.top_k is None else self.top_k
        if not 1 <= top_k <= MAX_FOUND:
            raise InvalidRequest(f"top_k must be 1 to {MAX_FOUND}, the limit; it is {top_k}", field="top_k")
        least = self.least if self.min_score is None else float(self.min_score)
        if not -1 <= least <= 1:
            raise InvalidRequest(f"min_score must be -1 to 1; it is {least:g}", field="min_score")
        if not self.query.strip():
            raise InvalidRequest("query is empty", field="query")
        filters = self.filters or SearchFilters()
        return Search(
            top_k=top_k,
            min_score=least,
            documents=tuple(filters.documents or ()),
            metadata=filters.metadata or {},
        )


class AskCollectionBody(SearchBody):
    """POST /v1/collections/{id}/ask."""

    synonyms: ClassVar[dict[str, str]] = {"question": "query"}
    least: ClassVar[float] = MIN_SCORE

    model: str | None = None
    stream: bool | None = None
    max_tokens: Count = None
    temperature: Number = None
    top_p: Number = None
    seed: Count = None
    stop: Stop | None = None
    reasoning_budget: Count = None

    def options(self) -> SamplingOptions:
        """Return the sampling options of the answer."""
        return SamplingOptions(
            max_tokens=ANSWER_TOKENS if self.max_tokens is None else self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=self.stop,
            reasoning_budget=self.reasoning_budget,
        )


def collection_object(found: Collection) -> dict[str, Any]:
    """Return a collection as clients see it."""
    return {
        "id": found.id,
        "object": "collection",
        "name": found.name or None,
        "created": found.created,
        "chunk": found.chunk,
        "overlap": found.overlap,
        "embedding_model": found.model or None,
        "dimensions": found.width or None,
        "metadata": found.metadata,
        "documents": found.documents,
        "chunks": found.chunks,
    }


def document_object(found: StoredDocument) -> dict[str, Any]:
    """Return a document as clients see it, without its text."""
    return {
        "id": found.id,
        "object": "collection.document",
        "name": found.name,
        "type": found.kind,
        "created": found.created,
        "bytes": found.size,
        "chunks": found.chunks,
        "metadata": found.metadata,
    }
