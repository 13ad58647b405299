"""`cairn collection` against a real server on the fake engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.process import Served, served
from tests.cli.test_cli_agents import rows, run
from tests.rag.document_files import docx, paragraph, pdf
from tests.service.tiny import make_embedder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(models=["demo", str(make_embedder(tmp_path_factory.mktemp("models") / "embedder"))]) as process:
        until = time.monotonic() + 30
        while run(process, "collection", "create", "first")[0] and time.monotonic() < until:
            time.sleep(0.1)  # the models' files are still being read
        yield process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "docs" / "cairns.md").write_text("# Cairns\n\nA cairn is a heap of stones.\n")
    (tmp_path / "docs" / "deep" / "river.docx").write_bytes(docx(paragraph("A river flows.")))
    (tmp_path / "docs" / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "docs" / ".hidden.md").write_text("no")
    return tmp_path / "docs"


def test_documents_are_added_searched_asked_and_deleted(server: Served, folder: Path) -> None:
    code, _, err = run(server, "collection", "create", "mine", "--chunk", "400")
    assert code == 0, err
    added = rows(server, "collection", "add", "mine", str(folder), "--metadata", "kind=test")
    assert [(Path(name).name, chunks) for _, name, chunks in added] == [("cairns.md", "1"), ("river.docx", "1")]
    listed = rows(server, "collection", "list")
    assert [row[:3] for row in listed if row[0] == "mine"] == [["mine", "2", "2"]]
    shown = rows(server, "collection", "show", "mine")
    assert [row[1:3] for row in shown] == [["cairns.md", "md"], ["river.docx", "docx"]]
    result = rows(server, "collection", "search", "mine", "What is a cairn?", "-k", "1", "--no-rerank")
    assert len(result) == 1 and len(result[0]) == 3
    code, out, _ = run(server, "collection", "ask", "mine", "Zebra?", "--min-score", "1")
    assert (code, out) == (0, "There is no answer in the documents.\n")
    code, out, err = run(server, "collection", "ask", "mine", "Zebra?", "--min-score", "-1")
    assert code == 0 and out.strip() and out.count(out.strip()) == 1
    assert "No source is cited" in err or "[1] " in err
    assert run(server, "collection", "rm", "mine", shown[0][0])[0] == 0
    assert [row[1] for row in rows(server, "collection", "show", "mine")] == ["river.docx"]
    assert run(server, "collection", "rm", "mine")[0] == 0
    assert run(server, "collection", "show", "mine")[0] == 1


def test_refused_files_are_reported_and_the_rest_is_added(server: Served, tmp_path: Path) -> None:
    assert run(server, "collection", "create", "some")[0] == 0
    good, bad = tmp_path / "good.pdf", tmp_path / "bad.pdf"
    good.write_bytes(pdf(["Bread"]))
    bad.write_bytes(b"no pdf")
    code, out, err = run(server, "collection", "add", "some", str(bad), str(good), str(tmp_path / "none.txt"))
    assert code == 1 and str(good) in out
    assert f"{bad}: file: the PDF cannot be read" in err and "none.txt: the file cannot be read" in err
    assert "2 of 3 documents were not added" in err
    for arguments, said in (
        (("add", "nowhere", str(good)), "no collection nowhere"),
        (("add", "some", str(good), "--metadata", "x"), "should look like NAME=TEXT"),
        (("search", "a b", "x"), "is not a collection's id"),
        (("search", "some", "x", "--rerank"), "no model for reranking"),
    ):
        code, _, err = run(server, "collection", *arguments)
        assert code != 0 and said in err, err
