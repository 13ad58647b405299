"""`cairn serve --device mlx-cpu`: an agent whose server is killed continues with the same tokens, from KV on disk."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.api.process import Served, served

pytest.importorskip("mlx.core", reason="mlx is not installed: no server computes with it")

TIDE = "The tide comes in twice a day, and the harbour lives by it. " * 8


def turn(server: Served, text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": 24, "temperature": 0}
    result: dict[str, Any] = server.post("/v1/agents/ada/turns", body)
    return result


def said(answer: dict[str, Any]) -> tuple[str, int]:
    return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]


def stored(folder: Path) -> int:
    """Return the bytes in a folder of KV; files may come and go meanwhile."""
    return sum(os.path.getsize(place) for place in folder.rglob("*") if os.path.isfile(place))


def options(folder: Path, **more: Any) -> dict[str, Any]:
    kept = {"kv_dir": str(folder / "kv"), "agents_dir": str(folder / "agents")}
    return {"model": "demo", "engine": "cpu", "device": "mlx-cpu", "context": 1024, "kv_load": "always", **kept, **more}


def test_an_agent_goes_on_after_kill_9(tmp_path: Path, prove: bool) -> None:
    if not prove:
        pytest.skip("three servers load a model one after the other: only with --prove")
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    with served(**options(killed)) as server:
        server.post("/v1/agents", {"id": "ada"})
        first = turn(server, TIDE)
        before = first["usage"]["total_tokens"]
        until = time.monotonic() + 120
        while not stored(killed / "kv") and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(1)  # pending writes may end, or be cut off
        body = {"prompt": "Once upon a time", "n_predict": 900, "stream": True, "ignore_eos": True}
        request = urllib.request.Request(
            server.url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as stream:
            assert stream.readline().startswith(b"data:")
            server.signal_all(signal.SIGKILL)
        server.wait()
    with served(**options(killed)) as server:
        with urllib.request.urlopen(server.url + "/health", timeout=60) as response:
            assert "mlx-cpu" in response.read().decode()
        second = turn(server, "And the boats?")
    cache = second["usage"]["cairn"]
    assert cache["disk"] >= 64 and cache["computed"] <= second["usage"]["prompt_tokens"] - cache["disk"], (
        cache,
        before,
    )

    with served(**options(whole, kv_load="never")) as server:
        server.post("/v1/agents", {"id": "ada"})
        assert [said(turn(server, TIDE)), said(turn(server, "And the boats?"))] == [said(first), said(second)]
