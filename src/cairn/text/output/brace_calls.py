"""Calls as Gemma writes them: `call:f{x:1,words:[<|"|>a<|"|>],more:{y:true}}`, with its own marks around texts.

Keys are bare; a key between marks, or quoted as in JSON or Python, is read too. So are common mistakes: a text whose
first mark is missing (`{q:Paris, France<|"|>}`), one that contains marks, and arguments in round brackets
(`call:f(x=1)`, `f(x: 1)`).
"""

from __future__ import annotations

import json
import re

from cairn.text.output.json_scan import MAX_DEPTH, JsonScanner
from cairn.text.output.python_calls import NotPython, text_at
from cairn.text.output.tool_parser import ParsedCall, joined
from cairn.text.tokens.tokenizer import valid_text

_NAME = re.compile(r"([^\s{}()<>:]{1,256})\s*(?=[{(])")
_SPACE = re.compile(r"[ \t\r\n]*+")
_KEY = re.compile(r"[^\s:=,{}()\[\]<>\"']{1,256}")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]{1,400}")


class _NoCall(Exception):
    """The text is not a call."""


def brace_call(text: str, mark: str, before: str = "call:") -> ParsedCall | None:
    """Return the call that a text consists of; None for any other text.

    `mark` is the mark around texts, `before` the optional text before the call's name.
    """
    start = len(text) - len(text.lstrip())
    found = _NAME.match(text, start + len(before) if text.startswith(before, start) else start)
    if found is None:
        return None
    reader = _ValueReader(text, found.end(), mark)
    try:
        arguments = reader.arguments()
    except (_NoCall, NotPython):
        return None
    return ParsedCall(found[1], arguments) if reader.done else None


class _ValueReader:
    """Reader that converts values to JSON, from left to right."""

    def __init__(self, text: str, at: int, mark: str) -> None:
        self._text, self._at, self._mark = text, at, mark
        round_brackets = text.startswith("(", at)
        blank, closing = r"[ \t\r\n]*+", re.escape(mark)
        behind = r"[,}\])]" if round_brackets else r"[,}\]]"
        self._behind = re.compile(blank + behind)
        """Text that may follow a value."""
        self._close_value = re.compile(f"{closing}(?={blank}{behind})")
        self._close_key = re.compile(f"{closing}(?={blank}{'[:=]' if round_brackets else ':'})")

    @property
    def done(self) -> bool:
        """Whether only white space is left."""
        self._skip()
        return self._at == len(self._text)

    def arguments(self) -> str:
        """Read the arguments in curly or round brackets; return a JSON object."""
        if self._takes("{"):
            return self._object(0, "}", ":")
        if self._takes("("):
            return self._object(0, ")", "=:")
        raise _NoCall

    def _value(self, depth: int) -> str:
        self._skip()
        if depth > MAX_DEPTH:
            raise _NoCall
        if self._takes("{"):
            return self._object(depth, "}", ":")
        if self._takes("["):
            return self._list(depth)
        return self._quoted(self._close_value) or self._scalar() or self._unopened()

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _takes(self, wanted: str) -> bool:
        self._skip()
        there = self._text.startswith(wanted, self._at)
        self._at += len(wanted) if there else 0
        return there

    def _object(self, depth: int, close: str, signs: str) -> str:
        members: dict[str, str] = {}
        while not self._takes(close):
            if members and not self._takes(","):
                raise _NoCall
            if members and self._takes(close):  # after a trailing comma
                break
            key = self._key()
            if key in members or not any(self._takes(sign) for sign in signs):
                raise _NoCall
            members[key] = self._value(depth + 1)
        return joined(members)

    def _list(self, depth: int) -> str:
        items: list[str] = []
        while not self._takes("]"):
            if items and not self._takes(","):
                raise _NoCall
            if items and self._takes("]"):
                break
            items.append(self._value(depth + 1))
        return "[" + ", ".join(items) + "]"

    def _key(self) -> str:
        self._skip()
        if quoted := self._quoted(self._close_key):
            return str(json.loads(quoted))
        found = _KEY.match(self._text, self._at)
        if found is None:
            raise _NoCall
        self._at = found.end()
        return valid_text(found.group())

    def _quoted(self, closing: re.Pattern[str]) -> str:
        """Read a text with an opening mark or quotes; "" if none begins here.

        It ends at the first mark that is followed by text which can continue the call.
        """
        if self._takes(self._mark):
            end = closing.search(self._text, self._at)
            if end is None:
                raise _NoCall
            text, self._at = self._text[self._at : end.start()], end.end()
            return json.dumps(valid_text(text), ensure_ascii=False)
        if self._text[self._at : self._at + 1] not in ('"', "'"):
            return ""
        text, self._at = text_at(self._text, self._at)
        return text

    def _scalar(self) -> str:
        """Read a number, or a word of JSON or Python; "" if the value here is anything else."""
        found = _SCALAR.match(self._text, self._at)
        scanner = JsonScanner()
        if found is None or not self._behind.match(self._text, found.end()):
            return ""
        scanner.feed(found.group() + " ")
        if not scanner.done:
            return ""
        self._at = found.end()
        return scanner.text.strip()

    def _unopened(self) -> str:
        """Read a text whose opening mark is missing, up to its closing mark."""
        end = self._text.find(self._mark, self._at)
        behind = end + len(self._mark)
        if end <= self._at or not self._behind.match(self._text, behind):
            raise _NoCall
        text, self._at = self._text[self._at : end], behind
        return json.dumps(valid_text(text), ensure_ascii=False)
