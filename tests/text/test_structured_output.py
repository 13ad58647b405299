"""Grammars for answers, from the chat to the compiled grammar, with templates that show calls and ones that do not."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cairn.config.config import Config
from cairn.frontend.structured_output import wanted_of
from cairn.text.chat.prompt import Chat
from cairn.text.grammar.grammar import Structure, ToolChoice, Wanted
from cairn.types.errors import InvalidRequest, Unsupported
from cairn.types.request import OutputFormat
from tests.text import text_models
from tests.text.walks import accepts

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ASKED = [{"role": "user", "content": "What is the weather?"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
    },
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"n": 1}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
MUST = Wanted(choice=ToolChoice(required=True))


async def started(folder: Path, template: str | None, **options: Any) -> Chat:
    text_models.write_model(folder, text_models.byte_level(), text_models.QWEN_CONFIG, template)
    return await Chat.start(folder, Config(**options))


@pytest.fixture
async def qwen(tmp_path: Path) -> AsyncIterator[Chat]:
    chat = await started(tmp_path / "m", text_models.QWEN_TEMPLATE)
    yield chat
    await chat.close()


async def test_an_answer_that_must_call_calls(qwen: Chat) -> None:
    held = (await qwen.prompt(ASKED, TOOLS, wanted=MUST)).grammar
    assert (
        accepts(held, CALL) and accepts(held, f"{CALL}\n{OTHER}") and accepts(held, f"<think>\nx\n</think>\n\n{CALL}")
    )
    assert not accepts(held, "Sunny.") and not accepts(held, CALL.replace("weather", "wether"))
    alone = Wanted(choice=ToolChoice(required=True, names=("time",), parallel=False))
    prompt = await qwen.prompt(ASKED, TOOLS, wanted=alone)
    assert accepts(prompt.grammar, OTHER)
    assert not accepts(prompt.grammar, CALL) and not accepts(prompt.grammar, f"{OTHER}\n{OTHER}")
    assert [tool.name for tool in prompt.output.offered] == ["time"], "no other is read as a call"


async def test_without_a_constraint_there_is_no_grammar(qwen: Chat) -> None:
    assert (await qwen.prompt(ASKED)).grammar is None is (await qwen.prompt(ASKED, TOOLS)).grammar


async def test_a_strict_tool_is_called_as_its_schema_says_or_not_at_all(qwen: Chat) -> None:
    held = (await qwen.prompt(ASKED, TOOLS, wanted=Wanted(choice=ToolChoice(strict=("weather",))))).grammar
    assert accepts(held, "Let me look.\n" + CALL) and accepts(held, "It is sunny.") and accepts(held, OTHER)
    assert not accepts(held, CALL.replace("1", '"one"'))


async def test_the_same_grammar_is_compiled_once(qwen: Chat) -> None:
    first = (await qwen.prompt(ASKED, TOOLS, wanted=MUST)).grammar
    qwen._grammars._helper.compile = None  # type: ignore[assignment, method-assign]
    assert (await qwen.prompt(ASKED, TOOLS, wanted=MUST)).grammar == first


async def test_a_grammar_from_before_a_restart_is_compiled_again(qwen: Chat) -> None:
    """The log keeps only its text, and only compiling tells what it costs."""
    first = (await qwen.prompt(ASKED, TOOLS, wanted=MUST)).grammar
    assert first is not None and first.bytes > 0
    again = await qwen.same_grammar(first.text, OutputFormat())
    assert again is not None and again.text == first.text and again.bytes > 0
    assert await qwen.same_grammar("", OutputFormat()) is None
    with pytest.raises(InvalidRequest, match="grammar cannot be followed"):
        await qwen.same_grammar("start: nothing", OutputFormat())


async def test_a_too_costly_grammar_is_refused_and_the_next_is_not(tmp_path: Path) -> None:
    chat = await started(tmp_path / "m", PLAIN)
    patterns = [{"type": "string", "pattern": f"a{{{least},{least + 900}}}b"} for least in range(60)]
    slow = Structure(kind="json", text=json.dumps({"allOf": patterns}), field="guided_json")
    try:
        with pytest.raises(InvalidRequest) as caught:
            await chat.grammar(slow, OutputFormat())
        # Which limit it hits first depends on the machine; the error names either.
        assert caught.value.field == "guided_json"
        assert any(why in str(caught.value) for why in ("2 s of processor time", "more than 256 MiB of memory"))
        small = Structure(kind="regex", text="a")
        results = await asyncio.gather(*(chat.grammar(small, OutputFormat()) for _ in range(3)))
        assert all(accepts(result.grammar, "a") for result in results)
        assert len((await chat.prompt(ASKED)).tokens) > 5, "and it renders"
    finally:
        await chat.close()


async def test_a_model_without_a_template_has_grammars(tmp_path: Path) -> None:
    chat = await started(tmp_path / "m", None)
    try:
        held = await chat.grammar(Structure(kind="choice", text='["yes", "no"]'), OutputFormat())
        assert accepts(held.grammar, "yes") and not accepts(held.grammar, "yesno")
    finally:
        await chat.close()


async def test_a_template_without_tools_gets_instructions_unless_forbidden(tmp_path: Path) -> None:
    plain = await started(tmp_path / "a", PLAIN, tool_instructions=False)
    with pytest.raises(Unsupported, match="--no-tool-instructions"):
        await plain.prompt(ASKED, TOOLS)
    await plain.close()
    chat = await started(tmp_path / "b", PLAIN)
    try:
        for messages in (ASKED, [{"role": "system", "content": "Be brief."}, *ASKED]):
            prompt = await chat.prompt(messages, TOOLS, wanted=MUST)
            text = chat.tokenizer.decode(prompt.tokens, skip_special=False)
            assert all(json.dumps(tool["function"]) in text for tool in TOOLS) and "<tool_call>" in text
            assert text.startswith("system: Be brief.\n\nYou can" if len(messages) > 1 else "user: You can call")
            assert prompt.output.tools and accepts(prompt.grammar, CALL)
        without = chat.tokenizer.decode((await chat.prompt(ASKED)).tokens)
        assert "tool_call" not in without
    finally:
        await chat.close()


def test_nested_json_is_bounded_before_it_is_parsed() -> None:
    """Nothing else bounds JSON within a JSON string; names are looked up however many there are."""
    long = "[" + "{}," * 4_000_000 + "1]"
    many = [{"type": "function", "function": {"name": "f127"}}] * 60_000
    began = time.process_time()
    for field in ("guided_json", "guided_regex", "guided_grammar", "grammar"):
        with pytest.raises(InvalidRequest, match=f"{field} has 12000003 characters; the limit is 262144"):
            wanted_of({field: long})
    with pytest.raises(InvalidRequest, match="the limit is 262144"):
        wanted_of({"json_schema": {"enum": ["x" * 300_000]}})
    tools = [(f"f{at}", False) for at in range(128)]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": many}}
    assert wanted_of({}, tools, choice).choice.names == ("f127",)
    for wrong in ([], {}, {"name": ""}, {"name": "g"}, {"function": {"name": ["f1"]}}):
        with pytest.raises(InvalidRequest, match="that is not among tools"):
            wanted_of({}, tools, {"type": "allowed_tools", "allowed_tools": {"tools": [many[0], wrong]}})
    assert time.process_time() - began < 2.0
