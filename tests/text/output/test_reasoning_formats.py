"""Reasoning in each family's markup, and texts that only mention it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cairn.text.output.output_parser import markers, splitter
from cairn.text.output.reasoning_formats import FORMS, thoughts_of
from cairn.types.outputs import ToolCallDelta
from cairn.types.request import OfferedTool, OutputFormat
from tests.text.output.call_pieces import read_calls

TEMPLATES = {
    "mistral": "{{ messages }}[THINK]{{ thought }}[/THINK]",
    "seed": "{{ messages }}<seed:think>{{ thought }}</seed:think>",
    "apertus": "{{ messages }}<|inner_prefix|>{{ thought }}<|inner_suffix|>",
    "hunyuan": "{{ messages }}{% if '<answer>' in m.content and '</answer>' in m.content %}{% endif %}<think>",
}
MARKS = {
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "hunyuan": ("<think>", "</think>"),
}


def read(name: str, text: str, **more: Any) -> tuple[str, str, int]:
    """Return content, reasoning and number of calls; fail if they depend on how the text is cut."""
    output = OutputFormat(reasoning=True, thoughts=name, **more)
    first = None
    for seed in range(20):
        rng, reader, at, pieces = random.Random(seed), splitter(output, 1, 0), 0, []
        while at < len(text):
            size = len(text) if not seed else rng.choice([1, 1, 2, 5, 30])
            pieces += reader.push(text[at : at + size])
            at += size
        pieces += reader.finish(by_model=True)
        said = {"text": "", "reasoning": ""}
        for piece in pieces:
            if not isinstance(piece, ToolCallDelta):
                said[piece[0]] += piece[1]
        calls = len(read_calls(pieces))
        first = first or (said["text"], said["reasoning"], calls)
        assert (said["text"], said["reasoning"], calls) == first, "the result depends on how the text is cut"
    assert first is not None
    return first


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_its_marks(name: str) -> None:
    assert thoughts_of([TEMPLATES[name]]).name == name and name in FORMS
    assert set(MARKS[name]) <= set(markers(OutputFormat(reasoning=True, thoughts=name)))
    assert thoughts_of(["{{ messages }}<think>"]).name == ""


@pytest.mark.parametrize("name", MARKS)
def test_text_between_the_marks_is_reasoning(name: str) -> None:
    opened, closed = MARKS[name]
    assert read(name, f"{opened}Hm.\n{closed}\n\nYes.") == ("Yes.", "Hm.", 0)
    assert read(name, f"\n{opened}\nHm.{closed}Yes.") == ("Yes.", "Hm.", 0)
    assert read(name, f"Hm.{closed}Yes.", reasoning_open=True) == ("Yes.", "Hm.", 0)
    assert read(name, f"{opened}never ends") == ("", "never ends", 0)
    assert read(name, f"`{opened}` opens it, `{closed}` ends it") == (f"`{opened}` opens it, `{closed}` ends it", "", 0)
    assert read(name, f"{opened}a{closed}b{opened}c{closed}") == (f"b{opened}c{closed}", "a", 0)
    other = next(one for one, _ in MARKS.values() if one != opened)
    assert read(name, f"{other}x") == (f"{other}x", "", 0), "another model's mark is text"


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", "Yes.", "Hm."),
        ("<think>Hm.</think><answer>Yes.</answer>\n", "Yes.", "Hm."),
        ("<answer>\nYes.\n</answer>", "Yes.", ""),
        ("<think>Hm.</think>\n<answer>cut of", "cut of", "Hm."),
        ("<think>Hm.</think>Yes.", "Yes.", "Hm."),
        # Content may mention the tags: the first and the last ones are the markup.
        ("<answer>Write </answer> at the end.</answer>", "Write </answer> at the end.", ""),
        ("<answer>a</answer></answer>", "a</answer>", ""),
        ("Write <answer>x</answer>", "Write <answer>x</answer>", ""),
        ("<think>Hm.</think>Yes.</answer>", "Yes.</answer>", "Hm."),
        ("<answer></answer>", "", ""),
    ],
)
def test_answers_of_hunyuan(text: str, content: str, reasoning: str) -> None:
    assert read("hunyuan", text) == (content, reasoning, 0)


def test_a_call_may_stand_in_an_answer_of_hunyuan() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    more: dict[str, Any] = {"tools": True, "offered": (OfferedTool("f"),)}
    assert read("hunyuan", f"<think>Hm.</think>\n<answer>\n{call}\n</answer>", **more) == ("", "Hm.", 1)
    assert read("hunyuan", f"<answer>I look.\n{call}</answer>", **more) == ("I look.", "", 1)


def test_tags_around_answers_are_text_in_other_models() -> None:
    assert read("", "<think>Hm.</think><answer>Yes.</answer>") == ("<answer>Yes.</answer>", "Hm.", 0)
