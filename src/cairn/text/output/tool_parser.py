"""Tool calls in the text of a model:

    <tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>

A text is a call if it is a JSON object with a `name` (not empty) and `arguments` (an object, or a text that holds one;
also called `parameters`), or with a `name` alone. JSON is read leniently (`json_scan`). Before the closing tag one or
two braces may be missing, at the end of an answer that the model ended itself one; extra braces are ignored. Several
objects may be between two tags.

Functions as XML are read too, in the same tags, for templates that teach them:

    <tool_call>
    <function=f>
    <parameter=x>
    1
    </parameter>
    </function>
    </tool_call>

If its tool was offered, a call is streamed once its arguments have begun (`begun_calls`). Other calls come whole or not
at all, and text that is not a call is content, complete and unchanged.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cairn.text.output.argument_fit import names_in, shape_of
from cairn.text.output.begun_calls import OWN_ID
from cairn.text.output.json_scan import JsonScanner
from cairn.text.output.references import followed
from cairn.text.output.tagged_values import MAX_NAME, ValueScanner, ValueTags
from cairn.text.tokens.tokenizer import valid_text
from cairn.types.outputs import ToolCallDelta
from cairn.types.request import OfferedTool

Content = tuple[str, str]
"""("text" or "reasoning", characters)."""
Piece = Content | ToolCallDelta

PUSHED = 1_024
"""Characters that a splitter takes at once: it copies the text after a tag, so long texts are split into pieces."""


OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION = "<function="

BLANK = re.compile(r"\s*+")
XML_NAME = re.compile(rf"<function=([^<>\n]{{1,{MAX_NAME}}}+)>")
XML_KEY = re.compile(rf"<parameter=([^<>\n]{{1,{MAX_NAME}}}+)>")
XML_CLOSE = "</function>"
XML_LONGEST = len("<parameter=>") + MAX_NAME
"""Characters of the longest tag before a value."""
XML_TAGS = ValueTags("</parameter>", ("<parameter=", ">"), "</function>", "", (FUNCTION,))

_JSON_COMMA = re.compile(r"\s*+(,)?\s*+")
_EITHER = ({"arguments", "parameters"}, {"name", "tool_name"})
"""Pairs of member names of which a call may have only one."""
_WITHOUT = frozenset({"name", "id", "type", "tool_name", "tool_call_id"})
"""Member names of a call without arguments."""


class ParsedCall(NamedTuple):
    """A parsed call; `arguments` is the JSON text of an object."""

    name: str
    arguments: str
    id: str = ""
    """The id or number that the model wrote into the call: letters and digits, "" in formats without one."""
    broken: bool = False
    """Whether the arguments are not valid JSON and kept as they were written."""


_ID_SIZE = 24
_WRITTEN_ID = re.compile(r"call_[0-9a-f]{8,24}z([0-9A-Za-z]{1,15})")


def call_id(request: int, choice: int, index: int, own: str = "") -> str:
    """Return the id of a call; it is the same whenever the same generation is parsed again.

    `own` is the id that the model wrote. It is appended after the letter z, which is not a hexadecimal digit, so that
    the template can get a result under the id in the sampled answer (`written_id`).
    """
    digest = hashlib.sha256(f"tool call {request} {choice} {index}".encode()).hexdigest()
    if not 0 < len(own) < 16:
        return f"call_{digest[:_ID_SIZE]}"
    return f"call_{digest[: _ID_SIZE - 1 - len(own)]}z{own}"


def written_id(id: str) -> str:
    """Return the model's own id of a call from an id made by `call_id`; "" if it wrote none."""
    found = _WRITTEN_ID.fullmatch(id)
    return found[1] if found else ""


def offered_tools(tools: Iterable[Any], *, xml: bool) -> tuple[OfferedTool, ...]:
    """Return what the parsers need to know of OpenAI's tools. Tools without a name are left out."""
    offered = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        parameters = function.get("parameters")
        named = followed(parameters) if xml else None
        properties = named.get("properties") if isinstance(named, Mapping) else None
        known = properties.items() if xml and isinstance(properties, Mapping) else ()
        values = tuple(valid_text(key) for key, schema in known if not is_text(schema))
        offered.append(OfferedTool(valid_text(function["name"]), values, shape_of(parameters)))
    return tuple(offered)


def is_text(schema: Any) -> bool:
    """Return whether a parameter with this schema may be a text."""
    if not isinstance(schema, Mapping):
        return True
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        return "string" in ([kinds] if isinstance(kinds, str) else kinds)
    if "const" in schema:
        return isinstance(schema["const"], str)
    if isinstance(schema.get("enum"), list):
        return any(isinstance(one, str) for one in schema["enum"])
    choices = [one for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for one in schema[key]]
    if choices:
        return any(is_text(one) for one in choices)
    return not schema.keys() & {"$ref", "allOf", "properties", "items"}


def call_of(members: Sequence[tuple[str, str]]) -> ParsedCall | None:
    """Return the call that an object's members (key, JSON) describe; None if they describe none or are ambiguous."""
    given = dict(members)
    telling = [key for key, _ in members if key in ("name", "tool_name", "arguments", "parameters", "function")]
    if len(telling) != len(set(telling)) or any(pair <= set(telling) for pair in _EITHER):
        return None  # one of them twice
    if "name" not in given and given.get("function", "").startswith("{"):
        inner = JsonScanner()
        inner.feed(given["function"])
        return call_of(inner.members)
    name = json.loads(given.get("name", given.get("tool_name", "null")))
    if not isinstance(name, str) or not name:
        return None
    arguments = given.get("arguments", given.get("parameters"))
    own = OWN_ID.fullmatch(given.get("id", ""))
    id = own[1] if own else ""
    if arguments is None:
        return ParsedCall(valid_text(name), "{}", id) if given.keys() <= _WITHOUT else None
    if arguments.startswith('"'):
        arguments = whole_json(valid_text(json.loads(arguments)).strip() or "null")
    arguments = "{}" if arguments == "null" else arguments
    if arguments is None or not arguments.startswith("{"):
        return None
    return ParsedCall(valid_text(name), arguments, id)


def calls_in_json(text: str) -> list[ParsedCall] | None:
    """Return the calls in one object or a list of objects; None for any other text."""
    text = text.strip()
    listed = text.startswith("[") and text.endswith("]")
    text = text[1:-1].strip() if listed else text
    calls: list[ParsedCall] = []
    at = 0
    while at < len(text):
        scanner = JsonScanner()
        at = scanner.feed(text, at)
        call = call_of(scanner.members) if scanner.done else None
        if call is None:
            return None
        calls.append(call)
        behind = _JSON_COMMA.match(text, at)
        if behind is None or (behind.end() == len(text)) != (behind[1] is None) or not (listed or behind[1] is None):
            return None
        at = behind.end()
    return calls or None


def whole_json(text: str) -> str | None:
    """Return a text that is one JSON value as strict JSON; None for any other text."""
    scanner = JsonScanner()
    end = scanner.feed(text + " ")
    return scanner.text if scanner.done and end >= len(text) else None


def calls_in_xml(text: str, offered: Iterable[OfferedTool], *, mends: bool = True) -> list[ParsedCall] | None:
    """Return the calls in a text of `<function=...>` tags; None for any other text.

    `mends`: the closing tag of a parameter may be missing.
    """
    tools = {tool.name: tool for tool in offered}
    calls: list[ParsedCall] = []
    at = behind_blanks(text, 0)
    while found := XML_NAME.match(text, at):
        name, at = found[1].strip(), found.end()
        tool = tools.get(name, OfferedTool(name))
        known = known_names(tool)
        arguments: dict[str, str] = {}
        while key := XML_KEY.match(text, at := behind_blanks(text, at)):
            argument = key[1].strip()
            scanner = ValueScanner(XML_TAGS, key.end(), argument, known, arguments, mends=mends)
            end = scanner.find(text, whole=True)
            if end is None or argument in arguments:
                return None
            value, at = text[key.end() : end.end], end.behind
            if "</parameter>" in value and "<parameter=" in value:
                return None
            arguments[argument] = xml_value(value, is_text=argument not in tool.values)
        if not text.startswith(XML_CLOSE, at) or not name:
            return None
        at = behind_blanks(text, at + len(XML_CLOSE))
        calls.append(ParsedCall(name, joined(arguments)))
    return calls if calls and at == len(text) else None


def behind_blanks(text: str, at: int) -> int:
    """Return the index after the white space at text[at]."""
    found = BLANK.match(text, at)
    return found.end() if found else at


def known_names(tool: OfferedTool) -> frozenset[str]:
    """Return the argument names of a tool; empty if they are not known."""
    return names_in(tool.shape)


def joined(members: Mapping[str, str]) -> str:
    """Return a JSON object of members whose values are already JSON; lone surrogates in a key stay escapes."""
    keys = {key: json.dumps(key, ensure_ascii=valid_text(key) != key) for key in members}
    return "{" + ", ".join(f"{keys[key]}: {one}" for key, one in members.items()) + "}"


def xml_value(text: str, *, is_text: bool) -> str:
    """Return a parameter's value as JSON; a value that should be JSON and is not becomes a JSON text."""
    text = text.removeprefix("\n").removesuffix("\n")
    return (None if is_text else whole_json(text.strip())) or json.dumps(text, ensure_ascii=False)
