"""Where a value between tags ends: `<parameter=x>`value`</parameter>`, `<arg_value>`value`</arg_value>`.

A value may hold the text of any tag, so its closing tag counts only where another argument or the end of the call
follows. A model may leave the closing tag out; then the value ends at the next tag of the form: at one that begins an
argument which the tool has and the call has not yet, or at one that ends the call for certain.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container
from typing import NamedTuple

MAX_NAME = 256
"""Characters in which what ends a name is looked for."""
_BLANK = re.compile(r"\s*+")
_SOME_BLANK = re.compile(r"\s{0,64}")
_GLUED = frozenset("\n}]")
"""What a tag stands behind that follows a value, beside letters and digits; a tag that a text mentions has a blank or a
quote before it."""


class Wait(Exception):
    """The text so far does not tell."""


class GrowingText:
    """A text that comes in pieces, of which one element after another is read. Wait where more of it must come."""

    def __init__(self, text: str) -> None:
        """Begin behind a text that was read."""
        self._text = text
        self._next = len(text)
        """Where reading goes on."""

    def _need(self, count: int) -> None:
        if len(self._text) < self._next + count:
            raise Wait

    def _blank(self) -> None:
        found = _SOME_BLANK.match(self._text, self._next)
        self._next = found.end() if found else self._next

    def _begins(self, wanted: str) -> int | None:
        """Return the place behind a text that comes next, any white space before its words; None where it does not."""
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
        """Go behind a text that comes next, and tell whether it does."""
        if (at := self._begins(wanted)) is None:
            return False
        self._next = at
        return True

    def _word(self, pattern: re.Pattern[str]) -> bool:
        """Go behind a number or the like, and tell whether there is one."""
        found = pattern.match(self._text, self._next)
        assert found is not None
        if found.end() == len(self._text):
            raise Wait
        self._next = found.end()
        return bool(found.group())

    def _until(self, *stops: str) -> str | None:
        """Return what stands before the first of some texts, which is near; None where none is."""
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
    """The tags of one form, without the blanks around them."""

    def __init__(self, value_end: str, key: tuple[str, str], close: str, end: str, begins: Collection[str]) -> None:
        """Take the tags of a form: `key` stands before and behind an argument's name, `close` ends a call and `end` a
        section ("" for none), and `begins` are what another call may begin with."""
        self.value_end, self.key = value_end.strip(), key[0].strip()
        self.closers = tuple(dict.fromkeys(one.strip() for one in (close, end) if one.strip()))
        self.behind = {
            one: tuple(other for other in (end.strip() if one == close.strip() else "", *begins) if other)
            for one in self.closers
        }
        """What follows each closer where it ends a call for certain."""
        name_end = key[1].partition("{kind}")[0].partition("\n")[0].strip()
        self.named = re.compile(
            rf"{re.escape(self.key)}\s{{0,64}}+([^<>\n\"]{{1,128}}+)\s{{0,64}}+{re.escape(name_end)}"
        )
        self.closing = re.compile(re.escape(self.value_end))
        self.any = re.compile("|".join(map(re.escape, (self.value_end, self.key, *self.closers))))
        self.longest = max(map(len, (self.value_end, self.key, *self.closers)))


class ValueEnd(NamedTuple):
    """Where a value ends, and the place behind its closing tag: the same place where that is missing."""

    end: int
    behind: int

    @property
    def tagged(self) -> bool:
        """Its closing tag is there."""
        return self.behind > self.end


class ValueScanner:
    """Looks for the end of one value in a text that grows. Linear: each tag is decided once."""

    def __init__(
        self, tags: ValueTags, start: int, key: str, known: Collection[str], given: Container[str], *, mends: bool
    ) -> None:
        """Begin at text[start], the value of the argument `key`. `known` are the arguments of the tool, empty where
        they are not known, and `given` those that the call has already. `mends`: the closing tag may be missing."""
        self._tags, self._start, self._key, self._known, self._given = tags, start, key, known, given
        self._pattern = tags.any if mends else tags.closing
        self._from = start
        self._blank_end = 0
        """Up to where blanks were passed over behind the tag that is being decided."""
        self._closer: int | None = None
        """The first closer, which ends the value where no closing tag comes."""

    @property
    def start(self) -> int:
        """Where the value begins."""
        return self._start

    def certain(self, text: str) -> int:
        """Return up to where a text is the value, whatever follows; the line break that may end it is left out."""
        end = self._from if self._closer is None else min(self._from, self._closer)
        return end - (end > self._start and text[end - 1] == "\n")

    def find(self, text: str, *, whole: bool) -> ValueEnd | None:
        """Return the end of the value; None where the text so far does not tell. `whole`: no more of the text comes."""
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
        """Tell whether one of some tags comes next; None where the text so far does not tell."""
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
