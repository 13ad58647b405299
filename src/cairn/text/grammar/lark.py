"""Pieces of Lark as llguidance reads it: literals, schemas, and white space that has an end."""

from __future__ import annotations

import json
from typing import Any

BLANKS = r"[\x20\x0A\x0D\x09]{1,40}"
"""White space between two parts of JSON: with no bound, models are known to write nothing else for ever."""


def literal(text: str) -> str:
    """Return a text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def with_blanks(schema: Any) -> Any:
    """Return a schema whose JSON has bounded white space."""
    if not isinstance(schema, dict):
        return schema if schema is not True else {"x-guidance": {"whitespace_pattern": BLANKS}}
    return {**schema, "x-guidance": {"whitespace_pattern": BLANKS}}


def json_part(schema: Any) -> str:
    """Return a schema as it stands in Lark."""
    return f"%json {json.dumps(with_blanks(schema), ensure_ascii=False)}"
