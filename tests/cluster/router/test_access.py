"""The router checks Host and Origin as servers do, which see neither as the client wrote it."""

from __future__ import annotations

import pytest

from cairn.config.config import Config
from tests.cluster.router.stubs import Stub, ask, named, routed

PAGE = [(b"host", b"localhost:8000"), (b"origin", b"https://evil.example"), (b"sec-fetch-site", b"cross-site")]
OWN = [(b"host", b"10.0.0.5:8000"), (b"origin", b"http://10.0.0.5:8000")]
CHANGES = ("add", "remove", "drain", "undrain", "restart")


async def test_a_foreign_page_changes_nothing_of_the_router() -> None:
    async with routed(named, named) as (app, stubs):
        evil = Stub("evil", named)
        url = await evil.start()
        try:
            for name in CHANGES:
                got = await ask(app, "POST", f"/router/{name}?replica={url}", headers=PAGE)
                assert got.status == 403 and "evil.example" in got.json()["error"]["message"], name
            got = await ask(app, "POST", f"/router/add?replica={url}", headers=[(b"origin", b"null")])
            assert got.status == 403
            for number in range(30):
                key = [(b"authorization", b"Bearer key")]
                await ask(app, "POST", f"/v1/agents/a{number}/turns", {"content": "secret"}, headers=key)
            assert not evil.asked and sum(len(one.asked) for one in stubs) == 30
            assert (await ask(app, "POST", f"/router/add?replica={url}", headers=OWN)).status == 200, "the router's own"
        finally:
            await evil.die()


@pytest.mark.parametrize(
    "path", ["/v1/agents/x", "/v1/chat/completions", "/health/ready", "/metrics", "/router/replicas"]
)
async def test_a_name_that_is_not_the_routers_is_refused(path: str) -> None:
    """As a page would use that makes its own name mean this machine (DNS rebinding)."""
    async with routed(named) as (app, stubs):
        for host in (b"evil.example", b"evil.example:8000", b"localhost.evil.example", b"127.0.0.1.evil.example"):
            got = await ask(app, "GET", path, headers=[(b"host", host)])
            assert got.status == 403 and "--allowed-hosts" in got.json()["error"]["message"], host
        twice = [(b"host", b"localhost"), (b"host", b"evil.example")]
        assert (await ask(app, "GET", path, headers=twice)).status == 400
        assert not stubs[0].asked
        for host in (b"localhost", b"127.0.0.1:8000", b"[::1]:8000", b"10.1.2.3", b"router.localhost"):
            assert (await ask(app, "GET", path, headers=[(b"host", host)])).status == 200, host


async def test_names_of_the_router_can_be_added() -> None:
    async with routed(named, config=Config(allowed_hosts=("cairn.example",))) as (app, stubs):
        assert (await ask(app, "GET", "/v1/agents/x", headers=[(b"host", b"cairn.example")])).status == 200
        assert (await ask(app, "GET", "/v1/agents/x", headers=[(b"host", b"other.example")])).status == 403
        assert stubs[0].asked[-1][1][b"host"].startswith(b"127.0.0.1:"), "a server sees its own name"


async def test_a_servers_check_of_origins_holds_behind_the_router() -> None:
    """A server compares Origin and Host: it sees no Origin of the router's own page, and that of any other page."""
    async with routed(named) as (app, stubs):
        await ask(app, "POST", "/v1/agents/x/fork", headers=OWN)
        assert b"origin" not in stubs[0].asked[-1][1]
        await ask(app, "POST", "/v1/agents/x/fork", headers=PAGE)
        assert stubs[0].asked[-1][1][b"origin"] == b"https://evil.example"


async def test_pages_of_configured_origins_may_call() -> None:
    page = [(b"host", b"localhost:8000"), (b"origin", b"https://app.example"), (b"sec-fetch-site", b"cross-site")]
    async with routed(named, config=Config(cors_origins=("https://app.example",))) as (app, stubs):
        asked = [*page, (b"access-control-request-method", b"POST"), (b"access-control-request-headers", b"x-a")]
        got = await ask(app, "OPTIONS", "/v1/agents/x/turns", headers=asked)
        assert got.status == 200 and got.headers[b"access-control-allow-headers"] == b"x-a" and not stubs[0].asked
        got = await ask(app, "POST", "/v1/agents/x/fork", headers=page)
        assert got.headers[b"access-control-allow-origin"] == b"https://app.example"
        assert b"origin" not in stubs[0].asked[-1][1], "the router vouches for it"
        got = await ask(app, "POST", "/v1/agents/x/fork", headers=PAGE)
        assert b"access-control-allow-origin" not in got.headers and b"origin" in stubs[0].asked[-1][1]
        assert (await ask(app, "POST", "/router/restart", headers=page)).status == 409
        assert (await ask(app, "POST", "/router/restart", headers=PAGE)).status == 403
