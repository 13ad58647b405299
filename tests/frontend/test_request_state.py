from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.frontend.request_state import PackedLogprobs, RequestState, RequestStatus
from cairn.frontend.request_table import KEEP_CHARACTERS, KEEP_REQUESTS, KEEP_SECONDS, History
from cairn.text.output.stream import TextStream
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import GenerationFailed
from cairn.types.outputs import FinishReason, Output, TokenLogprob
from cairn.types.request import OutputFormat, Request, SamplingParams
from tests.text import text_models

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("stop", [(), ("stop",)])
def test_the_status_of_a_resumed_turn_includes_earlier_output(tmp_path: Path, stop: tuple[str, ...]) -> None:
    tokenizer = Tokenizer.load(text_models.write_model(tmp_path, text_models.byte_level(), text_models.QWEN_CONFIG))
    ids = tokenizer.encode("<think>Hm, well</think>Hello 😀 there", special=True)
    for cut in range(len(ids)):
        request = Request(
            id=1,
            prompt=(1,),
            sampling=SamplingParams(max_tokens=100),
            generated=tuple(ids[:cut]),
            stop=stop,
            output=OutputFormat(reasoning=True),
        )
        flight = RequestState(request, TextStream(tokenizer, request), 0.0)
        assert flight.status().completion_tokens == cut
        for token in ids[cut:]:
            flight.accept_token(token)
        flight.end(FinishReason.LENGTH, None, None)
        status = flight.status()
        assert (status.reasoning, status.text) == ("Hm, well", "Hello 😀 there")
        assert status.completion_tokens == len(ids)
        assert flight.usage.completion_tokens == len(ids) - cut


def test_text_held_back_at_the_token_limit_is_no_stop(tmp_path: Path) -> None:
    """In front of a call a line break belongs to the call; only more tokens could have made it a stop sequence."""
    tokenizer = Tokenizer.load(text_models.write_model(tmp_path, text_models.byte_level(), text_models.QWEN_CONFIG))
    said, call = (tokenizer.encode(text, special=True) for text in ("Let me look.\n", CALL))
    ends = []
    for tokens in (said, said + call, said * 2):
        request = Request(
            id=1,
            prompt=(1,),
            sampling=SamplingParams(max_tokens=1000),
            stop=("\n",),
            output=OutputFormat(tools=True),
        )
        flight = RequestState(request, TextStream(tokenizer, request), 0.0)
        for token in tokens:
            flight.accept_token(token)
        flight.end(FinishReason.LENGTH, GenerationFailed("no room"), None)
        ends.append(flight.status().reason)
    assert ends == [FinishReason.ERROR, FinishReason.ERROR, FinishReason.STOP]


@pytest.mark.parametrize("resumed", [0, 1])
def test_guesses_behind_a_stop_string_are_not_in_the_answer(tmp_path: Path, resumed: int) -> None:
    tokenizer = Tokenizer.load(text_models.write_model(tmp_path, text_models.byte_level(), text_models.QWEN_CONFIG))
    ids = [tokenizer.encode(letter)[0] for letter in "abcdefghi"]
    stop = "f"
    request = Request(
        id=1, prompt=(1,), sampling=SamplingParams(max_tokens=50), stop=(stop,), generated=tuple(ids[:resumed])
    )
    flight = RequestState(request, TextStream(tokenizer, request), 0.0)
    outputs = [
        Output(id=1, tokens=tuple(ids[resumed:3]), accepted_prediction_tokens=1, rejected_prediction_tokens=2),
        Output(id=1, tokens=tuple(ids[3:]), accepted_prediction_tokens=len(ids) - 4),
        Output(id=1, tokens=(ids[0], ids[1]), accepted_prediction_tokens=1),  # underway when the text ended
    ]
    for output in outputs:
        flight.accept(output)
    flight.end(FinishReason.STOP, None, None)
    usage = flight.usage
    assert usage.completion_tokens == 6 - resumed
    assert usage.accepted_prediction_tokens == 1 + 3
    assert usage.accepted_prediction_tokens + usage.rejected_prediction_tokens == 1 + 2 + len(ids) - 4 + 1


def ended(id: int, text: str = "") -> RequestStatus:
    return RequestStatus(id=id, state="finished", prompt_tokens=1, completion_tokens=1, text=text)


def test_requests_that_ended_are_forgotten_at_each_bound() -> None:
    history = History()
    for id in range(KEEP_REQUESTS + 1):
        history.add(ended(id), 0.0)
    assert history.get(0) is None and history.get(1) is not None
    history.add(ended(-1), KEEP_SECONDS)
    assert history.get(KEEP_REQUESTS) is None and history.get(-1) is not None
    half = "x" * (KEEP_CHARACTERS // 2)
    for id in (-2, -3, -4):
        history.add(ended(id, half), KEEP_SECONDS)
    assert history.get(-2) is None and history.get(-3) is not None and history.get(-4) is not None


TOKENS = st.integers(0, (1 << 32) - 1)
VALUES = st.floats(allow_nan=False)
ENTRIES = st.builds(TokenLogprob, TOKENS, VALUES, st.lists(st.tuples(TOKENS, VALUES), max_size=4).map(tuple))


@given(st.lists(st.tuples(st.lists(ENTRIES, max_size=5), st.integers(0, 6)), max_size=8))
def test_packed_logprobs_come_out_in_order_and_bit_for_bit(rounds: list[tuple[list[TokenLogprob], int]]) -> None:
    """Known failure 43: what waits for a slow reader takes little memory, and is complete."""
    packed, expected = PackedLogprobs(), list[TokenLogprob]()
    for entries, count in rounds:
        packed.extend(entries)
        expected += entries
        assert packed.take(count) == tuple(expected[:count])
        del expected[:count]
        assert len(packed) == len(expected)
        assert packed.nbytes == sum(16 + 12 * len(entry.top) for entry in expected)
