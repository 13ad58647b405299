"""Types of collections, documents, chunks and searches, and their limits."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec

from cairn.types.errors import InvalidRequest

Attribute = str | float | bool
"""Value of a document's attribute."""
DocumentKind = Literal["txt", "md", "html", "pdf", "docx"]
BINARY: frozenset[DocumentKind] = frozenset({"pdf", "docx"})
"""Formats that are given as bytes, not as text."""
KINDS: dict[str, DocumentKind] = {
    "md": "md",
    "markdown": "md",
    "html": "html",
    "htm": "html",
    "xhtml": "html",
    "pdf": "pdf",
    "docx": "docx",
}
"""Format by file name extension; any other is plain text."""

MAX_COLLECTIONS = 1_000
"""Collections of one tenant."""
MAX_DOCUMENTS = 10_000
"""Documents of one collection."""
MAX_CHUNKS = 50_000
"""Chunks of one collection: the vectors of a searched collection are held in memory."""
MAX_BYTES = 50 << 20
"""Bytes of one document as sent (texts in UTF-8), and of the text extracted from a PDF or DOCX."""
MAX_PAGES = 5_000
"""Pages of one PDF."""
MAX_UNPACKED = 256 << 20
"""Bytes of one part of a DOCX, unpacked."""
MAX_FOUND = 50
"""Hits of one search."""
CHUNK = 1_200
"""Default size of a chunk, in characters."""
OVERLAP = 150
"""Default overlap with the chunk before in the same section, in characters."""
MIN_SCORE = 0.3
"""Default least score of a chunk that is used as a source of an answer."""
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Collection(msgspec.Struct, frozen=True, kw_only=True):
    """A collection of documents, embedded by one model."""

    key: int
    id: str
    created: float
    chunk: int
    overlap: int
    model: str
    """Name of the model that made its vectors; empty while there are none."""
    identity: bytes
    width: int
    metadata: dict[str, str]
    name: str = ""
    """Display name."""
    documents: int = 0
    size: int = 0
    """Size of all documents, in bytes."""
    chunks: int = 0


class StoredDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A document of a collection."""

    key: int
    id: str
    name: str
    kind: str
    created: float
    size: int
    """Size of its text, in bytes."""
    chunks: int
    metadata: dict[str, Attribute]


class NewDocument(NamedTuple):
    """A document to add."""

    id: str
    name: str
    kind: DocumentKind
    content: str | BinaryIO
    """Text, or a file read from its current position."""
    size: int
    """Size of the content, in bytes."""
    metadata: Mapping[str, Attribute]
    field: str = "text"
    """Name of the content's field in error messages."""
    sizes: tuple[int, int] | None = None
    """Chunk size and overlap in characters; None for the collection's."""
    attached: bool = False
    """Whether it is an attached file, whose attachment is completed with it."""


class DocumentChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A stored piece of a document."""

    key: int
    document: str
    name: str
    """The document's name."""
    number: int
    """Index in the document, from 0."""
    heading: str
    """Headings above it, the highest first."""
    text: str
    metadata: dict[str, Attribute]
    """The document's metadata."""


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a search."""

    top_k: int = 5
    min_score: float = -1.0
    documents: tuple[str, ...] = ()
    """Ids of the documents to search; empty for all."""
    metadata: dict[str, str] = {}
    """Metadata that a document must have."""
    fits: Callable[[Mapping[str, Attribute]], bool] | None = None
    """Predicate over a document's metadata."""
    weights: tuple[float, float] = (1.0, 1.0)
    """Weights of the ranking by vectors and of that by words."""


class SearchHit(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk found by a search."""

    chunk: DocumentChunk
    score: float
    """Cosine similarity with the question."""
    rank: float
    """Reciprocal rank fusion of the rankings by vectors and by words."""
    judged: float | None = None
    """The reranker's score; None without one."""

    def plain(self) -> dict[str, Any]:
        """Return the JSON-ready dict that clients see."""
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
    """Return the format of a document with this file name."""
    return KINDS.get(name.lower().rpartition(".")[2], "txt") if "." in name else "txt"


def check_name(id: str, what: str) -> str:
    """Return the id. Raise InvalidRequest, naming it `what`, if it is not valid."""
    if not ID.fullmatch(id):
        raise InvalidRequest(
            f"{what} has 1 to 64 letters, digits, dots, underscores and hyphens, and begins with a letter or digit",
            field="id",
        )
    return id
