"""Bodies and objects of OpenAI's vector stores.

Shapes: platform.openai.com/docs/api-reference/vector-stores, as openai-python's `types` state them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from cairn.api.chat.parse import MAX_METADATA
from cairn.api.http.body import Body, Count, Several
from cairn.api.http.call import shown
from cairn.api.native.agent_schemas import check_metadata
from cairn.rag.attachments import Attachment, WantedFile
from cairn.rag.definition import MAX_FOUND, Attribute, Collection, Search, SearchHit
from cairn.rag.filters import filter_of
from cairn.types.errors import InvalidRequest, Unsupported

TOKEN = 4
"""Characters that are counted for a token: chunks are cut by characters."""
RANKERS = ("none", "auto", "default-2024-11-15")


class _StoreBody(Body):
    """The fields that create or change a vector store."""

    lenient: ClassVar[bool] = True

    name: str | None = None
    metadata: dict[str, str] | None = None
    expires_after: Any = None

    def check(self) -> None:
        """Raise InvalidRequest for metadata or a name that are too long."""
        check_metadata(self.metadata)
        if self.name is not None and len(self.name) > 256:
            raise InvalidRequest("name must have at most 256 characters", field="name")
        if self.expires_after is not None:
            raise Unsupported(
                "expires_after is not built: vector stores stay until they are deleted", field="expires_after"
            )


class VectorStoreBody(_StoreBody):
    """POST /v1/vector_stores."""

    file_ids: Several[str] | None = None
    chunking_strategy: dict[str, Any] | None = None

    def wanted(self) -> list[WantedFile]:
        """Return the files to put into it."""
        sizes = sizes_of(self.chunking_strategy, "chunking_strategy")
        return _distinct([WantedFile(id, {}, sizes) for id in self.file_ids or ()])


class VectorStoreChangeBody(_StoreBody):
    """POST /v1/vector_stores/{id}."""


class AttachBody(Body):
    """POST /v1/vector_stores/{id}/files, and one of the `files` of a batch."""

    file_id: str
    attributes: dict[str, Any] | None = None
    chunking_strategy: dict[str, Any] | None = None

    def wanted(self) -> WantedFile:
        """Return the file to put into the store."""
        return WantedFile(
            self.file_id, attributes_of(self.attributes), sizes_of(self.chunking_strategy, "chunking_strategy")
        )


class BatchBody(Body):
    """POST /v1/vector_stores/{id}/file_batches."""

    within: ClassVar[dict[str, type[Body]]] = {"files": AttachBody}

    file_ids: Several[str] | None = None
    files: Several[AttachBody] | None = None
    attributes: dict[str, Any] | None = None
    chunking_strategy: dict[str, Any] | None = None

    def wanted(self) -> list[WantedFile]:
        """Return the files in their order."""
        if (self.file_ids is None) == (self.files is None):
            raise InvalidRequest("give file_ids, or files, and not both", field="file_ids")
        if self.files is not None:
            return _distinct([one.wanted() for one in self.files])
        noted, sizes = attributes_of(self.attributes), sizes_of(self.chunking_strategy, "chunking_strategy")
        return _distinct([WantedFile(id, noted, sizes) for id in self.file_ids or ()])


class AttributesBody(Body):
    """POST /v1/vector_stores/{id}/files/{file}."""

    attributes: dict[str, Any] | None


class RankingBody(Body):
    """The ranking of what is found."""

    lenient: ClassVar[bool] = True

    ranker: str | None = None
    score_threshold: float | None = None
    hybrid_search: dict[str, Any] | None = None

    def search(self, search: Search, field: str) -> Search:
        """Return a search with this ranking."""
        if self.ranker is not None and self.ranker not in RANKERS:
            raise InvalidRequest(f"{field}.ranker must be one of {', '.join(RANKERS)}", field=f"{field}.ranker")
        least = search.min_score if self.score_threshold is None else float(self.score_threshold)
        if not -1 <= least <= 1:
            raise InvalidRequest(f"{field}.score_threshold must be 0 to 1", field=f"{field}.score_threshold")
        weights = search.weights
        if self.hybrid_search is not None:
            given = [self.hybrid_search.get(name) for name in ("embedding_weight", "text_weight")]
            if not all(isinstance(one, int | float) and 0 <= one <= 1e6 for one in given) or not any(given):
                where = f"{field}.hybrid_search"
                raise InvalidRequest(f"{where} has two weights from 0, not both 0", field=where)
            weights = float(given[0] or 0), float(given[1] or 0)
        return Search(top_k=search.top_k, min_score=least, fits=search.fits, weights=weights)

    @property
    def rerank(self) -> bool | None:
        """Whether a model reranks; None: if one is loaded."""
        return False if self.ranker == "none" else None


class StoreSearchBody(Body):
    """POST /v1/vector_stores/{id}/search."""

    within: ClassVar[dict[str, type[Body]]] = {"ranking_options": RankingBody}

    query: Any
    filters: dict[str, Any] | None = None
    max_num_results: Count = None
    ranking_options: RankingBody | None = None
    rewrite_query: bool | None = None

    def queries(self) -> list[str]:
        """Return the questions."""
        given = [self.query] if isinstance(self.query, str) else self.query
        if not isinstance(given, list) or not 1 <= len(given) <= 8 or not all(isinstance(one, str) for one in given):
            raise InvalidRequest("query must be a text, or a list of 1 to 8 texts", field="query")
        if not all(one.strip() for one in given):
            raise InvalidRequest("query is empty", field="query")
        return given

    def search(self) -> Search:
        """Return the search options."""
        return search_of(self.max_num_results, 10, self.filters, self.ranking_options, Search().min_score)


def search_of(
    most: int | None, usual: int, filters: Any, ranking: RankingBody | None, least: float, field: str = ""
) -> Search:
    """Return a search by OpenAI's fields; `field` is the prefix of their names in errors."""
    most = usual if most is None else most
    if not 1 <= most <= MAX_FOUND:
        where = f"{field}max_num_results"
        raise InvalidRequest(f"{where} must be 1 to {MAX_FOUND}; it is {most}", field=where)
    fits = None if filters is None else filter_of(filters, f"{field}filters")
    search = Search(top_k=most, min_score=least, fits=fits)
    return search if ranking is None else ranking.search(search, f"{field}ranking_options")


def sizes_of(given: Any, field: str) -> tuple[int, int] | None:
    """Return the chunk size and overlap of a chunking strategy in characters; None for the collection's own."""
    if given is None or given.get("type") == "auto":
        return None
    static = given.get("static")
    if given.get("type") != "static" or not isinstance(static, dict):
        raise InvalidRequest(f"{field}.type must be auto, or static with its sizes", field=f"{field}.type")
    most, overlap = static.get("max_chunk_size_tokens"), static.get("chunk_overlap_tokens")
    if not isinstance(most, int) or not 100 <= most <= 4096:
        where = f"{field}.static.max_chunk_size_tokens"
        raise InvalidRequest(f"{where} must be 100 to 4096", field=where)
    if not isinstance(overlap, int) or not 0 <= overlap <= most // 2:
        where = f"{field}.static.chunk_overlap_tokens"
        raise InvalidRequest(f"{where} must be 0 to {most // 2}, half a chunk", field=where)
    return most * TOKEN, overlap * TOKEN


def attributes_of(given: Mapping[str, Any] | None) -> dict[str, Attribute]:
    """Return a file's attributes, checked."""
    given = given or {}
    if len(given) > MAX_METADATA:
        raise InvalidRequest(f"attributes holds {len(given)} entries; the limit is {MAX_METADATA}", field="attributes")
    for name, value in given.items():
        field = f"attributes.{shown(name)}"
        if not isinstance(value, str | bool | int | float):
            raise InvalidRequest(f"{field} must be a text, a number, true or false", field=field)
        if len(name) > 64 or (isinstance(value, str) and len(value) > 512):
            raise InvalidRequest(f"{field}: a name has at most 64 characters, a text 512", field=field)
        if isinstance(value, int) and abs(value) > 1 << 63:  # many digits are no float at all
            raise InvalidRequest(f"{field}: a number has at most 64 bits", field=field)
    return {name: value if isinstance(value, str | bool) else float(value) for name, value in given.items()}


def _distinct(wanted: Sequence[WantedFile]) -> list[WantedFile]:
    return list({one.file: one for one in wanted}.values())


def store_object(found: Collection, states: Mapping[str, int]) -> dict[str, Any]:
    """Return a vector store as clients see it; `states` counts files by state."""
    counts = counts_of({**states, "completed": found.documents})
    return {
        "id": found.id,
        "object": "vector_store",
        "created_at": int(found.created),
        "created": found.created,
        "name": found.name or found.id,
        "usage_bytes": found.size,
        "file_counts": counts,
        "status": "in_progress" if counts["in_progress"] else "completed",
        "expires_after": None,
        "expires_at": None,
        "last_active_at": None,
        "metadata": found.metadata,
    }


def counts_of(states: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of files by state, with a total."""
    named = {name: states.get(name, 0) for name in ("in_progress", "completed", "failed", "cancelled")}
    return named | {"total": sum(named.values())}


def attachment_object(store: Collection, one: Attachment, size: int) -> dict[str, Any]:
    """Return a file of a vector store as clients see it; `size`: bytes that the store has of it."""
    chunk, overlap = (one.chunk, one.overlap) if one.chunk else (store.chunk, store.overlap)
    static = {"max_chunk_size_tokens": chunk // TOKEN, "chunk_overlap_tokens": overlap // TOKEN}
    return {
        "id": one.file,
        "object": "vector_store.file",
        "created_at": int(one.created),
        "vector_store_id": store.id,
        "status": one.state,
        "last_error": {"code": one.code, "message": one.why} if one.code else None,
        "usage_bytes": size,
        "attributes": one.attributes,
        "chunking_strategy": {"type": "static", "static": static},
    }


def batch_object(store: Collection, batch: str, files: Sequence[Attachment]) -> dict[str, Any]:
    """Return a batch of files as clients see it."""
    counts = counts_of(Counter(one.state for one in files))
    cancelled = counts["cancelled"] and not counts["in_progress"]
    return {
        "id": batch,
        "object": "vector_store.files_batch",
        "created_at": int(min(one.created for one in files)),
        "vector_store_id": store.id,
        "status": "in_progress" if counts["in_progress"] else "cancelled" if cancelled else "completed",
        "file_counts": counts,
    }


def result_object(found: SearchHit) -> dict[str, Any]:
    """Return a found passage as clients see it, without its text."""
    one = found.chunk
    return {
        "file_id": one.document,
        "filename": one.name,
        "score": round(found.score if found.judged is None else found.judged, 6),
        "attributes": one.metadata,
    }
