"""A client's JSON schema -> one that llguidance enforces exactly, and warnings about the parts that cannot be enforced.

Keywords without effect are left out; others are rewritten: property names from a list or by a pattern, look-ahead at
the beginning of a pattern, dates and times with fractions of bounded length. Objects that name their properties have no
others (`closed_objects`). A part that cannot be enforced is an error if the client asked for a strict answer; else it
is left out with a warning.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from cairn.text.grammar.closed_objects import closed
from cairn.text.grammar.patterns import FORMATS, KNOWN_FORMATS, without_look_ahead
from cairn.text.output.references import resolved

MAX_DEPTH = 128
MAX_OPTIONAL = 400
"""Most optional properties of one object: each takes up to four parser items per step."""
MAX_MULTIPLE = 100_000
"""Largest `multipleOf`: compiling makes that many states of up to 500 bytes."""
EXACT = 1 << 53
"""Largest whole number up to which doubles are exact; llguidance reads numbers as doubles."""
MOST_KNOWN = 1 << 14
"""Most bytes of a schema whose prepared form is cached."""
MOST_PLACE = 120
"""Most characters of a path in an error message."""
MAX_WARNINGS = 8
"""Most warnings per schema."""
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "array": frozenset(
        {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains"}
        | {"maxContains", "unevaluatedItems"}
    ),
    "object": frozenset(
        {"properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"}
        | {"propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"}
    ),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({*_BOUNDS, "multipleOf"}),
}
"""Type -> keywords that constrain only values of this type."""
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"}
)
_DRAFTS = frozenset(
    f"http{s}://json-schema.org/draft{one}/schema" for s, one in (
        ("s", "/2020-12"), ("s", "/2019-09"), ("", "-07"), ("", "-06"), ("", "-04"),
    )
)  # fmt: skip
_REPEATS = "an object may name a key twice, so how many it has cannot be enforced"
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")

Schema = Any
Node = dict[str, Any]


class SchemaError(ValueError):
    """A schema that is invalid or cannot be enforced; the message is for the client."""


class Prepared(NamedTuple):
    """A schema that can be enforced."""

    schema: Schema
    warnings: tuple[str, ...] = ()
    """Parts that are not enforced: sentences that follow a field's name."""


def prepared(schema: Schema, *, strict: bool) -> Prepared:
    """Prepare a schema for llguidance.

    Raises SchemaError for an invalid schema, and if `strict` for a part that cannot be enforced.
    """
    preparation = _Preparation(schema, strict=strict)
    made = preparation.schema(schema, "", 0)
    return Prepared(closed(made), tuple(preparation.warnings[:MAX_WARNINGS]))


def prepared_text(schema: bytes, strict: bool) -> Prepared:
    """Prepare a schema given as JSON. The result is shared and must not be changed."""
    if len(schema) <= MOST_KNOWN:
        return _known(schema, strict)
    return prepared(json.loads(schema), strict=strict)


@functools.lru_cache(maxsize=512)
def _known(schema: bytes, strict: bool) -> Prepared:
    return prepared(json.loads(schema), strict=strict)


_UNBUILT = (
    *("look-around", "backreference", "not supported", "disjoint", "Unimplemented", "oneOf", "circular references"),
    *("Unicode property", "unrecognized escape"),
)
"""Words in llguidance's errors for unsupported schemas, as opposed to invalid ones."""


def loosened(schema: Schema, why_not: Callable[[Schema], str]) -> tuple[Schema, list[str]]:
    """Return a prepared schema without the parts that llguidance does not support, and warnings about them.

    `why_not` returns llguidance's error for a schema, "" for none.
    """
    warnings: list[str] = []
    bad = {one for one in sorted(_patterns_in(schema)) if any(sign in why_not({"pattern": one}) for sign in _UNBUILT)}
    schema = _without(schema, bad, warnings)
    why = why_not(schema)
    if "oneOf" in why:
        schema = _without(schema, set(), warnings, one_of=True)
        why = why_not(schema)
    if why and any(sign in why for sign in _UNBUILT):
        kinds = kinds_of(schema) if isinstance(schema, Mapping) else []
        warnings.append(f"the schema is not enforced: {why[:160]}")
        schema = {"type": kinds} if kinds else True
    return schema, warnings


def _patterns_in(schema: Schema) -> set[str]:
    if isinstance(schema, list):
        return set[str]().union(*map(_patterns_in, schema))
    if not isinstance(schema, Mapping):
        return set()
    own = {schema["pattern"]} if isinstance(schema.get("pattern"), str) else set()
    return own.union(*map(_patterns_in, schema.values()))


def _without(schema: Schema, patterns: set[str], warnings: list[str], *, one_of: bool = False) -> Schema:
    """Return a schema without some patterns, and if `one_of` with `anyOf` for `oneOf`; append to `warnings`."""
    if isinstance(schema, list):
        return [_without(one, patterns, warnings, one_of=one_of) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: _without(one, patterns, warnings, one_of=one_of) for key, one in schema.items()}
    if isinstance(made.get("pattern"), str) and made["pattern"] in patterns:
        warnings.append(f'"pattern" {made.pop("pattern")[:64]!r} is not enforced')
    if one_of and isinstance(made.get("oneOf"), list):
        warnings.append('"oneOf" is enforced as "anyOf": more than one of its parts may fit')
        choice = made.pop("oneOf")
        made = {**made, "anyOf": choice} if "anyOf" not in made else {**made, "allOf": [{"anyOf": choice}]}
    return made


def check_bounds(schema: Schema, depth: int = 0) -> None:
    """Raise SchemaError for keywords that llguidance misreads, or whose cost grows with a number."""
    if depth > MAX_DEPTH:
        raise SchemaError("the schema is nested too deeply")
    if isinstance(schema, Mapping):
        least = schema.get("minProperties")
        if isinstance(least, int | float) and least > len(_required(schema)):
            raise SchemaError(f'"minProperties" cannot be enforced: {_REPEATS}')
        _check_cost(schema)
    if isinstance(schema, Mapping | list):
        for one in schema.values() if isinstance(schema, Mapping) else schema:
            check_bounds(one, depth + 1)


def _check_cost(node: Mapping[str, Any]) -> None:
    """Raise SchemaError for what would cost too much, even if the schema is not strict."""
    properties, multiple = node.get("properties"), node.get("multipleOf")
    optional = len(properties.keys() - _required(node)) if isinstance(properties, Mapping) else 0
    if optional > MAX_OPTIONAL:
        raise SchemaError(
            f"an object has {optional} properties that are not required; the limit is {MAX_OPTIONAL}: "
            "make more of them required, or put them into objects within it"
        )
    if isinstance(multiple, int | float) and not _few_units(multiple):
        raise SchemaError(
            f"multipleOf is {multiple!s:.40}; the limit is {MAX_MULTIPLE}, counted in units of its last decimal place"
        )


def _required(node: Mapping[str, Any]) -> set[str]:
    required = node.get("required")
    return set(map(str, required)) if isinstance(required, list) else set()


def _few_units(number: float) -> bool:
    """Return whether a number, in units of its last decimal place (25 for 2.5), is within `MAX_MULTIPLE`."""
    if isinstance(number, int):
        return abs(number) <= MAX_MULTIPLE
    if not math.isfinite(number):
        return False
    exact = abs(Decimal(str(number))).normalize()
    places = exact.as_tuple().exponent
    return exact.scaleb(max(0, -places if isinstance(places, int) else 0)) <= MAX_MULTIPLE


class _Preparation:
    """Preparation of one schema; each part is visited once."""

    def __init__(self, root: Schema, *, strict: bool) -> None:
        self._root, self._strict = root, strict
        self.warnings: list[str] = []

    def schema(self, schema: Schema, path: str, depth: int) -> Schema:
        """Prepare the subschema at `path`."""
        path = path[: MOST_PLACE + 1]
        if depth > MAX_DEPTH:
            raise SchemaError("the schema is nested too deeply")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise SchemaError(f"{_at(path)}a schema must be an object or a boolean")
        node = dict(schema)
        self._types(node, path)
        _check_kinds(node, path)
        _drop_of_other_types(node)
        _drop_what_says_nothing(node)
        for step in (self._numbers, self._formats, self._patterns, self._names, self._unevaluated, self._cannot):
            step(node, path)
        return self._inner(node, path, depth)

    def _inner(self, node: Node, path: str, depth: int) -> Node:
        for key in _MAPS:
            if isinstance(inner := node.get(key), Mapping):
                node[key] = {name: self.schema(one, f"{path}.{key}.{name}", depth + 1) for name, one in inner.items()}
        for key in _LISTS:
            if isinstance(inner := node.get(key), list):
                node[key] = [self.schema(one, f"{path}.{key}[{n}]", depth + 1) for n, one in enumerate(inner)]
        for key in _SINGLE:
            if isinstance(inner := node.get(key), list):
                node[key] = [self.schema(one, f"{path}.{key}[{n}]", depth + 1) for n, one in enumerate(inner)]
            elif key in node:
                node[key] = self.schema(node[key], f"{path}.{key}", depth + 1)
        return node

    def _types(self, node: Node, path: str) -> None:
        for kind in kinds_of(node):
            if not isinstance(kind, str) or kind not in _TYPES:
                raise SchemaError(f"{_at(path)}type {str(kind)[:64]!r} is none of JSON's: {', '.join(sorted(_TYPES))}")
        reference = node.get("$ref")
        if isinstance(reference, str) and reference.startswith("#") and resolved(self._root, reference) is None:
            raise SchemaError(f"{_at(path)}$ref {reference[:64]!r} points to nothing in the schema")

    def _numbers(self, node: Node, path: str) -> None:
        """Refuse bounds that a double cannot hold, and drop those that no JSON number exceeds."""
        for key in _BOUNDS:
            value = node.get(key)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if isinstance(value, float) and abs(value) >= sys.float_info.max:
                del node[key]  # no JSON number is beyond that
            elif abs(value) > EXACT:
                raise SchemaError(
                    f"{_at(path)}{key} is beyond 2^53, where numbers are no longer exact: leave it out, or list the "
                    "values that are allowed in enum"
                )

    def _formats(self, node: Node, path: str) -> None:
        """Replace a format by its pattern if it has one; drop an unknown format (JSON Schema 2020-12, 7.2.3)."""
        name = node.get("format")
        if not isinstance(name, str):
            return
        if name in FORMATS:
            del node["format"]
            _add_pattern(node, FORMATS[name])
        elif name not in KNOWN_FORMATS:
            del node["format"]

    def _patterns(self, node: Node, path: str) -> None:
        pattern = node.get("pattern")
        if not isinstance(pattern, str):
            return
        found = without_look_ahead(pattern)
        if found is None:
            del node["pattern"]
            self._left_out(path, "pattern", "look-around and back-references are not built")
            return
        node["pattern"] = found[0]
        for one in found[1:]:
            _add_pattern(node, one)

    def _names(self, node: Node, path: str) -> None:
        """Rewrite `propertyNames` that lists names or has one pattern by `properties` or `patternProperties`."""
        names = node.pop("propertyNames", True)
        if _says_nothing(names, "string"):
            return
        others = node.get("additionalProperties", True)
        listed = _listed(names)
        given = node.get("properties")
        known: Mapping[str, Schema] = given if isinstance(given, Mapping) else {}
        if listed is not None and "patternProperties" not in node:
            kept = {name: one for name, one in known.items() if name in listed}
            node["properties"] = kept | {name: others for name in listed if name not in kept}
            node["additionalProperties"] = False
        elif (pattern := _pattern_of_names(names)) and "patternProperties" not in node and not known:
            node["patternProperties"] = {pattern: others}
            node["additionalProperties"] = False
        else:
            self._left_out(path, "propertyNames")

    def _unevaluated(self, node: Node, path: str) -> None:
        """Rewrite `unevaluatedProperties` as `additionalProperties` (and items alike) if no subschema is beside it."""
        alone = not node.keys() & {"allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas", "not"}
        for key, same in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if key in node and (alone or same in node):
                value = node.pop(key)
                node.setdefault(same, value)
            elif _says_nothing(node.get(key, False)):
                del node[key]

    def _cannot(self, node: Node, path: str) -> None:
        """Leave out keywords that cannot be enforced."""
        for key, parts in _UNHELD.items():
            if key in node:
                del node[key]
                for part in parts:
                    node.pop(part, None)
                self._left_out(path, key)
        least = node.get("minProperties")
        if isinstance(least, int | float) and least > len(_required(node)):
            node.pop("minProperties")
            self._left_out(path, "minProperties", _REPEATS)
        reference = node.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            del node["$ref"]
            self._left_out(path, f"$ref to {reference[:64]!r}", "a schema elsewhere is not fetched")

    def _left_out(self, path: str, key: str, why: str = "") -> None:
        why = f": {why}" if why else ""
        if self._strict:
            raise SchemaError(f'{_at(path)}"{key}" cannot be enforced{why}')
        self.warnings.append(f'{_at(path)}"{key}" is not enforced{why}')


_UNHELD: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("uniqueItems", "not", "dependentRequired", "dependentSchemas", "dependencies"), ()),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"), ()),
    "if": ("then", "else"),
    "contains": ("minContains", "maxContains"),
}
"""Keyword that cannot be enforced -> keywords that have no effect without it."""


def _check_kinds(node: Node, path: str) -> None:
    """Raise SchemaError for a keyword's value of the wrong type."""
    required = node.get("required", [])
    for keys, kind, name in ((_MAPS, Mapping, "an object"), ((*_LISTS, "enum", "required"), list, "a list")):
        for key in keys:
            if key in node and not isinstance(node[key], kind):
                raise SchemaError(f"{_at(path)}{key} must be {name}")
    if not all(isinstance(one, str) for one in required):
        raise SchemaError(f"{_at(path)}required must be a list of names")
    for key in _COUNTS:
        value = node.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != value // 1:
            raise SchemaError(f"{_at(path)}{key} must be a whole number from 0 on")
        if key in node:
            node[key] = int(value)


def kinds_of(node: Mapping[str, Any]) -> list[Any]:
    """Return the types in a schema's `type`, unchecked; an empty list without `type`."""
    kinds = node.get("type", [])
    return list(kinds) if isinstance(kinds, list) else [kinds]


def _drop_of_other_types(node: Node) -> None:
    kinds = kinds_of(node)
    kinds += ["number"] if "integer" in kinds else []
    for kind, keys in _OF_TYPE.items():
        if kinds and kind not in kinds:
            for key in keys & node.keys():
                del node[key]


def _drop_what_says_nothing(node: Node) -> None:
    for key, is_nothing in _NOTHING.items():
        if key in node and is_nothing(node[key], node):
            del node[key]


def _says_nothing(schema: Schema, kind: str = "") -> bool:
    """Return whether a schema allows every value of type `kind`."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        return False
    rest = schema.keys() - _ANNOTATIONS - {"type"}
    return not rest and (not kinds_of(schema) or kind in kinds_of(schema))


def _most(node: Node, key: str) -> float:
    value = node.get(key)
    return value if isinstance(value, int | float) else sys.maxsize


_NOTHING: Mapping[str, Callable[[Any, Node], bool]] = {
    "$schema": lambda value, node: str(value).rstrip("#") not in _DRAFTS,
    "$dynamicAnchor": lambda value, node: True,
    "$recursiveAnchor": lambda value, node: True,
    "$vocabulary": lambda value, node: True,
    "uniqueItems": lambda value, node: value is False or _most(node, "maxItems") <= 1,
    "not": lambda value, node: value is False,
    "contains": lambda value, node: node.get("minContains") == 0 and "maxContains" not in node,
    "minContains": lambda value, node: "contains" not in node,
    "maxContains": lambda value, node: "contains" not in node,
    "if": lambda value, node: _says_nothing(node.get("then", True)) and _says_nothing(node.get("else", True)),
    "then": lambda value, node: "if" not in node,
    "else": lambda value, node: "if" not in node,
    "dependentRequired": lambda value, node: isinstance(value, Mapping) and not any(value.values()),
    "dependentSchemas": lambda value, node: isinstance(value, Mapping) and all(map(_says_nothing, value.values())),
    "dependencies": lambda value, node: value == {},
}
"""Keyword -> whether it has no effect. The order matters: dropping one may leave another without effect."""


def _listed(names: Schema) -> list[str] | None:
    """Return the names listed by a schema of names; None if it has any other constraint."""
    if not isinstance(names, Mapping) or names.keys() - _ANNOTATIONS - {"type", "enum", "const"}:
        return None
    values = names.get("enum", [names["const"]] if "const" in names else None)
    return [one for one in values if isinstance(one, str)] if isinstance(values, list) else None


def _pattern_of_names(names: Schema) -> str:
    """Return the single pattern required by a schema of names; "" if it has any other constraint."""
    said = dict(names) if isinstance(names, Mapping) else {}
    rest = {key: value for key, value in said.items() if key not in _ANNOTATIONS and key != "type"}
    match rest:
        case {"pattern": str() as pattern} if len(rest) == 1:
            found = without_look_ahead(pattern)
            return found[0] if found is not None and len(found) == 1 else ""
        case {"format": str() as name} if len(rest) == 1:
            return FORMATS.get(name, "")
    least, most = rest.get("minLength", 0), rest.get("maxLength", "")
    if rest.keys() <= {"minLength", "maxLength"} and isinstance(least, int) and isinstance(most, int | str):
        return rf"^[\s\S]{{{least},{most}}}$"
    return ""


def _add_pattern(node: Node, pattern: str) -> None:
    """Add a pattern to a schema of texts."""
    if "pattern" not in node:
        node["pattern"] = pattern
    else:
        node["allOf"] = [*(node["allOf"] if isinstance(node.get("allOf"), list) else []), {"pattern": pattern}]


def _at(path: str) -> str:
    """Return the beginning of an error message that names the path in the schema."""
    return f"at {path[1:][:MOST_PLACE]}, " if path else ""
