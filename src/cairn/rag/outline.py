"""Sections of a document, each with the headings above it."""

from __future__ import annotations

from typing import NamedTuple


class Unreadable(Exception):
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
        self._open = [one for one in self._open if one[0] < level]
        if title:
            self._open.append((level, title))

    def add(self, text: str) -> None:
        """The text below the headings that are open."""
        if text.strip():
            self.sections.append(Section(" > ".join(title for _, title in self._open), text.strip()))
