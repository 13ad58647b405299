"""An agent goes on at any server: kill -9 of the one that has it, between turns and in mid-turn, changes no token."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: nothing can be sealed")

from tests.cluster.machines import Cluster, cluster, events

LAG = 1.0
BLOCK = 16
SYSTEM = "Be brief. " + "and remember all of this, word for word, " * 20


def question(number: int, *, stream: bool = False, tokens: int = 40) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"This is question {number}. " + "What do you know of it? " * 4}]
    # No stop at the end of the text: each answer has all its tokens, which the fake engine draws.
    sampling = {"temperature": 0.8, "seed": number, "max_tokens": tokens, "ignore_eos": True}
    return {"messages": messages, **sampling, **({"stream": True} if stream else {})}


def undisturbed(folder: Path, turns: list[dict[str, Any]], **options: Any) -> list[str]:
    """The answers of one server that nothing happens to."""
    with cluster(folder, 1, router=False, **options) as one:
        port = one.ports[0]
        one.call("POST", "/v1/agents", {"id": "ada", "system": SYSTEM}, port)
        bodies = [{name: value for name, value in turn.items() if name != "stream"} for turn in turns]
        found = [one.call("POST", "/v1/agents/ada/turns", body, port) for body in bodies]
        return [answer["choices"][0]["message"]["content"] for answer in found]


def turn_with_kill(made: Cluster, body: dict[str, Any], after: int) -> tuple[str, int]:
    """Stream a turn and kill its server after so many events; return the text and that server."""
    for server in made.servers:
        server.hold.touch()
    with made.open("POST", "/v1/agents/ada/turns", body) as response:
        killed = made.server_of(response.headers)
        text = ""
        for number, event in enumerate(events(response)):
            assert "error" not in event, event
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
            if number == after:
                made.kill(killed)
                for server in made.servers:
                    server.hold.unlink()
    return text, killed


def test_kill_9_of_the_server_that_has_the_agent(
    tmp_path: Path, prove: bool, figure: Callable[[str, str], None]
) -> None:
    kills = int(os.environ.get("CAIRN_KILLS", "0")) or (40 if prove else 3)
    rng = random.Random(11)
    kinds = ["later", "stream", "at once"] + [
        rng.choice(("later", "stream", "at once", "router")) for _ in range(kills)
    ]
    kinds = kinds[:kills]
    turns = [question(number, stream=kind == "stream", tokens=300 if kind == "stream" else 40)
             for number, kind in enumerate(kinds)]  # fmt: skip
    turns = [question(1000), *turns]
    expected = undisturbed(tmp_path, turns)
    (tmp_path / "cluster").mkdir()
    most, at_once, waits = 0, 0, list[float]()
    with cluster(tmp_path / "cluster", 2, holds=True, shared_lag=LAG, kv_load="always") as made:
        made.call("POST", "/v1/agents", {"id": "ada", "system": SYSTEM})
        said = []
        with made.open("POST", "/v1/agents/ada/turns", turns[0]) as response:
            server = made.server_of(response.headers)
            answer = json.load(response)
        said.append(answer["choices"][0]["message"]["content"])
        for kind, body in zip(kinds, turns[1:], strict=True):
            before = made.call("GET", "/v1/agents/ada")["tokens"]
            if kind == "router":
                made.kill_router()
                made.start_router()
                kind = "at once"
            elif kind == "later":
                time.sleep(LAG + 0.8)
            if kind != "stream":
                made.kill(server)
            began = time.monotonic()
            if kind == "stream":
                text, killed = turn_with_kill(made, body, rng.randrange(3, 12))
                said.append(text)
                made.restart(killed)
                server = 1 - killed
            else:
                with made.open("POST", "/v1/agents/ada/turns", body) as response:
                    killed, server = server, made.server_of(response.headers)
                    answer = json.load(response)
                said.append(answer["choices"][0]["message"]["content"])
                report = answer["usage"]["cairn"]
                new = answer["usage"]["prompt_tokens"] - before
                assert server != killed
                if kind == "later":
                    assert report["computed"] <= new + BLOCK, (report, new)
                    assert report["shared"] > 0 or report["pool"] > 0
                    most = max(most, report["computed"] - new)
                else:
                    at_once = max(at_once, report["computed"] - new)
                made.restart(killed)
            waits.append(time.monotonic() - began)
            made.wait_up(2)
        assert said == expected
        history = made.call("GET", "/v1/agents/ada/turns")["data"]
        assert [turn["answer"]["content"] for turn in history] == expected
        assert all(turn["state"] == "finished" for turn in history)
    figure("kills of a server that had the agent (kill -9): the same tokens", f"{kills} of {kills}")
    figure("tokens computed again beside the new message, after the lag; at once", f"at most {most}; {at_once}")
