"""Checks citations in an answer as it streams: `[2]` names the second source; brackets that name none are removed.

Other spellings (`[Source 3]`, `[1-2]`) are rewritten to `[n]`. Code, links and other brackets of the text stay.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

MOST = 80
"""Longest text between brackets that may be a citation, in characters; so much is held back while it arrives."""
FENCE = 3
"""Backticks that open a fenced code block; fewer open inline code, which ends with its line."""
_MARKS = re.compile(r"`+|\n|[\[\u3010]")
_END = re.compile(r"[\[\]\u3010\u3011\n]")
_RANGE = r"\d+(?:\s*[-\u2013]\s*\d+)?"
_CALLED = (
    r"(?:sources?|src|documents?|docs?|references?|refs?|citations?|chunks?|passages?|needed|number|nr|no|n)"
    r"(?![^\W\d_])"
)
_ITEM = rf"(?:(?:{_CALLED}[.:]?|[#^])\s*)*{_RANGE}"
_CITING = re.compile(
    rf"{_ITEM}(?:(?:\s*[,;&+]\s*|\s+(?:and|or|to)\s+|\s+){_ITEM})*(?:\u2020.*)?|{_CALLED}(?:\s+{_CALLED})*",
    re.IGNORECASE,
)
"""Content of a citing bracket: numbers, with or without words such as "source", or such words alone."""
_WORDS = re.compile(r"(?=.*[^\W\d_])[\w\s.,:;#&/'()>\u2013-]+")
"""Plain words, such as a name."""
_NUMBER = re.compile(r"(\d+)(?:\s*[-\u2013]\s*(\d+))?")
_CUT_OFF = re.compile(r"[\s\d,;-]*")
_TEXT_BEFORE = re.compile(r"[\w)\]\[\"'\\!]")
"""Characters before a bracket that belongs to the text: an index, a TOML table, an image."""


class Cited(NamedTuple):
    """A citation in the filtered answer."""

    at: int
    """Its offset in characters."""
    number: int
    """The source's number, from 1."""


class CitationFilter:
    """Removes brackets that name no source from a streamed answer."""

    def __init__(self, sources: int, names: Collection[str] = (), *, strict: bool = False) -> None:
        """Check against `sources` numbered sources.

        A bracket that holds one of `names`, the sources' names, is removed as a citation of no number. `strict` removes
        brackets of any other plain words too.
        """
        self._sources, self._strict = sources, strict
        self._names = {name.casefold() for name in names}
        self._held = ""
        self._told: list[str] = []
        self._last = ""
        self._ticks = self._code = 0
        """Backticks at the end of the output, and those that opened the code it is in (0 outside code)."""
        self._length = 0
        self.places: list[Cited] = []
        """All citations in the output, in order."""
        self.removed = 0
        """Number of brackets and numbers that named no source."""

    @property
    def cited(self) -> set[int]:
        """Numbers of the cited sources, from 1."""
        return {one.number for one in self.places}

    def push(self, text: str) -> str:
        """Return the text that can be sent now; a bracket that may become a citation is held back."""
        return self._read(self._held + text, over=False)

    def finish(self) -> str:
        """Return the text that was held back, without a citation that was cut off."""
        return self._read(self._held, over=True)

    def _read(self, text: str, *, over: bool) -> str:
        self._held, at = "", 0
        while at < len(text):
            mark = _MARKS.search(text, at)
            if mark is None or mark.start() > at:
                self._tell(text[at : mark.start() if mark is not None else None])
            if mark is None:
                break
            at = mark.end()
            if mark[0][0] == "`":
                self._tell(mark[0])
                self._ticks += len(mark[0])
                continue
            self._end_ticks()
            if mark[0] == "\n" or self._code:
                self._code = 0 if mark[0] == "\n" and self._code < FENCE else self._code
                self._tell(mark[0])
                continue
            end = self._bracket(text, mark.start(), over)
            if end is None:
                self._held = text[mark.start() :]
                break
            at = end
        told, self._told = "".join(self._told), []
        return told

    def _bracket(self, text: str, start: int, over: bool) -> int | None:
        """Handle the bracket at `start`; return where to read on, or None to wait for more text."""
        end = _END.search(text, start + 1, start + 2 + MOST)
        if end is None and len(text) - start <= MOST + 1:
            if not over:
                return None
            if _CUT_OFF.fullmatch(text, start + 1):
                self.removed += 1
                return len(text)
        if end is None or end[0] not in "]\u3011":
            self._tell(text[start])
            return start + 1
        inside, after = text[start + 1 : end.start()].strip(), end.end()
        if _CITING.fullmatch(inside):
            self._cite(inside)
            return after
        if not self._may_be_name(inside):
            self._tell(text[start])
            return start + 1
        if after == len(text) and not over:
            return None
        if text[after : after + 1] == "(":  # a link
            self._tell(text[start])
            return start + 1
        self.removed += 1
        return after

    def _may_be_name(self, inside: str) -> bool:
        """Return whether words in brackets are a source's name or, if strict, could be one."""
        if self._last and _TEXT_BEFORE.match(self._last):
            return False
        known = inside.casefold() in self._names or inside.partition(":")[0].casefold() in self._names
        return known or (self._strict and _WORDS.fullmatch(inside) is not None)

    def _cite(self, inside: str) -> None:
        """Output the valid citations of a citing bracket and count the invalid ones."""
        good, wrong = list[int](), 0
        for first, last in _NUMBER.findall(inside.partition("\u2020")[0]):
            low, high = _value(first), _value(last or first)
            found = range(max(low, 1), min(high, self._sources) + 1)
            good += found
            wrong += not found or (low, high) != (found[0], found[-1])
        self.removed += wrong or not good
        for number in dict.fromkeys(good):
            self.places.append(Cited(self._length, number))
            self._tell(f"[{number}]")

    def _tell(self, text: str) -> None:
        if text[0] != "`":
            self._end_ticks()
        self._told.append(text)
        self._last = text[-1]
        self._length += len(text)

    def _end_ticks(self) -> None:
        """Open or close code with the backticks that have just ended."""
        ticks, self._ticks = self._ticks, 0
        if ticks and not self._code:
            self._code = ticks
        elif ticks and (ticks == self._code or ticks > self._code >= FENCE):
            self._code = 0


def _value(digits: str) -> int:
    """Return the number; one of more than nine digits becomes 2^31, beyond any source."""
    return int(digits) if len(digits) <= 9 else 1 << 31
