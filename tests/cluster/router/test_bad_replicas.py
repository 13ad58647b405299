"""What one replica says or is called costs that replica alone: the others are checked, followed and chosen on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import quote

import pytest

from cairn.cluster.router import kv_follow, replicas
from cairn.cluster.router.kv_follow import KvFollowers
from cairn.cluster.router.replicas import MOST_QUEUE, MOST_SAID, SPEEDS, Replica, Replicas, replica_of
from cairn.types.errors import ConfigError
from tests.cluster.router.stubs import ask, head, named, routed

NESTED = b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}"


async def until(holds: Any) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Serve connections with a handler, which is cancelled at the end; yield the URL."""
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                await handler(reader, writer)
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def saying(role: bytes) -> contextlib.AbstractAsyncContextManager[str]:
    """Serve a replica that is ready and answers anything else with these bytes; yield its URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            line = (await reader.readuntil(b"\r\n\r\n")).split()[1]
            data = b"{}" if line == b"/health/ready" else role
            writer.write(head(200, "application/json", len(data)) + data)

    return serving(answer)


@pytest.mark.parametrize(
    "role", [NESTED, b"[" * (2 * MOST_SAID), b'{"role":"\xff"}', b"", b'{"role":"no such"}', b"[]"]
)
async def test_nonsense_about_a_role_ends_no_checks(role: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "CHECK_SECONDS", 0.01)
    async with routed(named, named) as (app, stubs), saying(role) as url:
        bad = app.replicas.add(url)
        await app.replicas.check(bad)
        assert (bad.up, bad.role, bad.computes) == (True, "both", None)
        app.replicas.start()
        stubs[0].ready = 503
        await until(lambda: not app.replicas.all[0].up)
        stubs[0].ready = 200
        await until(lambda: app.replicas.all[0].up)
        assert bad.up


async def test_a_check_that_fails_in_an_unforeseen_way_is_of_one_replica(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replicas, "CHECK_SECONDS", 0.01)
    check, asked = Replicas._check, []

    async def failing(self: Replicas, replica: Replica) -> None:
        if replica is self.all[1]:
            asked.append(replica)
            raise RuntimeError("nobody foresaw this")
        await check(self, replica)

    monkeypatch.setattr(Replicas, "_check", failing)
    async with routed() as (app, _), saying(b"{}") as one, saying(b"{}") as other:
        app.replicas.add(one), app.replicas.add(other)
        app.replicas.all[1].up = True
        with caplog.at_level(logging.ERROR):
            app.replicas.start()
            await until(lambda: len(asked) > 4 and app.replicas.all[0].up)
        assert not app.replicas.all[1].up and "RuntimeError" in app.replicas.all[1].last_check
        said = [one.getMessage() for one in caplog.records if "cannot be checked" in one.getMessage()]
        assert len(said) == 1 and "nobody foresaw this" in said[0]


ABSURD = ("1e308", "-1e308", "-1", "1e-300", "0", "5e-324", "1e999", "123456789012345678901234567890")


@pytest.mark.parametrize("number", ABSURD)
async def test_absurd_figures_break_no_request(number: str) -> None:
    role = f'{{"role":"both","computes":{number},"loads":{number},"queue_seconds":{number},"shares":true}}'
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 20_000}]}
    async with routed(named, named) as (app, _), saying(role.encode()) as url:
        app.replicas._routing = "kv"
        bad = app.replicas.add(url)
        await app.replicas.check(bad)
        assert bad.up and 0 <= bad.queue <= MOST_QUEUE
        for speed in (bad.computes, bad.loads):
            assert speed is None or SPEEDS[0] <= speed <= SPEEDS[1]
        bad.busy = 1  # its own queue counts only then
        for number_ in range(4):
            asked = body | {"messages": [*body["messages"], {"role": "user", "content": "y" * number_}]}  # type: ignore[misc]
            assert (await ask(app, "POST", "/v1/chat/completions", asked)).status == 200
        app.replicas.index.learn([(1, 2, 10**400), (3, 4, -1), (5, 6, 7)])
        assert len(app.replicas.index) == 1


@pytest.mark.parametrize(
    "url",
    [
        *("http://a..b:80", "http://.a:80", "http://-a:80", f"http://{'a' * 64}:80", f"http://{'a.' * 130}b:80"),
        *(
            "http://a b:80",
            "http://\u00e4:80",
            "http://a%00b:80",
            "http://[::1:80",
            "http://[x]:80",
            "http://user@a:80",
        ),
        *("http://a:0", "http://a:99999", "http://a:80?x=1", "http://a:80#x", "http://:80"),
    ],
)
async def test_an_address_that_no_resolver_takes_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        replica_of(url)
    assert refused.value.field == "replica"
    async with routed(named) as (app, _):
        got = await ask(app, "POST", f"/router/add?replica={quote(url)}")
        assert got.status == 400 and "replica" in got.json()["error"]["message"] and len(app.replicas.all) == 1


def test_names_and_addresses_are_taken() -> None:
    for host in ("localhost", "server-1", "a_b", "cairn-0.cairn-servers", "10.0.0.5", "xn--bcher-kva.example", "a.b."):
        assert replica_of(f"http://{host}:8000").host == f"{host}:8000"
    assert replica_of("http://[::1]:8000").host == "[::1]:8000", "the Host header has brackets, or servers refuse it"


async def test_following_does_not_wait_for_ever_for_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit a replica that hung at this moment would never be followed again."""
    monkeypatch.setattr(kv_follow, "HEAD_SECONDS", 0.05)
    asked = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()

    async with serving(hang) as url:
        known = Replicas([url], "kv")
        await asyncio.wait_for(KvFollowers(known).follow(known.all[0]), 30)
        assert asked.is_set() and not known.all[0].held.follows


async def test_events_that_cannot_be_read_end_no_following(caplog: pytest.LogCaptureFixture) -> None:
    event = b'event: texts\ndata: {"x":' + b"[" * 20_000 + b"\n\n"

    async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head(200, "text/event-stream", len(event)) + event)
        await reader.read()

    async with serving(tell) as url:
        known = Replicas([url], "kv")
        followers = KvFollowers(known)
        for _ in range(2):
            await followers.follow(known.all[0])
        assert sum("cannot be read" in one.getMessage() for one in caplog.records) == 1
