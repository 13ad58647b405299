"""Limits of tenants over servers that share a store."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.api.http.rate_limits import RateLimits
from cairn.cluster.beats import BEAT_SECONDS, LEASE_SECONDS, Beats
from cairn.config.config import Config
from cairn.config.values import Secret, TenantKeys, TenantLimits
from cairn.types.errors import RateLimited
from tests.cluster.stores import Awaited, MemoryBlobs, keys


class Time:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def now(self) -> float:
        return self.seconds

    def time_ns(self) -> int:
        return int(self.seconds * 1e9)


def call(tenant: str) -> Any:
    return SimpleNamespace(scope={"method": "POST"}, path="/v1/x", tenant=tenant, payer=tenant, headers=[])


class Servers:
    """Servers with the same limits that share a store in memory."""

    def __init__(self, count: int, **limits: int) -> None:
        tenant = TenantKeys("ada", (Secret("a-key-of-ada"),), TenantLimits(**limits))
        self.clock, self.blobs = Time(), MemoryBlobs()
        self.limits = [RateLimits(Config(tenants=(tenant,)), self.clock) for _ in range(count)]
        self.beats = [Beats(Awaited(self.blobs), keys(n), self.clock, f"{n:016x}") for n in range(1, count + 1)]
        for beats, limits_ in zip(self.beats, self.limits, strict=True):
            beats.usage = limits_

    async def beat(self, *numbers: int) -> None:
        """Let servers, or all of them, beat twice, so that each has heard the others."""
        for _ in range(2):
            for number in numbers or range(len(self.beats)):
                await self.beats[number].step()
            self.clock.seconds += BEAT_SECONDS

    def ask(self, number: int, tokens: tuple[int, int] = (0, 0)) -> None:
        with self.limits[number].counted(call("ada"), admin=False):
            pass
        self.limits[number].used("ada", *tokens)


async def test_requests_at_one_server_count_at_the_others() -> None:
    servers = Servers(3, requests_per_minute=60)
    await servers.beat()
    for number in (0, 1) * 30:
        servers.ask(number)
    await servers.beat()
    for number in range(3):
        with pytest.raises(RateLimited, match="60 requests of a minute"):
            for _ in range(5):  # two seconds of beats give back two
                servers.ask(number)


async def test_tokens_at_one_server_count_at_the_others() -> None:
    servers = Servers(2, tokens_per_minute=1000)
    await servers.beat()
    servers.ask(0, (900, 700))
    await servers.beat()
    with pytest.raises(RateLimited, match="1000 tokens"):
        servers.ask(1)


async def test_requests_that_run_elsewhere_count_until_they_end_or_their_server_is_silent() -> None:
    servers = Servers(2, max_concurrent=2)
    await servers.beat()
    with contextlib.ExitStack() as running:
        for _ in range(2):
            running.enter_context(servers.limits[0].counted(call("ada"), admin=False))
        await servers.beat()
        with pytest.raises(RateLimited, match="2 requests of yours"):
            servers.ask(1)
        for _ in range(round(LEASE_SECONDS / BEAT_SECONDS) + 2):
            await servers.beat(1)
        servers.ask(1)  # the other one is dead, as far as this one knows
        await servers.beat()
        with pytest.raises(RateLimited):
            servers.ask(1)
    await servers.beat()
    servers.ask(1)


async def test_usage_before_a_server_was_first_heard_does_not_count() -> None:
    servers = Servers(2, requests_per_minute=10)
    for _ in range(10):
        servers.ask(0)
    await servers.beat()
    for _ in range(10):
        servers.ask(1)


async def test_a_server_that_forgot_a_tenant_gives_nothing_back() -> None:
    servers = Servers(2, requests_per_minute=60)
    await servers.beat()
    for _ in range(30):
        servers.ask(0)
    await servers.beat()
    servers.limits[0]._tenants.clear()
    servers.ask(0)
    await servers.beat()
    left = servers.limits[1]._tenants["ada"].buckets["requests"].left(servers.clock.now())
    assert left == pytest.approx(60 - 31 + 2, abs=1.5)


async def test_a_beat_that_cannot_be_read_counts_as_life_alone() -> None:
    servers = Servers(2, requests_per_minute=10)
    await servers.beat()
    name = f"beats/{1:016x}"
    servers.blobs.objects[name] = keys(1).seal(name, b"17")
    await servers.beats[1].step()
    assert servers.beats[1].alive(f"{1:016x}")
    servers.ask(1)
