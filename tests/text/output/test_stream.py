from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from cairn.text.output.stream import TextStream
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.outputs import Delta, FinishReason
from cairn.types.request import OfferedTool, OutputFormat, Request, SamplingParams
from tests.text import text_models

BOTH = OutputFormat(reasoning=True, tools=True)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Århus", "days": [1, 2]}}\n</tool_call>'
ARGUMENTS = '{"city": "Århus", "days": [1, 2]}'


@pytest.fixture(scope="module", params=["plain", "added", "special"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tokenizer whose reasoning and tool call tags are plain text, added tokens, or special tokens."""
    data = json.loads(text_models.byte_level())
    tags = [
        added_token
        for added_token in data["added_tokens"]
        if added_token["content"].strip("</>") in ("think", "tool_call")
    ]
    if request.param == "plain":
        data["added_tokens"] = [added_token for added_token in data["added_tokens"] if added_token["special"]]
    for tag in tags:
        tag["special"] = request.param == "special"
    folder = tmp_path_factory.mktemp("model")
    return Tokenizer.load(text_models.write_model(folder, json.dumps(data), text_models.QWEN_CONFIG))


def request(**fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=1000, **fields.pop("sampling", {}))
    return Request(id=77, prompt=fields.pop("prompt", (1,)), sampling=sampling, **fields)


def chunks(tokens: Sequence[int], rng: random.Random | None) -> Iterator[Sequence[int]]:
    at = 0
    while at < len(tokens):
        size = 1 if rng is None else rng.choice((1, 1, 2, 3, 8, 40))
        yield tokens[at : at + size]
        at += size


def run(
    stream: TextStream,
    tokens: Sequence[int],
    rng: random.Random | None = None,
    reason: FinishReason = FinishReason.STOP,
) -> tuple[list[Delta], FinishReason]:
    """Return all deltas. Pushing continues after a stop, as a worker that is a step ahead does."""
    deltas = [delta for chunk in chunks(tokens, rng) for delta in stream.push(chunk)]
    last, reason = stream.finish(reason)
    return deltas + last, reason


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def reasoning_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.reasoning for delta in deltas)


def calls_of(deltas: Sequence[Delta]) -> list[tuple[str, str, str]]:
    """Return (id, name, arguments) of each call."""
    calls: list[list[str]] = []
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        if piece.index == len(calls):
            assert piece.id
            assert piece.name
            calls.append([piece.id, piece.name, piece.arguments])
        else:
            assert not piece.id
            calls[piece.index][2] += piece.arguments
    return [(call[0], call[1], call[2]) for call in calls]


def test_plain_text_streams_exactly(tokenizer: Tokenizer) -> None:
    """Known failures 19, 22: the pieces join to the decoded whole however it is chunked."""
    rng = random.Random(1)
    for text in text_models.TEXTS:
        tokens = tokenizer.encode(text)
        for pieces in (None, rng, rng):
            stream = TextStream(tokenizer, request())
            deltas, reason = run(stream, tokens, pieces)
            assert text_of(deltas) == text
            assert reason is FinishReason.STOP
            assert stream.tokens == tokens
            assert stream.completion_tokens == len(tokens)
            assert [token for delta in deltas for token in delta.tokens] == tokens


def test_random_tokens_give_the_same_deltas_in_any_pieces(tokenizer: Tokenizer) -> None:
    """Known failures 19, 22, 24: everything is on, and the model generates anything."""
    rng = random.Random(2)
    words = [
        CALL,
        "<think>",
        "</think>",
        "<tool_call>",
        "\n",
        "stop",
        "st",
        "op",
        "<|im_end|>",
        '{"name": "f"',
        "}",
        "😀",
        "x",
    ]
    for _ in range(300):
        text = "".join(rng.choice(words) for _ in range(rng.randrange(12)))
        tokens = tokenizer.encode(text, special=rng.random() < 0.7)
        tokens += [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(5))]
        controls = rng.choice(
            ((), ("<|im_end|>",), ("x\n<|im_end|>", "<|im_end|><|im_end|>x"), ("<think>", "}<|im_end|>"))
        )
        fields = {"output": BOTH, "stop": ("stop", "\n\nx", "ðŁ", *controls)}
        deltas, reason = run(TextStream(tokenizer, request(**fields)), tokens)
        expected = (text_of(deltas), reasoning_of(deltas), calls_of(deltas), reason)
        assert controls or "stop" not in expected[0]  # a stop with a control token may contain it
        for _ in range(3):
            stream = TextStream(tokenizer, request(**fields))
            deltas, reason = run(stream, tokens, rng)
            assert (text_of(deltas), reasoning_of(deltas), calls_of(deltas), reason) == expected
            assert tokens[: stream.completion_tokens] == stream.tokens


def test_reasoning_content_and_a_call(tokenizer: Tokenizer) -> None:
    """Known failure 24: tags as plain text, and as single tokens, special or not."""
    text = f"<think>\nWhat now?\n</think>\n\nLet me look.\n{CALL}"
    tokens = [*tokenizer.encode(text, special=True), tokenizer.eos_id]
    deltas, reason = run(TextStream(tokenizer, request(output=BOTH)), tokens)  # type: ignore[arg-type]
    assert reasoning_of(deltas) == "What now?"
    assert text_of(deltas) == "Let me look."
    ((call_id, name, arguments),) = calls_of(deltas)
    assert (name, arguments) == ("get_weather", ARGUMENTS)
    assert reason is FinishReason.TOOL_CALLS
    assert sum(bool(delta.tool_calls) for delta in deltas) == 1  # whole or not at all
    again, _ = run(TextStream(tokenizer, request(output=BOTH)), tokens)  # type: ignore[arg-type]
    assert calls_of(again)[0][0] == call_id


def test_a_truncated_call_does_not_finish_as_tool_calls(tokenizer: Tokenizer) -> None:
    """Known failure 15."""
    tokens = tokenizer.encode(CALL, special=True)
    for cut in range(1, len(tokens)):
        deltas, reason = run(TextStream(tokenizer, request(output=BOTH)), tokens[:cut], reason=FinishReason.LENGTH)
        assert reason is FinishReason.LENGTH
        if calls_of(deltas):
            assert calls_of(deltas)[0][2] == ARGUMENTS
            assert text_of(deltas) == ""
        else:
            assert text_of(deltas) == tokenizer.decode(tokens[:cut], skip_special=False)
    deltas, reason = run(TextStream(tokenizer, request(output=BOTH)), tokens, reason=FinishReason.LENGTH)
    assert reason is FinishReason.LENGTH
    assert calls_of(deltas)[0][2] == ARGUMENTS


@pytest.mark.parametrize("more", ["", "<|tool_call_end|>", "<|tool_call_end|> STOP"])
def test_a_call_dropped_after_a_stop_string_does_not_finish_as_tool_calls(more: str, tokenizer: Tokenizer) -> None:
    """The text of a call that never closes is content, so the stop string in it ends the answer before the call."""
    output = OutputFormat(tools=True, calls="lfm2", offered=(OfferedTool("f"),))
    tokens = tokenizer.encode(f"<|tool_call_start|>[f( STOP <|tool_call_start|>[f()]{more}")
    for rng in (None, random.Random(1)):
        deltas, reason = run(TextStream(tokenizer, request(output=output, stop=("STOP",))), tokens, rng)
        assert (text_of(deltas), calls_of(deltas)) == ("<|tool_call_start|>[f( ", [])
        assert reason is FinishReason.STOP


def test_a_malformed_call_is_content_unchanged(tokenizer: Tokenizer) -> None:
    """Known failure 24."""
    for text in ("<tool_call>{bad}</tool_call>", 'a\n<tool_call>\n{"name": 5}\n</tool_call>\n', "<tool_call>"):
        deltas, reason = run(TextStream(tokenizer, request(output=BOTH)), tokenizer.encode(text, special=True))
        assert text_of(deltas) == text
        assert calls_of(deltas) == []
        assert reason is FinishReason.STOP


def test_arguments_that_were_complete_are_json_whatever_follows(tokenizer: Tokenizer) -> None:
    """Known failure 15: what follows is another call, dropped, or content."""
    one = '{"name": "f", "arguments": {"x": 1}'
    other = '{"name": "g\\ud800", "arguments": {}}'
    for said, content, names in (
        (one + "}\n" + other, "", ["f", "g\ufffd"]),
        (one + ', "extra": 2}', "", ["f"]),
        (one + "}}", "", ["f"]),
        (one + "} x", " x\n</tool_call>", ["f"]),
    ):
        tokens = tokenizer.encode(f"<tool_call>\n{said}\n</tool_call>", special=True)
        deltas, reason = run(TextStream(tokenizer, request(output=BOTH)), tokens)
        assert text_of(deltas) == content
        assert [name for _, name, _ in calls_of(deltas)] == names
        assert [json.loads(arguments) for _, _, arguments in calls_of(deltas)] == [{"x": 1}, {}][: len(names)]
        assert reason is FinishReason.TOOL_CALLS
        assert msgspec.json.encode(deltas)


def test_a_stop_string_never_leaks_and_ends_the_count(tokenizer: Tokenizer) -> None:
    """Known failure 22."""
    tokens = tokenizer.encode("one two <stop> three four")
    whole, _ = run(TextStream(tokenizer, request()), tokens)
    rng = random.Random(3)
    for pieces in (None, *[rng] * 10):
        stream = TextStream(tokenizer, request(stop=("<stop>",)))
        deltas, reason = run(stream, tokens, pieces, FinishReason.LENGTH)
        assert text_of(deltas) == "one two " == text_of(whole).split("<stop>")[0]
        assert stream.stopped
        assert reason is FinishReason.STOP
        assert stream.completion_tokens < len(tokens)
        assert tokenizer.decode(stream.tokens).startswith("one two <stop>")
        assert "<stop>" not in tokenizer.decode(stream.tokens[:-1])
        assert stream.push([5]) == []


def test_stop_strings_do_not_touch_reasoning_or_calls(tokenizer: Tokenizer) -> None:
    """Known failure 22: stop sequences are matched in content only."""
    text = f"<think>go rhus stop</think>\n\n{CALL}"
    stream = TextStream(tokenizer, request(output=BOTH, stop=("stop", "rhus")))
    deltas, reason = run(stream, tokenizer.encode(text, special=True))
    assert (reasoning_of(deltas), reason) == ("go rhus stop", FinishReason.TOOL_CALLS)
    assert calls_of(deltas)[0][2] == ARGUMENTS


def test_a_stop_string_does_not_reach_across_a_call(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(f"st{CALL}op", special=True)
    stream = TextStream(tokenizer, request(output=BOTH, stop=("stop",)))
    assert text_of(run(stream, tokens)[0]) == "stop"
    assert not stream.stopped


BARE = OutputFormat(tools=True, offered=(OfferedTool("f", ()),))
ONE = '{"name": "f", "arguments": {"x": 1}}'


@pytest.mark.parametrize(
    "text", [ONE, f"```json\n{ONE}\n```", f"<tool_call>{ONE[:-1]}", "if a <", "a\n", "{", "\n", "a"]
)
def test_a_stop_that_is_the_end_token_changes_nothing(text: str, tokenizer: Tokenizer) -> None:
    tokens = [*tokenizer.encode(text, special=True), tokenizer.eos_id]
    ends = {"stop_token_ids": (tokenizer.eos_id,)}
    results = []
    for stop in ((), ("<|im_end|>",), ("<|im_end|>", "<|im_end|>\n")):
        stream = TextStream(tokenizer, request(output=BARE, sampling=ends, stop=stop))
        deltas, reason = run(stream, tokens)  # type: ignore[arg-type]
        results.append((text_of(deltas), calls_of(deltas), reason, stream.tokens))
    assert results[0] == results[1] == results[2]
    assert results[0][0] or results[0][1]


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("a\n<|im_end|>more", "\n<|im_end|>", "a"),
        ("a\n<|im_end|>more", "\n<|im_end|>mo", "a"),
        ("a <<|im_end|>more", "<<|im_end|>", "a "),
        ("{}\n<|im_end|>more", "}\n<|im_end|>", "{"),
        ("a\n<|im_end|>more", "\n<|im_end|>x", "a\nmore"),
        (f"{ONE}<|im_end|>", "}<|im_end|>", ""),
    ],
)
def test_held_back_text_comes_before_a_control_token(text: str, stop: str, shown: str, tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, request(output=BARE, stop=(stop,)))
    deltas, reason = run(stream, tokenizer.encode(text, special=True))
    assert text_of(deltas) == shown
    assert stream.stopped == (shown not in ("a\nmore", ""))
    assert reason is (FinishReason.STOP if shown else FinishReason.TOOL_CALLS)


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("stop, and then stop")
    stream = TextStream(tokenizer, request(stop=("stop",), sampling={"min_tokens": len(tokenizer.encode("stop,"))}))
    deltas, _ = run(stream, tokens)
    assert text_of(deltas) == "stop, and then "
    assert stream.stopped


def test_the_end_token_is_no_text_even_where_it_is_not_special(tmp_path: Path) -> None:
    library = Library.from_str(text_models.byte_level())
    library.add_tokens([AddedToken("<end>", normalized=False)])
    made = Tokenizer.load(text_models.write_model(tmp_path, library.to_str(), {}))
    end = made.token_id("<end>")
    tokens = [*made.encode("bye"), end]
    stream = TextStream(made, request(sampling={"stop_token_ids": (end,)}))
    assert text_of(run(stream, tokens)[0]) == "bye"  # type: ignore[arg-type]
    assert stream.completion_tokens == len(tokens)
    # A stop token that the caller chose is text like any other.
    own = made.encode("bye")[-1]
    assert text_of(run(TextStream(made, request(sampling={"stop_token_ids": (own,)})), made.encode("bye"))[0]) == "bye"


def test_tokens_generated_before_are_context_and_not_reported(tokenizer: Tokenizer) -> None:
    text = "<think>a</think>Hello 😀 stop x"
    tokens = tokenizer.encode(text, special=True)
    fields = {"output": BOTH, "stop": ("stop",)}
    whole, _ = run(TextStream(tokenizer, request(**fields)), tokens)
    for cut in range(len(tokens)):
        first = TextStream(tokenizer, request(**fields))
        before = [delta for token in tokens[:cut] for delta in first.push((token,))]
        again = TextStream(tokenizer, request(generated=tuple(tokens[:cut]), **fields))
        assert again.tokens == []
        after, _ = run(again, tokens[cut:])
        assert text_of(before) + text_of(after) == text_of(whole) == "Hello 😀 "
        assert reasoning_of(before) + reasoning_of(after) == "a"


@pytest.mark.parametrize("kind", text_models.KINDS)
def test_a_continued_text_keeps_its_space(kind: str, tmp_path: Path) -> None:
    """A decoder may drop the space before the first word of a text, which the first word of an answer need not be."""
    made = Tokenizer.load(text_models.write_model(tmp_path, text_models.KINDS[kind](), {}))
    ids = made.encode("the quick brown fox jumps over the lazy dog")
    raw = OutputFormat(continues=True)
    for cut in range(1, len(ids)):
        before, after = ids[:cut], ids[cut:]
        whole, rest = made.decode(before), made.decode(after)
        said = text_of(run(TextStream(made, request(prompt=tuple(before), output=raw)), after)[0])
        assert whole + said == made.decode(ids)
        again = TextStream(made, request(prompt=tuple(before), output=raw, generated=tuple(after[:1])))
        assert said.endswith(text_of(run(again, after[1:])[0]))
        # A chat's answer is a text of its own, and so is what follows control tokens only.
        assert text_of(run(TextStream(made, request(prompt=tuple(before))), after)[0]) == rest
        for nothing in sorted(made.special_ids)[:1]:
            assert text_of(run(TextStream(made, request(prompt=(nothing,), output=raw)), after)[0]) == rest


def test_other_endings_are_passed_on(tokenizer: Tokenizer) -> None:
    """Known failure 15: an ending that is not a success is not turned into one."""
    tokens = tokenizer.encode(CALL, special=True)
    for reason in (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR, FinishReason.LENGTH):
        assert run(TextStream(tokenizer, request(output=BOTH)), tokens, reason=reason)[1] is reason


def test_order_is_kept_where_kinds_alternate(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, request(output=BOTH))
    tokens = tokenizer.encode(f"<think>a</think>b{CALL}c{CALL}", special=True)
    deltas = stream.push(tokens) + stream.finish(FinishReason.STOP)[0]
    assert [(delta.reasoning, delta.text, len(delta.tool_calls)) for delta in deltas] == [("a", "b", 1), ("", "c", 1)]


def test_a_tag_in_content_is_shown_whatever_its_token_is(tokenizer: Tokenizer) -> None:
    """Reasoning was cut out of code that mentions the tag."""
    text = "Write `<think>`, think, and write `</think>`."
    for output in (BOTH, OutputFormat(reasoning=True)):
        deltas, _ = run(TextStream(tokenizer, request(output=output)), tokenizer.encode(text, special=True))
        assert (text_of(deltas), reasoning_of(deltas)) == (text, "")


def test_rows_of_a_call_are_no_loop(tokenizer: Tokenizer) -> None:
    rows = ", ".join(["0"] * 400)
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"rows": [' + rows + "]}}\n</tool_call>"
    stream = TextStream(tokenizer, request(output=BOTH, repetition_stop=True))
    deltas, reason = run(stream, tokenizer.encode(call, special=True))
    assert not stream.looped and reason is FinishReason.TOOL_CALLS
    stream = TextStream(tokenizer, request(output=BOTH, repetition_stop=True))
    deltas, reason = run(stream, tokenizer.encode("0, " * 400), reason=FinishReason.LENGTH)
    assert stream.looped and reason is FinishReason.LENGTH
    assert "".join(delta.text for delta in deltas) == ("0, " * 400)[: len("".join(delta.text for delta in deltas))]
