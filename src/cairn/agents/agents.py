"""Agents: named contexts with history, on one `Service` and one token log.

A turn is answered by an ordinary request whose prompt is the exact ids of the agent's context and what the new message
adds. Its message is in the log before anything of the answer is given out, its tokens follow as they come, and its end
is durable before the last event. What an agent is, is what the log says; everything here can be rebuilt from it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cairn.agents import listing, portable
from cairn.agents.archive import Archive
from cairn.agents.aside import aside
from cairn.agents.book import Book, conflict
from cairn.agents.damage import Unreadable
from cairn.agents.founding import found, take_in
from cairn.agents.index import Kind
from cairn.agents.info import AgentInfo, AgentPage, Savings, TurnInfo
from cairn.agents.kv import AgentKv
from cairn.agents.log import Log
from cairn.agents.outbox import Outbox
from cairn.agents.replays import Replays
from cairn.agents.roster import Roster
from cairn.agents.running import RunningTurn
from cairn.agents.tree import Agent
from cairn.agents.turns import Turns
from cairn.agents.upkeep import Upkeep
from cairn.agents.writer import Writer
from cairn.config import Config
from cairn.errors import ConfigError, Conflict, Unavailable
from cairn.figures import Placed
from cairn.metrics import AgentFigures
from cairn.seams import Clock, FileSystem, Rng
from cairn.service.requests import PLAIN, SamplingOptions
from cairn.service.service import Service
from cairn.text.chat import Sampled
from cairn.types import Done

LOCK_SECONDS = 5.0
"""How long a start waits for a process that still holds the folder."""


class Agents:
    """All agents of one server. Make them with `await Agents.open(...)`; end them with `await close()`.

    Every method runs on the event loop of its service. Where an agent is named: InvalidRequest for what is no id,
    NotFound for an agent that is not there or is another tenant's. What the disk refuses is Unavailable, and nothing
    has changed then, except that what was deleted stays so.
    """

    def __init__(
        self, service: Service, log: Log, clock: Clock, rng: Rng, config: Config, salts: Mapping[str, bytes]
    ) -> None:
        self.service, self._config = service, config
        roster = Roster(salts)
        orphans = roster.load(log.recovered)
        roster.ledger.watch(lambda: service.metrics.disk_bytes)
        self._replays = Replays(service.spec.identity)
        for tenant, sampled in self._replays.load(log.recovered):
            service.chat.recall(tenant, sampled)
        left = [record for record in log.recovered if record.kind == Kind.UNPIN]
        log.recovered = []
        self._archive = Archive(log)
        self.kv = AgentKv(service, roster, self._archive)
        self.writer = Writer(log)
        self._outbox = Outbox(roster, self.writer, clock, self._replays)
        self._book = Book(roster, self.writer, self._outbox, self.kv, rng, self._replays)
        self._book.take_up(left)
        self._turns = Turns(service, self._book, self._archive, clock, config)
        self._upkeep = Upkeep(self._book, self._replays, orphans)
        self._find = self._book.find
        service.metrics.agents = self.figures

    @classmethod
    async def open(
        cls,
        service: Service,
        files: FileSystem,
        folder: Path,
        clock: Clock,
        rng: Rng,
        config: Config,
        salts: Mapping[str, bytes],
    ) -> Agents:
        """Lock the folder and read the log. `salts`: of the tenants that may call, by name.

        Raises ConfigError for a folder that another process holds, that is not ours or of a newer format, or that the
        disk does not let us use.
        """
        end = clock.now() + LOCK_SECONDS
        while True:
            try:
                opened = await aside(Log.open, files, folder, rng)
            except OSError as error:
                raise ConfigError(f"{folder}: the token log cannot be read: {error.strerror or error}") from error
            if opened is not None:
                return cls(service, opened, clock, rng, config, salts)
            if clock.now() >= end:
                raise ConfigError(
                    f"{folder}: another process holds the token log; end it, or name another folder with --agents-dir"
                )
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        """Interrupt what runs, write what is left, and let others have the folder. May be called again."""
        await self._upkeep.close()
        await self.kv.close()
        for turn in [agent.running for agent in self._book.roster if agent.running is not None]:
            await turn.stop()
            if not turn.over.is_set():
                await turn.close()
        with contextlib.suppress(Unavailable):
            await self._outbox.settle()
            if condemned := self._outbox.condemned():
                await self._outbox.erase(condemned)
        with contextlib.suppress(Unavailable):
            await self.writer.close()

    async def tend(self) -> None:
        """What is done every half minute: write what is owed, erase what is over."""
        await self._upkeep.tend()

    @property
    def trouble(self) -> str:
        """Why the log does not work now, as a sentence; empty when it does."""
        return self.writer.trouble

    # ---------------------------------------------------------------------------------------------------- to look at

    def get(self, tenant: str, id: str) -> AgentInfo:
        """One agent."""
        return self._find(tenant, id).info()

    def page(self, tenant: str, *, limit: int = 20, after: str = "") -> AgentPage:
        """A tenant's agents `after` an id or what `next` of another page says; InvalidRequest for anything else."""
        return listing.page(self._book.roster, tenant, limit, after, self._outbox.now())

    # What these tell is read from the log: Unavailable where the disk gives out nothing, Damaged where it is damaged,
    # and NotFound where the agent is deleted meanwhile.

    async def turns(self, tenant: str, id: str, *, after: int = 0, limit: int | None = None) -> tuple[TurnInfo, ...]:
        """Every turn `after` a number, abandoned branches included, by number; one that is damaged says so."""
        return await listing.turns(self._book.roster, self._archive, self._find(tenant, id), after, limit)

    async def beginning(self, tenant: str, id: str) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """What the agent was told before its first turn, and its tools."""
        with self._book.reading(tenant, id) as agent:
            (root,) = await self._archive.contents([agent.root])
        return root.began.messages, root.began.tools

    async def context(self, tenant: str, id: str) -> tuple[int, ...]:
        """The ids of the agent's context for the model that is served; none before its first turn with it."""
        with self._book.reading(tenant, id) as agent:
            return tuple(await self.kv.ids(agent.head))

    def figures(self) -> AgentFigures:
        """All tenants together, for the metrics."""
        return msgspec.structs.replace(
            self._book.roster.figures(), log_bytes=self.writer.bytes, log_dropped=self.writer.dropped
        )

    def savings(self, tenant: str) -> Savings:
        """The sum over a tenant's agents and requests, also those that are gone."""
        return self._book.roster.ledger.totals.get(tenant, Savings())

    # ---------------------------------------------------------------------------------------------------- its KV

    async def where(self, tenant: str, id: str) -> Placed:
        """How many leading tokens of the context each tier has. Unavailable while the worker is being replaced."""
        with self._book.reading(tenant, id) as agent:
            return await self.kv.where(agent)

    async def pin(self, tenant: str, id: str, pinned: bool) -> AgentInfo:
        """Keep the KV of the agent's context in the stores from eviction, now and after every turn; or no longer."""
        with self._book.reading(tenant, id) as agent:
            changed = await self._book.set_pinned(agent, pinned)
            if agent in self._book.roster:  # nobody deleted it meanwhile
                try:
                    await self.kv.pin(agent)
                except Unreadable:  # damage does not pass: it is as it was before
                    if changed and agent in self._book.roster:
                        await self._book.set_pinned(agent, not pinned)
                    raise
                except Unavailable:
                    self._book.pin_later(agent)
                    raise
            return agent.info()

    async def prefetch(self, tenant: str, id: str) -> Placed:
        """Bring the KV of the context up into the pool; where it is then."""
        with self._book.reading(tenant, id) as agent:
            return await self.kv.prefetch(agent)

    async def evict(self, tenant: str, id: str, *, disk: bool = False) -> Placed:
        """Give up the KV of the context, except what other agents of the tenant share; where it is then. With `disk`
        Conflict while the agent is pinned."""
        with self._book.reading(tenant, id) as agent:
            return await self.kv.evict(agent, disk=disk)

    # ---------------------------------------------------------------------------------- requests in an agent's name

    def named(self, tenant: str, id: str) -> Agent:
        """The agent in whose name a request is made, for `keep` and `account`; it may be deleted before they are.

        It is used now, and as long as the request is computed in `using`.
        """
        agent = self._find(tenant, id)
        agent.used = self._outbox.now()
        return agent

    @contextlib.contextmanager
    def using(self, agent: Agent) -> Iterator[None]:
        """While an ordinary request in the agent's name is computed, however long: its time to live does not run."""
        agent.ties += 1
        try:
            yield
        finally:
            agent.ties -= 1
            agent.used = self._outbox.now()

    def keep(self, tenant: str, sampled: Sampled, agent: Agent | None = None) -> None:
        """Keep what was sampled for an ordinary request in the log, where that is wanted."""
        if not self._config.log or (agent is not None and agent not in self._book.roster):
            return
        now, key = self._outbox.now(), agent.key if agent is not None else 0
        record = self.writer.record(Kind.REPLAY, self._replays.payload(tenant, sampled, now, key))
        with contextlib.suppress(Unavailable):  # the log is closed
            self.writer.append(record)
            self._replays.add(record, now, key)

    def tie(self, agent: Agent, ids: Sequence[int]) -> None:
        """An ordinary request in the agent's name is over, and this is its context: its KV goes with the agent."""
        if agent in self._book.roster:
            self.kv.tied(agent, ids)
        else:
            self.kv.drop_later(agent, ids)

    def account(self, tenant: str, agent: Agent | None, ids: Sequence[int], done: Done) -> None:
        """Count an ordinary request on its tenant's account, and on an agent's.

        `ids`: prompt and answer, whose KV is then pinned if the agent is, and given up if it is deleted.
        """
        if agent is not None:
            self.tie(agent, ids)
        if agent is None or agent not in self._book.roster:
            self._book.roster.ledger.count(tenant, done)
            return
        agent.used = self._outbox.now()
        with contextlib.suppress(Unavailable):
            self.writer.append(*self._outbox.count(agent, done), self._outbox.note(agent))
        if agent.record.pinned:
            self.kv.pin_later(agent, ids)

    # ------------------------------------------------------------------------------------------------------ to change

    async def create(
        self,
        tenant: str,
        *,
        id: str | None = None,
        messages: Sequence[dict[str, Any]] = (),
        tools: Sequence[dict[str, Any]] = (),
        metadata: dict[str, str] | None = None,
        ttl: float | None = None,
        pinned: bool = False,
    ) -> AgentInfo:
        """A new agent whose context begins with `messages`. Conflict if the id is taken. Durable when it returns."""
        return (await found(self._book, tenant, id, messages, tools, metadata or {}, ttl, pinned)).info()

    async def delete(self, tenant: str, id: str) -> None:
        """Interrupt what runs, and erase every byte of the agent that no other shares; gone from disk on return.

        Its KV goes too, except what other agents of the tenant share. Unavailable where the disk refuses it: the agent
        is gone, and its bytes go as soon as the disk works.
        """
        agent = self._find(tenant, id, over=True)
        if agent.starting:
            raise conflict(agent)
        await self._book.remove(agent)

    async def fork(self, tenant: str, id: str, *, turn: int | None = None, new_id: str | None = None) -> AgentInfo:
        """A new agent that shares this one's history up to a turn (default: the head); nothing is copied.

        NotFound for a turn that is not there, Conflict for one whose answer is not whole.
        """
        agent = self._find(tenant, id)
        at = agent.head if turn is None else self._book.turn(agent, turn)
        if at.state != "finished":
            raise Conflict(f"turn {at.number} of agent {agent.id} is {at.state}; fork at turn {at.before}")
        return (await self._book.fork(agent, at, new_id)).info()

    def export(self, tenant: str, id: str) -> AsyncGenerator[bytes, None]:
        """The agent as one file, piece by piece: as `portable.export` says. Conflict while a turn runs."""
        return portable.export(self._book.idle(tenant, id), self._book.roster, self._archive, self._book.rng)

    async def take_in(
        self, tenant: str, data: bytes, id: str | None = None, check: Callable[[portable.Portable], None] | None = None
    ) -> AgentInfo:
        """Make an agent of an exported file, under its own id or another. `check` raises for what may not come in.

        InvalidRequest for a file that is damaged or none of ours, Conflict if the id is taken.
        """
        return (await take_in(self._book, self.service.spec, tenant, data, id, check)).info()

    async def rollback(self, tenant: str, id: str, *, turn: int) -> AgentInfo:
        """Make another turn the head, 0 for the beginning. What followed it stays listed until it is collected."""
        at = self._book.turn(self._find(tenant, id), turn)
        agent = self._book.idle(tenant, id)
        await self._book.move(agent, at)
        return agent.info()

    # --------------------------------------------------------------------------------------------------------- turns

    async def turn(
        self,
        tenant: str,
        id: str,
        messages: Sequence[dict[str, Any]],
        options: SamplingOptions = PLAIN,
        *,
        request: int,
        share: str = "",
        fork_on_conflict: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> RunningTurn:
        """Begin a turn with new messages only; read its `batches`.

        Conflict while another turn runs or one was interrupted, unless `fork_on_conflict`: then it is the turn of a
        new agent. ContextTooLong with the figures, Overloaded and Unavailable as for any request.
        """
        with self._book.reading(tenant, id) as agent:
            return await self._turns.start(
                agent, messages, options, request, template_args, share=share, fork_on_conflict=fork_on_conflict
            )

    async def resume(self, tenant: str, id: str, *, request: int, share: str = "") -> RunningTurn:
        """Go on with the interrupted turn at the head: what it said before comes again, and then the rest.

        One whose answer the log lost is computed again. Conflict if there is none, or if another model began it.
        """
        with self._book.reading(tenant, id) as agent:
            return await self._turns.resume(agent, request, share)
