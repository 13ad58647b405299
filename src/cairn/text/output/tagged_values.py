"""Search for the end of a value between tags: `<parameter=x>`value`</parameter>`, `<arg_value>`value`</arg_value>`.

A value may contain the text of any tag, so its closing tag counts only if another argument or the end of the call
follows. A model may leave out the closing tag. Then the value ends at the next tag that begins an argument which the
tool has and the call has not yet, or that certainly ends the call.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container
from typing import NamedTuple

MAX_NAME = 256
"""Characters in which the end of a name is searched."""
_BLANK = re.compile(r"\s*+")
_SOME_BLANK = re.compile(r"\s{0,64}")
_GLUED = frozenset("\n}]")
"""Characters, beside letters and digits, that may precede a tag after a value; before a tag that is only mentioned in a
text comes a blank or a quote."""


class Wait(Exception):
    """More text is needed to decide."""


class GrowingText:
    """A text that arrives in pieces and is read element by element. Its methods raise Wait if more is needed."""

    def __init__(self, text: str) -> None:
        """Begin after `text`, which was already read."""
        self._text = text
        self._next = len(text)
        """Where reading continues."""

    def _need(self, count: int) -> None:
        if len(self._text) < self._next + count:
            raise Wait

    def _blank(self) -> None:
        found = _SOME_BLANK.match(self._text, self._next)
        self._next = found.end() if found else self._next

    def _begins(self, wanted: str) -> int | None:
        """Return the index just past `wanted` if it comes next (white space allowed before its words), else None."""
        at = self._next
        for word in wanted.split():
            found = _SOME_BLANK.match(self._text, at)
            at = found.end() if found else at
            there = self._text[at : at + len(word)]
            if there != word:
                if word.startswith(there) and at + len(there) == len(self._text):
                    raise Wait
                return None
            at += len(word)
        return at

    def _take(self, wanted: str) -> bool:
        """Skip `wanted` if it comes next; return whether it did."""
        if (at := self._begins(wanted)) is None:
            return False
        self._next = at
        return True

    def _word(self, pattern: re.Pattern[str]) -> bool:
        """Skip a word that matches `pattern`; return whether there was one."""
        found = pattern.match(self._text, self._next)
        assert found is not None
        if found.end() == len(self._text):
            raise Wait
        self._next = found.end()
        return bool(found.group())

    def _until(self, *stops: str) -> str | None:
        """Return the text before the first of some nearby texts; None if there is none."""
        area = self._text[self._next : self._next + MAX_NAME]
        places = [at for stop in stops if (at := area.find(stop)) >= 0]
        if not places:
            if len(area) == MAX_NAME:
                return None
            raise Wait
        end = min(places)
        self._next += end
        return area[:end]


class ValueTags:
    """The tags of one call format, without white space around them."""

    def __init__(self, value_end: str, key: tuple[str, str], close: str, end: str, begins: Collection[str]) -> None:
        """Take the tags of a format.

        `key` is around an argument's name, `close` ends a call, `end` a section ("" for none), `begins` are texts with
        which another call may begin.
        """
        self.value_end, self.key = value_end.strip(), key[0].strip()
        self.closers = tuple(dict.fromkeys(one.strip() for one in (close, end) if one.strip()))
        self.behind = {
            one: tuple(other for other in (end.strip() if one == close.strip() else "", *begins) if other)
            for one in self.closers
        }
        """Closer -> texts of which one follows if it certainly ends a call."""
        name_end = key[1].partition("{kind}")[0].partition("\n")[0].strip()
        self.named = re.compile(
            rf"{re.escape(self.key)}\s{{0,64}}+([^<>\n\"]{{1,128}}+)\s{{0,64}}+{re.escape(name_end)}"
        )
        self.closing = re.compile(re.escape(self.value_end))
        self.any = re.compile("|".join(map(re.escape, (self.value_end, self.key, *self.closers))))
        self.longest = max(map(len, (self.value_end, self.key, *self.closers)))


class ValueEnd(NamedTuple):
    """The end of a value, and the index after its closing tag; both are equal if the tag is missing."""

    end: int
    behind: int

    @property
    def tagged(self) -> bool:
        """Whether its closing tag is present."""
        return self.behind > self.end


class ValueScanner:
    """Search for the end of one value in a growing text. Linear: each tag is decided once."""

    def __init__(
        self, tags: ValueTags, start: int, key: str, known: Collection[str], given: Container[str], *, mends: bool
    ) -> None:
        """Begin at text[start], the value of the argument `key`.

        `known` are the tool's arguments (empty if unknown), `given` those that the call already has. `mends`: the
        closing tag may be missing.
        """
        self._tags, self._start, self._key, self._known, self._given = tags, start, key, known, given
        self._pattern = tags.any if mends else tags.closing
        self._from = start
        self._blank_end = 0
        """End of the white space already skipped after the current tag."""
        self._closer: int | None = None
        """The first closer, which ends the value if no closing tag comes."""

    @property
    def start(self) -> int:
        """Index where the value begins."""
        return self._start

    def certain(self, text: str) -> int:
        """Return up to where `text` certainly belongs to the value; a final line break is left out."""
        end = self._from if self._closer is None else min(self._from, self._closer)
        return end - (end > self._start and text[end - 1] == "\n")

    def find(self, text: str, *, whole: bool) -> ValueEnd | None:
        """Return the end of the value; None if more text is needed. `whole`: the text has ended."""
        tags = self._tags
        while found := self._pattern.search(text, self._from):
            tag, at = found.group(), found.start()
            decided: ValueEnd | bool | None
            if tag == tags.value_end:
                decided = self._follows(text, found.end(), (tags.key, *tags.closers))
                decided = ValueEnd(at, found.end()) if decided else decided
            elif tag == tags.key:
                decided = self._begins_argument(text, at, whole)
            else:
                decided = self._follows(text, found.end(), tags.behind[tag])
                decided = ValueEnd(at, at) if decided else decided
                self._closer = at if self._closer is None else self._closer
            if isinstance(decided, ValueEnd):
                return decided
            if decided is None and not whole:
                self._from = at
                return None
            self._from = found.end()
        self._from = max(self._from, len(text) - tags.longest + 1)
        return ValueEnd(self._closer, self._closer) if whole and self._closer is not None else None

    def _follows(self, text: str, at: int, wanted: Collection[str]) -> bool | None:
        """Return whether one of the tags comes next; None if more text is needed."""
        blank = _BLANK.match(text, max(at, self._blank_end))
        at = self._blank_end = blank.end() if blank else at
        if any(text.startswith(one, at) for one in wanted):
            return True
        rest = text[at : at + max(map(len, wanted), default=0)]
        return None if at + len(rest) == len(text) and any(one.startswith(rest) for one in wanted) else False

    def _begins_argument(self, text: str, at: int, whole: bool) -> ValueEnd | bool | None:
        before = text[at - 1]
        if at > self._start and not (before in _GLUED or before.isalnum()):
            return False
        named = self._tags.named.match(text, at)
        if named is None:
            return None if not whole and len(text) - at < 256 else False
        name = named[1].rstrip()
        follows = name != self._key and name not in self._given and (not self._known or name in self._known)
        return ValueEnd(at, at) if follows else False
