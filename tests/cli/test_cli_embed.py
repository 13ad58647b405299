"""`cairn embed`, and embeddings of `LLM`: one line of JSON per text, and readable errors."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cairn import LLM, AsyncLLM
from cairn.cli import main
from cairn.types.errors import ContextTooLong, InvalidRequest
from tests.encoders import write_encoder, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("encoder")
    write_encoder(made, "Bert")
    words = {"prompts": {"query": "find this. ", "document": ""}}
    (made / "config_sentence_transformers.json").write_text(json.dumps(words))
    return write_tokenizer(made)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), threads=1) as loaded:
        yield loaded


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str, typed: str = ""
) -> tuple[int, list[dict[str, object]], str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
    with pytest.raises(SystemExit) as left:
        main(["embed", *arguments])
    result = capsys.readouterr()
    return int(left.value.code or 0), [json.loads(line) for line in result.out.splitlines()], result.err


def test_lines_of_stdin_and_texts_become_lines(
    folder: Path, llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, monkeypatch, str(folder), "--threads", "1", typed="one text\n\nünd another\r\nlast")
    assert code == 0 and [one["text"] for one in out] == ["one text", "ünd another", "last"]
    want = llm.embed(["one text", "ünd another", "last"])
    assert np.float32([one["embedding"] for one in out]).tobytes() == want.tobytes()
    code, out, _ = run(capsys, monkeypatch, str(folder), "-t", "last", "-t", "x", "--dimensions", "3")
    assert [len(one["embedding"]) for one in out] == [3, 3]  # type: ignore[arg-type]


def test_impossible_requests_get_a_readable_error(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "a " * 400
    code, out, said = run(capsys, monkeypatch, str(folder), "-t", long)
    assert (code, out) == (1, []) and "402 tokens" in said and "at most 300" in said
    assert run(capsys, monkeypatch, str(folder), "-t", long, "--truncate")[0] == 0
    code, _, said = run(capsys, monkeypatch, str(folder), "-t", "x", "--prompt-name", "other")
    assert code == 2 and "has no prompt of the name 'other'; it has document, query" in said
    code, _, said = run(capsys, monkeypatch, str(folder), "-t", "x", "--dimensions", "0")
    assert code == 2 and "dimensions must be from 1 to 48" in said


def test_one_text_several_and_ids(llm: LLM) -> None:
    one, many = llm.embed("hello there"), llm.embed(["hello there", [2, 5, 3]])
    assert one.shape == (48,) and many.shape == (2, 48) and one.dtype == np.float32
    assert one.tobytes() == many[0].tobytes() == llm.embed("hello there", prompt_name="document").tobytes()
    assert llm.embed("hello", prompt_name="query").tobytes() == llm.embed("find this. hello").tobytes()
    raw = llm.embed("hello", normalize=False)
    np.testing.assert_allclose(llm.embed("hello"), raw / np.linalg.norm(raw), atol=1e-6)
    assert llm.score("hello", ["hello", "other"])[0] == pytest.approx(1, abs=1e-6)


def test_more_texts_than_are_under_way_at_once(llm: LLM) -> None:
    texts = [f"text {chr(97 + number % 26)}" for number in range(600)]
    result = llm.embed(texts)
    assert result.shape == (600, 48) and result[0].tobytes() == result[26].tobytes() == llm.embed(texts[0]).tobytes()


@pytest.mark.parametrize("texts", [3, [3.5], {"a": 1}, b"x", [["x"]]])
def test_invalid_texts(texts: object, llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="texts must be a text"):
        llm.embed(texts)  # type: ignore[arg-type]


def test_refusals(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="texts is empty"):
        llm.embed([])
    with pytest.raises(ContextTooLong, match=r"texts\[1\] has 402 tokens"):
        llm.embed(["x", "a " * 400])
    with pytest.raises(InvalidRequest, match="makes embeddings and answers nothing"):
        llm.generate("x")
    with pytest.raises(InvalidRequest, match="makes embeddings and answers nothing"):
        llm.chat([{"role": "user", "content": "x"}])
    with pytest.raises(InvalidRequest, match="list of texts that are not empty"):
        llm.score("x", ["a", ""])


async def test_the_async_twins(folder: Path) -> None:
    async with AsyncLLM(str(folder), threads=1) as llm:
        assert (await llm.embed(["x", "y"])).shape == (2, 48)
        assert len(await llm.score("x", ["x", "y", "z"])) == 3
