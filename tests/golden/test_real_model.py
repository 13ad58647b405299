"""A real model answers with sense."""

from __future__ import annotations

import json

from tests import real_models

from cairn import LLM


def test_smollm2_knows_the_capital_of_france() -> None:
    with LLM(str(real_models.smollm2()), kv_gb=0.1) as llm:
        said = llm.chat([{"role": "user", "content": "What is the capital of France?"}], temperature=0, max_tokens=32)
    assert "Paris" in said.text and said.finish_reason == "stop"


def test_smollm2_says_it_as_a_schema_wants_it() -> None:
    """Over a real vocabulary: sense, and the form."""
    schema = {"type": "object", "properties": {"capital": {"type": "string"}, "sure": {"type": "boolean"}}}
    schema |= {"required": ["capital", "sure"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    with LLM(str(real_models.smollm2()), kv_gb=0.1) as llm:
        said = llm.chat(asked, response_format=form, temperature=0, max_tokens=60)
        one = llm.chat(
            asked,
            response_format={"type": "regex", "pattern": "The capital of France is (Rome|London|Paris)\\."},
            temperature=0,
        )
        text = llm.generate("2, 4, 6,", response_format={"type": "regex", "pattern": " [0-9]{1,2}, 10"}, temperature=0)
    found = json.loads(said.text)
    assert said.finish_reason == "stop" and found["capital"] == "Paris" and isinstance(found["sure"], bool)
    assert one.text.endswith("Paris.") and text.text == " 8, 10"
