"""Custom tools in chats, whose input is one text, and built-in tools that a client runs and names by type alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import TypeAdapter

from cairn.api.chat.client_tools import ANTHROPIC, OPENAI
from cairn.config.config import Config
from cairn.types.outputs import Delta, FinishReason, ToolCallDelta
from tests.api.openai.test_responses import keeping
from tests.api.scripted import ScriptedService, done
from tests.api.sockets import events, post, site
from tests.scripted_model import CONTROLS, write_scripted
from tests.text import text_models

HI = [{"role": "user", "content": "hi"}]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+ [0-9]+"}}
CUSTOM = {"type": "custom", "custom": {"name": "patch", "description": "Edit a file.", "format": GRAMMAR}}
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def calling(*calls: tuple[str, str], after: str = "") -> ScriptedService:
    """Return a service that calls tools, each call in two pieces, with text after them."""
    steps: list[Any] = []
    for index, (name, arguments) in enumerate(calls):
        half = len(arguments) // 2
        first = ToolCallDelta(index=index, id=f"call_{index}", name=name, arguments=arguments[:half])
        steps += [Delta(tool_calls=(first,), tokens=(1,))]
        steps += [Delta(tool_calls=(ToolCallDelta(index=index, arguments=arguments[half:]),), tokens=(2,))]
    steps += [Delta(text=after, tokens=(3,))] if after else []
    service = ScriptedService(lambda request: [*steps, done(FinishReason.TOOL_CALLS)])
    service.info.context = 4096
    return service


async def test_a_custom_tool_is_called_with_one_text() -> None:
    service = calling(("patch", '{"input": "file 1"}'), ("weather", '{"city": "Oslo"}'), after="done")
    body = {"messages": HI, "tools": [CUSTOM, FUNCTION]}
    async with site(service) as at:
        whole = (await post(at, CHAT, body)).json()
        TypeAdapter(ChatCompletion).validate_python(whole)
        custom, function = whole["choices"][0]["message"]["tool_calls"]
        assert custom == {"id": "call_0", "type": "custom", "custom": {"name": "patch", "input": "file 1"}}
        assert function["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
        *chunks, _ = events((await post(at, CHAT, body | {"stream": True})).text)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert pieces[0] == {"index": 0} | custom, "sent once, when it is complete"
        assert [piece["index"] for piece in pieces] == [0, 1, 1]
        assert "".join(piece["function"]["arguments"] for piece in pieces[1:]) == '{"city": "Oslo"}'
        assert deltas[-2] == {"content": "done"}, "text behind calls stays behind them"
    (tools,) = {json.dumps(tools) for _, tools, _, _ in service.prompts}
    rendered = json.loads(tools)[0]["function"]
    assert rendered["name"] == "patch" and "has this grammar:\n[a-z]+ [0-9]+" in rendered["description"]
    assert rendered["parameters"]["properties"]["input"]["pattern"] == "^(?:[a-z]+ [0-9]+)$"
    assert service.wanted[0].choice.strict == ("patch",), "its input follows the grammar"


async def test_a_custom_call_comes_back_and_is_chosen() -> None:
    service = calling(("patch", '{"input": "file 1"}'))
    answered = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "patch", "input": "a 1"}}],
    }
    result = {"role": "tool", "tool_call_id": "c", "content": "done"}
    choice = {"type": "custom", "custom": {"name": "patch"}}
    async with site(service) as at:
        answer = await post(at, CHAT, {"messages": [*HI, answered, result], "tools": [CUSTOM], "tool_choice": choice})
        assert answer.status_code == 200, answer.text
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [choice]}}
        assert (
            await post(at, CHAT, {"messages": HI, "tools": [CUSTOM, FUNCTION], "tool_choice": allowed})
        ).status_code == 200
    (call,) = service.prompts[0][0][1]["tool_calls"]
    assert call == {"id": "c", "type": "function", "function": {"name": "patch", "arguments": '{"input": "a 1"}'}}
    assert [wanted.choice.names for wanted in service.wanted] == [("patch",), ("patch",)]


async def test_a_grammar_that_no_pattern_can_express_gives_a_warning() -> None:
    recursive = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "(" start ")" | "x"'}}
    service = calling(("patch", '{"input": "x"}'))
    async with site(service) as at:
        tool = {"type": "custom", "custom": {"name": "patch", "format": recursive}}
        answer = await post(at, CHAT, {"messages": HI, "tools": [tool]})
        assert answer.status_code == 200 and "not held to it" in answer.headers["x-cairn-warning"]
        assert not service.wanted[0].choice.strict


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"type": "custom"}, "tools[0].custom"),
        ({"type": "custom", "custom": {"name": "a b"}}, "tools[0].custom.name"),
        ({"type": "custom", "custom": {"name": 3}}, "tools[0].custom.name"),
        ({"type": "custom", "custom": {"name": "a", "description": 3}}, "tools[0].custom.description"),
        ({"type": "custom", "custom": {"name": "a", "format": {"type": "yaml"}}}, "tools[0].custom.format.type"),
        ({"type": "custom", "custom": {"name": "a", "format": {"type": "grammar", "grammar": {"syntax": "x"}}}},
         "tools[0].custom.format.grammar.syntax"),
        ({"type": "custom", "custom": {"name": "a"}, "function": {"name": "b"}}, "tools[0].function"),
    ],
)  # fmt: skip
async def test_a_custom_tool_that_is_wrong_is_refused_by_name(tool: Any, field: str) -> None:
    async with site(ScriptedService()) as at:
        answer = await post(at, CHAT, {"messages": HI, "tools": [tool]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text


@pytest.mark.parametrize(
    ("tool", "name", "properties"),
    [
        ({"type": "bash_20250124", "name": "bash"}, "bash", {"command", "restart"}),
        ({"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
         "str_replace_based_edit_tool", {"command", "path", "insert_text"}),
        ({"type": "text_editor_20241022", "name": "str_replace_editor"}, "str_replace_editor", {"command", "new_str"}),
        ({"type": "text_editor_20250429"}, "str_replace_based_edit_tool", {"view_range"}),
        ({"type": "memory_20250818", "name": "memory", "cache_control": {"type": "ephemeral"}}, "memory", {"old_path"}),
    ],
)  # fmt: skip
async def test_tools_that_claudes_clients_run_are_functions(tool: Any, name: str, properties: set[str]) -> None:
    service = calling((name, '{"command": "ls"}'))
    async with site(service) as at:
        answer = await post(at, MESSAGES, {"messages": HI, "max_tokens": 9, "tools": [tool]})
    assert answer.status_code == 200 and "x-cairn-warning" not in answer.headers, answer.text
    (rendered,) = service.prompts[0][1]
    assert rendered["function"]["name"] == name and rendered["function"]["description"]
    assert properties <= rendered["function"]["parameters"]["properties"].keys()
    assert answer.json()["content"] == [{"type": "tool_use", "id": "call_0", "name": name, "input": {"command": "ls"}}]


async def test_a_function_of_the_same_name_comes_before_a_type() -> None:
    service = calling(("bash", "{}"))
    own = {"name": "bash", "description": "mine", "input_schema": {"type": "object"}}
    async with site(service) as at:
        tools = [{"type": "bash_20250124", "name": "bash"}, own]
        answer = await post(at, MESSAGES, {"messages": HI, "max_tokens": 9, "tools": tools})
        assert "tools[0] is ignored: a function is named bash too" in answer.headers["x-cairn-warning"]
        body = {"input": "hi", "tools": [{"type": "shell"}, {"type": "function", "name": "shell"}], "store": False}
        answer = await post(at, RESPONSES, body)
        assert "tools[0] is ignored" in answer.headers["x-cairn-warning"]
    assert [[tool["function"]["description"] for tool in tools] for _, tools, _, _ in service.prompts[:1]] == [["mine"]]
    assert len(service.prompts[1][1]) == 1


@pytest.mark.parametrize("name", [[1], {"a": 1}, 5, None, True])
async def test_a_name_that_is_no_text_is_refused(name: Any) -> None:
    async with site(ScriptedService()) as at:
        for path, tools in (
            (RESPONSES, [{"type": "custom", "name": name}, {"type": "shell"}]),
            (RESPONSES, [{"type": "function", "name": name}]),
            (MESSAGES, [{"name": name, "input_schema": {}}, {"type": "bash_20250124", "name": "bash"}]),
            (MESSAGES, [{"type": "custom", "name": name, "input_schema": {}}]),
            (CHAT, [{"type": "custom", "custom": {"name": name}}]),
        ):
            answer = await post(at, path, {"messages": HI, "max_tokens": 9, "input": "hi", "tools": tools})
            assert answer.status_code == 400 and "tools[0]" in answer.text, (path, answer.text)
        if isinstance(name, list | dict | int) and name is not True:
            tools = [{"type": "memory_20250818", "name": name}]
            answer = await post(at, MESSAGES, {"messages": HI, "max_tokens": 9, "tools": tools})
            assert answer.status_code == 400 and "tools[0]" in answer.text, answer.text


@pytest.mark.parametrize("where", ["container_auto", "container_reference"])
async def test_a_shell_of_the_servers_is_passed_over(where: str) -> None:
    service = ScriptedService()
    async with site(service) as at:
        tools = [{"type": "shell", "environment": {"type": where}}]
        answer = await post(at, RESPONSES, {"input": "hi", "tools": tools, "store": False})
    assert answer.status_code == 200 and "runs on a server" in answer.headers["x-cairn-warning"]
    assert not service.prompts[0][1]


async def test_tools_that_show_a_screen_stay_refused() -> None:
    async with site(ScriptedService()) as at:
        for path, tool in (
            (
                MESSAGES,
                {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
            ),
            (
                RESPONSES,
                {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "mac"},
            ),
        ):
            answer = await post(at, path, {"messages": HI, "max_tokens": 9, "input": "hi", "tools": [tool]})
            assert answer.status_code == 400 and "tools[0]" in answer.text and "screen" in answer.text
        other = {"type": "web_search_20250305", "name": "web_search"}
        answer = await post(at, MESSAGES, {"messages": HI, "max_tokens": 9, "tools": [other]})
        assert answer.status_code == 200 and "runs on a server" in answer.headers["x-cairn-warning"]


CALLED = [
    ("shell", '{"commands": ["ls", "pwd"], "timeout_ms": 1000}', "shell_call",
     {"action": {"commands": ["ls", "pwd"], "timeout_ms": 1000, "max_output_length": None}}),
    ("local_shell", '{"command": ["ls", "-l"]}', "local_shell_call",
     {"action": {"type": "exec", "command": ["ls", "-l"], "env": {}}}),
    ("apply_patch", '{"type": "update_file", "path": "a", "diff": "+x"}', "apply_patch_call",
     {"operation": {"type": "update_file", "path": "a", "diff": "+x"}}),
    ("apply_patch", '{"type": "delete_file", "path": "a", "diff": ""}', "apply_patch_call",
     {"operation": {"type": "delete_file", "path": "a"}}),
]  # fmt: skip
OUTPUTS: dict[str, Any] = {
    "shell_call": {
        "type": "shell_call_output",
        "output": [
            {"stdout": "a\nb\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
            {"stdout": "", "stderr": "no", "outcome": {"type": "exit", "exit_code": 2}},
            {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
        ],
    },
    "local_shell_call": {"type": "local_shell_call_output", "output": "a b"},
    "apply_patch_call": {"type": "apply_patch_call_output", "status": "completed"},
}
TEXTS = {
    "shell_call": "a\nb\nno\n[exit code 2]\n[timed out]",
    "local_shell_call": "a b",
    "apply_patch_call": "completed",
}


@pytest.mark.parametrize(("name", "arguments", "kind", "said"), CALLED, ids=[str(n) for n in range(len(CALLED))])
async def test_calls_of_a_clients_own_tools_are_items_of_their_own(
    name: str, arguments: str, kind: str, said: Any
) -> None:
    """They come back in history as the same call, and so do their results."""
    service = calling((name, arguments))
    body = {"input": "hi", "tools": [{"type": name}], "tool_choice": {"type": name}, "store": False}
    async with site(service) as at:
        whole = (await post(at, RESPONSES, body)).json()
        if name != "local_shell":  # it is older than `tool_choice` for such tools
            TypeAdapter(Response).validate_python(whole)
        (item,) = whole["output"]
        assert item["type"] == kind and item["call_id"] == "call_0" and {**item, **said} == item
        text = (await post(at, RESPONSES, body | {"stream": True})).text
        results = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
        added, finished = (next(one["item"] for one in results if one["type"] == f"response.output_item.{when}")
                           for when in ("added", "done"))  # fmt: skip
        assert added["type"] == kind and added["status"] == "in_progress"
        assert finished | {"id": ""} == item | {"id": ""}
        output = OUTPUTS[kind] | {"call_id": "call_0"}
        again = await post(at, RESPONSES, body | {"input": [{"role": "user", "content": "hi"}, item, output]})
        assert again.status_code == 200, again.text
    assert service.wanted[0].choice.strict == (name,) == service.wanted[0].choice.names
    _, assistant, result = service.prompts[-1][0]
    function = assistant["tool_calls"][0]["function"]
    assert function["name"] == name and json.loads(function["arguments"]) == json.loads(arguments)
    assert result == {"role": "tool", "tool_call_id": "call_0", "content": TEXTS[kind]}


async def test_a_kept_response_shows_a_clients_own_tools(tmp_path: Path) -> None:
    pieces = ["<tool_call>", '\n{"name": "shell", "arguments": ', '{"commands": ["ls"]}}\n', "</tool_call>"]
    kinds = dict.fromkeys([*CONTROLS], 3) | dict.fromkeys(("<tool_call>", "</tool_call>"), 4)
    model = write_scripted(tmp_path / "m.gguf", pieces, template=text_models.QWEN_TEMPLATE, kinds=kinds)
    tools = [{"type": "shell", "environment": {"type": "local"}}]
    async with keeping(tmp_path / "agents", model, engine="cpu") as at, at.http() as http:
        made = (await post(at, RESPONSES, {"input": "hi", "tools": tools, "temperature": 0})).json()
        shown = (await http.get(f"{RESPONSES}/{made['id']}")).json()
    assert made["output"][0]["type"] == "shell_call" and made["output"][0]["action"]["commands"] == ["ls"]
    assert shown["output"] == made["output"] and shown["tools"] == made["tools"] == tools


def test_every_schema_of_a_clients_own_tool_can_be_enforced() -> None:
    for tool in (*ANTHROPIC.values(), *OPENAI.values()):
        assert set(tool.parameters.get("required", ())) <= tool.parameters["properties"].keys()
        assert tool.description.endswith(".") and tool.function("x")["name"] == "x"


async def test_more_tools_than_openai_takes() -> None:
    service = ScriptedService()
    many = [
        {"type": "function", "function": {"name": f"tool_{n}", "parameters": {"type": "object"}}} for n in range(400)
    ]
    async with site(service) as at, site(ScriptedService(), Config(max_tools=399)) as small:
        assert (await post(at, CHAT, {"messages": HI, "tools": many})).status_code == 400, "they need a longer context"
        service.info.context = 1 << 20
        assert (await post(at, CHAT, {"messages": HI, "tools": many})).status_code == 200
        refused = await post(small, CHAT, {"messages": HI, "tools": many})
        assert refused.status_code == 400 and "the limit is 399" in refused.json()["error"]["message"]
