"""Recall: a real embedding model, this project's own pages, and questions written by hand.

It takes long because a real model reads the pages, all of them with `make prove`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cairn.config.config import Config
from cairn.frontend.embeddings import EmbeddingCall
from cairn.frontend.request_options import SamplingOptions
from cairn.frontend.service import Service
from cairn.rag.citations import CitationFilter
from cairn.rag.collections import NO_ANSWER, Collections, Embedder
from cairn.rag.definition import MIN_SCORE, NewDocument, Search
from cairn.rag.document_store import DocumentStore
from cairn.text.grammar.grammar import Wanted
from cairn.types.outputs import Delta
from cairn.workflows.answerer import Answered, Asker, Heard, ServiceAnswerer
from tests.real_models import minilm, smollm2

CITED = re.compile(r"\[([\d, ]+)\]")
CODE = re.compile(r"`[^`]*`?")
DOCS = Path(__file__).parents[2] / "docs"
SOME = ("agents", "teams", "workflows", "structured", "sampling", "embeddings")
"""The pages that the questions are about."""
QUESTIONS = (
    ("How do I delete an agent and its text from the disk?", "agents", "`DELETE` is answered"),
    ("How long are turns kept that were rolled back?", "agents", "week"),
    ("Can I move an agent to another server as a file?", "agents", "portable file"),
    ("What happens to a turn when its connection breaks?", "agents", "reconnect_grace"),
    ("How do I keep an agent's KV from eviction?", "agents", "`pin`"),
    ("What does fork_on_conflict do?", "agents", "fork_on_conflict"),
    ("What does the error code damaged mean?", "agents", "`damaged`"),
    ("With which header is a request put on an agent's account?", "agents", "X-Cairn-Agent"),
    ("After how many seconds without use is an agent deleted?", "agents", "ttl"),
    ("How do I make a fork of an agent at a turn?", "agents", "fork"),
    ("Who hears a whisper in a team?", "teams", "told to the members named"),
    ("How is a tie broken in an instant runoff vote?", "teams", "instant runoff"),
    ("Which topologies can a team have?", "teams", "round_robin"),
    ("How are ballots held to their options?", "teams", "held to their options"),
    ("What is written in a scenario file?", "teams", "scenario is a YAML"),
    ("How many members may a team have at most?", "teams", "32 members"),
    ("How do I watch again what a team said?", "teams", "replay"),
    ("What happens to a round of a team after kill -9?", "teams", "kill -9"),
    ("How does a debate with a judge work?", "teams", "`debate`"),
    ("Is the beginning that members share computed once?", "teams", "computed once"),
    ("What is a handoff contract?", "workflows", "handoff contract"),
    ("What happens when an answer breaks its contract?", "workflows", "retries"),
    ("How do I run a node once for each item of a list?", "workflows", "`each`"),
    ("Which value wins when two nodes say different things of one field?", "workflows", "precedence"),
    ("How do I draw the graph of a workflow as SVG?", "workflows", "svg"),
    ("Are cycles allowed in a workflow?", "workflows", "cycle"),
    ("When does a loop of a workflow end?", "workflows", "until"),
    ("What can a condition of a node compare?", "workflows", "is_not"),
    ("Which roles can the nodes of a workflow have?", "workflows", "planner"),
    ("How does a failed run go on?", "workflows", "resume"),
    ("How do I ask for JSON that fits a schema?", "structured", "json_schema"),
    ("Which keywords of JSON schema are refused?", "structured", "uniqueItems"),
    ("What does tool_choice required do?", "structured", "required"),
    ("How long may it take to compile a grammar?", "structured", "2 seconds"),
    ("Which field do older clients of vLLM use for choices?", "structured", "guided_choice"),
    ("What is the default temperature?", "sampling", "0.8"),
    ("In which order are the samplers applied?", "sampling", "top_n_sigma"),
    ("How do I put the temperature after the cuts as llama.cpp does?", "sampling", "sampler-order"),
    ("How are embeddings of several texts made over HTTP?", "embeddings", "/v1/embeddings"),
    ("How do I rerank documents for a query?", "embeddings", "rerank"),
)
FOREIGN = (
    "Who won the football world cup in 1954?",
    "How do I bake sourdough bread?",
    "What is the capital of Mongolia?",
    "Which medicine helps against hay fever?",
    "How tall is the Eiffel tower?",
    "When do tulips bloom?",
    "Who painted the ceiling of the Sistine Chapel?",
    "How often should a guitar be restrung?",
    "What does a baby elephant weigh?",
    "How do I remove a red wine stain from a carpet?",
)


class Talker:
    """An answerer whose text has citations, some of them invalid."""

    async def answer(
        self, asker: Asker, messages: Sequence[dict[str, Any]], options: SamplingOptions, wanted: Wanted, heard: Heard
    ) -> Answered:
        said = "It is so [1], and so [3][77]."
        heard(Delta(text=said))
        return Answered(text=said)


async def test_the_right_chunk_is_found_and_none_if_there_is_none(
    tmp_path: Path, prove: bool, figure: Callable[[str, str], None]
) -> None:
    service = await Service.start(Config(model=str(minilm()), threads=1, kv_disk=False), in_process=True)
    store = DocumentStore(tmp_path / "c" / "collections.sqlite", lambda: 0.0)
    collections, embedder = Collections(store, Talker()), Embedder(service, EmbeddingCall(truncate=True))
    asker = Asker("me")
    try:
        store.create("me", "docs", 700, 100, {})
        pages = sorted(path.stem for path in DOCS.glob("*.md")) if prove else SOME
        for page in pages:
            text = (DOCS / f"{page}.md").read_text()
            await collections.add("me", "docs", embedder, NewDocument(page, page, "md", text, len(text), {}))
        missed = []
        for question, page, needle in QUESTIONS:
            wanted = Search(min_score=MIN_SCORE)
            hits = await collections.search("me", "docs", embedder, question, wanted)
            if not any(hit.chunk.document == page and needle.lower() in _text(hit) for hit in hits):
                missed.append(question)
            answer = await collections.ask(asker, question, hits, SamplingOptions(), lambda event: None)
            checked = CitationFilter(len(answer.sources))
            assert checked.push(answer.answer) + checked.finish() == answer.answer and not checked.removed
        recall = 1 - len(missed) / len(QUESTIONS)
        figure("recall of the right chunk in the first 5", f"{recall:.0%} of {len(QUESTIONS)} questions")
        assert recall >= 0.85, missed
        answered = []
        for question in FOREIGN:
            hits = await collections.search("me", "docs", embedder, question, Search(min_score=MIN_SCORE))
            answer = await collections.ask(asker, question, hits, SamplingOptions(), lambda event: None)
            answered += [(question, round(hits[0].score, 3))] if answer.answered else []
        assert not answered
    finally:
        store.close()
        await service.close()


async def test_a_chat_model_answers_and_its_citations_are_valid(
    tmp_path: Path, prove: bool, figure: Callable[[str, str], None]
) -> None:
    """All questions to a real chat model over the pages, which takes minutes, so only with `make prove`.

    What a small model says does not matter; it must cite chunks that it was given, and must not be asked without any.
    """
    if not prove:
        pytest.skip("in make prove: a real chat model answers 40 questions")
    encoder = await Service.start(Config(model=str(minilm()), threads=1, kv_disk=False), in_process=True)
    config = Config(model=str(smollm2()), threads=2, kv_disk=False, kv_gb=1.0)
    service = await Service.start(config, in_process=True)
    store = DocumentStore(tmp_path / "c" / "collections.sqlite", lambda: 0.0)
    collections = Collections(store, ServiceAnswerer())
    embedder, asker = Embedder(encoder, EmbeddingCall(truncate=True)), Asker("me", service=service)
    options, wanted = SamplingOptions(temperature=0, max_tokens=64), Search(min_score=MIN_SCORE)
    found_there = cited = removed = cached = prompts = 0
    try:
        store.create("me", "docs", 700, 100, {})
        for page in sorted(path.stem for path in DOCS.glob("*.md")):
            text = (DOCS / f"{page}.md").read_text()
            await collections.add("me", "docs", embedder, NewDocument(page, page, "md", text, len(text), {}))
        for question, page, needle in QUESTIONS:
            hits = await collections.search("me", "docs", embedder, question, wanted)
            found_there += any(hit.chunk.document == page and needle.lower() in _text(hit) for hit in hits)
            events: list[dict[str, Any]] = []
            answer = await collections.ask(asker, question, hits, options, events.append)
            assert answer.answer.strip(), question
            told = CODE.sub("", answer.answer)  # brackets in code cite nothing
            numbers = {int(part) for group in CITED.findall(told) for part in group.split(",")}
            assert numbers <= {source["number"] for source in answer.sources}, answer.answer
            assert numbers == {source["number"] for source in answer.sources if source["cited"]}
            assert answer.answered is bool(numbers)
            assert "".join(one["content"] for one in events if one["type"] == "answer.delta") == answer.answer
            cited, removed = cited + bool(numbers), removed + answer.citations_removed
            cached, prompts = cached + answer.cached_tokens, prompts + answer.prompt_tokens
        for question in FOREIGN:
            hits = await collections.search("me", "docs", embedder, question, wanted)
            answer = await collections.ask(asker, question, hits, options, lambda event: None)
            assert not answer.answered and answer.answer == NO_ANSWER and answer.completion_tokens == 0, question
    finally:
        store.close()
        await service.close()
        await encoder.close()
    recall = found_there / len(QUESTIONS)
    told = f"{cited} of {len(QUESTIONS)} answers cite, {removed} citations of nothing taken out"
    figure("answers of a 135M model from the pages", f"recall {recall:.0%}, {told}, {cached / prompts:.0%} cached")
    assert recall >= 0.85


def _text(hit: Any) -> str:
    return f"{hit.chunk.heading}\n{hit.chunk.text}".lower()
