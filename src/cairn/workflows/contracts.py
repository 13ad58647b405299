"""Handoff contracts: JSON schemas that answers are held to by grammar, and checked against when they are there.

A contract is written in a part of JSON Schema, the same for every producer and consumer, so that what a consumer reads
can be looked up in it before anything runs. Other keywords are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cairn.types.errors import InvalidRequest
from cairn.workflows.paths import same

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
TEXT: Mapping[str, Any] = {"type": "string"}
"""The contract of a node that has none."""


class Breach(Exception):
    """An answer that breaks its contract; the sentence says where and how."""


def check_contract(schema: Any, field: str, depth: int = 0) -> None:
    """InvalidRequest for what is no contract."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        raise InvalidRequest(f"{field} must be a JSON schema, an object, at most {MAX_DEPTH} deep", field=field)
    unknown = sorted(str(name) for name in schema.keys() - KEYWORDS)
    if unknown:
        raise InvalidRequest(
            f"{field}: a contract has no {unknown[0][:64]}; it may use {', '.join(sorted(KEYWORDS))}", field=field
        )
    kind = schema.get("type")
    if kind is None and not {"enum", "const"} & schema.keys():
        raise InvalidRequest(f"{field}.type is missing", field=field)
    if kind is not None and kind not in TYPES:
        raise InvalidRequest(f"{field}.type must be one of {', '.join(TYPES)}", field=field)
    properties = schema.get("properties", {})
    if kind == "object" and not properties:
        raise InvalidRequest(f"{field}.properties is missing: a contract names its fields", field=field)
    if not isinstance(properties, Mapping) or not isinstance(schema.get("enum", []), list):
        raise InvalidRequest(f"{field}: properties must be an object, and enum a list", field=field)
    required = schema.get("required", [])
    missing = [name for name in required if name not in properties] if isinstance(required, list) else [required]
    if missing:
        raise InvalidRequest(f"{field}.required names {str(missing[0])[:64]}, which is no property", field=field)
    if schema.get("additionalProperties", False) is not False:
        raise InvalidRequest(
            f"{field}.additionalProperties can only be false: a contract names its fields", field=field
        )
    for name, inner in properties.items():
        check_contract(inner, f"{field}.{name}", depth + 1)
    if kind == "array":
        check_contract(schema.get("items"), f"{field}.items", depth + 1)


def at(schema: Mapping[str, Any], parts: Sequence[str]) -> Mapping[str, Any] | None:
    """The contract of what stands at a path within a value; None where the contract has nothing there."""
    for part in parts:
        if part in schema.get("properties", {}):
            schema = schema["properties"][part]
        elif schema.get("type") == "array" and part.isascii() and part.isdigit():
            schema = schema["items"]
        else:
            return None
    return schema


def kind_of(schema: Mapping[str, Any]) -> str:
    """The type that a contract says, or that its only values have."""
    if "type" in schema:
        return str(schema["type"])
    value = schema["const"] if "const" in schema else schema["enum"][0] if schema["enum"] else None
    return next(name for name, fits in TYPES.items() if fits(value))


def grammar_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema that an answer is held to: what the contract leaves open is closed, so that an answer ends."""
    found = {name: value for name, value in schema.items() if name not in ("title", "default")}
    if "properties" in found:
        found["properties"] = {name: grammar_schema(inner) for name, inner in found["properties"].items()}
        found["additionalProperties"] = False
    if schema.get("type") == "array":
        found["items"] = grammar_schema(schema["items"])
    return found


def read_answer(schema: Mapping[str, Any] | None, text: str, finish_reason: str) -> Any:
    """The value of an answer. Breach where it does not fit the contract; without a contract it is the text."""
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
    """Breach where a value does not fit."""
    kind = schema.get("type")
    if kind is not None and not TYPES[kind](value):
        raise Breach(f"{where} must be of type {kind}")
    if "enum" in schema and not any(same(value, one) for one in schema["enum"]):
        raise Breach(f"{where} must be one of {json.dumps(schema['enum'], ensure_ascii=False)}")
    if "const" in schema and not same(value, schema["const"]):
        raise Breach(f"{where} must be {json.dumps(schema['const'], ensure_ascii=False)}")
    if isinstance(value, dict):
        _check_object(schema, value, where)
    elif isinstance(value, list):
        _check_bounds(schema, len(value), "Items", where, "items")
        for index, item in enumerate(value):
            check_value(schema["items"], item, f"{where}.{index}")
    elif isinstance(value, str):
        _check_bounds(schema, len(value), "Length", where, "characters")
    elif not isinstance(value, bool) and value is not None:
        _check_range(schema, value, where)


def _check_object(schema: Mapping[str, Any], value: Mapping[str, Any], where: str) -> None:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            raise Breach(f"{where} has no {name}")
    for name, inner in value.items():
        if name not in properties:
            raise Breach(f"{where} has a field {name[:64]} that the contract does not know")
        check_value(properties[name], inner, f"{where}.{name}")


def _check_bounds(schema: Mapping[str, Any], size: int, name: str, where: str, what: str) -> None:
    if size < schema.get(f"min{name}", 0) or size > schema.get(f"max{name}", size):
        least, most = schema.get(f"min{name}", 0), schema.get(f"max{name}", "any number of")
        raise Breach(f"{where} must have {least} to {most} {what}; it has {size}")


def _check_range(schema: Mapping[str, Any], value: float, where: str) -> None:
    if value < schema.get("minimum", value) or value > schema.get("maximum", value):
        raise Breach(f"{where} must be {schema.get('minimum', 'any')} to {schema.get('maximum', 'any')}")
