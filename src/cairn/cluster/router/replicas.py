"""The replicas behind a router: which are up, how busy they are, and which one a request goes to.

A request that names an agent or a session goes to the replica that ranks first for that name (rendezvous hashing), so
its KV is there. Replicas that come and go move only the names that they rank first for. One that has far more in hand
than the others is passed over: with a shared store any replica can answer, for the price of loading.

Routing `kv`: a request that names nothing, or whose first replica is passed over, goes where it will have begun soonest
by what is known: the queue, the part of the prompt that the replica does not hold (`kv_index`), and its load.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from cairn.cluster.router.calls import read_whole
from cairn.cluster.router.kv_index import HeldBlocks, HeldPrompt, KnownText, KvIndex
from cairn.cluster.router.routing_options import Routing
from cairn.cluster.router.upstream import Cause, UpstreamConnection, UpstreamLost, UpstreamPool, request_bytes
from cairn.cluster.text_prefixes import NO_PREFIXES, TextPrefixes
from cairn.types.errors import ConfigError, trace

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
CHECK_TIMEOUT = 5.0
SILENT_CHECKS = 2
"""Checks in a row without an answer after which a replica counts as gone, and all its connections are cut. One whose
port is closed counts as gone at once; what it has in hand may still end."""
CROWDED = 1.5
"""How many times the mean of requests in hand a replica may have, beside SLACK, before it is passed over."""
SLACK = 4
BUSY_SECONDS = 0.02
"""How much longer a request takes for each that the replica has in hand, since their steps share the device."""
TIE_SECONDS = 0.01
"""How much later than the soonest a replica may be and count as equally soon."""
USUAL_SPEED = 2000.0
"""Prompt tokens a second where no replica has measured its own yet."""
DEFAULT_LOAD_SPEEDUP = 10.0
"""How many times faster than computing a replica loads that has not loaded anything yet."""
FORGET_SECONDS = 600.0
DEATH_SECONDS = 15.0
"""Seconds after a replica's loss in which `turn_running` may refer to its turn."""
DRAIN_SECONDS = 30.0
START_SECONDS = 300.0
"""How long a replica that is restarted may take until it is ready."""

MOST_SAID = 1 << 16
"""Bytes of a replica's answer to a check."""
SPEEDS = 1.0, 1e9
"""Tokens a second between which a replica's own figure is believed; one beyond counts as the nearer of them."""
MOST_QUEUE = 86_400.0
"""Longest queue, in seconds, that a replica is believed to have."""
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
"""A part of a host name, without the dots."""
MOST_NAME = 253
"""Characters of a host name."""

Restart = Callable[[int], Awaitable[None]]
"""Ends the replica of this number, which is then started again by whoever keeps it."""


class _Role(msgspec.Struct):
    """What a replica says of itself."""

    role: Literal["both", "prefill", "decode"] = "both"
    computes: float | None = None
    loads: float | None = None
    queue_seconds: float = 0.0
    shares: bool = False

    def sane(self) -> _Role:
        """Return it with every figure within its bounds."""
        queue = self.queue_seconds if math.isfinite(self.queue_seconds) else 0.0
        return msgspec.structs.replace(
            self,
            computes=_speed(self.computes),
            loads=_speed(self.loads),
            queue_seconds=min(max(0.0, queue), MOST_QUEUE),
        )


def _speed(said: float | None) -> float | None:
    """Return tokens a second; None for a replica that has measured nothing."""
    if said is None or not math.isfinite(said) or said <= 0:
        return None
    return min(max(SPEEDS[0], said), SPEEDS[1])


@dataclass(slots=True, eq=False)
class Replica:
    """One server behind the router."""

    url: str
    pool: UpstreamPool
    seed: bytes
    number: int | None = None
    """Its place among the replicas that the router was started with; None for one that was added later."""
    up: bool = False
    draining: bool = False
    busy: int = 0
    """Requests in hand."""
    requests: int = 0
    failures: int = 0
    """Exchanges that it did not complete."""
    role: str = "both"
    computes: float | None = None
    """Prompt tokens a second that it computes; None before it said so."""
    loads: float | None = None
    """Prompt tokens a second whose KV it loads."""
    queue: float = 0.0
    """Seconds until all that waited for it had begun, when it was asked last."""
    reported_at: float = 0.0
    """When that was."""
    shares: bool = False
    """Whether it can load what other replicas stored."""
    computing: float = 0.0
    """Time at which it will have computed the prompts that were sent to it."""
    held: HeldBlocks = field(default_factory=HeldBlocks)
    silent: int = 0
    """Checks in a row that were not answered in time."""
    starts: int = 0
    """How often it was found ready after it was down."""
    last_check: str = "not asked yet"
    troubled: bool = False
    """Whether its last check failed in a way that nobody foresaw, which the log has then."""

    @property
    def host(self) -> str:
        """The Host header for it."""
        host = f"[{self.pool.host}]" if ":" in self.pool.host else self.pool.host
        return f"{host}:{self.pool.port}"

    def described(self) -> dict[str, object]:
        """Return what is said of it to those who ask."""
        return {
            "url": self.url,
            "role": self.role,
            "up": self.up,
            "draining": self.draining,
            "running": self.busy,
            "queue_seconds": self.queue,
            "requests": self.requests,
            "failures": self.failures,
            "kv_blocks": len(self.held.blocks),
            "kv_followed": self.held.follows,
            "state": self.last_check,
        }


class Destination(NamedTuple):
    """What decides where a request goes."""

    key: bytes
    """What it names, or how its conversation begins; empty for nothing."""
    named: bool = True
    """Whether it names an agent or a session."""
    text: Callable[[], TextPrefixes] = lambda: NO_PREFIXES
    """Returns the digests of its text, which are made where they are needed."""


class Choice(NamedTuple):
    """Where a request goes."""

    replica: Replica
    cached: int = 0
    """Tokens of its prompt that the replica is expected to have; 0 also where nobody looked."""


def _beginning(text: TextPrefixes) -> bytes:
    """Return what ranks replicas for a text that has no other key; empty without text."""
    return text.digests[0].to_bytes(8, "big") if text.digests else b""


def replica_of(url: str) -> Replica:
    """Return the replica at a URL. Raise ConfigError for one that is no http:// address with a port."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    more = parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc
    if parts.scheme != "http" or not host or not port or more:
        raise ConfigError(f"{url[:300]} is no replica's address, such as http://10.0.0.5:8000", field="replica")
    if not _is_host(host):
        raise ConfigError(
            f"the host {host[:300]!r} of replica {url[:300]} is no address and no name: a name has at most {MOST_NAME} "
            "characters, of A to Z, digits, - and _ between single dots",
            field="replica",
        )
    return Replica(f"http://{parts.netloc}", UpstreamPool(host, port), parts.netloc.encode())


def _is_host(host: str) -> bool:
    """Return whether a resolver takes a host: an IP address or a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        labels = host.removesuffix(".").split(".")
        return len(host) <= MOST_NAME and all(_LABEL.fullmatch(one) for one in labels)
    return True


class Replicas:
    """All replicas of one router. Runs on the event loop."""

    def __init__(self, urls: Sequence[str], routing: Routing = "names") -> None:
        """Take the addresses, and how requests are shared out.

        Raise ConfigError as `replica_of` does, and for one that is named twice."""
        self.all = [replica_of(url) for url in urls]
        for number, one in enumerate(self.all):
            one.number = number
        if len({one.url for one in self.all}) != len(self.all):
            raise ConfigError("a replica is named twice", field="replica")
        self._routing, self._turn = routing, 0
        self.index = KvIndex()
        self._added: dict[Replica, float] = {}
        """Replicas that were added later, and when they were last up: one that is down for long is forgotten."""
        self._task: asyncio.Task[None] | None = None
        self._leaving: list[Replica] = []
        """Replicas that were removed and still have requests in hand, which are cut if they fall silent."""
        self._died = float("-inf")
        self._checks: dict[Replica, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Begin to look after them."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop, and close the connections."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        checks = tuple(self._checks.values())
        for task in checks:
            task.cancel()
        await asyncio.gather(*checks, return_exceptions=True)
        for one in (*self.all, *self._leaving):
            one.pool.close()

    async def _run(self) -> None:
        while True:
            await asyncio.gather(*(self.check(one) for one in (*self.all, *self._leaving)))
            self._leaving = [one for one in self._leaving if one.busy]
            self._forget(time.monotonic())
            await asyncio.sleep(CHECK_SECONDS)

    async def check(self, replica: Replica) -> None:
        """Ask a replica whether it is ready. Callers at the same time share one check."""
        await asyncio.shield(self._begin_check(replica))

    def _begin_check(self, replica: Replica) -> asyncio.Task[None]:
        task = self._checks.get(replica)
        if task is None or task.done():
            task = self._checks[replica] = asyncio.create_task(self._check_safely(replica))
            task.add_done_callback(partial(self._end_check, replica))
        return task

    def _end_check(self, replica: Replica, task: asyncio.Task[None]) -> None:
        if self._checks.get(replica) is task:
            del self._checks[replica]

    async def _check_safely(self, replica: Replica) -> None:
        """Check a replica. Whatever goes wrong concerns this one alone: others are checked on."""
        try:
            await self._check(replica)
        except Exception as error:
            if not replica.troubled:
                log.error("%s cannot be checked: %s", replica.url, trace(error))
            replica.troubled = True
            if replica.up:
                self.failed(replica)
            replica.last_check = f"cannot be checked: {type(error).__name__}"
        else:
            replica.troubled = False

    async def _check(self, replica: Replica) -> None:
        connection = None
        try:
            async with asyncio.timeout(CHECK_TIMEOUT):
                connection = await replica.pool.exchange(request_bytes("GET", b"/health/ready", replica.host, (), b""))
                await read_whole(connection)
            self._note_answer(replica, connection.status)
            if replica.up:
                with contextlib.suppress(UpstreamLost, TimeoutError):  # it is ready; the next check asks again
                    async with asyncio.timeout(CHECK_TIMEOUT):
                        await self._learn(replica, connection)
        except (UpstreamLost, TimeoutError) as error:
            cause = error.cause if isinstance(error, UpstreamLost) else "silent"
            self._note_failed_check(replica, cause, str(error) or f"does not answer in {CHECK_TIMEOUT:g} s")
        finally:
            if connection is not None:
                replica.pool.give(connection)

    def _note_answer(self, replica: Replica, status: int) -> None:
        """Take the status of a check that was answered."""
        up = status == 200
        if up and not replica.up:
            log.info("%s is ready", replica.url)
            replica.starts += 1
        replica.up, replica.silent = up, 0
        replica.last_check = "ready" if up else f"answers {status}"

    def _note_failed_check(self, replica: Replica, cause: Cause, what: str) -> None:
        """Note a failed check. A closed port takes the replica down at once, silence after SILENT_CHECKS checks."""
        replica.last_check = what
        if cause == "local":  # the router has no descriptor or port left: nobody knows about the replica
            return
        replica.silent += 1
        silent = cause == "silent"
        if replica.up and (not silent or replica.silent >= SILENT_CHECKS):
            self.failed(replica, in_hand=silent)
        elif silent and replica.silent >= SILENT_CHECKS:
            replica.pool.cut()  # a request may have been sent although it is down

    async def _learn(self, replica: Replica, connection: UpstreamConnection) -> None:
        """Ask a replica for its role and speeds; a server that says nothing of them does both."""
        if not connection.usable:
            return
        await connection.send(request_bytes("GET", b"/health/role", replica.host, (), b""))
        said = bytearray()
        while piece := await connection.read():
            said += piece
            if len(said) > MOST_SAID:
                return  # the connection is closed, as its exchange is not over
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):  # it keeps what it said before
            role = msgspec.json.decode(said, type=_Role).sane()
            replica.role, replica.computes, replica.loads = role.role, role.computes, role.loads
            replica.queue, replica.reported_at, replica.shares = role.queue_seconds, time.monotonic(), role.shares

    def lost_connection(self, replica: Replica, error: UpstreamLost) -> None:
        """Note that a replica did not complete an exchange, and check at once whether it went away.

        It stays up until the check says otherwise: a request that it drops takes it away from nobody else.
        """
        if error.cause == "local":
            return
        replica.failures += 1
        self._died = time.monotonic()
        if replica.up:
            self._begin_check(replica)

    def failed(self, replica: Replica, *, in_hand: bool = True) -> None:
        """Note that a replica went away: it gets no more requests until it is ready again.

        `in_hand`: also cut the exchanges that it has in hand, so that their requests are answered elsewhere.
        """
        if replica.up:
            log.warning("%s went away; it gets no requests until it is ready again", replica.url)
        replica.up = False
        if in_hand:
            replica.pool.cut()
        replica.pool.close()
        replica.held.forget()
        replica.computing = 0.0
        self._died = time.monotonic()

    @property
    def lost_one_lately(self) -> bool:
        """Whether a replica went away a short time ago."""
        return time.monotonic() - self._died < DEATH_SECONDS

    @property
    def by_kv(self) -> bool:
        """Whether requests go where their KV is."""
        return self._routing == "kv"

    def choose(self, wanted: Destination, tried: Collection[Replica] = ()) -> Choice | None:
        """Return the replica for a request; None if there is none.

        `tried`: replicas to use only where there are no others.
        """
        key = wanted.key or (_beginning(wanted.text()) if self.by_kv else b"")
        up = [one for one in self.all if one.up and one not in tried] or [one for one in self.all if one.up]
        able = [one for one in up if not one.draining] or up
        able = [one for one in able if one.role != "prefill"] or able
        if not able:
            return None
        if self._routing == "round-robin":
            self._turn += 1
            return Choice(able[self._turn % len(able)])
        if not key or self._routing == "least-load":
            return Choice(min(able, key=lambda one: one.busy))
        ranked = sorted(able, key=lambda one: hashlib.blake2b(key, key=one.seed[:64], digest_size=8).digest())
        limit = CROWDED * sum(one.busy for one in able) / len(able) + SLACK
        free = [one for one in ranked if one.busy < limit] or ranked
        if self.by_kv and len(able) > 1 and not (wanted.named and free[0] is ranked[0]):
            return self._soonest(free, wanted.text())
        return Choice(free[0])

    def _soonest(self, ranked: Sequence[Replica], text: TextPrefixes) -> Choice:
        """Return the replica that will have computed a prompt soonest; of those about as soon the one that holds most.

        Of equals, and for a prompt that nobody holds, it is the one that ranks first.
        """
        if not text.digests:
            return Choice(ranked[0])
        known, now = self.index.known(text), time.monotonic()
        held = [self.index.held(one.held, known, now) for one in ranked]
        most = max(one.cached for one in held)
        self.index.hits += most > 0
        self.index.misses += most == 0
        chosen = 0
        if most:
            speeds = [one.computes for one in ranked if one.computes]
            usual = sum(speeds) / len(speeds) if speeds else USUAL_SPEED
            times = [self._seconds(one, known, has, most, now, usual) for one, has in zip(ranked, held, strict=True)]
            latest = min(times) + TIE_SECONDS
            soon = [number for number, seconds in enumerate(times) if seconds <= latest]
            chosen = max(soon, key=lambda number: (held[number], -number))
        replica, has = ranked[chosen], held[chosen]
        if (missing := known.total - has.cached) > 0 and replica.computes:
            replica.computing = max(replica.computing, now) + missing / replica.computes
        replica.held.send(text, known.tokens, now)
        return Choice(replica, has.cached)

    def _seconds(self, one: Replica, known: KnownText, has: HeldPrompt, most: int, now: float, usual: float) -> float:
        """Return about how long a replica takes until it has a prompt, of which some replica holds `most` tokens.

        `usual`: prompt tokens a second of one that has not measured its own.
        """
        computing = 1 / (one.computes or usual)
        loading = min(computing, 1 / one.loads) if one.loads else computing / DEFAULT_LOAD_SPEEDUP
        loaded = max(most if one.shares else 0, has.cached) - has.pool
        missing = known.total - has.pool - loaded
        # Its report is up to a second old, and the rest an estimate: without a request in hand nothing waits there.
        begins = max(one.reported_at + one.queue, one.computing) if one.busy else now
        queue = min(max(0.0, begins - now), MOST_QUEUE)
        return queue + missing * computing + loaded * loading + one.busy * BUSY_SECONDS

    def find(self, url: str) -> Replica | None:
        """Return the replica of this address."""
        return next((one for one in self.all if one.url == url.rstrip("/")), None)

    def add(self, url: str) -> Replica:
        """Add a replica, or return it if it is known. Raise ConfigError as `replica_of` does."""
        made = replica_of(url)
        known = self.find(made.url)
        if known is not None:
            known.draining = False
            return known
        self.all.append(made)
        self._added[made] = time.monotonic()
        return made

    async def remove(self, replica: Replica, seconds: float) -> bool:
        """Drain a replica and forget it; return whether all its requests had ended."""
        over = await self.drain(replica, seconds)
        if replica in self.all:
            self.all.remove(replica)
            self._added.pop(replica, None)
            replica.pool.close()
            if not over:
                self._leaving.append(replica)
        return over

    def _forget(self, now: float) -> None:
        for replica, seen in tuple(self._added.items()):
            if replica.up:
                self._added[replica] = now
            elif now - seen > FORGET_SECONDS:
                self.all.remove(replica)
                del self._added[replica]

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
        for number, replica in [(one.number, one) for one in self.all if one.number is not None]:
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
