"""Calls that are streamed while they are written: they stay calls, however they end and however the text is cut."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from cairn.text.output.call_formats import BY_NAME, name_of
from cairn.text.output.json_scan import JsonScanner
from cairn.text.output.output_parser import splitter
from cairn.text.output.tool_parser import Piece, offered_tools, written_id
from cairn.types.outputs import ToolCallDelta
from cairn.types.request import OutputFormat
from tests.text.output.call_pieces import whole_calls

PROPERTIES = {"path": {"type": "string"}, "text": {"type": "string"}, "mode": {"type": "integer"}}
TOOLS = [
    {"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": PROPERTIES}}}
]
TEXT = 'He said "hi" & went.\n\tif x < 3 and y > 2:\n        return {1: [2]}\n\\d+ </p> ' * 20
GIVEN = {"path": "a.txt", "text": TEXT, "mode": 1}
JSON = json.dumps(GIVEN)
DEEPSEEK = "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>"
DEEPSEEK_END = "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>"


def tagged(key: tuple[str, str], end: str, given: dict[str, Any] = GIVEN) -> str:
    return "".join(f"{key[0]}{name}{key[1]}{value}{end}" for name, value in given.items())


QWEN = tagged(("<parameter=", ">\n"), "\n</parameter>\n")
MINIMAX = tagged(('<parameter name="', '">'), "</parameter>\n")
SEED = tagged(("<parameter=", ">"), "</parameter>\n")
GLM = tagged(("<arg_key>", "</arg_key>\n<arg_value>"), "</arg_value>\n")
OBJECT = f'{{"name": "write", "arguments": {JSON}}}'
WRITTEN = {
    "hermes": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "qwen_xml": f"<tool_call>\n<function=write>\n{QWEN}</function>\n</tool_call>",
    "cohere": f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "write", "parameters": {JSON}}}]<|END_ACTION|>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>"
    f"{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": f"{DEEPSEEK}function<\uff5ctool\u2581sep\uff5c>write\n```json\n{JSON}\n```{DEEPSEEK_END}",
    "deepseek_v31": f"{DEEPSEEK}write<\uff5ctool\u2581sep\uff5c>{JSON}{DEEPSEEK_END}",
    "mistral_v11": f"[TOOL_CALLS]write[CALL_ID]abcdefghi[ARGS]{JSON}",
    "phi": f"<|tool_call|>[{OBJECT}]<|/tool_call|>",
    "granite": f"<|tool_call|>[{OBJECT}]",
    "nemotron": f"<TOOLCALL>[{OBJECT}]</TOOLCALL>",
    "minimax": f'<minimax:tool_call>\n<invoke name="write">\n{MINIMAX}</invoke>\n</minimax:tool_call>',
    "seed": f"<seed:tool_call>\n<function=write>\n{SEED}</function>\n</seed:tool_call>",
    "glm": f"<tool_call>write\n{GLM}</tool_call>",
    "harmony": f"<|channel|>commentary to=functions.write <|constrain|>json<|message|>{JSON}<|call|>",
}
HEADS = {name: text.partition(JSON)[0] for name, text in WRITTEN.items()}
"""The text in front of the arguments."""
HEADS |= {name: WRITTEN[name].partition("path")[0] for name in ("qwen_xml", "minimax", "seed", "glm")}
CUTS = 12


def output_of(name: str, **more: Any) -> OutputFormat:
    form = BY_NAME[name]
    return OutputFormat(
        tools=True,
        reasoning=True,
        xml=name == "qwen_xml",
        calls="" if form.plain else name_of(form),
        thoughts="harmony" if name == "harmony" else "",
        offered=offered_tools(TOOLS, xml=form.kind == "tagged"),
        **more,
    )


def said(pieces: list[Piece]) -> str:
    return "".join(piece[1] for piece in pieces if not isinstance(piece, ToolCallDelta))


def read(
    text: str, output: OutputFormat, rng: random.Random | None = None, *, by_model: bool = True
) -> tuple[str, list[tuple[str, str]], int, bool]:
    """Return content, calls, the number of complete calls, and whether anything could not be parsed."""
    reader, at, pieces = splitter(output, 1, 0), 0, []
    while at < len(text):
        size = len(text) if rng is None else rng.choice([1, 1, 2, 7, 50])
        pieces += reader.push(text[at : at + size])
        at += size
    pieces += reader.finish(by_model=by_model)
    return said(pieces), whole_calls(pieces), reader.complete_calls, reader.unread


def alike(text: str, output: OutputFormat, *, by_model: bool = True) -> tuple[str, list[tuple[str, str]], int, bool]:
    result = read(text, output, by_model=by_model)
    for seed in range(CUTS):
        assert read(text, output, random.Random(seed), by_model=by_model) == result, (
            f"the result depends on how it is cut: {text!r}"
        )
    return result


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("name", WRITTEN)
def test_names_and_arguments_come_as_they_are_written(name: str, held: bool) -> None:
    text, reader, behind = WRITTEN[name], splitter(output_of(name, held=held), 1, 0), []
    pieces: list[Piece] = reader.push("" if name == "harmony" else "Well.\n")
    named = 0
    for at, character in enumerate(text):
        pieces += reader.push(character)
        calls = whole_calls(pieces)
        named = named or (at if calls else 0)
        if calls and calls[0][1]:
            passed = calls[0][1][:-4]  # its end may be the beginning of an escape
            behind.append(len(text[:at]) - len(HEADS[name]) - len(passed))
            assert JSON.startswith(passed)
    assert len(HEADS[name]) - 1 <= named <= len(HEADS[name]) + len("path</arg_key>")
    assert len(behind) > 0.9 * len(TEXT) and max(behind) < 200, "it lags a tag behind, and no more"
    pieces += reader.finish(by_model=True)
    assert [(call, json.loads(arguments)) for call, arguments in whole_calls(pieces)] == [("write", GIVEN)]
    assert said(pieces) == ("" if name == "harmony" else "Well.") and not reader.unread


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_that_is_cut_stays_cut(name: str) -> None:
    """No part of it becomes content; before its arguments begin, all of it does."""
    text, rng = WRITTEN[name], random.Random(1)
    whole = json.dumps(GIVEN)
    for size in {*range(1, len(HEADS[name])), *rng.sample(range(len(HEADS[name]) + 20, len(text)), 30)}:
        content, calls, complete, unread = alike(text[:size], output_of(name), by_model=False)
        if size < len(HEADS[name]):
            assert (calls, complete) == ([], 0) and (content in (text[:size], "") or name == "harmony")
        else:
            assert content == "" and len(calls) == 1 and whole.startswith(calls[0][1]) and not unread
            assert complete == (size >= len(text) - len("\n]</tool_calls_section_end|>") and complete)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_that_its_model_breaks_off_is_still_a_call(name: str) -> None:
    text = WRITTEN[name][: len(HEADS[name]) + 300]
    content, calls, complete, unread = alike(text, output_of(name))
    assert (content, complete, unread) == ("", 1, True)
    assert calls[0][0] == "write" and calls[0][1].startswith(JSON[:200])
    with pytest.raises(ValueError, match=r"."):
        json.loads(calls[0][1])


@pytest.mark.parametrize("name", WRITTEN)
def test_what_only_looks_like_the_beginning_of_a_call_is_content(name: str) -> None:
    """The opening tag alone, a tool that was not offered, or a name followed by something else."""
    text, output = WRITTEN[name], output_of(name)
    head = HEADS[name]
    for other in (
        head + "x" * (name == "harmony"),
        head.replace("write", "erase") + text[len(head) :][:100],
        head.rstrip('{"') + "x is how",
    ):
        content, calls, complete, _ = alike(other, output)
        assert (calls, complete) == ([], 0), other
        assert content.replace("\n", "") == other.replace("\n", "") or name == "harmony", other


@pytest.mark.parametrize("name", WRITTEN)
def test_broken_calls_are_read_alike_at_every_cut(name: str) -> None:
    form, output = BY_NAME[name], output_of(name)
    parts = ["", "{", "}", '"', "\\", "\\d", "x", "]", ",", "\n", form.end, form.close, form.begin, "</parameter>", "é"]
    short = WRITTEN[name].replace(json.dumps(TEXT)[1:-1], "a, b").replace(TEXT, "a, b")
    for seed in range(60):
        rng = random.Random(seed)
        text = short
        for _ in range(rng.choice((1, 1, 2, 3))):
            start = rng.randrange(len(text))
            text = text[:start] + rng.choice(parts) + text[start + rng.choice((0, 1, 4, 20)) :]
        text += rng.choice(["", " more", short])
        content, calls, complete, _ = alike(text, output)
        assert len(calls) == complete
        if not calls and name != "harmony":
            assert content.replace("\n", "") == text.replace("\n", "")
        alike(text[: rng.randrange(len(text))], output, by_model=False)


def test_text_behind_a_broken_call_is_read() -> None:
    hermes, xml, kimi = output_of("hermes"), output_of("qwen_xml"), output_of("kimi")
    good = WRITTEN["hermes"]
    bad = '<tool_call>{"name": "write", "arguments": {"path": "a" "b"}}'
    assert alike(f"{bad}</tool_call>\nDone.", hermes) == ("Done.", [("write", '{"path": "a" "b"}}')], 1, True)
    assert alike(f"{bad}\n{good}", hermes)[1] == [("write", '{"path": "a" "b"}}'), ("write", JSON)]
    half = "<tool_call>\n<function=write>" + 2 * "\n<parameter=path>\na\n</parameter>"
    content, calls, complete, _ = alike(f"{half}\n{WRITTEN['qwen_xml']}", xml)
    assert (content, complete) == ("", 2) and json.loads(calls[1][1]) == GIVEN
    broken = WRITTEN["kimi"].replace("path", 'pa"th')
    content, calls, complete, _ = alike(f"{broken}\nDone.", kimi)
    assert (content, complete) == ("Done.", 1) and calls[0][1].startswith('{"pa"th')


def test_an_ambiguous_path_is_passed_on_as_written() -> None:
    """Its backslashes are ambiguous, so it must not be streamed with the wrong meaning."""
    text = '<tool_call>{"name": "write", "arguments": {"path": "C:\\dir\\new", "mode": 1}}</tool_call>'
    content, calls, complete, unread = alike(text, output_of("hermes"))
    assert (content, complete, unread) == ("", 1, True) and calls[0][1] == '{"path": "C:\\dir\\new", "mode": 1}}'
    with pytest.raises(ValueError, match="escape"):
        json.loads(calls[0][1])
    regex = text.replace("\\dir\\new", "\\d+")
    assert json.loads(alike(regex, output_of("hermes"))[1][0][1])["path"] == "C:\\d+"


def test_ids_are_those_that_stand_before_the_arguments() -> None:
    for where, text in (
        ("before", '<tool_call>{"id": "abcdefghi", "name": "write", "arguments": {}}</tool_call>'),
        ("behind", '<tool_call>{"name": "write", "arguments": {}, "id": "abcdefghi"}</tool_call>'),
        ("behind, in a form that has it there", '[TOOL_CALLS][{"name": "write", "arguments": {}, "id": "abcdefghi"}]'),
    ):
        output = output_of("mistral" if text.startswith("[") else "hermes")
        ids = set()
        for size in (1, 5, len(text)):
            reader, pieces = splitter(output, 1, 0), []
            for at in range(0, len(text), size):
                pieces += reader.push(text[at : at + size])
            ids |= {piece.id for piece in pieces if isinstance(piece, ToolCallDelta) and piece.id}
        (id,) = ids
        assert written_id(id) == ("" if where == "behind" else "abcdefghi"), where


def test_of_forced_calls_only_the_first_is_passed_on_before_it_is_whole() -> None:
    """A repeated call ends the answer, and only a complete call can be recognised as a repetition."""
    output = output_of("hermes", calls_only=True, held=True)
    call = WRITTEN["hermes"]
    other = call.replace("a.txt", "b.txt")
    reader = splitter(output, 1, 0)
    first = reader.push(call[:200])
    assert len(whole_calls(first)) == 1
    first += reader.push(call[200:] + "\n")
    assert whole_calls(first) == [("write", JSON)]
    assert reader.push(other[:200]) == []
    assert len([one for one in reader.push(other[200:]) if isinstance(one, ToolCallDelta) and one.id]) == 1
    assert reader.push(call) == [] and reader.over and reader.complete_calls == 2
    reader = splitter(output, 1, 0)
    pieces = reader.push(call + "\n" + other[:200]) + reader.finish(by_model=False)
    assert whole_calls(pieces) == [("write", JSON)] and said(pieces) == "" and reader.shown is not None


def test_a_forced_call_without_marks_is_passed_on() -> None:
    text = f'{{"name": "write", "parameters": {JSON}}}'
    reader = splitter(output_of("llama", calls_only=True, held=True), 1, 0)
    pieces = reader.push(text[:300])
    assert whole_calls(pieces)[0][0] == "write" and JSON.startswith(whole_calls(pieces)[0][1])
    pieces += reader.push(text[300:]) + reader.finish(by_model=True)
    assert whole_calls(pieces) == [("write", JSON)] and reader.complete_calls == 1
    free = splitter(output_of("llama"), 1, 0)
    assert free.push(text[:300]) == [], "an unconstrained answer may continue as text"


def test_what_is_certain_of_json_never_changes() -> None:
    rng = random.Random(3)
    words = [
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        '"',
        "\\",
        "\\d",
        "\\n",
        "\\u00e5",
        "\\ux",
        " ",
        "\n",
        "1.5e3",
        "true",
        "None",
        "ab",
    ]
    values = ['{"a": 1, "b": [1, 2, ], "c": "x\\d\\ny", }', '{"a": {"b": [true, {"c": null,},]}, "d": "\\u0041\\q"}']
    for _ in range(3000):
        text = (
            rng.choice(values) if rng.random() < 0.5 else "".join(rng.choice(words) for _ in range(rng.randrange(12)))
        )
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(["", "", *words]) + text[at:]
        whole = JsonScanner()
        whole.feed(text)
        scanner, at = JsonScanner(), 0
        while at < len(text) and not scanner.failed and not scanner.done:
            size = rng.choice((1, 1, 2, 5))
            scanner.feed(text[at : at + size])
            at += size
            end, place = scanner.certain
            passed = scanner.between(0, end)
            assert whole.text.startswith(passed) or whole.failed
            alone = JsonScanner()
            alone.feed(text[:place] + " ")  # ends a number
            assert alone.text.startswith(passed), "it was certain after this many characters"
        assert (scanner.done, scanner.failed, scanner.text) == (whole.done, whole.failed, whole.text)
        assert scanner.certain[1] == whole.certain[1] and scanner.ends == whole.ends
        for (_, value), end in zip(scanner.members, scanner.ends, strict=True):
            mended = JsonScanner()
            mended.feed(text[:end].lstrip() + "}")
            assert mended.members[-1][1] == value


@pytest.mark.parametrize("name", ["hermes", "qwen_xml", "glm", "kimi", "harmony"])
@pytest.mark.parametrize("bad", [False, True])
def test_a_long_call_is_read_in_linear_time(name: str, bad: bool) -> None:
    times = []
    for size in (300, 1200):
        head = HEADS[name] + ('"path": "x" y' if bad and JSON in WRITTEN[name] else "")
        text = head + WRITTEN[name][len(HEADS[name]) :].replace(TEXT, TEXT * (size // 20)).replace(
            json.dumps(TEXT)[1:-1], json.dumps(TEXT)[1:-1] * (size // 20)
        )
        reader = splitter(output_of(name), 1, 0)
        began = time.process_time()
        for at in range(0, len(text), 64):
            reader.push(text[at : at + 64])
        reader.finish(by_model=True)
        times.append(time.process_time() - began)
    assert times[1] < 12 * times[0] + 0.1
