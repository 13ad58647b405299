"""Requests without a name go where most of their prompt is: three servers, a router, and what servers tell of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: nothing can be sealed")

from tests.cluster.machines import Cluster, cluster

CHATS = "/v1/chat/completions"


@contextmanager
def servers(folder: Path, way: str, **options: Any) -> Iterator[Cluster]:
    routed = [*options.pop("routed", ()), "--routing", way]
    with cluster(folder, 3, routed=routed, shared_store=None, kv_load="always", **options) as made:
        yield made


def until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


def replicas(made: Cluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = made.call("GET", "/router/replicas")["data"]
    return found


def follows(made: Cluster) -> bool:
    return all(one["kv_followed"] for one in replicas(made))


def system(number: int) -> str:
    return f"Team {number}. " + "Every stone of the cairn has its place, and nobody moves it. " * 40


def chat(team: int, task: int, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """A sub-agent's first request: its team's long system text, and a task of its own."""
    task_text = f"Task {task}: find stone number {task * 7919}."
    messages = [{"role": "system", "content": system(team)}, {"role": "user", "content": task_text}]
    return {"messages": messages, "temperature": 0, "max_tokens": 8, "ignore_eos": True}


def asked(
    made: Cluster, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any], str]:
    """Return the server that answered, the usage, and the text."""
    import json

    with made.open("POST", CHATS, body, None, headers) as response:
        found = json.load(response)
        return made.server_of(response.headers), found["usage"]["cairn"], found["choices"][0]["message"]["content"]


def test_sub_agents_go_where_their_beginning_is(tmp_path: Path) -> None:
    with servers(tmp_path, "kv") as made:
        until(lambda: follows(made))
        by, computed, texts = dict[int, set[int]](), 0, dict[tuple[int, int], str]()
        for task in range(4):
            for team in range(4):
                server, usage, texts[team, task] = asked(made, chat(team, task))
                by.setdefault(team, set()).add(server)
                computed += usage["computed"] if task else 0
        assert all(len(one) == 1 for one in by.values()), by
        assert computed < 12 * 60, "only the tasks are computed, not the teams' texts"
        until(lambda: all(one["kv_blocks"] for one in replicas(made) if one["requests"]))
