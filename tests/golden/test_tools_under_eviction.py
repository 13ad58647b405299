"""Agents with sixty tools each, in more context than pool, RAM and disk hold: every answer equals the cold one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cairn import LLM
from tests.golden.test_hybrid_answers import model

SHAPES = {
    "qwen 3.5": 0.0036,
    "granite 4 hybrid": 0.0029,
    "deepseek 3": 0.008,
    "qwen 3 with window layers": 0.0036,
    "gpt-oss": 0.0036,
}
"""GB of a pool, for each model, that holds little more than one context of 12,288 tokens."""
ASKED: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 16, "ignore_eos": True}


def tools(agent: int) -> list[dict[str, Any]]:
    """Return sixty tools; two thirds of them are the other agents' too."""
    made = []
    for number in range(60):
        owner = f"of_{agent}" if number >= 40 else "shared"
        fields = {"path": {"type": "string"}, "line": {"type": "integer"}}
        about = {"name": f"tool_{number}_{owner}", "description": "Reads one line."}
        made.append({"type": "function", "function": {**about, "parameters": {"type": "object", "properties": fields}}})
    return made


@pytest.mark.parametrize("name", SHAPES)
def test_a_cached_answer_with_sixty_tools_is_the_cold_one_under_eviction(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prove: bool, figure: Callable[[str, str], None]
) -> None:
    if name != next(iter(SHAPES)) and not prove:
        pytest.skip("a sweep of `make prove`")
    monkeypatch.setenv("HOME", str(tmp_path))
    path = model(tmp_path / "model", name, 16_384)
    agents, turns = (4, 3) if prove else (3, 2)
    small: dict[str, Any] = {"threads": 1, "kv_gb": SHAPES[name], "max_running": 2, "context": 12_288}
    talks: list[list[dict[str, Any]]] = [[] for _ in range(agents)]
    rng, said = random.Random(1), []
    with LLM(path, kv_dir=str(tmp_path / "kv"), kv_disk_gb=1.5 * SHAPES[name], **small) as llm:
        for turn in range(turns):
            for agent in rng.sample(range(agents), agents):
                asked = [*talks[agent], {"role": "user", "content": f"Line {turn} of file {agent}?"}]
                answer = llm.chat(asked, tools(agent), **ASKED)
                talks[agent] = [*asked, {"role": "assistant", "content": f"It has {len(answer.text)} letters."}]
                said.append((asked, agent, answer))
    kept = [answer.cache for _, _, answer in said]
    # What the pool evicted came back from the disk, or was computed again.
    assert any(one.disk for one in kept), "nothing was evicted"
    assert any(one.pool for one in kept)
    for asked, agent, answer in said if prove else rng.sample(said, 3):
        with LLM(path, kv_disk=False, **small) as llm:
            cold = llm.chat(asked, tools(agent), **ASKED)
        assert cold.cache.computed == cold.usage.prompt_tokens
        assert cold.tokens == answer.tokens, (agent, len(asked))
    came = {tier: sum(getattr(one, tier) for one in kept) for tier in ("computed", "pool", "disk")}
    figure(f"sixty tools under eviction, {name}", f"{len(said)} turns as cold ones; tokens by source: {came}")
