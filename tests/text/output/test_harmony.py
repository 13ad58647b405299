"""Answers of gpt-oss: channels, calls, and text that is neither."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cairn.text.grammar.call_grammar import callable_tools, lark_of_calls
from cairn.text.grammar.grammar import Shape, Structure
from cairn.text.output.call_formats import BY_NAME
from cairn.text.output.output_parser import splitter
from cairn.text.output.tool_parser import offered_tools
from cairn.types.outputs import ToolCallDelta
from cairn.types.request import OutputFormat
from tests.text.output.call_pieces import read_calls
from tests.text.walks import accepts, checked

F = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}]
OUTPUT = OutputFormat(
    reasoning=True, thoughts="harmony", tools=True, calls="harmony", offered=offered_tools(F, xml=False)
)

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'


def read(text: str, output: OutputFormat = OUTPUT, seed: int | None = None, *, by_model: bool = True) -> Any:
    """Return (reasoning, content, calls), read at once or in random pieces."""
    rng, at = random.Random(seed), 0
    reader, pieces = splitter(output, 1, 0), []
    while at < len(text):
        size = len(text) if seed is None else rng.choice([1, 1, 2, 5, 30])
        pieces += reader.push(text[at : at + size])
        at += size
    pieces += reader.finish(by_model=by_model)
    said = {"reasoning": "", "text": ""}
    for piece in pieces:
        if not isinstance(piece, ToolCallDelta):
            said[piece[0]] += piece[1]
    return said["reasoning"], said["text"], read_calls(pieces)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (FINAL + "Hello <b>\n", ("", "Hello <b>\n", [])),
        (THOUGHT + FINAL + "Yes", ("Hm.", "Yes", [])),
        (THOUGHT + CALL, ("Hm.", "", [("f", {"a": 1})])),
        (THOUGHT + CALL + "<|call|>", ("Hm.", "", [("f", {"a": 1})])),
        (THOUGHT + ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', ("Hm.", "", [("f", {"a": 1})])),
        (CALL.replace("functions.", ""), ("", "", [("f", {"a": 1})])),
        (CALL.replace('{"a": 1}', ""), ("", "", [("f", {})])),
        (THOUGHT + THOUGHT + FINAL + "Yes", ("Hm.\nHm.", "Yes", [])),
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL, ("", "I look.", [("f", {"a": 1})])),
        (f"{CALL}<|end|><|start|>assistant{CALL}", ("", "", [("f", {"a": 1})] * 2)),
        ("Hello, no header", ("", "Hello, no header", [])),
        ("", ("", "", [])),
        (CALL.replace("1}", "1"), ("", "", [("f", {"a": 1})])),
        (CALL.replace("1}", "1 2}") + "<|call|>", ("", "", [("f", '{"a": 1 2}')])),
        (CALL + " Done.<|end|>", ("", " Done.", [("f", {"a": 1})])),
        (
            CALL.replace("functions.f", "functions.g").replace("1}", "1 2}"),
            ("", CALL.replace("functions.f", "functions.g").replace("1}", "1 2}"), []),
        ),
        (CALL.replace("functions.f", "browser"), ("", CALL.replace("functions.f", "browser"), [])),
        ("<|channel|>" + "x" * 300, ("", "<|channel|>" + "x" * 300, [])),
    ],
)
def test_answers_of_gpt_oss(text: str, wanted: Any) -> None:
    assert read(text) == wanted
    for seed in range(20):
        assert read(text, seed=seed) == wanted, "the result depends on how the text is cut"


def test_a_call_that_was_cut_stays_cut_and_one_that_is_not_offered_is_content() -> None:
    assert read(THOUGHT + CALL[:-1], by_model=False) == ("Hm.", "", [("f", '{"a": ')])
    other = CALL[:-1].replace("functions.f", "functions.g")
    assert read(THOUGHT + other, by_model=False) == ("Hm.", other, [])
    without = OutputFormat(reasoning=True, thoughts="harmony")
    assert read(CALL, without) == ("", CALL, [])


def test_the_answer_ends_with_its_first_call_without_parallel_calls() -> None:
    reader = splitter(OutputFormat(thoughts="harmony", tools=True, one_call=True), 1, 0)
    pieces = reader.push(CALL + "<|end|><|start|>assistant" + FINAL + "more")
    assert len(pieces) == 1 and reader.over and not reader.finish(by_model=True)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_broken_is_read_alike_in_pieces(seed: int) -> None:
    rng = random.Random(seed)
    text = THOUGHT + CALL + "<|end|><|start|>assistant" + FINAL + "Done."
    for _ in range(20):
        at = rng.randrange(len(text))
        wrong = rng.choice(["", "{", "<|", "<|message|>", "<|start|>", "\n", "\n to=f", "<|channel|>\n"])
        broken = text[:at] + wrong + text[at + rng.randint(0, 30) :]
        assert read(broken, seed=seed) == read(broken)


def test_grammars() -> None:
    form, tools = BY_NAME["harmony"], callable_tools(F, None, None)
    must = lark_of_calls(form, tools, required=True, parallel=True)
    grammar = checked(Shape(calls=must, reasoning="may", thoughts="harmony"))
    assert accepts(grammar, THOUGHT + CALL) and accepts(grammar, CALL) and not accepts(grammar, THOUGHT + FINAL + "x")
    structure = Structure(kind="choice", text='["yes", "no"]')
    grammar = checked(Shape(structure=structure, reasoning="may", thoughts="harmony"))
    assert accepts(grammar, THOUGHT + FINAL + "yes") and not accepts(grammar, FINAL + "maybe")
    may = lark_of_calls(form, tools, required=False, parallel=True)
    grammar = checked(Shape(calls=may, structure=structure, reasoning="may", thoughts="harmony"))
    assert accepts(grammar, THOUGHT + FINAL + "no") and accepts(grammar, THOUGHT + CALL)
