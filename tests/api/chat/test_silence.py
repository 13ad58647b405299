"""Streams that generate much and show nothing: heartbeats keep them awake, in every dialect."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from cairn.config.config import Config
from cairn.types.outputs import Delta
from tests.api.openai.test_responses import keeping, slowly
from tests.api.scripted import ScriptedService, done
from tests.api.sockets import Site, site
from tests.service.tiny import make_model

HI = [{"role": "user", "content": "hi"}]
BEAT = 0.1
WAIT = 0.02
HIDDEN = Delta(reasoning="hm", tokens=(1,))
NOTHING = Delta(tokens=(1,))
"""A token whose text is held back, as it may belong to a call."""
EXCLUDED = {"messages": HI, "reasoning": {"exclude": True}}
OMITTED = {"messages": HI, "max_tokens": 99, "thinking": {"type": "adaptive", "display": "omitted"}}
CASES: list[tuple[str, str, dict[str, Any], Delta, str]] = [
    ("a call held back", "/v1/chat/completions", {"messages": HI}, NOTHING, ": still here\n\n"),
    ("reasoning left out", "/v1/chat/completions", EXCLUDED, HIDDEN, ": still here\n\n"),
    ("a text held back", "/v1/completions", {"prompt": "hi"}, NOTHING, ": still here\n\n"),
    ("a call held back", "/v1/messages", {"messages": HI, "max_tokens": 99}, NOTHING, "event: ping\n"),
    ("thinking not asked for", "/v1/messages", {"messages": HI, "max_tokens": 99}, HIDDEN, "event: ping\n"),
    ("thinking omitted", "/v1/messages", OMITTED, HIDDEN, "event: ping\n"),
    ("a call held back", "/v1/responses", {"input": "hi", "store": False}, NOTHING, "event: response.in_progress\n"),
    ("a call held back", "/api/chat", {"messages": HI}, NOTHING, '"content":""}'),
    ("thinking hidden", "/api/chat", {"messages": HI, "think": False}, HIDDEN, '"content":""}'),
    ("thinking hidden", "/api/generate", {"prompt": "hi", "think": False}, HIDDEN, '"response":""'),
]  # fmt: skip


async def text_of(at: Site, path: str, body: dict[str, Any]) -> str:
    async with at.http() as http:
        answer = await http.post(path, json=body | {"stream": True})
        assert answer.status_code == 200, answer.text
        return answer.text


@pytest.mark.parametrize(("case", "path", "body", "delta", "beat"), CASES, ids=[f"{c[1]}: {c[0]}" for c in CASES])
@pytest.mark.parametrize("wait", [WAIT, 0.8 * BEAT])
async def test_heartbeats_continue_while_output_is_hidden(
    case: str, path: str, body: dict[str, Any], delta: Delta, beat: str, wait: float
) -> None:
    """Whether hidden tokens come faster or slower than heartbeats, the time between two heartbeats stays the same."""
    count = round(6 * BEAT / wait)
    script = [*(step for _ in range(count) for step in (delta, wait)), Delta(text="said", tokens=(2,)), done()]
    async with site(ScriptedService(lambda request: list(script)), Config(heartbeat=BEAT)) as at:
        began = time.monotonic()
        text = await text_of(at, path, body)
    most = (time.monotonic() - began) / BEAT + 1
    ends = 1 if path.startswith("/api/") else 0  # the final line has no text either
    begun = 1 if path == "/v1/responses" else 0
    assert 3 <= text.count(beat) - ends - begun <= most, text[:2000]
    assert "said" in text


@pytest.mark.parametrize("path", [case[1] for case in CASES[::2]])
async def test_shown_output_replaces_heartbeats(path: str) -> None:
    body = next(case[2] for case in CASES if case[1] == path)
    beat = next(case[4] for case in CASES if case[1] == path)
    script = [*(step for _ in range(20) for step in (Delta(text="x", tokens=(1,)), WAIT)), done()]
    async with site(ScriptedService(lambda request: list(script)), Config(heartbeat=0.3)) as at:
        text = await text_of(at, path, body)
    usual = {"/v1/responses": 1, "/api/chat": 1, "/api/generate": 1}
    assert text.count(beat) == usual.get(path, 0)


async def test_a_stored_response_and_a_turn_are_kept_awake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are read from an event log, where a response's heartbeats are numbered events."""
    slowly(monkeypatch)
    config = Config(heartbeat=BEAT)
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny"), config) as at, at.http() as http:
        from cairn.text.output.stream import TextStream

        push = TextStream.push
        held: list[int] = []

        def holding(self: TextStream, tokens: Any) -> list[Delta]:
            held.extend(tokens)
            return [Delta(tokens=tuple(tokens))] if len(held) < 50 else push(self, tokens)

        monkeypatch.setattr(TextStream, "push", holding)
        text = await text_of(at, "/v1/responses", {"input": "hi", "max_output_tokens": 60, "temperature": 0})
        numbers = [
            json.loads(line.removeprefix("data: "))["sequence_number"]
            for line in text.splitlines()
            if "data: {" in line
        ]
        assert text.count("event: response.in_progress") >= 4 and numbers == list(range(len(numbers)))
        held.clear()
        await http.post("/v1/agents", json={"id": "a"})
        turn = await text_of(at, "/v1/agents/a/turns", {"messages": HI, "max_tokens": 60, "temperature": 0})
        assert turn.count(": still here\n\n") >= 4
