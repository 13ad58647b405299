"""Calls in other formats than the template's, and next to each a text that only looks like one."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import pytest

from cairn.text.output.argument_fit import MAX_SHAPE, fits, shape_of
from cairn.text.output.call_formats import BY_NAME, CallFormat, name_of
from cairn.text.output.output_parser import splitter
from cairn.text.output.tool_parser import offered_tools
from cairn.types.outputs import ToolCallDelta
from cairn.types.request import OutputFormat
from tests.text.output.call_pieces import read_calls

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "text": {"type": "string"},
                    "mode": {"type": "integer"},
                    "how": {"enum": ["new", "add"]},
                },
                "required": ["path"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
W = ("write", {"path": "a.txt", "mode": 1})
P = ("write", {"path": "a.txt"})


def output_of(form: CallFormat, **more: Any) -> OutputFormat:
    return OutputFormat(
        tools=True,
        reasoning=True,
        xml=form.name == "qwen_xml",
        calls="" if form.plain else name_of(form),
        offered=offered_tools(TOOLS, xml=form.kind == "tagged"),
        **more,
    )


Read = tuple[str, str, list[tuple[str, Any]]]


def read_once(text: str, output: OutputFormat, rng: random.Random | None = None, *, by_model: bool = True) -> Read:
    """Return content, reasoning and calls of an answer, read at once or in random pieces."""
    reader, at, pieces = splitter(output, 1, 0), 0, []
    while at < len(text):
        size = len(text) if rng is None else rng.choice([1, 1, 2, 5, 30])
        pieces += reader.push(text[at : at + size])
        at += size
    pieces += reader.finish(by_model=by_model)
    said = {"text": "", "reasoning": ""}
    for piece in pieces:
        if not isinstance(piece, ToolCallDelta):
            said[piece[0]] += piece[1]
    return said["text"], said["reasoning"], read_calls(pieces)


def read(name: str, text: str, *, by_model: bool = True, **more: Any) -> Read:
    output = output_of(BY_NAME[name], **more)
    result = read_once(text, output, by_model=by_model)
    for seed in range(15):
        assert read_once(text, output, random.Random(seed), by_model=by_model) == result, (
            "the result depends on how the text is cut"
        )
    return result


# ---------------------------------------------------------------------------------------- in the marks of a form

ARG = "<arg_key>path</arg_key>\n<arg_value>a.txt</arg_value>\n"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        # Only names of offered tools count.
        ("<tool_call>the name of it</tool_call> is how", None, []),
        (f"<tool_call>read\n{ARG}</tool_call>", None, []),
        ('<tool_call>{"name": "read", "arguments": {"path": "a.txt"}}</tool_call>', None, []),
        ("<tool_call>now</tool_call>", "", [("now", {})]),
        (f"Well.\n<tool_call>write\n{ARG}</tool_call>", "Well.", [P]),
        # JSON, or a name followed by JSON.
        ('<tool_call>{"name": "write", "arguments": {"path": "a.txt"}}</tool_call>', "", [P]),
        ('<tool_call>\n{"name": "write", "arguments": {"path": "a.txt"}}\n</tool_call>\nx', "x", [P]),
        ('<tool_call>write {"path": "a.txt"}</tool_call>', "", [P]),
        ('<tool_call>write\n{"path": "a.txt"}\n</tool_call> x', " x", [P]),
        ('<tool_call>write {"path": </tool_call>', "", [("write", '{"path": ')]),
        ('<tool_call>read {"path": </tool_call>', None, []),
        # A closing tag is missing.
        (f"<tool_call>write\n{ARG.replace('</arg_value>', '')}<arg_key>mode</arg_key>\n<arg_value>1</arg_value>\n"
         "</tool_call>", "", [W]),
        ("<tool_call>write\n<arg_key>mode</arg_key><arg_value>1<arg_key>path</arg_key><arg_value>a.txt</tool_call>",
         "", [("write", {"mode": 1, "path": "a.txt"})]),
        (f"<tool_call>write\n{ARG.replace('</arg_value>', '')}</tool_call>\n<tool_call>now</tool_call>",
         "", [P, ("now", {})]),
        (f"<tool_call>write\n{ARG.replace('</arg_value>', '')}</tool_call> Done.", " Done.", [P]),
        # No closing tag is missing here: the value mentions tags.
        ("<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a.txt</arg_value>\n<arg_key>text</arg_key>\n"
         "<arg_value>`<arg_key>mode</arg_key>` and </tool_call> end it, <arg_key>x</arg_key> too</arg_value>\n"
         "</tool_call>",
         "", [("write", {"path": "a.txt", "text": "`<arg_key>mode</arg_key>` and </tool_call> end it, "
              "<arg_key>x</arg_key> too"})]),
    ],
)  # fmt: skip
def test_calls_of_glm(text: str, content: str | None, calls: Any) -> None:
    assert read("glm", text) == (text if content is None else content, "", calls)


def xml(*parameters: str, name: str = "write") -> str:
    return f"<function={name}>\n" + "".join(f"<parameter={parameter}\n" for parameter in parameters) + "</function>"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (xml("path>\na.txt", "mode>\n1\n</parameter>"), {"path": "a.txt", "mode": 1}),
        (xml("mode>\n1\n</parameter>", "path>\na.txt"), {"mode": 1, "path": "a.txt"}),
        (xml("mode>1<parameter=path>a.txt</parameter>"), {"mode": 1, "path": "a.txt"}),
        (xml("path>\na.txt\n</parameter>", "text>\nsee `<parameter=mode>` here\n</parameter>"),
         {"path": "a.txt", "text": "see `<parameter=mode>` here"}),
        (xml("path>\na.txt\n</parameter>", "text>\n<parameter=path>\nis given\n</parameter>"),
         {"path": "a.txt", "text": "<parameter=path>\nis given"}),
        (xml("path>\na.txt\n</parameter>", "text>\n<parameter=other>\nis none of its\n</parameter>"),
         {"path": "a.txt", "text": "<parameter=other>\nis none of its"}),
        (xml("text>\n</function> ends it\n</parameter>", "path>\na.txt\n</parameter>"),
         {"text": "</function> ends it", "path": "a.txt"}),
    ],
)  # fmt: skip
def test_a_closing_tag_that_is_missing(text: str, meant: dict[str, Any]) -> None:
    assert read("qwen_xml", f"<tool_call>\n{text}\n</tool_call>") == ("", "", [("write", meant)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("seed", "<seed:tool_call><function=write><parameter=mode>1<parameter=path>a.txt</function></seed:tool_call>"),
        ("seed", "<seed:tool_call><function=write>\n<parameter=mode>1\n<parameter=path>a.txt</parameter>\n</function>"
         "</seed:tool_call>"),
        ("minimax", '<minimax:tool_call>\n<invoke name="write">\n<parameter name="mode">1\n<parameter name="path">'
         "a.txt\n</invoke>\n</minimax:tool_call>"),
    ],
)  # fmt: skip
def test_a_closing_tag_that_is_missing_in_other_forms(name: str, text: str) -> None:
    assert read(name, text) == ("", "", [W])


KIMI = (
    "<|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
).format('{"path": "a.txt"}')  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("kimi", f"Well.<|tool_call_section_begin|>{KIMI}<|tool_call_section_end|>", "Well.", [P]),
        ("kimi", f"<|tool_calls_section_begin|>{KIMI}<|tool_call_section_end|>", "", [P]),
        ("lfm2", '<|tool_call_start|>[{"name": "write", "arguments": {"path": "a.txt"}}]<|tool_call_end|>', "", [P]),
        ("lfm2", '<|tool_call_start|>{"name": "write", "arguments": {"path": "a.txt"}}<|tool_call_end|>', "", [P]),
        ("lfm2", '<|tool_call_start|>{"city": "Oslo"}<|tool_call_end|>', None, []),
        ("lfm2", "<|tool_call_start|>[write(path='" + "x" * 9000 + "')]<|tool_call_end|>", "",
         [("write", {"path": "x" * 9000})]),
        ("mistral_v11", '[TOOL_CALLS]write[CALL_ID]a1B2c3D4e[ARGS]{"path": "a.txt"}', "", [P]),
        ("gemma", '<|tool_call>call:write{path:a.txt<|"|>}<tool_call|>', "", [P]),
        ("gemma", "<|tool_call>call:write(path='a.txt', mode=1)<tool_call|>", "", [W]),
        ("gemma", '<|tool_call>write(path="a.txt")<tool_call|>', "", [P]),
        ("gemma", "<|tool_call>write your own<tool_call|>", None, []),
    ],
)  # fmt: skip
def test_calls_in_marks_that_were_missed(name: str, text: str, content: str | None, calls: Any) -> None:
    assert read(name, text) == (text if content is None else content, "", calls)


# ---------------------------------------------------------------------------------------- without marks

CALL = xml("path>\na.txt\n</parameter>")
UNMARKED = {
    "qwen_xml": CALL,
    "seed": "<function=write>\n<parameter=path>a.txt</parameter>\n</function>",
    "minimax": '<invoke name="write">\n<parameter name="path">a.txt</parameter>\n</invoke>',
    "kimi": KIMI,
    "gemma": 'call:write{path:<|"|>a.txt<|"|>}',
    "lfm2": "write(path='a.txt')",
}
TAIL = {
    "qwen_xml": "\n</tool_call>",
    "seed": "\n</seed:tool_call>",
    "minimax": "\n</minimax:tool_call>",
    "kimi": "<|tool_calls_section_end|>",
    "gemma": "<tool_call|>",
    "lfm2": "<|tool_call_end|>",
}


@pytest.mark.parametrize("name", UNMARKED)
def test_a_call_without_its_mark(name: str) -> None:
    call, end = UNMARKED[name], TAIL[name]
    for text in (call, call + end, call + "\n", f"\n{call}", f"  {call}"):
        content, _, calls = read(name, text)
        assert (content.strip(), calls) == ("", [P]), text
    assert read(name, f"I write it.\n\n{call}{end}") == ("I write it.\n\n", "", [P])
    assert read(name, f"<think>\nHm.\n</think>\n\n{call}") == ("", "Hm.", [P])
    assert read(name, f"{call}{end}\n{call}") == ("", "", [P, P])
    assert read(name, f"{call}\nDone.") == ("Done.", "", [P])
    assert read(name, f"```\nx\n```\n{call}") == ("```\nx\n```\n", "", [P])


@pytest.mark.parametrize("name", UNMARKED)
def test_what_only_looks_like_a_call(name: str) -> None:
    call = UNMARKED[name]
    for text in (
        f"Such a call is `{call}`.",  # not at the beginning of a line
        f"So: {call}",
        f"    {call}",
        f"It is written so:\n```xml\n{call}\n```\nand so on.",
        f"~~~\n{call}\n~~~",
        f"````\n```\n{call}\n```\n````",
        call.replace("write", "read", 1),  # not offered
        call[:-1],  # incomplete
        call.replace("path", "paths"),  # not a parameter of the tool
        call.replace("path", "how"),  # unknown parameter, and a required one is missing
        f"<think>\nI could say\n{call}\nor not.</think>",
    ):
        content, reasoning, calls = read(name, text)
        assert not calls, text
        assert "".join((content + reasoning).split()) == "".join(
            text.replace("<think>", "").replace("</think>", "").split()
        ), "nothing of it is lost"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma", "now() is what tells the time"),
        ("gemma", "write(path, text) writes a file"),
        ("lfm2", "now() - 5"),
        ("lfm2", "write(path=Path('a'))"),
        ("gemma", "write(path='a.txt') does it"),
        ("gemma", 'call:write{path:<|"|>a.txt<|"|>} is the form'),
        ("lfm2", "write (path='a.txt')"),
        ("lfm2", "[write(path='a.txt'), 5]"),
        ("qwen_xml", "<function=write> has a path"),
        ("qwen_xml", "<function=write>\n<parameter=path>\na.txt\n</parameter>"),
        ("kimi", "<|tool_call_begin|>functions.write: is what begins it"),
    ],
)
def test_prose_about_calls(name: str, text: str) -> None:
    assert read(name, text) == (text, "", [])


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("gemma", "write(path='a.txt')\nnow()", [P, ("now", {})]),
        ("gemma", "call:now{}", [("now", {})]),
        ("lfm2", "[write(path='a.txt'), now()]", [P, ("now", {})]),
        ("lfm2", "write(path='a (1).txt', text='it\\'s\n\"so\"')",
         [("write", {"path": "a (1).txt", "text": 'it\'s\n"so"'})]),
        ("gemma", 'call:write{path:a.txt<|"|>}', [P]),
        ("qwen_xml", f"{CALL}\n{xml(name='now')}\n</tool_call>", [P, ("now", {})]),
    ],
)  # fmt: skip
def test_several_calls_without_marks(name: str, text: str, calls: Any) -> None:
    assert read(name, text) == ("", "", calls)


@pytest.mark.parametrize("ticks", [3, 63, 64, 65, 1_000])
def test_a_fence_of_any_length_hides_a_call(ticks: int) -> None:
    fence = "`" * ticks
    assert read("qwen_xml", f"{fence}\n{CALL}\n{fence}") == (f"{fence}\n{CALL}\n{fence}", "", [])
    if ticks <= 64:
        assert read("qwen_xml", f"{fence}\n{fence}\n{CALL}")[2] == [P]


@pytest.mark.parametrize(("blanks", "calls"), [(0, [P]), (64, [P]), (65, []), (2_000, [])])
def test_blanks_behind_the_name_of_an_argument(blanks: int, calls: Any) -> None:
    text = f"write(path{' ' * blanks}='a.txt')"
    assert read("lfm2", text) == ("" if calls else text, "", calls)


@pytest.mark.parametrize("blanks", ["", " " * 2_000, "\n" * 300])
def test_blanks_where_they_may_stand(blanks: str) -> None:
    mark = '<|"|>'
    assert read("lfm2", f"write({blanks}path='a.txt')") == ("", "", [P])
    assert read("gemma", f"call:write{{{blanks}path:{mark}a.txt{mark}{blanks}}}") == ("", "", [P])
    marked = f"<tool_call>\n{CALL}\n</tool_call>".replace("</function>", f"{blanks}</function>")
    assert read("qwen_xml", marked) == ("", "", [P])
    said = f"write(path='a.txt'){blanks.replace(chr(10), ' ')}x"
    assert read("lfm2", said) == (said, "", [])


def test_buffered_text_that_is_not_a_call_is_read_again() -> None:
    mark = "<|tool_call_start|>[now()]<|tool_call_end|>"
    text = f"write(path='{'x' * 5_000}{mark}{'y' * 5_000}') is it"
    assert read("lfm2", text) == (text.replace(mark, ""), "", [("now", {})])


def test_a_grammars_answers_are_read_by_marks_alone() -> None:
    output = OutputFormat(tools=True, xml=True, held=True, offered=offered_tools(TOOLS, xml=True))
    assert read_once(CALL, output) == (CALL, "", [])
    assert read_once(f"<tool_call>\n{CALL}\n</tool_call>", output) == ("", "", [P])


# ---------------------------------------------------------------------------------------- in reasoning

MARKED = {
    "hermes": '<tool_call>\n{"name": "write", "arguments": {"path": "a.txt"}}\n</tool_call>',
    "qwen_xml": f"<tool_call>\n{CALL}\n</tool_call>",
    "glm": f"<tool_call>write\n{ARG}</tool_call>",
    "kimi": f"<|tool_calls_section_begin|>{KIMI}<|tool_calls_section_end|>",
    "mistral_v11": '[TOOL_CALLS]write[ARGS]{"path": "a.txt"}',
}


@pytest.mark.parametrize("name", MARKED)
def test_a_whole_call_in_reasoning_that_never_ended(name: str) -> None:
    call = MARKED[name]
    assert read(name, f"<think>\nI look.\n{call}") == ("", "I look.", [P])
    assert read(name, f"I look.\n{call}\n", reasoning_open=True) == ("", "I look.", [P])
    if BY_NAME[name].end:
        assert read(name, f"<think>\nI look.\n{call}\n</think>\n\n") == ("", "I look.", [P])
        assert read(name, f"<think>\nI look.\n{call}\n{call}") == ("", "I look.", [P, P])


@pytest.mark.parametrize("name", MARKED)
def test_a_call_that_is_only_thought_of(name: str) -> None:
    call = MARKED[name]
    bare = "".join(call.split())
    for text, reasoning in (
        (f"<think>I could say\n{call}\nbut will not.", f"Icouldsay{bare}butwillnot."),
        (f"<think>I could say\n{call}\nor not.</think>Hello", f"Icouldsay{bare}ornot."),
        (f"<think>It is\n{call}</think>No.", f"Itis{bare}"),
        (f"<think>Like\n{call.replace('write', 'read')}", f"Like{bare.replace('write', 'read')}"),
        (f"<think>Like\n{call.replace('path', 'paths')}", f"Like{bare.replace('path', 'paths')}"),
        (f"<think>Like\n{call[: call.index('a.txt')]}", f"Like{''.join(call[: call.index('a.txt')].split())}"),
    ):
        _, thought, calls = read(name, text)
        assert not calls and "".join(thought.split()) == reasoning, text
    _, thought, calls = read(name, f"<think>Like\n{call}</think>{MARKED[name]}")
    assert calls == [P] and "".join(thought.split()) == f"Like{bare}", "the one behind the reasoning is the call"
    assert read(name, f"<think>I look.\n{call}", by_model=False)[2] == [], "an answer that was cut might have gone on"


# ---------------------------------------------------------------------------------------- bounds


NEVER_ENDING = {
    "qwen_xml": ["<function=write>\n", "<function=write>\n<parameter=path>\n", "<parameter=text>"],
    "gemma": ["write(\n", 'call:write{path:<|"|>\n', '<|"|>', "write(path='", "<|tool_call>call:"],
    "lfm2": ["write(path='a\n", "[write(\n", "<|tool_call_start|>write("],
    "kimi": ["<|tool_call_begin|>functions.write:0\n", "<|tool_call_section_begin|>"],
    "glm": [
        "<tool_call>write\n",
        "</arg_value>",
        "<arg_value>",
        "<tool_call>write\n<arg_key>path</arg_key><arg_value>",
    ],
    "hermes": ["<think>", "<tool_call>\n", "```\n", '<tool_call>{"name": "write", '],
}


@pytest.mark.parametrize(("name", "piece"), [(name, piece) for name in NEVER_ENDING for piece in NEVER_ENDING[name]])
@pytest.mark.parametrize("before", ["", "<think>"])
def test_a_call_that_never_ends_is_read_in_linear_time(name: str, piece: str, before: str) -> None:
    times = []
    for size in (1500, 6000):
        text, reader = before + piece * size, splitter(output_of(BY_NAME[name]), 1, 0)
        began, pieces = time.process_time(), []
        for at in range(0, len(text), 64):
            pieces += reader.push(text[at : at + 64])
        pieces += reader.finish(by_model=True)
        times.append(time.process_time() - began)
        said = "".join(one[1] for one in pieces if not isinstance(one, ToolCallDelta))
        assert any(isinstance(one, ToolCallDelta) for one in pieces) or len(said) >= len(text) - len(before) - size
    assert times[1] < 12 * times[0] + 0.5


@pytest.mark.parametrize(
    ("arguments", "schema", "good"),
    [
        ({"a": 1}, {"type": "object", "properties": {"a": {"type": "integer"}}}, True),
        ({"a": "1"}, {"type": "object", "properties": {"a": {"type": "integer"}}}, False),
        ({"a": 1.5}, {"type": "object", "properties": {"a": {"type": "integer"}}}, False),
        ({"b": 1}, {"type": "object", "properties": {"a": {}}}, False),
        ({"b": 1}, {"type": "object", "properties": {"a": {}}, "additionalProperties": True}, True),
        ({"b": 1}, {"type": "object"}, True),
        ({}, {"type": "object", "properties": {"a": {}}, "required": ["a"]}, False),
        ({"a": None}, {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}, True),
        ({"a": True}, {"properties": {"a": {"enum": [1, "x"]}}}, False),
        ({"a": [1, "b"]}, {"properties": {"a": {"type": "array", "items": {"type": "integer"}}}}, False),
        ({"a": {"b": 1}}, {"properties": {"a": {"properties": {"c": {}}}}}, False),
        ({"a": 1}, {}, True),
        ({"a": 1}, {"$ref": "#/$defs/x", "properties": {"b": {}}}, True),
    ],
)
def test_arguments_fit_a_schema(arguments: Any, schema: Any, good: bool) -> None:
    assert fits(json.dumps(arguments), shape_of(schema)) is good


def test_a_shape_is_bounded() -> None:
    wide = {"type": "object", "properties": {f"name{number}": {"type": "string"} for number in range(500)}}
    assert shape_of(wide) == ""
    deep = {"type": "object", "properties": {"a": {"enum": ["x" * 500, "y" * 600]}, "b": {"type": "integer"}}}
    assert len(shape_of(deep)) <= MAX_SHAPE and not fits(
        '{"b": "x"}', shape_of({"properties": {"b": {"type": "integer"}}})
    )


WORDS = {
    "qwen_xml": ["<function=write>", "<parameter=path>", "a.txt", "</parameter>", "</function>", "</tool_call>", CALL],
    "gemma": ["call:write{", "path:", '<|"|>', "a.txt", "}", "write(", "path='a'", ")", "<|tool_call>", "<tool_call|>"],
    "lfm2": ["write(", "[write(", "path='", "a.txt'", ")", "now()", "<|tool_call_start|>", "<|tool_call_end|>", "]"],
    "glm": [
        "<tool_call>",
        "write",
        "<arg_key>",
        "path</arg_key>",
        "<arg_value>",
        "a",
        "</arg_value>",
        "</tool_call>",
        "{",
    ],
    "kimi": [
        KIMI,
        "<|tool_call_begin|>",
        "functions.write:0",
        "<|tool_call_section_begin|>",
        "{}",
        "<|tool_call_end|>",
    ],
    "hermes": ['{"name": "now"}', '{"name": "write", "arguments": {"path": "a"}}', "<tool_call>", "</tool_call>"],
}
COMMON = ["\n", "\n", "\n\n", " ", "text", "```", "<think>", "</think>", "<", "`", "so"]


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("thoughts", ["", "hunyuan"])
def test_random_answers_are_read_alike_however_they_are_cut(name: str, thoughts: str, prove: bool) -> None:
    words = [*WORDS[name], *COMMON, *(["<answer>", "</answer>"] if thoughts else [])]
    for seed in range(5000 if prove else 150):
        rng = random.Random(seed)
        text = "".join(rng.choice(words) for _ in range(rng.randrange(14)))
        output = output_of(BY_NAME[name], thoughts=thoughts, reasoning_open=rng.random() < 0.2)
        by_model = rng.random() < 0.8
        content, reasoning, calls = read_once(text, output, by_model=by_model)
        for _ in range(4):
            assert read_once(text, output, rng, by_model=by_model) == (content, reasoning, calls), (seed, text)
        if not calls:
            left = re.sub(r"</?(?:think|answer)>|\s", "", reasoning + content)
            assert left == re.sub(r"</?(?:think|answer)>|\s", "", text), "a text that is no call is content as a whole"
