"""Call ids as templates accept them: detected when a model is loaded, and equal in a call and its result."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from cairn.config.config import Config
from cairn.text.chat import call_ids
from cairn.text.chat.call_ids import with_ids
from cairn.text.chat.prompt import Chat
from cairn.text.output.output_parser import splitter
from cairn.text.output.tool_parser import call_id, written_id
from cairn.types.outputs import ToolCallDelta
from tests.text.text_models import QWEN_CONFIG, byte_level, write_model

_HEAD = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}{% set id = m.tool_call_id %}"
)
_TAIL = "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
_EACH = "{% elif m.tool_calls %}{{ m.content }}"
REFUSING = (
    _HEAD + "{% if id is not string or id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.content }}={{ id }}"
    + _EACH
    + "[TOOL_CALLS][{% for c in m.tool_calls %}{% if c.id is not string or c.id | length != 9 %}"
    "{{ raise_exception('nine') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]" + _TAIL
)
"""As in Mistral's template: an id of another length is an error."""
_LONGER = REFUSING.replace("length != 9", "length < 9")
ENDS = _LONGER.replace("{{ id }}", "{{ id[-9:] }}").replace("{{ c.id }}", "{{ c.id[-9:] }}")
"""Accepts longer ids, and writes the last nine characters of each."""
KIMI = (
    _HEAD
    + "## Return of {{ id }}\n{{ m.content }}"
    + _EACH
    + "<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>" + _TAIL
)
"""As in Kimi K2's template: the tool's name is only in the id."""
ANY = REFUSING.replace("length != 9", "length < 1")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
Turn = list[tuple[str, str | None]]


def conversation(*turns: Turn) -> list[dict[str, Any]]:
    """Return turns of calls (name, id), each followed by a result with the same id."""
    made: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    for turn in turns:
        calls = [
            {"type": "function", "function": {"name": name, "arguments": "{}"}} | ({"id": id} if id else {})
            for name, id in turn
        ]
        made.append({"role": "assistant", "content": "", "tool_calls": calls})
        for name, id in turn:
            made.append({"role": "tool", "content": f"of {name}"} | ({"tool_call_id": id} if id else {"name": name}))
    return made


OWN = [call_id(7, 0, index) for index in range(3)]
CLIENTS = {
    "our own": conversation([("f", OWN[0]), ("g", OWN[1])], [("f", OWN[2])]),
    "Anthropic's": conversation([("f", "toolu_01AbCd")], [("g", "toolu_01AbCe")]),
    "short ones that come again": conversation([("f", "call_0"), ("f", "call_1")], [("f", "call_0"), ("g", "call_1")]),
    "none": conversation([("f", None), ("g", None)], [("g", None)]),
    "one for all": conversation([("f", "x"), ("g", "x")], [("f", "x")]),
    "nine letters": conversation([("f", "abcDEF012")], [("g", "abcDEF013")]),
    "a result of a call that is gone": [
        *conversation([("f", "a")]),
        {"role": "tool", "content": "?", "tool_call_id": "b"},
    ],
}


async def started(folder: Path, template: str) -> Chat:
    return await Chat.start(write_model(folder, byte_level(), QWEN_CONFIG, template), Config())


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(("template", "calls", "results"), [
    (REFUSING, r'"id": "([^"]*)"', r"\[TOOL_RESULTS\][^=]*=(.*?)<\|im_end"),
    (ENDS, r'"id": "([^"]*)"', r"\[TOOL_RESULTS\][^=]*=(.*?)<\|im_end"),
    (KIMI, r"<\|tool_call_begin\|>(.*?)<\|tool_call_arg", r"## Return of (.*?)\n"),
], ids=["refusing", "ends", "kimi"])  # fmt: skip
async def test_every_second_turn_is_rendered_whatever_the_ids(
    client: str, template: str, calls: str, results: str, tmp_path: Path
) -> None:
    chat = await started(tmp_path / "m", template)
    try:
        prompt = await chat.prompt(CLIENTS[client], TOOLS)
        text = chat.tokenizer.decode(prompt.tokens, skip_special=False)
        called, answered = re.findall(calls, text), re.findall(results, text)
        assert called == answered[: len(called)], "a call and its result have the same id"
        assert len(set(answered)) == len(answered), "each is there once"
        if template is KIMI:
            names = [c["function"]["name"] for m in CLIENTS[client] for c in m.get("tool_calls", ())]
            assert called == [f"functions.{name}:{index}" for index, name in enumerate(names)]
            assert "<tool_call>" not in text and text.count("<|tool_calls_section_begin|>") == 2 - ("gone" in client)
        else:
            assert all(re.fullmatch("[0-9A-Za-z]{9}", one) for one in answered)
    finally:
        await chat.close()


async def test_a_template_that_takes_any_id_is_given_the_clients(tmp_path: Path) -> None:
    chat = await started(tmp_path / "m", ANY)
    try:
        prompt = await chat.prompt(CLIENTS["Anthropic's"], TOOLS)
        assert '"id": "toolu_01AbCd"' in chat.tokenizer.decode(prompt.tokens, skip_special=False)
    finally:
        await chat.close()


@pytest.mark.parametrize("template", [REFUSING, KIMI], ids=["refusing", "kimi"])
async def test_an_agents_turn_goes_on_with_the_same_ids(template: str, tmp_path: Path) -> None:
    chat = await started(tmp_path / "m", template)
    try:
        *history, result = conversation([("f", OWN[0])], [("g", OWN[1])])
        before = (await chat.prompt(history, TOOLS)).tokens
        text = chat.tokenizer.decode(before, skip_special=False).removesuffix("<|im_end|>\n<|im_start|>assistant")
        answered = [*chat.tokenizer.encode(text, special=True)]
        extended = await chat.extend(answered, history, [result], TOOLS)
        whole = await chat.prompt([*history, result], TOOLS)
        assert extended is not None and extended.tokens == whole.tokens
    finally:
        await chat.close()


@pytest.mark.parametrize("kind", ["nine", "kimi"])
@pytest.mark.parametrize("client", CLIENTS)
def test_later_messages_change_no_earlier_id(kind: Any, client: str) -> None:
    messages = CLIENTS[client]
    whole = with_ids(messages, kind)
    for size in range(len(messages)):
        assert with_ids(messages[:size], kind) == whole[:size]


def test_an_id_written_by_the_model_survives_the_client() -> None:
    from cairn.text.output.call_formats import BY_NAME, name_of
    from cairn.types.request import OfferedTool, OutputFormat

    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:12<|tool_call_argument_begin|>{}<|tool_call_end|>"
    )
    output = OutputFormat(tools=True, calls=name_of(BY_NAME["kimi"]), offered=(OfferedTool("f"),))
    (call,) = splitter(output, 3, 0).push(text + "<|tool_calls_section_end|>")
    assert isinstance(call, ToolCallDelta) and written_id(call.id) == "12" and re.fullmatch(r"call_\w{24}", call.id)
    shown = with_ids(conversation([("f", call.id)], [("g", "y")]), "kimi")
    assert [one["tool_call_id"] for one in shown if one["role"] == "tool"] == ["functions.f:12", "functions.g:13"]
    nine = call_id(3, 0, 0, "a1B2c3D4z")
    assert written_id(nine) == "a1B2c3D4z" and written_id(OWN[0]) == ""
    assert with_ids(conversation([("f", nine)]), "nine")[2]["tool_call_id"] == "a1B2c3D4z"


def counted_hashes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each text that is hashed into an id is appended from now on."""
    made, hashed = list[str](), call_ids._hashed

    def counted(text: str) -> str:
        made.append(text)
        return hashed(text)

    monkeypatch.setattr(call_ids, "_hashed", counted)
    return made


def test_an_id_that_comes_again_is_hashed_once_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = counted_hashes(monkeypatch)
    turn: Turn = [("f", "x")] * 1_000
    made = with_ids(conversation(turn, turn), "nine")
    ids = [call["id"] for message in made for call in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids) == 2_000
    assert [message["tool_call_id"] for message in made if message["role"] == "tool"] == ids
    assert len(hashed) == len(set(hashed)) == 2_000


def test_results_in_any_order_find_their_calls_in_linear_time() -> None:
    def seconds(count: int) -> float:
        made = conversation([("f", f"x{at}") for at in range(count)])
        made[2:] = reversed(made[2:])
        began = time.process_time()
        renamed = with_ids(made, "nine")
        spent = time.process_time() - began
        ids = [call["id"] for call in renamed[1]["tool_calls"]]
        assert [message["tool_call_id"] for message in renamed[2:]] == ids[::-1]
        return spent

    # A quadratic search takes 256 times as long; a busy machine makes one measurement of three slow.
    small = min(seconds(1_000) for _ in range(3))
    assert any(seconds(16_000) < 80 * small for _ in range(3))


def test_results_without_ids_belong_to_the_open_calls_of_their_names_in_order() -> None:
    made = conversation([("f", "a"), ("g", "b"), ("f", "c")])
    results = [{"tool_call_id": "c"}, {"name": "f"}, {}, {"name": "f"}, {"name": ["f"]}]
    made[2:] = [{"role": "tool", "content": "", **one} for one in results]
    calls = [call["id"] for call in with_ids(made, "nine")[1]["tool_calls"]]
    given = [message["tool_call_id"] for message in with_ids(made, "nine")[2:]]
    assert given[:3] == [calls[2], calls[0], calls[1]]
    assert not set(given[3:]) & set(calls)
