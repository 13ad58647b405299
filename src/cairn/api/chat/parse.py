"""From a JSON object to a request body: fields under other names, those that are accepted without effect, those whose
meaning is not built, what is too long to be looked at, and the sentence for what has the wrong shape."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, TypeVar

from pydantic import ValidationError

from cairn.api.chat.fields import ROWS, FieldRow, asks_for_nothing
from cairn.api.chat.message_schemas import ChatMessage
from cairn.api.http.body import Body
from cairn.api.http.call import HTTPCall, shown
from cairn.config.config import Config
from cairn.config.option import closest
from cairn.frontend.sampling_extras import MAX_BIAS
from cairn.types.errors import InvalidRequest, Unsupported

LENIENT = b"x-cairn-lenient"
"""Header with which a request has its unknown fields told and passed over."""
MAX_METADATA = 16
"""How many pairs of metadata a request may have, as in the OpenAI API."""
MAX_ATTACHED = 2_000
"""How many files of one call may be put into a vector store, as in the OpenAI API."""
MAX_RESULTS = 128
"""How many results of tools one call may give to a team: of all members as many as they can call."""
SPARE_FIELDS = 16
"""Unknown fields of an object that are told by name."""
_UNIONS = frozenset({"content", "prompt", "stop", "samplers", "logit_bias", "input", "inputs", "text_1", "text_2"})
"""Fields of several shapes. Behind one's name stands the tag of the shape, which is no part of a field's name."""
_HIDDEN = "~"
"""First letter of these tags. A client's own field may begin so too, but stands nowhere behind such a name."""

B = TypeVar("B", bound=Body)


def parse(kind: type[B], value: dict[str, Any], config: Config, call: HTTPCall | None = None) -> B:
    """The body as a model; InvalidRequest or Unsupported names the field and what was expected.

    All of it is read on the event loop, so what is too long is refused unread, and of what is wrong the first is told.
    `call` may ask for unknown fields to be passed over, and is then told of them with its answer.
    """
    _check_lengths(value, config)
    reader = _Reader(call, lenient=config.lenient or (call is not None and call.header(LENIENT) in (b"1", b"true")))
    try:
        return kind.model_validate(reader.known(kind, value, ""))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _explain(first, reader.told) from None


class _Reader:
    """Leaves of an object what a body knows."""

    def __init__(self, call: HTTPCall | None, *, lenient: bool) -> None:
        self._call, self._lenient = call, lenient
        self._unknown: dict[str, tuple[type[Body], str, str]] = {}
        """Unknown fields by where they stand: the body that lacks each, the place of that, and the field's name. They
        are refused after all that is wrong of the known ones."""

    def told(self, field: str) -> str:
        """Return what is to be said of a field that is refused."""
        if field not in self._unknown:
            return f"{field} is not a known field"
        return _unknown_field(field, *self._unknown[field])

    def known(self, kind: type[Body], value: dict[str, Any], where: str) -> dict[str, Any]:
        """The fields that the body has, and those that are to be refused."""
        fields, rows = kind.model_fields, ROWS.get(kind.place, {})
        most = len(fields) + len(rows) + SPARE_FIELDS
        if len(value) > most:
            whole = where.rstrip(".") or "the request body"
            raise InvalidRequest(f"{whole} holds {len(value)} fields; the limit is {most}", field=where.rstrip("."))
        kept: dict[str, Any] = {}
        for name, item in _renamed(kind, value).items():
            if name in fields:
                if item is not None or fields[name].is_required():
                    inner = kind.within.get(name)
                    kept[name] = item if inner is None else self._within(inner, item, where + name)
            elif item is None:
                continue
            elif name in rows:
                _check_row(rows[name], where + name, item)
            elif not self._pass_over(kind, name, where):
                kept[name] = None
        return kept

    def _within(self, kind: type[Body], value: Any, where: str) -> Any:
        if isinstance(value, dict):
            return self.known(kind, value, where + ".")
        if not isinstance(value, list):
            return value
        return [
            self.known(kind, one, f"{where}[{index}].") if isinstance(one, dict) else one
            for index, one in enumerate(value)
        ]

    def _pass_over(self, kind: type[Body], name: str, where: str) -> bool:
        """Whether an unknown field is let through, which its sender is told."""
        field = where + shown(name)
        lenient = self._lenient or kind.lenient
        if not lenient:  # one of them is told of at most, so the near word is looked for then
            self._unknown[field] = kind, where, name
        elif self._call is not None and self._call.hears:
            self._call.warn(_unknown_field(field, kind, where, name, " and has no effect"))
        return lenient


def _unknown_field(field: str, kind: type[Body], where: str, name: str, more: str = "") -> str:
    near = closest(name, [*kind.model_fields, *kind.synonyms])
    what = "this route" if not where else "this object" if kind.place == "other" else f"a {kind.place}"
    return f"{field} is not a field of {what}{more}{near}"


def _renamed(kind: type[Body], value: dict[str, Any]) -> Mapping[str, Any]:
    """The object with every field under its own name."""
    if kind is ChatMessage and value.get("role") == "tool" and value.get("tool_call_id") is None:
        value = value | {"tool_call_id": value.get("id")}
    for name in value.keys() & kind.synonyms.keys():
        own = kind.synonyms[name]
        given = value[name] if value.get(own) is None else value[own]
        if value[name] not in (None, given):
            raise InvalidRequest(f"{own} and {name} mean the same; give one of them", field=name)
        value = {key: item for key, item in value.items() if key != name} | {own: given}
    return value


def _check_lengths(fields: dict[str, Any], config: Config) -> None:
    limits = {
        "messages": config.max_messages,
        "tools": config.max_tools,
        "logit_bias": MAX_BIAS,
        "metadata": MAX_METADATA,
        "attributes": MAX_METADATA,
        "file_ids": MAX_ATTACHED,
        "files": MAX_ATTACHED,
        "results": MAX_RESULTS,
    }
    filters = fields.get("filters")
    if isinstance(filters, dict):
        fields = fields | {"filters.metadata": filters.get("metadata")}
        limits["filters.metadata"] = MAX_METADATA
    for name, most in limits.items():
        given = fields.get(name)
        if isinstance(given, list | dict) and len(given) > most:
            what = "entries" if isinstance(given, dict) else name
            raise InvalidRequest(f"{name} holds {len(given)} {what}; the limit is {most}", field=name)


def _check_row(row: FieldRow, field: str, value: Any) -> None:
    """Unsupported where a field asks for something that is not built."""
    if not asks_for_nothing(row, value):
        allowed = " or ".join([*(json.dumps(one) for one in row.values or ()), "absent"])
        raise Unsupported(f"{field} can only be {allowed}: {row.why}", field=field)


_ONLY: Mapping[str, str] = {
    "content": "images, sound and files are not read here",
    "tools": "custom tools, and those that run on a server, are not built",
    "tool_calls": "calls of other tools are not built",
}
"""Why the objects in a list have one type, by the list's name."""
_SHAPES: Mapping[str, str] = {
    "string_type": "a text",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "dict_type": "an object",
    "model_type": "an object",
    "list_type": "a list",
    "string_pattern_mismatch": "1 to 128 letters, digits, '_', '-' and '.'",
}
"""What was expected, by the kind of an error."""


def _explain(error: Any, unknown: Callable[[str], str]) -> InvalidRequest:
    """The sentence for an error of the validator. It says nothing of the value but what kind it is."""
    kind, loc, field = error["type"], error["loc"], ""
    for before, part in pairwise(("", *loc)):
        if isinstance(part, int):
            field += f"[{part}]"
        elif before not in _UNIONS or not part.startswith(_HIDDEN):
            field += ("." if field else "") + shown(part)
    if kind == "missing":
        return InvalidRequest(f"{field} is missing", field=field)
    if kind == "extra_forbidden":
        return InvalidRequest(unknown(field), field=field)
    if kind == "too_short":
        return InvalidRequest(f"{field} is empty; it must hold at least one", field=field)
    if kind == "literal_error":
        wanted = error["ctx"]["expected"]
        if loc[-1] == "type":
            listed = next((part for part in reversed(loc) if part in _ONLY), "")
            return Unsupported(f"{field} can only be {wanted}: {_ONLY.get(listed, 'there are no others')}", field=field)
        return InvalidRequest(f"{field} must be {wanted}", field=field)
    if kind in _SHAPES:
        return InvalidRequest(f"{field} must be {_SHAPES[kind]}{_is(error['input'])}", field=field)
    return InvalidRequest(f"{field} {error['msg']}", field=field)


def _is(value: Any) -> str:
    kinds: dict[type, str] = {bool: "true or false", dict: "an object", list: "a list", type(None): "null"}
    kinds |= {int: "a whole number", float: "a number with a fraction", str: "a text"}
    return f"; it is {kinds[type(value)]}" if type(value) in kinds else ""
