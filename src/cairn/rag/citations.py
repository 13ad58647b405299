"""Citations in an answer: `[2]` names the second source. What names none is taken out, and counted.

Numbers, ranges and the words that go with them (`[Source 3]`, `[1-2]`) are brought into one form. Code is left alone,
and so are links and other brackets that are part of a text.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

MOST = 80
"""Characters between two brackets that may be a citation: so many are held back while they arrive."""
FENCE = 3
"""Backticks that begin a block of code; fewer begin code that ends with its line."""
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
"""What stands in brackets to cite: numbers, with or without what sources are called, or such words alone."""
_WORDS = re.compile(r"(?=.*[^\W\d_])[\w\s.,:;#&/'()>\u2013-]+")
"""Plain words, as of a name."""
_NUMBER = re.compile(r"(\d+)(?:\s*[-\u2013]\s*(\d+))?")
_CUT_OFF = re.compile(r"[\s\d,;-]*")
_TEXT_BEFORE = re.compile(r"[\w)\]\[\"'\\!]")
"""What stands before a bracket that is part of a text: an index, a table of TOML, an image."""


class Cited(NamedTuple):
    """A citation in what was told."""

    at: int
    """Characters before it."""
    number: int
    """The source's, from 1."""


class CitationFilter:
    """Takes an answer piece by piece, and gives it back without brackets that name no source."""

    def __init__(self, sources: int, names: Collection[str] = (), *, strict: bool = False) -> None:
        """`names`: of the sources; a bracket that holds one is no citation. `strict`: nor is one of other words."""
        self._sources, self._strict = sources, strict
        self._names = {name.casefold() for name in names}
        self._held = ""
        self._told: list[str] = []
        self._last = ""
        self._ticks = self._code = 0
        """Backticks that stand last in what was told, and those that began the code it is in."""
        self._length = 0
        self.places: list[Cited] = []
        """Every citation that was told, in order."""
        self.removed = 0
        """How many brackets and numbers named no source."""

    @property
    def cited(self) -> set[int]:
        """Numbers of the sources that are cited, from 1."""
        return {one.number for one in self.places}

    def push(self, text: str) -> str:
        """Return what can be told now: a bracket that may become a citation waits."""
        return self._read(self._held + text, over=False)

    def finish(self) -> str:
        """Return what was waiting. A citation that was cut off goes."""
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
        """Tell what stands for the bracket that begins there. Returns where to read on; None to wait for more."""
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
        """Tell the citations in a bracket that cites."""
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
        """What follows is no backtick: those before it begin code, or end it."""
        ticks, self._ticks = self._ticks, 0
        if ticks and not self._code:
            self._code = ticks
        elif ticks and (ticks == self._code or ticks > self._code >= FENCE):
            self._code = 0


def _value(digits: str) -> int:
    """Return a number; one that is too long to name anything is beyond all sources."""
    return int(digits) if len(digits) <= 9 else 1 << 31
