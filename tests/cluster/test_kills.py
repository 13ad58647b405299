"""An agent goes on at any server: killing the one that has it, between turns or during one, changes no token."""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: nothing can be sealed")

from tests.cluster.conftest import BUCKET, ObjectStore
from tests.cluster.machines import Cluster, cluster, events

LAG = 1.0
BLOCK = 16
AGENT_KILLS = 5
"""Kills in the life of one agent; more turns would not fit the context."""
SYSTEM = "Be brief. " + "and remember all of this, word for word, " * 20


def question(number: int, *, stream: bool = False) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"This is question {number}. " + "What do you know of it? " * 4}]
    # No stop at the end of the text: each answer has all its tokens, which the fake engine draws.
    sampling = {"temperature": 0.8, "seed": number, "max_tokens": 160 if stream else 40, "ignore_eos": True}
    return {"messages": messages, **sampling, **({"stream": True} if stream else {})}


def undisturbed(folder: Path, agents: list[list[dict[str, Any]]]) -> list[list[str]]:
    """Return the answers of one undisturbed server."""
    found = []
    with cluster(folder, 1, router=False) as server:
        port = server.ports[0]
        for number, turns in enumerate(agents):
            server.call("POST", "/v1/agents", {"id": f"ada{number}", "system": SYSTEM}, port)
            bodies = [{name: value for name, value in turn.items() if name != "stream"} for turn in turns]
            answers = [server.call("POST", f"/v1/agents/ada{number}/turns", body, port) for body in bodies]
            found.append([text_of(answer) for answer in answers])
    return found


def turn_with_kill(
    made: Cluster, id: str, body: dict[str, Any], pause: float, kill: Callable[[Cluster, int], None] = Cluster.kill
) -> tuple[str, int]:
    """Stream a turn and kill its server in the middle, or stop it; return the text and that server.

    The server holds the answer back at its 100th token, so it cannot have ended.
    """
    for server in made.servers:
        server.hold.touch()
    with made.open("POST", f"/v1/agents/{id}/turns", body) as response:
        killed, alive = made.server_of(response.headers), True
        text, had = "", 0
        for event in events(response):
            assert "error" not in event, event
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
            if text and alive:
                time.sleep(pause)
                kill(made, killed)
                alive, had = False, len(text)
                for server in made.servers:
                    server.hold.unlink()
    assert had < len(text), "the answer had ended before"
    return text, killed


def wait_shared(made: Cluster, id: str, other: int, tokens: int) -> float:
    """Wait until another server knows that a context's KV is in the store; return the seconds."""
    began = time.monotonic()
    while time.monotonic() - began < 60:
        kv = made.call("GET", f"/v1/agents/{id}", port=made.ports[other])["kv"]
        if kv["shared"] >= (tokens - 1) // BLOCK * BLOCK:
            return time.monotonic() - began
        time.sleep(0.05)
    raise AssertionError(f"of {tokens} tokens only {kv['shared']} came into the store")


class Kills:
    """Runs the turns of agents whose servers are killed, and records the effects."""

    def __init__(self, made: Cluster, rng: random.Random) -> None:
        self._made, self._rng = made, rng
        self.again: dict[str, int] = {"later": 0, "at once": 0}
        """Most tokens that were computed beside the new message."""
        self.lags: list[float] = []
        self.streams: list[float] = []

    def agent(self, id: str, kinds: list[str], turns: list[dict[str, Any]]) -> list[str]:
        """Run the turns of an agent, the first without a kill; return the answers."""
        made = self._made
        made.call("POST", "/v1/agents", {"id": id, "system": SYSTEM})
        with made.open("POST", f"/v1/agents/{id}/turns", turns[0]) as response:
            server, answer = made.server_of(response.headers), json.load(response)
        said = [text_of(answer)]
        for kind, body in zip(kinds, turns[1:], strict=True):
            if kind == "stream":
                began = time.monotonic()
                text, killed = turn_with_kill(made, id, body, self._rng.uniform(0, 0.3))
                self.streams.append(time.monotonic() - began)
                server = 1 - killed
            else:
                text, killed, server = self._between(id, kind, body, server)
            said.append(text)
            made.restart(killed)
            made.wait_up(2)
        return said

    def _between(self, id: str, kind: str, body: dict[str, Any], server: int) -> tuple[str, int, int]:
        """Kill the server of the last turn, then run one.

        Return its text, the killed server, and the one that answered.
        """
        made, killed = self._made, server
        before = made.call("GET", f"/v1/agents/{id}")["tokens"]
        if kind == "router":
            made.kill_router()
            made.start_router()
            kind = "at once"
        elif kind == "later":
            self.lags.append(wait_shared(made, id, 1 - server, before))
        made.kill(server)
        with made.open("POST", f"/v1/agents/{id}/turns", body) as response:
            server, answer = made.server_of(response.headers), json.load(response)
        assert server != killed
        report = answer["usage"]["cairn"]
        computed = report["computed"] - (answer["usage"]["prompt_tokens"] - before)
        self.again[kind] = max(self.again[kind], computed)
        if kind == "later":
            assert computed <= BLOCK, report  # the rest is from the store, or from its own disk of earlier
        return text_of(answer), killed, server


def test_kill_9_of_the_server_that_has_the_agent(
    tmp_path: Path, prove: bool, figure: Callable[[str, str], None]
) -> None:
    kills = int(os.environ.get("CAIRN_KILLS", "0")) or (40 if prove else 2)
    rng = random.Random(11)
    kinds = ["later", "stream", "at once", "router"]
    kinds = (kinds + [rng.choice(kinds) for _ in range(kills)])[:kills]
    groups = [kinds[at : at + AGENT_KILLS] for at in range(0, kills, AGENT_KILLS)]
    turns = [
        [question(0), *(question(number, stream=kind == "stream") for number, kind in enumerate(group, 1))]
        for group in groups
    ]
    expected = undisturbed(tmp_path, turns)
    (tmp_path / "cluster").mkdir()
    with cluster(tmp_path / "cluster", 2, holds=True, shared_lag=LAG, kv_load="always") as made:
        seen = Kills(made, rng)
        for number, group in enumerate(groups):
            assert seen.agent(f"ada{number}", group, turns[number]) == expected[number]
        for number, answers in enumerate(expected):
            history = made.call("GET", f"/v1/agents/ada{number}/turns")["data"]
            assert [turn["answer"]["content"] for turn in history] == answers
            assert all(turn["state"] == "finished" for turn in history)
    figure("kills of a server that had the agent (kill -9): the same tokens", f"{kills} of {kills}")
    figure("seconds until the KV of a turn is in the store, most (shared_lag 1)", f"{max(seen.lags, default=0):.1f}")
    figure("seconds of a turn whose server was killed in mid-stream, longest", f"{max(seen.streams, default=0):.1f}")
    most = f"at most {seen.again['later']}; {seen.again['at once']}"
    figure("tokens computed again beside the new message, after the lag; at once", most)


def test_a_server_that_hangs_in_mid_turn(tmp_path: Path, prove: bool, figure: Callable[[str, str], None]) -> None:
    """SIGSTOP: connections stay open. The stream goes on from another server, and so does the agent."""
    if not prove:
        pytest.skip("make prove-cluster: a server counts as hung after 12 s")
    bodies = [question(0), question(1, stream=True), question(2), question(3, stream=True)]
    (expected,) = undisturbed(tmp_path, [bodies])
    (tmp_path / "cluster").mkdir()
    longest = 0.0
    with cluster(tmp_path / "cluster", 2, holds=True, shared_lag=LAG, kv_load="always") as made:
        made.call("POST", "/v1/agents", {"id": "ada0", "system": SYSTEM})
        said = []
        for body in bodies:
            if "stream" not in body:
                said.append(text_of(made.call("POST", "/v1/agents/ada0/turns", body)))
                continue
            began = time.monotonic()
            text, stopped = turn_with_kill(made, "ada0", body, 0.0, Cluster.stop)
            longest = max(longest, time.monotonic() - began)
            said.append(text)
            made.go_on(stopped)
            made.wait_up(2)
        assert said == expected
    figure("seconds of a turn whose server was stopped (SIGSTOP) in mid-stream, longest", f"{longest:.1f}")


def test_an_agent_goes_on_over_an_object_store(tmp_path: Path, s3: str) -> None:
    turns = [question(number) for number in range(3)]
    with cluster(tmp_path, 2, router=False, shared_store=s3, shared_lag=LAG, kv_load="always") as made:
        one, two = made.ports
        made.call("POST", "/v1/agents", {"id": "ada", "system": SYSTEM}, one)
        said = [made.call("POST", "/v1/agents/ada/turns", turn, one) for turn in turns[:2]]
        made.kill(0)
        said.append(made.call("POST", "/v1/agents/ada/turns", turns[2], two))
        made.call("POST", "/v1/agents", {"id": "eve", "system": SYSTEM}, two)
        alone = [made.call("POST", "/v1/agents/eve/turns", turn, two) for turn in turns]
        assert [text_of(answer) for answer in said] == [text_of(answer) for answer in alone]
        history = made.call("GET", "/v1/agents/ada/turns", port=two)["data"]
        assert [turn["answer"]["content"] for turn in history] == [text_of(answer) for answer in said]


def insisted(made: Cluster, path: str, body: dict[str, Any], port: int) -> tuple[Any, int]:
    """Send a turn with one key until it is answered; return the answer and how often it was refused."""
    refused, end = 0, time.monotonic() + 120
    while True:
        try:
            return made.call("POST", path, body, port, {"Idempotency-Key": f"turn-{body['seed']}"}), refused
        except AssertionError as error:
            assert re.search(": (409|503) ", str(error)) and time.monotonic() < end, error
            refused += 1
            time.sleep(0.5)


def listed(made: Cluster, path: str, port: int, wanted: list[str]) -> list[str]:
    """Return the answers that a server lists once it reads the store again, after the breaker's pause."""
    end = time.monotonic() + 30
    while True:
        answers = [turn["answer"]["content"] for turn in made.call("GET", path, port=port)["data"] if turn["answer"]]
        if len(answers) >= len(wanted) or time.monotonic() > end:
            return answers
        time.sleep(0.2)


def test_kill_9_of_the_object_store(
    tmp_path: Path, lasting_store: ObjectStore, prove: bool, figure: Callable[[str, str], None]
) -> None:
    """A turn that the store cannot take is refused; sent again with its key it runs once, with the same tokens."""
    if not prove:
        pytest.skip("make prove-cluster: a store takes 20 s to start again")
    kills = max(5, int(os.environ.get("CAIRN_KILLS", "0")) // 20)
    rng, refused = random.Random(5), 0
    turns = [[question(0)] for _ in range(0, kills, AGENT_KILLS)]
    for number in range(kills):
        turns[number // AGENT_KILLS].append(question(1 + number % AGENT_KILLS))
    expected = undisturbed(tmp_path, turns)
    (tmp_path / "cluster").mkdir()

    def outage(pause: float) -> None:
        time.sleep(pause)
        lasting_store.kill()
        time.sleep(1)
        lasting_store.start()

    with cluster(tmp_path / "cluster", 2, router=False, shared_store=BUCKET, shared_lag=LAG) as made:
        for agent, bodies in enumerate(turns):
            path = f"/v1/agents/ada{agent}/turns"
            made.call("POST", "/v1/agents", {"id": f"ada{agent}", "system": SYSTEM}, made.ports[0])
            said = [text_of(made.call("POST", path, bodies[0], made.ports[0]))]
            for number, body in enumerate(bodies[1:], 1):
                failing = threading.Thread(target=outage, args=(rng.uniform(0, 0.3),))
                failing.start()
                answer, times = insisted(made, path, body, made.ports[number % 2])
                failing.join()
                said.append(text_of(answer))
                refused += times
            assert said == expected[agent]
            for port in made.ports:
                assert listed(made, path, port, said) == said
    figure(
        "kills of the object store (kill -9): the same tokens",
        f"{kills} of {kills}; {refused} times a turn was refused",
    )


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text
