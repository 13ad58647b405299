"""Sections of a document, each with the headings above it."""

from __future__ import annotations

from typing import NamedTuple

from cairn.rag.definition import MAX_CHUNKS

MAX_TITLE = 200
"""Characters of a title that are kept: every section below it, and every chunk of those, says it again."""
DEEPEST = 9
"""The level of headings below which all are of one level."""


class UnreadableDocument(Exception):
    """A document cannot be read; the text says why, for its sender."""


class Section(NamedTuple):
    """A part of a document."""

    heading: str
    text: str


class Outline:
    """Headings that are open, and the sections so far."""

    def __init__(self) -> None:
        self.sections: list[Section] = []
        self._open: list[tuple[int, str]] = []

    def head(self, level: int, title: str) -> None:
        """A heading: those of its level and below end."""
        level = min(level, DEEPEST)
        self._open = [one for one in self._open if one[0] < level]
        if title := title[:MAX_TITLE].rstrip():
            self._open.append((level, title))

    def add(self, text: str) -> None:
        """The text below the headings that are open. Unreadable where there are too many of them."""
        if text.strip():
            if len(self.sections) == MAX_CHUNKS:  # each is a chunk at least
                raise UnreadableDocument(f"the document has more than {MAX_CHUNKS} sections with text, the limit")
            self.sections.append(Section(" > ".join(title for _, title in self._open), text.strip()))
