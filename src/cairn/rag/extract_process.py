"""Helper process that reads one document from standard input; run as `python -m cairn.rag.extract_process KIND`.

It writes one frame to standard output (`Extracted`, as msgpack) and ends. A hostile file - an endless loop, a bomb, a
parser's fault - costs this process alone: the system limits its memory and processor time, the parent
(`extract_parent.py`) kills it after a deadline, and it cannot write files.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import zipfile
from collections.abc import Callable, Mapping
from typing import BinaryIO, cast
from xml.parsers.expat import ExpatError, ParserCreate

import msgspec

from cairn.rag.chunking import Outline, Section, UnreadableDocument, sections
from cairn.rag.definition import MAX_BYTES, MAX_PAGES, MAX_UNPACKED, DocumentKind
from cairn.system.helper_limits import restrict

_W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main "
_STRICT = "http://purl.oclc.org/ooxml/wordprocessingml/main "
_FALLBACK = "http://schemas.openxmlformats.org/markup-compatibility/2006 Fallback"
_HEADING = re.compile(r"heading ([1-9])")
_MOST_PARTS = 10_000
_PIECE = 1 << 16
_DEEPEST = 500

Attributes = Mapping[str, str]


def paragraphs(file: BinaryIO) -> list[Section]:
    """Return the sections of a DOCX. Raise UnreadableDocument that says what is wrong with the file."""
    try:
        with zipfile.ZipFile(file) as parts:
            names = parts.namelist()
            if len(names) > _MOST_PARTS:
                raise UnreadableDocument(f"the DOCX has {len(names)} parts; the limit is {_MOST_PARTS}")
            if "word/document.xml" not in names:
                raise UnreadableDocument("this is no DOCX: it has no part word/document.xml")
            levels = _Levels()
            if "word/styles.xml" in names:
                _parse(parts, "word/styles.xml", levels)
            body = _Body(levels.found)
            _parse(parts, "word/document.xml", body)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise UnreadableDocument(f"the DOCX cannot be read: {' '.join(str(error).split())[:200]}") from None
    return body.end()


class _Handler:
    """Receiver of WordprocessingML elements, by their names without namespace."""

    def start(self, name: str, attributes: Attributes) -> None:
        """Handle the beginning of an element."""

    def text(self, data: str) -> None:
        """Handle characters inside an element."""

    def stop(self, name: str) -> None:
        """Handle the end of an element."""


def _parse(parts: zipfile.ZipFile, name: str, handler: _Handler) -> None:
    parser = ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    depth = 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > _DEEPEST:
            raise UnreadableDocument(f"{name} of the DOCX nests deeper than {_DEEPEST} elements, the limit")
        handler.start(_plain(tag), {_plain(key): value for key, value in attributes.items()})

    def stop(tag: str) -> None:
        nonlocal depth
        depth -= 1
        handler.stop(_plain(tag))

    parser.StartElementHandler, parser.EndElementHandler = start, stop
    parser.CharacterDataHandler = handler.text
    parser.StartDoctypeDeclHandler = _refuse_type
    size = 0
    with parts.open(name) as part:
        while data := part.read(_PIECE):
            size += len(data)
            if size > MAX_UNPACKED:
                raise UnreadableDocument(f"{name} of the DOCX has more than {MAX_UNPACKED} bytes unpacked, the limit")
            _feed(parser.Parse, data, False, name)
        _feed(parser.Parse, b"", True, name)


def _feed(parse: Callable[[bytes, bool], object], data: bytes, last: bool, name: str) -> None:
    try:
        parse(data, last)
    except ExpatError as error:
        raise UnreadableDocument(f"{name} of the DOCX is no valid XML: {error}") from None


def _refuse_type(*_: object) -> None:
    raise UnreadableDocument("the DOCX has a document type, which none needs")


def _plain(name: str) -> str:
    """Return a WordprocessingML name without its namespace; other names keep theirs."""
    return name.removeprefix(_W).removeprefix(_STRICT)


class _Levels(_Handler):
    """Reads the heading level of each style id. Ids are in the author's language, so they say nothing themselves."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self._style = ""

    def start(self, name: str, attributes: Attributes) -> None:
        """Note a style's id, then its name or outline level."""
        if name == "style":
            self._style = attributes.get("styleId", "")
        elif name == "name" and self._style:
            called = attributes.get("val", "").lower()
            if (heading := _HEADING.fullmatch(called)) is not None:
                self.found[self._style] = int(heading[1])
            elif called == "title":
                self.found[self._style] = 0
        elif name == "outlineLvl" and self._style and attributes.get("val", "").isdigit():
            self.found.setdefault(self._style, 1 + int(attributes["val"]))


class _Paragraph:
    """A paragraph being read."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.level: int | None = None
        """Its level if it is a heading."""


class _Body(_Handler):
    """Reads paragraphs, table rows and headings into an outline."""

    def __init__(self, levels: Mapping[str, int]) -> None:
        self._levels = levels
        self._outline = Outline()
        self._blocks: list[str] = []
        self._open: list[_Paragraph] = []
        """Open paragraphs, the innermost last: a text box nests others."""
        self._cells: list[list[str]] = []
        """Cells of the open rows, the innermost last."""
        self._reading = False
        self._twice = 0
        """Depth inside an `mc:Fallback`, which repeats content for older readers."""

    def start(self, name: str, attributes: Attributes) -> None:
        """Open a paragraph, row or cell, or note a paragraph's style."""
        if name == _FALLBACK or self._twice:
            self._twice += 1
            return
        match name:
            case "p":
                self._open.append(_Paragraph())
            case "pStyle" if self._open:
                self._open[-1].level = self._levels.get(attributes.get("val", ""))
            case "t":
                self._reading = bool(self._open)
            case "tab" | "br" | "cr" if self._open:
                self._open[-1].words.append("\t" if name == "tab" else "\n")
            case "tr":
                self._cells.append([])
            case "tc" if self._cells:
                self._cells[-1].append("")

    def text(self, data: str) -> None:
        """Add characters of a run to the open paragraph."""
        if self._reading:
            self._open[-1].words.append(data)

    def stop(self, name: str) -> None:
        """Close a run, paragraph or row."""
        if self._twice:
            self._twice -= 1
        elif name == "t":
            self._reading = False
        elif name == "p" and self._open:
            self._paragraph(self._open.pop())
        elif name == "tr" and self._cells:
            row = " | ".join(self._cells.pop())
            if row.strip(" |"):
                self._say(row)

    def _paragraph(self, paragraph: _Paragraph) -> None:
        text = "".join(paragraph.words).strip()
        if not text:
            return
        if paragraph.level is not None and not self._cells:
            self._flush()
            self._outline.head(paragraph.level, text)
        else:
            self._say(text)

    def _say(self, text: str) -> None:
        """Add text to the open cell, else as a block of its own."""
        if self._cells and self._cells[-1]:
            before = self._cells[-1][-1]
            self._cells[-1][-1] = f"{before} {text}" if before else text
        else:
            self._blocks.append(text)

    def _flush(self) -> None:
        self._outline.add("\n\n".join(self._blocks))
        self._blocks = []

    def end(self) -> list[Section]:
        """Return all sections read."""
        self._flush()
        return self._outline.sections


def pages(file: BinaryIO) -> list[Section]:
    """Return a section for each PDF page that holds text. Raise UnreadableDocument that says what is wrong."""
    from pypdf import PasswordType, PdfReader
    from pypdf.errors import PyPdfError

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it logs each small fault, and most files have some
    try:
        reader = PdfReader(file)
        if reader.is_encrypted and reader.decrypt("") is PasswordType.NOT_DECRYPTED:
            raise UnreadableDocument("the PDF is encrypted with a password; give it without one")
        count = len(reader.pages)
        if count > MAX_PAGES:
            raise UnreadableDocument(f"the PDF has {count} pages; the limit is {MAX_PAGES}")
        found = [
            Section(f"page {number}", text)
            for number, page in enumerate(reader.pages, 1)
            if (text := page.extract_text().strip())
        ]
    except (PyPdfError, ImportError) as error:  # ImportError: ciphers of newer files need another package
        raise UnreadableDocument(f"the PDF cannot be read: {_line(error)}") from None
    if count and not found:
        raise UnreadableDocument(
            "no page of the PDF holds text: pictures of text, as a scanner makes them, are not read"
        )
    return found


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


MEMORY = 1 << 30
"""Address space limit for reading one document, in bytes."""
SECONDS = 120
"""Processor time limit for reading one document, in seconds."""


class Extracted(msgspec.Struct, frozen=True):
    """The helper's result: the sections, or an error for the client."""

    sections: list[Section] = []
    error: str = ""


def extract(kind: DocumentKind, file: BinaryIO) -> Extracted:
    """Return a document's sections, or the reason why it cannot be read."""
    try:
        found = _sections(kind, file)
    except UnreadableDocument as error:
        return Extracted(error=str(error))
    except MemoryError:
        return Extracted(error=f"reading the document takes more than {MEMORY >> 20} MiB of memory, the limit")
    except RecursionError:
        return Extracted(error="the document nests too deeply")
    except Exception as error:  # a parser that fails on a broken file: the client's error
        return Extracted(error=f"the document is broken: {' '.join(str(error).split())[:200] or type(error).__name__}")
    size = sum(len(one.heading) + len(one.text) for one in found)
    if size > MAX_BYTES:
        return Extracted(error=f"the document's text has {size} characters; the limit is {MAX_BYTES}")
    return Extracted(found)


def _sections(kind: DocumentKind, file: BinaryIO) -> list[Section]:
    if kind == "pdf":
        return pages(file)
    if kind == "docx":
        return paragraphs(file)
    try:
        text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableDocument(f"the document is not UTF-8 text: byte {error.start} is invalid") from None
    return sections(text, kind)


def main() -> None:
    """Read a document from standard input and write the result to standard output."""
    sys.set_int_max_str_digits(1000)
    restrict(memory=MEMORY, seconds=SECONDS)
    found = extract(cast(DocumentKind, sys.argv[1]), sys.stdin.buffer)
    data = memoryview(msgspec.msgpack.encode(found))
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
