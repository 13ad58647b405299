"""JSON schemas: the grammar accepts exactly the valid values, and what cannot be enforced is refused.

The validator is written here, straight from the specification (draft 2020-12), for the keywords tested; it knows
nothing of grammars.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from cairn.text.grammar.grammar import GrammarError, Shape, Structure
from tests.text.walks import accepts, checked, walk

Schema = Any
_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value == int(value),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def valid(schema: Schema, value: Any, root: Schema = None) -> bool:
    """Return whether a value is an instance of a schema."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    return all(_RULES[key](given, value, schema, root) for key, given in schema.items() if key in _RULES)


def _properties(given: Any, value: Any, schema: Schema, root: Schema) -> bool:
    return not isinstance(value, dict) or all(
        valid(one, value[name], root) for name, one in given.items() if name in value
    )


def _additional(given: Any, value: Any, schema: Schema, root: Schema) -> bool:
    if not isinstance(value, dict):
        return True
    patterns = schema.get("patternProperties", {})
    others = [
        name
        for name in value
        if name not in schema.get("properties", {}) and not any(re.search(pattern, name) for pattern in patterns)
    ]
    return all(valid(given, value[name], root) for name in others)


def _patterns(given: Any, value: Any, schema: Schema, root: Schema) -> bool:
    return not isinstance(value, dict) or all(
        valid(one, value[name], root) for pattern, one in given.items() for name in value if re.search(pattern, name)
    )


def _items(given: Any, value: Any, schema: Schema, root: Schema) -> bool:
    first = len(schema.get("prefixItems", ()))
    return not isinstance(value, list) or all(valid(given, one, root) for one in value[first:])


def _reference(given: Any, value: Any, schema: Schema, root: Schema) -> bool:
    target = root
    for part in given.removeprefix("#").strip("/").split("/") if given != "#" else ():
        target = target[part]
    return valid(target, value, root)


def _of(kind: str, test: Callable[[Any, Any], bool]) -> Callable[[Any, Any, Schema, Schema], bool]:
    return lambda given, value, schema, root: not _TYPES[kind](value) or test(given, value)


_RULES: dict[str, Callable[[Any, Any, Schema, Schema], bool]] = {
    "type": lambda given, value, schema, root: any(
        _TYPES[one](value) for one in ([given] if isinstance(given, str) else given)
    ),
    "enum": lambda given, value, schema, root: any(same(one, value) for one in given),
    "const": lambda given, value, schema, root: same(given, value),
    "properties": _properties,
    "additionalProperties": _additional,
    "patternProperties": _patterns,
    "items": _items,
    "prefixItems": lambda given, value, schema, root: (
        not isinstance(value, list) or all(valid(one, item, root) for one, item in zip(given, value, strict=False))
    ),
    "anyOf": lambda given, value, schema, root: any(valid(one, value, root) for one in given),
    "allOf": lambda given, value, schema, root: all(valid(one, value, root) for one in given),
    "oneOf": lambda given, value, schema, root: sum(valid(one, value, root) for one in given) == 1,
    "not": lambda given, value, schema, root: not valid(given, value, root),
    "$ref": _reference,
    "required": _of("object", lambda given, value: set(given) <= set(value)),
    "minProperties": _of("object", lambda given, value: len(value) >= given),
    "maxProperties": _of("object", lambda given, value: len(value) <= given),
    "propertyNames": lambda given, value, schema, root: (
        not isinstance(value, dict) or all(valid(given, name, root) for name in value)
    ),
    "dependentRequired": _of(
        "object", lambda given, value: all(set(more) <= set(value) for name, more in given.items() if name in value)
    ),
    "minItems": _of("array", lambda given, value: len(value) >= given),
    "maxItems": _of("array", lambda given, value: len(value) <= given),
    "uniqueItems": _of(
        "array",
        lambda given, value: (
            not given or not any(same(one, other) for n, one in enumerate(value) for other in value[:n])
        ),
    ),
    "contains": lambda given, value, schema, root: (
        not isinstance(value, list) or any(valid(given, one, root) for one in value)
    ),
    "minLength": _of("string", lambda given, value: len(value) >= given),
    "maxLength": _of("string", lambda given, value: len(value) <= given),
    "pattern": _of("string", lambda given, value: re.search(given, value) is not None),
    "minimum": _of("number", lambda given, value: value >= given),
    "maximum": _of("number", lambda given, value: value <= given),
    "exclusiveMinimum": _of("number", lambda given, value: value > given),
    "exclusiveMaximum": _of("number", lambda given, value: value < given),
    "multipleOf": _of("number", lambda given, value: abs(value / given - round(value / given)) < 1e-9),
}


def random_schema(rng: random.Random, depth: int = 0) -> Schema:
    """Return a schema as people and programs write them, now and then with a rare keyword."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    kind = rng.choice(kinds if depth > 2 else [*kinds, "object", "object", "array", "any", "several", "all", "one"])
    made: dict[str, Any]
    match kind:
        case "object":
            names = rng.sample(["a", "b", "c", "long_name", "über"], rng.randint(0, 3))
            made = {"type": "object", "properties": {name: random_schema(rng, depth + 1) for name in names}}
            made |= {"required": rng.sample(names, rng.randint(0, len(names)))} if rng.random() < 0.7 else {}
            made |= {"additionalProperties": rng.choice([False, False, True, {"type": "integer"}])}
            _maybe(rng, made, 0.1, minProperties=1, maxProperties=2, patternProperties={"^x": {"type": "null"}})
            _maybe(rng, made, 0.03, propertyNames={"maxLength": 3}, dependentRequired={"a": ["b"]})
        case "array":
            made = {"type": "array", "items": random_schema(rng, depth + 1)}
            _maybe(rng, made, 0.3, minItems=1, maxItems=2, prefixItems=[random_schema(rng, depth + 1)])
            _maybe(rng, made, 0.04, uniqueItems=True, contains={"type": "null"})
        case "string":
            made = {"type": "string"}
            _maybe(rng, made, 0.3, minLength=1, maxLength=4, pattern=rng.choice(["^[a-c]*$", "b", "^(x|yz)", "\\d+$"]))
        case "integer" | "number":
            made = {"type": kind}
            _maybe(rng, made, 0.3, minimum=rng.randint(-9, 0), maximum=rng.randint(1, 20), exclusiveMaximum=15)
            _maybe(rng, made, 0.1, multipleOf=rng.choice([2, 0.5]), exclusiveMinimum=-4)
        case "enum":
            made = {"enum": rng.sample(["a", "b", 1, 2.5, None, True, [1], {"a": 1}], rng.randint(1, 4))}
        case "const":
            made = {"const": rng.choice(["a", 1, None, False, [], {"a": None}])}
        case "any":
            made = {} if rng.random() < 0.5 else {"type": rng.sample(["string", "null", "integer", "array"], 2)}
        case "several":
            made = {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
        case "all":
            made = {"allOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 2))]}
        case "one":
            made = {"oneOf": [random_schema(rng, depth + 1) for _ in range(2)]}
        case _:
            made = {"type": kind}
    _maybe(rng, made, 0.01, **{"not": {"type": "null"}})
    return made


def _maybe(rng: random.Random, made: dict[str, Any], chance: float, **keys: Any) -> None:
    made |= {key: value for key, value in keys.items() if rng.random() < chance}


def random_value(rng: random.Random, depth: int = 0) -> Any:
    plain = [
        "",
        "a",
        "b",
        "ab",
        "x",
        "yz1",
        "7",
        0,
        1,
        2,
        -3,
        14,
        17,
        2.5,
        0.25,
        None,
        True,
        False,
        [],
        {},
        [1],
        {"a": 1},
    ]
    if depth > 1 or rng.random() < 0.6:
        return rng.choice(plain)
    if rng.random() < 0.5:
        return [random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    names = rng.sample(["a", "b", "c", "long_name", "über", "x1"], rng.randint(0, 3))
    return {name: random_value(rng, depth + 1) for name in names}


def like(schema: Schema, rng: random.Random) -> Any:
    """Return a value with the schema's names, in its order, which is valid now and then."""
    if not isinstance(schema, dict):
        return random_value(rng)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return like(rng.choice(schema[key]), rng)
    if "enum" in schema or "const" in schema:
        return rng.choice(schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "object":
        names = [name for name in schema.get("properties", {}) if rng.random() < 0.8]
        return {name: like(schema["properties"][name], rng) for name in names}
    if schema.get("type") == "array":
        return [like(schema.get("items"), rng) for _ in range(rng.randint(0, 3))]
    words = {"string": ["", "a", "abc", "b", "x", "yz1"], "integer": [0, 2, -3, 14], "number": [0.5, 1, -2.5, 14]}
    return rng.choice(words.get(str(schema.get("type")), [None, True, False, "a"]))


def compiled(schema: Schema) -> str | None:
    """Return the grammar, or None if the schema is refused."""
    try:
        return checked(Shape(structure=Structure(kind="json", text=json.dumps(schema))))
    except GrammarError:
        return None


def test_nothing_that_is_invalid_is_accepted(prove: bool, figure: Callable[[str, str], None]) -> None:
    schemas = 3000 if prove else 200
    held = wrong = missed = right = 0
    for seed in range(schemas):
        rng = random.Random(seed)
        schema = random_schema(rng)
        grammar = compiled(schema)
        if grammar is None:
            continue
        held += 1
        for value in [like(schema, rng) for _ in range(6)] + [random_value(rng) for _ in range(3)]:
            text = json.dumps(value, ensure_ascii=False)
            good, taken = valid(schema, value), accepts(grammar, text)
            wrong += taken and not good
            assert good or not taken, f"seed {seed}: {schema} accepts {text}"
            right += good
            missed += good and not taken
        said = walk(grammar, rng, most=300)
        assert said is None or valid(schema, json.loads(said)), f"seed {seed}: {schema} may generate {said}"
    assert right > schemas and missed < right / 20, f"{missed} of {right} valid values were not accepted"
    assert held >= 0.84 * schemas, f"only {held} of {schemas} schemas can be enforced"
    figure(
        "JSON schemas held to",
        f"{held:,} of {schemas:,}; {wrong} invalid values accepted, {missed} of {right:,} valid ones not",
    )


TREE = {
    "$defs": {"node": {"type": "object", "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/node"}}}},
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (True, [1, "a", {"b": []}], []),
        (TREE, [{}, {"name": "a", "next": {"name": "b", "next": {}}}], [{"name": 1}, {"next": {"name": 5}}, []]),
        ({"type": ["integer", "null"], "minimum": 3}, [3, 77, None], [2, -5, "3", 3.5]),
        ({"type": "string", "format": "date"}, ["2026-11-26"], ["26.11.2026", "", "2026-13-01"]),
        ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["x"]),
        (
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False},
            [[1, None]],
            [[1, 2]],
        ),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"x": 1, "y": 2}], [{"x": "1"}]),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [None, 1.5]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [0.5, 1], [0, 1.5, -1]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü"], ["a", "abcd"]),
        ({"enum": ['a"b', "\\", "\n", "ü", 0, []]}, ['a"b', "\\", "\n", "ü", 0, []], ["a", 1, None]),
        ({"title": "T", "description": "d", "default": 1, "examples": [1], "type": "integer"}, [4], ["4"]),
    ],
)
def test_schemas_by_hand(schema: Schema, good: list[Any], bad: list[Any]) -> None:
    grammar = compiled(schema)
    assert grammar is not None
    for value in good:
        assert accepts(grammar, json.dumps(value, ensure_ascii=False)), value
    for value in bad:
        assert not accepts(grammar, json.dumps(value, ensure_ascii=False)), value


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "null"}}, "not"),
        ({"if": {"type": "null"}, "then": {"const": None}}, "if"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "object", "properties": {"a": {"type": "object", "minProperties": 1}}}, "minProperties"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "strin"}, "strin"),
        (False, "nsatisfiable"),
    ],
)
def test_what_cannot_be_held_to_is_named(schema: Schema, word: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(word)):
        checked(Shape(structure=Structure(kind="json", text=json.dumps(schema))))


def test_white_space_has_an_end() -> None:
    grammar = compiled({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert grammar is not None
    assert accepts(grammar, '{\n    "a": 1\n}') and accepts(grammar, '{"a":1}')
    assert not accepts(grammar, "{" + " " * 41 + "}")
