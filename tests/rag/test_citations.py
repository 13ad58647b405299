"""Citations in answers, however the text is streamed: valid ones are reported, others are not."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from cairn.frontend.request_options import SamplingOptions
from cairn.rag.citations import MOST, CitationFilter
from cairn.rag.collections import Collections
from cairn.rag.definition import DocumentChunk, SearchHit
from cairn.text.grammar.grammar import Wanted
from cairn.types.outputs import Delta
from cairn.workflows.answerer import Answered, Asker, Heard


def read(text: str, size: int, *names: str, sources: int = 3, strict: bool = False) -> tuple[str, CitationFilter]:
    checked = CitationFilter(sources, names, strict=strict)
    told = "".join(checked.push(text[at : at + size]) for at in range(0, len(text), size)) + checked.finish()
    return told, checked


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("text", "told", "cited", "removed"),
    [
        ("Yes [1], no [4][2, 9] or [0].", "Yes [1], no [2] or .", {1, 2}, 3),
        ("So [ 2 ] and [1,3].", "So [2] and [1][3].", {1, 2, 3}, 0),
        ("So [1-2], [2\u20139] and [7-8].", "So [1][2], [2][3] and .", {1, 2, 3}, 2),
        ("So [1; 2] and [1 and 3].", "So [1][2] and [1][3].", {1, 2, 3}, 0),
        ("So [Source 1], [sources: 2, 3] and [Document #9].", "So [1], [2][3] and .", {1, 2, 3}, 1),
        ("So [^1] and \u30102\u2020source\u3011 and \u3010x\u3011", "So [1] and [2] and \u3010x\u3011", {1, 2}, 0),
        ("So [12345678901] and [" + "9" * 79 + "].", "So  and .", set(), 2),
        ("So [source] and [citation needed] and [n].", "So  and  and .", set(), 3),
        ("So [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2].", "So [1][2][3].", {1, 2, 3}, 0),
        ("Cut off [1", "Cut off ", set(), 1),
        ("Cut off [", "Cut off ", set(), 1),
        ("On [2024-05-01] at [12:30] it was [1.5] long.", None, set(), 0),
        ("The index `a[7]` and ```\nb[8] = [9]\n``` stay [2].", None, {2}, 0),
        (
            "A tick ` alone ends with its line,\n[7] does not.",
            "A tick ` alone ends with its line,\n does not.",
            set(),
            1,
        ),
        ("A [link](/at) and [[models]] and a[i] and {'a': [\"b\"]}.", None, set(), 0),
        ("Never closed [ and so on\nbut [1] is.", None, {1}, 0),
        ("[" + "long " * 20 + "] [1]", None, {1}, 0),
        ("[12 and [ 2 ]", "[12 and [2]", {2}, 0),
    ],
)
def test_brackets_that_are_not_citations_are_ignored(
    text: str, told: str | None, cited: set[int], removed: int, strict: bool
) -> None:
    if strict and "\u3010x" in text:
        told, removed = "So [1] and [2] and ", 1
    for size in (1, 2, 3, 7, 1000):
        found, checked = read(text, size, strict=strict)
        assert found == (text if told is None else told), size
        assert (checked.cited, checked.removed) == (cited, removed), size
        assert all(found[place.at :].startswith(f"[{place.number}]") for place in checked.places)


def test_names_of_sources_are_no_citations_and_other_words_are_text() -> None:
    text = "So [Agents.md], [agents.md: Forks], [WARNING], [x] and [Your Name]."
    for size in (1, 5, 100):
        assert read(text, size, "agents.md")[0] == "So , , [WARNING], [x] and [Your Name]."
        told, checked = read(text, size, strict=True)
        assert told == "So , , ,  and ." and checked.removed == 5
    assert read("It is [agents.md](/agents) and [agents.md]", 3, "agents.md")[0] == "It is [agents.md](/agents) and "


class Says:
    """An answerer with a given text, in pieces of three characters."""

    def __init__(self, said: str) -> None:
        self.said = said

    async def answer(
        self, asker: Asker, messages: Sequence[dict[str, Any]], options: SamplingOptions, wanted: Wanted, heard: Heard
    ) -> Answered:
        for at in range(0, len(self.said), 3):
            heard(Delta(text=self.said[at : at + 3]))
        return Answered(text=self.said)


@pytest.mark.parametrize(
    ("said", "told", "answered"),
    [
        ("Of stones [1].", "Of stones [1].", True),
        ("Of stones.", "Of stones.", False),
        ("Of stones [7] and [source] and [heaps.md].", "Of stones  and  and .", False),
        ("Of stones [2], [heaps.md: Cairns].", "Of stones [2], .", True),
        ("", "", False),
    ],
)
async def test_an_answer_without_a_citation_is_not_answered(said: str, told: str, answered: bool) -> None:
    """Such an answer may come from the model's own knowledge, and the caller asked for one from the documents."""
    collections = Collections(None, Says(said))  # type: ignore[arg-type]
    results = [SearchHit(chunk=chunk(key), score=0.5, rank=0.1) for key in (1, 2)]
    events: list[dict[str, Any]] = []
    answer = await collections.ask(Asker("me"), "What is a cairn?", results, SamplingOptions(), events.append)
    assert (answer.answer, answer.answered) == (told, answered)
    assert "".join(event["content"] for event in events if event["type"] == "answer.delta") == told
    assert events[-1]["type"] == "answer.done" and events[-1]["answered"] is answered


def chunk(key: int) -> DocumentChunk:
    return DocumentChunk(
        key=key, document="d", name="heaps.md", number=key, heading="Cairns", text="Of stones.", metadata={}
    )


def test_a_text_is_read_the_same_however_it_comes() -> None:
    rng = random.Random(7)
    pieces = [
        "[",
        "]",
        "[1]",
        "[2, 9]",
        "`",
        "``",
        "```",
        "\n",
        "(",
        "word ",
        "source",
        " 3",
        "-",
        "\u3010",
        "\u3011",
        "[[a]]",
    ]
    for _ in range(400):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 40)))
        for strict in (False, True):
            whole, checked = read(text, len(text), strict=strict)
            for size in (1, 2, 5):
                told, other = read(text, size, strict=strict)
                assert (told, other.places, other.removed) == (whole, checked.places, checked.removed), (text, size)


def test_reading_takes_linear_time() -> None:
    began = time.process_time()
    for text in ("[" * 20_000, "[1 " * 10_000, "`" * 20_000, "[n n n n ", "[" + "source " * 11, "[1-" * 10_000):
        read(text * (1 if len(text) > 1000 else 500), 1, strict=True)
    assert time.process_time() - began < 5.0
    checked = CitationFilter(1)
    assert checked.push("[" + "1" * MOST) == "" and checked.push("1") == "[" + "1" * (MOST + 1)


def test_blanks_before_a_bracket_take_one_pass() -> None:
    checked = CitationFilter(2)
    began = time.process_time()
    said = checked.push("a" + " " * 400_000) + checked.push(" [" * 100_000) + checked.push("1]") + checked.finish()
    assert time.process_time() - began < 2.0  # it took minutes
    assert said == "a" + " " * 400_000 + " [" * 99_999 + " [1]"
