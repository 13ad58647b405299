"""Agents: named contexts with history, on the models of one server and one token log.

A turn is answered by an ordinary request whose prompt is the exact ids of the agent's context and what the new message
adds. Its message is in the log before anything of the answer is given out, its tokens follow as they come, and its end
is durable before the last event. What an agent is, is what the log says; everything here can be rebuilt from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from cairn.agents import portable
from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.agent_service import AgentService, conflict, create_agent, import_agent
from cairn.agents.archive import Archive, Unreadable
from cairn.agents.content import Content
from cairn.agents.journals import Journals
from cairn.agents.kv import AgentKv
from cairn.agents.log.index import RecordKind
from cairn.agents.log.log import Log
from cairn.agents.log.records import Savings
from cairn.agents.log.writer import Writer, on_disk_thread
from cairn.agents.maintenance import Maintenance
from cairn.agents.overview import Overview
from cairn.agents.pending_writes import PendingWrites
from cairn.agents.portable import take_in, with_kv
from cairn.agents.replay_records import ReplayRecords, newest
from cairn.agents.running_turn import RunningTurn
from cairn.agents.turn_tree import Agent
from cairn.agents.turns import Gate, Turns
from cairn.agents.types import AgentInfo, AgentPage, TurnInfo
from cairn.config.config import Config, TenantLimits, limits_of
from cairn.frontend.requests import PLAIN, SamplingOptions
from cairn.frontend.service import Service
from cairn.frontend.stream import RequestStream
from cairn.router.services import Services
from cairn.system.interfaces import Clock, FileSystem, Rng
from cairn.system.metrics import AgentFigures
from cairn.text.chat.prompt import Sampled
from cairn.text.grammar.grammar import ANYTHING, Wanted
from cairn.types.errors import ConfigError, Conflict, InvalidRequest, NotFound, Unavailable
from cairn.types.outputs import Done, FinishReason
from cairn.types.stats import Placed, TakenIn

KEPT_SECONDS = 0.25
"""How long the end of an answer waits for a disk to take what was sampled for it."""
LOCK_SECONDS = 5.0
"""How long a start waits for a process that still holds the folder."""


class Agents:
    """All agents of one server. Make them with `await Agents.open(...)`; end them with `await close()`.

    Every method runs on the event loop of the services. Where an agent is named: InvalidRequest for what is no id,
    NotFound for an agent that is not there or is another tenant's. What the disk refuses is Unavailable, and nothing
    has changed then, except that what was deleted stays so.
    """

    def __init__(
        self,
        services: Services,
        log: Log,
        clock: Clock,
        rng: Rng,
        config: Config,
        salts: Mapping[str, bytes],
    ) -> None:
        self.services, self._config = services, config
        registry = AgentRegistry(salts)
        orphans = registry.load(log.recovered)
        registry.savings.watch(lambda: services.disk_bytes)
        self._replays = ReplayRecords()
        self._sampled = self._replays.load(log.recovered)
        """What models sampled that are not loaded yet, by their identity."""
        left = [record for record in log.recovered if record.kind == RecordKind.UNPIN]
        journals = [record for record in log.recovered if record.kind in (RecordKind.JOURNAL, RecordKind.ENTRY)]
        log.recovered = []
        self._archive = Archive(log)
        self.kv = AgentKv(services, registry, self._archive)
        self.writer = Writer(log)
        self._pending = PendingWrites(registry, self.writer, clock, self._replays)
        self.journals = Journals(self.writer, self._pending, rng, journals)
        self._agents = AgentService(
            registry, self.writer, self._pending, self.kv, rng, self._replays, limits_of(config)
        )
        self._agents.resume_pins(left)
        self._turns = Turns(services, self._agents, self._archive, clock)
        self._maintenance = Maintenance(self._agents, self._replays, orphans)
        self._find = self._agents.find
        for service in services:
            self._serve(service)
        services.watch(self._serve)
        self._sampled = {model: newest(found) for model, found in self._sampled.items()}

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
        services: Services | None = None,
    ) -> Agents:
        """Lock the folder and read the log. `salts`: of the tenants that may call, by name. `services`: all that the
        server has, `service` among them; a swap changes them.

        Raises ConfigError for a folder that another process holds, that is not ours or of a newer format, or that the
        disk does not let us use.
        """
        end = clock.now() + LOCK_SECONDS
        while True:
            try:
                opened = await on_disk_thread(Log.open, files, folder, rng)
            except OSError as error:
                raise ConfigError(f"{folder}: the token log cannot be read: {error.strerror or error}") from error
            if opened is not None:
                every = services or Services(service)
                return cls(every, opened, clock, rng, config, salts)
            if clock.now() >= end:
                raise ConfigError(
                    f"{folder}: another process holds the token log; end it, or name another folder with --agents-dir"
                )
            await asyncio.sleep(0.1)

    def _serve(self, service: Service) -> None:
        """A model was loaded: what it sampled in earlier runs is known again."""
        service.metrics.agents = self.figures
        for tenant, sampled in self._sampled.pop(service.spec.identity, ()):
            service.chat.recall(tenant, sampled)

    async def close(self) -> None:
        """Interrupt what runs, write what is left, and let others have the folder. May be called again."""
        await self._maintenance.close()
        await self.kv.close()
        for turn in [agent.running for agent in self._agents.registry if agent.running is not None]:
            await turn.stop()
            if not turn.over.is_set():
                await turn.close()
        with contextlib.suppress(Unavailable):
            await self._pending.settle()
            if to_erase := self._pending.to_erase():
                await self._pending.erase(to_erase)
        with contextlib.suppress(Unavailable):
            await self.writer.close()

    async def tend(self) -> None:
        """What is done every half minute: write what is owed, erase what is over."""
        await self._maintenance.tend()

    @property
    def refuses(self) -> bool:
        """Whether the disk refuses what turns have to write."""
        return bool(self.writer.trouble)

    @property
    def troubles(self) -> list[str]:
        """Why the log does not work now, and what it had lost when it was opened, a sentence each."""
        return [one for one in (self.writer.trouble, self.writer.loss) if one]

    # ---------------------------------------------------------------------------------------------------- to look at

    def get(self, tenant: str, id: str) -> AgentInfo:
        """What callers are told of one agent."""
        return self._find(tenant, id).info()

    def page(
        self,
        tenant: str,
        *,
        limit: int = 20,
        after: str = "",
        passed_over: Callable[[str, Mapping[str, str]], object] = lambda id, metadata: False,
    ) -> AgentPage:
        """A tenant's agents `after` an id or what `next` of another page says; InvalidRequest for anything else. Those
        are left out that are to be `passed_over` by id and metadata."""
        registry, now = self._agents.registry, self._pending.now()
        agents = [one for one in registry.of(tenant) if not passed_over(one.id, one.record.metadata)]
        return list_agents(agents, registry, tenant, limit, after, now)

    # What these tell is read from the log: Unavailable where the disk gives out nothing, Damaged where it is damaged,
    # and NotFound where the agent is deleted meanwhile.

    async def turns(self, tenant: str, id: str, *, after: int = 0, limit: int | None = None) -> tuple[TurnInfo, ...]:
        """Every turn `after` a number, abandoned branches included, by number; one that is damaged says so."""
        return await list_turns(self._agents.registry, self._archive, self._find(tenant, id), after, limit)

    async def beginning(self, tenant: str, id: str) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """What the agent was told before its first turn, and its tools."""
        with self._agents.reading(tenant, id) as agent:
            (root,) = await self._archive.contents([agent.root])
        return root.began.messages, [_shown(tool, root.began.strict) for tool in root.began.tools]

    async def last(self, tenant: str, id: str) -> Content:
        """What the agent's last turn holds; it is only to be read."""
        with self._agents.reading(tenant, id) as agent:
            (found,) = await self._archive.contents([agent.head])
        return found

    async def context(self, tenant: str, id: str) -> tuple[int, ...]:
        """The ids of the agent's context for the model that is served; none before its first turn with it."""
        with self._agents.reading(tenant, id) as agent:
            return tuple(await self.kv.ids(agent.head))

    async def bytes_of(self, tenant: str) -> int:
        """How many bytes of the log a tenant's agents and journals take."""
        keys: set[int] = set()
        for agent in self._agents.registry.of(tenant):
            agent.keeps(keys)
            keys.add(agent.key)
        keys |= self.journals.keys_of(tenant)
        return await asyncio.to_thread(self.writer.bytes_of, keys)

    def bound(self, limits: Callable[[str], TenantLimits], salts: Mapping[str, bytes] | None = None) -> None:
        """What each tenant may keep from now on; `salts`: of those that may call, by name, where they are others."""
        self._agents.limits = limits
        if salts is not None:
            self._agents.registry.know(salts)

    def model_of(self, tenant: str, id: str) -> tuple[bytes, str]:
        """The identity of the model that answered at the agent's head, and the name of the one that it was made for, or
        that answered last; empty where there is none, or no such agent."""
        try:
            agent = self._find(tenant, id)
        except (NotFound, InvalidRequest):
            return b"", ""
        return agent.head.identity if agent.head.number else b"", agent.record.model

    def service_of(self, tenant: str, id: str) -> Service:
        """The service that answers a turn of the agent which names no model. NotLoaded where that is being loaded."""
        return self._service_of(self._find(tenant, id))

    def _service_of(self, agent: Agent) -> Service:
        found = self.services.of(agent.head.identity) if agent.head.number else None
        return found or self.services.named(agent.record.model) or self.services.first

    def figures(self) -> AgentFigures:
        """All tenants together, for the metrics."""
        return msgspec.structs.replace(
            self._agents.registry.figures(), log_bytes=self.writer.bytes, log_dropped=self.writer.dropped
        )

    def savings(self, tenant: str) -> Savings:
        """The sum over a tenant's agents and requests, also those that are gone."""
        return self._agents.registry.savings.totals.get(tenant, Savings())

    def savings_by_day(self, tenant: str) -> dict[int, Savings]:
        """The same by the day on which an answer ended, in days since 1970 (UTC), the oldest first."""
        return dict(sorted(self._agents.registry.savings.days.get(tenant, {}).items()))

    def overview(self, tenant: str) -> Overview:
        """For those who follow what changes: what is different since they last looked."""
        return Overview(self._agents.registry, self.writer, tenant, self._pending.now)

    # ---------------------------------------------------------------------------------------------------- its KV

    async def where(self, tenant: str, id: str) -> Placed:
        """How many leading tokens of the context each tier has. Unavailable while the worker is being replaced."""
        with self._agents.reading(tenant, id) as agent:
            return await self.kv.where(agent)

    async def pin(self, tenant: str, id: str, pinned: bool) -> AgentInfo:
        """Keep the KV of the agent's context in the stores from eviction, now and after every turn; or no longer."""
        with self._agents.reading(tenant, id) as agent:
            changed = await self._agents.set_pinned(agent, pinned)
            if agent in self._agents.registry:  # nobody deleted it meanwhile
                try:
                    await self.kv.pin(agent)
                except Unreadable:  # damage does not pass: it is as it was before
                    if changed and agent in self._agents.registry:
                        await self._agents.set_pinned(agent, not pinned)
                    raise
                except Unavailable:
                    self._agents.pin_later(agent)
                    raise
            return agent.info()

    async def prefetch(self, tenant: str, id: str) -> Placed:
        """Bring the KV of the context up into the pool; where it is then."""
        with self._agents.reading(tenant, id) as agent:
            return await self.kv.prefetch(agent)

    async def evict(self, tenant: str, id: str, *, disk: bool = False) -> Placed:
        """Give up the KV of the context, except what other agents of the tenant share; where it is then. With `disk`
        Conflict while the agent is pinned."""
        with self._agents.reading(tenant, id) as agent:
            return await self.kv.evict(agent, disk=disk)

    # ---------------------------------------------------------------------------------- requests in an agent's name

    def named(self, tenant: str, id: str) -> Agent:
        """The agent in whose name a request is made, for `keep` and `account`; it may be deleted before they are.

        It is used now, and as long as the request is computed in `using`.
        """
        agent = self._find(tenant, id)
        agent.used = self._pending.now()
        return agent

    @contextlib.contextmanager
    def using(self, agent: Agent) -> Iterator[None]:
        """While an ordinary request in the agent's name is computed, however long: its time to live does not run."""
        agent.open_requests += 1
        try:
            yield
        finally:
            agent.open_requests -= 1
            agent.used = self._pending.now()

    # `identity` is that of the model which answers; the first one's where nothing is said.

    def keep(self, tenant: str, sampled: Sampled, agent: Agent | None = None, identity: bytes = b"") -> None:
        """Keep what was sampled for an ordinary request in the log, where that is wanted."""
        if not self._config.log or (agent is not None and agent not in self._agents.registry):
            return
        now, key = self._pending.now(), agent.key if agent is not None else 0
        whose = identity or self.services.first.spec.identity
        record = self.writer.record(RecordKind.REPLAY, self._replays.payload(tenant, sampled, whose, now, key))
        with contextlib.suppress(Unavailable):  # the log is closed
            self.writer.append(record)
            self._replays.add(record, now, key)

    async def kept(self) -> None:
        """Wait, a moment at most, until what `keep` was told would outlive this process.

        A client that has an answer sends it back, and what was sampled for it must then be known, or the prompt is
        another split into tokens, and so may the next answer be.
        """
        await self.writer.written(KEPT_SECONDS)

    def add_request_context(self, agent: Agent, ids: Sequence[int], identity: bytes = b"") -> None:
        """An ordinary request in the agent's name is over, and this is its context: its KV goes with the agent."""
        whose = identity or self.services.first.spec.identity
        if agent in self._agents.registry:
            self.kv.add_request_context(agent, ids, whose)
        else:
            self.kv.drop_later(agent, ids, whose)

    def account(self, tenant: str, agent: Agent | None, ids: Sequence[int], done: Done, identity: bytes = b"") -> None:
        """Count an ordinary request on its tenant's account, and on an agent's.

        `ids`: prompt and answer, whose KV is then pinned if the agent is, and given up if it is deleted.
        """
        if done.reason is FinishReason.TOOL_CALLS:
            salt = self._agents.registry.salt(tenant)
            self.kv.request_ended_in_call(salt, ids, identity or self.services.first.spec.identity)
        if agent is not None:
            self.add_request_context(agent, ids, identity)
        if agent is None or agent not in self._agents.registry:
            self._agents.registry.savings.count(tenant, done, self._pending.now())
            return
        agent.used = self._pending.now()
        with contextlib.suppress(Unavailable):
            self.writer.append(*self._pending.count(agent, done), self._pending.note(agent))
        if agent.record.pinned:
            self.kv.pin_later(agent, ids, identity or self.services.first.spec.identity)

    # ------------------------------------------------------------------------------------------------------ to change

    async def create(
        self,
        tenant: str,
        *,
        id: str | None = None,
        messages: Sequence[dict[str, Any]] = (),
        tools: Sequence[dict[str, Any]] = (),
        strict: Sequence[str] = (),
        metadata: dict[str, str] | None = None,
        ttl: float | None = None,
        pinned: bool = False,
        model: str = "",
    ) -> AgentInfo:
        """A new agent whose context begins with `messages`; calls of its `strict` tools fit their schema in every turn.
        `model`: the name of the one that is to answer where a turn names none.

        Conflict if the id is taken. Durable when it returns.
        """
        given, whose = metadata or {}, model if self.services.several else ""
        return (await create_agent(self._agents, tenant, id, messages, tools, strict, given, ttl, pinned, whose)).info()

    async def describe(self, tenant: str, id: str, metadata: dict[str, str]) -> AgentInfo:
        """Give an agent other metadata. Durable when it returns; on Unavailable nothing has changed."""
        agent = self._find(tenant, id)
        await self._agents.describe(agent, metadata)
        return agent.info()

    async def delete(self, tenant: str, id: str) -> None:
        """Interrupt what runs, and erase every byte of the agent that no other shares; gone from disk on return.

        Its KV goes too, except what other agents of the tenant share. Unavailable where the disk refuses it: the agent
        is gone, and its bytes go as soon as the disk works.
        """
        agent = self._find(tenant, id, over=True)
        if agent.starting:
            raise conflict(agent)
        await self._agents.remove(agent)

    async def fork(
        self,
        tenant: str,
        id: str,
        *,
        turn: int | None = None,
        new_id: str | None = None,
        metadata: dict[str, str] | None = None,
    ) -> AgentInfo:
        """A new agent that shares this one's history up to a turn (default: the head); nothing is copied, but the
        metadata where there are no others.

        NotFound for a turn that is not there, Conflict for one whose answer is not whole.
        """
        agent = self._find(tenant, id)
        at = agent.head if turn is None else self._agents.turn(agent, turn)
        if at.state != "finished":
            raise Conflict(f"turn {at.number} of agent {agent.id} is {at.state}; fork at turn {at.before}")
        return (await self._agents.fork(agent, at, new_id, metadata)).info()

    async def make_room(self, tenant: str, prefix: str) -> bool:
        """Delete the oldest agent of a tenant that does nothing and whose id begins so; whether there was one."""
        for agent in reversed(list(self._agents.registry.of(tenant))):
            if agent.id.startswith(prefix) and not agent.busy:
                await self._agents.remove(agent)
                return True
        return False

    def export(self, tenant: str, id: str, *, kv_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        """The agent as one file, piece by piece: as `portable.export` says, with so many bytes of its KV at most before
        it. Conflict while a turn runs."""
        agent = self._agents.idle(tenant, id)
        pieces = portable.export(agent, self._agents.registry, self._archive, self._agents.rng)
        return with_kv(pieces, self.kv, agent, kv_bytes) if kv_bytes else pieces

    async def take_in(self, tenant: str, id: str, file: BinaryIO, size: int, folder: Path) -> tuple[TakenIn, str]:
        """Store the KV in the first `size` bytes of the file that an agent was just made of; why not all of it."""
        return await take_in(self.kv, self._find(tenant, id), file, size, folder)

    async def import_agent(
        self,
        tenant: str,
        data: bytes,
        id: str | None = None,
        check: Callable[[portable.Portable], None] | None = None,
        service: Service | None = None,
    ) -> AgentInfo:
        """Make an agent of an exported file, under its own id or another. `check` raises for what may not come in.
        `service`: of the model that is to have it, where there are several.

        InvalidRequest for a file that is damaged or none of ours, Conflict if the id is taken.
        """
        spec = (service or self.services.first).spec
        return (await import_agent(self._agents, spec, tenant, data, id, check)).info()

    async def rollback(self, tenant: str, id: str, *, turn: int) -> AgentInfo:
        """Make another turn the head, 0 for the beginning. What followed it stays listed until it is collected."""
        at = self._agents.turn(self._find(tenant, id), turn)
        agent = self._agents.idle(tenant, id)
        await self._agents.move(agent, at)
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
        wanted: Wanted = ANYTHING,
        service: Service | None = None,
        gate: Gate | None = None,
    ) -> RunningTurn:
        """Begin a turn with new messages only; read its `batches`. `service`: of the model that is to answer, where
        there are several. `gate` is waited for once the prompt is there.

        Conflict while another turn runs or one was interrupted, unless `fork_on_conflict`: then it is the turn of a
        new agent. ContextTooLong with the figures, Overloaded and Unavailable as for any request.
        """
        with self._agents.reading(tenant, id) as agent:
            return await self._turns.start(
                service or self._service_of(agent),
                agent,
                messages,
                options,
                request,
                template_args,
                share=share,
                fork_on_conflict=fork_on_conflict,
                wanted=wanted,
                gate=gate,
            )

    async def aside(
        self,
        tenant: str,
        id: str,
        messages: Sequence[dict[str, Any]],
        options: SamplingOptions = PLAIN,
        *,
        request: int,
        share: str = "",
        template_args: Mapping[str, Any] | None = None,
        wanted: Wanted = ANYTHING,
        service: Service | None = None,
        gate: Gate | None = None,
    ) -> RequestStream:
        """The answer to a question that the agent will not remember: its context is extended for this request alone.

        Nothing of it goes to the disk. Conflict while a turn runs or one was interrupted.
        """
        with self._agents.reading(tenant, id) as agent:
            answering = service or self._service_of(agent)
            return await self._turns.aside(
                answering, agent, messages, options, request, template_args, share=share, wanted=wanted, gate=gate
            )

    async def resume(self, tenant: str, id: str, *, request: int, share: str = "") -> RunningTurn:
        """Go on with the interrupted turn at the head: what it said before comes again, and then the rest.

        One whose answer the log lost is computed again. Conflict if there is none, or if another model began it.
        """
        with self._agents.reading(tenant, id) as agent:
            return await self._turns.resume(agent, request, share)


def _shown(tool: Mapping[str, Any], strict: Sequence[str]) -> Mapping[str, Any]:
    """A tool as it was sent, `strict` in it."""
    function = tool["function"]
    return {**tool, "function": function | {"strict": True}} if function["name"] in strict else tool


def list_agents(
    given: Iterable[Agent], registry: AgentRegistry, tenant: str, limit: int, after: str, now: float
) -> AgentPage:
    """Those whose time is not over, `after` an id or what `next` of another page says; InvalidRequest for all else."""
    agents = [agent for agent in given if not agent.over(now)]
    if after:
        last = _named(registry, tenant, after)
        agents = [agent for agent in agents if _place(agent) > last]
    some, more = agents[:limit], len(agents) > limit
    next = f"{some[-1].record.created!r}:{some[-1].id}" if more else None
    return AgentPage(agents=tuple(agent.info() for agent in some), more=more, next=next)


async def list_turns(
    registry: AgentRegistry, archive: Archive, agent: Agent, after: int, limit: int | None
) -> tuple[TurnInfo, ...]:
    """Turns of an agent beyond a number, as far as the log gives them. NotFound if the agent is deleted meanwhile."""
    while True:
        some, path = agent.turns(), {turn.key for turn in agent.head.path()}
        some = [turn for turn in some if turn.number > after][:limit]
        pairs = list(zip(some, await archive.readable(some), strict=True))
        if agent not in registry:
            raise NotFound(f"there is no agent {agent.id}", field="id")
        if all((content is not None and not content.lost) or registry.holds(turn) for turn, content in pairs):
            return tuple(turn.info(content, current=turn.key in path) for turn, content in pairs)


def _named(registry: AgentRegistry, tenant: str, after: str) -> tuple[float, str]:
    """The place in the list that `after` names; one with a time is a place also where no agent is any more."""
    created, mark, id = after.rpartition(":")
    if mark:
        with contextlib.suppress(ValueError):
            if math.isfinite(time := float(created)):
                return -time, id
    elif (agent := registry.find(tenant, id)) is not None:
        return _place(agent)
    raise InvalidRequest("after must be the id of an agent, or what `next` of a list said", field="after")


def _place(agent: Agent) -> tuple[float, str]:
    """Where an agent is in the list, as `AgentRegistry.of` sorts it."""
    return -agent.record.created, agent.id
