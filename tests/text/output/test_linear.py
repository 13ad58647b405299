"""Parsing of answers: its time grows linearly with their length, whatever repeats and however it is cut."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from cairn.text.output.call_formats import BY_NAME, FORMATS, CallFormat
from cairn.text.output.output_parser import Splitter, splitter
from cairn.text.output.python_calls import python_calls
from cairn.text.output.stream import TextStream
from cairn.text.output.tool_parser import ParsedCall
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.request import OfferedTool, OutputFormat, Request, SamplingParams
from tests.text import text_models

SIZE = 800_000
"""Characters in a context of a quarter of a million tokens."""
SECONDS = 6.0
"""Limit in CPU seconds for them, several times what a slow machine takes.

Before, it took from a quarter of a minute to hours.
"""
OFFERED = (OfferedTool("f", ("x",)),)


def form(name: str) -> OutputFormat:
    own = BY_NAME[name]
    return OutputFormat(
        reasoning=True,
        tools=True,
        calls="" if own.plain or own.kind == "channel" else name,
        xml=name == "qwen_xml",
        thoughts="harmony" if name == "harmony" else "",
        offered=OFFERED,
    )


def seconds(output: OutputFormat, text: str, step: int) -> float:
    reader = splitter(output, 1, 0)
    began = time.process_time()
    for start in range(0, len(text), step):
        reader.push(text[start : start + step])
        if start % 4096 == 0 and time.process_time() - began > SECONDS:
            break
    reader.finish(by_model=True)
    return time.process_time() - began


def many(before: str, unit: str, behind: str = "") -> str:
    return before + unit * (SIZE // len(unit)) + behind


MINIMAX = '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">'
LONG: dict[str, tuple[str, str]] = {
    "members of a bare call": ("hermes", many('{"arguments":{},', '"a":1,')[: SIZE // 8]),
    "members beside a name": ("llama", many('{"name":"f","parameters":{},', '"arguments":{},')[: SIZE // 8]),
    "sections": ("gemma", many("", "<|tool_call>call:f{}<tool_call|>")),
    "messages": ("harmony", many("", "<|channel|>final<|message|>a<|end|>")),
    "headers": ("harmony", many("", "<|channel|>")),
    "calls": ("hermes", many("", '<tool_call>{"name":"f"}</tool_call>')),
    "calls that are none": ("hermes", many("", "<tool_call>x")),
    "a text value": ("minimax", many(MINIMAX, "abcd")),
    "a value of ends": ("minimax", many(MINIMAX, "</parameter")),
    "arguments": ("lfm2", "<|tool_call_start|>[f(" + "".join(f"x{at}=1, " for at in range(SIZE // 12)) + "y=1)]"
                  "<|tool_call_end|>"),
    "arguments that are none": ("lfm2", many("<|tool_call_start|>[f(", "x='a', ", "<|tool_call_end|>")),
    "xml that is none": ("qwen_xml", many("<tool_call><function=f>", "<parameter=x></parameter>", "</tool_call>")),
    "blanks": ("hermes", many("<tool_call>", " ")),
    "line breaks": ("hermes", many("a", "\n")),
    "thoughts": ("hermes", many("<think>", "</think")),
}  # fmt: skip


@pytest.mark.parametrize("step", [1 << 30, 1000])
@pytest.mark.parametrize("name", LONG)
def test_a_long_answer_is_read_in_one_pass(name: str, step: int) -> None:
    kind, text = LONG[name]
    assert seconds(form(kind), text, step) < SECONDS


@pytest.mark.parametrize("name", ["members of a bare call", "a text value", "sections"])
def test_a_long_answer_is_read_in_one_pass_token_by_token(name: str) -> None:
    kind, text = LONG[name]
    assert seconds(form(kind), text[: SIZE // 2], 4) < SECONDS


@pytest.mark.parametrize("name", ["arguments", "sections", "messages"])
def test_eight_times_the_text_takes_about_eight_times_as_long(name: str) -> None:
    """In one piece, as an answer is parsed again after a restart. It took 20 to 30 times as long."""
    kind, text = LONG[name]
    close = "y=1)]<|tool_call_end|>" if name == "arguments" else ""
    # A quadratic parser takes 64 times as long each time; a busy machine makes one measurement of three slow.
    small = min(seconds(form(kind), text[: len(text) // 8] + close, 1 << 30) for _ in range(3))
    assert any(seconds(form(kind), text, 1 << 30) < 20 * small for _ in range(3))


MARK = '<|"|>'
XML = "<function=f>\n<parameter=x>"
COSTLY: dict[str, tuple[str, str, str, str]] = {
    "the ticks of a fence": ("gemma", "", "`", ""),
    "blanks behind a bracket": ("lfm2", "f(", " ", ""),
    "line breaks behind a brace": ("gemma", "call:f{", "\n", ""),
    "blanks behind a name": ("lfm2", "f(x", " ", ""),
    "blanks behind a mark": ("gemma", f"call:f{{x:{MARK}{'abc' * 9_000}{MARK}", " ", ""),
    "quotes between marks": ("gemma", f"call:f{{x:{MARK}", "'\"", ""),
    "blanks behind a call in brackets": ("lfm2", "f()", " ", ""),
    "escapes": ("lfm2", "f(x='", "\\", ""),
    "blanks behind a parameter": ("qwen_xml", f"<tool_call>\n{XML}a</parameter>", " ", ""),
    "blanks behind a parameter without marks": ("qwen_xml", f"{XML}a</parameter>", " ", ""),
    "line breaks behind a value": ("glm", "<tool_call>f\n<arg_key>x</arg_key><arg_value>a</arg_value>", "\n", ""),
    "blanks behind a function": ("qwen_xml", "<tool_call>\n<function=f>\n", " ", ""),
    "line breaks before a function ends": ("qwen_xml", "<tool_call>\n<function=f>", "\n", "</function>"),
    "a function's long name": ("qwen_xml", "<tool_call>\n<function=", "abcd", ">"),
    "an argument's long name": ("qwen_xml", "<tool_call>\n<function=f>\n<parameter=", "abcd", ">"),
    "blanks in a tag": ("qwen_xml", f"<tool_call>\n{XML}a", "\n<parameter=" + " " * 1_000, ""),
    "blanks behind a call that was thought of": ("hermes", '<think>\n<tool_call>{"name": "f"}</tool_call>', " ", ""),
    "sections within a text that is none": (
        "lfm2", "f(x='", "<|tool_call_start|>[f()]<|tool_call_end|>", "') is what they say",
    ),
    "sections within a thought": (
        "minimax", f"<think>{MINIMAX}", "<minimax:tool_call></minimax:tool_call>", "</parameter></invoke>x</think>x",
    ),
}  # fmt: skip
"""A format, the beginning of an answer, the repeated unit, and the end."""


@pytest.mark.parametrize("name", COSTLY)
def test_a_text_that_may_be_a_call_is_read_in_one_pass_token_by_token(name: str, prove: bool) -> None:
    kind, before, unit, behind = COSTLY[name]
    text = before + unit * ((1_000_000 if prove else 240_000) // len(unit)) + behind
    assert seconds(form(kind), text, 4) < SECONDS


@pytest.mark.parametrize("name", ["qwen_xml", "seed", "minimax"])
def test_a_call_of_many_arguments_is_read_in_one_pass(name: str) -> None:
    own = BY_NAME[name]
    before, behind = own.begin + own.open.replace("{name}", "f"), own.close + own.end
    said = [f"{own.key[0]}a{at}{own.key[1]}1{own.value_end}" for at in range(10_000)]
    assert seconds(form(name), before + "".join(said) + behind, 4) < SECONDS


PARTS = [
    *"{}[]\"\\ \na1,:'()=<",
    '{"name": "f", "arguments": {',
    '"a":1,',
    "x=1,",
    "f(",
    "<think>",
    "</think>",
    "```",
    "\\u",
]


def test_no_mixture_of_parts_takes_longer_than_its_length(prove: bool) -> None:
    """Parts of a format's own markup, repeated after a beginning: 8 times the text may take 24 times as long."""
    rng = random.Random(1)
    for one in FORMATS:
        own = [one.begin, one.end, one.open.replace("{name}", "f"), one.close, one.joint, *one.key, one.value_end]
        parts = [*PARTS, *filter(None, own)]
        for _ in range(60 if prove else 6):
            before = rng.choice(["", one.begin, one.begin + one.open.replace("{name}", "f"), '{"arguments":{},'])
            unit = "".join(rng.choice(parts) for _ in range(rng.randint(1, 4)))
            step = rng.choice([1 << 30, 4])
            small = seconds(form(one.name), before + unit * (4_000 // len(unit)), step)
            if small < 0.01:
                continue
            # A quadratic parser takes 64 times as long each time; a busy machine makes one measurement of three slow.
            text = before + unit * (32_000 // len(unit))
            limit = max(1.0, 24 * small)
            assert any(seconds(form(one.name), text, step) < limit for _ in range(3)), (one.name, before, unit, step)


UNITS = [
    " " * 64, "\n" * 16, "a" * 64, "0" * 64, "<", "</", "{", "[", "}", '"', "\\", "'", ",", "f(", "f(x=", "x=1,",
    "x:1,", " \n",
    '"a":', '"k":1,', "```\n", "{}", "<tool_call>", "<think>", "</think>", "<function=f>", "<parameter=x>",
    "</parameter>",
    "<|message|>", "<|end|>", " to=f", "<|constrain|>", "\\u", MARK, '{"name":"f","arguments":{}}',
]  # fmt: skip
"""Texts of one token, many of which a model may repeat."""


def beginnings(one: CallFormat) -> list[str]:
    """Return beginnings of an answer, up to each place within a call of the format."""
    opened = one.begin + one.open.replace("{name}", "f").replace("{index}", "0").replace("{id}", "ab")
    value = one.key[0] + "x" + one.key[1].replace("{kind}", one.words[0])
    inside = ["{", '{"x":"', '{"x":1}' + one.close, one.key[0], value, value + "v" + one.value_end]
    plain = [
        "",
        "[f(x='",
        '{"name":"f","arguments":{"x":"',
        '[{"name":"f","arguments":{}},',
        "<function=f>\n<parameter=x>",
    ]
    channel = ["<|channel|>", "<|channel|>commentary to=", "<|channel|>commentary to=functions.f <|message|>{"]
    found = [
        "hi ",
        *(opened + text for text in ("", *inside)),
        *(one.begin + text for text in plain),
        "\nf(x=",
        "```json",
    ]
    found += channel if one.kind == "channel" else []
    return list(dict.fromkeys([*found, "<think>" + opened, "<think>" + opened + value, *plain]))


def token_by_token(output: OutputFormat, before: str, unit: str, count: int) -> float:
    reader = splitter(output, 1, 0)
    began = time.process_time()
    reader.push(before)
    for _ in range(count):
        reader.push(unit)
    reader.finish(by_model=True)
    return time.process_time() - began


@pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.name)
def test_a_token_that_comes_again_and_again_takes_the_same_time_each_time(one: CallFormat, prove: bool) -> None:
    """In every format, wherever within a call: 8 times the tokens may take 24 times as long."""
    cases = [(before, unit) for before in beginnings(one) for unit in UNITS]
    for before, unit in cases if prove else random.Random(one.name).sample(cases, 12):
        limit = max(0.5, 24 * token_by_token(form(one.name), before, unit, 250))
        # A quadratic parser takes 64 times as long each time; a busy machine makes one measurement of three slow.
        assert any(token_by_token(form(one.name), before, unit, 2_000) < limit for _ in range(3)), (before, unit)


def test_python_calls_are_parsed_or_refused() -> None:
    assert python_calls("[f(x=[1]]") is None
    assert python_calls("[f(x=1]") is None
    assert python_calls("f(x=1") is None
    assert python_calls('[f(x="a", y=[1, {"b": null}], z=True)]') == [
        ParsedCall("f", '{"x": "a", "y": [1, {"b": null}], "z": true}')
    ]
    assert python_calls("f(x='a')") == [ParsedCall("f", '{"x": "a"}')]


# ------------------------------------------------------------------------------------------- control tokens as stops


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("model")
    return Tokenizer.load(text_models.write_model(folder, text_models.byte_level(), {}))


def stream(tokenizer: Tokenizer, *stop: str) -> TextStream:
    output = OutputFormat(reasoning=True, tools=True, offered=OFFERED)
    made: dict[str, Any] = {"max_tokens": 1 << 20, "stop_token_ids": ()}
    return TextStream(tokenizer, Request(id=1, prompt=(1,), sampling=SamplingParams(**made), stop=stop, output=output))


def test_a_control_token_within_a_long_call_costs_no_copy_of_it(tokenizer: Tokenizer) -> None:
    """A stop sequence that ends with a control token is checked at each of them: the held-back part of a call is
    parsed to its end only where the stop may be complete. Once a call is being streamed, no stop applies within
    it.
    """
    begun = tokenizer.encode('<tool_call>{"name": "of no tool", "arguments": {"x": "', special=True)
    mark = tokenizer.encode("<|im_start|>", special=True)
    text: Sequence[int] = tokenizer.encode("abc abd ", special=True)
    reader = stream(tokenizer, "zzz<|im_start|>", "<|im_start|>yyy")
    began = time.process_time()
    reader.push(begun)
    for _ in range(6_000):
        reader.push([*text, *mark])
    assert time.process_time() - began < SECONDS
    assert not reader.stopped
    reader.push([*tokenizer.encode("zzz"), *mark])
    assert reader.stopped
    reader = stream(tokenizer, "zzz<|im_start|>")
    reader.push(tokenizer.encode('<tool_call>{"name": "f", "arguments": {"x": "', special=True))
    reader.push([*tokenizer.encode("zzz"), *mark])
    assert not reader.stopped


THOUGHT = '<think>\n<tool_call>{"name": "of no tool", "arguments": {"x": "'


@pytest.mark.parametrize(
    "before", ['<tool_call>{"name": "f", "arguments": {"x": "', THOUGHT], ids=["a begun call", "a call thought of"]
)
def test_a_stop_with_a_control_token_copies_no_call_where_it_does_not_apply(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """The stop is spelt at each of the tokens; content alone can end there."""
    copies, copied = list[int](), Splitter.copy

    def counted(self: Splitter) -> Splitter:
        copies.append(1)
        return copied(self)

    monkeypatch.setattr(Splitter, "copy", counted)
    reader = stream(tokenizer, "a<|im_start|>")
    mark = tokenizer.encode("<|im_start|>", special=True)
    reader.push(tokenizer.encode(before, special=True))
    for _ in range(50):
        reader.push([*tokenizer.encode("a"), *mark])
    assert not copies and not reader.stopped
    if before == THOUGHT:
        reader.push([*tokenizer.encode('"}}</think>a'), *mark])
        assert reader.stopped
