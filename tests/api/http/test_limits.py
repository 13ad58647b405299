"""Rate limits of tenants: requests and tokens per minute, concurrent requests."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.api.http.auth import tls_context
from cairn.config.config import Config
from cairn.config.values import Secret, TenantKeys, TenantLimits
from cairn.types.errors import ConfigError
from tests.api.homes import home
from tests.api.sockets import site
from tests.service.tiny import make_model, serving


class Time:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at

    def time_ns(self) -> int:
        return int(self.at * 1e9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("limits") / "tiny")


def tenants(**limits: TenantLimits) -> dict[str, Any]:
    return {"tenants": tuple(TenantKeys(name, (Secret(f"key-of-{name}"),), value) for name, value in limits.items())}


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{name}"}


HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


async def test_each_tenant_has_its_own_requests_a_minute(folder: Path) -> None:
    config = Config(**tenants(ada=TenantLimits(requests_per_minute=2), bob=TenantLimits()), requests_per_minute=3)
    async with serving(folder) as service, site(service, config) as at, at.http() as http:
        clock = at.app.state.rates._clock = Time()

        async def ask(name: str) -> httpx.Response:
            return await http.post("/v1/chat/completions", json=HELLO, headers=key(name))

        first, second, third = [await ask("ada") for _ in range(3)]
        assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert [one.headers["x-ratelimit-remaining-requests"] for one in (first, second, third)] == ["2", "1", "0"]
        assert third.headers["retry-after"] == "30" and third.headers["x-ratelimit-reset-requests"] == "1m0s"
        assert third.json()["error"]["code"] == "rate_limit_exceeded"
        assert [(await ask("bob")).status_code for _ in range(4)] == [200, 200, 200, 429]
        clock.at += 31
        assert [(await ask("ada")).status_code for _ in range(2)] == [200, 429]
        assert (await http.get("/v1/models", headers=key("ada"))).status_code == 200
        refused = await http.post("/v1/messages", json={**HELLO, "model": "m"}, headers=key("ada"))
        assert refused.status_code == 429 and refused.headers["anthropic-ratelimit-requests-limit"] == "2"


async def test_tokens_are_counted_once_they_are_known(folder: Path) -> None:
    config = Config(**tenants(ada=TenantLimits(), bob=TenantLimits()), tokens_per_minute=60)
    async with serving(folder) as service, site(service, config) as at, at.http() as http:
        clock = at.app.state.rates._clock = Time()
        long = {"messages": [{"role": "user", "content": "hello" * 30}], "max_tokens": 4}
        first = await http.post("/v1/chat/completions", json=long, headers=key("ada"))
        used = first.json()["usage"]["total_tokens"]
        assert first.status_code == 200 and used > 60
        second = await http.post("/v1/chat/completions", json=long, headers=key("ada"))
        assert second.status_code == 429 and int(second.headers["retry-after"]) == used - 60 + 1
        assert (await http.post("/v1/chat/completions", json=HELLO, headers=key("bob"))).status_code == 200
        clock.at += used - 60 + 1
        assert (await http.post("/v1/chat/completions", json=HELLO, headers=key("ada"))).status_code == 200


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute", "max_concurrent"])
async def test_a_new_agent_with_each_request_passes_no_limit(folder: Path, limit: str) -> None:
    """Without keys a client may name any agent: agents take turns, but count against one limit."""
    async with home(folder, **{limit: 1}) as (house, http):
        house.web.app.state.rates._clock = Time()  # type: ignore[attr-defined]
        asked = {"messages": HELLO["messages"], "max_tokens": 400, "ignore_eos": True, "stream": True}
        named = {"x-cairn-agent": "agent-0"}
        async with http.stream("POST", "/v1/chat/completions", json=asked, headers=named) as stream:
            assert stream.status_code == 200
            pieces = stream.aiter_bytes()
            await anext(pieces)
            if limit == "tokens_per_minute":
                async for _ in pieces:
                    pass
            for number in range(1, 4):
                named = {"x-cairn-agent": f"agent-{number}"}
                refused = await http.post("/v1/chat/completions", json=HELLO, headers=named)
                assert refused.status_code == 429 and limit in refused.text, refused.text


async def test_requests_at_once_are_bounded(folder: Path) -> None:
    config = Config(**tenants(ada=TenantLimits(max_concurrent=1), bob=TenantLimits()))
    async with serving(folder) as service, site(service, config) as at, at.http() as http:
        asked = {"messages": HELLO["messages"], "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=asked, headers=key("ada")) as stream:
            await anext(stream.aiter_bytes())
            refused = await http.post("/v1/chat/completions", json=HELLO, headers=key("ada"))
            assert refused.status_code == 429 and "max_concurrent 1" in refused.text
            assert (await http.post("/v1/chat/completions", json=HELLO, headers=key("bob"))).status_code == 200
        for _ in range(200):
            if (await http.post("/v1/chat/completions", json=HELLO, headers=key("ada"))).status_code == 200:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the place of a request that is over was not given back")


async def test_a_server_speaks_https(folder: Path, tmp_path: Path) -> None:
    cert, secret = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    made += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*made, "-keyout", str(secret), "-out", str(cert)], check=True, capture_output=True)
    config = Config(tls_cert=str(cert), tls_key=str(secret))
    trusted = ssl.create_default_context(cafile=str(cert))
    async with serving(folder) as service, site(service, config) as at:
        url = f"https://localhost:{at.port}"
        async with httpx.AsyncClient(base_url=url, verify=trusted, trust_env=False, timeout=20) as http:
            assert (await http.get("/health")).status_code == 200
            answer = await http.post("/v1/chat/completions", json=HELLO)
            assert answer.status_code == 200
            async with http.stream("POST", "/v1/chat/completions", json={**HELLO, "stream": True}) as stream:
                assert (await stream.aread()).endswith(b"data: [DONE]\n\n")
        async with httpx.AsyncClient(base_url=f"http://localhost:{at.port}", trust_env=False, timeout=20) as http:
            with pytest.raises(httpx.HTTPError):
                await http.get("/health")
    with pytest.raises(ConfigError, match="tls_key is missing"):
        tls_context(Config(tls_cert=str(cert)))
    with pytest.raises(ConfigError, match="cannot be used"):
        tls_context(Config(tls_cert=str(cert), tls_key=str(cert)))
