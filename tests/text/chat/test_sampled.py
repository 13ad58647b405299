from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.text.chat.replay import answer_of, offered_by, opener, parsed_arguments, visible_ids
from cairn.text.output.reasoning_formats import THINK
from cairn.text.output.stream import TextStream
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.outputs import FinishReason
from cairn.types.request import OfferedTool, OutputFormat, Request, SamplingParams
from tests.text import text_models

BOTH = OutputFormat(reasoning=True, tools=True)
CALL = '<tool_call>\n{"name": "f", "arguments": {"x":   1}}\n</tool_call>'


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("model")
    return Tokenizer.load(text_models.write_model(folder, text_models.byte_level(), text_models.QWEN_CONFIG))


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece", "unigram"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    config = text_models.QWEN_CONFIG if request.param == "byte-level" else text_models.LLAMA2_CONFIG
    folder = tmp_path_factory.mktemp("model")
    return Tokenizer.load(text_models.write_model(folder, text_models.KINDS[request.param](), config))


def seen(
    tokenizer: Tokenizer, tokens: list[int], output: OutputFormat, stop: tuple[str, ...] = (), ended: bool = False
) -> tuple[Any, list[int]]:
    """Return the message that a client gets for `tokens`, and the ids that counted."""
    request = Request(id=1, prompt=(1,), sampling=SamplingParams(max_tokens=99), stop=stop, output=output)
    stream = TextStream(tokenizer, request)
    deltas = [delta for token in tokens for delta in stream.push((token,))]
    deltas += stream.finish(FinishReason.STOP if ended else FinishReason.LENGTH)[0]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(delta.text for delta in deltas)}
    message["reasoning_content"] = "".join(delta.reasoning for delta in deltas)
    calls: list[dict[str, Any]] = []
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        if piece.id:
            calls.append({"id": piece.id, "function": {"name": piece.name, "arguments": ""}})
        calls[piece.index]["function"]["arguments"] += piece.arguments
    return {**message, "tool_calls": calls}, stream.tokens


def split_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return ids that no encoder would give for a text: one token per character."""
    return [i for character in text for i in tokenizer.encode(character)]


def test_a_whole_answer_is_its_ids_without_the_end_token(qwen: Tokenizer) -> None:
    ids = split_ids(qwen, "Hello there")
    assert qwen.encode("Hello there") != ids
    message, tokens = seen(qwen, [*ids, qwen.eos_id or 0], BOTH)
    assert visible_ids(qwen, tokens, message, BOTH) == ids


def test_reasoning_and_calls_keep_their_very_ids(qwen: Tokenizer) -> None:
    text = f"<think>\nhm\n</think>\n\nok\n{CALL}"
    ids = qwen.encode(text, special=True)
    message, tokens = seen(qwen, [*ids, qwen.eos_id or 0], BOTH)
    assert message["tool_calls"][0]["function"]["arguments"] == '{"x":   1}'
    assert visible_ids(qwen, tokens, message, BOTH) == ids
    del message["tool_calls"][0]["id"]
    message["tool_calls"][0]["function"]["arguments"] = {"x": 1}
    assert visible_ids(qwen, tokens, message, BOTH) == ids


LONG = "line\\n" * 500
XML = f"<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=text>\n{LONG}\n</parameter>"


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize(
    ("text", "whole"),
    [
        (CALL.replace("1", f'"{LONG}"'), True),
        (CALL.replace("1}", f'"{LONG}", "n": 12'), True),
        (CALL.replace("1}", f'"{LONG}" oops}}'), False),
        (CALL[: CALL.index("1")] + f'"{LONG}', False),
        (f"{XML}\n</function>\n</tool_call>", True),
        (XML + "\n<parameter=n>\n4\n</parameter>\n</function>\n</tool_call>", False),
        (XML[:-20], False),
    ],
)
def test_a_call_keeps_its_ids_broken_or_cut_or_in_many_pieces(
    qwen: Tokenizer, text: str, whole: bool, ended: bool
) -> None:
    """The ids found for the returned message are those that were sampled, so its context is reused."""
    values = ("n",) if text.startswith(XML[:20]) else ()
    output = msgspec.structs.replace(BOTH, xml=bool(values), offered=(OfferedTool("f", values), OfferedTool("g")))
    ids = qwen.encode(text, special=True)
    message, tokens = seen(qwen, [*ids, *([qwen.eos_id or 0] if ended else [])], output, ended=ended)
    ((call,), arguments) = message["tool_calls"], message["tool_calls"][0]["function"]["arguments"]
    assert message["content"] == "" and call["function"]["name"] == "f" and len(arguments) > 2000
    assert isinstance(parsed_arguments(arguments), dict) == whole or (not ended and not whole)
    again = msgspec.structs.replace(output, offered=offered_by(message))
    assert visible_ids(qwen, tokens, message, again) == ids
    assert answer_of(message) is not None


@pytest.mark.parametrize("tail", [1, 64])
def test_ids_beyond_a_stop_string_are_never_replayed(
    tokenizer: Tokenizer, tail: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known failure 22."""
    monkeypatch.setattr("cairn.text.chat.replay._TAIL", tail)
    rng = random.Random(1)
    checked = 0
    for _ in range(200):
        text = "".join(rng.choice(["the ", "quick", " fox", "st", "stop", "op", "x", "\n"]) for _ in range(8))
        ids = tokenizer.encode(text) if rng.random() < 0.5 else split_ids(tokenizer, text)
        message, tokens = seen(tokenizer, ids, OutputFormat(), ("stop", "xq"))
        if not message["content"]:
            continue
        got = visible_ids(tokenizer, tokens, message, OutputFormat())
        if got is None:
            continue
        checked += 1
        assert tokenizer.decode(got) == message["content"]
        same = next(
            (n for n, (a, b) in enumerate(zip(got, tokens, strict=False)) if a != b), min(len(got), len(tokens))
        )
        assert len(got) - same <= 5
    assert checked > 100


def test_a_stop_string_behind_a_call_cuts_there(qwen: Tokenizer) -> None:
    """Known failure 22."""
    ids = [*qwen.encode(CALL, special=True), *split_ids(qwen, "\nand STOP it")]
    message, tokens = seen(qwen, ids, BOTH, ("STOP",))
    assert message["content"] == "and "
    got = visible_ids(qwen, tokens, message, BOTH)
    assert got is not None
    assert got == ids[: len(got)]
    assert qwen.decode(got) == CALL + "\nand "


def test_a_cut_character_is_never_replayed(qwen: Tokenizer) -> None:
    """Known failure 19."""
    ids = split_ids(qwen, "ab") + qwen.encode("😀")[:2]
    message, tokens = seen(qwen, ids, OutputFormat())
    assert message["content"] == "ab\ufffd"
    got = visible_ids(qwen, tokens, message, OutputFormat())
    assert got == split_ids(qwen, "ab") + qwen.encode("\ufffd")


def test_an_edit_is_not_what_was_sampled(qwen: Tokenizer) -> None:
    text = f"<think>hm</think>\n\nok\n{CALL}"
    message, tokens = seen(qwen, qwen.encode(text, special=True), BOTH)
    calls = json.loads(json.dumps(message["tool_calls"]))
    calls[0]["function"]["arguments"] = '{"x": 2}'
    renamed = json.loads(json.dumps(message["tool_calls"]))
    renamed[0]["function"]["name"] = "g"
    for change in (
        {"tool_calls": renamed},
        {"content": "oK"},
        {"content": "ok "},
        {"content": "o"},
        {"reasoning_content": "h"},
        {"tool_calls": []},
        {"tool_calls": calls},
        {"tool_calls": [{"function": {"name": "f", "arguments": '{"cut'}}]},
    ):
        assert visible_ids(qwen, tokens, {**message, **change}, BOTH) is None


def test_a_truncated_call_comes_back_as_the_content_that_it_was(qwen: Tokenizer) -> None:
    """Known failures 15, 24."""
    ids = qwen.encode(CALL, special=True)
    for cut in range(1, len(ids)):
        message, tokens = seen(qwen, ids[:cut], BOTH)
        assert bool(message["content"]) is not bool(message["tool_calls"])
        assert visible_ids(qwen, tokens, message, BOTH) == ids[:cut]


def test_text_opened_by_the_template_is_separated_from_the_answer(qwen: Tokenizer) -> None:
    head = qwen.encode_rendered("<|im_start|>assistant\n")
    for text in ("<think>\n", "<think>", "<think>\n\n</think>\n\n", "<think></think>"):
        ids = qwen.encode_rendered(text)
        assert opener(qwen, head + ids, THINK) == len(ids)
    for text in ("", "<think>\nso", "<think>x</think>", "</think>", "<think>" + "\n\n\n\n x" * 9):
        assert opener(qwen, head + qwen.encode_rendered(text), THINK) == 0


def test_no_opener_without_the_token(tmp_path: Path) -> None:
    made = Tokenizer.load(
        text_models.write_model(tmp_path, text_models.byte_level("llama3"), text_models.LLAMA3_CONFIG)
    )
    assert opener(made, made.encode("<think>\n"), THINK) == 0


REQUIRED = OutputFormat(tools=True, calls_only=True)
AGAIN = CALL.replace("   1", "1")


def test_a_repeated_forced_call_is_dropped(qwen: Tokenizer) -> None:
    """The answer ends there, and the next prompt holds the first call alone."""
    whole = f"{CALL}\n{AGAIN}\n"
    message, tokens = seen(qwen, split_ids(qwen, whole), REQUIRED)
    assert len(message["tool_calls"]) == 1 and not message["content"]
    assert len(tokens) < len(split_ids(qwen, whole)), "nothing more is generated"
    ids = visible_ids(qwen, tokens, message, REQUIRED)
    assert ids is not None and qwen.decode(ids, skip_special=False) == CALL
    other, _ = seen(qwen, split_ids(qwen, f"{CALL}\n{CALL.replace('1', '2')}"), REQUIRED)
    assert len(other["tool_calls"]) == 2, "another call is no repetition"
    free, _ = seen(qwen, split_ids(qwen, whole), BOTH)
    assert len(free["tool_calls"]) == 2, "a model that was not made to call may call twice"


@pytest.mark.parametrize("cut", [3, 8, len("<tool_call>"), len("<tool_call>") + 9, len(CALL) - 20])
def test_a_forced_call_cut_by_the_limit_is_no_content(cut: int, qwen: Tokenizer) -> None:
    message, tokens = seen(qwen, split_ids(qwen, f"{CALL}\n{CALL.replace('1', '2')[:cut]}"), REQUIRED)
    assert len(message["tool_calls"]) == 1 and not message["content"]
    ids = visible_ids(qwen, tokens, message, REQUIRED)
    assert ids is not None and qwen.decode(ids, skip_special=False).strip() == CALL
    message, tokens = seen(qwen, split_ids(qwen, CALL[:cut]), REQUIRED)
    assert not message["tool_calls"] and not message["content"]
    free, _ = seen(qwen, split_ids(qwen, f"{CALL}\n{CALL[:cut]}"), BOTH)
    assert free["content"] == CALL[:cut], "where text may stand too it may be text"
