"""Closing of a schema's objects: no properties beside those it names.

A model that may add properties does, and libraries that derive schemas from types mean only the type's own. So an
object with `properties` is closed at every depth, unless the schema mentions other properties or is combined from
parts: one part alone does not name them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cairn.text.output.references import resolved

_OPENING = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "anyOf", "oneOf"})
_OPENING |= {"allOf", "if", "then", "else", "dependentSchemas"}
"""Keywords that allow properties beside those in `properties`."""
_SHAPING = _OPENING | {"properties", "required", "minProperties", "maxProperties"}
"""Keywords that constrain an object's properties."""
MOST_ROUNDS = 16
"""How often references are followed through parts; objects that are deeper stay open."""

Schema = Any


def closed(schema: Schema) -> Schema:
    """Return a schema in which objects that name their properties are closed."""
    if not isinstance(schema, Mapping):
        return schema
    open_parts: set[int] = set()
    for _ in range(MOST_ROUNDS):
        references = {reference for reference, whole in _references(schema, True, open_parts) if not whole}
        found = {id(resolved(schema, one)) for one in references}
        if found <= open_parts:
            break
        open_parts |= found
    return _closed(schema, True, open_parts)


def _closed(schema: Schema, whole: bool, open_parts: set[int]) -> Schema:
    """Close one schema within the whole.

    `whole`: no other schema constrains the same value; `open_parts`: `id`s of schemas that are parts of others.
    """
    if not isinstance(schema, Mapping):
        return schema
    whole = whole and id(schema) not in open_parts
    made = dict(schema)
    for key, at, inner, is_whole in _inner(schema, whole):
        value = _closed(inner, is_whole, open_parts)
        if at is None:
            made[key] = value
        else:
            if made[key] is schema[key]:
                made[key] = schema[key].copy()
            made[key][at] = value
    if whole and isinstance(schema.get("properties"), Mapping) and not schema.keys() & _OPENING:
        made["additionalProperties"] = False
    return made


def _references(schema: Schema, whole: bool, open_parts: set[int]) -> Iterator[tuple[str, bool]]:
    """Yield (target, whether no other schema constrains the same value) of each reference."""
    if not isinstance(schema, Mapping):
        return
    whole = whole and id(schema) not in open_parts
    if isinstance(reference := schema.get("$ref"), str):
        yield reference, whole and not (schema.keys() - {"$ref"}) & _SHAPING
    for _, _, inner, is_whole in _inner(schema, whole):
        yield from _references(inner, is_whole, open_parts)


def _inner(schema: Mapping[str, Any], whole: bool) -> Iterator[tuple[str, Any, Schema, bool]]:
    """Yield (keyword, key or index in it, schema, whether no other constrains its value) of each subschema."""
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(inner := schema.get(key), Mapping):
            yield from ((key, name, one, True) for name, one in inner.items())
    for key in ("items", "prefixItems", "additionalProperties", "additionalItems"):
        inner = schema.get(key)
        if isinstance(inner, list):
            yield from ((key, n, one, True) for n, one in enumerate(inner))
        elif isinstance(inner, Mapping):
            yield key, None, inner, True
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(inner := schema.get(key), list):
            alone = not (schema.keys() - {key}) & _SHAPING and (key != "allOf" or len(inner) == 1)
            yield from ((key, n, one, whole and alone) for n, one in enumerate(inner))
