"""Schemas with whole numbers beyond 2^53 -> Lark, in which each such number is a literal text.

llguidance reads a schema's numbers as doubles, so 1234567890123456789 would be forced as 1234567890123456768. The parts
of a schema around such a number (`const`, `enum`) are written as Lark rules here: objects, lists, choices and
references. All other parts stay schemas within those rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cairn.text.grammar.lark import BLANKS, MAX_GRAMMAR, json_part, literal
from cairn.text.grammar.prepare_schema import EXACT, SchemaError, kinds_of
from cairn.text.output.references import resolved

_BLANK = rf"/({BLANKS})?/"
_LONG = re.compile(r"[0-9]{16}")
_KEY = r'/"[^"\\\x00-\x1F]*"/'
_NOT_CONSTRAINING = frozenset(
    {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions"}
)
"""Keywords that do not constrain a value, or hold definitions for references."""


class Rules(Protocol):
    """A grammar to which rules can be added."""

    def new(self, kind: str) -> str:
        """Return an unused rule name that begins with `kind`."""
        ...

    def rule(self, name: str, body: str) -> None:
        """Add a rule."""
        ...


class RuleList:
    """A stand-alone grammar."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._count = 0

    def new(self, kind: str) -> str:
        """Return an unused rule name that begins with `kind`."""
        self._count += 1
        return f"{kind}{self._count}"

    def rule(self, name: str, body: str) -> None:
        """Add a rule."""
        self._lines.append(f"{name}: {body}")

    def text(self, start: str) -> str:
        """Return the whole grammar; `start` is the expression that it begins with."""
        return "\n".join([f"start: {start}", *self._lines]) + "\n"


def is_exact(schema: Any) -> bool:
    """Return whether all numbers of a schema have few enough digits to be exact as doubles."""
    return _LONG.search(json.dumps(schema)) is None


def expression(schema: Any, rules: Rules) -> str:
    """Return the Lark expression of a schema's JSON.

    Raises SchemaError if a number beyond 2^53 is in a place that these rules do not support, or makes the grammar too
    long.
    """
    written = json_part(schema)
    if not _LONG.search(written):
        return written
    return _ExactWriter(schema, rules).of(schema)


class _ExactWriter:
    """Writer of one schema as Lark rules."""

    def __init__(self, root: Any, rules: Rules) -> None:
        self._root, self._rules = root, rules
        self._written: dict[str, str] = {}
        self._given: dict[str, str] = {}
        """JSON of a part that refers to others -> its rule."""
        self._inline = self._ruled = 0
        """Characters of the parts and of the rules so far."""
        self._long = _long_parts(root)
        self._shared = {key: root[key] for key in ("$defs", "definitions") if isinstance(root, dict) and key in root}

    def needs(self, schema: Any) -> bool:
        """Return whether a schema, or one that it refers to, lists a number beyond 2^53."""
        if not isinstance(schema, Mapping):
            return False
        if id(schema) in self._long or _lists_long(schema):
            return True
        return any(id(one) in self._long for one in _next_parts(self._root, schema))  # of a part made here

    def of(self, schema: Any) -> str:
        """Return the expression of a schema."""
        if not self.needs(schema):
            return self._as_given(schema)
        _check_shape(schema)
        said = schema.keys() - _NOT_CONSTRAINING
        if "const" in said or "enum" in said:
            return self._listed(schema, said)
        if "$ref" in said and len(said) == 1:
            return self._reference(schema["$ref"])
        for key in ("anyOf", "oneOf", "allOf"):
            if said == {key} and (key != "allOf" or len(schema[key]) == 1):
                return "(" + " | ".join(map(self.of, schema[key])) + ")"
        kinds = _distinct(kinds_of(schema))
        if len(kinds) > 1:
            return "(" + " | ".join(self.of({**schema, "type": one}) for one in kinds) + ")"
        if kinds and kinds[0] not in ("object", "array"):
            return self._counted(json_part({"type": kinds[0]}))
        if (kinds == ["object"] or (not kinds and "properties" in said)) and said <= _OBJECT:
            return self._object(schema)
        if (kinds == ["array"] or not kinds) and said <= _ARRAY:
            return self._array(schema)
        raise SchemaError(f"a whole number beyond 2^53 cannot be enforced beside {sorted(said)}: leave it out")

    def _reference(self, reference: str) -> str:
        if reference not in self._written:
            name = self._written[reference] = self._rules.new("ref")  # named first: it may refer to itself
            self._rule(name, self.of(resolved(self._root, reference)))
        return self._written[reference]

    def _as_given(self, schema: Any) -> str:
        """Return the expression of a part without such numbers.

        If it refers to others, all definitions come with it, so equal parts share a rule.
        """
        text = json.dumps(schema)
        if not isinstance(schema, dict) or "$ref" not in text:
            return self._counted(json_part(schema))
        if text not in self._given:
            self._given[text] = self._named("part", json_part({**self._shared, **schema}))
        return self._given[text]

    def _named(self, kind: str, body: str) -> str:
        name = self._rules.new(kind)
        self._rule(name, body)
        return name

    def _rule(self, name: str, body: str) -> None:
        self._ruled += len(name) + len(body)
        self._check_size()
        self._rules.rule(name, body)

    def _counted(self, written: str) -> str:
        """Return a part after counting it: many parts are written before they join a rule."""
        self._inline += len(written)
        self._check_size()
        return written

    def _check_size(self) -> None:
        if max(self._inline, self._ruled) > MAX_GRAMMAR:
            raise SchemaError(
                f"with a whole number beyond 2^53 it makes a grammar of more than {MAX_GRAMMAR} characters, the limit"
            )

    def _listed(self, schema: Mapping[str, Any], said: set[str]) -> str:
        """Return the expression of the listed values that have one of the schema's types."""
        if said - {"const", "enum", "type"}:
            raise SchemaError(f"a whole number beyond 2^53 cannot be enforced beside {sorted(said)}: leave it out")
        kinds = kinds_of(schema)
        values = schema["enum"] if "enum" in said else [schema["const"]]
        values = [one for one in values if not kinds or any(_is_of(one, kind) for kind in kinds)]
        if "const" in said:
            values = [one for one in values if one == schema["const"]]
        if not values:
            raise SchemaError("Unsatisfiable schema: none of the values that enum lists is of the type")
        return self._counted("(" + " | ".join(map(_literal, values)) + ")")

    def _object(self, schema: Mapping[str, Any]) -> str:
        known = schema.get("properties", {})
        needed = dict.fromkeys(schema.get("required", ()))
        others = schema.get("additionalProperties", True)
        members = [(self._pair(_text(name), self.of(one)), name in needed) for name, one in known.items()]
        members += [(self._pair(_text(name), self.of(others)), True) for name in needed if name not in known]
        if others is not False:
            taken = "|".join(_escaped(json.dumps(name, ensure_ascii=False)) for name in {*known, *needed})
            key = f"{_KEY} & ~/{taken}/" if taken else _KEY
            pair = self._pair(self._named("KEY", key), self.of(others))
            members.append((f"{pair} ({_comma()} {pair})*", False))
        return f'"{{" {_BLANK} {self._members(members)} "}}"'

    def _pair(self, key: str, value: str) -> str:
        return self._named("pair", f'{key} {_BLANK} ":" {_BLANK} {value} {_BLANK}')

    def _members(self, members: Sequence[tuple[str, bool]]) -> str:
        """Return the expression of (member, whether it is required) in order, separated by commas."""
        behind, first = "", ""
        for member, needed in reversed(members):
            more = f"{_comma()} {member}"
            alone = f"{member} {behind}"
            first = alone if needed else f"({alone} | {first})" if first else f"({alone})?"
            behind = f"{more} {behind}" if needed else f"({more})? {behind}"
            behind, first = self._named("more", behind), self._named("first", first)
        return first

    def _array(self, schema: Mapping[str, Any]) -> str:
        first = [self.of(one) for one in schema.get("prefixItems", [])]
        item = schema.get("items", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if first and (least < len(first) or (item is not False and most != len(first))):
            raise SchemaError(
                "a whole number beyond 2^53 cannot be enforced in a list whose first items may be left out"
            )
        if first:
            return f'"[" {_BLANK} ' + f" {_BLANK} {_comma()} ".join(first) + f' {_BLANK} "]"'
        value = self._named("item", f"{self.of(item)} {_BLANK}")
        if most == 0:
            return f'"[" {_BLANK} "]"'
        more = f"({_comma()} {value})"
        more += "*" if most is None and least < 2 else f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        several = f"{value} {more}"
        return f'"[" {_BLANK} {several if least else f"({several})?"} "]"'


_SHAPES: Mapping[str, tuple[type, str]] = {
    **dict.fromkeys(("enum", "required", "anyOf", "oneOf", "allOf", "prefixItems"), (list, "a list")),
    **dict.fromkeys(("properties", "patternProperties"), (dict, "an object")),
    **dict.fromkeys(("minItems", "maxItems"), (int, "a whole number")),
}
"""Keyword -> type of its value, and the type's name."""


def _check_shape(schema: Mapping[str, Any]) -> None:
    """Raise SchemaError for a keyword's value of the wrong type; for other schemas llguidance checks that."""
    for key in _SHAPES.keys() & schema.keys():
        kind, name = _SHAPES[key]
        if not isinstance(schema[key], kind):
            raise SchemaError(f'"{key}" must be {name}')
    if not all(isinstance(name, str) for name in schema.get("required", ())):
        raise SchemaError('"required" must be a list of names')


_OBJECT = frozenset({"type", "properties", "required", "additionalProperties"})
_ARRAY = frozenset({"type", "items", "prefixItems", "minItems", "maxItems"})


def _parts_of(schema: Mapping[str, Any]) -> list[Any]:
    """Return the subschemas that constrain a schema's value or parts of it."""
    found: list[Any] = []
    for key in ("properties", "patternProperties"):
        found += schema[key].values() if isinstance(schema.get(key), Mapping) else []
    for key in ("anyOf", "oneOf", "allOf", "prefixItems", "items"):
        found += schema[key] if isinstance(schema.get(key), list) else []
    return [*found, *(schema.get(key) for key in ("items", "additionalProperties"))]


def _next_parts(root: Any, schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a schema's own parts and the part of `root` that it refers to."""
    reference = schema.get("$ref")
    found = [*_parts_of(schema), resolved(root, reference) if isinstance(reference, str) else None]
    return [one for one in found if isinstance(one, Mapping)]


def _long_parts(root: Any) -> set[int]:
    """Return the `id` of each part of a schema that lists a number beyond 2^53, or contains or refers to one that does.

    Parts may refer to each other, so each is visited once, and then what leads to such a number is followed backwards.
    """
    waiting = [root] if isinstance(root, Mapping) else []
    seen = set(map(id, waiting))
    leading: dict[int, list[int]] = {}
    found: list[int] = []
    while waiting:
        part = waiting.pop()
        if _lists_long(part):
            found.append(id(part))
        for one in _next_parts(root, part):
            leading.setdefault(id(one), []).append(id(part))
            if id(one) not in seen:
                seen.add(id(one))
                waiting.append(one)
    known = set(found)
    while found:
        more = set(leading.get(found.pop(), ())) - known
        known |= more
        found += more
    return known


def _distinct(kinds: list[Any]) -> list[Any]:
    return list({json.dumps(one): one for one in kinds}.values())


def _lists_long(schema: Mapping[str, Any]) -> bool:
    return _is_beyond(schema.get("const")) or _is_beyond(schema.get("enum"))


def _is_beyond(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_is_beyond, value.values()))
    if isinstance(value, list):
        return any(map(_is_beyond, value))
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) > EXACT


def _is_of(value: Any, kind: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return bool(kind == ("null" if value is None else "boolean"))
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and value == value // 1)
    return bool(kind == ("string" if isinstance(value, str) else "object" if isinstance(value, dict) else "array"))


def _literal(value: Any) -> str:
    """Return the expression of a value's JSON, with optional white space."""
    if isinstance(value, Mapping):
        pairs = [f'{_text(key)} {_BLANK} ":" {_BLANK} {_literal(one)} {_BLANK}' for key, one in value.items()]
        return f'"{{" {_BLANK} ' + f" {_comma()} ".join(pairs) + ' "}"'
    if isinstance(value, list):
        return f'"[" {_BLANK} ' + f" {_comma()} ".join(f"{_literal(one)} {_BLANK}" for one in value) + ' "]"'
    return literal(json.dumps(value, ensure_ascii=False))


def _comma() -> str:
    return f'"," {_BLANK}'


def _text(name: str) -> str:
    """Return a property name as a Lark literal, with JSON's quotes."""
    return literal(json.dumps(name, ensure_ascii=False))


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
