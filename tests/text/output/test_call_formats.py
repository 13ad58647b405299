"""Grammars made from a call format: the parser of the same format reads everything they generate, whatever the
tools.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import pytest

from cairn.text.chat.declared_call_format import declared_form
from cairn.text.grammar.call_grammar import callable_tools, lark_of_calls
from cairn.text.grammar.grammar import GrammarError, Shape
from cairn.text.output.call_formats import BY_NAME, FORMATS, CallFormat, format_of, name_of
from cairn.text.output.output_parser import splitter
from cairn.text.output.tool_parser import offered_tools
from cairn.types.outputs import ToolCallDelta
from cairn.types.request import OutputFormat
from tests.text.call_templates import FURTHER, derived
from tests.text.chat.test_declared_call_format import DECLARED
from tests.text.output.call_pieces import read_calls
from tests.text.walks import accepts, checked, walk


def output_of(form: CallFormat, tools: list[dict[str, Any]]) -> OutputFormat:
    return OutputFormat(
        tools=True,
        xml=form.name == "qwen_xml",
        calls="" if form.plain else name_of(form),
        thoughts="harmony" if form.name == "harmony" else "",
        offered=offered_tools(tools, xml=form.kind == "tagged"),
        held=True,
    )


def read(text: str, output: OutputFormat, rng: random.Random | None = None) -> tuple[str, list[tuple[str, Any]]]:
    """Return content and calls of a complete answer that is read in random pieces."""
    reader, at, pieces = splitter(output, 1, 0), 0, []
    while at < len(text):
        size = len(text) if rng is None else rng.choice([1, 1, 2, 7, 50])
        pieces += reader.push(text[at : at + size])
        at += size
    pieces += reader.finish(by_model=True)
    content = "".join(piece[1] for piece in pieces if not isinstance(piece, ToolCallDelta))
    return content, read_calls(pieces)


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "string", "integer", "number", "boolean", "enum", "null", "any", "either"]
    kind = rng.choice(kinds if depth > 1 else [*kinds, "object", "array"])
    if kind == "enum":
        return {"enum": rng.sample(["a", "b c", "\n", "</parameter>", '"', 5, None, True, "ü"], rng.randint(1, 4))}
    if kind == "any":
        return {"type": ["string", "integer"]}
    if kind == "either":
        return {"anyOf": [random_schema(rng, depth + 1), {"type": "null"}]}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": 2}
    if kind == "object":
        return random_object(rng, depth + 1)
    return {"type": kind, "maxLength": rng.randint(1, 9)} if kind == "string" and rng.random() < 0.5 else {"type": kind}


def random_object(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    names = rng.sample(["path", "old_text", "n", "x-y", "a.b", "über", "values", "flag"], rng.randint(0, 4))
    required = [name for name in names if rng.random() < 0.6]
    results: dict[str, Any] = {"type": "object", "properties": {name: random_schema(rng, depth) for name in names}}
    return {**results, "required": required, "additionalProperties": False}


def random_tools(rng: random.Random) -> list[dict[str, Any]]:
    names = rng.sample(["read", "edit_file", "a.b-c", "mcp__x__y", "f"], rng.randint(1, 3))
    return [tool(name, random_object(rng)) for name in names]


@pytest.fixture(scope="module")
def forms() -> list[CallFormat]:
    """Return the table's formats, those derived from templates, and those that models declare."""

    async def told() -> list[CallFormat | None]:
        return [await derived(section) for section in FURTHER.values()]

    said = [declared_form(template, {"<|eot|>"}) for template, _, _ in DECLARED.values()]
    results = [form for form in [*asyncio.run(told()), *said] if form is not None]
    assert len(results) == len(FURTHER) + len(DECLARED)
    return [*FORMATS, *results]


@pytest.mark.parametrize("part", range(10))
def test_everything_a_grammar_allows_is_read_as_calls(part: int, prove: bool, forms: list[CallFormat]) -> None:
    whole, sets = 0, 10_000 if prove else 250
    for seed in range(part, sets, 10):
        rng = random.Random(seed)
        form, tools = rng.choice(forms), random_tools(rng)
        calls = lark_of_calls(form, callable_tools(tools, None, None), required=True, parallel=rng.random() < 0.5)
        grammar = checked(Shape(calls=calls))
        text = walk(grammar, rng)
        if text is None:
            continue
        whole += 1
        content, made = read(text, output_of(form, tools), rng)
        assert made and not content, f"seed {seed}, {form.name}: {text!r} is {content!r} and {made}"
        for name, arguments in made:
            (called,) = [one["function"] for one in tools if one["function"]["name"] == name]
            properties, required = called["parameters"]["properties"], called["parameters"]["required"]
            assert set(required) <= set(arguments) <= set(properties), f"seed {seed}, {form.name}: {text!r}"
    assert whole > sets / 10 / 2, "most walks must come to an end, or this proves nothing"


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_text_may_stand_before_calls_that_are_held_to_their_schema(form: CallFormat) -> None:
    tools = [tool("f", {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})]
    grammar = checked(
        Shape(calls=lark_of_calls(form, callable_tools(tools, None, None), required=False, parallel=True))
    )
    for seed in range(20):
        text = walk(grammar, random.Random(seed))
        if text is not None and (made := read(text, output_of(form, tools))[1]):
            assert all(name == "f" and isinstance(arguments["n"], int) for name, arguments in made)
    before = "<|channel|>final<|message|>" if form.name == "harmony" else ""
    assert accepts(grammar, before + "Hello, how are you?") and accepts(grammar, before)


def _deepseek(call: str, joint: str) -> str:
    begin, end = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
    calls = joint.join(f"{begin}{call.replace('{}', arguments)}{end}" for arguments in ('{"a": 1}', "{}"))
    return f"<\uff5ctool\u2581calls\u2581begin\uff5c>{calls}<\uff5ctool\u2581calls\u2581end\uff5c>"


CALLS = {
    "gemma": "<|tool_call>call:f{a:1}<tool_call|><|tool_call>call:f{}<tool_call|>",
    "function_gemma": "<start_function_call>call:f{a:1}<end_function_call>\n"
    "<start_function_call>call:f{}<end_function_call>",
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n'
    '    {"tool_call_id": "1", "tool_name": "f", "parameters": {}}\n]<|END_ACTION|>',
    "kimi": '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}'
    "<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "deepseek_v3": _deepseek("function<\uff5ctool\u2581sep\uff5c>f\n```json\n{}\n```", "\n"),
    "deepseek_v31": _deepseek("f<\uff5ctool\u2581sep\uff5c>{}", ""),
    "mistral_v11": '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{}',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]',
    "phi": '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]<|/tool_call|>',
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]',
    "nemotron": '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]</TOOLCALL>',
    "jamba": '<tool_calls>[\n  {"name": "f", "arguments": {"a": 1}},\n {"name": "f", "arguments": {}}\n]</tool_calls>',
    "lfm2": "<|tool_call_start|>[f(a=1), f()]<|tool_call_end|>",
    "minimax": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'
    '<invoke name="f">\n</invoke>\n</minimax:tool_call>',
    "seed": "<seed:tool_call><function=f><parameter=a>1</parameter></function><function=f></function></seed:tool_call>",
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n<tool_call>f</tool_call>",
    "qwen_xml": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=f>\n</function>\n</tool_call>",
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>{"name": "f"}</tool_call>',
}
"""Two calls as models write them."""
F = [tool("f", {"type": "object", "properties": {"a": {"type": "integer"}}})]


@pytest.mark.parametrize("name", CALLS)
def test_calls_as_models_write_them(name: str) -> None:
    form = BY_NAME[name]
    for seed in range(10):
        rng = random.Random(seed)
        content, calls = read("Well.\n" + CALLS[name], output_of(form, F), rng)
        assert (content, calls) == ("Well.", [("f", {"a": 1}), ("f", {})])


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_broken_anywhere_is_text(name: str) -> None:
    """Whatever is cut out, nothing is lost, nothing raises, and the result does not depend on the pieces."""
    output, text = output_of(BY_NAME[name], F), CALLS[name]
    for seed in range(60):
        rng = random.Random(seed)
        start = rng.randrange(len(text))
        broken = "Hi " + text[:start] + rng.choice(["", "{", "x", "]"]) + text[start + rng.randint(0, 9) :] + " more"
        content, calls = read(broken, output)
        assert read(broken, output, rng) == (content, calls), "the result depends on how the text is cut"
        if not calls:
            assert content.replace("\n", "") == broken.replace("\n", ""), "a text that is no call is content as a whole"


@pytest.mark.parametrize("name", [*CALLS, "llama"])
def test_a_template_shows_its_form(name: str) -> None:
    text = CALLS.get(name, '{"name": "f", "parameters": {}}')
    assert format_of("{% for tool in tools %}{{ tool }}{% endfor %}" + text) is BY_NAME[name]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{city:<|"|>Oslo, {1}<|"|>,days:[1,2.5,-3],deep:{x:true,y:None,z:null}}',
         {"city": "Oslo, {1}", "days": [1, 2.5, -3], "deep": {"x": True, "y": None, "z": None}}),
        ('{ <|"|>a b<|"|> : "it\'s" , list : [ ] , none : { } }', {"a b": "it's", "list": [], "none": {}}),
        ('{text:<|"|>line\n"quoted" \\ <|tool_call> <tool_call|><|"|>}',
         {"text": 'line\n"quoted" \\ <|tool_call> <tool_call|>'}),
        ("{a:1,a:2}", None), ("{a 1}", None), ("{a:}", None), ("{a:1} more", None), ("{a:[1,}", None),
        ("{a:Oslo}", None),
        ("{a:" + "[" * 70 + "]" * 70 + "}", None), ('{a:<|"|>open}', None),
    ],
)  # fmt: skip
def test_values_in_braces(written: str, meant: Any) -> None:
    content, calls = read(f"<|tool_call>call:f{written}<tool_call|>", output_of(BY_NAME["gemma"], F), random.Random(1))
    assert calls == ([] if meant is None else [("f", meant)])
    assert bool(content) == (meant is None)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_pattern_of_a_whole_text_is_held_to(form: CallFormat) -> None:
    text = {"type": "string", "pattern": "^(?:[a-c]{2}/x|d)$"}
    tools = [tool("f", {"type": "object", "properties": {"input": text}, "required": ["input"]})]
    grammar = checked(
        Shape(calls=lark_of_calls(form, callable_tools(tools, None, None), required=True, parallel=False))
    )
    whole = 0
    for seed in range(20):
        said = walk(grammar, random.Random(seed))
        if said is not None:
            whole += 1
            ((_, arguments),) = read(said, output_of(form, tools))[1]
            assert re.fullmatch("[a-c]{2}/x|d", arguments["input"]), said
    assert whole > 5


NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
NONE: dict[str, Any] = {}
CITY, N = {"city": "Oslo"}, {"n": 5}
BOTH = {**N, **CITY}


def written(form: CallFormat, arguments: dict[str, Any]) -> str:
    """Return a call of `f` as its grammar writes it."""
    as_json = {key: json.dumps(one) for key, one in arguments.items()}
    if form.kind == "python":
        inner = "[f(" + ", ".join(f"{key}={one}" for key, one in as_json.items()) + ")]"
    elif form.kind == "object":
        inner = '{"name": "f", "arguments": ' + json.dumps(arguments) + "}"
    elif form.kind == "braces":
        marked = re.sub(
            r'"(\w+)":|"',
            lambda found: f"{found[1]}:" if found[1] else form.value_end,
            json.dumps(arguments, separators=(",", ":")),
        )
        inner = f"call:f{marked}"
    else:
        key, behind = form.key
        texts = {name: one if isinstance(one, str) else as_json[name] for name, one in arguments.items()}
        inner = "".join(f"{key}{name}{behind}{one}{form.value_end}" for name, one in texts.items())
        inner = form.open.replace("{name}", "f") + inner + form.close
    return form.begin + inner + form.end


@pytest.mark.parametrize("name", ["gemma", "lfm2", "qwen_xml", "glm", "minimax", "hermes"])
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object"}, [NONE, CITY, BOTH], []),
        ({"type": "object", "additionalProperties": True}, [NONE, CITY, BOTH], []),
        ({"type": "object", "additionalProperties": {"type": "string"}}, [NONE, CITY], []),
        ({"type": "object", "required": ["city"]}, [CITY], [NONE]),
        ({"anyOf": [NUMBER, {"type": "object"}]}, [NONE, CITY, BOTH], []),
        ({**NUMBER, "additionalProperties": True}, [N, BOTH], [NONE, CITY]),
        ({**NUMBER, "additionalProperties": False}, [N], [NONE, CITY, BOTH]),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": NUMBER}}, [N], [NONE, CITY, BOTH]),
        ({"type": "object", "properties": {}}, [NONE], [CITY]),
    ],
)
def test_arguments_that_a_schema_does_not_name(name: str, schema: Any, good: list[Any], bad: list[Any]) -> None:
    form, tools = BY_NAME[name], [tool("f", schema)]
    offered = callable_tools(tools, None, None)
    grammar = checked(Shape(calls=lark_of_calls(form, offered, required=True, parallel=False)))
    for one in good:
        assert accepts(grammar, written(form, one)), one
        ((_, arguments),) = read(written(form, one), output_of(form, tools))[1]
        assert arguments == one or (form.kind == "tagged" and arguments == {**one, "n": "5"} and not bad)
    assert not any(accepts(grammar, written(form, one)) for one in bad)


P = {"type": "object", "properties": {"city": {"type": "string"}, "next": {"$ref": "#/$defs/P"}}, "required": ["city"]}
PAIR = [{"type": "integer"}, {"type": "string"}]


@pytest.mark.parametrize(
    ("name", "schema", "good", "bad"),
    [
        ("gemma", {"$ref": "#/$defs/P"}, [CITY, {**CITY, "next": CITY}], [{"wrong": 1}, {**CITY, "next": 5}, "a"]),
        ("gemma", {"allOf": [{"$ref": "#/$defs/P"}], "description": "x"}, [CITY], [{"wrong": 1}]),
        ("gemma", {"anyOf": [{"$ref": "#/$defs/P"}, {"type": "null"}]}, [CITY, None], [{"wrong": 1}]),
        ("gemma", {"type": "object", "anyOf": [P, {"properties": {"a": {"const": 1}}}]}, [CITY, {"a": 1}], [5, "a"]),
        ("gemma", {"const": 5}, [5], [7, "5"]),
        ("gemma", {"const": "a"}, ["a"], ["b"]),
        ("gemma", {"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"a": 1}], [{"a": "no"}, 5]),
        ("gemma", {"type": "array", "prefixItems": PAIR, "items": False}, [[], [1], [1, "a"]], [["no"], [1, "a", 1]]),
        ("gemma", {"type": "array", "prefixItems": PAIR, "minItems": 2}, [[1, "a"], [1, "a", True]], [[], [1]]),
        ("qwen_xml", {"const": "a"}, ["a"], ["b"]),
        ("qwen_xml", {"const": 5}, [5], [7]),
        ("qwen_xml", {"type": ["string", "null"], "enum": ["a", "b", None]}, ["a", "b"], ["c"]),
        ("qwen_xml", {"anyOf": [{"enum": ["a", "b"]}, {"const": "c"}, {"type": "null"}]}, ["a", "c"], ["d"]),
        ("qwen_xml", {"type": "string", "format": "date", "pattern": "^(?:2.*)$"}, ["2026-11-29"], ["1999-01-01", "2"]),
        ("qwen_xml", {"anyOf": [{"type": "string"}, {"type": "null"}]}, ["a", "b"], []),
    ],
)
def test_a_strict_tool_is_held_to_all_of_its_schema(name: str, schema: Any, good: list[Any], bad: list[Any]) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": {"P": P}}
    form, tools, warnings = BY_NAME[name], [tool("f", parameters)], list[str]()
    offered = callable_tools(tools, None, None, ("f",))
    calls = lark_of_calls(form, offered, required=True, parallel=False, warnings=warnings)
    grammar = checked(Shape(calls=calls))
    for one in good:
        assert accepts(grammar, written(form, {"x": one})), one
        assert read(written(form, {"x": one}), output_of(form, tools))[1] == [("f", {"x": one})]
    assert not any(accepts(grammar, written(form, {"x": one})) for one in bad) and not warnings


@pytest.mark.parametrize(
    ("name", "schema", "word"),
    [
        ("gemma", {"allOf": [{"type": "integer"}, {"minimum": 5}]}, "allOf"),
        ("gemma", {"minimum": 5}, "minimum"),
        ("gemma", {"$ref": "#/$defs/P", "required": ["next"]}, "required"),
        ("gemma", {**P, "anyOf": [{"required": ["next"]}, {}]}, "anyOf"),
        ("gemma", {"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, "patternProperties"),
        ("qwen_xml", {"type": "string", "allOf": [{"enum": ["a"]}]}, "allOf"),
        ("qwen_xml", {"type": "string", "enum": ["\n"]}, "enum"),
    ],
)
def test_what_a_form_cannot_hold_to_is_an_error_if_strict_and_a_warning_if_not(
    name: str, schema: Any, word: str
) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": {"P": P}}
    tools, warnings = [tool("f", parameters)], list[str]()
    with pytest.raises(GrammarError, match=f'^f: "{re.escape(word)}" cannot be enforced'):
        lark_of_calls(BY_NAME[name], callable_tools(tools, None, None, ("f",)), required=True, parallel=False)
    offered = callable_tools(tools, None, None)
    assert checked(Shape(calls=lark_of_calls(BY_NAME[name], offered, required=True, parallel=False, warnings=warnings)))
    assert warnings == [f'tools: f: "{word}" is not enforced in this model\'s calls']


@pytest.mark.parametrize("name", ["gemma", "lfm2"])
def test_a_grammar_of_tools_grows_no_faster_than_they_do(name: str) -> None:
    """It is built on the event loop. Covers types listed repeatedly, nested lists, and arguments all optional."""
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(20):
        nested = {"type": ["object"] * 4, "properties": {"a": nested}, "required": ["a"]}
    lists: dict[str, Any] = {"type": "integer"}
    for _ in range(14):
        lists = {"type": "array", "items": lists}
    for one in (nested, lists):
        deep = callable_tools([tool("f", {"type": "object", "properties": {"a": one}})], None, None)
        assert len(lark_of_calls(BY_NAME[name], deep, required=True, parallel=False)) < 20_000
    properties = {f"p{number}": {"type": "integer"} for number in range(1000)}
    wide = callable_tools([tool("f", {"type": "object", "properties": properties})], None, None)
    assert len(lark_of_calls(BY_NAME[name], wide, required=True, parallel=False)) < 300_000
    properties = {f"p{number}": {"type": "integer"} for number in range(20_000)}
    with pytest.raises(GrammarError, match="the schemas of one tool may have"):
        callable_tools([tool("f", {"type": "object", "properties": properties})], None, None)


@pytest.mark.parametrize("name", ["gemma", "lfm2", "qwen_xml"])
def test_tools_within_their_bound_may_still_make_too_long_a_grammar(name: str) -> None:
    properties = {f"p{number}": {"type": "array", "items": {"enum": [number]}} for number in range(2_000)}
    tools = [tool(f"f{number}", {"type": "object", "properties": properties}) for number in range(9)]
    few, many = callable_tools(tools[:1], None, None), callable_tools(tools, None, None)
    assert lark_of_calls(BY_NAME[name], few, required=True, parallel=False)
    with pytest.raises(GrammarError, match="the tools make a grammar of more than 1048576 characters"):
        lark_of_calls(BY_NAME[name], many, required=True, parallel=False)


def test_arguments_that_may_all_be_left_out_come_in_their_order() -> None:
    properties = {key: {"type": "integer"} for key in "abc"}
    tools = callable_tools([tool("f", {"type": "object", "properties": properties})], None, None)
    grammar = checked(Shape(calls=lark_of_calls(BY_NAME["lfm2"], tools, required=True, parallel=False)))
    for inner in ("", "a=1", "b=1", "a=1, c=2", "b=1, c=2", "a=1, b=2, c=3"):
        assert accepts(grammar, f"<|tool_call_start|>[f({inner})]<|tool_call_end|>"), inner
    for inner in ("b=1, a=2", "c=1, c=2", "a=1,"):
        assert not accepts(grammar, f"<|tool_call_start|>[f({inner})]<|tool_call_end|>"), inner


def test_a_template_without_calls_has_no_form() -> None:
    assert format_of("{{ messages }}") is None
