"""Calls and values in Python's syntax: `[f(x=1, y='a')]`, with keyword arguments only.

Values may also be JSON. Quoted texts may contain raw line breaks, and are read in one pass however long they are.
"""

from __future__ import annotations

import json
import math
import re

from cairn.text.output.json_scan import MAX_DEPTH, MAX_SCALAR
from cairn.text.output.tool_parser import ParsedCall, joined
from cairn.text.tokens.tokenizer import valid_text

_SPACE = re.compile(r"\s*+")
_KEYWORD = re.compile(r"""\s*+([^\s=,(){}\[\]'"]{1,128})\s*+=\s*+""")
_PYTHON_NAME = re.compile(r"\s*+([\w.-]{1,256})\s*+\(")
_QUOTE = re.compile(r"""[uUrRbB]{0,2}('''|\"\"\"|'|")""")
_BODIES = {
    quote: re.compile(rf"((?:[^\\{quote[0]}]|\\.|{quote[0]}(?!{quote[1:]})){{0,}}+){quote}" if len(quote) > 1
                      else rf"((?:[^\\{quote}]|\\.)*+){quote}", re.DOTALL)
    for quote in ("'", '"', "'''", '"""')
}  # fmt: skip
"""Quote -> pattern of the text up to and including the closing quote."""
_ESCAPE = re.compile(r"\\(\n|[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_PLAIN_ESCAPES = {
    **{"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a"},
    **{"\\": "\\", "'": "'", '"': '"', "\n": ""},
}
_SCALAR = re.compile(r"[-+.0-9A-Za-z_]{1,400}")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_PADDED = re.compile(r"[-+]?0[0-9_]")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


class NotPython(Exception):
    """The text is not a value or call in Python's syntax."""


def python_calls(text: str) -> list[ParsedCall] | None:
    """Return the calls of a list in Python's syntax, with keyword arguments only; None for any other text."""
    text = text.strip()
    if text[:1] == "[" and text[-1:] == "]":
        text = text[1:-1].rstrip()
    calls: list[ParsedCall] = []
    at = 0
    try:
        while at < len(text):
            call, at = call_at(text, at)
            calls.append(call)
            at = _skip(text, at)
            if at < len(text):
                at = _skip(text, _after(text, at, ","))
    except NotPython:
        return None
    return calls or None


def call_at(text: str, at: int) -> tuple[ParsedCall, int]:
    """Return the call that begins at text[at], and the index after it. Raises NotPython."""
    found = _PYTHON_NAME.match(text, at)
    if found is None:
        raise NotPython
    members: dict[str, str] = {}
    at = _skip(text, found.end())
    while not text.startswith(")", at):
        keyword = _KEYWORD.match(text, at)
        if keyword is None or keyword[1] in members:
            raise NotPython
        members[keyword[1]], at = value_at(text, keyword.end())
        at = _skip(text, at)
        if not text.startswith(")", at):
            at = _skip(text, _after(text, at, ","))
    return ParsedCall(found[1], joined(members)), at + 1


def literal(text: str) -> str | None:
    """Return a value in Python's syntax as JSON; None for any other text."""
    try:
        value, at = value_at(text, _skip(text, 0))
    except NotPython:
        return None
    return value if _skip(text, at) == len(text) else None


def value_at(text: str, at: int, depth: int = 0) -> tuple[str, int]:
    """Return the value that begins at text[at] as JSON, and the index after it. Raises NotPython."""
    if depth > MAX_DEPTH:
        raise NotPython
    first = text[at : at + 1]
    if first == "{":
        return _mapping(text, at + 1, depth)
    if first in ("[", "("):
        return _sequence(text, at + 1, "]" if first == "[" else ")", depth)
    if _QUOTE.match(text, at):
        return text_at(text, at)
    return _scalar(text, at)


def text_at(text: str, at: int) -> tuple[str, int]:
    """Return the quoted text that begins at text[at] as JSON, and the index after it. Raises NotPython."""
    parts: list[str] = []
    end = at
    while (opened := _QUOTE.match(text, end)) is not None:
        body = _BODIES[opened[1]].match(text, opened.end())
        if body is None:
            raise NotPython
        raw = opened.group()[: -len(opened[1])].lower()
        parts.append(_unescaped(body[1], double=opened[1] == '"', raw="r" in raw))
        end = body.end()
        following = _skip(text, end)  # adjacent texts are concatenated
        if _QUOTE.match(text, following) is None:
            break
        end = following
    said = "".join(parts)
    return json.dumps(said, ensure_ascii=valid_text(said) != said), end  # a lone surrogate stays an escape


def _unescaped(body: str, *, double: bool, raw: bool) -> str:
    if raw or "\\" not in body:
        return body
    if double:
        try:
            found = json.loads(f'"{body}"', strict=False)
            return found if isinstance(found, str) else body
        except ValueError:
            pass
    return _ESCAPE.sub(_escape, body)


def _escape(found: re.Match[str]) -> str:
    """Return the character of an escape; an escape unknown to Python is returned unchanged."""
    said = found[1]
    if said in _PLAIN_ESCAPES:
        return _PLAIN_ESCAPES[said]
    if said[0] in "01234567":
        return chr(int(said, 8))
    if len(said) > 1 and said[0] in "xuU" and (code := int(said[1:], 16)) <= 0x10FFFF:
        return chr(code)
    return "\\" + said


def _mapping(text: str, at: int, depth: int) -> tuple[str, int]:
    members: dict[str, str] = {}
    at = _skip(text, at)
    while not text.startswith("}", at):
        key, at = text_at(text, at)
        at = _skip(text, _after(text, _skip(text, at), ":"))
        members[json.loads(key)], at = value_at(text, at, depth + 1)
        at = _skip(text, at)
        if not text.startswith("}", at):
            at = _skip(text, _after(text, at, ","))
    return joined(members), at + 1


def _sequence(text: str, at: int, close: str, depth: int) -> tuple[str, int]:
    items: list[str] = []
    commas = 0
    at = _skip(text, at)
    while not text.startswith(close, at):
        item, at = value_at(text, at, depth + 1)
        items.append(item)
        at = _skip(text, at)
        if not text.startswith(close, at):
            at = _skip(text, _after(text, at, ","))
            commas += 1
    one = close == ")" and len(items) == 1 and not commas  # brackets around a value, not a tuple
    return items[0] if one else f"[{', '.join(items)}]", at + 1


def _scalar(text: str, at: int) -> tuple[str, int]:
    found = _SCALAR.match(text, at)
    if found is None or len(found.group()) >= MAX_SCALAR:
        raise NotPython
    said = found.group()
    return _WORDS[said] if said in _WORDS else _number(said), found.end()


def _number(said: str) -> str:
    if _JSON_NUMBER.fullmatch(said):
        return said
    if _PADDED.match(said):
        raise NotPython  # a code, not a number
    try:
        return str(int(said, 0))
    except ValueError:
        pass
    try:
        number = float(said)
    except ValueError:
        raise NotPython from None
    if not math.isfinite(number):
        raise NotPython
    return repr(number)


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _after(text: str, at: int, sign: str) -> int:
    if not text.startswith(sign, at):
        raise NotPython
    return at + len(sign)
