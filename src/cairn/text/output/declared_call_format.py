"""How a model writes calls, as it declares it itself: `response_template` in its tokenizer_config.json.

That names the fields of an answer, what opens and closes each and how it is read; of `tool_calls` a `CallFormat` is
made. Its patterns are never run: they are taken apart into texts and names, and what has another shape is not
understood, so that the form is looked for elsewhere. Version 1 is known: json, xml-inline and text that a name opens.
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
"""Characters of a pattern."""


class _Unknown(Exception):
    """This is not understood."""


class _Names(NamedTuple):
    """Where the name and the arguments of a call come from, in words of `transform`."""

    name: str
    arguments: str


def declared_form(template: Any, ends: Collection[str] = ()) -> CallFormat | None:
    """The form that a response template declares; None where it declares none, or none that is understood.

    `ends`: the texts of the tokens that end an answer.
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
    """A call that holds its name. `each`: it is one of a list."""
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
    """Arguments between tags, as the pattern of one argument says."""
    pieces = _taken_apart(arguments.get("tag_pattern"))
    if [piece for piece in pieces if _PLACE.fullmatch(piece)] != ["{key}", "{value}"]:
        raise _Unknown
    before, _, rest = "".join(pieces).partition("{key}")
    middle, _, after = rest.partition("{value}")
    if not before.strip() or not after.strip():
        raise _Unknown
    tag = _OPEN_TAG.search(open)  # what closes it is no field of its own, and is not declared
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
    """Arguments in braces, with marks around texts."""
    match arguments.get("string_delims"):
        case [[str() as one, str() as other]] if one == other and one and several["end"]:
            return CallFormat(
                name="declared", signs=(), kind="braces", begin=begin, open=open, value_end=one, **several
            )
    raise _Unknown


def _names(field: Mapping[str, Any]) -> _Names:
    """Where the parts of a call come from."""
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
    """What ends a call; "" where the answer's end does."""
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
    """What opens a call: texts, and {name} where its name stands."""
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
    """What begins a section, and what of a call stands behind that before its name."""
    found = CONTROL.match(text)
    return (text[: found.end()], text[found.end() :]) if found else (text, "")


def _taken_apart(pattern: Any, loose: str = "") -> list[str]:
    """A pattern as texts and {names} of its groups. White space that may stand between two texts is a line break.

    `loose`: where this stands in it, all else that it says is passed over.
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
    """Behind the bracket that closes a group, which has no other group in it."""
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
