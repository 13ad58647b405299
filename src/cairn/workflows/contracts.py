"""Handoff contracts: JSON schemas that answers are held to by grammar, and checked against when they are there.

A contract is written in a part of JSON Schema, the same for every producer and consumer, so that what a consumer reads
can be looked up in it before anything runs. Other keywords are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from cairn.types.errors import InvalidRequest
from cairn.workflows.definition import MAX_NAME, MAX_NAMES, MAX_VALUES
from cairn.workflows.paths import index_of, key_of, same

TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "null": lambda value: value is None,
}
KEYWORDS = frozenset(
    {
        "type",
        "title",
        "description",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "minItems",
        "maxItems",
        "enum",
        "const",
        "minLength",
        "maxLength",
        "minimum",
        "maximum",
        "default",
    }
)
MAX_DEPTH = 16
"""Contracts within each other."""
MAX_SHOWN = 2_000
"""Characters of the values that a breach tells of."""
TEXT: Mapping[str, Any] = {"type": "string"}
"""The contract of a node that has none."""


class Breach(Exception):
    """An answer breaks its contract; the message says where and how."""


def check_contract(schema: Any, field: str, depth: int = 0) -> None:
    """Raise InvalidRequest, naming the field, if the schema is not a valid contract."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        raise InvalidRequest(f"{field} must be a JSON schema, an object, at most {MAX_DEPTH} deep", field=field)
    unknown = sorted(str(name)[:64] for name in schema.keys() - KEYWORDS)
    if unknown:
        raise InvalidRequest(
            f"{field}: a contract has no {unknown[0]}; it may use {', '.join(sorted(KEYWORDS))}", field=field
        )
    _check_shapes(schema, field)
    kind = schema.get("type")
    if kind is None and not {"enum", "const"} & schema.keys():
        raise InvalidRequest(f"{field}.type is missing", field=field)
    if kind == "object" and not schema.get("properties"):
        raise InvalidRequest(f"{field}.properties is missing: a contract names its fields", field=field)
    for name in schema.get("required", ()):
        if name not in schema.get("properties", {}):
            raise InvalidRequest(f"{field}.required names {name[:64]}, which is no property", field=field)
    for name, inner in schema.get("properties", {}).items():
        check_contract(inner, f"{field}.{name}", depth + 1)
    if kind == "array" or "items" in schema:
        check_contract(schema.get("items"), f"{field}.items", depth + 1)


def _check_shapes(schema: Mapping[str, Any], field: str) -> None:
    """Raise InvalidRequest for a keyword with a value of the wrong type."""
    for keyword, (fits, what) in _SHAPES.items():
        if keyword in schema and not fits(schema[keyword]):
            raise InvalidRequest(f"{field}.{keyword} must be {what}", field=f"{field}.{keyword}")
    for low, high in (("minItems", "maxItems"), ("minLength", "maxLength"), ("minimum", "maximum")):
        if low in schema and high in schema and schema[low] > schema[high]:
            raise InvalidRequest(f"{field}.{low} is above {field}.{high}, so that nothing fits", field=f"{field}.{low}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1 << 31 and value == int(value)


def _are_names(value: Any) -> bool:
    return len(value) <= MAX_NAMES and all(isinstance(name, str) and len(name) <= MAX_NAME for name in value)


_SIZE = (_is_size, "a whole number from 0 to 2147483647")
_NUMBER = (_is_number, "a number")
_WORDS = (lambda value: isinstance(value, str), "a text")
_SHAPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "type": (lambda value: isinstance(value, str) and value in TYPES, f"one of {', '.join(TYPES)}"),
    "title": _WORDS,
    "description": _WORDS,
    "properties": (
        lambda value: isinstance(value, Mapping) and _are_names(value),
        f"an object of at most {MAX_NAMES} fields with names of at most {MAX_NAME} characters",
    ),
    "required": (
        lambda value: isinstance(value, list) and _are_names(value),
        f"a list of at most {MAX_NAMES} names of fields",
    ),
    "additionalProperties": (lambda value: value is False, "false: a contract names its fields"),
    "enum": (
        lambda value: isinstance(value, list) and 1 <= len(value) <= MAX_VALUES,
        f"a list of 1 to {MAX_VALUES} values",
    ),
    "minItems": _SIZE,
    "maxItems": _SIZE,
    "minLength": _SIZE,
    "maxLength": _SIZE,
    "minimum": _NUMBER,
    "maximum": _NUMBER,
}
"""Check and description of each keyword's value; `const` and `default` may be anything, `items` is a contract."""


def at(schema: Mapping[str, Any], parts: Sequence[str]) -> Mapping[str, Any] | None:
    """Return the contract of the value at a path; None if the contract has nothing there."""
    for part in parts:
        if part in schema.get("properties", {}):
            schema = schema["properties"][part]
        elif "items" in schema and index_of(part) is not None:
            schema = schema["items"]
        else:
            return None
    return schema


def kind_of(schema: Mapping[str, Any]) -> str:
    """Return the type that a contract names, or that its `const` or first `enum` value has."""
    if "type" in schema:
        return str(schema["type"])
    value = schema["const"] if "const" in schema else schema["enum"][0]
    return next(name for name, fits in TYPES.items() if fits(value))


def grammar_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema that the grammar enforces: objects are closed, so that every answer ends."""
    found = {name: value for name, value in schema.items() if name not in ("title", "default")}
    if "properties" in found:
        found["properties"] = {name: grammar_schema(inner) for name, inner in found["properties"].items()}
        found["additionalProperties"] = False
    if "items" in found:
        found["items"] = grammar_schema(schema["items"])
    return found


def read_answer(schema: Mapping[str, Any] | None, text: str, finish_reason: str) -> Any:
    """Return the value of an answer, its text if there is no contract. Raise Breach if it does not fit."""
    if schema is None:
        return text.strip()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        cut = " (it was cut at max_tokens)" if finish_reason == "length" else ""
        raise Breach(f"the answer is no JSON{cut}") from None
    check_value(schema, value, "the answer")
    return value


def check_value(schema: Mapping[str, Any], value: Any, where: str) -> None:
    """Raise Breach if a value does not fit; `where` names it in the message."""
    ValueChecker().check(schema, value, where)


class ValueChecker:
    """Checks values against contracts; each `enum` is hashed once, so that many values can be looked up in it."""

    def __init__(self) -> None:
        self._listed: dict[int, frozenset[Hashable]] = {}
        """Hashed `enum` values by the id of the list, which the contract keeps alive."""

    def fits(self, schema: Mapping[str, Any], value: Any) -> bool:
        """Return whether a value fits."""
        try:
            self.check(schema, value, "value")
        except Breach:
            return False
        return True

    def check(self, schema: Mapping[str, Any], value: Any, where: str) -> None:
        """Raise Breach if a value does not fit; `where` names it in the message."""
        kind = schema.get("type")
        if kind is not None and not TYPES[kind](value):
            raise Breach(f"{where} must be of type {kind}")
        if "enum" in schema and key_of(value) not in self._keys(schema["enum"]):
            raise Breach(f"{where} must be one of {_shown(schema['enum'])}")
        if "const" in schema and not same(value, schema["const"]):
            raise Breach(f"{where} must be {_shown(schema['const'])}")
        if isinstance(value, dict):
            if "properties" in schema:
                self._check_object(schema, value, where)
        elif isinstance(value, list):
            _check_bounds(schema, len(value), "Items", where, "items")
            for index, item in enumerate(value if "items" in schema else ()):
                self.check(schema["items"], item, f"{where}.{index}")
        elif isinstance(value, str):
            _check_bounds(schema, len(value), "Length", where, "characters")
        elif not isinstance(value, bool) and value is not None:
            _check_range(schema, value, where)

    def _check_object(self, schema: Mapping[str, Any], value: Mapping[str, Any], where: str) -> None:
        properties = schema["properties"]
        for name in schema.get("required", ()):
            if name not in value:
                raise Breach(f"{where} has no {name}")
        for name, inner in value.items():
            if name not in properties:
                raise Breach(f"{where} has a field {name[:64]} that the contract does not know")
            self.check(properties[name], inner, f"{where}.{name}")

    def _keys(self, listed: Sequence[Any]) -> frozenset[Hashable]:
        if (keys := self._listed.get(id(listed))) is None:
            keys = self._listed[id(listed)] = frozenset(map(key_of, listed))
        return keys


def _shown(value: Any) -> str:
    """Return a value as JSON, cut at MAX_SHOWN: the message goes into the next prompt."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + " ..."


def _check_bounds(schema: Mapping[str, Any], size: int, name: str, where: str, what: str) -> None:
    if size < schema.get(f"min{name}", 0) or size > schema.get(f"max{name}", size):
        least, most = schema.get(f"min{name}", 0), schema.get(f"max{name}", "any number of")
        raise Breach(f"{where} must have {least} to {most} {what}; it has {size}")


def _check_range(schema: Mapping[str, Any], value: float, where: str) -> None:
    if value < schema.get("minimum", value) or value > schema.get("maximum", value):
        raise Breach(f"{where} must be {schema.get('minimum', 'any')} to {schema.get('maximum', 'any')}")
