from __future__ import annotations

from pathlib import Path

import pytest

from cairn.frontend.request_state import RequestState
from cairn.text.output.stream import TextStream
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import GenerationFailed
from cairn.types.outputs import FinishReason
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
