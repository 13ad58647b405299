"""Models that set their thoughts apart in ways of their own, over real arithmetic: gpt-oss, Gemma, Cohere."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sockets import Site, events, site
from tests.scripted_model import write_scripted
from tests.text.walks import accepts

from cairn.config import Config
from cairn.service.service import Service
from cairn.text.grammar import Shape, Structure, checked

CONTROL = 3
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant"
    "{% if m.tool_calls %} to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions.f to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}<|start|>assistant"
)
TURNS = (
    "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{}<tool_call|>{% endfor %}"
    "<turn|>\n{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}<|turn>model\n{# <|channel> <channel|> #}"
)
COHERE = (
    "{% for m in messages %}<|START_OF_TURN_TOKEN|>{{ m.role }}{{ m.content }}"
    "{% if m.tool_calls %}<|START_ACTION|>[{{ m.tool_calls[0].function.name }}]<|END_ACTION|>{% endif %}"
    "<|END_OF_TURN_TOKEN|>{% endfor %}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "<|START_OF_TURN_TOKEN|>{# <|START_THINKING|> #}"
)
THOUGHT = ["<|channel|>", "analysis", "<|message|>", "Hm.", "<|end|>", "<|start|>", "assistant"]
FINAL = ["<|channel|>", "final", "<|message|>", "Yes."]
CALL = ["<|channel|>", "commentary to=functions.f ", "<|constrain|>", "json", "<|message|>", '{"x": 1}']
F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}}
SCRIPTS = {
    "harmony": (HARMONY, [*THOUGHT, *FINAL], "<|return|>", ("Hm.", "Yes.", [])),
    "harmony calls": (HARMONY, [*THOUGHT, *CALL], "<|call|>", ("Hm.", None, [{"x": 1}])),
    "gemma": (TURNS, ["<|channel>", "thought\n", "Hm.", "<channel|>", "Yes."], "<turn|>", ("Hm.", "Yes.", [])),
    "gemma calls": (
        TURNS,
        [
            *("<|channel>", "thought\n", "Hm.", "<channel|>"),
            *("<|tool_call>", "call:f{x:", '<|"|>', "a", '<|"|>', "}", "<tool_call|>"),
        ],
        "<turn|>",
        ("Hm.", None, [{"x": "a"}]),
    ),
    "cohere": (
        COHERE,
        ["<|START_THINKING|>", "Hm.", "<|END_THINKING|>", "<|START_RESPONSE|>", "Yes.", "<|END_RESPONSE|>"],
        "<|END_OF_TURN_TOKEN|>",
        ("Hm.", "Yes.", []),
    ),
    "cohere calls": (
        COHERE,
        [
            *("<|START_THINKING|>", "Hm.", "<|END_THINKING|>", "<|START_ACTION|>"),
            *('[{"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}}]', "<|END_ACTION|>"),
        ],
        "<|END_OF_TURN_TOKEN|>",
        ("Hm.", None, [{"x": 1}]),
    ),
}  # fmt: skip


@asynccontextmanager
async def playing(path: Path, template: str, pieces: list[str], end: str) -> AsyncIterator[Site]:
    kinds = {piece: CONTROL for piece in [*pieces, end, "<|call|>", "<|return|>"] if piece.startswith("<")}
    kinds |= {piece: CONTROL for piece in pieces if piece.endswith("|>") and piece.startswith("<")}
    model = write_scripted(path, pieces, end=end, template=template, kinds=kinds)
    service = await Service.start(Config(model=str(model), kv_gb=0.05, kv_disk=False), in_process=True)
    try:
        async with site(service) as at:
            yield at
    finally:
        await service.close()


@pytest.mark.parametrize("name", SCRIPTS)
async def test_what_is_thought_said_and_called_is_told_apart(name: str, tmp_path: Path) -> None:
    template, pieces, end, (thought, said, called) = SCRIPTS[name]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "tools": [F]}
    async with playing(tmp_path / "m.gguf", template, pieces, end) as at, at.http() as http:
        found = (await http.post("/v1/chat/completions", json=body | {"max_tokens": 60})).json()
        (choice,) = found["choices"]
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == (thought, said), message
        calls = message.get("tool_calls") or []
        assert [json.loads(call["function"]["arguments"]) for call in calls] == called
        assert choice["finish_reason"] == ("tool_calls" if called else "stop")
        assert found["usage"]["completion_tokens"] == len(pieces) + 1
        stream = await http.post("/v1/chat/completions", json=body | {"max_tokens": 60, "stream": True})
        deltas = [chunk["choices"][0]["delta"] for chunk in events(stream.text)[:-1] if chunk["choices"]]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == thought
        assert "".join(delta.get("content") or "" for delta in deltas) == (said or "")
        told = [*body["messages"], message, *([{"role": "tool", "tool_call_id": "x", "content": "7"}] if calls else [])]
        again = await http.post("/v1/chat/completions", json=body | {"messages": told, "max_tokens": 1})
        assert again.status_code == 200, again.text


@pytest.mark.parametrize("name", ["gemma", "cohere"])  # off its script this model of gpt-oss begins to think again
async def test_thoughts_have_a_budget(name: str, tmp_path: Path) -> None:
    template, pieces, end, _ = SCRIPTS[name]
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 60, "reasoning_budget": 0}
    async with playing(tmp_path / "m.gguf", template, pieces, end) as at, at.http() as http:
        found = (await http.post("/v1/chat/completions", json=body)).json()
        assert not found["choices"][0]["message"].get("reasoning_content"), found


@pytest.mark.parametrize(
    ("name", "thought"),
    [
        ("gemma", "<|channel>thought\nHm.<channel|>"),
        ("cohere", "<|START_THINKING|>Hm.<|END_THINKING|>"),
        ("", "<think>Hm.</think>\n\n"),
    ],
)
def test_thoughts_may_stand_before_what_is_wanted(name: str, thought: str) -> None:
    structure = Structure(kind="choice", text='["yes", "no"]')
    grammar = checked(Shape(structure=structure, reasoning="may", thoughts=name))
    assert accepts(grammar, "yes") and accepts(grammar, thought + "no") and not accepts(grammar, thought + "maybe")
