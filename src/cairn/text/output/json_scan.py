"""An incremental, lenient JSON reader for text written by models.

It finds where a value ends, fails at the first character that fits no value, and returns strict JSON (RFC 8259).
Unambiguous mistakes are repaired: raw control characters in a text; a backslash before a character that needs none
(`\\d` stands for itself, `\\'` for the quote, as in Python); a comma before a closing bracket; `True`, `False` and
`None`. Everything else is passed on unchanged. Missing closing braces at the end are counted; a caller that knows that
the text is over may add them (`close`).
"""

from __future__ import annotations

import enum
import json
import re

MAX_DEPTH = 64
"""Most levels of nesting; deeper values fail."""
MAX_SCALAR = 400
"""Most characters of a number; longer ones fail."""

SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NUMBER_SO_FAR = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]*)?)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}


class _JsonAt(enum.Enum):
    """The element that the next character belongs to."""

    VALUE = enum.auto()
    ITEM = enum.auto()
    FIRST_ITEM = enum.auto()
    FIRST_KEY = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    AFTER = enum.auto()
    STRING = enum.auto()
    ESCAPE = enum.auto()
    HEX = enum.auto()
    SCALAR = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class JsonScanner:
    """Reader of one JSON value. Linear: every character is read once, however the text is split."""

    __slots__ = (
        "_at",
        "_base",
        "_comma",
        "_comma_place",
        "_doubtful",
        "_failed",
        "_hex",
        "_hold",
        "_key",
        "_letter_next",
        "_mark",
        "_mended",
        "_read",
        "_scalar",
        "_stack",
        "_text",
        "ends",
        "is_object",
        "key",
        "members",
    )

    def __init__(self) -> None:
        self._at = _JsonAt.VALUE
        self._failed = _JsonAt.VALUE
        """The state in which it failed."""
        self._stack: list[str] = []
        self._key = False
        self._hex = ""
        self._scalar = ""
        self._text: list[str] = []
        self._comma = self._comma_place = 0
        """Index in `_text` of the last comma; number of characters read before it."""
        self._read = self._base = 0
        """Characters read so far; characters read before the current text."""
        self._hold: tuple[int, int] | None = None
        """Where a repair begins that later text may prove wrong, as a value of `certain`."""
        self._mark = 0
        """Index in `_text` where the current key or value of the outermost object begins."""
        self._mended = self._doubtful = self._letter_next = False
        """In the current text: a backslash was repaired to stand for itself; another one, read as an escape, precedes a
        letter, as in a path; the last one may."""
        self.is_object = False
        """Whether the value begins with `{`."""
        self.key = ""
        """The current or last key of the outermost object."""
        self.members: list[tuple[str, str]] = []
        """(key, value as JSON) of each complete member of the outermost object."""
        self.ends: list[int] = []
        """Number of characters read up to the end of each member."""

    @property
    def done(self) -> bool:
        """Whether the value is complete and valid."""
        return self._at is _JsonAt.DONE

    @property
    def failed(self) -> bool:
        """Whether the text cannot be the beginning of a JSON value."""
        return self._at is _JsonAt.FAILED

    @property
    def text(self) -> str:
        """The text read so far as strict JSON."""
        return "".join(self._text)

    @property
    def lacking(self) -> int:
        """Number of closing braces that would complete the value; 0 if braces alone would not."""
        at = self._failed if self.failed else self._at
        behind = at is _JsonAt.AFTER or (at is _JsonAt.SCALAR and _is_scalar(self._scalar))
        return len(self._stack) if behind and "[" not in self._stack else 0

    @property
    def certain(self) -> tuple[int, int]:
        """Number of pieces of the text that no later text can change, and the characters they were read from."""
        if self._hold is not None:
            return self._hold
        state = self._failed if self.failed else self._at
        if state in (_JsonAt.KEY, _JsonAt.ITEM):  # a closing bracket may follow, which removes the comma
            return self._comma, self._comma_place
        open_ended = {_JsonAt.ESCAPE: 1, _JsonAt.HEX: 2 + len(self._hex), _JsonAt.SCALAR: len(self._scalar)}
        return len(self._text), self._read - open_ended.get(state, 0)

    @property
    def member(self) -> int | None:
        """Index of the piece where a member's value that is an object begins; None if none is being read."""
        return self._mark if self._stack[:2] == ["{", "{"] else None

    def between(self, begin: int, end: int) -> str:
        """Return the pieces from `begin` to `end` as one text."""
        return "".join(self._text[begin:end])

    def close(self) -> None:
        """Add the missing closing braces."""
        lacking = self.lacking
        if self.failed:
            self._at = self._failed
        self.feed("}" * lacking)

    def feed(self, text: str, start: int = 0) -> int:
        """Read text[start:] and return where it stopped: len(text) unless `done` or `failed`."""
        at = start
        self._base = self._read - start
        while at < len(text) and self._at is not _JsonAt.DONE and self._at is not _JsonAt.FAILED:
            if self._at is _JsonAt.STRING:
                at = self._string(text, at)
            elif self._at is _JsonAt.SCALAR:
                at = self._more_scalar(text, at)
            elif self._at is _JsonAt.ESCAPE:
                at = self._escape(text[at], at)
            elif self._at is _JsonAt.HEX:
                at = self._more_hex(text[at], at)
            else:
                found = SPACE.match(text, at)
                end = found.end() if found else at
                self._text.append(text[at:end])
                at = end if end == len(text) else self._structure(text[end], end)
        self._read = self._base + at
        return at

    def _structure(self, character: str, at: int) -> int:
        state = self._at
        if state is _JsonAt.COLON and character == ":":
            self._at = _JsonAt.VALUE
        elif state is _JsonAt.AFTER and character == ",":
            self._comma, self._comma_place = len(self._text), self._base + at
            self._at = _JsonAt.KEY if self._stack[-1] == "{" else _JsonAt.ITEM
        elif character in "}]" and self._closes(character):
            if state in (_JsonAt.KEY, _JsonAt.ITEM):
                self._text[self._comma] = ""
            self._stack.pop()
            self._text.append(character)
            self._end_value(at + 1)
            return at + 1
        elif state in (_JsonAt.FIRST_KEY, _JsonAt.KEY) and character == '"':
            self._key = True
            self._at = _JsonAt.STRING
            if len(self._stack) == 1:
                self._mark = len(self._text)
        elif state in (_JsonAt.VALUE, _JsonAt.ITEM, _JsonAt.FIRST_ITEM):
            return self._begin_value(character, at)
        else:
            return self._fail(at)
        self._text.append(character)
        return at + 1

    def _closes(self, character: str) -> bool:
        """Return whether a closing bracket is valid here."""
        ends = (
            (_JsonAt.AFTER, _JsonAt.KEY, _JsonAt.FIRST_KEY)
            if character == "}"
            else (_JsonAt.AFTER, _JsonAt.ITEM, _JsonAt.FIRST_ITEM)
        )
        return self._at in ends and self._stack[-1] + character in ("{}", "[]")

    def _fail(self, at: int) -> int:
        self._failed, self._at = self._at, _JsonAt.FAILED
        return at

    def _begin_value(self, character: str, at: int) -> int:
        if self._stack == ["{"]:
            self._mark = len(self._text)
        if character == '"':
            self._key = False
            self._at = _JsonAt.STRING
        elif character in "{[" and len(self._stack) < MAX_DEPTH:
            self.is_object |= character == "{" and not self._stack
            self._stack.append(character)
            self._at = _JsonAt.FIRST_KEY if character == "{" else _JsonAt.FIRST_ITEM
        elif character in "-0123456789tfnTFN":
            self._scalar = ""
            self._at = _JsonAt.SCALAR
            return at
        else:
            return self._fail(at)
        self._text.append(character)
        return at + 1

    def _end_value(self, end: int) -> None:
        self._at = _JsonAt.AFTER if self._stack else _JsonAt.DONE
        if self._stack == ["{"]:
            self.ends.append(self._base + end)
            self.members.append((self.key, "".join(self._text[self._mark :])))

    def _string(self, text: str, at: int) -> int:
        if self._letter_next:
            self._doubtful |= text[at].isalpha()
            self._letter_next = False
        found = _PLAIN.match(text, at)
        end = found.end() if found else at
        self._text.append(text[at:end])
        if end == len(text):
            return end
        if text[end] == "\\":
            self._at = _JsonAt.ESCAPE
        elif text[end] == '"':
            if self._mended and self._doubtful:
                return self._fail(end)
            self._mended = self._doubtful = False
            self._hold = None
            self._text.append('"')
            self._end_string(end + 1)
        else:
            self._text.append(_escaped(text[end]))
        return end + 1

    def _end_string(self, end: int) -> None:
        if not self._key:
            self._end_value(end)
            return
        self._at = _JsonAt.COLON
        if len(self._stack) == 1:
            self.key = json.loads("".join(self._text[self._mark :]))

    def _escape(self, character: str, at: int) -> int:
        self._at = _JsonAt.STRING
        if character == "u":
            self._hex = ""
            self._at = _JsonAt.HEX
        elif character in '"\\/bfnrt':
            self._letter_next = character in "bfnrt"
            self._text.append("\\" + character)
        elif character == "'":
            self._text.append(character)
        else:
            self._mend(at - 1)
            self._text.append("\\\\" + _escaped(character))
        return at + 1

    def _mend(self, at: int) -> None:
        """Record that a backslash is read as itself; the rest of the text shows whether that is right."""
        self._mended = True
        self._hold = self._hold or (len(self._text), self._base + at)

    def _more_hex(self, character: str, at: int) -> int:
        if character not in "0123456789abcdefABCDEF":  # as in a Windows path
            self._at = _JsonAt.STRING
            self._mend(at - 2 - len(self._hex))
            self._text.append("\\\\u" + self._hex)
            return at
        self._hex += character
        if len(self._hex) == 4:
            self._at = _JsonAt.STRING
            self._text.append("\\u" + self._hex)
        return at + 1

    def _more_scalar(self, text: str, at: int) -> int:
        found = _SCALAR.match(text, at)
        end = found.end() if found else at
        scalar = self._scalar = self._scalar + text[at:end]
        if end == len(text):
            if len(scalar) <= MAX_SCALAR and _begins_scalar(scalar):
                return end
        elif len(scalar) <= MAX_SCALAR and _is_scalar(scalar):
            self._text.append(_WORDS.get(scalar, scalar))
            self._end_value(end)
            return end
        before = len(scalar) - (end - at)
        self._hold = len(self._text), self._base + at - before
        self._scalar = ""
        self._fail(at)
        return at + _fitting(scalar, before)


def _fitting(scalar: str, before: int) -> int:
    """Return how many characters of a failed scalar are valid after the first `before`.

    So the place of an error does not depend on how the text was split.
    """
    end = before
    while end < min(len(scalar), MAX_SCALAR) and _begins_scalar(scalar[: end + 1]):
        end += 1
    return end - before


def _escaped(character: str) -> str:
    """Return a character of a text; control characters as an escape."""
    return json.dumps(character)[1:-1] if character < " " else character


def _is_scalar(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None or text in _WORDS


def _begins_scalar(text: str) -> bool:
    return _NUMBER_SO_FAR.fullmatch(text) is not None or any(word.startswith(text) for word in _WORDS)
