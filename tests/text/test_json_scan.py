from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.text.json_scan import MAX_DEPTH, MAX_SCALAR, JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def scan(text: str, sizes: random.Random | None = None) -> tuple[JsonScanner, int]:
    """Feed in random pieces; the scanner and the characters it read."""
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


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='{}[]",:\\ntrue0-.e1 u\x01', max_size=20), st.integers())
def test_agrees_with_the_json_module_on_what_is_json(text: str, seed: int) -> None:
    try:
        json.loads(text)
        valid = True
    except ValueError:
        valid = False
    scanner, at = scan(text + " ", random.Random(seed))
    assert (scanner.done and not text[at:].strip()) == valid, text


@pytest.mark.parametrize(
    "text",
    [
        *("{bad}", "{'a': 1}", '{"a": oops}', '{"a" 1}', '{"a": 1,}', "[1,]", "[1 2]", '"\x01"', '"\n"', '"\\x"'),
        *(
            '"\\u12g4"',
            '"\\u123"',
            "01;",
            "1.;",
            "-;",
            "nul;",
            "trueish;",
            "}",
            "]",
            "[}",
            "{]",
            '{"a":}',
            ",",
            ":",
            "NaN",
        ),
        *("Infinity", "-Infinity", "+1", ".5"),
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
    assert (pieces.failed, pieces.done, pieces.values, same) == (whole.failed, whole.done, whole.values, at), text


def test_depth_and_number_length_are_bounded() -> None:
    assert scan("[" * MAX_DEPTH + "]" * MAX_DEPTH)[0].done
    assert scan("[" * (MAX_DEPTH + 1))[0].failed
    assert scan("1" * MAX_SCALAR + " ")[0].done
    assert scan("1" * (MAX_SCALAR + 1))[0].failed
