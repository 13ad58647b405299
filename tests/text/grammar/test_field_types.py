"""Field types that pydantic and zod turn into a schema: enforced with `strict: true`, or refused with a reason.

pydantic's schemas are generated here. Zod's are written down as its `toJSONSchema` returns them.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import random
import re
import sys
import uuid
from typing import Annotated, Any, Literal, NamedTuple, Union

import pydantic
import pytest
from pydantic import Field

from cairn.text.grammar.grammar import GrammarError, Shape, Structure
from tests.text.walks import accepts, checked, walk

TODAY = "2026-11-26"
ID = "123e4567-e89b-12d3-a456-426614174000"


class Color(enum.Enum):
    red = "red"
    blue = "blue"


class Level(enum.IntEnum):
    low = 1
    high = 2


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = Field(le=9)


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str


class Tree(pydantic.BaseModel):
    value: int
    kids: list[Tree] = Field(default=[], max_length=2)


class Pair(NamedTuple):
    a: int
    b: str


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


PYDANTIC: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "str": (str, ["", "a"], [1, None]),
    "int": (int, [1, -5], ["1", 1.5]),
    "float": (float, [1.5, 2], ["x"]),
    "bool": (bool, [True], [1]),
    "None": (None, [None], [0]),
    "bytes": (bytes, ["a"], [1]),
    "Decimal": (decimal.Decimal, [1.5, "1.5"], [None]),
    "datetime": (datetime.datetime, [f"{TODAY}T12:00:00Z"], [TODAY]),
    "date": (datetime.date, [TODAY], ["26.11.2026"]),
    "time": (datetime.time, ["12:00:00Z"], ["noon"]),
    "timedelta": (datetime.timedelta, ["P1DT2H"], ["1 day"]),
    "UUID": (uuid.UUID, [ID], ["x"]),
    "Path": (pathlib.Path, ["/tmp/a"], [1]),
    "Pattern": (re.Pattern[str], ["^a$"], [1]),
    "IPv4Address": (ipaddress.IPv4Address, ["10.0.0.1"], ["10.0.0.256"]),
    "IPv6Address": (ipaddress.IPv6Address, ["::1"], ["10.0.0.1"]),
    "IPv4Network": (ipaddress.IPv4Network, ["10.0.0.0/8"], [1]),
    "AnyUrl": (pydantic.AnyUrl, ["https://example.com/"], ["no url"]),
    "SecretStr": (pydantic.SecretStr, ["x"], [1]),
    "Base64Str": (pydantic.Base64Str, ["YQ=="], [1]),
    "Optional": (int | None, [1, None], ["x"]),
    "Union": (Union[int, str], [1, "x"], [None]),  # noqa: UP007 (as people write it)
    "Literal": (Literal["a", 1, None], ["a", 1, None], ["b", 2]),
    "Enum": (Color, ["red"], ["green"]),
    "IntEnum": (Level, [1, 2], [3]),
    "list": (list[int], [[], [1]], [["a"]]),
    "conlist": (Annotated[list[int], Field(min_length=1, max_length=2)], [[1]], [[], [1, 2, 3]]),
    "tuple": (tuple[int, str], [[1, "a"]], [[1], ["a", 1]]),
    "tuple of any length": (tuple[int, ...], [[], [1, 2]], [["a"]]),
    "dict": (dict[str, int], [{}, {"a": 1}], [{"a": "x"}]),
    "dict of Literal": (dict[Literal["a", "b"], int], [{"a": 1}], [{"c": 1}]),
    "dict of UUID": (dict[uuid.UUID, int], [{ID: 1}], [{"x": 1}]),
    "dict of a pattern": (dict[Annotated[str, Field(pattern="^x")], int], [{"x1": 1}], [{"x1": "a"}]),
    "Any": (Any, [1, {"a": []}], []),
    "bounds": (Annotated[int, Field(ge=0, lt=10)], [0, 9], [10, -1]),
    "multiple_of": (Annotated[int, Field(multiple_of=5)], [10], [11]),
    "lengths": (Annotated[str, Field(min_length=1, max_length=2)], ["a"], ["", "abc"]),
    "pattern": (Annotated[str, Field(pattern="^[a-c]+$")], ["ab"], ["x"]),
    "model": (Cat, [{"kind": "cat", "lives": 9}], [{"kind": "cat"}, {"kind": "cat", "lives": 1, "name": "x"}]),
    "discriminated union": (
        Annotated[Union[Cat, Dog], Field(discriminator="kind")],  # noqa: UP007
        [{"kind": "dog", "name": "x"}, {"kind": "cat", "lives": 1}],
        [{"kind": "dog", "lives": 1}],
    ),
    "model in itself": (Tree, [{"value": 1, "kids": [{"value": 2}]}], [{"value": 1, "kids": [{"other": 2}]}]),
    "NamedTuple": (Pair, [[1, "a"]], [[1]]),
    "dataclass": (Point, [{"x": 1}, {"x": 1, "y": 2}], [{"y": 2}, {"x": 1, "z": 3}]),
}
NOT_HELD = {"set": (set[int], "uniqueItems", [1, 1]), "frozenset": (frozenset[str], "uniqueItems", ["a", "a"])}

_OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
_LEAP = r"(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29"
_DAY = r"(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])"
_SPAN = r"(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?"
ZOD: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "int": ({"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}, [5], [5.5]),
    "float64": ({"type": "number", "minimum": -sys.float_info.max, "maximum": sys.float_info.max}, [1.5], ["x"]),
    "email": (
        {"type": "string", "format": "email",
         "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)"
         "+[A-Za-z]{2,}$"},
        ["a.b@example.com"], ["a..b@example.com", ".a@example.com"],
    ),
    "url": ({"type": "string", "format": "uri"}, ["https://example.com"], ["x y"]),
    "nanoid": ({"type": "string", "format": "nanoid", "pattern": "^[a-zA-Z0-9_-]{21}$"}, ["a" * 21], ["a"]),
    "ulid": ({"type": "string", "format": "ulid", "pattern": "^[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25}$"},
             ["0" * 26], ["8" * 26]),
    "jwt": ({"type": "string", "format": "jwt"}, ["a.b.c"], [1]),
    "emoji": (
        {"type": "string", "format": "emoji", "pattern": r"^(?=[\s\S]*[\p{Extended_Pictographic}\p{Regional_Indicator}"
         r"\u20E3])[\p{Extended_Pictographic}\p{Emoji_Component}]+$"},
        ["\U0001f600"], ["a"],
    ),
    "base64": ({"type": "string", "format": "base64", "contentEncoding": "base64",
                "pattern": "^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$"},
               ["", "YQ=="], ["Y"]),
    "cidrv4": ({"type": "string", "format": "cidrv4", "pattern": r"^([0-9]{1,3}\.){3}[0-9]{1,3}\/[0-9]{1,2}$"},
               ["10.0.0.0/8"], ["10.0.0.0"]),
    "e164": ({"type": "string", "format": "e164", "pattern": r"^\+[1-9]\d{6,14}$"}, ["+4712345678"], ["12"]),
    "date": ({"type": "string", "format": "date", "pattern": rf"^(?:{_LEAP}|\d{{4}}-(?:{_DAY}))$"}, [TODAY], ["x"]),
    "datetime": (
        {"type": "string", "format": "date-time", "pattern": rf"^(?:{_LEAP}|\d{{4}}-(?:{_DAY}))T(?:(?:[01]\d|2[0-3]):"
         r"[0-5]\d:[0-5]\d(?:\.\d+)?(?:Z))$"},
        [f"{TODAY}T12:00:00.5Z"], [f"{TODAY}T12:00:00+01:00", f"{TODAY}T12:00:00.{'1' * 30}Z"],
    ),
    "duration": (
        {"type": "string", "format": "duration", "pattern": rf"^P(?:(\d+W)|(?!.*W)(?=\d|T\d){_SPAN})$"}, ["P1D"], ["P"],
    ),
    "hostname": (
        {"type": "string", "format": "hostname", "pattern": r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}"
         r"[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$"},
        ["a.example"], ["-a"],
    ),
    "startsWith": ({"type": "string", "format": "starts_with", "pattern": "^ab.*"}, ["abc"], ["b"]),
    "literals": ({"enum": [1, "b", None]}, [1, "b", None], ["1"]),
    "tuple with a rest": ({"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "number"},
                           "minItems": 1}, [["a"], ["a", 1]], [[], [1]]),
    "object": ({**_OBJECT, "additionalProperties": False}, [{"a": "x"}], [{"a": "x", "b": 1}]),
    "looseObject": ({**_OBJECT, "additionalProperties": {}}, [{"a": "x", "b": 1}], [{"b": 1}]),
    "catchall": ({**_OBJECT, "additionalProperties": {"type": "number"}}, [{"a": "x", "b": 1}], [{"a": "x", "b": "y"}]),
    "record": ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
               [{}, {"a": 1}], [{"a": "x"}]),
    "record of an enum": (
        {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]},
         "additionalProperties": {"type": "number"}, "required": ["a", "b"]},
        [{"a": 1, "b": 2}], [{"a": 1}, {"a": 1, "b": 2, "c": 3}],
    ),
    "partialRecord": (
        {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]},
         "additionalProperties": {"type": "number"}},
        [{}, {"b": 2}], [{"c": 3}],
    ),
    "record of a pattern": (
        {"type": "object", "propertyNames": {"type": "string", "pattern": "^x"},
         "additionalProperties": {"type": "number"}},
        [{"x": 1}], [{"y": 1}],
    ),
    "nullish": ({"type": ["number", "null"]}, [1, None], ["x"]),
    "discriminatedUnion": (
        {"oneOf": [{**_OBJECT, "properties": {"a": {"type": "string", "const": one}}, "additionalProperties": False}
                   for one in ("x", "y")]},
        [{"a": "x"}, {"a": "y"}], [{"a": "z"}],
    ),
    "lazy": ({"type": "object", "properties": {"v": {"type": "number"}, "next": {"$ref": "#"}}, "required": ["v"],
              "additionalProperties": False}, [{"v": 1, "next": {"v": 2}}], [{"v": 1, "next": {}}]),
    "json": (
        {"anyOf": [{"type": ["string", "number", "boolean", "null"]}, {"type": "array", "items": {"$ref": "#"}},
                   {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"$ref": "#"}}]},
        [1, [{"a": [None]}]], [],
    ),
    "templateLiteral": ({"type": "string", "pattern": r"^v-?\d+(?:\.\d+)?$"}, ["v1.5"], ["1"]),
}  # fmt: skip


def held(schema: Any, *, strict: bool = True) -> str:
    return checked(Shape(structure=Structure(kind="json", text=json.dumps(schema), strict=strict)))


def test_every_field_type_is_listed() -> None:
    assert len(PYDANTIC) + len(NOT_HELD) + len(ZOD) >= 51


@pytest.mark.parametrize("name", PYDANTIC)
def test_a_field_of_pydantics(name: str) -> None:
    """pydantic parses what the grammar accepts, and what the grammar generates on its own."""
    kind, good, bad = PYDANTIC[name]
    model = pydantic.create_model("Answer", x=(kind, ...))
    grammar = held(model.model_json_schema())
    for value in good:
        assert accepts(grammar, json.dumps({"x": value})), value
        model.model_validate_json(json.dumps({"x": value}))
    for value in bad:
        assert not accepts(grammar, json.dumps({"x": value})), value
    assert not accepts(grammar, json.dumps({"x": good[0], "more": 1})), "no field is made up"
    if name not in (
        "dict of a pattern",
        "Pattern",
        "Base64Str",
        "bytes",
        "IPv4Network",
        "Decimal",
        "AnyUrl",
        "IPv6Address",
    ):
        for seed in range(5):  # the others have formats that say nothing, or less than pydantic demands
            said = walk(grammar, random.Random(seed), most=400)
            if said is not None:
                model.model_validate_json(said)


@pytest.mark.parametrize("name", NOT_HELD)
def test_a_field_of_pydantics_that_cannot_be_held_to(name: str) -> None:
    kind, word, wrong = NOT_HELD[name]
    schema = pydantic.create_model("Answer", x=(kind, ...)).model_json_schema()
    with pytest.raises(GrammarError, match=f'at properties.x, "{word}" cannot be enforced'):
        held(schema)
    assert accepts(held(schema, strict=False), json.dumps({"x": wrong}))


@pytest.mark.parametrize("name", ZOD)
def test_a_field_of_zods(name: str) -> None:
    schema, good, bad = ZOD[name]
    for whole, wrapped in ((schema, False), ({"type": "object", "properties": {"x": schema}, "required": ["x"]}, True)):
        if wrapped and "#" in json.dumps(schema):
            continue  # the schema refers to its root
        grammar = held({"$schema": "https://json-schema.org/draft/2020-12/schema", **whole})
        for value in good:
            assert accepts(grammar, json.dumps({"x": value} if wrapped else value, ensure_ascii=False)), value
        for value in bad:
            assert not accepts(grammar, json.dumps({"x": value} if wrapped else value, ensure_ascii=False)), value


def test_a_field_of_zods_with_bounds_that_doubles_do_not_hold() -> None:
    float32 = {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}
    for strict in (True, False):
        with pytest.raises(GrammarError, match="minimum is beyond 2"):
            held(float32, strict=strict)
