"""What a collection, a document and a chunk are, and their limits."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec

from cairn.types.errors import InvalidRequest

Attribute = str | float | bool
"""What is noted of a document under a name."""
DocumentKind = Literal["txt", "md", "html", "pdf", "docx"]
BINARY: frozenset[DocumentKind] = frozenset({"pdf", "docx"})
"""Documents that are no text: they are given as bytes."""
KINDS: dict[str, DocumentKind] = {
    "md": "md",
    "markdown": "md",
    "html": "html",
    "htm": "html",
    "xhtml": "html",
    "pdf": "pdf",
    "docx": "docx",
}
"""By the ending of a document's name; any other is a plain text."""

MAX_COLLECTIONS = 1_000
"""Collections of one tenant."""
MAX_DOCUMENTS = 10_000
"""Documents of one collection."""
MAX_CHUNKS = 50_000
"""Chunks of one collection: the vectors of those that are asked for are held in memory."""
MAX_BYTES = 50 << 20
"""Bytes of one document, as it is given; a text in UTF-8. Of a PDF or DOCX its text is bounded by the same."""
MAX_PAGES = 5_000
"""Pages of one PDF."""
MAX_UNPACKED = 256 << 20
"""Bytes of one part of a DOCX, unpacked."""
MAX_FOUND = 50
"""Chunks that one search gives."""
CHUNK = 1_200
"""Characters of a chunk at most, unless its collection says otherwise."""
OVERLAP = 150
"""Characters that a chunk repeats of the one before it, where both are of one section."""
MIN_SCORE = 0.3
"""The least score with which a chunk is a source of an answer, unless a question says otherwise."""
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Collection(msgspec.Struct, frozen=True, kw_only=True):
    """A collection."""

    key: int
    id: str
    created: float
    chunk: int
    overlap: int
    model: str
    """The name of the model that makes its vectors; empty before there are any."""
    identity: bytes
    width: int
    metadata: dict[str, str]
    name: str = ""
    """What it is called beside its id."""
    documents: int = 0
    size: int = 0
    """Bytes of all documents."""
    chunks: int = 0


class StoredDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A document of a collection."""

    key: int
    id: str
    name: str
    kind: str
    created: float
    size: int
    """Bytes of its text."""
    chunks: int
    metadata: dict[str, Attribute]


class NewDocument(NamedTuple):
    """A document that is to be added."""

    id: str
    name: str
    kind: DocumentKind
    content: str | BinaryIO
    """A text, or a real file, which is read from where it stands."""
    size: int
    """Bytes of it."""
    metadata: Mapping[str, Attribute]
    field: str = "text"
    """What its sender calls the content."""
    sizes: tuple[int, int] | None = None
    """Characters of its chunks, and what they repeat; None: as its collection has them."""


class DocumentChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a document."""

    key: int
    document: str
    name: str
    """The document's."""
    number: int
    """Its place in the document, from 0."""
    heading: str
    """The headings above it, the highest first."""
    text: str
    metadata: dict[str, Attribute]
    """The document's."""


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """What is searched for beside the question."""

    top_k: int = 5
    min_score: float = -1.0
    documents: tuple[str, ...] = ()
    """Only in these; none named: in all."""
    metadata: dict[str, str] = {}
    """Only in documents of which this is noted."""
    fits: Callable[[Mapping[str, Attribute]], bool] | None = None
    """Only in documents of which what is noted fits."""
    weights: tuple[float, float] = (1.0, 1.0)
    """How much the list by vectors counts, and that by words."""


class SearchHit(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk that was found."""

    chunk: DocumentChunk
    score: float
    """The cosine of its vector and the question's."""
    rank: float
    """By both lists, that of vectors and that of words: reciprocal rank fusion."""
    judged: float | None = None
    """The score that a model for reranking gives it; None where none was asked."""

    def plain(self) -> dict[str, Any]:
        """As it is told."""
        one = self.chunk
        judged = {} if self.judged is None else {"rerank_score": round(self.judged, 6)}
        return {
            "document": one.document,
            "name": one.name,
            "chunk": one.number,
            "heading": one.heading,
            "text": one.text,
            "score": round(self.score, 6),
            "rank": round(self.rank, 6),
            **judged,
        }


def kind_of(name: str) -> DocumentKind:
    """How a document of this name is read."""
    return KINDS.get(name.lower().rpartition(".")[2], "txt") if "." in name else "txt"


def check_name(id: str, what: str) -> str:
    """The id. InvalidRequest for what is none."""
    if not ID.fullmatch(id):
        raise InvalidRequest(
            f"{what} has 1 to 64 letters, digits, dots, underscores and hyphens, and begins with a letter or digit",
            field="id",
        )
    return id
