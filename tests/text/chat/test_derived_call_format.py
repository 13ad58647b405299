"""Call formats derived from what a model's template renders."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from cairn.config.config import Config
from cairn.text.chat.derived_call_format import known_form, reads
from cairn.text.chat.prompt import Chat
from cairn.text.chat.written_calls import CHECKS
from cairn.text.grammar.call_grammar import callable_tools, lark_of_calls
from cairn.text.grammar.grammar import Shape
from cairn.text.output.call_formats import BY_NAME, FORMATS, form_by, name_of
from cairn.text.output.output_parser import splitter
from cairn.text.output.tool_parser import offered_tools
from cairn.types.outputs import ToolCallDelta
from cairn.types.request import OutputFormat
from tests.text.call_templates import EACH, FURTHER, NOT_TOLD, TABLE, derived, template, written
from tests.text.chat.test_declared_call_format import DECLARED
from tests.text.output.call_pieces import read_calls
from tests.text.text_models import QWEN_CONFIG, byte_level, write_model
from tests.text.walks import checked, walk

# In tags of an unknown format, free text would hardly ever end by chance
WORDS = {"type": "string", "enum": ["x", "y z"]}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "s": WORDS}, "required": ["n", "s"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")]


def read(text: str, name: str, rng: random.Random) -> tuple[str, list[tuple[str, Any]]]:
    form = form_by(name)
    assert form is not None
    offered = offered_tools(TOOLS, xml=form.kind == "tagged")
    reader, at, pieces = splitter(OutputFormat(tools=True, calls=name, offered=offered), 1, 0), 0, []
    while at < len(text):
        size = rng.choice([1, 3, 40])
        pieces += reader.push(text[at : at + size])
        at += size
    pieces += reader.finish(by_model=True)
    calls = read_calls(pieces)
    return "".join(piece[1] for piece in pieces if not isinstance(piece, ToolCallDelta)), calls


@pytest.mark.parametrize("name", TABLE)
async def test_a_known_call_format_is_derived_from_its_template(name: str) -> None:
    """Markers in the template's source are not used: the renderings alone identify the table's format."""
    form = await derived(TABLE[name], "<escape>" if name == "function_gemma" else '<|"|>')
    assert form is not None
    assert known_form(form) is BY_NAME[name]
    if name != "llama":  # a call that is a bare JSON object has no section to derive
        assert form is not BY_NAME[name], "derived, not taken from the table"


def test_the_table_has_a_template_for_every_form() -> None:
    assert TABLE.keys() | {"harmony"} == {form.name for form in FORMATS}


@pytest.mark.parametrize("name", FURTHER)
async def test_an_unknown_call_format_is_derived_and_enforced(name: str) -> None:
    """It parses what the template writes, survives serialisation, and parses whatever its own grammar allows."""
    form = await derived(FURTHER[name])
    assert form is not None
    assert known_form(form) is form and form_by(name_of(form)) == form
    result = await written(template(FURTHER[name]))
    assert reads(form, result) and len(result) >= len(CHECKS) - 2  # some templates write at most one call
    whole = 0
    for seed in range(12):
        rng = random.Random(seed)
        calls = lark_of_calls(form, callable_tools(TOOLS, None, None), required=True, parallel=True)
        text = walk(checked(Shape(calls=calls)), rng)
        if text is not None:
            whole += 1
            content, made = read("Well. " + text, name_of(form), rng)
            assert content.strip() == "Well." and made, text
            assert all(
                one in "fg" and isinstance(said["n"], int) and said["s"] in WORDS["enum"] for one, said in made
            ), text
    assert whole > 3


@pytest.mark.parametrize("name", NOT_TOLD)
async def test_an_ambiguous_rendering_gives_no_format(name: str) -> None:
    assert await derived(NOT_TOLD[name]) is None


@pytest.mark.parametrize("more", ["{{ c.name }} " * 9, "x" * 100_000])
async def test_an_overlong_rendering_is_not_read(more: str) -> None:
    """Deriving takes time that grows with a power of the length."""
    section = f"<call>{EACH}{more}{{{{ c.name }}}}|{{{{ c.arguments | tojson }}}}{{% endfor %}}</call>"
    assert await written(template(section)) == {}
    assert await written(template(section.replace(more, "x"))) != {}


async def test_brackets_nested_too_deep_give_no_format() -> None:
    deep = '{"a":' + "[" * 30_000
    section = f"<call>{EACH}{deep}{{{{ c.name }}}}|{{{{ c.arguments | tojson }}}}{{% endfor %}}</call>"
    assert await written(template(section)) != {}
    assert await derived(section) is None


async def test_a_format_that_misreads_its_own_call_is_rejected() -> None:
    result = await written(template(TABLE["glm"]))
    assert reads(BY_NAME["glm"], result)
    for check, text in result.items():
        assert not reads(BY_NAME["glm"], {**result, check: text.replace("probe_first", "probe_second")})
        assert not reads(BY_NAME["glm"], {**result, check: text + " more"})
    assert not reads(BY_NAME["minimax"], result)


async def test_a_model_uses_what_its_template_shows(tmp_path: Path) -> None:
    """The template lists the tools, calls are parsed as it writes them, and no instructions are added to the prompt."""
    folder = write_model(tmp_path / "m", byte_level(), QWEN_CONFIG, template(FURTHER["other names"]))
    chat = await Chat.start(folder, Config())
    try:
        prompt = await chat.prompt([{"role": "user", "content": "hi"}], TOOLS)
        form = form_by(prompt.output.calls)
        assert form is not None and (form.named, form.arguments) == ("tool", "with")
        assert chat.calls_tools and not chat.instructs_tools
        assert "To call a function" not in chat.tokenizer.decode(prompt.tokens, skip_special=False)
        unknown = await Chat.start(
            write_model(tmp_path / "n", byte_level(), QWEN_CONFIG, template(NOT_TOLD["texts cut"])), Config()
        )
        assert unknown.instructs_tools and not unknown.calls_tools
        await unknown.close()
    finally:
        await chat.close()


@pytest.mark.parametrize("name", ["tags", "keys of its own", "objects"])
async def test_a_declaration_comes_first_if_it_reads_the_templates_calls(name: str, tmp_path: Path) -> None:
    declared, _, _ = DECLARED[name]
    section = {"tags": TABLE["qwen_xml"], "objects": TABLE["hermes"]}.get(name, "")
    own = '<|invoke|>{"tool": "{{ c.name }}", "args": {{ c.arguments | tojson }}}<|over|>{% endfor %}'
    section = section or EACH + own
    folder = write_model(
        tmp_path / "m", byte_level(), {**QWEN_CONFIG, "response_template": declared}, template(section)
    )
    chat = await Chat.start(folder, Config())
    try:
        output = (await chat.prompt([{"role": "user", "content": "hi"}], TOOLS)).output
        if name == "keys of its own":
            form = form_by(output.calls)
            assert form is not None and form.named == "tool"
        else:  # either the table knows it, too, or the template writes calls differently from the declaration
            assert output.calls == "" and output.xml == (name == "tags")
    finally:
        await chat.close()


async def test_a_declaration_counts_where_the_template_shows_no_calls(tmp_path: Path) -> None:
    declared, _, _ = DECLARED["a name in a tag"]
    text = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = write_model(tmp_path / "m", byte_level(), {**QWEN_CONFIG, "response_template": declared}, text)
    chat = await Chat.start(folder, Config())
    try:
        form = form_by((await chat.prompt([{"role": "user", "content": "hi"}], TOOLS)).output.calls)
        assert form is not None and (form.name, form.begin) == ("declared", "<run=")
    finally:
        await chat.close()


async def test_a_given_template_overrides_a_declaration(tmp_path: Path) -> None:
    declared, _, _ = DECLARED["keys of its own"]
    folder = write_model(tmp_path / "m", byte_level(), {**QWEN_CONFIG, "response_template": declared}, "{{ messages }}")
    chat = await Chat.start(folder, Config(chat_template="chatml"))
    try:
        assert (await chat.prompt([{"role": "user", "content": "hi"}], TOOLS)).output.calls == ""
    finally:
        await chat.close()
