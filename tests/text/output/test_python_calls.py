"""Values and calls in Python syntax and in braces: their meaning, texts that are none, and linear time."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from cairn.text.output.brace_calls import brace_call
from cairn.text.output.python_calls import literal, python_calls

MARK = '<|"|>'
LONG = "long text, it\\'s " * 1000


def test_calls_with_many_values() -> None:
    """Lone surrogates, which UTF-8 cannot hold, are written as escapes."""
    many = ", ".join(f"'a{number}'" for number in range(300))
    (call,) = python_calls(f"[f(x=[{many}], y=('(', \"b)\", {{'c': 'it\\'s'}}), z='\\ud800')]") or ()
    assert call.arguments.encode()
    assert json.loads(call.arguments) == {
        "x": [f"a{number}" for number in range(300)],
        "y": ["(", "b)", {"c": "it's"}],
        "z": "\ud800",
    }
    assert python_calls("[f(x=['a'" + ", 'a'" * 500) is None


@pytest.mark.parametrize("said", [r"{x:{'\ud800é':1}}", r'{x:{"\ud800é":1}}', r'(x={"\ud800é": 1})'])
def test_lone_surrogates_in_keys_are_written_as_escapes(said: str) -> None:
    called = python_calls(f"[f{said}]") if said.startswith("(") else [brace_call(f"f{said}", MARK)]
    (call,) = called or ()
    assert call is not None and call.arguments.encode()
    assert json.loads(call.arguments) == {"x": {"\ud800é": 1}}


def test_long_texts_between_single_quotes() -> None:
    (call,) = python_calls(f"[f(path='a.txt', text='{LONG}')]") or ()
    assert json.loads(call.arguments) == {"path": "a.txt", "text": LONG.replace("\\", "")}


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("'a'", "a"),
        (r'"a\d"', r"a\d"),
        (r"r'\d'", r"\d"),
        ("'''a'b\n''c'''", "a'b\n''c"),
        ("'a' 'b'", "ab"),
        ("'a\nb'", "a\nb"),
        (r"'\x41\u00e9\101\n'", "AéA\n"),
        ("''", ""),
        (r"'it\'s'", "it's"),
        ("[1, None,]", [1, None]),
        ("(1)", 1),
        ("(1,)", [1]),
        ("()", []),
        ("{'a': [1.5, {\"b\": ()}]}", {"a": [1.5, {"b": []}]}),
        ("0x1F", 31),
        ("1_000", 1000),
        (".5", 0.5),
        ("-3", -3),
        ("+3", 3),
        ("True", True),
        ("null", None),
    ],
)
def test_a_value_of_pythons(said: str, meant: Any) -> None:
    written = literal(said)
    assert written is not None and json.loads(written) == meant


@pytest.mark.parametrize(
    "said", ["nan", "1+2j", "{'a'}", "007", "Oslo", "'open", "[1", "1 2", "f(1)", "", "[" * 70 + "]" * 70, "1" * 401]
)
def test_invalid_python_values(said: str) -> None:
    assert literal(said) is None


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ('{q:Tokyo<|"|>}', {"q": "Tokyo"}),
        ('{q:Paris, France<|"|>,limit:5}', {"q": "Paris, France", "limit": 5}),
        ('{q:1 Main Street<|"|>,n:2}', {"q": "1 Main Street", "n": 2}),
        ("{q:what's up<|\"|>}", {"q": "what's up"}),
        ('(x=1, q=<|"|>a<|"|>)', {"x": 1, "q": "a"}),
        ("(q='a, b', y=True)", {"q": "a, b", "y": True}),
        ('(key: "value")', {"key": "value"}),
        ("{a:['x',\"y\"],o:{\"m\":'f'}}", {"a": ["x", "y"], "o": {"m": "f"}}),
        ('{code:<|"|>x(<|"|>a<|"|>).y<|"|>,n:[<|"|>r<|"|>]}', {"code": 'x(<|"|>a<|"|>).y', "n": ["r"]}),
        ('{content:"has } brace"}', {"content": "has } brace"}),
        ("{a:1,}", {"a": 1}),
        ("()", {}),
        # Neither marks nor quotes: the end of a string is a guess.
        ("{q:Tokyo}", None),
        ('{q:Oslo,b:<|"|>x<|"|>}', None),
        ("(q=Tokyo)", None),
        ("(1, 2)", None),
        ("{q=1}", None),
        ('{q:<|"|>open}', None),
        ("{q:'open}", None),
    ],
)
def test_calls_of_gemma_as_it_writes_them_now_and_then(said: str, meant: Any) -> None:
    for before in ("call:", ""):
        call = brace_call(f"{before}f{said}", MARK)
        assert call is None if meant is None else call is not None and json.loads(call.arguments) == meant


@pytest.mark.parametrize("piece", ["'", "'a", "\\'", "''a", "[", "{'a':", "'x', ", '"', "('", "\\", MARK, f"{MARK},"])
def test_values_are_read_in_one_pass(piece: str) -> None:
    """Four times the text takes only a few times as long, whatever it consists of."""
    times = []
    for size in (5_000, 20_000):
        text = "[" + piece * size
        began = time.process_time()
        literal(text)
        python_calls(f"f(x={text}")
        brace_call("call:f{a:" + text, MARK)
        times.append(time.process_time() - began)
    assert times[1] < 12 * times[0] + 0.1
