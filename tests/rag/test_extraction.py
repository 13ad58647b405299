"""Text of PDFs and DOCX, extracted in a process of its own, and broken or malicious files."""

from __future__ import annotations

import errno
import io
import os
import time
import zipfile
import zlib
from pathlib import Path

import pytest

from cairn.rag import extract_parent, extract_process
from cairn.rag.chunking import Section
from cairn.rag.definition import DocumentKind
from cairn.rag.extract_parent import Extractor
from cairn.types.errors import InvalidRequest, Unavailable
from tests.rag.document_files import STYLES, docx, paragraph, pdf


def read(kind: DocumentKind, data: bytes) -> list[Section]:
    """Extract a document's text in this process."""
    result = extract_process.extract(kind, io.BytesIO(data))
    if result.error:
        raise ValueError(result.error)
    return result.sections


async def read_apart(kind: DocumentKind, data: bytes, folder: Path) -> list[Section]:
    (folder / "file").write_bytes(data)
    with open(folder / "file", "rb") as file:
        return await Extractor().read("me", kind, file, "file")


TABLE = (
    f"<w:tbl><w:tr><w:tc>{paragraph('stone')}</w:tc><w:tc>{paragraph('two')}{paragraph('parts')}</w:tc></w:tr></w:tbl>"
)
BODY = (
    paragraph("Before.")
    + paragraph("Cairns", "berschrift1")
    + paragraph("A heap of stones.")
    + TABLE
    + paragraph("Paths", "Own")
    + "<w:p><w:r><w:t>They</w:t><w:tab/><w:t>mark</w:t><w:br/><w:t>paths</w:t></w:r></w:p>"
    + f'<x:AlternateContent xmlns:x="{extract_process._FALLBACK.split()[0]}"><x:Choice>{paragraph("once")}</x:Choice>'
    + f"<x:Fallback>{paragraph('twice')}</x:Fallback></x:AlternateContent>"
)


async def test_what_pdf_and_docx_say(tmp_path: Path) -> None:
    assert await read_apart("pdf", pdf(["A heap of stones", "", "Bread"]), tmp_path) == [
        Section("page 1", "A heap of stones"),
        Section("page 3", "Bread"),
    ]
    assert read("pdf", pdf([])) == []
    assert await read_apart("docx", docx(BODY), tmp_path) == [
        Section("", "Before."),
        Section("Cairns", "A heap of stones.\n\nstone | two parts"),
        Section("Cairns > Paths", "They\tmark\npaths\n\nonce"),
    ]
    assert await read_apart("txt", b"\xef\xbb\xbfa text", tmp_path) == [Section("", "a text")]


BOMB = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]>'
WRONG: tuple[tuple[DocumentKind, bytes, str], ...] = (
    ("pdf", b"no pdf at all", "the PDF cannot be read"),
    ("pdf", pdf([""]), "pictures of text"),
    ("docx", b"PK\x03\x04 broken", "the DOCX cannot be read"),
    ("docx", docx(BODY, head=BOMB), "document type"),
    ("docx", docx("<w:p>"), "no valid XML"),
    ("docx", docx("<w:p>" * 600 + "</w:p>" * 600), "nests deeper than 500"),
    ("txt", b"\xff\xfe", "not UTF-8 text"),
)


@pytest.mark.parametrize(("kind", "data", "said"), WRONG, ids=[said for _, _, said in WRONG])
def test_what_cannot_be_read_is_reported(kind: DocumentKind, data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(kind, data)


def test_pages_of_a_pdf_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract_process, "MAX_PAGES", 2)
    assert len(read("pdf", pdf(["a", "b"]))) == 2
    with pytest.raises(ValueError, match="3 pages; the limit is 2"):
        read("pdf", pdf(["a", "b", "c"]))


def test_a_zip_is_not_unpacked_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract_process, "MAX_UNPACKED", 1 << 20)
    bomb = docx(paragraph("a" * (2 << 20)))
    assert len(bomb) < 10_000
    with pytest.raises(ValueError, match="more than 1048576 bytes unpacked"):
        read("docx", bomb)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as parts:
        for number in range(10_001):
            parts.writestr(str(number), b"")
    with pytest.raises(ValueError, match="10001 parts; the limit is 10000"):
        read("docx", file.getvalue())
    assert read("docx", docx(paragraph("x"), styles=STYLES.replace("heading 1", "title"))) == [Section("", "x")]


async def test_a_costly_file_ends_its_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = zlib.compress(b" " * (120 << 20), 1)
    bomb = pdf(["x"]).replace(b"<</Length", b"<</Filter/FlateDecode/Length")
    at = bomb.index(b"stream\n") + 7
    bomb = bomb[:at] + packed + bomb[bomb.index(b"\nendstream") :]
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match="file: "):
        await read_apart("pdf", bomb, tmp_path)
    assert time.monotonic() - began < 60
    monkeypatch.setattr(extract_parent, "STALLED", 0.3)
    pipe, other = os.pipe()  # a file that never ends
    with os.fdopen(pipe, "rb") as file, pytest.raises(Exception, match="was not read in"):
        await Extractor().read("me", "txt", file, "file")
    os.close(other)


async def test_time_is_bounded_by_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop.py").write_text(
        "import resource, os\nresource.setrlimit(resource.RLIMIT_CPU, (1, 2))\nwhile True: pass\n"
    )
    real = extract_parent.asyncio.create_subprocess_exec  # type: ignore[attr-defined]

    async def loops(*command: str, **more: object) -> object:
        return await real(command[0], str(tmp_path / "loop.py"), **more)

    monkeypatch.setattr(extract_parent.asyncio, "create_subprocess_exec", loops)  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequest, match="takes more than 120 s"):
        await read_apart("pdf", b"x", tmp_path)


@pytest.mark.parametrize("why", [BlockingIOError(errno.EAGAIN, "no process"), RuntimeError("can't start new thread")])
async def test_a_process_that_is_refused_for_a_moment_is_asked_for_again(
    why: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = extract_parent.asyncio.create_subprocess_exec, list[int]()  # type: ignore[attr-defined]

    async def refuses(*command: str, **more: object) -> object:
        refused.append(1)
        if len(refused) <= times:
            raise why
        return await real(*command, **more)

    monkeypatch.setattr(extract_parent.asyncio, "create_subprocess_exec", refuses)  # type: ignore[attr-defined]
    monkeypatch.setattr(extract_parent, "PAUSES", (0.01, 0.01))
    times = 2
    assert await read_apart("txt", b"A fact.", tmp_path) == [Section("", "A fact.")]
    times = 9
    with pytest.raises(Unavailable, match="cannot be read now") as caught:
        await read_apart("txt", b"A fact.", tmp_path)
    assert caught.value.retry_after == 5.0 and len(refused) == 3 + 3


def test_a_disk_that_refuses_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    file = Full()
    monkeypatch.setattr(extract_parent.tempfile, "TemporaryFile", lambda: file)  # type: ignore[attr-defined]
    with pytest.raises(Unavailable, match="cannot be kept: No space left"):
        extract_parent.aside(b"x")
    assert file.closed
