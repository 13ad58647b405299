"""Preparation of a client's schema before it constrains answers."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from typing import Any

import pytest

from cairn.text.grammar.call_grammar import callable_tools
from cairn.text.grammar.closed_objects import closed
from cairn.text.grammar.exact_numbers import RuleList, expression
from cairn.text.grammar.grammar import MAX_TEXT, GrammarError, Shape, Structure
from cairn.text.grammar.patterns import FORMATS, without_look_ahead
from cairn.text.grammar.prepare_schema import SchemaError, prepared
from cairn.text.grammar.trial import CompiledJob
from tests.text.walks import accepts, compiled, walk

BIG = 1234567890123456789


def held(schema: Any, *, strict: bool = True) -> CompiledJob:
    text = json.dumps(schema)
    return compiled(Shape(structure=Structure(kind="json", text=text, field="form", strict=strict)))


def takes(schema: Any, good: list[Any], bad: list[Any]) -> None:
    grammar = held(schema).text
    for value in good:
        for indent in (None, 2):
            assert accepts(grammar, json.dumps(value, ensure_ascii=False, indent=indent)), value
    for value in bad:
        assert not accepts(grammar, json.dumps(value, ensure_ascii=False)), value


# ----------------------------------------------------------------------------------------- what says nothing


@pytest.mark.parametrize(
    "more",
    [
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {}},
        {"propertyNames": True},
        {"uniqueItems": False},
        {"uniqueItems": True},  # it applies to lists, and this is none
        {"not": False},
        {"if": {"required": ["a"]}},
        {"then": {"required": ["b"]}},
        {"if": {"required": ["a"]}, "then": True, "else": {}},
        {"dependentRequired": {}},
        {"dependentRequired": {"a": []}},
        {"dependentSchemas": {"a": {"description": "any"}}},
        {"unevaluatedProperties": True},
        {"minContains": 2},
        {"contains": {"type": "null"}},
        {"minProperties": 0},
        {"$schema": "https://example.com/mine"},
        {"$dynamicAnchor": "x"},
        {"format": "color"},
        {"deprecated": True, "x-own": {"a": 1}, "$comment": "c", "discriminator": {"propertyName": "a"}},
        {"contentSchema": {"type": "object"}},
    ],
)
def test_keywords_without_effect_are_accepted(more: dict[str, Any]) -> None:
    result = prepared({"type": "object", "properties": {"a": {"type": "integer"}}, **more}, strict=True)
    assert not result.warnings
    takes({"type": "object", "properties": {"a": {"type": "integer"}}, **more}, [{}, {"a": 1}], [{"a": "x"}, []])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": False},
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1},
        {"type": "array", "items": {"type": "integer"}, "contains": {"const": 5}, "minContains": 0},
        {"type": "array", "items": {"type": "integer"}, "unevaluatedItems": True},
    ],
)
def test_array_keywords_without_effect_are_accepted(schema: dict[str, Any]) -> None:
    takes(schema, [[], [1]], [["a"]])


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "format": "color", "pattern": "^#[0-9a-f]{3}$"}, ["#0af"], ["red", "#0AF"]),
        ({"type": "string", "format": "int64"}, ["", "x"], [5]),
        ({"format": "phone", "pattern": "^[0-9]+$"}, ["12", 5, None], ["a"]),
    ],
)
def test_a_format_that_is_unknown_says_nothing_and_a_pattern_beside_it_holds(
    schema: Any, good: list[Any], bad: list[Any]
) -> None:
    takes(schema, good, bad)


@pytest.mark.parametrize(
    ("names", "good", "bad"),
    [
        ({"enum": ["a", "b"]}, [{}, {"a": 1}, {"a": 1, "b": 2}], [{"c": 1}, {"a": "x"}]),
        ({"type": "string", "const": "a"}, [{}, {"a": 1}], [{"b": 1}]),
        ({"pattern": "^x"}, [{}, {"x1": 1, "x2": 2}], [{"y": 1}]),
        ({"maxLength": 2}, [{}, {"ab": 1}], [{"abc": 1}]),
        ({"minLength": 2, "type": "string"}, [{"abc": 1}], [{"a": 1}]),
        ({"format": "uuid"}, [{"123e4567-e89b-12d3-a456-426614174000": 1}], [{"x": 1}]),
    ],
)
def test_names_of_properties_are_held_to(names: Any, good: list[Any], bad: list[Any]) -> None:
    takes({"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}, good, bad)


def test_names_of_properties_that_are_listed_too() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "z": {}}, "propertyNames": {"enum": ["a", "b"]}}
    takes(schema, [{}, {"a": "x", "b": 5}], [{"z": 1}, {"a": 1}])


# ----------------------------------------------------------------------------------------- closed objects

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (A, [{}, {"a": 1}], [{"x": 1}, {"a": 1, "x": 1}]),
        ({"properties": {"in": A}}, [{"in": {"a": 1}}], [{"in": {"x": 1}}, {"y": 1}]),
        ({"type": "array", "items": A}, [[{"a": 1}]], [[{"x": 1}]]),
        ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"x": 1}, {"a": 1, "b": 1}]),
        ({"additionalProperties": A, "type": "object"}, [{"k": {"a": 1}}], [{"k": {"x": 1}}]),
        ({"$defs": {"A": A}, "$ref": "#/$defs/A"}, [{"a": 1}], [{"x": 1}]),
        ({"$defs": {"A": A}, "properties": {"in": {"$ref": "#/$defs/A"}}}, [{"in": {"a": 1}}], [{"in": {"x": 1}}]),
        ({"$defs": {"A": A}, "properties": {"in": {"allOf": [{"$ref": "#/$defs/A"}], "title": "t"}}},
         [{"in": {"a": 1}}], [{"in": {"x": 1}}]),
        ({"type": "object", "properties": {}}, [{}], [{"x": 1}]),
        # open, as it says so
        ({**A, "additionalProperties": True}, [{"a": 1, "x": 1}], [{"a": "x"}]),
        ({**A, "additionalProperties": {"type": "string"}}, [{"a": 1, "x": "y"}], [{"x": 1}]),
        ({**A, "unevaluatedProperties": True}, [{"a": 1, "x": 1}], [{"a": "x"}]),
        ({**A, "unevaluatedProperties": {"type": "string"}}, [{"a": 1, "x": "y"}], [{"x": 1}]),
        ({**A, "allOf": [B], "unevaluatedProperties": True}, [{"a": 1, "b": 1, "x": 1}], [{"a": "x"}]),
        ({**A, "patternProperties": {"^x": {}}}, [{"x": 1}], []),
        ({"type": "object"}, [{"x": 1}], [5]),
        ({"type": "object", "required": ["x"]}, [{"x": 1}], [{}]),
        ({"properties": {"in": {**A, "additionalProperties": True}}}, [{"in": {"x": 1}}], [{"x": 1}]),
        # composed of parts, none of which names all properties
        ({"allOf": [A, B]}, [{"a": 1, "b": 1}], [{"a": "x"}]),
        ({**A, "allOf": [B]}, [{"a": 1, "b": 1}], [{"b": "x"}]),
        ({**A, "anyOf": [{"required": ["a"]}, B]}, [{"a": 1, "b": 1}], [{"a": "x"}]),
        ({"$defs": {"A": A}, **B, "$ref": "#/$defs/A"}, [{"b": 1, "a": 1}], [{"a": "x"}]),
        ({"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]}, [{"a": 1, "b": 1}], [{"a": "x"}]),
        ({"$defs": {"A": A, "C": {"$ref": "#/$defs/A"}}, "allOf": [{"$ref": "#/$defs/C"}, B]},
         [{"a": 1, "b": 1}], [{"a": "x"}]),
        ({"allOf": [{"properties": {"in": A}}, B]}, [{"in": {"a": 1}, "b": 2}], [{"in": {"x": 1}}]),
    ],
)  # fmt: skip
def test_an_object_has_the_properties_that_it_names(schema: Any, good: list[Any], bad: list[Any]) -> None:
    takes(schema, good, bad)


def test_a_schema_that_comes_back_to_itself_is_closed_at_every_depth() -> None:
    node = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}
    takes(
        {"$defs": {"node": node}, "$ref": "#/$defs/node"}, [{"v": 1, "next": {"next": {"v": 2}}}], [{"next": {"x": 1}}]
    )
    takes({**node, "properties": {"v": {}, "next": {"$ref": "#"}}}, [{"next": {"v": 1}}], [{"next": {"x": 1}}])


def test_closing_changes_nothing_of_the_schema_that_was_given() -> None:
    schema = {"properties": {"in": {"properties": {"a": {}}}}, "items": [A], "anyOf": [A]}
    before = json.dumps(schema)
    closed(schema)
    assert json.dumps(schema) == before


# ----------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"const": BIG}, [BIG], [BIG - 21, BIG + 1, "x"]),
        ({"const": -BIG}, [-BIG], [BIG]),
        ({"enum": [BIG, 5, "a", None, 2.5]}, [BIG, 5, "a", None, 2.5], [BIG - 21, 6, "b"]),
        ({"type": "integer", "enum": [BIG, "a", 1.5, 2**53 + 1]}, [BIG, 2**53 + 1], ["a", 1.5, 2**53]),
        ({"type": "object", "properties": {"id": {"const": BIG}, "n": {"type": "integer"}}, "required": ["id"]},
         [{"id": BIG}, {"id": BIG, "n": 4}], [{"n": 4}, {"id": BIG - 21}, {"id": BIG, "x": 1}, {"n": 4, "id": BIG}]),
        ({"type": "object", "properties": {"n": {}, "id": {"const": BIG}, "m": {"type": "null"}}},
         [{}, {"n": [1]}, {"id": BIG}, {"m": None}, {"n": 1, "id": BIG, "m": None}, {"n": {"x": 1}, "m": None}],
         [{"m": None, "n": 1}, {"id": 1}]),
        ({"type": "array", "items": {"enum": [BIG, 1]}}, [[], [BIG], [1, BIG, 1]], [[2]]),
        ({"type": "array", "items": {"const": BIG}, "minItems": 2, "maxItems": 3}, [[BIG] * 2, [BIG] * 3],
         [[BIG], [BIG] * 4, []]),
        ({"type": "array", "items": {"const": BIG}, "maxItems": 2}, [[], [BIG], [BIG] * 2], [[BIG] * 3]),
        ({"type": "array", "items": {"const": BIG}, "minItems": 2}, [[BIG] * 2, [BIG] * 5], [[BIG]]),
        ({"type": "array", "prefixItems": [{"const": BIG}, {"type": "string"}], "items": False, "minItems": 2},
         [[BIG, "a"]], [[BIG], [BIG, 1], [BIG, "a", 1]]),
        ({"anyOf": [{"const": BIG}, {"type": "string"}]}, [BIG, "a"], [1]),
        ({"type": ["object", "null"], "properties": {"id": {"const": BIG}}}, [{"id": BIG}, None], [{"id": 1}, 5]),
        ({"$defs": {"id": {"enum": [BIG]}, "s": {"type": "string"}},
          "properties": {"a": {"$ref": "#/$defs/id"}, "b": {"$ref": "#/$defs/s"}}},
         [{"a": BIG, "b": "x"}], [{"a": 1}, {"b": 1}]),
        ({"$defs": {"n": {"properties": {"id": {"const": BIG}, "next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
         [{}, {"id": BIG, "next": {"next": {"id": BIG}}}], [{"next": {"id": 1}}]),
        ({"properties": {"id": {"const": BIG}}, "additionalProperties": {"type": "integer"}, "required": ["id"]},
         [{"id": BIG}, {"id": BIG, "x": 1, "y/z": 2}], [{"id": BIG, "x": "a"}, {"x": 1}, {"id": BIG, "id2": BIG / 7}]),
        ({"const": {"a": [BIG, {"b": "c"}]}}, [{"a": [BIG, {"b": "c"}]}], [{"a": [BIG - 21, {"b": "c"}]}, {}]),
        ({"enum": [2**53, -(2**53)]}, [2**53, -(2**53)], [2**53 + 2]),
    ],
)  # fmt: skip
def test_whole_numbers_beyond_2_53_that_are_listed_are_exact(schema: Any, good: list[Any], bad: list[Any]) -> None:
    takes(schema, good, bad)
    for seed in range(5):
        import random

        said = walk(held(schema).text, random.Random(seed), most=300)
        if said is not None and str(BIG)[:12] in said:
            assert all(int(one) in (BIG, BIG) for one in re.findall(r"\d{19}", said)), said


@pytest.mark.parametrize("names", ["nb", "bn"])
def test_numbers_beyond_2_53_are_exact_in_schemas_that_refer_to_each_other(names: str) -> None:
    a = {"n": {"const": BIG}, "b": {"$ref": "#/$defs/B"}}
    defs = {
        "A": {"type": "object", "properties": {name: a[name] for name in names}, "required": ["n"]},
        "B": {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}},
    }

    def value(n: int) -> dict[str, Any]:
        within = {"n": BIG, "b": {"a": {"n": n}}}
        return {name: within[name] for name in names}

    takes({"$ref": "#/$defs/A", "$defs": defs}, [value(BIG)], [value(int(float(BIG)))])


def test_definitions_beside_a_number_beyond_2_53_are_written_once_for_equal_references() -> None:
    defs = {"s": {"type": "string"}, **{f"k{at}": {"enum": ["v" * 90]} for at in range(500)}}
    names = {f"p{at}": {"$ref": "#/$defs/s"} for at in range(100)}
    grammar = held({"$defs": defs, "properties": {"id": {"const": BIG}, **names}}).text
    assert grammar.count("k499") == 1
    assert accepts(grammar, json.dumps({"id": BIG, "p0": "x", "p99": "y"}))
    assert not accepts(grammar, json.dumps({"id": BIG, "p99": 5}))


DEFINED = {f"k{at}": {"enum": ["v" * 90]} for at in range(200)}
REFERRING = [{"$ref": f"#/$defs/{name}"} for name in DEFINED]


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": DEFINED, "anyOf": [*REFERRING, {"const": BIG}]},
        {"$defs": DEFINED, "properties": dict(enumerate(REFERRING)), "additionalProperties": {"const": BIG}},
        {"anyOf": [*[True] * 16_000, {"const": BIG}]},
    ],
    ids=["choices", "properties", "anything"],
)
def test_a_number_beyond_2_53_makes_no_grammar_that_is_longer_than_the_limit(schema: Any) -> None:
    """It is refused before it takes much memory."""
    schema = json.loads(json.dumps(schema))
    tracemalloc.start()
    try:
        with pytest.raises(SchemaError, match=f"makes a grammar of more than {4 * MAX_TEXT} characters"):
            expression(schema, RuleList())
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_part_whose_type_is_listed_twice_is_written_once() -> None:
    schema: Any = {"const": BIG}
    for _ in range(10):
        schema = {"type": ["array", "array"], "items": schema}
    grammar = held(schema).text
    assert grammar.count(str(BIG)) == 1
    assert accepts(grammar, "[" * 10 + str(BIG) + "]" * 10)


def test_a_number_beyond_2_53_outside_the_grammar_is_reported() -> None:
    with pytest.raises(GrammarError, match="beyond 2\\^53 cannot be enforced beside"):
        held({"properties": {"a": {"const": BIG}}, "patternProperties": {"^x": {}}, "type": "object"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("enum", 5), ("enum", "x"), ("enum", None), ("required", 5), ("required", [["a"]]), ("required", "a")),
        *(("properties", [BIG]), ("anyOf", {"const": BIG}), ("oneOf", 5), ("allOf", "x"), ("prefixItems", 7)),
        *(("minItems", "2"), ("maxItems", [2]), ("type", "array"), ("items", 5), ("additionalProperties", 5)),
        *(("const", {"a": BIG}), ("$ref", 5), ("$defs", [BIG])),
    ],
)
def test_a_schema_of_odd_shape_beside_such_a_number_is_refused_or_held_to(key: str, value: Any) -> None:
    for node in ({"const": BIG}, {"properties": {"a": {"const": BIG}}}, {"items": {"enum": [BIG]}}, {"enum": BIG}):
        try:
            held({"properties": {"in": {**node, key: value}}}, strict=False)
        except GrammarError as error:
            assert str(error)


@pytest.mark.parametrize("key", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
@pytest.mark.parametrize("value", [2**53 + 1, 1e18, 2**64])
@pytest.mark.parametrize("strict", [True, False])
def test_bounds_beyond_2_53_are_refused(key: str, value: float, strict: bool) -> None:
    with pytest.raises(GrammarError, match=f"at properties.n, {key} is beyond 2\\^53"):
        held({"properties": {"n": {"type": "integer", key: value}}}, strict=strict)


@pytest.mark.parametrize("value", [2**53 + 1, 1e18, 2**64])
@pytest.mark.parametrize("strict", [True, False])
def test_a_multiple_beyond_2_53_is_refused(value: float, strict: bool) -> None:
    with pytest.raises(GrammarError, match=r"multipleOf is .* the limit is 100000"):
        held({"properties": {"n": {"type": "integer", "multipleOf": value}}}, strict=strict)


def test_bounds_up_to_2_53_are_held_to() -> None:
    takes({"type": "integer", "minimum": -(2**53), "maximum": 2**53}, [2**53, -(2**53), 0], [2**53 + 1])
    most = 1.7976931348623157e308
    takes({"type": "number", "minimum": -most, "maximum": most}, [0, 1.5, 1e300], ["x"])
    takes({"type": "string", "minimum": 2**60}, ["x"], [5])


# ----------------------------------------------------------------------------------------- formats and patterns


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date-time", ["2026-11-26T12:00:00Z", "2024-02-29T23:59:59.123456789+01:00", "2026-11-26t12:00:00.5z"],
         ["2026-11-26", "2026-11-26T12:00:00", "2026-11-26T12:00:00.1234567890Z", "2023-02-29T12:00:00Z",
          "2026-13-01T00:00:00Z", "2026-11-26T24:00:00Z", "2026-11-26T12:00:00." + "3" * 40 + "Z"]),
        ("time", ["12:00:00Z", "23:59:59.999+05:30"], ["12:00", "12:00:00", "12:00:00." + "1" * 30 + "Z", "25:00:00Z"]),
        ("date", ["2026-11-26", "2024-02-29", "2000-02-29"], ["2023-02-29", "1900-02-29", "2026-02-30", "26-11-26"]),
        ("duration", ["P1D", "PT5M", "P3W", "P1Y2M3DT4H5M6S", "PT1.5S"], ["P", "PT", "1D", f"P{10**30}D", "P1S"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
        ("email", ["a@b.example"], ["a"]),
        ("ipv4", ["127.0.0.1"], ["127.0.0.256"]),
        ("uri", ["https://example.com/x?y=1"], ["no scheme"]),
    ],
)  # fmt: skip
def test_formats(name: str, good: list[str], bad: list[str]) -> None:
    takes({"type": "string", "format": name}, good, bad)
    takes({"properties": {"x": {"type": "string", "format": name}}}, [{"x": one} for one in good], [{"x": bad[0]}])
    if name in FORMATS:
        assert all(re.search(FORMATS[name], one) for one in good)
        assert not any(re.search(FORMATS[name], one) for one in bad)


def test_a_pattern_beside_a_known_format_holds_too() -> None:
    schema = {"type": "string", "format": "date-time", "pattern": "^2026-.*Z$"}
    takes(schema, ["2026-11-26T12:00:00Z"], ["2025-11-26T12:00:00Z", "2026-11-26T12:00:00+01:00", "2026-xZ"])


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^(?=.*[A-Z])(?=.*\d).{4,8}$", ["Abc1", "1xxA"], ["abc1", "Abcd", "A1", "A1" + "x" * 8]),
        (r"^(?=.{1,6}\.?$)[a-z]+(?:\.[a-z]+)*\.?$", ["ab.cd"], ["abc.defg", ".a"]),
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", ["1", "-1.5", "+.5", "007", "3."], ["", ".", "-", "x", "1.2.3"]),
        (r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
         ["P1Y2D", "PT5M", "P3W", "P1DT1.5S"], ["P", "PT", "P1DT", "P1W2D"]),
        (r"^\(?=\)$", ["()", "=)"][:0], ["x"]),
    ],
)  # fmt: skip
def test_look_ahead_is_rewritten_where_possible(pattern: str, good: list[str], bad: list[str]) -> None:
    takes({"type": "string", "pattern": pattern}, good, bad)
    for one in good + bad:
        assert bool(re.search(pattern, one)) == (one in good), "the pattern means the same here"


@pytest.mark.parametrize(
    "pattern",
    [r"^(?!a)b", r"a(?=b)", r"(?<=a)b", r"(?<!a)b", r"(a)\1", r"^(?=a)b|c", r"^(?=a(?!b))c", r"(?<n>a)\k<n>", r"(?=a)"],
)
def test_look_ahead_that_cannot_be_rewritten_is_reported(pattern: str) -> None:
    assert without_look_ahead(pattern) is None


@pytest.mark.parametrize(
    "pattern", [r"a\(?=b", r"[(?=]", r"\\(a)", r"(?:a)", r"(?<n>a)", r"(?P<n>a)", r"[(]?=", r"\d\\1"]
)
def test_text_that_only_looks_like_look_ahead_is_kept(pattern: str) -> None:
    assert without_look_ahead(pattern) == [pattern]


# ----------------------------------------------------------------------------------------- what cannot be held to

CANNOT: list[tuple[Any, str, Any]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems", [1, 1]),
    ({"type": "integer", "not": {"const": 5}}, "not", 5),
    ({"type": "integer", "if": {"const": 5}, "then": {"const": 6}}, "if", 5),
    ({"type": "array", "contains": {"const": 5}}, "contains", []),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired", {"a": 1}),
    ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas", {"a": 1}),
    ({"type": "object", "minProperties": 2}, "minProperties", {}),
    ({"type": "object", "propertyNames": {"not": {"const": "a"}}}, "propertyNames", {"a": 1}),
    ({"allOf": [{"type": "object"}], "unevaluatedProperties": False}, "unevaluatedProperties", {"a": 1}),
    ({"type": "string", "pattern": "^(?!a).*$"}, "pattern", "a"),
    ({"type": "string", "pattern": "^(a|b)\\1$"}, "pattern", "ab"),
    ({"$ref": "https://example.com/schema"}, "$ref", 5),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf", 5),
]


@pytest.mark.parametrize(("schema", "word", "wrong"), CANNOT, ids=[word for _, word, _ in CANNOT])
def test_unenforceable_keywords_are_an_error_if_strict_and_a_warning_if_not(schema: Any, word: str, wrong: Any) -> None:
    with pytest.raises(GrammarError, match=re.escape(word)):
        held(schema)
    result = held(schema, strict=False)
    assert len(result.warnings) == 1 and result.warnings[0].startswith("form: ") and f'"{word}' in result.warnings[0]
    assert accepts(result.text, json.dumps(wrong)), "it is not enforced"
    inner = {"type": "object", "properties": {"x": schema, "y": {"type": "integer"}}, "required": ["x", "y"]}
    result = held(inner, strict=False)
    assert accepts(result.text, json.dumps({"x": wrong, "y": 1})), "and everything else is"
    assert not accepts(result.text, json.dumps({"x": wrong, "y": "1"}))
    (warning,) = result.warnings
    assert word in ("oneOf",) or "at properties.x, " in warning


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "strin"}, "strin"),
        ({"type": "object", "properties": {"a": {"type": 5}}}, "none of JSON's"),
        (False, "nsatisfiable"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "nsatisfiable"),
        ({"$ref": "#/$defs/none"}, "points to nothing"),
        ({"type": "string", "pattern": "("}, "unclosed"),
        ({"properties": {"a": 5}}, "at properties.a, a schema must be an object"),
        ({"type": "string", "minLength": "x"}, "minLength"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_schema_that_is_wrong_is_an_error_for_everybody(schema: Any, word: str, strict: bool) -> None:
    with pytest.raises(GrammarError, match=word):
        held(schema, strict=strict)


def test_warnings_are_bounded() -> None:
    many = {"properties": {f"p{n}": {"type": "array", "uniqueItems": True} for n in range(100)}}
    assert len(held(many, strict=False).warnings) == 8
    deep: Any = {}
    for _ in range(200):
        deep = {"items": deep}
    with pytest.raises(SchemaError, match="nested too deeply"):
        prepared(deep, strict=False)


# ----------------------------------------------------------------------------------------- what is no schema


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"required": 1}, "required must be a list"),
        ({"required": [1]}, "required must be a list of names"),
        ({"required": [["a"]]}, "required must be a list of names"),
        ({"properties": ["a"]}, "properties must be an object"),
        ({"patternProperties": 1}, "patternProperties must be an object"),
        ({"anyOf": {"type": "string"}}, "anyOf must be a list"),
        ({"enum": "a"}, "enum must be a list"),
        ({"minItems": "x"}, "minItems must be a whole number"),
        ({"maxLength": 1.5}, "maxLength must be a whole number"),
        ({"maxItems": -1}, "maxItems must be a whole number"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_keyword_of_another_type_is_reported_with_its_place(part: Any, said: str, strict: bool) -> None:
    big = {"const": BIG}
    with pytest.raises(GrammarError, match=f"^at properties.x, {said}"):
        held({"type": "object", "properties": {"x": part, "y": big}}, strict=strict)
    tools = [{"function": {"name": "f", "parameters": {"type": "object", "properties": {"x": part, "y": big}}}}]
    with pytest.raises(GrammarError, match=f"^f: at properties.x, {said}"):
        callable_tools(tools, None, None)


def test_a_count_may_be_written_as_a_float() -> None:
    takes({"type": "array", "items": {"const": BIG}, "minItems": 1.0, "maxItems": 2.0}, [[BIG]], [[], [BIG] * 3])


def test_half_a_surrogate_in_a_tools_schema_is_no_error() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": "\ud800"}}}
    (callable_tool,) = callable_tools([{"function": {"name": "f", "parameters": schema}}], None, None)
    assert callable_tool.schema["properties"].keys() == {"a"}


def test_schemas_of_tools_are_bounded() -> None:
    def tool(name: str, size: int) -> dict[str, Any]:
        return {"function": {"name": name, "parameters": {"type": "object", "description": "x" * size}}}

    assert callable_tools([tool("f", MAX_TEXT - 100)], None, None)
    with pytest.raises(GrammarError, match=f"^f: the schemas of one tool may have {MAX_TEXT} bytes"):
        callable_tools([tool("f", MAX_TEXT)], None, None)
    with pytest.raises(GrammarError, match=f"^f4: .*of all tools {4 * MAX_TEXT}"):
        callable_tools([tool(f"f{at}", MAX_TEXT - 100) for at in range(5)], None, None)
    assert len(callable_tools([tool(f"f{at}", MAX_TEXT) for at in range(5)], None, ())) == 5, "those without effect"


def test_a_schema_takes_time_that_grows_with_its_length() -> None:
    def seconds(schema: Any) -> float:
        began = time.process_time()
        prepared(schema, strict=False)
        return time.process_time() - began

    assert seconds({"pattern": "^" + "(?=a)" * 40_000}) < 3
    assert seconds({"pattern": "^(?=" + "(?=a)" * 40_000}) < 3
    name, inner = "x" * 120_000, {f"p{at}": {"$ref": "#/$defs/a"} for at in range(8_000)}
    assert seconds({"$defs": {"a": {}}, "properties": {name: {"properties": inner}}}) < 3
