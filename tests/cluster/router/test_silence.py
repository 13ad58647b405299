"""A replica that says nothing more: its requests are answered elsewhere; one that is merely slow keeps them."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any, cast

import pytest

from cairn.cluster.router.lists import fetch
from cairn.cluster.router.replicas import Replica, Replicas
from cairn.cluster.router.upstream import KEEPALIVE, Cause, UpstreamLost, UpstreamPool, _cause, request_bytes
from tests.cluster.router.stubs import Got, Stub, as_json, ask, event, head, named, piece, routed, text_of

CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
TEXT = "The answer is forty-two, as everybody knows."
WAIT = 60.0
"""Seconds after which a request counts as hung: far more than a slow machine takes."""


async def unanswered(checked: Replicas, replica: Replica, checks: int = 1) -> None:
    """Check a replica that hangs, without the usual patience."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("cairn.cluster.router.replicas.CHECK_TIMEOUT", 0.05)
        for _ in range(checks):
            await checked.check(replica)


class Held:
    """An answer that the first replica asked for holds back until it is told to go on."""

    def __init__(self) -> None:
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()
        self.stub: Stub | None = None

    async def __call__(
        self, stub: Stub, path: str, headers: dict[bytes, bytes], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        if self.stub is None:
            self.stub = stub
            self.begun.set()
            await self.goes_on.wait()
        await as_json(writer, {"by": stub.name})


async def test_a_request_at_a_replica_that_hangs_is_answered_by_another() -> None:
    held = Held()
    async with routed(held, held) as (app, stubs):
        asked = asyncio.create_task(ask(app, "POST", "/v1/chat/completions", CHAT))
        await held.begun.wait()
        hung = app.replicas.all[stubs.index(cast(Stub, held.stub))]
        cast(Stub, held.stub).hung = True
        await unanswered(app.replicas, hung)
        assert hung.up and not asked.done(), "one check without an answer may be chance"
        await unanswered(app.replicas, hung)
        got = await asyncio.wait_for(asked, WAIT)
        assert not hung.up and got.status == 200
        assert got.json()["by"] == next(stub.name for stub in stubs if stub is not held.stub)
        assert [len(stub.asked) for stub in stubs] == [1, 1], "it is not sent to the hung one again"


async def test_a_stream_of_a_replica_that_hangs_goes_on_from_another() -> None:
    first: list[Stub] = []

    async def answers(
        stub: Stub, path: str, headers: dict[bytes, bytes], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(head(200, "text/event-stream", None) + piece(event("", role="assistant")))
        if not first:
            first.append(stub)
            writer.write(piece(event(TEXT[:9])))
            await writer.drain()
            stub.hung = True
            await asyncio.Event().wait()
        writer.write(piece(event(TEXT)) + piece(event(finish="stop")) + piece(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()

    async def hang(got: Got) -> None:
        if text_of(got) == TEXT[:9]:
            had.set()

    had = asyncio.Event()
    async with routed(answers, answers) as (app, stubs):
        asked = asyncio.create_task(
            ask(app, "POST", "/v1/agents/a/turns", {"messages": [], "stream": True}, on_piece=hang)
        )
        await had.wait()
        await unanswered(app.replicas, app.replicas.all[stubs.index(first[0])], 2)
        got = await asyncio.wait_for(asked, WAIT)
        assert text_of(got) == TEXT and b"error" not in got.body and app.counts.followed == 1


async def test_a_slow_replica_that_answers_its_checks_keeps_its_requests() -> None:
    held = Held()
    async with routed(held, held) as (app, stubs):
        asked = asyncio.create_task(ask(app, "POST", "/v1/chat/completions", CHAT))
        await held.begun.wait()
        slow = app.replicas.all[stubs.index(cast(Stub, held.stub))]
        for _ in range(5):
            await app.replicas.check(slow)
        assert slow.up and not asked.done()
        held.goes_on.set()
        assert (await asked).json()["by"] == cast(Stub, held.stub).name
        assert sum(len(stub.asked) for stub in stubs) == 1


async def test_a_replica_that_closed_its_port_ends_what_it_has_in_hand() -> None:
    held = Held()
    async with routed(held, held) as (app, stubs):
        asked = asyncio.create_task(ask(app, "POST", "/v1/chat/completions", CHAT))
        await held.begun.wait()
        ending = app.replicas.all[stubs.index(cast(Stub, held.stub))]
        cast(Stub, held.stub).close_port()
        ending.pool.close()
        await app.replicas.check(ending)
        assert not ending.up and not asked.done()
        held.goes_on.set()
        assert (await asked).json()["by"] == cast(Stub, held.stub).name


async def test_what_was_sent_to_a_silent_replica_that_is_down_is_cut_too() -> None:
    """A request whose replica was chosen before it went down."""
    async with routed(named) as (app, stubs):
        replica = app.replicas.all[0]
        stubs[0].hung, replica.up = True, False
        sent = asyncio.create_task(replica.pool.exchange(request_bytes("GET", b"/v1/models", replica.host, (), b"")))
        await unanswered(app.replicas, replica, 2)
        with pytest.raises(UpstreamLost, match="silent") as lost:
            await asyncio.wait_for(sent, WAIT)
        assert lost.value.sent and lost.value.cause == "silent"


async def test_a_removed_replica_is_watched_until_its_requests_end(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    async with routed(held) as (app, stubs):
        asked = asyncio.create_task(ask(app, "POST", "/v1/agents/a/fork", {}))
        await held.begun.wait()
        stubs[0].hung = True
        assert not await app.replicas.remove(app.replicas.all[0], 0)
        monkeypatch.setattr("cairn.cluster.router.replicas.CHECK_TIMEOUT", 0.05)
        app.replicas.start()
        got = await asyncio.wait_for(asked, WAIT)
        assert got.status == 503 and "while it had the request" in got.json()["error"]["message"]


async def test_a_list_is_made_without_a_replica_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lists(
        stub: Stub, path: str, headers: dict[bytes, bytes], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        if stub.name == "s0":
            begun.set()
            await asyncio.Event().wait()
        await as_json(writer, {"object": "list", "data": [{"id": "a", "created": 1}], "has_more": False})

    begun = asyncio.Event()
    async with routed(lists, lists) as (app, stubs):
        asked = asyncio.create_task(ask(app, "GET", "/v1/agents"))
        await begun.wait()
        stubs[0].hung = True
        await unanswered(app.replicas, app.replicas.all[0], 2)
        got = await asyncio.wait_for(asked, WAIT)
        assert got.status == 200 and [one["id"] for one in got.json()["data"]] == ["a"]
        # A replica that answers its checks and hangs with lists alone costs the list a bounded time.
        monkeypatch.setattr("cairn.cluster.router.lists.PAGE_SECONDS", 0.05)
        with pytest.raises(UpstreamLost, match=r"did not answer /v1/agents in 0.05 s"):
            await asyncio.wait_for(fetch(app.replicas.all[0], b"/v1/agents", ()), WAIT)


async def test_connections_have_keepalive() -> None:
    async with routed(named) as (app, _):
        connection = await app.replicas.all[0].pool.take()
        raw = cast(Any, connection)._transport.get_extra_info("socket")
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = {name: value for name, value in KEEPALIVE if hasattr(socket, name)}
        assert len(options) == 3, "the system has another name for one"
        for name, value in options.items():
            assert raw.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value
        connection.abort()


async def test_an_idle_connection_that_closes_as_a_check_comes_is_no_death() -> None:
    async with routed(named) as (app, stubs):
        stubs[0].drops = 1
        await app.replicas.check(app.replicas.all[0])
        assert app.replicas.all[0].up and not stubs[0].drops


async def test_a_way_without_an_answer_is_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("cairn.cluster.router.upstream.CONNECT_SECONDS", 0.01)
    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
    with pytest.raises(UpstreamLost, match=r"no connection in 0.01 s") as lost:
        await UpstreamPool("127.0.0.1", 9).take()
    assert (lost.value.sent, lost.value.cause) == (False, "silent")
    causes: list[tuple[int | None, Cause]] = [
        (errno.EHOSTUNREACH, "silent"),
        (errno.ECONNREFUSED, "closed"),
        (errno.EMFILE, "local"),
        (None, "closed"),
    ]
    for number, cause in causes:
        assert _cause(number) == cause


async def test_a_router_without_descriptors_takes_no_replica_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("cairn.cluster.router.failover.PATIENCE", 0.5)
    async with routed(named) as (app, _):
        replica = app.replicas.all[0]
        replica.pool.close()
        with monkeypatch.context() as patched:
            patched.setattr(asyncio.get_running_loop(), "create_connection", none_left)
            for _ in range(3):
                await app.replicas.check(replica)
            got = await asyncio.wait_for(ask(app, "GET", "/v1/agents/a"), WAIT)
            assert app.counts.retries <= 3, "it pauses"
            assert got.status == 503 and "Too many open files" in got.json()["error"]["message"]
        assert replica.up and (await ask(app, "GET", "/v1/agents/a")).status == 200


async def test_a_connection_that_opens_as_the_others_are_cut_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    opens = loop.create_connection

    async def slowly(*how: Any) -> object:
        made = await opens(*how)
        pool.cut()
        return made

    async with routed(named) as (app, _):
        pool = UpstreamPool("127.0.0.1", int(app.replicas.all[0].host.rpartition(":")[2]))
        monkeypatch.setattr(loop, "create_connection", slowly)
        with pytest.raises(UpstreamLost, match="silent"):
            await pool.take()
