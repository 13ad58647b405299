from __future__ import annotations

import json
import random
import re

import pytest

from cairn.text.split import Piece, Splitter
from cairn.types import OutputFormat, ToolCallDelta

BOTH = OutputFormat(reasoning=True, tools=True)
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": [1, "a"]}}\n</tool_call>'


def run(
    text: str, output: OutputFormat = BOTH, rng: random.Random | None = None, by_model: bool = True
) -> tuple[str, str, list[tuple[str, str]], int]:
    """Content, reasoning, calls (name, arguments), and how many of them are complete."""
    splitter = Splitter(output, 1, 0)
    pieces: list[Piece] = []
    at = 0
    while at < len(text):
        size = len(text) if rng is None else rng.choice((1, 1, 2, 3, 7, 20))
        pieces += splitter.push(text[at : at + size])
        at += size
    pieces += splitter.finish(by_model=by_model)
    return joined(pieces, splitter)


def joined(pieces: list[Piece], splitter: Splitter) -> tuple[str, str, list[tuple[str, str]], int]:
    """What a client puts together of them."""
    calls: dict[int, tuple[str, str]] = {}
    texts = {"text": "", "reasoning": ""}
    for piece in pieces:
        if isinstance(piece, ToolCallDelta):
            name, arguments = calls.get(piece.index, ("", ""))
            calls[piece.index] = (name + piece.name, arguments + piece.arguments)
        else:
            texts[piece[0]] += piece[1]
    assert sorted(calls) == list(range(len(calls)))
    return texts["text"], texts["reasoning"], list(calls.values()), splitter.complete_calls


OBJECT = '{"name": "f", "arguments": {"x": [1, "a"]}}'
CASES = [
    (f"<tool_call>{OBJECT}\n{OBJECT}</tool_call>x", "x", "", 2),
    (f"<tool_call>\n{OBJECT}{OBJECT}{OBJECT}\n</tool_call>\n{CALL}", "", "", 4),
    (f"<tool_call>{OBJECT}\n{{bad}}</tool_call>\n{CALL}", "{bad}</tool_call>", "", 2),
    (f"<tool_call>{OBJECT}}}\n</tool_call>", "}\n</tool_call>", "", 1),
    (f"<tool_call>{OBJECT} and <think>so</think>", " and ", "so", 1),
    (f"<tool_call>{OBJECT}\n{CALL}", "", "", 2),
    (f"<tool_call>{OBJECT}</tool_ call>", "</tool_ call>", "", 1),
    (f"<tool_call>{OBJECT}\n", "", "", 1),
    (f"<tool_call>{OBJECT[:-1]}", "", "", 1),
    (f"<tool_call>{OBJECT[:-1]} oops</tool_call>", " oops</tool_call>", "", 1),
    (f'<tool_call>{OBJECT[:-1]}, "more": {{"y": 2}}, "name": 5}}\n</tool_call>\nx', "x", "", 1),
    (f'<tool_call>{OBJECT[:-1]}, "more": nope}}</tool_call>', ', "more": nope}</tool_call>', "", 1),
    (f"<tool_call>{OBJECT}{OBJECT[:9]}", OBJECT[:9], "", 1),
    ("Hello\nworld\n", "Hello\nworld\n", "", 0),
    ("<think>\nhm\n\nok\n</think>\n\nHello", "Hello", "hm\n\nok", 0),
    ("<think></think>Hi", "Hi", "", 0),
    ("<think>never ends", "", "never ends", 0),
    ("a<think>b</think>c<think>d</think>e", "ace", "bd", 0),
    (CALL, "", "", 1),
    (f"Let me look.\n{CALL}", "Let me look.", "", 1),
    (f"{CALL}\n{CALL}\n", "", "", 2),
    (f"one {CALL} two", "one  two", "", 1),
    (f"<think>plan</think>\n\n{CALL}", "", "plan", 1),
    ("<think>a <tool_call> is no call here</think>x", "x", "a <tool_call> is no call here", 0),
    ("x </think> y </tool_call> z", "x </think> y </tool_call> z", "", 0),
    ("a < b <th <tool <think", "a < b <th <tool <think", "", 0),
    ("ends with a line\n", "ends with a line\n", "", 0),
    ("\n<tool_call>nope</tool_call>\n", "\n<tool_call>nope</tool_call>\n", "", 0),
    (f"<tool_call>{CALL}", "<tool_call>", "", 1),
    (f"<tool_call>{{bad}}\n{CALL}", "<tool_call>{bad}", "", 1),
    ('<tool_call>{"name": "f"} <' + CALL, '<tool_call>{"name": "f"} <', "", 1),
]


@pytest.mark.parametrize(("text", "content", "reasoning", "complete"), CASES)
def test_each_character_goes_to_one_place_however_the_text_is_cut(
    text: str, content: str, reasoning: str, complete: int
) -> None:
    """Known failures 22, 24."""
    rng = random.Random(5)
    for pieces in (None, *[rng] * 30):
        got = run(text, rng=pieces)
        assert (got[0], got[1], got[3]) == (content, reasoning, complete)
        assert got[2] == [("f", '{"x": [1, "a"]}')] * complete


def test_a_call_cut_in_its_arguments_is_not_complete_and_its_text_is_no_content() -> None:
    """Known failures 15, 24."""
    for by_model in (True, False):
        content, _, calls, complete = run(CALL[:50], by_model=by_model)
        assert (content, complete) == ("", 0)
        assert calls == [("f", '{"x": [1, "')]


def test_a_call_cut_before_its_arguments_is_content() -> None:
    """Known failures 15, 24."""
    assert run('x\n<tool_call>\n{"name": "f", "arg', by_model=False) == (
        'x\n<tool_call>\n{"name": "f", "arg',
        "",
        [],
        0,
    )


def test_a_finished_object_without_its_tag_counts_only_if_the_model_ended_there() -> None:
    """Known failure 15."""
    text = CALL.removesuffix("</tool_call>")
    assert run(text, by_model=True)[3] == 1
    assert run(text, by_model=False)[2:] == ([("f", '{"x": [1, "a"]')], 0)


def test_formats_that_are_off_change_nothing() -> None:
    text = f"<think>a</think>\n{CALL}\n"
    assert run(text, OutputFormat(reasoning=True)) == (f"{CALL}\n", "a", [], 0)
    assert run(text, OutputFormat(tools=True))[:2] == ("<think>a</think>", "")


def test_reasoning_that_the_prompt_opened() -> None:
    output = OutputFormat(reasoning=True, reasoning_open=True)
    assert run("\nhm\n</think>\n\nHello", output)[:2] == ("Hello", "hm")


def tagged(text: str) -> str:
    """What is left of a text when everything that may be dropped is."""
    return re.sub(r"</?think>|\n", "", text)


def test_random_texts_give_the_same_in_any_pieces_and_lose_nothing() -> None:
    """Known failures 22, 24."""
    rng = random.Random(6)
    words = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        CALL,
        '{"name": "f"',
        ', "arguments": {"a": 1}',
        "}",
        "\n",
    ]
    words += ["<", "</", "tool_call>", "text", " ", '"']
    for _ in range(1500):
        text = "".join(rng.choice(words) for _ in range(rng.randrange(10)))
        whole = run(text)
        for _ in range(3):
            assert run(text, rng=rng) == whole, text
        if not whole[2]:
            # No call was read: every character but tags and line breaks is content or reasoning.
            assert len(tagged(whole[0]) + tagged(whole[1])) == len(tagged(text))


def test_whatever_is_wrong_with_a_call_is_read_the_same_at_every_cut() -> None:
    """Known failures 15, 24: and arguments are JSON, unless they are the last thing that went wrong."""
    rng = random.Random(7)
    typed = '{"name": "f", "arguments": {"a": -1.5e3, "b": [true, "\\u00e5"]}, "id": 1}'
    for _ in range(100):
        one = typed
        for _ in range(rng.choice((0, 1, 1, 2))):
            at = rng.randrange(len(one))
            one = one[:at] + rng.choice(["", "}", "{", ",", '"', " ", "x", "1", "tr", "</t", "\n"]) + one[at + 1 :]
        text = "<tool_call>\n" + one + rng.choice(["", "\n", "}", " x", one, typed, "\n" + typed]) + "</tool_call>\n."
        whole = run(text)
        for cut in range(1, len(text)):
            splitter = Splitter(BOTH, 1, 0)
            pieces = splitter.push(text[:cut]) + splitter.push(text[cut:]) + splitter.finish(by_model=True)
            assert joined(pieces, splitter) == whole, text
        assert run(text, rng=random.Random(1)) == whole, text
        assert sum(is_object(arguments) for _, arguments in whole[2]) == whole[3], text


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def test_long_text_is_split_in_linear_steps() -> None:
    """A held line break or bracket is searched again only as far as a tag is long."""
    splitter = Splitter(BOTH, 1, 0)
    for _ in range(20_000):
        splitter.push("\n")
        assert len(splitter._held) <= len("<tool_call>")
