"""OpenAI's custom tools, whose input is one text. To the model each is a function with one argument.

A grammar for the input becomes a pattern of that argument if it can; otherwise the model only reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from cairn.text.grammar.lark_pattern import NotRegular, pattern_of
from cairn.types.errors import InvalidRequest

ARGUMENT = "input"


class FreeTextTool(NamedTuple):
    """A custom tool as a function."""

    function: dict[str, Any]
    why_not: str
    """Why its grammar is not enforced; empty if it is, or if there is none."""


def function_of(name: str, description: str | None, form: Any, where: str) -> FreeTextTool:
    """Return the function that a custom tool becomes.

    Raises InvalidRequest for an unknown `form`; `where` is its place in the body.
    """
    grammar, pattern, why_not = _grammar(form, where)
    text = {"type": "string", "description": "the whole input, as it is"}
    if pattern:
        text["pattern"] = f"^(?:{pattern})$"
    told = "\n".join(filter(None, [description, grammar and f"Its input has this grammar:\n{grammar}"]))
    parameters = {"type": "object", "properties": {ARGUMENT: text}, "required": [ARGUMENT]}
    function: dict[str, Any] = {"name": name, "description": told or None, "parameters": parameters}
    if pattern:
        function["strict"] = True
    return FreeTextTool(function, why_not)


def packed(text: str) -> str:
    """Return the arguments of a call with this input."""
    return json.dumps({ARGUMENT: text}, ensure_ascii=False)


def free_text(arguments: str) -> str:
    """Return the input in a call's arguments, or its beginning if the call was cut off.

    Arguments of any other form are returned as they are.
    """
    for end in ("", '"}'):
        try:
            found = json.loads(arguments + end)[ARGUMENT]
        except (ValueError, RecursionError, KeyError, TypeError):
            continue
        return found if isinstance(found, str) else arguments
    return arguments


def warning(where: str, why_not: str) -> str:
    """Return the warning for a grammar that cannot be enforced."""
    return f"{where}: the model reads this grammar and is not held to it: it {why_not}"


def _grammar(form: Any, where: str) -> tuple[str, str, str]:
    """Return a tool's input grammar, its pattern, and why there is none; empty texts if any input will do.

    The Responses API has `syntax` and `definition` in the format itself, chat completions in its `grammar`.
    """
    if form is None or (isinstance(form, dict) and form.get("type") == "text"):
        return "", "", ""
    if not isinstance(form, dict) or form.get("type") != "grammar":
        raise InvalidRequest(f"{where}.type must be text or grammar", field=f"{where}.type")
    if isinstance(inner := form.get("grammar"), Mapping):
        form, where = inner, f"{where}.grammar"
    syntax, definition = form.get("syntax"), form.get("definition")
    if syntax not in ("lark", "regex"):
        raise InvalidRequest(f"{where}.syntax must be lark or regex", field=f"{where}.syntax")
    if not isinstance(definition, str) or not definition:
        raise InvalidRequest(f"{where}.definition must be a text", field=f"{where}.definition")
    if syntax == "regex":
        return definition, definition, ""
    try:
        return definition, pattern_of(definition), ""
    except NotRegular as error:
        return definition, "", str(error)
