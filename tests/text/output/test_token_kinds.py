"""Kinds of an answer's tokens: the characters of each kind are exactly those that are shown as that kind."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from cairn.frontend.request_state import RequestState
from cairn.text.output.call_formats import BY_NAME, name_of
from cairn.text.output.output_parser import splitter
from cairn.text.output.stream import TextStream
from cairn.text.output.tool_parser import Piece
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.outputs import Delta, FinishReason, Output, TokenKind, TokenLogprob, ToolCallDelta, logprobs_of
from cairn.types.request import OfferedTool, OutputFormat, Request, SamplingParams
from tests.text.output.test_output_parser import BOTH, CALL, CASES
from tests.text.output.test_stream import chunks, tokenizer

__all__ = ["tokenizer"]

HARMONY = OutputFormat(
    reasoning=True, tools=True, offered=(OfferedTool("f"),), thoughts="harmony", calls=name_of(BY_NAME["harmony"])
)
OPENED = OutputFormat(reasoning=True, tools=True, reasoning_open=True, offered=BOTH.offered)
HERMES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    CALL,
    "\n",
    "\n\n",
    "a",
    "b c",
    '{"name": "f"}',
    "{",
    "`",
]
CHANNELS = [
    "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", "<|start|>assistant", "a", "b\n", " ",
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>", '{"x": 1}', "<|call|>", "<|return|>", "<",
]  # fmt: skip
SCORED = SamplingParams(max_tokens=1000, logprobs=True)
C, R, T, H = (bytes([kind]) for kind in (TokenKind.CONTENT, TokenKind.REASONING, TokenKind.REASONING_TAG, 0))


def shown_as(pieces: Sequence[Piece], kind: str) -> str:
    return "".join(piece[1] for piece in pieces if not isinstance(piece, ToolCallDelta) and piece[0] == kind)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("output", "words"), [(BOTH, HERMES), (OPENED, HERMES), (HARMONY, CHANNELS)])
def test_every_character_has_the_kind_as_which_it_is_shown(output: OutputFormat, words: list[str], seed: int) -> None:
    rng = random.Random(seed)
    texts = ["".join(rng.choice(words) for _ in range(rng.randrange(9))) for _ in range(400)]
    texts += [text for text, *_ in CASES] if output is BOTH else []
    for text in texts:
        split = splitter(output, 1, 0)
        pieces: list[Piece] = []
        kinds = ""
        at = 0
        while at < len(text):
            size = rng.choice((1, 2, 3, 50))
            pieces += split.push(text[at : at + size])
            kinds += "".join(str(int(kind)) * size for kind, size in split.decided())
            at += size
        pieces += split.finish(by_model=rng.random() < 0.5)
        kinds += "".join(str(int(kind)) * size for kind, size in split.decided())
        assert len(kinds) <= len(text)
        content = "".join(char for char, kind in zip(text, kinds, strict=False) if kind == "1")
        thought = "".join(char for char, kind in zip(text, kinds, strict=False) if kind == "2")
        apart = "\n" if output is HARMONY else ""  # put between two messages, not part of the answer
        assert content.replace(apart, "") == shown_as(pieces, "text").replace(apart, ""), text
        assert thought.replace(apart, "") == shown_as(pieces, "reasoning").replace(apart, ""), text


def run(stream: TextStream, tokens: Sequence[int], rng: random.Random | None = None) -> list[Delta]:
    results = [delta for piece in chunks(tokens, rng) for delta in stream.push(piece)]
    return [*results, *stream.finish(FinishReason.STOP)[0]]


def kinds_of(deltas: Sequence[Delta]) -> bytes:
    return b"".join(delta.kinds for delta in deltas)


def test_kinds_come_with_the_text_of_their_tokens(tokenizer: Tokenizer) -> None:
    """Each token comes once, never before its text, however the answer is delivered."""
    rng = random.Random(5)
    words = [*HERMES, "stop", "st", "op", "😀", "Århus", "<|im_end|>"]
    for number in range(150):
        text = "".join(rng.choice(words) for _ in range(rng.randrange(10)))
        tokens = tokenizer.encode(text, special=True)
        tokens += [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(3))]
        stop = rng.choice(((), ("stop",), ("b\n", "x<|im_end|>")))
        request = Request(id=number, prompt=(1,), sampling=SCORED, stop=stop, output=rng.choice((BOTH, OPENED)))
        stream = TextStream(tokenizer, request)
        whole = run(stream, tokens)
        kinds = kinds_of(whole)
        assert len(kinds) == len(stream.tokens)
        for delta, text_, kind in itertools.product(whole, ("text", "reasoning"), (C, R)):
            if (text_ == "text") == (kind == C) and kind in delta.kinds:
                assert getattr(delta, text_), "a token comes together with its text"
        again = TextStream(tokenizer, request)
        assert kinds_of(run(again, tokens, rng)) == kinds


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("<think>\nhm</think>\n\nHi", T * 8 + R * 2 + T * 10 + C * 2),
        ("<think>hm", T * 7 + R * 2),
        ("a <tool_call>", C * 13),
        (f"a\n{CALL}\nb", C + H * (len(CALL) + 2) + C),
        (CALL, H * len(CALL)),
        ("one stop two", C * 4 + H * 4),
        ("é", C * 2),
    ],
)
def test_kinds_of_one_byte_tokens(tmp_path: Path, text: str, kinds: bytes) -> None:
    from tests.text import text_models

    bytewise = Tokenizer.load(text_models.write_model(tmp_path, text_models.byte_level(), text_models.QWEN_CONFIG))
    alphabet = {bytewise.token_bytes(id): id for id in reversed(range(bytewise.vocab_size))}
    tokens = [alphabet[bytes([byte])] for byte in text.encode()]
    eos = bytewise.eos_id
    assert eos is not None
    request = Request(id=1, prompt=(1,), sampling=SCORED, stop=("stop",), output=BOTH)
    stream = TextStream(bytewise, request)
    result = kinds_of(run(stream, [*tokens, eos]))
    assert result == (kinds if stream.stopped else kinds + H)
    plain = TextStream(bytewise, Request(id=1, prompt=(1,), sampling=SCORED))
    assert kinds_of(run(plain, [*tokens, eos])) == C * len(tokens) + H


def test_log_probabilities_are_those_of_the_kinds(tokenizer: Tokenizer) -> None:
    """Also where a consumer lags, and for a resumed request whose first log-probabilities are unknown."""
    tokens = [
        *tokenizer.encode("<think>so and so</think>\n\nHello there <tool_x>", special=True),
        tokenizer.eos_id or 0,
    ]
    scores = [TokenLogprob(token, -0.5 - at) for at, token in enumerate(tokens)]
    for known, step in itertools.product((0, 1, 2, 5), (1, 3, 100)):
        request = Request(id=1, prompt=(1,), sampling=SCORED, generated=tuple(tokens[:known]), output=BOTH)
        state = RequestState(request, TextStream(tokenizer, request), 0.0)
        deltas: list[Delta] = []
        for at in range(known, len(tokens), step):
            state.accept(Output(id=1, tokens=tuple(tokens[at : at + step]), logprobs=tuple(scores[at : at + step])))
            deltas += [event for event in state.take() if isinstance(event, Delta)]
        state.end(FinishReason.STOP, None, None)
        deltas += [event for event in state.take() if isinstance(event, Delta)]
        assert [logprob for delta in deltas for logprob in delta.logprobs] == scores[known:]
        content = [one.token for d in deltas for one in logprobs_of(TokenKind.CONTENT, d.kinds, d.logprobs)]
        assert tokenizer.decode(content) == "Hello there <tool_x>"
        assert all(len(delta.kinds) == len(delta.logprobs) for delta in deltas)


def test_nothing_is_counted_unless_requested(tokenizer: Tokenizer) -> None:
    for output in (OutputFormat(), OutputFormat(tools=True)):
        stream = TextStream(tokenizer, Request(id=1, prompt=(1,), sampling=SamplingParams(max_tokens=9), output=output))
        assert kinds_of(run(stream, tokenizer.encode("Hello there"))) == b""
