"""Requests without a name go where most of their prompt is: three servers, a router, and what servers tell of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: nothing can be sealed")

from tests.api.process import FAULTY
from tests.cluster.machines import Cluster, cluster

CHATS = "/v1/chat/completions"


@contextmanager
def servers(folder: Path, *routed: str, **options: Any) -> Iterator[Cluster]:
    """Three servers without a shared store, and a router that goes by KV.

    Their prompts take 0.2 ms a token: on the bare fake engine, computing all would be as soon as computing a task.
    """
    worker = (sys.executable, str(FAULTY), "slow_prompts")
    with cluster(folder, 3, routed=routed, shared_store=None, kv_load="always", worker=worker, **options) as made:
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


def chat(team: int, task: int) -> dict[str, Any]:
    """A sub-agent's first request: its team's long system text, and a task of its own."""
    text = f"Task {task}: find stone number {task * 7919}."
    messages = [{"role": "system", "content": system(team)}, {"role": "user", "content": text}]
    return {"messages": messages, "temperature": 0, "max_tokens": 8, "ignore_eos": True}


def asked(made: Cluster, body: dict[str, Any], key: str = "") -> tuple[int, dict[str, Any], str]:
    """Return the server that answered, the usage, and the text."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with made.open("POST", CHATS, body, None, headers) as response:
        found = json.load(response)
        return made.server_of(response.headers), found["usage"]["cairn"], found["choices"][0]["message"]["content"]


TEAMS, TASKS = 3, 4


def work_through(made: Cluster) -> tuple[int, dict[tuple[int, int], str], list[set[int]]]:
    """Run the teams' tasks; return the tokens computed after each team's first, the texts, and each team's servers."""
    total, texts, by = 0, dict[tuple[int, int], str](), [set[int]() for _ in range(TEAMS)]
    for task in range(TASKS):
        for team in range(TEAMS):
            server, usage, texts[team, task] = asked(made, chat(team, task))
            by[team].add(server)
            total += usage["computed"] if task else 0
    return total, texts, by


def test_one_cluster(tmp_path: Path) -> None:
    """One test, since three servers take most of its time to start."""
    with servers(tmp_path) as made:
        check_sub_agents_go_where_their_beginning_is(made)
        made.kill_router()
        made.routed = ()
        made.start_router()
        check_a_stale_index_fails_nothing_and_what_a_disk_has_is_found(made)


def check_sub_agents_go_where_their_beginning_is(made: Cluster) -> None:
    """By KV only the tasks are computed. By names a team is spread, and the answers are the same."""
    until(lambda: follows(made))
    total, texts, by = work_through(made)
    assert all(len(one) == 1 for one in by), by
    assert total < (TASKS - 1) * TEAMS * 64, "only the tasks are computed, not the teams' texts"
    until(lambda: all(one["kv_blocks"] for one in replicas(made) if one["requests"]))
    made.kill_router()
    made.routed = ["--routing", "names"]
    made.start_router()
    _, same, spread = work_through(made)
    assert same == texts, "the answer does not depend on who computes it"
    assert any(len(one) > 1 for one in spread)


def check_a_stale_index_fails_nothing_and_what_a_disk_has_is_found(made: Cluster) -> None:
    until(lambda: follows(made))
    home, _, first = asked(made, chat(9, 0))
    made.call("POST", "/v1/cache/flush", {}, port=made.ports[home])
    until(lambda: replicas(made)[home]["kv_blocks"] > 0)
    made.kill(home)
    other, _, text = asked(made, chat(9, 0))
    assert other != home and text == first, "the index named a server that is gone"
    until(lambda: replicas(made)[home]["kv_blocks"] == 0)  # a server that died drops out
    made.kill(other)
    made.restart(home)
    until(lambda: replicas(made)[home]["kv_blocks"] > 0)
    server, usage, text = asked(made, chat(9, 0))
    assert server == home and text == first and usage["disk"] > 0, "what its disk has is told again"


def test_tenants_know_nothing_of_each_others_kv(tmp_path: Path) -> None:
    keys = ["key-a", "key-b"]
    with servers(tmp_path, "--admin-key", "admin", api_key=keys, admin_key="admin") as made:
        until(lambda: follows(made))
        for task in range(4):
            _, usage, text = asked(made, chat(0, task), "key-a")
            assert (usage["computed"] < 64) == (task > 0)
        _, usage, other = asked(made, chat(0, 3), "key-b")
        assert usage["computed"] > 500 and other == text
        with pytest.raises(AssertionError, match="401"):
            made.open("GET", "/v1/cache/events", port=made.ports[0], more={"Authorization": "Bearer key-a"})
