"""Reasoning formats of gpt-oss, Gemma and Cohere, with real arithmetic."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cairn.config.config import Config
from cairn.frontend.service import Service
from cairn.text.chat.prompt import Chat
from cairn.text.grammar.grammar import Shape, Structure
from tests.api.sockets import Site, events, site
from tests.scripted_model import write_scripted
from tests.text.walks import accepts, checked

CONTROL = 3
HARMONY = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant"
    "{% if m.tool_calls %} to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions.f to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "<|start|>assistant"
)
TURNS = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{}<tool_call|>{% endfor %}"
    "<turn|>\n{% endfor %}"
    "<|turn>model\n{# <|channel> <channel|> #}"
)
COHERE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    "{% if m.tool_calls %}<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|><|START_ACTION|>["
    "{% for c in m.tool_calls %}\n"
    '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", '
    '"parameters": {{ c.function.arguments | tojson }}}{% if not loop.last %},{% endif %}{% endfor %}\n]<|END_ACTION|>'
    "{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}<|END_OF_TURN_TOKEN|>"
    "{% else %}<|START_OF_TURN_TOKEN|>{{ m.role }}{{ m.content }}<|END_OF_TURN_TOKEN|>{% endif %}{% endfor %}"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{# <|START_THINKING|> #}"
)
PLAIN = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}<|turn>assistant\n{# SIGN #}"
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
    "mistral": (
        PLAIN.replace("SIGN", "[THINK]"),
        ["[THINK]", "Hm.", "[/THINK]", "Yes."],
        "<turn|>",
        ("Hm.", "Yes.", []),
    ),
    "seed": (
        PLAIN.replace("SIGN", "<seed:think>"),
        ["<seed:think>", "Hm.", "</seed:think>", "Yes."],
        "<turn|>",
        ("Hm.", "Yes.", []),
    ),
    "apertus": (
        PLAIN.replace("SIGN", "<|inner_prefix|>"),
        ["<|inner_prefix|>", "Hm.", "<|inner_suffix|>", "Yes."],
        "<turn|>",
        ("Hm.", "Yes.", []),
    ),
    "hunyuan": (
        PLAIN.replace("SIGN", "<answer> </answer>"),
        ["<think>", "Hm.", "</think>", "<answer>", "Yes.", "</answer>"],
        "<turn|>",
        ("Hm.", "Yes.", []),
    ),
    "harmony without a mark": (
        HARMONY,
        ["<|channel|>", "analysis", " Hm.", "<|end|>", "<|start|>", "assistant", *FINAL],
        "<|return|>",
        ("Hm.", "Yes.", []),
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
    kinds = {
        piece: CONTROL
        for piece in [*pieces, end, "<|call|>", "<|return|>", "<|CHATBOT_TOKEN|>"]
        if piece.startswith("<")
    }
    kinds |= {piece: CONTROL for piece in pieces if re.fullmatch(r"\[/?[A-Z]+\]", piece)}
    model = write_scripted(path, pieces, end=end, template=template, kinds=kinds)
    service = await Service.start(Config(model=str(model), kv_gb=0.05, kv_disk=False), in_process=True)
    try:
        async with site(service) as at:
            yield at
    finally:
        await service.close()


@pytest.mark.parametrize("name", SCRIPTS)
async def test_reasoning_content_and_calls_are_separated(name: str, tmp_path: Path) -> None:
    template, pieces, end, (thought, said, called) = SCRIPTS[name]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "tools": [F]}
    async with playing(tmp_path / "m.gguf", template, pieces, end) as at, at.http() as http:
        answer = (await http.post("/v1/chat/completions", json=body | {"max_tokens": 60})).json()
        (choice,) = answer["choices"]
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == (thought, said), message
        calls = message.get("tool_calls") or []
        assert [json.loads(call["function"]["arguments"]) for call in calls] == called
        assert choice["finish_reason"] == ("tool_calls" if called else "stop")
        assert answer["usage"]["completion_tokens"] == len(pieces) + 1
        stream = await http.post("/v1/chat/completions", json=body | {"max_tokens": 60, "stream": True})
        deltas = [chunk["choices"][0]["delta"] for chunk in events(stream.text)[:-1] if chunk["choices"]]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == thought
        assert "".join(delta.get("content") or "" for delta in deltas) == (said or "")
        history = [
            *body["messages"],
            message,
            *([{"role": "tool", "tool_call_id": "x", "content": "7"}] if calls else []),
        ]
        again = await http.post("/v1/chat/completions", json=body | {"messages": history, "max_tokens": 1})
        assert again.status_code == 200, again.text


@pytest.mark.parametrize("name", SCRIPTS)
async def test_an_answer_that_comes_back_is_the_tokens_that_were_sampled(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the template does with it: drop the reasoning, reorder headers, write JSON anew."""
    template, pieces, end, (thought, _, called) = SCRIPTS[name]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "tools": [F]}
    said: list[list[int]] = []
    remember = Chat.remember

    def remembered(self: Chat, tenant: str, prompt: Any, generated: Any, message: Any, *more: Any) -> Any:
        said.append([*prompt, *generated])
        return remember(self, tenant, prompt, generated, message, *more)

    monkeypatch.setattr(Chat, "remember", remembered)
    async with playing(tmp_path / "m.gguf", template, pieces, end) as at, at.http() as http:
        first = (await http.post("/v1/chat/completions", json=body | {"max_tokens": 60})).json()
        message = first["choices"][0]["message"]
        assert message["reasoning_content"] == thought
        result = {"role": "tool", "tool_call_id": (message.get("tool_calls") or [{}])[0].get("id"), "content": "7"}
        history = [*body["messages"], message, result if called else {"role": "user", "content": "and?"}]
        await http.post("/v1/chat/completions", json=body | {"messages": history, "max_tokens": 60})
        history += [{"role": "assistant", "content": "by another"}, {"role": "user", "content": "more"}]
        ids = []
        left_out = [{key: value for key, value in one.items() if key != "reasoning_content"} for one in history]
        for conversation in (body["messages"], history[:3], history, left_out):
            response = await http.post("/tokenize", json={"messages": conversation, "tools": [F]})
            ids.append(response.json()["tokens"])
        *whole, last = said[0]
        assert ids[0] == whole[: len(ids[0])] and len(whole) == len(ids[0]) + len(pieces)
        for later in ids[1:]:
            assert later[: len(whole)] == whole, "a conversation begins with everything computed so far"
        behind = ids[1][len(whole)]
        if end == "<|return|>":  # the template ends a past answer with `<|end|>`
            (last,) = (await http.post("/tokenize", json={"content": "<|end|>", "add_special": False})).json()["tokens"]
        assert behind == last


async def test_an_answer_that_was_cut_is_as_the_template_writes_it(tmp_path: Path) -> None:
    """A cut answer lacks the closing tokens.

    Putting its sampled tokens back would make a history that no model was trained on.
    """
    template, pieces, end, _ = SCRIPTS["cohere"]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    async with playing(tmp_path / "m.gguf", template, pieces, end) as at, at.http() as http:
        answer = (await http.post("/v1/chat/completions", json=body | {"max_tokens": 5})).json()
        message = answer["choices"][0]["message"]
        assert message["content"] == "Yes." and answer["choices"][0]["finish_reason"] == "length"
        history = [*body["messages"], message, {"role": "user", "content": "and?"}]
        tokens = (await http.post("/tokenize", json={"messages": history})).json()["tokens"]
        text = (await http.post("/detokenize", json={"tokens": tokens})).json()["content"]
        assert "<|START_RESPONSE|>Yes.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>" in text and "Hm." not in text


# When its script is not allowed, the gpt-oss model starts to reason again.
@pytest.mark.parametrize("name", ["gemma", "cohere"])
async def test_thoughts_have_a_budget(name: str, tmp_path: Path) -> None:
    template, pieces, end, _ = SCRIPTS[name]
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 60, "reasoning_budget": 0}
    async with playing(tmp_path / "m.gguf", template, pieces, end) as at, at.http() as http:
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        assert not answer["choices"][0]["message"].get("reasoning_content"), answer


@pytest.mark.parametrize(
    ("name", "thought"),
    [
        ("gemma", "<|channel>thought\nHm.<channel|>"),
        ("cohere", "<|START_THINKING|>Hm.<|END_THINKING|>"),
        ("mistral", "[THINK]Hm.[/THINK]\n"),
        ("seed", "<seed:think>Hm.</seed:think>"),
        ("apertus", "<|inner_prefix|>Hm.<|inner_suffix|>"),
        ("", "<think>Hm.</think>\n\n"),
    ],
)
def test_thoughts_may_stand_before_what_is_wanted(name: str, thought: str) -> None:
    structure = Structure(kind="choice", text='["yes", "no"]')
    grammar = checked(Shape(structure=structure, reasoning="may", thoughts=name))
    assert accepts(grammar, "yes") and accepts(grammar, thought + "no") and not accepts(grammar, thought + "maybe")


@pytest.mark.parametrize("name", ["harmony", "harmony calls", "cohere", "cohere calls"])
async def test_a_turn_goes_on_behind_the_tokens_of_an_answer(name: str, tmp_path: Path) -> None:
    """A turn's prompt is the ids of the agent's context, followed by what the template writes for the new messages."""
    template, pieces, end, (thought, said, called) = SCRIPTS[name]
    kinds = {piece: CONTROL for piece in [*pieces, end, "<|CHATBOT_TOKEN|>"] if piece.startswith("<")}
    chat = await Chat.start(
        write_scripted(tmp_path / "m.gguf", pieces, end=end, template=template, kinds=kinds), Config()
    )
    try:
        asked = [{"role": "user", "content": "hi"}]
        before = (await chat.prompt(asked, [F])).tokens
        ids = [i for piece in [*pieces, end] for i in chat.tokenizer.encode(piece, special=True)]
        answer: dict[str, Any] = {"role": "assistant", "content": said, "reasoning_content": thought}
        if called:
            call = {"name": "f", "arguments": json.dumps(called[0])}
            answer["tool_calls"] = [{"id": "x", "type": "function", "function": call}]
        new = [{"role": "tool", "tool_call_id": "x", "content": "7"} if called else {"role": "user", "content": "and?"}]
        assert chat.remember("default", before, ids, answer) is not None
        whole = await chat.prompt([*asked, answer, *new], [F])
        going_on = await chat.extend([*before, *ids[:-1]], [*asked, answer], new, [F])
        assert going_on is not None and going_on.tokens == whole.tokens
        cut = await chat.extend([*before, *ids[:-2]], [*asked, answer], new, [F])
        assert (cut is None) == name.startswith("cohere"), "a cut answer is followed by the template's own text"
    finally:
        await chat.close()
