"""Pieces of llguidance's Lark: literals, schemas and bounded white space."""

from __future__ import annotations

import json
from typing import Any

MAX_GRAMMAR = 1 << 20
"""Most characters of a grammar made from a client's constraints."""
BLANKS = r"[\x20\x0A\x0D\x09]{1,40}"
"""White space between two parts of JSON. It is bounded, because some models would write nothing else for ever."""


def literal(text: str) -> str:
    """Return a text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def with_blanks(schema: Any) -> Any:
    """Return a schema that bounds the white space of its JSON."""
    if not isinstance(schema, dict):
        return schema if schema is not True else {"x-guidance": {"whitespace_pattern": BLANKS}}
    return {**schema, "x-guidance": {"whitespace_pattern": BLANKS}}


def json_part(schema: Any) -> str:
    """Return a schema as a Lark expression."""
    return f"%json {json.dumps(with_blanks(schema), ensure_ascii=False)}"
