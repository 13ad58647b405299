"""Calls as Gemma writes them: `call:f{x:1,words:[<|"|>a<|"|>],more:{y:true}}`, a text between two of its own marks.

Keys stand bare; one between marks, or as JSON has it, is read too. What is no such call is none.
"""

from __future__ import annotations

import json
import re

from cairn.text.output.json_scan import JsonScanner
from cairn.text.output.tool_parser import ParsedCall
from cairn.text.tokens.tokenizer import valid_text

MAX_DEPTH = 64
_NAME = re.compile(r"([^\s{}<>:]{1,256})\s*(?=\{)")
_SPACE = re.compile(r"[ \t\r\n]*")
_KEY = re.compile(r"[^\s:,{}\[\]<>\"]{1,256}")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]{1,400}")


class _NoCall(Exception):
    """This is not how a call is written."""


def brace_call(text: str, mark: str, before: str = "call:") -> ParsedCall | None:
    """The call that a text is; None if it is anything else. `mark`: what stands around texts in it; `before`: what
    stands before its name."""
    start = len(text) - len(text.lstrip())
    found = _NAME.match(text, start + len(before)) if text.startswith(before, start) else None
    if found is None:
        return None
    reader = _ValueReader(text, found.end(), mark)
    try:
        arguments = reader.value(0)
    except _NoCall:
        return None
    return ParsedCall(found[1], arguments) if reader.done else None


class _ValueReader:
    """Reads values from left to right, each as JSON."""

    def __init__(self, text: str, at: int, mark: str) -> None:
        self._text, self._at, self._mark = text, at, mark

    @property
    def done(self) -> bool:
        """Nothing is left."""
        self._skip()
        return self._at == len(self._text)

    def value(self, depth: int) -> str:
        """The next value."""
        self._skip()
        if depth > MAX_DEPTH:
            raise _NoCall
        if self._takes("{"):
            return self._object(depth)
        if self._takes("["):
            return self._list(depth)
        return self._quoted() or self._scalar()

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _takes(self, wanted: str) -> bool:
        self._skip()
        there = self._text.startswith(wanted, self._at)
        self._at += len(wanted) if there else 0
        return there

    def _object(self, depth: int) -> str:
        members: dict[str, str] = {}
        while not self._takes("}"):
            if members and not self._takes(","):
                raise _NoCall
            key = self._key()
            if key in members or not self._takes(":"):
                raise _NoCall
            members[key] = self.value(depth + 1)
        return "{" + ", ".join(f"{key}: {value}" for key, value in members.items()) + "}"

    def _list(self, depth: int) -> str:
        items: list[str] = []
        while not self._takes("]"):
            if items and not self._takes(","):
                raise _NoCall
            items.append(self.value(depth + 1))
        return "[" + ", ".join(items) + "]"

    def _key(self) -> str:
        self._skip()
        if quoted := self._quoted():
            return quoted
        found = _KEY.match(self._text, self._at)
        if found is None:
            raise _NoCall
        self._at = found.end()
        return json.dumps(valid_text(found.group()), ensure_ascii=False)

    def _quoted(self) -> str:
        """A text, if one stands here."""
        if self._takes(self._mark):
            end = self._text.find(self._mark, self._at)
            if end < 0:
                raise _NoCall
            text, self._at = self._text[self._at : end], end + len(self._mark)
            return json.dumps(valid_text(text), ensure_ascii=False)
        if not self._text.startswith('"', self._at):
            return ""
        scanner = JsonScanner()
        self._at = scanner.feed(self._text, self._at)
        if not scanner.done:
            raise _NoCall
        return scanner.text

    def _scalar(self) -> str:
        found = _SCALAR.match(self._text, self._at)
        scanner = JsonScanner()
        if found is not None:
            scanner.feed(found.group() + " ")
        if found is None or not scanner.done:
            raise _NoCall
        self._at = found.end()
        return scanner.text.strip()
