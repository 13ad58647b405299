"""`cairn chat --agent` where the server stops, comes back, or refuses."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.cli import main
from cairn.cli.common.output import printable
from cairn.cli.connection.client import Client
from cairn.cli.conversation import agent_conversation
from cairn.cli.conversation.agent_conversation import AgentConversation
from cairn.types.errors import CairnError, Unavailable
from tests.api.process import served
from tests.cli.test_cli import Terminal

HALF = b'data: {"choices": [{"index": 0, "delta": {"content": "half"}}]}\n\n'
REST = b'data: {"choices": [{"index": 0, "delta": {"content": " and half"}, "finish_reason": "stop"}]}\n\n'
SECOND = {"role": "user", "content": "two"}


class House:
    """A server with one agent, which stops in the middle of the answer to "two"."""

    def __init__(self) -> None:
        self.turns: list[dict[str, Any]] = []
        self.head = 0
        self.down = False
        self.busy = 0
        self.mute = False
        """Whether the server sends nothing, so that Ctrl-C comes before the answer begins."""
        self.orders: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        order = f"{request.method} {request.url.path}"
        self.orders.append(order)
        if self.down:
            raise httpx.ConnectError("refused") from ConnectionRefusedError()
        if order.startswith("POST /v1/requests/"):
            return httpx.Response(200, json={})
        results: dict[str, Any] = {
            "GET /v1/models": {"data": [{"id": "m"}]},
            "GET /v1/agents/ada": {"head": self.head, "tokens": 5, "state": "idle"},
            "GET /v1/agents/ada/turns": {"data": self.turns},
        }
        if order in results:
            return httpx.Response(200, json=results[order])
        return self._change(order, json.loads(request.content))

    def _change(self, order: str, body: dict[str, Any]) -> httpx.Response:
        if order.endswith("/turns"):
            lost = body["messages"] == [SECOND]
            state, parent = "interrupted" if lost else "finished", self.head
            self.head = len(self.turns) + 1
            turn = {"number": self.head, "parent": parent, "messages": body["messages"], "state": state}
            self.turns.append(turn | {"request": f"q{self.head}"})
            if self.mute:
                self.mute = False
                raise KeyboardInterrupt
            return self._answer(self._lost() if lost else iter((HALF, REST, b"data: [DONE]\n\n")))
        if order.endswith("/resume"):
            self.turns[-1]["state"] = "finished"
            return self._answer(iter((HALF, REST, b"data: [DONE]\n\n")))
        if self.busy:
            self.busy -= 1
            return httpx.Response(409, json={"error": {"message": "not yet", "code": "conflict"}})
        self.head = body["turn"]
        return httpx.Response(200, json={})

    def _answer(self, content: Iterator[bytes]) -> httpx.Response:
        return httpx.Response(200, content=content, headers={"x-request-id": "r1"})

    def _lost(self) -> Iterator[bytes]:
        yield HALF
        self.down = True
        raise httpx.ReadError("reset")


def talk(house: House, monkeypatch: pytest.MonkeyPatch, *lines: str) -> str:
    """Return the stderr of a conversation; a line "up" restarts the server."""
    remaining = iter(lines)

    def line(_: str = "") -> str:
        text = next(remaining, None)
        if text == "up":
            house.down = False
            return line()
        if text is None:
            raise EOFError
        return text

    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr(agent_conversation, "_WAITS", (0.0, 0.0))
    client = Client("http://h")
    client.close()
    client._http = httpx.Client(transport=httpx.MockTransport(house))
    with client, contextlib.redirect_stderr(io.StringIO()) as said:
        AgentConversation(client, "ada", {}).run()
    assert next(remaining, None) is None, "the conversation ended early"
    return said.getvalue()


def saved(path: Path) -> list[str]:
    return [message["content"] for message in json.loads(path.read_text())]


def test_the_chat_goes_on_when_the_server_goes_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    house = House()
    file = tmp_path / "said"
    said = talk(house, monkeypatch, "one", "two", "/resume", "/undo", "three", "up", "/undo", f"/save {file}")
    assert "the connection to http://h was lost: reset" in said
    assert said.count("no server answers at http://h; start one with: cairn serve") == 4
    assert said.count("your question was not taken back yet") == 1
    assert said.count("(your question was taken back)") == 1, "the third, which never arrived"
    assert said.count("took back: two") == 1
    assert house.head == 1
    assert saved(file) == ["one", "half and half"], "the server still has it"


def test_a_resumed_answer_is_saved_and_can_be_taken_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    house = House()
    first, second = tmp_path / "first", tmp_path / "second"
    said = talk(
        house, monkeypatch, "one", "two", "up", "/resume", f"/save {first}", "/undo", f"/save {second}", "/undo"
    )
    assert saved(first) == ["one", "half and half", "two", "half and half"]
    assert saved(second) == ["one", "half and half"]
    assert "took back: one" in said and house.head == 0


def test_a_stopped_answer_takes_nothing_else_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    house = House()

    def stopped() -> Iterator[bytes]:
        yield HALF
        raise KeyboardInterrupt

    house._lost = stopped  # type: ignore[method-assign]
    file = tmp_path / "said"
    said = talk(house, monkeypatch, "one", "two", f"/save {file}")
    assert "POST /v1/requests/r1/cancel" in house.orders
    assert "took back: two" in said and saved(file) == ["one", "half and half"]


def test_a_question_stopped_before_its_answer_began_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question is in the server's log by then, and the next one would be answered after it."""
    house = House()
    house.mute = True
    said = talk(house, monkeypatch, "one")
    assert "POST /v1/requests/q1/cancel" in house.orders and "took back: one" in said and house.head == 0


def test_the_turn_of_another_client_is_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """That turn began after the command had read the head, so the question was refused."""
    house = House()
    real = house._answer

    def overtaken(content: Iterator[bytes]) -> httpx.Response:
        house.turns[-1]["messages"] = [{"role": "user", "content": "of another"}]
        real(content)
        return httpx.Response(409, json={"error": {"message": "turn 1 is running", "code": "conflict"}})

    house._answer = overtaken  # type: ignore[method-assign]
    said = talk(house, monkeypatch, "one")
    assert "turn 1 is running" in said and "took back" not in said.replace("was taken back", "")
    assert house.head == 1 and not any("cancel" in order or "rollback" in order for order in house.orders)


def test_a_question_that_got_an_empty_answer_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    end = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    house._lost = lambda: iter((end,))  # type: ignore[method-assign]
    said = talk(house, monkeypatch, "one", "two")
    assert "took back: two" in said and house.head == 1


@pytest.mark.parametrize(("busy", "taken"), [(2, True), (9, False)])
def test_a_turn_that_is_still_ending_is_waited_for(monkeypatch: pytest.MonkeyPatch, busy: int, taken: bool) -> None:
    """Recognised by the error's code, not by its wording."""
    house = House()
    house.turns, house.head, house.busy = (
        [{"number": 1, "parent": 0, "messages": [SECOND], "state": "running"}],
        1,
        busy,
    )
    said = talk(house, monkeypatch, "/undo", "/help")
    assert ("took back: two" in said) == taken and ("not yet" in said) != taken


def test_a_missing_agent_is_created_whatever_the_servers_wording() -> None:
    asked: list[tuple[str, str]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.path))
        if request.method == "GET":
            return httpx.Response(404, json={"error": {"message": "nobody of that name", "code": "not_found"}})
        return httpx.Response(201, json={"head": 0, "tokens": 0, "state": "idle"})

    client = Client("http://h")
    client.close()
    client._http = httpx.Client(transport=httpx.MockTransport(handler))
    with client:
        AgentConversation(client, "ada", {})
    assert asked == [("GET", "/v1/agents/ada"), ("POST", "/v1/agents")]
    client._http = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(503)))
    with client, pytest.raises(CairnError, match="the server answered 503"):
        AgentConversation(client, "ada", {})


def test_resume_against_a_real_server(tmp_path: Path) -> None:
    file = tmp_path / "said"
    with served(max_running=4) as server, Client(server.url) as client:
        server.post("/v1/agents", {"id": "ada"})
        stream = client.turn("ada", {"role": "user", "content": "Tell me."}, max_tokens=1900, ignore_eos=True)
        next(stream)
        client.post(f"/v1/requests/{stream.request}/cancel", {})
        stream.close()
        end = time.monotonic() + 60
        while client.get("/v1/agents/ada")["state"] != "interrupted":
            assert time.monotonic() < end
            time.sleep(0.05)
        out, err = io.StringIO(), io.StringIO()
        lines = f"/resume\n/save {file}\n/undo\n/save {file}2\n"
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as left,
        ):
            patch.setattr(sys, "stdin", io.StringIO(lines))
            main(["chat", "--agent", "ada", "--host", server.url])
    assert not left.value.code, err.getvalue()
    question, answer = json.loads(file.read_text())
    assert question == {"role": "user", "content": "Tell me."}
    assert answer["role"] == "assistant" and printable(answer["content"]).strip() in out.getvalue()
    assert json.loads(Path(f"{file}2").read_text()) == []
    assert "took back: Tell me." in err.getvalue()


@pytest.mark.parametrize(
    ("way", "begins"), [("d", ["system"]), ("s", ["system", "user", "assistant"]), ("n", ["system"])]
)
def test_a_full_agent_offers_three_ways_on(way: str, begins: list[str]) -> None:
    """The full agent stays as it is, and a new one continues."""
    with served(context=256) as server:
        server.post("/v1/agents", {"id": "ada", "system": "Be kind."})
        body = {"messages": [{"role": "user", "content": "Tell me."}], "max_tokens": 999, "ignore_eos": True}
        server.post("/v1/agents/ada/turns", body)
        with Terminal("chat", "--agent", "ada", "--host", server.url) as terminal:
            terminal.expect("> ")
            terminal.type("And then?\r")
            terminal.expect("d, s or n:")
            terminal.type(way + "\r")
            terminal.expect("(agent ada stays as it is; this goes on as agent ada-2)")
            terminal.expect("tokens in")
            terminal.type("/bye\r")
            assert terminal.process.wait(60) == 0
        with Client(server.url) as client:
            assert client.get("/v1/agents/ada")["turns"] == 1
            result = client.get("/v1/agents/ada-2")
            turns = client.get("/v1/agents/ada-2/turns")["data"]
    assert [message["role"] for message in result["messages"]] == begins and result["messages"][0][
        "content"
    ] == "Be kind."
    assert [message["content"] for turn in turns for message in turn["messages"]] == ["And then?"]


def test_a_client_is_closed_behind_its_with() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(Unavailable):
        client.get("/v1/models")
    assert client._http.is_closed
