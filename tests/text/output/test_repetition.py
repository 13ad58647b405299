"""Answers that repeat themselves: where they are ended, and which repetitions are legitimate."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cairn import LLM
from cairn.text.output.repetition import MAX_PERIOD, MIN_REPEATED, MIN_REPEATS, RepetitionWatch
from cairn.types.errors import InvalidRequest
from tests.scripted_model import write_scripted


def looped_at(tokens: list[int]) -> int | None:
    """Return after how many tokens a loop is detected."""
    watch = RepetitionWatch()
    for count, token in enumerate(tokens, 1):
        watch.push(token)
        if watch.looped:
            return count
    return None


@pytest.mark.parametrize("period", [1, 2, 7, 31, 32, 33, MAX_PERIOD])
def test_a_loop_is_found_once_it_is_long_enough(period: int) -> None:
    lead, piece = [1000, 1001, 1002], list(range(period))
    wanted = max(MIN_REPEATED, MIN_REPEATS * period)
    assert looped_at(lead + piece * (2 * wanted // period + 1)) == len(lead) + wanted


def test_texts_without_a_loop() -> None:
    assert looped_at(list(range(MAX_PERIOD + 1)) * 40) is None, "the piece is longer than the longest that is detected"
    assert looped_at([1, 2, 3] * (MIN_REPEATED // 3)) is None, "a little too short"
    rows = [token for number in range(200) for token in (1, 2, 3, 4, 100 + number)]
    assert looped_at(rows) is None, "a table, whose rows differ"
    rng = random.Random(1)
    assert looped_at([rng.randrange(50) for _ in range(5000)]) is None


def test_a_loop_is_the_same_as_the_plain_definition() -> None:
    def plain(tokens: list[int]) -> bool:
        for period in range(1, MAX_PERIOD + 1):
            size = max(MIN_REPEATED, MIN_REPEATS * period)
            tail = tokens[-size:]
            if len(tail) == size and tail[period:] == tail[:-period]:
                return True
        return False

    rng = random.Random(2)
    for _ in range(30):
        piece = [rng.randrange(3) for _ in range(rng.randint(1, 70))]
        tokens = [rng.randrange(3) for _ in range(rng.randint(0, 300))] + piece * rng.randint(1, 14)
        result = looped_at(tokens)
        assert result == next((n for n in range(1, len(tokens) + 1) if plain(tokens[:n])), None)


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never ends and repeats the same 5 tokens."""
    return write_scripted(tmp_path_factory.mktemp("loops") / "loops.gguf", [" a", " b", " c", " d", "."], end=None)


def test_an_answer_that_loops_ends(loops: Path) -> None:
    asked = [{"role": "user", "content": "x"}]
    with LLM(str(loops), kv_gb=0.1, threads=1) as llm:
        ended = llm.chat(asked, repetition_stop=True, max_tokens=600, temperature=0)
        assert (ended.finish_reason, ended.detail) == ("length", "repetition")
        assert MIN_REPEATED <= len(ended.tokens) <= MIN_REPEATED + 10 and ended.text.startswith(" a b c d.")
        stream = llm.chat(asked, repetition_stop=True, max_tokens=600, temperature=0, stream=True)
        assert "".join(piece.text for piece in stream) == ended.text and stream.answer.detail == "repetition"
        whole = llm.chat(asked, max_tokens=600, temperature=0)
        assert (whole.finish_reason, whole.detail, len(whole.tokens)) == ("length", "", 600)
        assert whole.tokens[: len(ended.tokens)] == ended.tokens
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "minLength": 500}}}
        held = llm.chat(asked, repetition_stop=True, max_tokens=400, temperature=0, response_format=form)
        assert held.detail == "" and len(held.tokens) == 400, "an answer with a grammar goes on"
        with pytest.raises(InvalidRequest, match="repetition_stop must be true or false"):
            llm.chat(asked, repetition_stop=1)
