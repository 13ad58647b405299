"""Calls and values in Python's syntax: `[f(x=1, y="a")]`, keyword arguments alone. What is no such call is none."""

from __future__ import annotations

import ast
import json
import re
import warnings

from cairn.text.output.json_scan import JsonScanner
from cairn.text.output.tool_parser import ParsedCall
from cairn.text.tokens.tokenizer import valid_text

MAX_LITERAL = 4096
"""Characters of a value that is no JSON and may be Python's."""
_COMMA = re.compile(r"\s*,\s*")
_CLOSING = re.compile(r"\s*\)")
_BEHIND = re.compile(r"\s*[,)]")
_MARKS = re.compile(r"\\.|['\"()\[\]{},]", re.DOTALL)
_KEYWORD = re.compile(r"""\s*([^\s=,(){}\[\]'"]{1,128})\s*=\s*""")
_PYTHON_NAME = re.compile(r"\s*([\w.-]{1,256})\s*\(")


def python_calls(text: str) -> list[ParsedCall] | None:
    """The calls that a list in Python's syntax makes, with keyword arguments alone; None if it is anything else."""
    text = text.strip()
    at, end = (1, len(text) - 1) if text[:1] == "[" and text[-1:] == "]" else (0, len(text))
    calls: list[ParsedCall] = []
    while at < end:
        found = _PYTHON_NAME.match(text, at, end)
        if found is None:
            return None
        arguments = _keywords(text, found.end(), end)
        if arguments is None:
            return None
        written, at = arguments
        calls.append(ParsedCall(found[1], written))
        comma = _COMMA.match(text, at, end)
        if comma is None:
            return calls if not text[at:end].strip() else None
        at = comma.end()
    return calls or None


def _keywords(text: str, at: int, end: int) -> tuple[str, int] | None:
    """Keyword arguments from behind a bracket as a JSON object, and the place behind the closing one."""
    found: dict[str, str] = {}
    while not (close := _CLOSING.match(text, at, end)):
        keyword = _KEYWORD.match(text, at, end)
        value = None if keyword is None else _python_value(text, keyword.end(), end)
        if keyword is None or value is None or keyword[1] in found:
            return None
        found[keyword[1]], at = value
        comma = _COMMA.match(text, at, end)
        if comma is None and not _CLOSING.match(text, at, end):
            return None
        at = comma.end() if comma else at
    written = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in found.items())
    return f"{{{written}}}", close.end()


def _python_value(text: str, at: int, end: int) -> tuple[str, int] | None:
    """A value as JSON, and the place behind it: one that is JSON already, or Python's own."""
    scanner = JsonScanner()
    stop = scanner.feed(text, at)  # a value that goes on behind `end` has no comma or bracket before it
    if scanner.done and _BEHIND.match(text, stop, end):
        return scanner.text.strip(), stop
    behind = _behind(text, at, min(end, at + MAX_LITERAL))
    if behind is not None and (written := literal(text[at:behind].strip())) is not None:
        return written, behind
    return None


def _behind(text: str, at: int, end: int) -> int | None:
    """Where a value ends: at the first comma or bracket that is in no text of it and in no brackets of its own."""
    depth, quote = 0, ""
    for found in _MARKS.finditer(text, at, end):
        one = found.group()
        if quote:
            quote = "" if one == quote else quote
        elif one in "'\"":
            quote = one
        elif one in "([{":
            depth += 1
        elif not depth and one in ",)":
            return found.start()
        elif one in ")]}":
            depth -= 1
    return None


def literal(text: str) -> str | None:
    """A value in Python's syntax as JSON, raw line breaks in its texts included; None if it is none."""
    if len(text) > MAX_LITERAL:
        return None
    for tried in (text, text.replace("\n", "\\n")) if "\n" in text else (text,):
        try:
            with warnings.catch_warnings(action="ignore"):
                value = ast.literal_eval(tried)
            written = json.dumps(value, ensure_ascii=False, allow_nan=False)
            return written if valid_text(written) == written else json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return None
