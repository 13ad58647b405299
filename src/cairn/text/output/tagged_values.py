"""Where a value between tags ends: `<parameter=x>`value`</parameter>`, `<arg_value>`value`</arg_value>`.

A value may hold the text of any tag, so its closing tag counts only where another argument or the end of the call
follows. A model may leave the closing tag out; then the value ends at the next tag of the form: at one that begins an
argument which the tool has and the call has not yet, or at one that ends the call for certain.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container
from typing import NamedTuple

_BLANK = re.compile(r"\s*+")
_GLUED = frozenset("\n}]")
"""What a tag stands behind that follows a value, beside letters and digits; a tag that a text mentions has a blank or a
quote before it."""


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
