"""Check of a call's arguments against its tool's schema, for texts that may only look like calls.

A tool's schema is reduced to its shape: types, names and values, without descriptions. Anything that a shape does not
mention fits. Patterns are not run, so a check costs no more than reading the arguments.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import msgspec

MAX_SHAPE = 1024
"""Most characters of a shape; deeper levels of a larger schema are left out."""
MOST_SCHEMA = 1 << 18
"""Most bytes of a schema; with a longer one all arguments fit."""
MOST_KNOWN = 1 << 14
"""Most bytes of a schema whose shape is cached."""
_DEEPEST = 3
_BRANCHES = ("anyOf", "oneOf")
_OPENING = frozenset({"patternProperties", "unevaluatedProperties", "$ref", "anyOf", "oneOf", "allOf"})
"""Keywords that allow members beside those in `properties`."""
_encoder = msgspec.json.Encoder(enc_hook=str)


def shape_of(parameters: Any) -> str:
    """Return the shape of a tool's parameters as JSON; "" if anything fits."""
    if not isinstance(parameters, Mapping) or not parameters:
        return ""
    try:
        schema = _encoder.encode(parameters)
        if len(schema) > MOST_SCHEMA:
            return ""
        return _known_shape(schema) if len(schema) <= MOST_KNOWN else _shape_of(schema)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return ""


def _shape_of(parameters: bytes) -> str:
    schema = json.loads(parameters)
    for depth in range(_DEEPEST, -1, -1):
        shape = json.dumps(_pruned(schema, depth), ensure_ascii=False, separators=(",", ":"))
        if len(shape) <= MAX_SHAPE:
            return "" if shape == "{}" else shape
    return ""


@functools.lru_cache(maxsize=1024)
def _known_shape(parameters: bytes) -> str:
    return _shape_of(parameters)


def _pruned(schema: Any, depth: int) -> Any:
    """Return a schema without descriptions and without anything more than `depth` levels down."""
    if not isinstance(schema, Mapping):
        return schema is not False and {}
    kept = {key: schema[key] for key in ("type", "enum", "const", "required") if key in schema}
    if depth < 0:
        return {}
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        kept["properties"] = {key: _pruned(one, depth - 1) for key, one in properties.items()}
        if "additionalProperties" not in schema and not schema.keys() & _OPENING:
            kept["additionalProperties"] = False
    if "additionalProperties" in schema and not schema.keys() & _OPENING:
        kept["additionalProperties"] = _pruned(schema["additionalProperties"], depth - 1)
    if isinstance(schema.get("items"), Mapping):
        kept["items"] = _pruned(schema["items"], depth - 1)
    for key in _BRANCHES:
        if isinstance(schema.get(key), list):
            kept[key] = [_pruned(one, depth - 1) for one in schema[key]]
    return kept


@functools.lru_cache(maxsize=256)
def _read(shape: str) -> Any:
    return json.loads(shape) if shape else {}


def names_in(shape: str) -> frozenset[str]:
    """Return the argument names in a shape."""
    properties = _read(shape).get("properties")
    return frozenset(properties) if isinstance(properties, dict) else frozenset()


def fits(arguments: str, shape: str) -> bool:
    """Return whether a JSON object fits a shape."""
    if not shape:
        return True
    try:
        return _fits(json.loads(arguments), _read(shape))
    except (ValueError, RecursionError):
        return False


def _fits(value: Any, shape: Any) -> bool:
    if not isinstance(shape, dict):
        return shape is not False
    kinds = shape.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(kinds, list) and not any(_is_of(value, kind) for kind in kinds):
        return False
    if isinstance(shape.get("enum"), list) and not any(_same(value, one) for one in shape["enum"]):
        return False
    if "const" in shape and not _same(value, shape["const"]):
        return False
    if any(not any(_fits(value, one) for one in shape[key]) for key in _BRANCHES if key in shape):
        return False
    if isinstance(value, dict):
        return _object_fits(value, shape)
    return not isinstance(value, list) or all(_fits(one, shape.get("items", {})) for one in value)


def _object_fits(value: dict[str, Any], shape: dict[str, Any]) -> bool:
    known, others = shape.get("properties", {}), shape.get("additionalProperties", {})
    needed = shape.get("required")
    if isinstance(needed, list) and not all(key in value for key in needed if isinstance(key, str)):
        return False
    return all(_fits(one, known.get(key, others)) for key, one in value.items())


def _is_of(value: Any, kind: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return bool(kind == ("null" if value is None else "boolean"))
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and value == value // 1)
    return bool(kind == ("string" if isinstance(value, str) else "object" if isinstance(value, dict) else "array"))


def _same(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
