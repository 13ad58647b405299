"""The tool `file_search` of OpenAI's Responses API: a search of vector stores for the passages of an answer.

The search runs on the user's last message before the model generates: small models answer well from passages they are
shown, and ask badly for those they need. The passages stand before that message, numbered. Citations in the answer
become annotations; a number without a passage is removed, as in answers of /v1/collections.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from cairn.api.chat.documents import Library
from cairn.api.chat.parse import parse
from cairn.api.http.body import Body, Count, Several
from cairn.api.http.call import HTTPCall
from cairn.api.openai.responses_items import SEARCHED
from cairn.api.openai.vector_store_schemas import RankingBody, result_object, search_of
from cairn.config.config import Config
from cairn.rag.citations import CitationFilter, Cited
from cairn.rag.definition import MIN_SCORE, SearchHit
from cairn.types.errors import InvalidRequest

RESULTS = "file_search_call.results"
MAX_STORES = 16
"""Vector stores of one tool."""
USUAL = 5
"""Default number of passages."""
TOLD = (
    "Answer from these sources where they help, and name the source of each statement by its number in brackets, such "
    "as [1].\n\n"
)
NOTHING = "Nothing was found.\n\n"


class FileSearchBody(Body):
    """One of a response's `tools`."""

    within: ClassVar[dict[str, type[Body]]] = {"ranking_options": RankingBody}
    lenient: ClassVar[bool] = True

    type: Literal["file_search"]
    vector_store_ids: Several[str]
    filters: dict[str, Any] | None = None
    max_num_results: Count = None
    ranking_options: RankingBody | None = None


class CitedFile(msgspec.Struct, frozen=True):
    """The file behind a number in an answer."""

    file_id: str
    filename: str


class Searched(msgspec.Struct, frozen=True):
    """A search that was made for a response."""

    item: dict[str, Any]
    """The search as an item of the answer."""
    sources: list[CitedFile]
    """By their number from 1."""
    tools: list[dict[str, Any]]
    """The tools that asked for it, as the client sent them."""


class FileSearch:
    """Searches for responses."""

    def __init__(self, config: Config, library: Library) -> None:
        self._config, self._library = config, library

    async def run(
        self, call: HTTPCall, tools: Sequence[tuple[str, dict[str, Any]]], chat: dict[str, Any], *, results: bool
    ) -> Searched | None:
        """Run the searches of these tools and put the passages into the last message of the chat.

        `tools` name each tool's place in the body. Returns None if the user does not have the last word. `results`: the
        item lists what was found.
        """
        last = chat["messages"][-1] if chat["messages"] else {}
        question = last.get("content")
        if last.get("role") != "user" or not isinstance(question, str) or not question.strip():
            return None
        found: dict[int, SearchHit] = {}
        for where, tool in tools:
            for one in await self._search(call, where, tool, question):
                found.setdefault(one.chunk.key, one)
        ordered = sorted(found.values(), key=lambda one: one.chunk.key)  # so that equal sources have equal prefixes
        last["content"] = [{"type": "text", "text": _shown(ordered)}, {"type": "text", "text": question}]
        item: dict[str, Any] = {
            "id": f"fs_{call.id}_0",
            "type": "file_search_call",
            "status": "completed",
            "queries": [question],
            "results": [result_object(one) | {"text": one.chunk.text} for one in found.values()] if results else None,
        }
        return Searched(
            item, [CitedFile(one.chunk.document, one.chunk.name) for one in ordered], [tool for _, tool in tools]
        )

    async def _search(self, call: HTTPCall, where: str, tool: dict[str, Any], question: str) -> list[SearchHit]:
        try:
            body = parse(FileSearchBody, tool, self._config, call)
            ranking = body.ranking_options
            wanted = search_of(body.max_num_results, USUAL, body.filters, ranking, MIN_SCORE)
            if not 1 <= len(body.vector_store_ids) <= MAX_STORES:
                raise InvalidRequest(
                    f"vector_store_ids must hold 1 to {MAX_STORES} ids, the limit", field="vector_store_ids"
                )
        except InvalidRequest as error:
            raise error.named(f"{where}.{error}", f"{where}.{error.field}") from None
        rerank = None if ranking is None else ranking.rerank
        return await self._library.search(call, body.vector_store_ids, [question], wanted, rerank)


def _shown(found: Sequence[SearchHit]) -> str:
    """Return the passages as the model reads them."""
    if not found:
        return SEARCHED + NOTHING
    told = [SEARCHED]
    for number, one in enumerate(found, 1):
        chunk = one.chunk
        where = f"{chunk.name}: {chunk.heading}" if chunk.heading else chunk.name
        told.append(f"[{number}] ({where})\n{chunk.text}\n\n")
    return "".join([*told, TOLD])


class CitedText:
    """A text with citations: the part that can be sent, and its annotations."""

    def __init__(self, sources: Sequence[CitedFile]) -> None:
        self._sources = sources
        self._checked = CitationFilter(len(sources), [one.filename for one in sources])
        self._seen = 0

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the text that can be sent now, and its annotations."""
        return self._told(self._checked.push(text))

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the rest of the text and its annotations."""
        return self._told(self._checked.finish())

    def _told(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        news, self._seen = self._checked.places[self._seen :], len(self._checked.places)
        return text, [self._annotation(one) for one in news]

    def _annotation(self, cited: Cited) -> dict[str, Any]:
        source = self._sources[cited.number - 1]
        return {
            "type": "file_citation",
            "index": cited.at,
            "file_id": source.file_id,
            "filename": source.filename,
        }


def wants_search(choice: Any) -> bool:
    """Return whether a tool_choice allows searching files."""
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        return isinstance(listed, list) and {"type": "file_search"} in listed
    if isinstance(choice, dict):
        return choice.get("type") == "file_search"
    return bool(choice != "none")
