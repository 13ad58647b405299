"""Input items as messages: an assistant's reasoning, text and calls become one message, however many items they are."""

from __future__ import annotations

import time
from typing import Any

import pytest

from cairn.api.http.call import BodyBudget, HTTPCall
from cairn.api.openai.responses_items import Called, items_of, messages_of

SECONDS = 2.0
"""Limit in CPU seconds; it took half a minute and more before."""


def read(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    scope = {"type": "http", "path": "/v1/responses", "headers": []}
    call = HTTPCall(scope, None, None, 1, BodyBudget(1, 1))  # type: ignore[arg-type]
    return messages_of(items, call)


def said(text: str, role: str = "assistant") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


CALL = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
MADE = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_items_of_an_answer_are_one_message() -> None:
    assert read([said("q", "user"), thought("a"), thought("b"), said("c"), CALL, said("d"), said("e")]) == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "cde", "reasoning_content": "ab", "tool_calls": [MADE]},
    ]
    assert read([said("a"), said("b")]) == [said_plain("a"), said_plain("b")]
    assert read([said(""), said("b"), said("c")]) == [said_plain("b"), said_plain("c")]
    assert read([thought("a"), said("b"), thought("c")]) == [
        {"role": "assistant", "content": "b", "reasoning_content": "a"},
        {"role": "assistant", "content": None, "reasoning_content": "c"},
    ]
    assert read([said("")]) == [said_plain("")]
    assert read([CALL, said("r", "user"), said("")]) == [
        {"role": "assistant", "content": None, "tool_calls": [MADE]},
        {"role": "user", "content": "r"},
        said_plain(""),
    ]


def said_plain(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_many_items_are_joined_once() -> None:
    for items in (
        [CALL, *[said("x" * 450)] * 30_000],
        [thought("x" * 450)] * 30_000,
        [said("")] * 60_000,
        [CALL] * 60_000,
    ):
        began = time.process_time()
        assert len(read(items)) == 1
        assert time.process_time() - began < SECONDS


def test_a_shells_output_follows_what_was_said_before_its_call() -> None:
    call = {"type": "shell_call", "call_id": "s", "action": {"commands": ["ls"]}}
    output = {"type": "shell_call_output", "call_id": "s", "output": [{"stdout": "a.txt\n"}]}
    for before, field in ((said("I will look."), "content"), (thought("I will look."), "reasoning_content")):
        answer, result = read([before, call, output])
        assert answer[field] == "I will look." and answer["tool_calls"][0]["id"] == "s"
        assert result == {"role": "tool", "tool_call_id": "s", "content": "a.txt"}


def test_calls_keep_the_namespace_of_their_tool() -> None:
    custom = {"type": "custom_tool_call", "namespace": "ns", "name": "f", "input": "x", "call_id": "c"}
    for item in (CALL | {"namespace": "ns"}, custom):
        assert read([item])[0]["tool_calls"][0]["function"]["name"] == "ns__f"


@pytest.mark.parametrize(
    ("tool", "output"),
    [
        (Called("f"), {"type": "function_call_output", "output": "said"}),
        (Called("f", custom=True), {"type": "custom_tool_call_output", "output": "said"}),
        (Called("f", kind="local_shell"), {"type": "local_shell_call_output", "output": "said"}),
        (Called("f", kind="apply_patch"), {"type": "apply_patch_call_output", "status": "completed", "output": "said"}),
        (Called("f", kind="shell"), {"type": "shell_call_output"}),
    ],
)
def test_a_listed_result_is_of_its_calls_kind_and_comes_back_as_it_was(tool: Called, output: dict[str, Any]) -> None:
    result = {"role": "tool", "tool_call_id": "c", "content": "said"}
    call, found = items_of([{"role": "assistant", "content": None, "tool_calls": [MADE]}, result], {"f": tool}, "r")
    assert output.items() <= found.items() and found["call_id"] == call["call_id"] == "c"
    assert read([CALL, found])[1] == result
