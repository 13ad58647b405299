"""Progress of prefill in every dialect that reports it: from the cached tokens to the whole prompt, step by step."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from cairn.frontend.request_state import RequestState
from tests.api.openai.test_responses import keeping
from tests.api.sockets import Site
from tests.service.tiny import make_model

STEP = 64
LONG = "What was said before is long. " * 12
CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2}),
    ("/v1/completions", {"prompt": LONG, "max_tokens": 2}),
    ("/v1/completions", {"prompt": LONG, "max_tokens": 2, "echo": True}),
    ("/completion", {"prompt": LONG, "n_predict": 2}),
    ("/v1/responses", {"input": LONG, "max_output_tokens": 2, "store": False}),
    ("/v1/responses", {"input": LONG, "max_output_tokens": 2}),
    ("/v1/agents/a/turns", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2}),
]


async def streamed(at: Site, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with at.http() as http:
        answer = await http.post(path, json=body | {"stream": True, "temperature": 0})
        assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("path", "body"), CASES, ids=[f"{n}-{path}" for n, (path, _) in enumerate(CASES)])
async def test_progress_goes_from_what_is_cached_to_the_whole(path: str, body: dict[str, Any], tmp_path: Path) -> None:
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny"), step_tokens=STEP) as at, at.http() as http:
        await http.post("/v1/agents", json={"id": "a"})
        assert not any("prompt_progress" in one for one in await streamed(at, path, body | {"return_progress": False}))
        if path.endswith("/turns"):
            body = body | {"messages": [*body["messages"], {"role": "user", "content": LONG[::-1]}]}
        else:  # another prompt that shares the prefix of the first
            body = {key: value + LONG[::-1] if value == LONG else value for key, value in body.items()}
            body |= {"messages": [{"role": "user", "content": LONG + LONG[::-1]}]} if "messages" in body else {}
        chunks = await streamed(at, path, body | {"return_progress": True})
    results = [one for one in chunks if "prompt_progress" in one]
    progress = [one["prompt_progress"] for one in results]
    first, last = progress[0], progress[-1]
    assert first["processed"] == first["cache"] > 300 and last["processed"] == last["total"]
    assert {(one["cache"], one["total"]) for one in progress} == {(first["cache"], first["total"])}
    steps = [after["processed"] - before["processed"] for before, after in itertools.pairwise(progress)]
    assert len(steps) == -(-(last["total"] - first["cache"]) // STEP) > 3 and all(0 < step <= STEP for step in steps)
    assert [one["time_ms"] for one in progress] == sorted(one["time_ms"] for one in progress)
    for one in results:
        timings, prompt = one["timings"], one["prompt_progress"]
        assert timings["cache_n"] == prompt["cache"] and timings["prompt_n"] == prompt["processed"] - prompt["cache"]
        assert timings["predicted_n"] == 0
    assert results == chunks[chunks.index(results[0]) : chunks.index(results[0]) + len(results)], (
        "progress comes before all text"
    )
    if path == "/v1/responses":
        assert {one["type"] for one in results} == {"response.in_progress"}


async def test_unrequested_progress_sends_no_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker reports prefill steps only if the request asks for them."""
    results: list[Any] = []
    accept = RequestState.accept

    def noted(self: RequestState, output: Any) -> None:
        results.append(output.progress)
        accept(self, output)

    monkeypatch.setattr(RequestState, "accept", noted)
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny"), step_tokens=STEP) as at:
        await streamed(at, "/v1/completions", {"prompt": LONG, "max_tokens": 2})
        assert results and not any(results)
        await streamed(at, "/v1/completions", {"prompt": LONG[::-1], "max_tokens": 2, "return_progress": True})
        assert any(results)
