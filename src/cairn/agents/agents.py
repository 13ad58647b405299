"""Agents: named contexts with history, on the models of one server and one token log.

A turn is answered by an ordinary request. Its prompt is the exact token ids of the agent's context, followed by the ids
that the new message adds. The message is in the log before any of the answer is sent, the tokens follow as they are
sampled, and the end is durable before the last event. The log defines every agent; everything here can be rebuilt from
it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from cairn.agents import portable
from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.agent_service import AgentService, conflict, create_agent, import_agent, is_id
from cairn.agents.archive import Archive, Unreadable
from cairn.agents.chat_records import ChatRecords
from cairn.agents.content import Content
from cairn.agents.kv import AgentKv
from cairn.agents.listing import Overview, list_agents, list_turns
from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import Savings
from cairn.agents.log.token_log import TokenLog
from cairn.agents.log.writer_thread import Writer
from cairn.agents.maintenance import Maintenance
from cairn.agents.pending_writes import PendingWrites
from cairn.agents.portable import import_kv, with_kv
from cairn.agents.replay_records import ReplayRecords, newest
from cairn.agents.running_turn import RunningTurn
from cairn.agents.shared_agents import UNSHARED, SharedAgents
from cairn.agents.shared_journals import SharedJournals
from cairn.agents.shared_replays import SharedReplays
from cairn.agents.turn_tree import Agent
from cairn.agents.turns import TurnParams, Turns
from cairn.agents.types import AgentInfo, AgentPage, TurnInfo
from cairn.agents.work_journals import Journals
from cairn.cluster.beats import UsageExchange
from cairn.cluster.shared import SharedStore, open_shared
from cairn.config.config import Config, limits_of
from cairn.config.values import TenantLimits
from cairn.frontend.service import Service
from cairn.frontend.stream import RequestStream
from cairn.served_models.services import Services
from cairn.system.disk_threads import on_disk_thread
from cairn.system.interfaces import Clock, FileSystem, Rng
from cairn.system.metrics import AgentFigures
from cairn.types.errors import ConfigError, Conflict, InvalidRequest, NotFound, Unavailable
from cairn.types.stats import ImportedKv, Placed

LOCK_SECONDS = 5.0
"""How long a start waits for another process to release the folder."""


class Agents:
    """All agents of one server. Make them with `await Agents.open(...)`; end them with `await close()`.

    Every method runs on the event loop of the services. Methods that name an agent raise InvalidRequest for an invalid
    id, and NotFound for an agent that does not exist or belongs to another tenant. They raise Unavailable if the disk
    refuses a change; then nothing has changed, except that a deletion stays.
    """

    def __init__(
        self,
        services: Services,
        log: TokenLog,
        clock: Clock,
        rng: Rng,
        config: Config,
        salts: Mapping[str, bytes],
        shared: SharedStore | None = None,
    ) -> None:
        self.services, self._config = services, config
        registry = AgentRegistry(salts)
        orphans = registry.load(log.recovered)
        registry.savings.watch(lambda: services.disk_bytes)
        self._replays = ReplayRecords()
        self._sampled = self._replays.load(log.recovered)
        """Recorded answers of models that are not loaded yet, by the model's identity."""
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
        self._agents.shared = (
            SharedAgents(shared, clock, rng, registry, self.writer, self._pending, self._archive, self.kv)
            if shared is not None
            else None
        )
        if shared is not None and self._agents.shared is not None:
            self.journals.shared = SharedJournals(shared, self._agents.shared.holder, self._agents.shared.beats.alive)
        self.chats = ChatRecords(services, self._agents, self._replays, log=config.log)
        """Records of ordinary requests, which belong to no turn."""
        if shared is not None and self._agents.shared is not None:
            self._agents.shared.replays = self.chats.shared = SharedReplays(shared)
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
        """Lock the folder and read the log.

        `salts`: salts of the configured tenants, by name. `services`: all services of the server, with `service` among
        them; a swap changes them. Raise ConfigError if another process holds the folder, if it is not ours or of a
        newer format, or if the disk does not let us use it.
        """
        shared = open_shared(config, clock, files, rng)
        end = clock.now() + LOCK_SECONDS
        while True:
            try:
                opened = await on_disk_thread(TokenLog.open, files, folder, rng)
            except OSError as error:
                raise ConfigError(f"{folder}: the token log cannot be read: {error.strerror or error}") from error
            if opened is not None:
                every = services or Services(service)
                return cls(every, opened, clock, rng, config, salts, shared)
            if clock.now() >= end:
                raise ConfigError(
                    f"{folder}: another process holds the token log; end it, or name another folder with --agents-dir"
                )
            await asyncio.sleep(0.1)

    def _serve(self, service: Service) -> None:
        """Prepare a newly loaded model: give it the answers that it sampled in earlier runs."""
        service.metrics.agents = self.figures
        for tenant, sampled in self._sampled.pop(service.spec.identity, ()):
            service.chat.recall(tenant, sampled)

    async def close(self) -> None:
        """Interrupt running turns, write what is pending, and release the folder. May be called again."""
        await self._maintenance.close()
        await self.kv.close()
        for turn in [agent.running for agent in self._agents.registry if agent.running is not None]:
            await turn.stop()
            if not turn.over.is_set():
                await turn.close()
        if self.journals.shared is not None:
            await self.journals.shared.close()
        if self.chats.shared is not None:
            await self.chats.shared.close()
        if self._agents.shared is not None:
            await self._agents.shared.close()
        with contextlib.suppress(Unavailable):
            await self._pending.settle()
            if to_erase := self._pending.to_erase():
                await self._pending.erase(to_erase)
        with contextlib.suppress(Unavailable):
            await self.writer.close()

    async def tend(self) -> None:
        """Do the upkeep of every half minute: write what is pending, delete what has expired."""
        await self._maintenance.tend()

    @property
    def refuses(self) -> bool:
        """Whether the disk refuses what turns have to write."""
        return bool(self.writer.trouble)

    @property
    def troubles(self) -> list[str]:
        """Problems of the log: why it cannot be written, and what it had lost when it was opened."""
        shared = self._agents.shared.trouble if self._agents.shared is not None else ""
        return [one for one in (self.writer.trouble, self.writer.loss, shared) if one]

    async def _ensure(self, tenant: str, id: str) -> None:
        """Read an agent from the shared store, if the server has one, unless it was read before. Raise as `refresh`."""
        if self._agents.shared is not None and is_id(id) and not id.startswith(UNSHARED):
            await self._agents.shared.ensure(tenant, id)

    def exchange_usage(self, usage: UsageExchange) -> None:
        """Share the tenants' use of this server with the servers of the same store, and count theirs here."""
        if self._agents.shared is not None:
            self._agents.shared.beats.usage = usage

    async def refresh(self, tenant: str, id: str) -> None:
        """Update an agent from the shared store, if the server has one. Ids that no shared agent has are ignored.

        Raise Unavailable if the store does not answer, Damaged if its records cannot be used.
        """
        if self._agents.shared is not None and is_id(id) and not id.startswith(UNSHARED):
            await self._agents.shared.refresh(tenant, id)

    # ---------------------------------------------------------------------------------------------------- to look at

    def get(self, tenant: str, id: str) -> AgentInfo:
        """Return the public description of one agent."""
        return self._find(tenant, id).info()

    def page(
        self,
        tenant: str,
        *,
        limit: int = 20,
        after: str = "",
        passed_over: Callable[[str, Mapping[str, str]], object] = lambda id, metadata: False,
    ) -> AgentPage:
        """Return a page of a tenant's agents.

        `after`: an id, or `next` of another page; raise InvalidRequest for anything else. Agents for whose id and
        metadata `passed_over` is true are left out.
        """
        registry, now = self._agents.registry, self._pending.now()
        agents = [one for one in registry.of(tenant) if not passed_over(one.id, one.record.metadata)]
        return list_agents(agents, registry, tenant, limit, after, now)

    # These read the log. They raise Unavailable if the disk refuses to read, Damaged if the log is damaged there, and
    # NotFound if the agent is deleted meanwhile.

    async def turns(self, tenant: str, id: str, *, after: int = 0, limit: int | None = None) -> tuple[TurnInfo, ...]:
        """Return the turns `after` a number in order, abandoned branches included. Damaged turns are marked."""
        return await list_turns(self._agents.registry, self._archive, self._find(tenant, id), after, limit)

    async def beginning(self, tenant: str, id: str) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """Return the messages before the agent's first turn, and its tools."""
        with self._agents.reading(tenant, id) as agent:
            (root,) = await self._archive.contents([agent.root])
        return root.began.messages, [_shown(tool, root.began.strict) for tool in root.began.tools]

    async def last(self, tenant: str, id: str) -> Content:
        """Return the content of the agent's last turn; it must not be changed."""
        with self._agents.reading(tenant, id) as agent:
            (content,) = await self._archive.contents([agent.head])
        return content

    async def context(self, tenant: str, id: str) -> tuple[int, ...]:
        """Return the token ids of the agent's context for the served model; empty before its first turn with it."""
        with self._agents.reading(tenant, id) as agent:
            return tuple(await self.kv.ids(agent.head))

    async def bytes_of(self, tenant: str) -> int:
        """Return the bytes that a tenant's agents and journals take in the log."""
        keys: set[int] = set()
        for agent in self._agents.registry.of(tenant):
            agent.keeps(keys)
            keys.add(agent.key)
        keys |= self.journals.keys_of(tenant)
        return await asyncio.to_thread(self.writer.bytes_of, keys)

    def bound(self, limits: Callable[[str], TenantLimits], salts: Mapping[str, bytes] | None = None) -> None:
        """Set the limits of tenants from now on; `salts`: the new salts of configured tenants, by name, if changed."""
        self._agents.limits = limits
        if salts is not None:
            self._agents.registry.set_salts(salts)

    def model_of(self, tenant: str, id: str) -> tuple[bytes, str]:
        """Return the identity of the model that answered at the head, and the name of the agent's model.

        That is the model that it was made for, or that answered last. Both are empty if unknown, or if there is no such
        agent.
        """
        try:
            agent = self._find(tenant, id)
        except (NotFound, InvalidRequest):
            return b"", ""
        return agent.head.identity if agent.head.number else b"", agent.record.model

    def _service_of(self, agent: Agent) -> Service:
        """Return the service for a turn that names no model. Raise NotLoaded if it is being loaded."""
        service = self.services.of(agent.head.identity) if agent.head.number else None
        return service or self.services.named(agent.record.model) or self.services.first

    def figures(self) -> AgentFigures:
        """Return the counts over all tenants, for the metrics."""
        return msgspec.structs.replace(
            self._agents.registry.figures(), log_bytes=self.writer.bytes, log_dropped=self.writer.dropped
        )

    def savings(self, tenant: str) -> Savings:
        """Return the sum of savings over a tenant's agents and requests, deleted ones included."""
        return self._agents.registry.savings.totals.get(tenant, Savings())

    def savings_by_day(self, tenant: str) -> dict[int, Savings]:
        """Return the same by the day on which an answer ended, in days since 1970 (UTC), oldest first."""
        return dict(sorted(self._agents.registry.savings.days.get(tenant, {}).items()))

    def overview(self, tenant: str) -> Overview:
        """Return a follower of a tenant's agents, which reports what has changed since the last look."""
        return Overview(self._agents.registry, self.writer, tenant, self._pending.now)

    # ---------------------------------------------------------------------------------------------------- its KV

    async def where(self, tenant: str, id: str) -> Placed:
        """Return how many leading tokens of the context each tier holds.

        Raise Unavailable while the worker is being replaced.
        """
        with self._agents.reading(tenant, id) as agent:
            return await self.kv.where(agent)

    async def pin(self, tenant: str, id: str, pinned: bool) -> AgentInfo:
        """Protect the KV of the agent's context from eviction, now and after every turn, or no longer."""
        await self._ensure(tenant, id)
        with self._agents.reading(tenant, id) as agent:
            changed = await self._agents.set_pinned(agent, pinned)
            if agent in self._agents.registry:  # it was not deleted meanwhile
                try:
                    await self.kv.pin(agent)
                except Unreadable:  # no retry helps against damage: undo the change
                    if changed and agent in self._agents.registry:
                        await self._agents.set_pinned(agent, not pinned)
                    raise
                except Unavailable:
                    self._agents.pin_later(agent)
                    raise
            return agent.info()

    async def prefetch(self, tenant: str, id: str) -> Placed:
        """Load the KV of the context into the pool; return where it is then."""
        with self._agents.reading(tenant, id) as agent:
            return await self.kv.prefetch(agent)

    async def evict(self, tenant: str, id: str, *, disk: bool = False) -> Placed:
        """Evict the KV of the context, except what other agents of the tenant share; return where it is then.

        With `disk` also from the disk. Then raise Conflict while the agent is pinned.
        """
        with self._agents.reading(tenant, id) as agent:
            return await self.kv.evict(agent, disk=disk)

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
        """Create an agent whose context begins with `messages`.

        Calls of its `strict` tools must fit their schema in every turn. `model`: name of the model for turns that name
        none. Raise Conflict if the id is taken. Durable when it returns.
        """
        given, whose = metadata or {}, model if self.services.several else ""
        return (await create_agent(self._agents, tenant, id, messages, tools, strict, given, ttl, pinned, whose)).info()

    async def describe(self, tenant: str, id: str, metadata: dict[str, str]) -> AgentInfo:
        """Replace an agent's metadata. Durable when it returns; on Unavailable nothing has changed."""
        return await self.describe_by(tenant, id, lambda _: metadata)

    async def describe_by(self, tenant: str, id: str, change: Callable[[dict[str, str]], dict[str, str]]) -> AgentInfo:
        """Change an agent's metadata as `describe` does.

        `change`: returns the new metadata for those that the agent has once earlier changes are written or refused.
        """
        await self._ensure(tenant, id)
        agent = self._find(tenant, id)
        await self._agents.describe(agent, change)
        return agent.info()

    def touch(self, tenant: str, id: str) -> None:
        """Count a use of an agent, if there is one of that id. It is durable with the next change of any agent."""
        with contextlib.suppress(NotFound, InvalidRequest):
            self._agents.touch(self._find(tenant, id))

    async def delete(self, tenant: str, id: str) -> None:
        """Interrupt the running turn and erase every byte of the agent that no other shares, also on the disk.

        Its KV goes too, except what other agents of the tenant share. Raise Unavailable if the disk refuses: the agent
        is gone, and its bytes are erased as soon as the disk works.
        """
        agent = self._find(tenant, id, expired=True)
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
        """Create an agent that shares this one's history up to a turn (default: the head).

        No turn is copied. The metadata is, unless there is new metadata. Raise NotFound for a turn that does not exist,
        Conflict for one whose answer is incomplete.
        """
        await self._ensure(tenant, id)
        agent = self._find(tenant, id)
        at = agent.head if turn is None else self._agents.turn(agent, turn)
        if at.state != "finished":
            raise Conflict(f"turn {at.number} of agent {agent.id} is {at.state}; fork at turn {at.parent_number}")
        return (await self._agents.fork(agent, at, new_id, metadata)).info()

    async def make_room(self, tenant: str, prefix: str) -> bool:
        """Delete the idle agent of a tenant that was used least recently, of those whose id begins with `prefix`.

        Return whether there was one.
        """
        idle = [one for one in self._agents.registry.of(tenant) if one.id.startswith(prefix) and not one.busy]
        if not idle:
            return False
        await self._agents.remove(min(idle, key=lambda one: (one.used, one.record.created)))
        return True

    def export(self, tenant: str, id: str, *, kv_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        """Return the agent as one file, in pieces, as `portable.export` does.

        Up to `kv_bytes` bytes of its KV come first. Raise Conflict while a turn runs.
        """
        agent = self._agents.idle(tenant, id)
        pieces = portable.export(agent, self._agents.registry, self._archive, self._agents.rng)
        return with_kv(pieces, self.kv, agent, kv_bytes) if kv_bytes else pieces

    async def import_kv(self, tenant: str, id: str, file: BinaryIO, size: int, folder: Path) -> tuple[ImportedKv, str]:
        """Store the KV in the first `size` bytes of the file that an agent was just made from.

        Return what was stored, and why not all of it.
        """
        return await import_kv(self.kv, self._find(tenant, id), file, size, folder)

    async def import_agent(
        self,
        tenant: str,
        data: bytes,
        id: str | None = None,
        check: Callable[[portable.Portable], None] | None = None,
        service: Service | None = None,
    ) -> AgentInfo:
        """Create an agent from an exported file, under its own id or another.

        `check` raises an error to refuse the file's content. `service`: the model to use, on a server with several.
        Raise InvalidRequest for a file that is damaged or not ours, Conflict if the id is taken.
        """
        spec = (service or self.services.first).spec
        return (await import_agent(self._agents, spec, tenant, data, id, check)).info()

    async def rollback(self, tenant: str, id: str, *, turn: int, erase: bool = False) -> AgentInfo:
        """Make another turn the head; 0 is the beginning. Later turns stay listed until they are collected.

        With `erase` they are erased at once, unless other servers share the agent.
        """
        await self._ensure(tenant, id)
        at = self._agents.turn(self._find(tenant, id), turn)
        agent = self._agents.idle(tenant, id)
        await self._agents.move(agent, at)
        if erase:
            await self._agents.erase_after(agent, at)
        return agent.info()

    # --------------------------------------------------------------------------------------------------------- turns

    async def turn(
        self,
        tenant: str,
        id: str,
        messages: Sequence[dict[str, Any]],
        params: TurnParams,
        *,
        fork_on_conflict: bool = False,
        once: str = "",
    ) -> RunningTurn:
        """Begin a turn with new messages only; the caller reads its `batches`.

        `once`: the client's Idempotency-Key; if the turn at the head has it, that turn's answer is sent again.
        Raise Conflict while another turn runs or the last was interrupted; with `fork_on_conflict` the turn goes to a
        new agent instead. Raise ContextTooLong with the figures, and Overloaded and Unavailable as for any request.
        """
        await self._ensure(tenant, id)
        with self._agents.reading(tenant, id) as agent:
            answering = params.service or self._service_of(agent)
            return await self._turns.start(
                answering, agent, messages, params, fork_on_conflict=fork_on_conflict, once=once
            )

    async def aside(
        self, tenant: str, id: str, messages: Sequence[dict[str, Any]], params: TurnParams
    ) -> RequestStream:
        """Answer a question that the agent will not remember: its context is extended for this request alone.

        Nothing of it goes to the disk. Raise Conflict while a turn runs or the last was interrupted.
        """
        with self._agents.reading(tenant, id) as agent:
            return await self._turns.aside(params.service or self._service_of(agent), agent, messages, params)

    async def resume(self, tenant: str, id: str, *, request: int, share: str = "") -> RunningTurn:
        """Continue the interrupted turn at the head: first what was answered before, then the rest.

        If the log lost the answer, it is computed again. Raise Conflict if no turn was interrupted, or if another model
        began it.
        """
        await self._ensure(tenant, id)
        with self._agents.reading(tenant, id) as agent:
            return await self._turns.resume(agent, request, share)


def _shown(tool: Mapping[str, Any], strict: Sequence[str]) -> Mapping[str, Any]:
    """Return a tool as it was sent, with its `strict` flag."""
    function = tool["function"]
    return {**tool, "function": function | {"strict": True}} if function["name"] in strict else tool
