"""The call format that a model declares itself: `response_template` in its tokenizer_config.json.

It names the fields of an answer, their opening and closing texts and their parsers; `tool_calls` becomes a
`CallFormat`. Its patterns are never run: they are split into texts and group names. A pattern of another shape is not
understood, and the format is then taken from elsewhere. Version 1 is supported: json, xml-inline, text after a name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from cairn.text.output.call_formats import BY_NAME, CONTROL, CallFormat

_FIELD = "tool_calls"
_GROUP = re.compile(r"\(\?P<(\w{1,32})>")
_BLANK = re.compile(r"(?:\\s|\\n|\n)[*+?]?\??")
_PLAIN = re.compile(r"[^\\.^$*+?{}\[\]()|]")
_ESCAPED = re.compile(r"\\([^\w])")
_PLACE = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_OPEN_TAG = re.compile(r"<(\w+)[= ][^<>]*\{name\}[^<>]*>")
MOST = 512
"""Most characters of a pattern."""


class _Unknown(Exception):
    """The declaration has an unsupported shape."""


class _Names(NamedTuple):
    """The sources of a call's name and arguments, in the terms of `transform`."""

    name: str
    arguments: str


def declared_form(template: Any, ends: Collection[str] = ()) -> CallFormat | None:
    """Return the format that a response template declares; None if it declares none or an unsupported one.

    `ends` are the texts of the tokens that end an answer.
    """
    fields = template.get("fields") if isinstance(template, Mapping) and template.get("version", 1) == 1 else None
    field = fields.get(_FIELD) if isinstance(fields, Mapping) else None
    if not isinstance(field, Mapping):
        return None
    try:
        return _form_of(field, ends)
    except _Unknown:
        return None


def _form_of(field: Mapping[str, Any], ends: Collection[str]) -> CallFormat:
    opened = _pieces(field)
    if any("<|channel|>" in piece for piece in opened):
        return BY_NAME["harmony"]
    names, end = _names(field), _close(field, ends)
    several: dict[str, Any] = {"end": end, "single": bool(end) and field.get("repeats") is True}
    arguments = field.get("content_args") or {}
    if not isinstance(arguments, Mapping):
        raise _Unknown
    content = field.get("content", "text")
    if "{name}" not in opened:
        if content != "json" or len(opened) != 1 or arguments:
            raise _Unknown
        return _object(opened[0], names, several, each=field.get("transform_each") is True)
    if names != _Names("name", "content"):
        raise _Unknown
    before, _, behind = "".join(opened).partition("{name}")
    begin, head = _begin(before)
    if not end:
        several["joint"] = begin
    if content == "xml-inline":
        return _tagged(begin, head + "{name}" + behind, several, arguments)
    if content != "json":
        raise _Unknown
    if arguments.get("string_delims") or arguments.get("unquoted_keys"):
        return _braces(begin, head + "{name}" + behind, several, arguments)
    return CallFormat(name="declared", signs=(), kind="named", begin=begin, open=head + "{name}" + behind, **several)


def _object(begin: str, names: _Names, several: Mapping[str, Any], *, each: bool) -> CallFormat:
    """Build the format of calls that are JSON objects; `each`: in a list."""
    name, arguments = names
    if names == _Names("content", "content"):
        name, arguments = "name", "arguments"
    elif not each:
        if not (name.startswith("content.") and arguments.startswith("content.")):
            raise _Unknown
        name, arguments = name.removeprefix("content."), arguments.removeprefix("content.")
    if "." in name or "." in arguments:
        raise _Unknown
    shape: dict[str, Any] = {**several, "single": False, "joint": ", "} if each else {**several}
    return CallFormat(
        name="declared",
        signs=(),
        kind="object",
        begin=begin,
        head=f'"{name}": ',
        arguments=arguments,
        listed=each,
        **shape,
    )


def _tagged(begin: str, open: str, several: Mapping[str, Any], arguments: Mapping[str, Any]) -> CallFormat:
    """Build the format of arguments between tags, from the pattern of one argument."""
    pieces = _taken_apart(arguments.get("tag_pattern"))
    if [piece for piece in pieces if _PLACE.fullmatch(piece)] != ["{key}", "{value}"]:
        raise _Unknown
    before, _, rest = "".join(pieces).partition("{key}")
    middle, _, after = rest.partition("{value}")
    if not before.strip() or not after.strip():
        raise _Unknown
    tag = _OPEN_TAG.search(open)  # its closing tag is not declared
    close = f"</{tag[1]}>\n" if tag is not None and f"</{tag[1]}>" not in several["end"] else ""
    return CallFormat(
        name="declared",
        signs=(),
        kind="tagged",
        begin=begin,
        open=open,
        key=(before, middle),
        value_end=after + "\n",
        close=close,
        **several,
    )


def _braces(begin: str, open: str, several: Mapping[str, Any], arguments: Mapping[str, Any]) -> CallFormat:
    """Build the format of arguments in braces, with marks around texts."""
    match arguments.get("string_delims"):
        case [[str() as one, str() as other]] if one == other and one and several["end"]:
            return CallFormat(
                name="declared", signs=(), kind="braces", begin=begin, open=open, value_end=one, **several
            )
    raise _Unknown


def _names(field: Mapping[str, Any]) -> _Names:
    """Return the sources of a call's name and arguments."""
    made = field.get("transform", "{content}")
    made = made.get("function", made) if isinstance(made, Mapping) else made
    if made == "{content}":
        return _Names("content", "content")
    match made:
        case {"name": str() as name, "arguments": str() as arguments}:
            found = _PLACE.fullmatch(name), _PLACE.fullmatch(arguments)
            if found[0] and found[1]:
                return _Names(found[0][1], found[1][1])
    raise _Unknown


def _close(field: Mapping[str, Any], ends: Collection[str]) -> str:
    """Return the text that ends a call; "" if only the end of the answer does."""
    if "close_pattern" in field:
        given: Any = ["".join(_taken_apart(field["close_pattern"])).strip()]
    else:
        given = field.get("close", [])
        given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise _Unknown
    found = [one for one in given if one.strip() and one.strip() not in ends]
    if len(found) > 1 or any(_PLACE.search(one) for one in found):
        raise _Unknown
    return found[0] if found else ""


def _pieces(field: Mapping[str, Any]) -> list[str]:
    """Return the texts that open a call, with {name} in place of its name."""
    if "open_pattern" in field:
        pieces = _taken_apart(field["open_pattern"], loose="<|channel|>")
    else:
        given = field.get("open")
        given = given if isinstance(given, list) else [given]
        if len(given) != 1 or not isinstance(given[0], str) or not given[0].strip():
            raise _Unknown
        pieces = given
    groups = [piece for piece in pieces if _PLACE.fullmatch(piece)]
    if groups not in ([], ["{name}"]) or (groups and pieces[0] == "{name}"):
        raise _Unknown
    return pieces


def _begin(text: str) -> tuple[str, str]:
    """Split an opening text into the mark of a section and the text before a call's name."""
    found = CONTROL.match(text)
    return (text[: found.end()], text[found.end() :]) if found else (text, "")


def _taken_apart(pattern: Any, loose: str = "") -> list[str]:
    """Split a pattern into texts and {names} of its groups; optional white space becomes a line break.

    If the pattern holds `loose`, the result is `loose` alone. Raises _Unknown for other constructs.
    """
    if not isinstance(pattern, str) or len(pattern) > MOST:
        raise _Unknown
    if loose and loose in re.sub(r"\\(\W)", r"\1", pattern):
        return [loose]
    pieces: list[str] = [""]
    at = 0
    while at < len(pattern):
        if group := _GROUP.match(pattern, at):
            at = _closing(pattern, group.end())
            pieces += ["{" + group[1] + "}", ""]
        elif blank := _BLANK.match(pattern, at):
            at = blank.end()
            pieces[-1] += "\n"
        elif escaped := _ESCAPED.match(pattern, at):
            at = escaped.end()
            pieces[-1] += escaped[1]
        elif _PLAIN.match(pattern, at):
            pieces[-1] += pattern[at]
            at += 1
        else:
            raise _Unknown
    return [piece for piece in pieces if piece]


def _closing(pattern: str, at: int) -> int:
    """Return the index after the bracket that closes a group; raise _Unknown if it holds another group."""
    listed = False
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[" or (pattern[at] == "]" and listed):
            listed = not listed
        elif pattern[at] == "(" and not listed:
            raise _Unknown
        elif pattern[at] == ")" and not listed:
            return at + 1
        at += 1
    raise _Unknown
