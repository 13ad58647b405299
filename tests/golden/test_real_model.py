"""A real model gives sensible answers on every kernel set."""

from __future__ import annotations

import json

import pytest

from cairn import LLM
from cairn.kernels import native
from tests import real_models

RUNNING = [name for name, runs in native.variants().items() if runs]


@pytest.mark.parametrize("kernels", RUNNING or ["reference"])
def test_smollm2_knows_the_capital_of_japan(kernels: str) -> None:
    """It is sure of Japan's: the next best token is at least 0.8 nats behind.

    Of France's, asked like this, it is not: "L" and "The" are 0.1 to 0.2 nats apart, and the kernels' rounding decides.
    """
    asked = [{"role": "user", "content": "What is the capital of Japan?"}]
    with LLM(str(real_models.smollm2()), kv_gb=0.1, kernels=kernels) as llm:
        said = llm.chat(asked, temperature=0, max_tokens=32)
    assert said.text == "The capital of Japan is Tokyo." and said.finish_reason == "stop"


def test_smollm2_says_it_as_a_schema_wants_it() -> None:
    """With a real vocabulary, the answer makes sense and fits the schema."""
    schema = {"type": "object", "properties": {"capital": {"type": "string"}, "sure": {"type": "boolean"}}}
    schema |= {"required": ["capital", "sure"], "additionalProperties": False}
    asked = [{"role": "user", "content": "Which city is the capital of France, and are you sure? Answer in JSON."}]
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    with LLM(str(real_models.smollm2()), kv_gb=0.1) as llm:
        said = llm.chat(asked, response_format=form, temperature=0, max_tokens=60)
        one = llm.chat(
            asked,
            response_format={"type": "regex", "pattern": "The capital of France is (Rome|London|Paris)\\."},
            temperature=0,
        )
        text = llm.generate("2, 4, 6,", response_format={"type": "regex", "pattern": " [0-9]{1,2}, 10"}, temperature=0)
    answer = json.loads(said.text)
    assert said.finish_reason == "stop" and answer["capital"] == "Paris" and isinstance(answer["sure"], bool)
    assert one.text.endswith("Paris.") and text.text == " 8, 10"


def test_smollm2_that_must_call_calls_once() -> None:
    """Greedy, it would repeat the same call for ever."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Weather of a city", "parameters": parameters}
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    tools = [{"type": "function", "function": function}]
    with LLM(str(real_models.smollm2()), kv_gb=0.1) as llm:
        for most, reason in ((200, "tool_calls"), (60, "length")):
            said = llm.chat(asked, tools, tool_choice="required", temperature=0, max_tokens=most)
            (call,) = said.tool_calls
            assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
            assert not said.text and said.finish_reason == reason
        more = [*asked, said.message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."}]
        assert llm.chat(more, tools, temperature=0, max_tokens=20).usage is not None
