"""The tool `file_search` of responses, with OpenAI's own client: a scripted model on the real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from cairn.api.app import App
from cairn.api.openai.file_search import CitedFile, CitedText, wants_search
from cairn.api.openai.responses_items import SEARCHED
from cairn.config.config import Config
from cairn.frontend.service import Service
from tests.api.homes import embedding
from tests.api.openai.test_responses import keeping
from tests.scripted_model import write_scripted
from tests.service.tiny import make_embedder

CAIRNS = b"# Cairns\n\nA cairn is a heap of stones.\n\n# Bread\n\nBread is made of flour.\n"
SAID = ["A heap [", "1][9", "], and flour", " [2].", " See [x]."]
TEXT = "A heap [1], and flour [2]. See [x]."


def the_only(app: App) -> Service:
    assert app.service is not None
    return app.service


async def store_of(ai: AsyncOpenAI) -> tuple[str, str]:
    """Create a vector store with one file."""
    store = await ai.vector_stores.create(name="docs")
    file = await ai.vector_stores.files.upload_and_poll(
        vector_store_id=store.id, file=("cairns.md", CAIRNS), attributes={"year": 1999}
    )
    assert file.status == "completed", file.last_error
    return store.id, file.id


def tool(*stores: str, **more: Any) -> Any:
    return [{"type": "file_search", "vector_store_ids": list(stores), **more}]


LOW: Any = {"ranking_options": {"score_threshold": -1}}  # scores from a chat model's vectors are low


async def test_an_answer_cites_what_was_found(tmp_path: Path) -> None:
    path = write_scripted(tmp_path / "said.gguf", SAID)
    ask: dict[str, Any] = {"model": "any", "input": "What is a cairn?", "temperature": 0}
    async with (
        keeping(tmp_path / "agents", path, Config(agents_dir=str(tmp_path / "agents")), engine="cpu") as at,
        embedding(at.app, the_only(at.app), make_embedder(tmp_path / "embedder")),
        at.openai() as ai,
    ):
        store, file = await store_of(ai)
        ask["tools"] = tool(store, **LOW)
        whole = await ai.responses.create(**ask, include=["file_search_call.results"])
        search, message = whole.output
        assert search.type == "file_search_call" and search.status == "completed"
        assert search.queries == ["What is a cairn?"] and search.results is not None
        assert {result.text for result in search.results} == {"A cairn is a heap of stones.", "Bread is made of flour."}
        assert {(result.file_id, result.filename) for result in search.results} == {(file, "cairns.md")}
        assert search.results[0].attributes == {"year": 1999.0}
        assert message.type == "message" and whole.output_text == TEXT, "[9] names no source"
        (part,) = message.content
        assert part.type == "output_text"
        cited = [
            (annotation.index, annotation.file_id, annotation.filename)
            for annotation in part.annotations
            if annotation.type == "file_citation"
        ]
        assert cited == [(TEXT.index("[1]"), file, "cairns.md"), (TEXT.index("[2]"), file, "cairns.md")]

        events: list[Any] = []
        async with ai.responses.stream(**ask) as stream:
            async for event in stream:
                events.append(event)
            final = await stream.get_final_response()
        kinds = [event.type for event in events]
        begun = [kind for kind in kinds if kind.startswith("response.file_search_call")]
        assert [kind.rpartition(".")[2] for kind in begun] == ["in_progress", "searching", "completed"]
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
        added = [event for event in events if event.type == "response.output_text.annotation.added"]
        assert [(one.annotation_index, one.output_index) for one in added] == [(0, 1), (1, 1)]
        last = final.output[1]
        assert last.type == "message" and last.content[0].type == "output_text"
        assert last.content[0].annotations == part.annotations and last.content[0].text == TEXT
        assert final.usage is not None and final.usage.input_tokens_details.cached_tokens > 100

        shown = await ai.responses.retrieve(whole.id)
        assert shown.output_text == TEXT and shown.output[1] == message and shown.tools == whole.tools
        assert shown.output[0].type == "file_search_call" and shown.output[0].queries == search.queries
        items = await ai.responses.input_items.list(whole.id)
        (item,) = items.data
        assert item.type == "message" and item.content[0].type == "input_text"
        assert item.content[0].text == "What is a cairn?", "results are not part of the client's message"
        again = await ai.responses.create(**ask | {"input": "And bread?"}, previous_response_id=whole.id)
        assert again.usage is not None and whole.usage is not None
        assert again.usage.input_tokens_details.cached_tokens >= whole.usage.input_tokens // 16 * 16
        loose = await ai.responses.create(**ask, store=False)
        assert [one.type for one in loose.output] == ["file_search_call", "message"] and loose.output_text == TEXT
        back = [{"role": "user", "content": "What is a cairn?"}, *(one.model_dump() for one in loose.output)]
        more = await ai.responses.create(**ask | {"input": [*back, {"role": "user", "content": "Go on"}]}, store=False)
        assert more.output[0].type == "file_search_call" and more.output[0].queries == ["Go on"]


async def test_where_nothing_is_to_be_searched(tmp_path: Path) -> None:
    path = write_scripted(tmp_path / "said.gguf", ["Nothing [1]."])
    ask: dict[str, Any] = {"model": "any", "input": "What is a cairn?", "temperature": 0}
    async with (
        keeping(tmp_path / "agents", path, Config(agents_dir=str(tmp_path / "agents")), engine="cpu") as at,
        embedding(at.app, the_only(at.app), make_embedder(tmp_path / "embedder")),
        at.openai() as ai,
    ):
        store, _ = await store_of(ai)
        none = await ai.responses.create(**ask, tools=tool(store), tool_choice="none")
        assert [one.type for one in none.output] == ["message"] and none.output_text == "Nothing [1]."
        old: Any = {"filters": {"type": "gt", "key": "year", "value": 2000}}
        forced: Any = {"type": "file_search"}
        empty = await ai.responses.create(**ask, tools=tool(store, **LOW, **old), tool_choice=forced)
        assert [one.type for one in empty.output] == ["file_search_call", "message"]
        assert empty.output_text == "Nothing ."
        for tools, said in (
            (tool(), "tools[0].vector_store_ids must hold 1 to 16"),
            (tool(store, max_num_results=51), "tools[0].max_num_results must be 1 to 50"),
            (tool(store, filters={"type": "eq"}), "tools[0].filters.key must be a text"),
        ):
            with pytest.raises(openai.BadRequestError) as wrong:
                await ai.responses.create(**ask, tools=tools)
            assert said in str(wrong.value)
        with pytest.raises(openai.NotFoundError):
            await ai.responses.create(**ask, tools=tool("vs_none"))


def test_citations_have_their_places_however_the_text_comes() -> None:
    text = "".join(SAID)
    sources = [CitedFile("a", "a.md"), CitedFile("b", "b.md")]
    for size in (1, 2, 5, 100):
        cites, shown, citations = CitedText(sources), "", list[dict[str, Any]]()
        for at in range(0, len(text), size):
            piece, some = cites.push(text[at : at + size])
            shown, citations = shown + piece, citations + some
        piece, some = cites.finish()
        assert shown + piece == TEXT
        assert [(one["index"], one["file_id"]) for one in citations + some] == [
            (TEXT.index("[1]"), "a"),
            (TEXT.index("[2]"), "b"),
        ]


def test_a_choice_lets_files_be_searched_or_not() -> None:
    allowed: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "file_search"}]}
    assert all(wants_search(one) for one in (None, "auto", "required", {"type": "file_search"}, allowed))
    assert not any(wants_search(one) for one in ("none", {"type": "function", "name": "f"}, allowed | {"tools": []}))
    assert SEARCHED.endswith("\n\n")
