"""A real model answers with sense."""

from __future__ import annotations

from tests import real_models

from cairn import LLM


def test_smollm2_knows_the_capital_of_france() -> None:
    with LLM(str(real_models.smollm2()), kv_gb=0.1) as llm:
        said = llm.chat([{"role": "user", "content": "What is the capital of France?"}], temperature=0, max_tokens=32)
    assert "Paris" in said.text and said.finish_reason == "stop"
