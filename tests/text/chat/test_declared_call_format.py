"""Call formats declared in tokenizer_config.json, read as transformers reads them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from cairn.text.chat.declared_call_format import declared_form
from cairn.text.chat.derived_call_format import known_form, sound
from cairn.text.output.call_formats import BY_NAME, CallFormat, name_of
from cairn.text.output.output_parser import splitter
from cairn.types.outputs import ToolCallDelta
from cairn.types.request import OfferedTool, OutputFormat
from tests.text.output.call_pieces import read_calls

FUNCTION = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
OFFERED = (OfferedTool("find", ("n", "deep")), OfferedTool("put", ()))


def declaring(**field: Any) -> dict[str, Any]:
    return {"start_anchor": "<|bot|>", "fields": {"content": {}, "tool_calls": field}}


DECLARED: dict[str, tuple[dict[str, Any], str, str]] = {
    "objects": (
        declaring(open="<call>", close="</call>", repeats=True, content="json", transform=FUNCTION),
        '<call>{"name": "find", "arguments": {"n": 1, "what": "a\\nb"}}</call>\n'
        '<call>{"name": "put", "arguments": {}}</call>',
        "",
    ),
    "a list": (
        declaring(
            open="<|act|>",
            close="<|done|>",
            content="json",
            transform_each=True,
            transform={"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
        ),
        '<|act|>[\n  {"tool_call_id": "0", "tool_name": "find", "parameters": {"n": [1, {"x": null}]}},\n'
        '  {"tool_call_id": "1", "tool_name": "put", "parameters": {}}\n]<|done|>',
        "",
    ),
    "keys of its own": (
        declaring(
            open_pattern=r"<\|invoke\|>",
            close=["<|over|>", "<|eot|>"],
            repeats=True,
            content="json",
            transform={"type": "function", "function": {"name": "{content.tool}", "arguments": "{content.args}"}},
        ),
        '<|invoke|>{"tool": "find", "args": {"n": 2}}<|over|><|invoke|>{"tool": "put", "args": {"x": "y"}}<|over|>',
        "",
    ),
    "a name in a tag": (
        declaring(
            open_pattern=r"<run=(?P<name>\w+)>", close="</run>", repeats=True, content="json", transform=NAMED
        ),
        '<run=find>{"n": 1}</run><run=put>{"text": "</b>"}</run>',
        "",
    ),
    "tags": (
        declaring(
            open_pattern=r"<tool_call>\s*<function=(?P<name>\w+)>",
            close="</tool_call>",
            repeats=True,
            content="xml-inline",
            content_args={
                "tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            transform=NAMED,
        ),
        "<tool_call>\n<function=find>\n<parameter=n>\n1\n</parameter>\n"
        "<parameter=what>\nfor x in y:\n    <b>\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=put>\n</function>\n</tool_call>",
        "qwen_xml",
    ),
    "braces": (
        declaring(
            open_pattern=r"<\|tool_call>call:(?P<name>\w+)",
            close="<tool_call|>",
            repeats=True,
            content="json",
            content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            transform=NAMED,
        ),
        '<|tool_call>call:find{n:1,what:<|"|>a "b" {c}<|"|>,deep:{x:[1,2]}}<tool_call|>'
        '<|tool_call>call:put{}<tool_call|>',
        "gemma",
    ),
    "no end but the answer's": (
        declaring(
            open_pattern=r"\[TOOL_CALLS\](?P<name>\w+)\[ARGS\]", close="<|eot|>", content="json", transform=NAMED
        ),
        '[TOOL_CALLS]find[ARGS]{"n": 3, "what": "x"}',
        "mistral_v11",
    ),
}  # fmt: skip
"""A declaration, an answer of its model, and the name of the table's format if it is one."""


def read(form: CallFormat, text: str, seed: int) -> list[tuple[str, Any]]:
    rng, at, pieces = random.Random(seed), 0, []
    name = "" if form.plain else name_of(form)
    reader = splitter(OutputFormat(tools=True, calls=name, xml=form.name == "qwen_xml", offered=OFFERED), 1, 0)
    while at < len(text):
        size = rng.choice([1, 2, 5, 60])
        pieces += reader.push(text[at : at + size])
        at += size
    pieces += reader.finish(by_model=True)
    assert "".join(piece[1] for piece in pieces if not isinstance(piece, ToolCallDelta)) == "Well."
    return read_calls(pieces)


@pytest.mark.parametrize("name", DECLARED)
def test_a_declaration_is_read_as_transformers_reads_it(name: str) -> None:
    template, text, known = DECLARED[name]
    form = declared_form(template, {"<|eot|>"})
    assert form is not None and sound(form)
    form = known_form(form)
    assert form.name == (known or "declared")
    wanted = parse_response("Well." + text, template, prefix="")["tool_calls"]
    wanted = wanted if isinstance(wanted, list) else [wanted]
    meant = [(one["function"]["name"], one["function"]["arguments"]) for one in wanted]
    for seed in range(10):
        assert read(form, "Well." + text, seed) == meant


def test_the_channels_of_gpt_oss_are_read_by_their_own_module() -> None:
    pattern = r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>"
    template = declaring(open_pattern=pattern, close="<|call|>", repeats=True, content="json", transform=NAMED)
    assert declared_form(template) is BY_NAME["harmony"]


OPEN = {"open": "<call>", "close": "</call>", "content": "json"}


@pytest.mark.parametrize(
    "template",
    [
        None, [], "text", {}, {"version": 2, **declaring(**OPEN)}, {"fields": []}, {"fields": {"tool_calls": []}},
        declaring(), declaring(open=""), declaring(open=["<a>", "<b>"], content="json"), declaring(open=7),
        declaring(open="<call>", content="kv-lines"), declaring(**OPEN, transform=3),
        declaring(**OPEN, transform={"function": {"name": "find", "arguments": "{content}"}}),
        declaring(**OPEN, content_args={"string_delims": [["'", "'"]]}),
        declaring(**{**OPEN, "close": ["</a>", "</b>"]}),
        declaring(**{**OPEN, "close": 5}), declaring(open_pattern="(a+)+$", content="json"),
        declaring(open_pattern="<" + "(?P<name>" * 40, content="json", transform=NAMED),
        declaring(open_pattern="<(?P<name>a(b))>", content="json", transform=NAMED),
        declaring(open_pattern="(?P<name>a)>", content="json", transform=NAMED),
        declaring(open_pattern="<a|b>(?P<name>x)", content="json", transform=NAMED),
        declaring(open_pattern="<" * 1000, content="json"), declaring(open_pattern=["<a>"], content="json"),
        declaring(open_pattern="<f=(?P<name>a)>", close="</f>", content="xml-inline", transform=NAMED),
        declaring(open_pattern="<f=(?P<name>a)>", close="</f>", content="xml-inline", transform=NAMED,
                  content_args={"tag_pattern": "(?P<key>a)(?P<value>b)"}),
        declaring(open_pattern="<f=(?P<name>a)>", close="</f>", content="xml-inline", transform=NAMED,
                  content_args=["tag_pattern"]),
        declaring(open_pattern="<f=(?P<other>a)>", close="</f>", content="json", transform=NAMED),
    ],
)  # fmt: skip
def test_an_unknown_declaration_is_ignored(template: Any) -> None:
    """Whatever the file contains: nothing raises, and none of its patterns is ever run."""
    assert declared_form(template) is None
