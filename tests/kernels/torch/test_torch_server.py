"""A server with `--device torch-cpu` whose torch fails in the middle of answers, as its clients see it."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.api.process import Served, served
from tests.api.test_device_failures import health, text

pytest.importorskip("torch", reason="torch is not installed: no server computes with it")

FAULTY = Path(__file__).parents[2] / "service" / "faulty_torch.py"
LENGTH = 40
MOVED = "the device torch-cpu failed twice; the CPU computed the rest of this answer"
PROMPTS = ["Once upon a time", "The tide comes in", "A ship that", "In the harbour"]


def options(mode: str = "", **more: Any) -> dict[str, Any]:
    worker = {"worker": (sys.executable, str(FAULTY), mode)} if mode else {}
    return {"model": "demo", "engine": "cpu", "device": "torch-cpu", "context": 1024, **worker, **more}


def asked(server: Served, prompt: str | list[int], **more: Any) -> Any:
    """Start an answer of this many tokens; return the open response."""
    fields = {"prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True} | more
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=300)


def streamed(server: Served, prompt: str) -> list[Any]:
    """Return the events of a streamed answer."""
    with asked(server, prompt, stream=True, stream_options={"include_usage": True}) as stream:
        lines = [line.removeprefix(b"data: ").strip() for line in stream if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def warned(events: list[Any]) -> list[str]:
    return [warning for event in events for warning in event.get("warnings", ())]


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with served(**options()) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(plain: Served) -> dict[str, str]:
    """Return each prompt's answer where nothing fails."""
    return {prompt: text(streamed(plain, prompt)) for prompt in PROMPTS}


def all_streamed(server: Served) -> list[list[Any]]:
    """Stream the answers to all prompts at the same time."""
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(lambda prompt: streamed(server, prompt), PROMPTS))


def whole(events: list[Any]) -> None:
    """Fail unless an answer has all its tokens, each once, and one end."""
    assert [event["usage"]["completion_tokens"] for event in events if event.get("usage")] == [LENGTH]
    assert [choice["finish_reason"] for event in events for choice in event["choices"]].count("length") == 1
    assert not any("error" in event for event in events)


def test_the_bundled_model_answers_with_torch(plain: Served, undisturbed: dict[str, str]) -> None:
    result = health(plain)
    assert (result["status"], result["devices"]) == ("ok", ["torch-cpu"])
    with urllib.request.urlopen(plain.url + "/v1/models", timeout=60) as answer:
        name = json.load(answer)["data"][0]["id"]
    with urllib.request.urlopen(plain.url + f"/v1/models/{name}", timeout=60) as answer:
        assert json.load(answer)["device"]["name"] == "torch-cpu"
    message = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    assert plain.post("/v1/chat/completions", message)["usage"]["completion_tokens"] > 0
    assert all(undisturbed.values())


@pytest.mark.parametrize("faults", [1, 2])
def test_streams_go_on_where_torch_fails_in_a_step(
    faults: int, undisturbed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first failure they continue on the device, without a warning; after the second on the CPU, with one."""
    monkeypatch.setenv("FAULTS", str(tmp_path))
    monkeypatch.setenv("FAULTS_MOST", str(faults))
    with served(**options("fails")) as server:
        answers = all_streamed(server)
        assert len(list(tmp_path.iterdir())) == faults
        for prompt, events in zip(PROMPTS, answers, strict=True):
            whole(events)
            assert warned(events) == [MOVED] * (faults - 1)
            assert text(events)[:8] == undisturbed[prompt][:8], "events sent before stay"
        with asked(server, PROMPTS[0]) as later:
            assert "X-Cairn-Warning" not in later.headers and json.load(later)["usage"]["completion_tokens"] == LENGTH
        result = health(server)
        assert result["devices"] == (["torch-cpu"] if faults == 1 else ["cpu"])
        if faults == 1:
            assert not result["troubles"]
        else:
            assert result["troubles"][0].startswith(
                "the device torch-cpu failed twice (the device failed: CUDA error: an"
            )
            assert "more lines" not in result["troubles"][0]
        server.signal()
        assert server.wait() == 0
        assert ("failed twice" in server.stderr()) == (faults == 2)


def test_a_request_that_needs_too_much_memory_ends_alone(undisturbed: dict[str, str]) -> None:
    """Other requests in its steps continue with the tokens that they would have had."""
    with served(**options("short")) as server, ThreadPoolExecutor(1) as threads:
        others = threads.submit(all_streamed, server)
        with pytest.raises(urllib.error.HTTPError) as refused:
            asked(server, [5] * 700)
        error = json.load(refused.value)["error"]
        assert (
            refused.value.code == 500
            and "the device has no memory left: CUDA out of memory. Tried to" in error["message"]
        )
        with asked(server, [5] * 700, stream=True) as stream:
            events = stream.read().decode()
        assert "the device has no memory left" in events and "finish_reason" not in events.replace(
            '"finish_reason":null', ""
        )
        for prompt, answer in zip(PROMPTS, others.result(), strict=True):
            whole(answer)
            assert not warned(answer) and text(answer) == undisturbed[prompt]
        assert health(server)["troubles"] == []
        server.signal()
        assert server.wait() == 0
        assert "the worker is replaced" not in server.stderr()


def test_a_server_whose_device_fails_its_self_test_does_not_start() -> None:
    server = Served(**options("wrong"))
    try:
        assert server.wait(120) == 2
        line = server.stderr().strip().splitlines()[-1]
        assert "device torch-cpu failed its self-test" in line and "or use --device cpu" in line
    finally:
        server.end()
