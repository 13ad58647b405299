"""Changes to agents, made in memory and in the log together.

If the disk refuses a change, memory is reset, and the log is corrected once it can be written. Only a deletion stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from cairn.agents import portable
from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.archive import typed_read_errors
from cairn.agents.kv import AgentKv, owners
from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import AgentRecord, SavingsRecord, TurnRecord, UnpinRecord, check, decode
from cairn.agents.log.segment import Record
from cairn.agents.log.writer_thread import Writer
from cairn.agents.pending_writes import PendingWrites
from cairn.agents.replay_records import ReplayRecords
from cairn.agents.shared_agents import UNSHARED, SharedAgents
from cairn.agents.turn_tree import NOBODY, Agent, Turn
from cairn.cluster.chain import Moved
from cairn.config.values import TenantLimits
from cairn.system.interfaces import Rng
from cairn.types.errors import Conflict, InvalidRequest, NotFound, Overloaded, QuotaExceeded, Unavailable
from cairn.types.model_spec import ModelSpec

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RESERVED = frozenset({"import"})
"""Ids that would clash with routes."""
MAX_AGENTS = 10_000
"""Agents of one tenant."""


class AgentService:
    """Operations on one server's agents: registry, log and KV."""

    def __init__(
        self,
        registry: AgentRegistry,
        writer: Writer,
        pending: PendingWrites,
        kv: AgentKv,
        rng: Rng,
        replays: ReplayRecords,
        limits: Callable[[str], TenantLimits] = lambda tenant: TenantLimits(),
    ) -> None:
        self.limits = limits
        """Returns the limits of a tenant."""
        self.registry, self.writer, self.pending, self.kv, self.rng = registry, writer, pending, kv, rng
        self._replays = replays
        self.shared: SharedAgents | None = None
        """The chains of agents in the shared store, if there is one."""
        self._unsent_pins: dict[int, Record] = {}
        """Unpin records of agents whose pins the stores do not know correctly, by the agent's key."""
        self._changing: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()
        """Locks that order the calls of `set_pinned` and `describe` on one agent, by its key."""

    def sharing(self, agent: Agent) -> SharedAgents | None:
        """Return the chains if the agent has one: not those that keep a stored response or conversation."""
        return None if agent.id.startswith(UNSHARED) else self.shared

    # ---------------------------------------------------------------------------------------------------- to look up

    def find(self, tenant: str, id: str, *, expired: bool = False) -> Agent:
        """Return one agent.

        Raise InvalidRequest for an invalid id, NotFound for an agent that does not exist, belongs to another tenant, or
        has outlived its time to live. With `expired`, the last kind is returned.
        """
        check_id(id)
        agent = self.registry.find(tenant, id)
        if agent is None or (not expired and agent.expired(self.pending.now())):
            raise NotFound(f"there is no agent {id[:64]}", field="id")
        return agent

    @contextlib.contextmanager
    def reading(self, tenant: str, id: str) -> Iterator[Agent]:
        """Yield one agent whose turns are about to be read; errors are raised as `typed_read_errors` says."""
        agent = self.find(tenant, id)
        with typed_read_errors(self.registry, agent):
            yield agent

    def idle(self, tenant: str, id: str) -> Agent:
        """Return one agent, as `find` does. Raise Conflict while a turn of it runs."""
        agent = self.find(tenant, id)
        if agent.busy:
            raise conflict(agent)
        return agent

    def check_there(self, agent: Agent) -> None:
        """Raise NotFound if the agent was deleted since it was found, Moved if it was read again meanwhile."""
        if agent in self.registry:
            return
        now = self.registry.find(agent.tenant, agent.id)
        if now is not None and now.record.created == agent.record.created:
            raise Moved(f"agent {agent.id} is being read again; send the request again", retry_after=1.0)
        raise NotFound(f"there is no agent {agent.id}", field="id")

    def turn(self, agent: Agent, number: int) -> Turn:
        """Return one of its turns; 0 is the beginning. Raise NotFound if there is none."""
        turn = agent.turn(number)
        if turn is None:
            raise NotFound(f"agent {agent.id} has no turn {number}", field="turn")
        return turn

    async def free_id(self, tenant: str, id: str | None) -> None:
        """Delete the agent of that id if it has outlived its time to live, so that the id is free.

        Other servers may have used or deleted it since. Raise as `SharedAgents.refresh` does.
        """
        agent = self.registry.find(tenant, id) if id is not None else None
        if agent is not None and (shared := self.sharing(agent)) is not None:
            await shared.refresh(tenant, agent.id)
            agent = self.registry.find(tenant, agent.id)
        if agent is not None and agent.expired(self.pending.now()):
            await self.remove(agent)

    def new_id(self, tenant: str, id: str | None) -> str:
        """Return the id of a new agent: `id` itself, or a random one.

        Raise Conflict if it is taken, QuotaExceeded at the tenant's limit, Overloaded at MAX_AGENTS.
        """
        most = self.limits(tenant).max_agents
        if most is not None and self.registry.count(tenant) >= most:
            raise QuotaExceeded(f"you have {most} agents, the limit (max_agents); delete some", field="max_agents")
        if self.registry.count(tenant) >= MAX_AGENTS:
            raise Overloaded(f"there are {MAX_AGENTS} agents, the limit; delete some", retry_after=60.0)
        if id is None:
            return f"agent-{self.rng.bits64():016x}"
        check_id(id)
        if self.registry.find(tenant, id) is not None:
            raise Conflict(f"there is an agent {id} already", field="id")
        return id

    # ------------------------------------------------------------------------------------------------------ to change
    # What these write is durable on return. They raise Unavailable if the disk refuses.

    async def add(self, agent: Agent, *more: Record) -> Agent:
        """Add a new agent and write it with the records that it needs."""
        written = self.writer.record(RecordKind.AGENT, agent.record, agent.key)
        agent.starting = agent.new = True
        self.registry.add(agent)
        try:
            await self.pending.sync(*more, written)
            if (shared := self.sharing(agent)) is not None:
                await shared.made(agent)
        except BaseException:
            self.pending.erase_later({*self.registry.remove(agent), *(record.key for record in more)})
            raise
        finally:
            agent.starting = agent.new = False
        for turn in (agent.root, *agent.own):
            turn.release()
        return agent

    async def fork(self, agent: Agent, at: Turn, id: str | None, metadata: dict[str, str] | None = None) -> Agent:
        """Return a new agent with this one's history up to a turn.

        Raise Conflict while the agent itself is not durable, NotFound if it or the turn is deleted meanwhile.
        """
        if agent.new:
            raise Conflict(f"agent {agent.id} is being created; fork it after that")
        await self.free_id(agent.tenant, id)
        self.check_there(agent)
        if not self.registry.holds(at):
            raise NotFound(f"turn {at.number} of agent {agent.id} was deleted meanwhile", field="turn")
        now = self.pending.now()
        old = agent.record
        record = msgspec.structs.replace(
            old,
            id=self.new_id(agent.tenant, id),
            created=now,
            used=now,
            base=at.key,
            head=at.key,
            under=at.parent_key,
            origin=old.id,
            metadata=old.metadata if metadata is None else metadata,
            pinned=False,
            left={},
            moved=0.0,
        )
        made = await self.add(Agent(self.writer.key(), record, agent.root, at))
        if at not in agent.head.path():
            self.kv.branch_resumed(made)
        return made

    async def move(self, agent: Agent, head: Turn) -> None:
        """Make another turn the agent's head, and pin its context instead if the agent is pinned.

        No turn can begin meanwhile.
        """
        before, old, agent.starting, agent.straight = agent.head, agent.record, True, False
        agent.head, agent.record = head, msgspec.structs.replace(old, left={**old.left, before.key: self.pending.now()})
        try:
            await self._write(agent)
        except Unavailable:
            agent.head = before
            agent.record = msgspec.structs.replace(agent.record, left=old.left)
            self.pending.write_later(self.pending.note(agent))
            raise
        except BaseException:  # cancelled: nobody waits for the result of the write
            self.pending.write_later(self.pending.note(agent))
            self._repin(agent)
            raise
        finally:
            agent.starting = False
        self.kv.moved(agent, before)
        self._repin(agent)

    async def erase_after(self, agent: Agent, turn: Turn) -> None:
        """Erase the agent's own turns that follow one of its turns, with their KV, except what other agents need.

        Those of a shared agent stay: its chain has them. Raise Unavailable if the disk refuses; then they are gone all
        the same, and their bytes go as soon as it works.
        """
        if self.sharing(agent) is not None:
            return
        own = agent.own
        gone = set(self.registry.cut_after(agent, turn))
        self.pending.erase_later(gone)  # now, so that a deletion of the agent meanwhile waits for these too
        await self.kv.collect(agent, [one for one in own if one.key in gone])
        await self.pending.erase(self.pending.to_erase())

    async def _write(self, agent: Agent) -> None:
        """Write the agent as it is now. Raise Unavailable if the disk or the shared store refuses."""
        if (shared := self.sharing(agent)) is not None:
            await shared.changed(agent)
        await self.pending.sync(self.pending.note(agent))

    def _repin(self, agent: Agent) -> None:
        if agent.record.pinned:
            self.kv.pin_later(agent)

    def touch(self, agent: Agent) -> None:
        """Count a use of the agent; it is written with the next change of any agent."""
        agent.used = self.pending.now()
        if not agent.new:
            self.pending.write_later(self.pending.note(agent))

    async def describe(self, agent: Agent, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
        """Change the agent's metadata, which counts as a use.

        `change`: returns the new metadata for those that the agent has once earlier changes are written or refused.
        Raise NotFound if the agent is deleted meanwhile.
        """
        async with self._change(agent):
            self.check_there(agent)
            agent.used = self.pending.now()
            before = agent.record.metadata
            agent.record = msgspec.structs.replace(agent.record, metadata=change(before))
            try:
                await self._write(agent)
            except Unavailable:
                agent.record = msgspec.structs.replace(agent.record, metadata=before)
                self.pending.write_later(self.pending.note(agent))
                raise
            except BaseException:  # cancelled: nobody waits for the result of the write
                self.pending.write_later(self.pending.note(agent))
                raise

    def _change(self, agent: Agent) -> asyncio.Lock:
        """Return the agent's lock: no change may be undone to a value that another change failed to write."""
        return self._changing.setdefault(agent.key, asyncio.Lock())

    async def set_pinned(self, agent: Agent, pinned: bool) -> bool:
        """Record whether the agent's context is pinned; return whether that has changed."""
        async with self._change(agent):
            before = agent.record.pinned
            if agent not in self.registry:
                with contextlib.suppress(NotFound):  # deleted meanwhile: write nothing
                    self.check_there(agent)
                return False
            agent.record = msgspec.structs.replace(agent.record, pinned=pinned)
            try:
                await self._write(agent)
            except Unavailable:  # undo only `pinned`: the head may have moved meanwhile
                agent.record = msgspec.structs.replace(agent.record, pinned=before)
                self.pending.write_later(self.pending.note(agent))
                raise
            except BaseException:  # cancelled: nobody waits for the result of the write
                self.pending.write_later(self.pending.note(agent))
                self.kv.pin_later(agent)
                raise
        return pinned != before

    async def begin(self, agent: Agent, began: TurnRecord) -> Turn:
        """Write the next turn at the agent's head and return it."""
        record = self.writer.record(RecordKind.TURN, began)
        turn = Turn(record.key, began, agent.head)
        turn.state = "running"  # already while the record is synced
        self.registry.add_turn(agent, turn)
        try:
            await self.pending.sync(record)
            if (shared := self.sharing(agent)) is not None:
                await shared.began(agent, turn)
        except BaseException:
            self.registry.remove_turn(agent, turn)
            self.pending.erase_later([turn.key])
            # A record of the agent that was written meanwhile may name the turn.
            self.pending.write_later(self.pending.note(agent))
            raise
        agent.used = began.began
        return turn

    async def remove(self, agent: Agent) -> None:
        """Interrupt the running turn, delete an agent, and erase what only it needs, its KV too.

        Records of ordinary requests in its name are erased with it, and their KV as far as this process computed it.
        Raise Unavailable if the disk refuses the erasure. The agent is gone all the same, because nobody knows how much
        of the erasure is on the disk: restored, it could lose later turns at the next start. `tend` tries the erasure
        again.
        """
        if (shared := self.sharing(agent)) is not None:
            await shared.gone(agent)
            self.check_there(agent)
        keys = await self.detach(agent, self.pending.to_erase())
        try:
            await self.pending.erase(keys)
        except Unavailable as error:
            raise Unavailable(
                f"agent {agent.id} is deleted, but its bytes stay on the disk until the disk works again; if the "
                f"server ends before, the agent may return: {error}",
                retry_after=10.0,
            ) from error

    async def detach(self, agent: Agent, others: Sequence[int] = ()) -> list[int]:
        """Interrupt the running turn and remove an agent and its KV from memory.

        Return the keys to erase: the agent's and `others`. If this is cancelled, they are erased later.
        """
        keys = self.registry.remove(agent)  # before the first await: from here on nobody finds it
        keys = [*keys, *self._replays.take(agent.key), *others]
        unpinned = False
        try:
            if agent.running is not None:
                agent.running.discarded = True
                await agent.running.stop()
            unpinned = await self.kv.drop(agent)
        except BaseException:
            self.pending.erase_later(keys)
            raise
        finally:
            if not unpinned:
                self._unpin_later(agent)
        return keys

    def _unpin_later(self, agent: Agent) -> None:
        """Record the pins of a deleted agent in the log until the stores have given them up."""
        left = UnpinRecord(owners=owners(agent))
        record = self.writer.record(RecordKind.UNPIN, left)
        self.pending.keep(record)
        self.kv.unpin_later(left.owners, partial(self.pending.erase_later, [record.key]))

    def pin_later(self, agent: Agent) -> None:
        """Record in the log that the stores do not know whether the agent is pinned, until they do."""
        record = self._unsent_pins.get(agent.key)
        if record is None:
            record = self.writer.record(RecordKind.UNPIN, UnpinRecord(owners=owners(agent)))
            self.pending.keep(record)
        self._send_pin(agent, record)

    def _send_pin(self, agent: Agent, record: Record) -> None:
        def sent() -> None:
            del self._unsent_pins[agent.key]
            self.pending.erase_later([record.key])

        self._unsent_pins[agent.key] = record
        self.kv.pin_later(agent, done=sent)

    def resume_pins(self, records: Sequence[Record]) -> None:
        """Send the stores the pins that an earlier process could not.

        Pins of agents that are gone are given up. Agents that exist, or are back because their erasure was refused, are
        pinned or not as their record says.
        """
        here = {owner: agent for agent in self.registry for owner in owners(agent)} if records else {}
        for record in records:
            if (left := decode(record.payload, UnpinRecord)) is None:
                continue
            agent = next((here[owner] for owner in left.owners if owner in here), None)
            if agent is None:
                self.kv.unpin_later(left.owners, partial(self.pending.erase_later, [record.key]))
            elif agent.key in self._unsent_pins:
                self.pending.erase_later([record.key])  # a newer record says the same
            # Without its salt it can pin nothing: wait until its tenant is configured again.
            elif agent.salt != NOBODY:
                self._send_pin(agent, record)


def is_id(text: str) -> bool:
    """Return whether `text` is a valid id of an agent."""
    return ID.fullmatch(text) is not None and text not in RESERVED


def check_id(id: str) -> None:
    """Raise InvalidRequest for an invalid id. Ids never become file names."""
    if not is_id(id):
        raise InvalidRequest(
            "an agent's id has 1 to 64 letters, digits, dots, underscores and hyphens, begins with a letter or digit, "
            "and is not 'import'",
            field="id",
        )


def conflict(agent: Agent) -> Conflict:
    """Return the error that says why the agent's head cannot be used now."""
    head = agent.head
    if agent.running is not None:
        request = f"{agent.running.request.id:016x}"
        return Conflict(f"turn {head.number} of agent {agent.id} is running (request {request})")
    if agent.starting:
        return Conflict(f"turn {agent.next_number()} of agent {agent.id} is starting, or its head is being moved")
    return Conflict(
        f"turn {head.number} of agent {agent.id} was interrupted; resume it, or roll back to turn {head.parent_number}"
    )


async def create_agent(
    agents: AgentService,
    tenant: str,
    id: str | None,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]],
    strict: Sequence[str],
    metadata: Mapping[str, str],
    ttl: float | None,
    pinned: bool,
    model: str = "",
) -> Agent:
    """Create an agent whose context begins with `messages`; calls of its `strict` tools must fit their schema.

    Raise as `AgentService.new_id` and `AgentService.add` do, and InvalidRequest for values that no record can hold.
    """
    check(messages, "messages")
    check(tools, "tools")
    check(metadata, "metadata")
    await agents.free_id(tenant, id)
    id = agents.new_id(tenant, id)
    now = agents.pending.now()
    began = TurnRecord(agent=0, number=0, messages=tuple(messages), tools=tuple(tools), strict=tuple(strict))
    root = agents.writer.record(RecordKind.TURN, began)
    beginning = Turn(root.key, msgspec.msgpack.decode(root.payload, type=TurnRecord), None)
    record = AgentRecord(
        id=id,
        tenant=tenant,
        created=now,
        used=now,
        root=root.key,
        base=root.key,
        head=root.key,
        pinned=pinned,
        ttl=ttl,
        metadata=dict(metadata),
        model=model,
    )
    return await agents.add(Agent(agents.writer.key(), record, beginning, beginning), root)


async def import_agent(
    agents: AgentService,
    spec: ModelSpec,
    tenant: str,
    data: bytes,
    id: str | None,
    accept: Callable[[portable.Portable], None] | None,
) -> Agent:
    """Create an agent from a file, under its own id or another.

    `accept` raises an error to refuse the file's content. Raise as `portable.read`, `AgentService.new_id` and
    `AgentService.add` do.
    """
    read = await asyncio.to_thread(portable.read, data, spec.vocab, spec.identity)
    if accept is not None:
        await asyncio.to_thread(accept, read)
    id = read.agent.id if id is None else id
    await agents.free_id(tenant, id)
    id = agents.new_id(tenant, id)
    agent, records = await asyncio.to_thread(_plant, agents.writer, read, tenant, id, agents.pending.now())
    agents.new_id(tenant, id)  # check again: the id may have been taken meanwhile
    return await agents.add(agent, *records)


def _plant(writer: Writer, read: portable.Portable, tenant: str, id: str, now: float) -> tuple[Agent, list[Record]]:
    """Return the agent of a file and the records that it needs. Any thread may call."""
    agent = portable.plant(read, writer.key, tenant, id, now)
    records = [writer.record(RecordKind.TURN, agent.root.held.began, agent.root.key)]
    for turn in agent.own:
        content = turn.held
        records.append(writer.record(RecordKind.TURN, content.began, turn.key))
        if content.ended is not None:
            records.append(writer.record(RecordKind.END, content.ended, turn.key))
    records.append(writer.record(RecordKind.SAVINGS, SavingsRecord(savings=agent.savings), agent.key))
    return agent, records
