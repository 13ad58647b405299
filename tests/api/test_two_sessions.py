"""Two sessions of Claude Code in one folder, with requests in the real client's shapes, on a whole server.

The second session differs in the version of its attribution line, session id, question and places of cache_control. Its
tools and system text are equal and are not computed again.
"""

from __future__ import annotations

import copy
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.stage import Prompter, stage, usage_of

EPHEMERAL = {"type": "ephemeral"}
BETAS = "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,effort-2025-11-24"


def tools() -> list[dict[str, Any]]:
    """Return twelve tools with long descriptions."""
    words = "Reads, writes, lists or runs what it is told to, in the folder it is told of. "
    return [
        {
            "name": f"Tool{n}",
            "description": f"Tool {n}. {words * 12}",
            "input_schema": {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "object",
                "properties": {"file_path": {"type": "string", "description": words}, "limit": {"type": "number"}},
                "required": ["file_path"],
                "additionalProperties": False,
            },
        }
        for n in range(12)
    ]


def session(version: str, id: str, question: str) -> dict[str, Any]:
    """Return the first request of a session."""
    system = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.331.{version}; cc_entrypoint=cli;"},
        {"type": "text", "text": "You are a coding agent.", "cache_control": EPHEMERAL},
        {"type": "text", "text": "Rules of work. " * 300, "cache_control": EPHEMERAL},
    ]
    user = [
        {"type": "text", "text": "<system-reminder>\nNothing yet.\n</system-reminder>"},
        {"type": "text", "text": question, "cache_control": EPHEMERAL},
    ]
    return {
        "model": "claude-sonnet-4-5",
        "max_tokens": 32000,
        "stream": True,
        "system": system,
        "tools": tools(),
        "thinking": {"type": "adaptive", "display": "omitted"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": json.dumps({"session_id": id})},
        "messages": [
            {"role": "user", "content": user},
            {"role": "system", "content": [{"type": "text", "text": "# Environment\n" + "A folder. " * 200}]},
        ],
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prompter]:
    with stage(tmp_path_factory.mktemp("stage"), [["Done."]]) as at:
        yield at


def ask(at: Prompter, body: dict[str, Any], path: str = "/v1/messages?beta=true", id: str = "s") -> str:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none", "anthropic-version": "2023-06-01"}
    headers |= {"anthropic-beta": BETAS, "X-Claude-Code-Session-Id": id}
    asked = urllib.request.Request(at.server.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return str(answer.read().decode())


def size(at: Prompter, body: dict[str, Any]) -> int:
    """Return the number of tokens in a request's tools and system text."""
    begun = {key: body[key] for key in ("model", "system", "tools")} | {"messages": [{"role": "user", "content": "."}]}
    return int(json.loads(ask(at, begun, "/v1/messages/count_tokens"))["input_tokens"]) - 12


def test_sessions_share_the_kv_of_tools_and_system(server: Prompter, tmp_path: Path) -> None:
    first = session("003", "11111111-aaaa", "What is in this folder?")
    second = session("d13", "22222222-bbbb", "Write a test, please.")
    shared = size(server, first)
    assert shared > 3000 and shared == size(server, second)
    prompt, cached = usage_of(ask(server, first, id="11111111-aaaa"))
    assert prompt > shared and cached < shared / 2, "nobody asked before"
    prompt, cached = usage_of(ask(server, second, id="22222222-bbbb"))
    assert prompt > cached >= 0.95 * shared, f"{cached} of {shared}"
    # A later request of a session sends its system message as a string and moves cache_control; neither changes a
    # token.
    later = copy.deepcopy(second)
    later["messages"][1]["content"] = later["messages"][1]["content"][0]["text"]
    del later["messages"][0]["content"][1]["cache_control"]
    later["messages"] += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Go on."}]
    before = prompt
    prompt, cached = usage_of(ask(server, later, id="22222222-bbbb"))
    assert prompt > before and cached >= 0.95 * before, f"{cached} of {before}"


def test_what_differs_is_computed_again(server: Prompter) -> None:
    """The counter-check: with another first tool there is hardly anything to share."""
    other = session("e57", "33333333-cccc", "What is in this folder?")
    shared = size(server, other)
    other["tools"][0]["description"] = "Quite another tool."
    _, cached = usage_of(ask(server, other, id="33333333-cccc"))
    assert cached < 0.1 * shared
