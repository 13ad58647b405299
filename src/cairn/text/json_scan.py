"""A strict JSON reader for text that arrives in pieces: it says where a value ends, and fails at the first wrong
character (RFC 8259)."""

from __future__ import annotations

import enum
import re

MAX_DEPTH = 64
"""Deepest nesting; deeper values fail."""
MAX_SCALAR = 400
"""Longest number in characters; longer ones fail."""

SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NUMBER_SO_FAR = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]*)?)?")
_WORDS = ("true", "false", "null")


class _At(enum.Enum):
    """What the next character belongs to."""

    VALUE = enum.auto()
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
    """Reads one JSON value. Linear: every character is looked at once, however the text is cut."""

    __slots__ = ("_at", "_hex", "_key", "_scalar", "_stack", "values")

    def __init__(self) -> None:
        self._at = _At.VALUE
        self._stack: list[str] = []
        self._key = False
        self._hex = 0
        self._scalar = ""
        self.values = 0
        """Values that began, the whole one included."""

    @property
    def done(self) -> bool:
        """The value is complete and valid."""
        return self._at is _At.DONE

    @property
    def failed(self) -> bool:
        """The text is not the beginning of a JSON value."""
        return self._at is _At.FAILED

    def feed(self, text: str, start: int = 0) -> int:
        """Read on from text[start]. Returns where it stopped: len(text) unless `done` or `failed`."""
        at = start
        while at < len(text) and self._at is not _At.DONE and self._at is not _At.FAILED:
            if self._at is _At.STRING:
                at = self._string(text, at)
            elif self._at is _At.SCALAR:
                at = self._more_scalar(text, at)
            elif self._at is _At.ESCAPE or self._at is _At.HEX:
                at = self._escape(text[at], at)
            else:
                found = SPACE.match(text, at)
                at = found.end() if found else at
                if at < len(text):
                    at = self._structure(text[at], at)
        return at

    def _structure(self, character: str, at: int) -> int:
        state = self._at
        if state is _At.COLON:
            self._at = _At.VALUE if character == ":" else _At.FAILED
        elif state is _At.AFTER and character == ",":
            self._at = _At.KEY if self._stack[-1] == "{" else _At.VALUE
        elif character in "}]":
            closes = state is _At.AFTER or state is (_At.FIRST_KEY if character == "}" else _At.FIRST_ITEM)
            if not closes or self._stack.pop() + character not in ("{}", "[]"):
                self._at = _At.FAILED
            else:
                self._end_value()
        elif state in (_At.FIRST_KEY, _At.KEY):
            self._key = True
            self._at = _At.STRING if character == '"' else _At.FAILED
        elif state in (_At.VALUE, _At.FIRST_ITEM):
            return self._begin_value(character, at)
        else:
            self._at = _At.FAILED
        return at if self._at is _At.FAILED else at + 1

    def _begin_value(self, character: str, at: int) -> int:
        self.values += 1
        if character == '"':
            self._key = False
            self._at = _At.STRING
        elif character in "{[" and len(self._stack) < MAX_DEPTH:
            self._stack.append(character)
            self._at = _At.FIRST_KEY if character == "{" else _At.FIRST_ITEM
        elif character in "-0123456789tfn":
            self._scalar = ""
            self._at = _At.SCALAR
            return at
        else:
            self.values -= 1
            self._at = _At.FAILED
            return at
        return at + 1

    def _end_value(self) -> None:
        self._at = _At.AFTER if self._stack else _At.DONE

    def _string(self, text: str, at: int) -> int:
        found = _PLAIN.match(text, at)
        at = found.end() if found else at
        if at == len(text):
            return at
        if text[at] == '"':
            if self._key:
                self._at = _At.COLON
            else:
                self._end_value()
        else:
            self._at = _At.ESCAPE if text[at] == "\\" else _At.FAILED
        return at if self._at is _At.FAILED else at + 1

    def _escape(self, character: str, at: int) -> int:
        if self._at is _At.HEX:
            self._hex -= 1
            valid = character in "0123456789abcdefABCDEF"
            self._at = (_At.HEX if self._hex else _At.STRING) if valid else _At.FAILED
        elif character == "u":
            self._hex = 4
            self._at = _At.HEX
        else:
            self._at = _At.STRING if character in '"\\/bfnrt' else _At.FAILED
        return at if self._at is _At.FAILED else at + 1

    def _more_scalar(self, text: str, at: int) -> int:
        found = _SCALAR.match(text, at)
        end = found.end() if found else at
        scalar = self._scalar = self._scalar + text[at:end]
        if end == len(text):
            fits = len(scalar) <= MAX_SCALAR and _begins_scalar(scalar)
        else:
            fits = len(scalar) <= MAX_SCALAR and (_NUMBER.fullmatch(scalar) is not None or scalar in _WORDS)
            self._end_value()
        if not fits:
            self._at = _At.FAILED
            return at + self._fitting(len(scalar) - (end - at))
        return end

    def _fitting(self, before: int) -> int:
        """How many characters of a scalar that failed fit, behind those of earlier pieces: what is right of a text
        must not depend on how it was cut."""
        end = before
        while end < min(len(self._scalar), MAX_SCALAR) and _begins_scalar(self._scalar[: end + 1]):
            end += 1
        return end - before


def _begins_scalar(text: str) -> bool:
    return _NUMBER_SO_FAR.fullmatch(text) is not None or any(word.startswith(text) for word in _WORDS)
