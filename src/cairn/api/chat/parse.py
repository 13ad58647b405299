"""Request bodies: a JSON object becomes a model of its route, or an error that names the field."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from pydantic import ValidationError

from cairn.api.chat.attachments import leave_out
from cairn.api.chat.fields import ROWS, FieldRow, asks_for_nothing
from cairn.api.http.body import Body, read_json
from cairn.api.http.call import HTTPCall, shown
from cairn.config.config import Config
from cairn.config.option import MAX_WORD, closest, slip_of
from cairn.frontend.sampling_extras import MAX_BIAS
from cairn.types.errors import InvalidRequest, Unsupported

LENIENT = b"x-cairn-lenient"
"""Header with which a request has its unknown fields ignored, with a warning."""
MAX_METADATA = 16
"""How many pairs of metadata a request may have, as in the OpenAI API."""
MAX_ATTACHED = 2_000
"""How many files of one call may be put into a vector store, as in the OpenAI API."""
MAX_RESULTS = 128
"""How many results of tools one call may give to a team: of all members as many as they can call."""
SPARE_FIELDS = 16
"""How many unknown fields of an object are named in warnings."""
MAX_UNKNOWN = 64
"""Different unknown fields of a body: each is compared with all known ones."""
_UNIONS = frozenset({"content", "prompt", "stop", "samplers", "logit_bias", "input", "inputs", "text_1", "text_2"})
"""Fields of several shapes. In a validator's location their name is followed by the tag of the shape."""
_HIDDEN = "~"
"""First letter of these tags. A client's own field may begin with it, but never follows such a name."""

B = TypeVar("B", bound=Body)


async def read(
    kind: type[B],
    call: HTTPCall,
    config: Config,
    body: Callable[[HTTPCall, Config], Awaitable[dict[str, Any]]] = read_json,
) -> B:
    """Read the body of a call. Images and files in its messages are replaced by texts (`attachments`)."""
    value = await body(call, config)
    await leave_out(call, kind, value, config)
    return parse(kind, value, config, call)


def parse(kind: type[B], value: dict[str, Any], config: Config, call: HTTPCall | None = None) -> B:
    """Return the body as a model; InvalidRequest or Unsupported names the field and what was expected.

    Everything is read on the event loop, so bodies that are too long are refused unread, and only the first error is
    reported. Unknown fields of chats are ignored with a warning to `call`, unless they look like a misspelt known field
    or the options refuse them; `call` may ask for misspelt ones to be ignored as well.
    """
    _check_lengths(value, config)
    lenient = config.lenient or (call is not None and call.header(LENIENT) in (b"1", b"true"))
    reader = _Reader(call, lenient=lenient, strict=config.strict_fields)
    try:
        return kind.model_validate(reader.known(kind, value, ""))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _explain(first, reader.unknown) from None


class _Reader:
    """Reduces an object to the fields that a body knows."""

    def __init__(self, call: HTTPCall | None, *, lenient: bool, strict: bool) -> None:
        self._call, self._lenient, self._strict = call, lenient, strict
        self._met: dict[tuple[type[Body], str], tuple[bool, str]] = {}
        """Verdicts of `_judge` on unknown fields, by kind: each is reported once."""
        self.unknown: dict[str, str] = {}
        """Messages on unknown fields, by place: they are reported after all errors of the known ones."""

    def known(self, kind: type[Body], value: dict[str, Any], where: str) -> dict[str, Any]:
        """Return the body's known fields, and the unknown ones to refuse."""
        fields, rows = kind.model_fields, ROWS.get(kind.place, {})
        most = len(fields) + len(rows) + SPARE_FIELDS
        if len(value) > most:
            whole = where.rstrip(".") or "the request body"
            raise InvalidRequest(f"{whole} holds {len(value)} fields; the limit is {most}", field=where.rstrip("."))
        kept: dict[str, Any] = {}
        try:
            renamed = _renamed(kind, value)
        except InvalidRequest as error:
            raise error.named(f"{where}{error}", f"{where}{error.field}") from None
        for name, item in renamed.items():
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
        """Return whether an unknown field is ignored; its sender is warned."""
        field, met = where + shown(name), (kind, name) in self._met
        what = "this route" if not where else "this object" if kind.place == "other" else f"a {kind.place}"
        passed, near = self._met[kind, name] if met else self._judge(kind, name)
        if not passed:
            self.unknown[field] = f"{field} is not a field of {what}{near}"
        elif not met and self._call is not None:
            self._call.warn(f"{field} is not a field of {what} and has no effect{near}")
        return passed

    def _judge(self, kind: type[Body], name: str) -> tuple[bool, str]:
        """Return whether a new unknown field is ignored, and a hint at the known field that it resembles."""
        if len(self._met) == MAX_UNKNOWN:
            raise InvalidRequest(f"the request body holds more than {MAX_UNKNOWN} different unknown fields, the limit")
        known = [*kind.model_fields, *kind.synonyms] if len(name) <= MAX_WORD else []
        passed = self._lenient or kind.lenient or self._is_unheard_of(kind, name, known)
        self._met[kind, name] = passed, closest(name, known)
        return self._met[kind, name]

    def _is_unheard_of(self, kind: type[Body], name: str, known: Sequence[str]) -> bool:
        """Return whether an unknown field resembles no known one, and may be ignored."""
        if self._strict or kind.place == "other":
            return False
        return not known or slip_of(name, [*known, *ROWS.get(kind.place, {})]) is None


def _renamed(kind: type[Body], value: dict[str, Any]) -> Mapping[str, Any]:
    """Return the object with synonyms renamed to the fields' own names."""
    value = kind.usual(value)
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
    """Raise Unsupported if a field asks for something that is not built."""
    if not asks_for_nothing(row, value):
        allowed = " or ".join([*(json.dumps(one) for one in row.values or ()), "absent"])
        raise Unsupported(f"{field} can only be {allowed}: {row.why}", field=field)


_ONLY: Mapping[str, str] = {
    "content": "other parts are not read here",
    "tools": "tools that run on a server are not built",
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
"""The expected shape, by kind of error."""


def _explain(error: Any, unknown: Mapping[str, str]) -> InvalidRequest:
    """Return the message for a validator's error. It names the kind of the value, never the value."""
    kind, loc, field = error["type"], error["loc"], ""
    for before, part in pairwise(("", *loc)):
        if isinstance(part, int):
            field += f"[{part}]"
        elif before not in _UNIONS or not part.startswith(_HIDDEN):
            field += ("." if field else "") + shown(part)
    if kind == "missing":
        return InvalidRequest(f"{field} is missing", field=field)
    if kind == "extra_forbidden":
        return InvalidRequest(unknown.get(field, f"{field} is not a known field"), field=field)
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
