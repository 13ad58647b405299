"""Sections -> chunks: cut where the text itself has a break, each with the end of the one before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cairn.rag.outline import Section

_BREAKS = ("\n\n", "\n", ". ", "? ", "! ", "; ", ", ", " ")
"""Where a text is best cut, the best first."""


class Piece(NamedTuple):
    """A chunk before it is stored."""

    heading: str
    text: str


def chunks(found: Sequence[Section], most: int, overlap: int) -> Iterator[Piece]:
    """Pieces of at most `most` characters; what follows another of its section repeats up to `overlap` of its end."""
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
    """Where a piece ends: behind the best break of its second half, else at its limit."""
    middle = start + (end - start) // 2
    for mark in _BREAKS:
        at = text.rfind(mark, middle, end)
        if at >= 0:
            return at + len(mark)
    return end


def _begin(text: str, start: int, end: int) -> int:
    """Where the next piece begins: at the first word from `start` on."""
    at = text.find(" ", start, end)
    return end if at < 0 else at + 1
