from __future__ import annotations

import json
import random

import pytest

from cairn.text.tools import CLOSE, OPEN, CallScanner, call_id
from cairn.types import ToolCallDelta

GOOD = [
    ('{"name": "f", "arguments": {"x": 1}}', "f", '{"x": 1}'),
    ('\n{"name": "get_weather", "arguments": {"city": "\\u00c5rhus", "n": [1, {"a": null}]}}\n', "get_weather", None),
    ('{"arguments": {"x": "</tool_call>"}, "name": "f"}', "f", '{"x": "</tool_call>"}'),
    ('{"name":"f","arguments":{}}', "f", "{}"),
    ('{"name":"f"}', "f", "{}"),
    ('{"id": 7, "name": "f", "arguments":  { "a" : 1.50 } }', "f", '{ "a" : 1.50 }'),
    ('{"name":"f","arguments":"{\\"a\\": \\"b\\"}"}', "f", '{"a": "b"}'),
    ('{"name":"a\\ud800","arguments":{}}', "a\ufffd", "{}"),
    ('{"name":"f","arguments":"{\\"a\\": \\"\\ud800\\"}"}', "f", '{"a": "\ufffd"}'),
    ('{"name":"f","arguments":{"x":1},"extra":[{"arguments":2}],"name":"g"}', "f", '{"x":1}'),
    ('{"name":"f\\u0041","arguments":{"a":"\\ud83d\\ude00 \\n"}}', "fA", '{"a":"\\ud83d\\ude00 \\n"}'),
]

BAD = [
    *("not json", "{bad}", "", "[]", '"f"', "{}", '{"name": ""}', '{"name": 5}', '{"name": null, "arguments": {}}'),
    *('{"arguments": {"a": 1}}', '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": 5}'),
    *('{"name": "f", "arguments": "not json"}', '{"name": "f", "arguments": {"a": oops}}', "{'name': 'f'}"),
    *('{"name": "f", "arguments": {a: 1}}', '{"name": "f", "args": {"a": 1}}', '{"name": "f", "name": "g"}'),
    *('{"name": "f", "arguments": "{\\"a\\": oops}"}', '{"name": "f", "arguments": "{} x"}'),
    *('{"name": "f"}</tool_ call>', '{"name": "f"} x', '{"name": "f",}', '{"name": "f", "arguments": "[1]"}'),
]


def run(text: str, rng: random.Random | None = None) -> tuple[CallScanner, list[ToolCallDelta], str]:
    """Scan in random pieces: the scanner, its deltas, and what it left unread."""
    scanner = CallScanner(3, "call_x", OPEN)
    deltas: list[ToolCallDelta] = []
    at = 0
    while at < len(text) and not scanner.complete and not scanner.failed:
        size = len(text) if rng is None else rng.choice((1, 2, 5))
        piece = text[at : at + size]
        read, new = scanner.feed(piece, 0)
        assert read == len(piece) or scanner.complete or scanner.failed
        deltas += new
        at += read
    return scanner, deltas, text[at:]


@pytest.mark.parametrize(("text", "name", "arguments"), GOOD)
def test_a_call_is_read_however_it_is_cut(text: str, name: str, arguments: str | None) -> None:
    """Known failure 24: the pieces join to the arguments exactly as written."""
    rng = random.Random(2)
    for pieces in (None, *[rng] * 20):
        scanner, deltas, left = run(text + CLOSE + "after", pieces)
        assert scanner.complete
        assert left == "after"
        assert [one.index for one in deltas] == [3] * len(deltas)
        assert [(one.id, one.name) for one in deltas] == [("call_x", name)] + [("", "")] * (len(deltas) - 1)
        joined = "".join(one.arguments for one in deltas)
        assert arguments is None or joined == arguments
        (name + joined).encode()  # goes out as UTF-8, which has no lone surrogates
        assert json.loads(joined) == json.loads(arguments or json.dumps(json.loads(text)["arguments"]))


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_call_is_given_back_unchanged(text: str) -> None:
    """Known failure 24."""
    rng = random.Random(3)
    for pieces in (None, *[rng] * 10):
        scanner, deltas, left = run(text + CLOSE, pieces)
        assert scanner.failed
        assert deltas == []
        assert scanner.rest + scanner.again + left == OPEN + text + CLOSE


def test_arguments_come_while_they_are_written() -> None:
    scanner = CallScanner(0, "id", OPEN)
    pieces = ['{"name": "write", "arg', 'uments": {"text": "on', "e tw", 'o"', "}", "}", "\n</tool_", "call>"]
    got = ["".join(one.arguments for one in scanner.feed(piece, 0)[1]) for piece in pieces]
    assert got == ["", '{"text": "on', "e tw", 'o"', "", "", "", "}"]


def test_the_last_brace_waits_until_the_call_turned_out_right() -> None:
    """Known failure 15: complete arguments always belong to a complete call."""
    scanner, deltas, left = run('{"name": "f", "arguments": {"a": 1} oops')
    assert scanner.complete
    assert scanner.failed
    assert "".join(one.arguments for one in deltas) == '{"a": 1}'
    assert scanner.rest + scanner.again + left == " oops"


def test_a_call_without_its_closing_tag_is_complete_only_by_the_models_will() -> None:
    """Known failure 15."""
    for tail in ("", "\n", "</tool"):
        scanner, deltas, _ = run('{"name": "f", "arguments": {"a": 1}}' + tail)
        assert not scanner.complete
        deltas += scanner.end()
        assert scanner.complete
        assert "".join(one.arguments for one in deltas) == '{"a": 1}'
    for tail in ("", ", ", ', "id": "c'):
        scanner, deltas, _ = run('{"name": "f", "arguments": {"a": 1}' + tail)
        deltas += scanner.end()
        assert scanner.complete
        assert "".join(one.arguments for one in deltas) == '{"a": 1}'
    scanner, deltas, _ = run('{"name": "f", "arguments": {"a": 1')
    assert scanner.end() == []
    assert not scanner.complete


def test_ids_are_the_same_again_and_differ_between_calls() -> None:
    ids = {call_id(request, choice, index) for request in range(3) for choice in range(3) for index in range(3)}
    assert len(ids) == 27
    assert call_id(1, 2, 3) == call_id(1, 2, 3)
    assert all(one.startswith("call_") and int(one[5:], 16) for one in ids)
