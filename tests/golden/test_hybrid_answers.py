"""Hybrid models through scheduler and cache: a cached answer is the cold one, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cairn import LLM
from cairn.text.tokens.tokenizer import Tokenizer
from tests.text.text_models import KINDS, QWEN_CONFIG, QWEN_TEMPLATE
from tests.text.text_models import write_model as write_text
from tests.tiny_models import MODELS, prompt, write_model

SMALL: dict[str, Any] = {"kv_gb": 0.05, "threads": 1, "step_tokens": 96, "max_running": 6}


def model(folder: Path, name: str, context: int = 2048) -> str:
    """Write a tiny model with a tokenizer, and positions for `context` tokens."""
    write_text(folder, KINDS["byte-level"](), {**QWEN_CONFIG}, QWEN_TEMPLATE)
    size = Tokenizer.load(folder).vocab_size
    fields = {key: value for key, value in MODELS[name].items() if key != "vocab_size"}
    write_model(folder, vocab_size=size, max_position_embeddings=context, **fields)
    return str(folder)


@pytest.mark.parametrize("name", ["qwen 3.5", "granite 4 hybrid", "mamba 2"])
def test_a_cached_answer_is_the_cold_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two turns and a branch with a common beginning: alone, in sequence, together, and after a restart."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path, sampling = model(tmp_path / "model", name), {"temperature": 0.8, "max_tokens": 24, "ignore_eos": True}
    shared = prompt(400, 160, seed=1)
    asked = [shared + prompt(size, 160, seed=size) for size in (30, 77, 150, 200)]

    def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
        return llm.generate(prompts, seed=5, **sampling)

    cold = []
    for one in asked:
        with LLM(path, kv_dir=str(tmp_path / "none"), kv_disk=False, **SMALL) as llm:
            (answer,) = answers(llm, [one])
            assert answer.cache.computed == len(one)
            cold.append(answer.tokens)
    with LLM(path, kv_dir=str(tmp_path / "kv"), **SMALL) as llm:
        got = [answers(llm, [one])[0] for one in (*asked, *asked)]
        assert [one.tokens for one in got] == [*cold, *cold]
        # The third prompt starts from the second one's snapshot; a repeated one computes little.
        assert all(one.cache.computed < 300 for one in got[2:4])
        assert all(one.cache.computed <= 64 for one in got[4:])
        together = answers(llm, [[*one, *said] for one, said in zip(asked, cold, strict=True)])
        turns = [one.tokens for one in together]
        assert all(one.cache.computed < 128 for one in together)
    with LLM(path, kv_dir=str(tmp_path / "kv"), kv_load="always", **SMALL) as llm:
        again = [answers(llm, [[*one, *said]])[0] for one, said in zip(asked, cold, strict=True)]
        assert [one.tokens for one in again] == turns
        assert all(one.cache.pool + one.cache.ram + one.cache.disk > 300 for one in again), again[0].cache
