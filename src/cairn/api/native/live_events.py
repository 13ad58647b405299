"""GET /v1/events: one stream of changes for the page. Nothing is compared while nobody listens.

    hello       what this is: the version, whether there are agents, whether figures of the server follow
    snapshot    a tenant's agents, in pieces; the first says `"begin": true`, the last `"end": true`
    agents      agents that are new or different, and the ids of those that are gone
    requests    the tenant's requests that wait or run
    savings     what was not computed again: the tenant's total and its line of today
    server      figures of all tenants together, for callers with the admin key

Events are numbered. A reader that comes back with Last-Event-ID gets those that it missed, or a snapshot where they
are no longer kept; so does one that reads too slowly. Agents look as at /v1/agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from cairn import __version__
from cairn.agents.agents import Agents
from cairn.agents.listing import Overview
from cairn.agents.log.records import Savings
from cairn.agents.savings import DAY_SECONDS
from cairn.api.chat.attribution import AgentAttribution
from cairn.api.chat.state import ServerState
from cairn.api.http.call import HTTPCall, encode
from cairn.api.http.routes import Route
from cairn.api.http.sse import HEARTBEAT, stream_events
from cairn.api.native.agents import agent_object
from cairn.frontend.service import Service
from cairn.frontend.waker import Waker
from cairn.types.errors import Overloaded, trace

log = logging.getLogger("cairn.api")

TICK = 0.5
"""Seconds between two looks, at least; and a look takes at most a hundredth of the time."""
SHARE = 100
KEPT_EVENTS = 1024
KEPT_BYTES = 1 << 20
"""Bytes of events kept for readers that reconnect."""
PIECE = 250
"""Agents in one event."""
MOST_REQUESTS = 200
"""Requests that are listed; all are counted."""
MOST_READERS = 32
"""Of one tenant."""
MOST_SILENCE = 15.0
"""Seconds after which something is sent, if only a comment: the page takes a longer silence for a lost connection."""
GRACE = 60.0
"""Seconds that changes are followed after the last reader left, so that it can come back."""


class _Event(NamedTuple):
    number: int
    admin: bool
    data: bytes


class ChangeFeed:
    """The changes of one tenant, followed from its first reader until the last has been away for `GRACE`."""

    def __init__(
        self, salt: bytes, tenant: str, epoch: str, services: Callable[[], Sequence[Service]], first: Service
    ) -> None:
        """Follow a tenant. `services`: those loaded now; `first` names the model of agents without an answer yet."""
        self.epoch = epoch
        """Unique to this feed: event numbers of a feed with another epoch are not valid here."""
        self.readers: dict[Waker, bool] = {}
        """Readers, and whether each may see the server's figures."""
        self.over = False
        self.last = self._shown = 0
        """Number of the last event, and of the last one that readers were woken for."""
        self._salt, self._tenant, self._services, self._first = salt, tenant, services, first
        self._events: deque[_Event] = deque()
        self._bytes = 0
        self._agents: Agents | None = None
        self._overview: Overview | None = None
        self._state: dict[str, Any] = {}
        """The last content of `requests`, `savings` and `server`, by these names."""
        self._left = time.monotonic()

    # ---------------------------------------------------------------------------------------------------- following

    async def run(self, attribution: AgentAttribution, ending: Callable[[], bool]) -> None:
        """Compare now and then, until nobody has listened for a while or the server ends."""
        while not self.over:
            began = time.monotonic()
            if self.readers:
                self._left = began
            self.look(attribution)
            self.over = ending() or began - self._left > GRACE
            if self.over or self.last > self._shown:
                self._shown = self.last
                for reader in self.readers:
                    reader.wake()
            if not self.over:
                await asyncio.sleep(max(TICK, SHARE * (time.monotonic() - began)))

    def look(self, attribution: AgentAttribution) -> None:
        """Add events for the differences since the last look."""
        if attribution.agents is not self._agents:  # they were opened
            self._agents = attribution.agents
            self._overview = None if self._agents is None else self._agents.overview(self._tenant)
        services = self._services()
        if self._overview is not None:
            changed, gone = self._overview.look()
            for at in range(0, max(len(changed), bool(gone)), PIECE):
                data = [agent_object(info, self._first) for info in changed[at : at + PIECE]]
                self._add("agents", {"changed": data, "gone": gone if at == 0 else []})
        self._say("requests", self._requests(services))
        if self._agents is not None:
            self._say("savings", savings_object(self._agents, self._tenant))
        if any(self.readers.values()):
            self._say("server", server_object(services, attribution), admin=True)

    def _requests(self, services: Sequence[Service]) -> dict[str, Any]:
        names = {} if self._overview is None else self._overview.requests
        found = [(service.name, one) for service in services for one in service.in_flight(self._salt)]
        rows = [
            {
                "id": f"{one.id:016x}",
                "model": model,
                "agent": names.get(one.id),
                "state": one.state,
                "seconds": round(one.seconds, 1),
                "prompt_tokens": one.prompt_tokens,
                "cached_tokens": one.cached_tokens,
                "completion_tokens": one.completion_tokens,
            }
            for model, one in found[:MOST_REQUESTS]
        ]
        return {"total": len(found), "requests": rows}

    def _say(self, name: str, value: Any, *, admin: bool = False) -> None:
        if self._state.get(name) != value:
            self._state[name] = value
            self._add(name, value, admin=admin)

    def _add(self, name: str, value: Any, *, admin: bool = False) -> None:
        self.last += 1
        self._events.append(_Event(self.last, admin, _event(name, value, f"{self.epoch}-{self.last}")))
        self._bytes += len(self._events[-1].data)
        while len(self._events) > KEPT_EVENTS or (self._bytes > KEPT_BYTES and len(self._events) > 1):
            self._bytes -= len(self._events.popleft().data)

    # ------------------------------------------------------------------------------------------------------ reading

    def place(self, given: str) -> int | None:
        """Return the number in a Last-Event-ID if the events after it are still kept; else None."""
        epoch, _, number = given.partition("-")
        if epoch != self.epoch or not (number.isascii() and number.isdigit() and len(number) <= 18):
            return None
        return int(number) if self.keeps(int(number)) else None

    def keeps(self, number: int) -> bool:
        """Return whether every event after this one is still kept."""
        first = self._events[0].number if self._events else self.last + 1
        return first - 1 <= number <= self.last

    def read(self, after: int, admin: bool) -> bytes:
        """Return the events after a stored event."""
        if after == self.last:
            return b""
        return b"".join([one.data for one in self._events if one.number > after and (admin or not one.admin)])

    async def snapshot(self, admin: bool, first: int) -> AsyncGenerator[bytes, None]:
        """Yield the state of everything, on which events after number `first` can be applied.

        Each event says how something is, not how it differs, so changes meanwhile do no harm.
        """
        yield _event("hello", {"version": __version__, "agents": self._agents is not None, "server": admin})
        piece, begin = [], True
        everyone = self._overview.all() if self._overview is not None else iter(())
        for info in everyone:
            piece.append(agent_object(info, self._first))
            if len(piece) == PIECE:
                yield _event("snapshot", {"begin": begin, "end": False, "agents": piece})
                piece, begin = [], False
                await asyncio.sleep(0)
        for name, value in self._state.items():
            if admin or name != "server":
                yield _event(name, value)
        number = f"{self.epoch}-{first}"
        yield _event("snapshot", {"begin": begin, "end": True, "agents": piece}, number)


class ChangeFeeds:
    """The route of live events."""

    def __init__(self, state: ServerState) -> None:
        self._state, self._heartbeat = state, min(state.config.heartbeat, MOST_SILENCE)
        self._access, self._attribution, self._rng = state.access, state.attribution, state.rng
        self._feeds: dict[str, ChangeFeed] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("GET", "/v1/events", self.follow, stream=True),
        ]

    async def follow(self, call: HTTPCall, service: Service) -> None:
        """Stream what changes. It begins now, or after the event in Last-Event-ID."""
        admin = self._access.may_administer(call)
        feed = self._feed(call.tenant, call.salt, service)
        if len(feed.readers) >= MOST_READERS:
            raise Overloaded(f"{MOST_READERS} connections follow the changes already, the limit", retry_after=10.0)
        waker = Waker()
        feed.readers[waker] = admin
        try:
            feed.look(self._attribution)
            seen = (call.header(b"last-event-id") or b"").decode("latin-1")
            await stream_events(call, partial(self._send, call, feed, waker, feed.place(seen), admin))
        finally:
            del feed.readers[waker]

    async def _send(self, call: HTTPCall, feed: ChangeFeed, waker: Waker, at: int | None, admin: bool) -> None:
        while not feed.over:
            if at is None or not feed.keeps(at):
                at = feed.last
                async with contextlib.aclosing(feed.snapshot(admin, at)) as pieces:
                    async for piece in pieces:
                        await call.write(piece)
            elif data := feed.read(at, admin):
                at = feed.last
                await call.write(data)
            elif at < feed.last:
                at = feed.last
            elif not await waker.sleep(self._heartbeat):
                await call.write(HEARTBEAT)

    def _feed(self, tenant: str, salt: bytes, service: Service) -> ChangeFeed:
        feed = self._feeds.get(tenant)
        if feed is None or feed.over:
            epoch = f"{self._rng.bits64():016x}"
            feed = self._feeds[tenant] = ChangeFeed(salt, tenant, epoch, self._services, service)
            task = asyncio.create_task(self._follow(tenant, feed))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return feed

    def _services(self) -> Sequence[Service]:
        return [] if self._state.models is None else list(self._state.models.services)

    async def _follow(self, tenant: str, feed: ChangeFeed) -> None:
        try:
            await feed.run(self._attribution, lambda: self._state.draining)
        except Exception as error:
            log.error("the changes cannot be followed: %s", trace(error))
        finally:
            feed.over = True
            if self._feeds.get(tenant) is feed:
                del self._feeds[tenant]
            for reader in feed.readers:
                reader.wake()


class SavingsRoutes:
    """GET /v1/savings."""

    def __init__(self, state: ServerState) -> None:
        self._attribution = state.attribution

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("GET", "/v1/savings", self.show),
        ]

    async def show(self, call: HTTPCall, service: Service) -> None:
        """Return what a tenant's requests did not have to compute again, in total and by day."""
        agents = self._attribution.open()
        days = [day_object(day, line) for day, line in agents.savings_by_day(call.tenant).items()]
        total = msgspec.to_builtins(agents.savings(call.tenant))
        await call.json({"object": "savings", "total": total, "days": days})


def savings_object(agents: Agents, tenant: str) -> dict[str, Any]:
    """Return a tenant's total savings, and those of its last day."""
    days = agents.savings_by_day(tenant)
    last = max(days, default=None)
    today = None if last is None else day_object(last, days[last])
    return {"total": msgspec.to_builtins(agents.savings(tenant)), "day": today}


def day_object(day: int, line: Savings) -> dict[str, Any]:
    """Return the savings of one day (UTC), `day` as 2026-01-31."""
    return {"day": time.strftime("%Y-%m-%d", time.gmtime(day * DAY_SECONDS)), **msgspec.to_builtins(line)}


def server_object(services: Sequence[Service], attribution: AgentAttribution) -> dict[str, Any]:
    """Return figures of the whole server, and those of each model by its name."""
    return {"models": [_model_figures(service) for service in services], "troubles": attribution.troubles()}


def _model_figures(service: Service) -> dict[str, Any]:
    stats, metrics = service.stats(), service.metrics
    return {
        "model": service.name,
        "running": stats.running,
        "waiting": stats.waiting,
        "pool_tokens": service.info.pool_tokens,
        "pool_used": round(stats.kv_usage, 4),
        "worker": {"pid": stats.worker_pid, "restarts": stats.worker_restarts},
        "kv": msgspec.to_builtins(service.kv()),
        "tokens": {
            "prompt": metrics.prompt_tokens,
            "cached": metrics.prompt_tokens_cached,
            "generated": metrics.generation_tokens,
            "guessed": metrics.accepted_guesses,
            "guesses": metrics.accepted_guesses + metrics.rejected_guesses,
        },
        "first_token": {"answers": metrics.first_token.count, "seconds": round(metrics.first_token.sum, 3)},
        "minutes": msgspec.to_builtins(list(service.hour.minutes)),
        "troubles": [*service.unready(), *service.troubles()],
    }


def _event(name: str, value: Any, id: str = "") -> bytes:
    number = b"id: %b\n" % id.encode() if id else b""
    return b"%bevent: %b\ndata: %b\n\n" % (number, name.encode(), encode(value))
