"""The bundled model answers as transformers does: greedy tokens of 20 prompts, 64 tokens each, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import cairn
from cairn.types.step import Row
from tests.tiny_models import GREEDY, Driver, load

DEMO = Path(cairn.__file__).parent / "demo"

PROMPTS = (
    "What is Cairn?",
    "My name is Zorvak. Please remember it.",
    "How much is 7 plus 5?",
    "Who won the football match last night?",
    "Hello!",
    "I live in Lisbon and I have three cats.",
    "Does Cairn need a GPU?",
    "What happens to a stored context after a restart?",
    "Say hello to my friend Ilse.",
    "What is 12 minus 9?",
    "Tell me about the cache.",
    "Can you open a file on my computer?",
    "Thank you, goodbye.",
    "Quel temps fait-il?",
    "List the commands of Cairn.",
    "Wie heißt du?",
    "x" * 40,
    "{'a': [1, 2, 3]}",
    "What is my name?",
    "How do I start the server, and which port does it use?",
)
STEPS = 64


def test_greedy_answers_equal_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, attn_implementation="eager")
    driver = Driver(load(DEMO, step_tokens=512, max_running=32, kv_gb=0.5), monkeypatch)
    prompts = []
    for text in PROMPTS:
        messages = [{"role": "user", "content": text}]
        asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer.encode(asked, add_special_tokens=False))
    tables = [driver.tables(len(ids) + STEPS) for ids in prompts]
    # All twenty in one batch: each has the answer that it has alone.
    tokens, done = [list(ids) for ids in prompts], [0] * len(prompts)
    for number, ids in enumerate(prompts):
        driver.step([driver.row(ids, 0, len(ids) - 1, tables[number], None)])
        done[number] = len(ids) - 1
    for _ in range(STEPS):
        rows = [
            Row(ids, at, at + 1, table, at, len(start), GREEDY, 0)
            for ids, at, table, start in zip(tokens, done, tables, prompts, strict=True)
        ]
        for number, result in enumerate(driver.step(rows)):
            assert result.token is not None, result.error
            tokens[number].append(result.token)
            done[number] += 1
    for ids, start in zip(tokens, prompts, strict=True):
        with torch.no_grad():
            want = model.eval()(torch.tensor([ids])).logits[0, len(start) - 1 : -1].argmax(dim=-1).tolist()
        assert ids[len(start) :] == want
    assert len({tuple(ids[len(start) :]) for ids, start in zip(tokens, prompts, strict=True)}) > 5
