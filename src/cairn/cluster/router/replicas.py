"""The replicas behind a router: which are up, how busy they are, and which one a request goes to.

A request that names an agent or a session goes to the replica that ranks first for that name (rendezvous hashing), so
its KV is there. Replicas that come and go move only the names that they rank first for. One that has far more in hand
than the others is passed over: with a shared store any replica can answer, for the price of loading.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from cairn.cluster.router.upstream import UpstreamLost, UpstreamPool, request_bytes
from cairn.types.errors import ConfigError

CHECK_SECONDS = 1.0
CHECK_TIMEOUT = 5.0
SILENT_CHECKS = 2
"""Checks in a row without an answer after which a replica counts as gone. One whose port is closed does so at once."""
CROWDED = 1.5
"""How many times the mean of requests in hand a replica may have, beside SLACK, before it is passed over."""
SLACK = 4
DEATH_SECONDS = 15.0
"""How long after a replica went away a turn that is said to run elsewhere may be its last."""
DRAIN_SECONDS = 30.0
START_SECONDS = 300.0
"""How long a replica that is restarted may take until it is ready."""

Restart = Callable[[int], Awaitable[None]]
"""Ends the replica of this number, which is then started again by whoever keeps it."""


@dataclass(slots=True, eq=False)
class Replica:
    """One server behind the router."""

    url: str
    pool: UpstreamPool
    seed: bytes
    up: bool = False
    draining: bool = False
    busy: int = 0
    """Requests in hand."""
    requests: int = 0
    failures: int = 0
    """Exchanges that it did not complete."""
    silent: int = 0
    """Checks in a row that were not answered in time."""
    last_check: str = field(default="not asked yet")

    @property
    def host(self) -> str:
        """The Host header for it."""
        return f"{self.pool.host}:{self.pool.port}"

    def described(self) -> dict[str, object]:
        """Return what is said of it to those who ask."""
        return {
            "url": self.url,
            "up": self.up,
            "draining": self.draining,
            "running": self.busy,
            "requests": self.requests,
            "failures": self.failures,
            "state": self.last_check,
        }


def replica_of(url: str) -> Replica:
    """Return the replica at a URL. Raise ConfigError for one that is no http:// address with a port."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "http" or not parts.hostname or port is None or parts.path not in ("", "/"):
        raise ConfigError(f"{url} is no replica's address, such as http://10.0.0.5:8000", field="replica")
    return Replica(f"http://{parts.netloc}", UpstreamPool(parts.hostname, port), parts.netloc.encode())


class Replicas:
    """All replicas of one router. Runs on the event loop."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Take the addresses. Raise ConfigError as `replica_of` does, and for one that is named twice."""
        self.all = [replica_of(url) for url in urls]
        if len({one.url for one in self.all}) != len(self.all):
            raise ConfigError("a replica is named twice", field="replica")
        self._task: asyncio.Task[None] | None = None
        self._died = float("-inf")

    def start(self) -> None:
        """Begin to look after them."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop, and close the connections."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for one in self.all:
            one.pool.close()

    async def _run(self) -> None:
        while True:
            await asyncio.gather(*(self.check(one) for one in self.all))
            await asyncio.sleep(CHECK_SECONDS)

    async def check(self, replica: Replica) -> None:
        """Ask a replica whether it is ready."""
        connection = None
        try:
            async with asyncio.timeout(CHECK_TIMEOUT):
                connection = await replica.pool.take(new=not replica.up)
                await connection.send(request_bytes("GET", b"/health/ready", replica.host, (), b""))
                while await connection.read():
                    pass
            replica.up, replica.silent = connection.status == 200, 0
            replica.last_check = "ready" if replica.up else f"answers {connection.status}"
        except (UpstreamLost, TimeoutError) as error:
            replica.silent += 1
            if replica.up and (isinstance(error, UpstreamLost) or replica.silent >= SILENT_CHECKS):
                self.failed(replica)
            replica.last_check = str(error) or "does not answer"
            if connection is not None:
                connection.abort()
                connection = None
        finally:
            if connection is not None:
                replica.pool.give(connection)

    def failed(self, replica: Replica) -> None:
        """Note that a replica went away: it gets no more requests until it is ready again."""
        replica.up = False
        replica.failures += 1
        replica.pool.close()
        self._died = time.monotonic()

    @property
    def death_is_near(self) -> bool:
        """Whether a replica went away a short time ago."""
        return time.monotonic() - self._died < DEATH_SECONDS

    def choose(self, key: bytes, tried: Collection[Replica] = ()) -> Replica | None:
        """Return the replica for a request; None if there is none.

        `key`: what it names, empty for nothing. `tried`: replicas to use only where there are no others.
        """
        up = [one for one in self.all if one.up and one not in tried] or [one for one in self.all if one.up]
        able = [one for one in up if not one.draining] or up
        if not able:
            return None
        if not key:
            return min(able, key=lambda one: one.busy)
        ranked = sorted(able, key=lambda one: hashlib.blake2b(key, key=one.seed[:64], digest_size=8).digest())
        limit = CROWDED * sum(one.busy for one in able) / len(able) + SLACK
        return next((one for one in ranked if one.busy < limit), ranked[0])

    def find(self, url: str) -> Replica | None:
        """Return the replica of this address."""
        return next((one for one in self.all if one.url == url.rstrip("/")), None)

    async def drain(self, replica: Replica, seconds: float) -> bool:
        """Give a replica no new requests, and wait for those that it has; return whether all have ended."""
        replica.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while replica.busy:
                    await asyncio.sleep(0.05)
        return not replica.busy

    async def restart(self, end: Restart) -> AsyncIterator[tuple[Replica, bool]]:
        """Restart all replicas, one after another, and yield each with whether it is ready again.

        A replica gets no requests while it finishes those that it has, for DRAIN_SECONDS at most. After one that is not
        ready in START_SECONDS the others are left as they are.
        """
        for number, replica in enumerate(self.all):
            try:
                await self.drain(replica, DRAIN_SECONDS)
                await end(number)
                replica.up = False
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(START_SECONDS):
                        while not replica.up:
                            await asyncio.sleep(0.05)
            finally:
                replica.draining = False
            yield replica, replica.up
            if not replica.up:
                return
