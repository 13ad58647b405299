from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.text.output.json_scan import MAX_DEPTH, MAX_SCALAR, JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def scan(text: str, sizes: random.Random | None = None) -> tuple[JsonScanner, int]:
    """Feed a text in random pieces; return the scanner and the number of characters it read."""
    scanner = JsonScanner()
    at = 0
    while at < len(text) and not scanner.done and not scanner.failed:
        size = len(text) if sizes is None else sizes.randint(1, 4)
        piece = text[at : at + size]
        read = scanner.feed(piece)
        at += read
        assert read == len(piece) or scanner.done or scanner.failed
    return scanner, at


@settings(max_examples=200, deadline=None)
@given(VALUES, st.integers(), st.sampled_from([None, 1, 3]))
def test_every_json_value_is_read_to_its_end_however_it_is_cut(value: object, seed: int, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=bool(seed % 2), indent=indent)
    for sizes in (None, random.Random(seed)):
        scanner, at = scan(text + " ", sizes)
        assert scanner.done
        assert at == len(text)
        assert scanner.text == text


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="{}[]\",:\\ntrue0-.e1 uTN\x01'", max_size=20), st.integers())
def test_valid_json_is_read_unchanged(text: str, seed: int) -> None:
    try:
        json.loads(text)
        valid = True
    except ValueError:
        valid = False
    scanner, at = scan(text + " ", random.Random(seed))
    whole = scanner.done and not text[at:].strip()
    assert whole or not valid, text
    if whole:
        json.loads(scanner.text)
        assert not valid or scanner.text == text[:at]


@pytest.mark.parametrize(
    ("text", "strict"),
    [
        ('"a\nb\tc\x01"', '"a\\nb\\tc\\u0001"'),
        ('{"k\n": "\r"}', '{"k\\n": "\\r"}'),
        (r'"\d+\.\w"', r'"\\d+\\.\\w"'),
        (r'"it\'s"', '"it\'s"'),
        (r'"C:\users \u12g4 \u00e5"', r'"C:\\users \\u12g4 \u00e5"'),
        (r'"\u123"', r'"\\u123"'),
        ('"a\\\nb"', r'"a\\\nb"'),
        ('{"a": 1, }', '{"a": 1 }'),
        ("[1,[2,],]", "[1,[2]]"),
        ("[True, False,None]", "[true, false,null]"),
        ('{"a": True}', '{"a": true}'),
    ],
)
def test_unambiguous_faults_are_mended(text: str, strict: str) -> None:
    for sizes in (None, *[random.Random(n) for n in range(5)]):
        scanner, at = scan(text, sizes)
        assert (scanner.done, at, scanner.text) == (True, len(text), strict)


@pytest.mark.parametrize("text", [r'"C:\Users\name\temp"', r'{"a": "\d\bx"}', r'"\u12g\nb"', r'["\ta\c"]'])
def test_a_text_with_an_invalid_and_a_doubtful_escape_is_ambiguous(text: str) -> None:
    for sizes in (None, *[random.Random(n) for n in range(5)]):
        scanner, _ = scan(text, sizes)
        assert scanner.failed, text
    for same in (r'"\d+\n"', r'"C:\Users\Ada"', r'"a\nb"', r'["\d", "\nb"]'):
        assert scan(same, random.Random(1))[0].done


@pytest.mark.parametrize(
    ("text", "lacking"),
    [
        ('{"a": 1', 1), ('{"a": {"b": "c"', 2), ('{"a": {"b": tru', 0), ('{"a": {"b": None', 2), ('{"a": [1', 0),
        ('{"a"', 0), ('{"a": ', 0), ('{"a": 1,', 0), ("{", 0), ('{"a": "b', 0), ('{"a": 1}', 0), ('{"a": 1<', 1),
        ('{"a": {"b": 1} <', 1), ('{"a": 1, <', 0), ('{"a": 1x', 0),
    ],
)  # fmt: skip
def test_missing_braces_are_counted_and_added(text: str, lacking: int) -> None:
    for sizes in (None, random.Random(3)):
        scanner, _ = scan(text, sizes)
        assert scanner.lacking == lacking
        if lacking:
            scanner.close()
            assert scanner.done
            assert json.loads(scanner.text) == json.loads(text.rstrip("< ").replace("None", "null") + "}" * lacking)


def test_members_of_the_outermost_object_are_reported() -> None:
    scanner, _ = scan('{"a\\n" : {"b": [1, {"c": 2}]} , "d":"e","f": -1.0}', random.Random(1))
    assert scanner.members == [("a\n", '{"b": [1, {"c": 2}]}'), ("d", '"e"'), ("f", "-1.0")]
    assert scan('{"a": 1, "b', None)[0].key == "a"
    assert scan('[{"a": 1}]', None)[0].members == []


@pytest.mark.parametrize(
    "text",
    [
        *("{bad}", "{'a': 1}", '{"a": oops}', '{"a" 1}', '{"a": 1,,}', "[,]", "[1 2]", "{,}", "01;", "1.;", "-;"),
        *("nul;", "trueish;", "TRUE", "}", "]", "[}", "{]", '{"a":}', ",", ":", "NaN", "Infinity", "-Infinity", "+1"),
        *(".5", '["a":1]', '{"a",}'),
    ],
)
def test_fails_at_the_first_wrong_character(text: str) -> None:
    for sizes in (None, random.Random(1)):
        assert scan(text, sizes)[0].failed


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='{}[]",:\\truefalsn0-.e1 u\x01', max_size=20), st.integers())
def test_stops_at_the_same_character_however_it_is_cut(text: str, seed: int) -> None:
    whole, at = scan(text + ";")
    pieces, same = scan(text + ";", random.Random(seed))
    assert (pieces.failed, pieces.done, pieces.text, same) == (whole.failed, whole.done, whole.text, at), text


def test_depth_and_number_length_are_bounded() -> None:
    assert scan("[" * MAX_DEPTH + "]" * MAX_DEPTH)[0].done
    assert scan("[" * (MAX_DEPTH + 1))[0].failed
    assert scan("1" * MAX_SCALAR + " ")[0].done
    assert scan("1" * (MAX_SCALAR + 1))[0].failed
