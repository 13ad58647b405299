from __future__ import annotations

import json
import random

import pytest

from cairn.text.output.output_parser import splitter
from cairn.text.output.tagged_call_reader import CallReader
from cairn.text.output.tool_parser import CLOSE, OPEN, ParsedCall, call_id
from cairn.types.outputs import ToolCallDelta
from cairn.types.request import OfferedTool, OutputFormat

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
    ('{"name":"f","arguments":{"x":1},"extra":[{"arguments":2}]}', "f", '{"x":1}'),
    ('{"name":"f\\u0041","arguments":{"a":"\\ud83d\\ude00 \\n"}}', "fA", '{"a":"\\ud83d\\ude00 \\n"}'),
    # Unambiguous, though badly written.
    ('{"name": "f", "arguments": {"a": "x\ny\tz"}}', "f", '{"a": "x\\ny\\tz"}'),
    (r'{"name": "f", "arguments": {"a": "\d+"}}', "f", r'{"a": "\\d+"}'),
    ('{"name": "f", "arguments": {"a": 1,},}', "f", '{"a": 1}'),
    ('{"name": "f", "arguments": {"a": True, "b": [None, False]}}', "f", '{"a": true, "b": [null, false]}'),
    ('{"name": "f", "parameters": {"a": 1}}', "f", '{"a": 1}'),
    ('{"name": "f", "arguments": {"a": 1}', "f", '{"a": 1}'),
    ('{"name": "f", "arguments": {"a": 1', "f", '{"a": 1}'),
    ('{"name": "f", "arguments": {"a": 1}}}', "f", '{"a": 1}'),
    ('{"name": "f", "arguments": "{\\"a\\": True,}"}', "f", '{"a": true}'),
    ('{"name": "f", "arguments": null}', "f", "{}"),
    ('{"name": "f", "arguments": ""}', "f", "{}"),
    ('{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', "f", '{"a": 1}'),
]

BAD = [
    *("not json", "{bad}", "", "[]", '"f"', "{}", '{"name": ""}', '{"name": 5}', '{"name": null, "arguments": {}}'),
    *('{"arguments": {"a": 1}}', '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": 5}'),
    *('{"name": "f", "arguments": "not json"}', '{"name": "f", "arguments": {"a": oops}}', "{'name': 'f'}"),
    *('{"name": "f", "arguments": {a: 1}}', '{"name": "f", "args": {"a": 1}}', '{"name": "f", "name": "g"}'),
    *('{"name": "f", "arguments": "{\\"a\\": oops}"}', '{"name": "f", "arguments": "{} x"}'),
    *('{"name": "f", "arguments": "[1]"}', '{"name": "f", "arguments": {"a": [1}}', '{"name": "f", "arguments": {"a'),
    *(
        '{"name":"f","arguments":{"x":1},"name":"g"}',
        '{"name": "f", "arguments": {"a": {"b": 1',
        "<function=f></function>",
    ),
    *('{"name": "f", "parameters": {}, "parameters": {"a": 1}}', '{"name": "f", "arguments": {}, "parameters": {}}'),
    r'{"name": "f", "arguments": {"path": "C:\Users\name"}}',
    *('{"name": "f", "arguments": {}, "arguments": {"a": 1}}', '{"name": "f", "arguments": {"a": 1} oops'),
]


def run(text: str, rng: random.Random | None = None) -> tuple[CallReader, list[ParsedCall], str]:
    """Read a text in random pieces; return the reader, its calls, and what it left unread."""
    reader = CallReader(OPEN, OutputFormat(tools=True))
    calls: list[ParsedCall] = []
    at = 0
    while at < len(text) and not reader.closed and not reader.failed:
        size = len(text) if rng is None else rng.choice((1, 2, 5))
        piece = text[at : at + size]
        read = reader.feed(piece, 0)
        assert read == len(piece) or reader.closed or reader.failed
        calls += reader.take()
        at += read
    return reader, calls, text[at:]


@pytest.mark.parametrize(("text", "name", "arguments"), GOOD)
def test_a_call_is_read_however_it_is_cut(text: str, name: str, arguments: str | None) -> None:
    """Known failure 24: arguments that are valid JSON are passed on exactly as written."""
    rng = random.Random(2)
    for pieces in (None, *[rng] * 20):
        reader, calls, left = run(text + CLOSE + "after", pieces)
        assert reader.closed
        assert left == "after"
        (call,) = calls
        assert call.name == name
        assert arguments is None or call.arguments == arguments
        (name + call.arguments).encode()  # must encode as UTF-8, which has no lone surrogates
        assert json.loads(call.arguments) == json.loads(arguments or json.dumps(json.loads(text)["arguments"]))


@pytest.mark.parametrize("text", BAD)
def test_text_that_is_not_a_call_is_returned_unchanged(text: str) -> None:
    """Known failure 24."""
    rng = random.Random(3)
    for pieces in (None, *[rng] * 10):
        reader, calls, left = run(text + CLOSE, pieces)
        reader.finish(by_model=True)
        assert reader.failed
        assert calls == reader.take() == []
        assert reader.rest + reader.again + left == OPEN + text + CLOSE


def test_a_call_comes_out_with_its_last_brace_and_not_before() -> None:
    reader = CallReader(OPEN, OutputFormat(tools=True))
    pieces = ['{"name": "write", "arg', 'uments": {"text": "on', "e tw", 'o"', "}", "}", "\n</tool_", "call>"]
    got = []
    for piece in pieces:
        reader.feed(piece, 0)
        got.append(reader.take())
    assert got == [[], [], [], [], [], [ParsedCall("write", '{"text": "one two"}')], [], []]
    assert reader.closed


def test_ids_are_the_same_again_and_differ_between_calls() -> None:
    ids = {call_id(request, choice, index) for request in range(3) for choice in range(3) for index in range(3)}
    assert len(ids) == 27
    assert call_id(1, 2, 3) == call_id(1, 2, 3)
    assert all(one.startswith("call_") and int(one[5:], 16) for one in ids)


@pytest.mark.parametrize("step", [1 << 20, 1, 7])
@pytest.mark.parametrize("kind", ["function", "parameter"])
def test_a_name_in_a_tag_has_at_most_256_characters(kind: str, step: int) -> None:
    for size in (1, 255, 256, 257, 300):
        name = "n" * size
        function, argument = (name, "x") if kind == "function" else ("f", name)
        text = (
            f"<tool_call>\n<function={function}>\n\n<parameter={argument}>\na\n</parameter>\n</function>\n</tool_call>"
        )
        tools = (OfferedTool(function, ()),)
        reader = splitter(OutputFormat(tools=True, xml=True, calls="", offered=tools), 1, 0)
        pieces = [piece for at in range(0, len(text), step) for piece in reader.push(text[at : at + step])]
        pieces += reader.finish(by_model=True)
        calls = [piece for piece in pieces if isinstance(piece, ToolCallDelta)]
        if size <= 256:
            assert "".join(call.arguments for call in calls) == f'{{"{argument}": "a"}}'
            assert calls[0].name == function and reader.complete_calls == 1
        else:
            assert not calls and "".join(piece[1] for piece in pieces if not isinstance(piece, ToolCallDelta)) == text
