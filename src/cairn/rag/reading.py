"""The text of a document by its structure: sections, each with the headings above it.

Markdown by its headings, outside of blocks of code; HTML by its headings and blocks, without scripts and styles; a
plain text is one section. Nothing of a document is run or fetched.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

from cairn.rag.definition import BINARY, DocumentKind
from cairn.rag.outline import Outline, Section

_HEADING = re.compile(r" {0,3}(#{1,6})[ \t](.*)")
"""What closes a heading is taken off apart: an expression for it as well tries all ways to share out the blanks."""
_FENCE = re.compile(r" {0,3}(```+|~~~+)")
_BLOCKS = frozenset({"p", "div", "section", "article", "main", "header", "footer", "aside", "nav", "ul", "ol", "li"})
_BLOCKS |= {"table", "tr", "td", "th", "pre", "blockquote", "br", "hr", "dl", "dt", "dd"}
_SILENT = frozenset({"script", "style", "template", "noscript", "head"})
_LEVELS = {f"h{level}": level for level in range(1, 7)}


def sections(text: str, kind: DocumentKind) -> list[Section]:
    """The sections of a document that hold text, in order."""
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
        if self._text and self._text[-1] != "\n\n":
            self._text.append("\n\n")

    def end(self) -> None:
        """The text so far is a section."""
        self.outline.add(re.sub(r"\n{3,}", "\n\n", "".join(self._text)))
        self._text = []
