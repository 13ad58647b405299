"""A device that fails in the middle of answers, as clients see it over HTTP.

Every worker gives the same tokens here, so each answer is known; `tests/kernels/torch/test_torch_server.py` is about
torch itself.
"""

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

from tests.api.process import FAULTY, Served, served

LENGTH = 40
PROMPTS = [[21 + number, 2, 3] for number in range(4)]
KILLER = [13, 2, 3]
SHORT = "the device has no memory left: 9.00 GiB were wanted"
MOVED = "the device cuda:0 failed twice; the CPU computed the rest of this answer"


def options(mode: str) -> dict[str, Any]:
    return {"model": "demo", "device": "cuda:0", "worker": (sys.executable, str(FAULTY), mode)}


def asked(server: Served, path: str, prompt: list[int], stream: bool) -> Any:
    """Start an answer of this many tokens; return the open response."""
    same = {"prompt": prompt, "temperature": 0.7, "seed": prompt[0], "ignore_eos": True, "stream": stream}
    fields = same | ({"n_predict": LENGTH} if path == "/completion" else {"max_tokens": LENGTH})
    request = urllib.request.Request(
        server.url + path, json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=300)


def streamed(server: Served, prompt: list[int]) -> list[Any]:
    """Return the events of a streamed answer."""
    with asked(server, "/v1/completions", prompt, True) as stream:
        lines = [line.removeprefix(b"data: ").strip() for line in stream if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def whole(server: Served, prompt: list[int]) -> tuple[str, list[str], list[str]]:
    """Return the text of an answer, and the warnings in its header and body."""
    with asked(server, "/v1/completions", prompt, False) as answer:
        body = json.load(answer)
        return body["choices"][0]["text"], answer.headers.get_all("X-Cairn-Warning") or [], body.get("warnings", [])


def text(events: list[Any]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


def warned(events: list[Any]) -> list[list[str]]:
    return [event["warnings"] for event in events if event.get("warnings")]


def health(server: Served) -> Any:
    with urllib.request.urlopen(server.url + "/health", timeout=60) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[list[str]]:
    """Return the answers to the prompts where nothing fails."""
    with served(model="demo") as server:
        yield [text(streamed(server, prompt)) for prompt in PROMPTS]


@pytest.mark.parametrize("faults", [1, 2])
def test_answers_in_flight_are_the_same_after_a_device_failed(
    faults: int, undisturbed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one failure the next worker uses the device again, and no client is told.

    After two the CPU takes over, and every answer that had begun carries a warning.
    """
    for name, value in (("FAIL_AT", 20), ("FAULTS", tmp_path), ("FAULTS_MOST", faults)):
        monkeypatch.setenv(name, str(value))
    warnings = [MOVED] if faults == 2 else []
    with served(**options("device_fails")) as server, ThreadPoolExecutor(2 * len(PROMPTS)) as threads:
        streams = [threads.submit(streamed, server, prompt) for prompt in PROMPTS]
        others = [threads.submit(whole, server, prompt) for prompt in PROMPTS]
        for answer, known in zip(streams, undisturbed, strict=True):
            events = answer.result()
            assert text(events) == known and warned(events) == [warnings] * len(warnings)
            assert not warnings or events[-1]["warnings"] == warnings or events[-1]["choices"] == []
        assert [other.result() for other in others] == [(known, warnings, warnings) for known in undisturbed]
        assert len(list(tmp_path.iterdir())) == faults
        assert whole(server, PROMPTS[0]) == (undisturbed[0], [], []), "later requests get no warning"
        result = health(server)
        assert result["status"] == "ok" and len(result["troubles"]) == len(warnings)
        assert all(
            line.startswith("the device cuda:0 failed twice (the device failed: an") for line in result["troubles"]
        )
        server.signal()
        assert server.wait() == 0
        assert ("the device cuda:0 failed twice" in server.stderr()) == (faults == 2)


def test_a_request_too_large_for_the_device_fails_alone(undisturbed: list[str]) -> None:
    with served(**options("device_short")) as server, ThreadPoolExecutor(len(PROMPTS)) as threads:
        others = [threads.submit(streamed, server, prompt) for prompt in PROMPTS]
        for _ in range(4):  # also in sequence, with no success in between
            with pytest.raises(urllib.error.HTTPError) as refused:
                asked(server, "/v1/completions", KILLER, False)
            assert refused.value.code == 500 and SHORT in json.load(refused.value)["error"]["message"]
            (error,) = [event["error"] for event in streamed(server, KILLER) if "error" in event]
            assert SHORT in error["message"]
        assert [text(other.result()) for other in others] == undisturbed
        assert not any(warned(other.result()) for other in others)
        assert health(server)["troubles"] == []
        server.signal()
        assert server.wait() == 0
        assert "the worker is replaced" not in server.stderr()
