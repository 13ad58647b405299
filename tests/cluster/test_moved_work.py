"""Work of several steps goes on at another server: kill -9 of the one that has it changes no output."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: nothing can be sealed")

from cairn.cluster.folder import TEMPORARY
from tests.cluster.machines import Cluster, cluster, events
from tests.workflows.test_checks import node

DIGIT = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
LIST = {
    "type": "object",
    "properties": {"steps": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 3}},
    "required": ["steps"],
}
SAMPLING = {"temperature": 0.8, "max_tokens": 400}
LONG = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 60, "maxItems": 60}},
    "required": ["words"],
}
"""More than the tokens at which a server holds an answer."""
FLOW: dict[str, Any] = {
    "name": "counting",
    "inputs": {"task": None},
    "nodes": [
        node("plan", "Plan {{ inputs.task }}", output=LIST, sampling=SAMPLING),
        node("code", "Count {{ item }}", each={"in": "plan.steps"}, output=DIGIT, sampling=SAMPLING),
        node("talk", "Talk of {{ code }}", output=LONG, sampling=SAMPLING),
        node("sum", "Sum {{ code }} after {{ talk }}", output=DIGIT, sampling=SAMPLING),
    ],
    "merge": {"precedence": ["sum", "code"]},
}
RUN = {"workflow": FLOW, "inputs": {"task": "x"}, "seed": 4}
RUNS = "/v1/workflows/runs"


TEAM = {
    "id": "review",
    "system": "You review one change. " + "Remember all of this, word for word. " * 10,
    "members": [
        {"name": name, "role": f"You are {name}.", "max_tokens": 130, "temperature": 0.8} for name in ("ada", "bob")
    ],
    "seed": 7,
}
TEAMS = "/v1/teams"


CHAT = {"temperature": 0.8, "max_tokens": 60, "ignore_eos": True}


class Chatted(NamedTuple):
    """A conversation that was sent again as a whole each time."""

    answers: list[str]
    sizes: list[int]
    """Tokens of the prompts."""


class Alone(NamedTuple):
    """What a server says that nothing happens to."""

    run: dict[str, Any]
    said: list[str]
    chat: Chatted


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    with cluster(tmp_path_factory.mktemp("alone"), 1, router=False) as one:
        (port,) = one.ports
        run = one.call("POST", RUNS, RUN, port)
        one.call("POST", TEAMS, TEAM, port)
        one.call("POST", f"{TEAMS}/review/rounds", {"content": "What now?", "rounds": 2}, port)
        return Alone(run, said(one, port), chatted(one, [port] * 5))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three servers behind a router."""
    with cluster(tmp_path_factory.mktemp("shared"), 3, holds=True) as found:
        yield found


def said(made: Cluster, port: int | None = None) -> list[str]:
    """Return what a team has said, in order."""
    entries = made.call("GET", f"{TEAMS}/review/transcript", port=port)["entries"]
    return [f"{one['member']}: {one['content']}" for one in entries if one["type"] == "turn"]


def chatted(made: Cluster, ports: list[int], *, agent: str = "", store: Path | None = None) -> Chatted:
    """Have a conversation with one port after another. `store`: where each answer's tokens have to come first."""
    messages: list[dict[str, str]] = []
    headers = {"X-Cairn-Agent": agent} if agent else {}
    found = Chatted([], [])
    for number, port in enumerate(ports):
        messages.append({"role": "user", "content": f"Question {number}: what of it?"})
        before = replays(store)
        answer = made.call("POST", "/v1/chat/completions", CHAT | {"messages": messages, "seed": number}, port, headers)
        found.answers.append(answer["choices"][0]["message"]["content"])
        found.sizes.append(answer["usage"]["prompt_tokens"])
        messages.append({"role": "assistant", "content": found.answers[-1]})
        # Before the answer's end on a machine that has time; an ordinary chat waits for the store no longer than that.
        wait_for(lambda before=before: store is None or replays(store) > before)  # type: ignore[misc]
    return found


def replays(store: Path | None) -> set[Path]:
    """Return the files of answers in a shared folder."""
    files = () if store is None else (store / "replays").glob("*/*")
    return {file for file in files if not file.name.startswith(TEMPORARY)}


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def outputs(run: dict[str, Any]) -> dict[str, Any]:
    return {key: (one["state"], one["output"]) for key, one in run["nodes"].items()} | {"": run["result"]}


def hold(made: Cluster, held: bool) -> None:
    for server in made.servers:
        server.hold.touch() if held else server.hold.unlink(missing_ok=True)


def until_talk(found: Any, told: list[dict[str, Any]]) -> None:
    """Read events until the node that is held has said something."""
    for event in found:
        told.append(event)
        if event["type"] == "node.delta" and event["key"] == "talk":
            return
    raise AssertionError(f"the run ended before: {told[-3:]}")


def test_a_run_whose_server_is_killed_ends_at_another_with_the_same_outputs(made: Cluster, alone: Alone) -> None:
    hold(made, True)
    told: list[dict[str, Any]] = []
    with made.open("POST", RUNS, RUN | {"stream": True}) as response:
        run, killed = response.headers["x-cairn-run"], made.server_of(response.headers)
        found = events(response)
        until_talk(found, told)
        made.kill(killed)
        hold(made, False)
        told += found
    assert told[-1]["type"] == "run.done" and told[-1]["result"] == alone.run["result"]
    resumed = [event["resumed"] for event in told if event["type"] == "run.started"]
    assert resumed == [False, True]
    begun = [event["key"] for event in told if event["type"] == "node.started"]
    assert begun.count("talk") == 2, "it was being answered"
    assert all(begun.count(key) == 1 for key in {*begun} - {"talk"}), "what was done is not asked again"
    for port in made.ports:
        if port != made.ports[killed]:
            assert run in [one["id"] for one in made.call("GET", RUNS, port=port)["data"]]
            assert outputs(made.call("GET", f"{RUNS}/{run}", port=port)) == outputs(alone.run)
    made.restart(killed)
    made.wait_up(3)
    assert outputs(made.call("GET", f"{RUNS}/{run}", port=made.ports[killed])) == outputs(alone.run)


def test_a_server_that_was_stopped_cannot_go_on_with_a_run_that_was_taken_over(made: Cluster, alone: Alone) -> None:
    one, two, _ = made.ports
    hold(made, True)
    told: list[dict[str, Any]] = []
    with made.open("POST", RUNS, RUN | {"stream": True}, one) as response:
        path = f"{RUNS}/{response.headers['x-cairn-run']}"
        found = events(response)
        until_talk(found, told)
        assert made.call("GET", path, port=two)["state"] == "running"
        with pytest.raises(AssertionError, match=r": 409 .*turn_running"):
            made.call("POST", f"{path}/interrupt", port=two)
        os.killpg(made.servers[0].pid, signal.SIGSTOP)
        hold(made, False)
        taken = resumed(made, path, two)
        os.killpg(made.servers[0].pid, signal.SIGCONT)
        told += found
    assert outputs(taken) == outputs(alone.run)
    assert told[-1].get("error"), "its client gets an error"
    done = {event["key"] for event in told if event.get("type") == "node.done"}
    assert "talk" not in done, "nothing is told that is not in the store"
    assert outputs(made.call("GET", path, port=one)) == outputs(alone.run)


def resumed(made: Cluster, path: str, port: int) -> dict[str, Any]:
    """Return a run that a server goes on with once the one that has it is silent."""
    end = time.monotonic() + 60
    while True:
        try:
            found: dict[str, Any] = made.call("POST", f"{path}/resume", {}, port)
            return found
        except AssertionError as error:
            assert ": 409 " in str(error) and "turn_running" in str(error) and time.monotonic() < end, error
            time.sleep(0.3)


def test_a_team_goes_on_at_another_server_in_the_midst_of_a_round(made: Cluster, alone: Alone) -> None:
    hold(made, False)
    made.call("POST", TEAMS, TEAM)
    path, told = f"{TEAMS}/review/rounds", list[dict[str, Any]]()
    with made.open("POST", path, {"content": "What now?", "stream": True}) as response:
        first = made.server_of(response.headers)
        told += events(response)
    assert told[-1]["type"] == "round.done"
    hold(made, True)
    with made.open("POST", path, {"stream": True}) as response:
        assert made.server_of(response.headers) == first
        for event in events(response):
            if event["type"] == "turn.delta":
                made.kill(first)
                break
    hold(made, False)
    made.call("POST", path, {})
    assert len(alone.said) == 4
    others = [port for port in made.ports if port != made.ports[first]]
    assert said(made, others[0]) == said(made, others[1]) == said(made) == alone.said
    made.restart(first)
    made.wait_up(3)
    assert said(made, made.ports[first]) == alone.said
    for member in ("ada", "bob"):
        turns = made.call("GET", f"/v1/agents/review.{member}/turns", port=others[0])["data"]
        assert [turn["state"] for turn in turns if turn["current"]] == ["finished"] * 2
    made.call("DELETE", f"{TEAMS}/review")
    for port in made.ports:
        with pytest.raises(AssertionError, match=": 404 "):
            made.call("GET", f"{TEAMS}/review", port=port)


@pytest.mark.parametrize("agent", ["", "session"])
def test_an_ordinary_chat_has_the_same_tokens_at_another_server(made: Cluster, alone: Alone, agent: str) -> None:
    one, two, three = made.ports
    assert chatted(made, [two, three, two, one, one], agent=agent, store=made.store) == alone.chat


def test_an_answer_that_is_not_to_be_stored_is_in_no_store(made: Cluster) -> None:
    messages = [{"role": "user", "content": "Keep nothing of this."}]
    before = replays(made.store)
    made.call("POST", "/v1/chat/completions", CHAT | {"messages": messages, "store": False})
    made.call("POST", "/v1/chat/completions", CHAT | {"messages": [*messages, *messages]})
    wait_for(lambda: len(replays(made.store)) > len(before))
    time.sleep(0.2)
    assert len(replays(made.store)) == len(before) + 1, "of the second alone"
