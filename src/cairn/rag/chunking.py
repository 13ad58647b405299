"""Splits a document's text into sections, each with the headings above it, and sections into overlapping chunks.

Markdown is split at headings outside code blocks, HTML at headings and block elements with scripts and styles left
out. A plain text is one section. Nothing in a document is run or fetched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from typing import NamedTuple

from cairn.rag.definition import BINARY, MAX_CHUNKS, DocumentKind

MAX_TITLE = 200
"""Characters kept of a title: every section and chunk below it repeats it."""
DEEPEST = 9
"""The deepest heading level that counts; deeper ones count as this level."""


class UnreadableDocument(Exception):
    """A document cannot be read; the message says why and is sent to the client."""


class Section(NamedTuple):
    """A part of a document with the titles above it, joined by ` > `."""

    heading: str
    text: str


class Outline:
    """Collects sections below the headings that are open."""

    def __init__(self) -> None:
        self.sections: list[Section] = []
        self._open: list[tuple[int, str]] = []

    def head(self, level: int, title: str) -> None:
        """Open a heading; headings of its level and deeper are closed."""
        level = min(level, DEEPEST)
        self._open = [one for one in self._open if one[0] < level]
        if title := title[:MAX_TITLE].rstrip():
            self._open.append((level, title))

    def add(self, text: str) -> None:
        """Add a section below the open headings. Raise UnreadableDocument above MAX_CHUNKS sections."""
        if text.strip():
            if len(self.sections) == MAX_CHUNKS:  # each is a chunk at least
                raise UnreadableDocument(f"the document has more than {MAX_CHUNKS} sections with text, the limit")
            self.sections.append(Section(" > ".join(title for _, title in self._open), text.strip()))


_HEADING = re.compile(r" {0,3}(#{1,6})[ \t](.*)")
# The closing #s are stripped separately: matching them here too would backtrack over every split of the blanks.
_FENCE = re.compile(r" {0,3}(```+|~~~+)")
_BLOCKS = frozenset({"p", "div", "section", "article", "main", "header", "footer", "aside", "nav", "ul", "ol", "li"})
_BLOCKS |= {"table", "tr", "td", "th", "pre", "blockquote", "br", "hr", "dl", "dt", "dd"}
_SILENT = frozenset({"script", "style", "template", "noscript", "head"})
_LEVELS = {f"h{level}": level for level in range(1, 7)}


def sections(text: str, kind: DocumentKind) -> list[Section]:
    """Return the sections that hold text, in order."""
    assert kind not in BINARY
    if kind == "md":
        return _markdown(text)
    if kind == "html":
        reader = _HtmlReader()
        reader.feed(text)
        reader.close()
        reader.end()
        return reader.outline.sections
    return [Section("", text.strip())] if text.strip() else []


def _markdown(text: str) -> list[Section]:
    outline, lines, fence = Outline(), list[str](), ""
    for line in text.splitlines():
        mark = _FENCE.match(line)
        if mark is not None and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
        heading = None if fence or mark else _HEADING.match(line)
        if heading is None:
            lines.append(line)
            continue
        outline.add("\n".join(lines))
        lines = []
        outline.head(len(heading[1]), heading[2].strip(" \t").rstrip("#").rstrip(" \t"))
    outline.add("\n".join(lines))
    return outline.sections


class _HtmlReader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.outline = Outline()
        self._silent = self._verbatim = 0
        self._level = 0
        self._title: list[str] = []
        self._text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "body":  # a head may end without saying so
            self._silent = 0
        elif tag in _SILENT:
            self._silent += 1
        elif tag in _LEVELS:
            self.end()
            self._level, self._title = _LEVELS[tag], []
        elif tag in _BLOCKS:
            self._break()
            self._verbatim += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if tag in _SILENT:
            self._silent = max(0, self._silent - 1)
        elif tag in _LEVELS and self._level:
            self.outline.head(self._level, " ".join("".join(self._title).split()))
            self._level = 0
        elif tag in _BLOCKS:
            self._break()
            self._verbatim = max(0, self._verbatim - (tag == "pre"))

    def handle_data(self, data: str) -> None:
        if self._silent:
            return
        if self._level:
            self._title.append(data)
        else:
            self._text.append(data if self._verbatim else re.sub(r"\s+", " ", data))

    def _break(self) -> None:
        pieces = self._title if self._level else self._text
        if pieces and pieces[-1] != "\n\n":
            pieces.append("\n\n")

    def end(self) -> None:
        """Close the section read so far."""
        if self._level:  # a heading without its end holds what follows it
            self._text, self._level = self._title, 0
        self.outline.add(re.sub(r"\n{3,}", "\n\n", "".join(self._text)))
        self._text = []


_BREAKS = ("\n\n", "\n", ". ", "? ", "! ", "; ", ", ", " ")
"""Marks after which a text is cut, the best first."""


class Piece(NamedTuple):
    """A chunk before it is stored."""

    heading: str
    text: str


def chunks(found: Sequence[Section], most: int, overlap: int) -> Iterator[Piece]:
    """Yield pieces of at most `most` characters.

    Each piece after the first of its section repeats up to `overlap` characters of the one before.
    """
    for section in found:
        start = 0
        text = section.text
        while start < len(text):
            end = len(text) if len(text) - start <= most else _cut(text, start, start + most)
            if piece := text[start:end].strip():
                yield Piece(section.heading, piece)
            if end == len(text):
                break
            start = max(_begin(text, end - overlap, end), start + 1)


def _cut(text: str, start: int, end: int) -> int:
    """Return where to end a piece: after the best break in its second half, else at `end`."""
    middle = start + (end - start) // 2
    for mark in _BREAKS:
        at = text.rfind(mark, middle, end)
        if at >= 0:
            return at + len(mark)
    return end


def _begin(text: str, start: int, end: int) -> int:
    """Return where the next piece begins: at the first word after `start`."""
    at = text.find(" ", start, end)
    return end if at < 0 else at + 1
