"""What is true of agents, in memory and in the log at once: every change goes through here.

A change that the disk refuses has not happened: memory is as it was, and the log is told so once it can be. Only what
was to be erased stays gone.
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
from cairn.agents.log.writer import Writer
from cairn.agents.pending_writes import PendingWrites
from cairn.agents.replay_records import ReplayRecords
from cairn.agents.turn_tree import NOBODY, Agent, Turn
from cairn.config.config import TenantLimits
from cairn.system.interfaces import Rng
from cairn.types.errors import Conflict, InvalidRequest, NotFound, Overloaded, QuotaExceeded, Unavailable
from cairn.types.model_spec import ModelSpec

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RESERVED = frozenset({"import"})
"""Ids that are routes."""
MAX_AGENTS = 10_000
"""How many agents one tenant may have."""


class AgentService:
    """The registry and the log of one server."""

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
        """What each tenant may keep."""
        self.registry, self.writer, self.pending, self.kv, self.rng = registry, writer, pending, kv, rng
        self._replays = replays
        self._untold: dict[int, Record] = {}
        """What the log has of agents of which the stores do not know whether they are pinned, by the agent's key."""
        self._pinning: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()
        """Held while `set_pinned` is at work on an agent, by its key: one change comes after the other."""

    # ---------------------------------------------------------------------------------------------------- to look up

    def find(self, tenant: str, id: str, *, over: bool = False) -> Agent:
        """One agent. InvalidRequest for what is no id, NotFound for one that is not there or is another tenant's.

        Nor is one there whose time to live is `over`, whether it is erased yet or not, unless those are asked for.
        """
        check_id(id)
        agent = self.registry.find(tenant, id)
        if agent is None or (not over and agent.over(self.pending.now())):
            raise NotFound(f"there is no agent {id[:64]}", field="id")
        return agent

    @contextlib.contextmanager
    def reading(self, tenant: str, id: str) -> Iterator[Agent]:
        """One agent whose turns are about to be read: see `archive.typed_read_errors`."""
        agent = self.find(tenant, id)
        with typed_read_errors(self.registry, agent):
            yield agent

    def idle(self, tenant: str, id: str) -> Agent:
        """One agent as `find` gives it; Conflict while a turn of it runs."""
        agent = self.find(tenant, id)
        if agent.busy:
            raise conflict(agent)
        return agent

    def turn(self, agent: Agent, number: int) -> Turn:
        """One of its turns, 0 for the beginning. NotFound for one that is not there."""
        turn = agent.turn(number)
        if turn is None:
            raise NotFound(f"agent {agent.id} has no turn {number}", field="turn")
        return turn

    async def free_id(self, tenant: str, id: str | None) -> None:
        """Erase the agent of that id if its time to live is over: its id can be had again."""
        agent = self.registry.find(tenant, id) if id is not None else None
        if agent is not None and agent.over(self.pending.now()):
            await self.remove(agent)

    def new_id(self, tenant: str, id: str | None) -> str:
        """An id for another agent: this one, or one made up. Conflict if it is taken, QuotaExceeded if the tenant has
        all that it may have, Overloaded if too many for anybody."""
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
    # What these write is durable when they return. Unavailable where the disk refuses it.

    async def add(self, agent: Agent, *more: Record) -> Agent:
        """A new agent, and the records that it needs."""
        written = self.writer.record(RecordKind.AGENT, agent.record, agent.key)
        agent.starting = agent.new = True
        self.registry.add(agent)
        try:
            await self.pending.sync(*more, written)
        except BaseException:
            self.pending.erase_later({*self.registry.remove(agent), *(record.key for record in more)})
            raise
        finally:
            agent.starting = agent.new = False
        for turn in (agent.root, *agent.own):
            turn.release()
        return agent

    async def fork(self, agent: Agent, at: Turn, id: str | None, metadata: dict[str, str] | None = None) -> Agent:
        """A new agent with this one's history up to a turn. Conflict while that is not durable."""
        if agent.new:
            raise Conflict(f"agent {agent.id} is being made; fork it once that is answered")
        await self.free_id(agent.tenant, id)
        now = self.pending.now()
        old = agent.record
        record = msgspec.structs.replace(
            old,
            id=self.new_id(agent.tenant, id),
            created=now,
            used=now,
            base=at.key,
            head=at.key,
            under=at.under,
            origin=old.id,
            metadata=old.metadata if metadata is None else metadata,
            pinned=False,
            left={},
            moved=0.0,
        )
        made = await self.add(Agent(self.writer.key(), record, agent.root, at))
        if at not in agent.head.path():
            self.kv.wanted_again(made)
        return made

    async def move(self, agent: Agent, head: Turn) -> None:
        """Another turn is the agent's head; what is pinned follows. Nothing may begin meanwhile."""
        before, old, agent.starting, agent.straight = agent.head, agent.record, True, False
        agent.head, agent.record = head, msgspec.structs.replace(old, left={**old.left, before.key: self.pending.now()})
        try:
            await self.pending.sync(self.pending.note(agent))
        except Unavailable:
            agent.head = before
            agent.record = msgspec.structs.replace(agent.record, left=old.left)
            self.pending.write_later(self.pending.note(agent))
            raise
        except BaseException:  # nobody hears whether the disk takes it
            self.pending.write_later(self.pending.note(agent))
            self._repin(agent)
            raise
        finally:
            agent.starting = False
        self.kv.moved(agent, before)
        self._repin(agent)

    def _repin(self, agent: Agent) -> None:
        if agent.record.pinned:
            self.kv.pin_later(agent)

    async def describe(self, agent: Agent, metadata: dict[str, str]) -> None:
        """Other metadata for an agent, which is used by that."""
        agent.used = self.pending.now()
        before, agent.record = agent.record, msgspec.structs.replace(agent.record, metadata=metadata)
        try:
            await self.pending.sync(self.pending.note(agent))
        except Unavailable:
            agent.record = msgspec.structs.replace(agent.record, metadata=before.metadata)
            self.pending.write_later(self.pending.note(agent))
            raise

    async def set_pinned(self, agent: Agent, pinned: bool) -> bool:
        """The agent's context is to be kept in the stores, or not; whether that was otherwise before."""
        lock = self._pinning.setdefault(agent.key, asyncio.Lock())
        async with lock:  # what one change goes back to is never what another is about to be refused
            before = agent.record.pinned
            if agent not in self.registry:  # nothing is written of what is erased
                return False
            agent.record = msgspec.structs.replace(agent.record, pinned=pinned)
            try:
                await self.pending.sync(self.pending.note(agent))
            except Unavailable:  # the head may have moved meanwhile
                agent.record = msgspec.structs.replace(agent.record, pinned=before)
                self.pending.write_later(self.pending.note(agent))
                raise
            except BaseException:  # nobody hears whether the disk takes it
                self.pending.write_later(self.pending.note(agent))
                self.kv.pin_later(agent)
                raise
        return pinned != before

    async def begin(self, agent: Agent, began: TurnRecord) -> Turn:
        """The next turn at the agent's head."""
        record = self.writer.record(RecordKind.TURN, began)
        turn = Turn(record.key, began, agent.head)
        turn.state = "running"  # while it is being synced, too
        self.registry.add_turn(agent, turn)
        try:
            await self.pending.sync(record)
        except BaseException:
            self.registry.take_back(agent, turn)
            self.pending.erase_later([turn.key])
            self.pending.write_later(self.pending.note(agent))  # what was noted of the agent meanwhile names the turn
            raise
        agent.used = began.began
        return turn

    async def remove(self, agent: Agent) -> None:
        """Interrupt what runs, forget an agent and erase what only it needs, its KV too.

        With it goes what ordinary requests in its name left: their answers' tokens, and their KV as far as this process
        made it.

        Unavailable where the disk refuses that. The agent is gone all the same, for nobody knows what of the refusal is
        on the disk: put back, it would lose later turns at the next start. `tend` goes on erasing.
        """
        keys = await self.detach(agent, self.pending.to_erase())
        try:
            await self.pending.erase(keys)
        except Unavailable as error:
            raise Unavailable(
                f"agent {agent.id} is deleted, but its bytes are on the disk until that works again, and if the server "
                f"ends before, the agent may be back: {error}",
                retry_after=10.0,
            ) from error

    async def detach(self, agent: Agent, others: Sequence[int] = ()) -> list[int]:
        """Interrupt what runs, and forget an agent and its KV; the keys that are to be erased, with these `others`.

        If it is cut off they are condemned.
        """
        keys = self.registry.remove(agent)  # before anything waits: from here on nobody finds it
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
        """The stores have pins of an agent that is gone: the log knows their owners until they are given up."""
        left = UnpinRecord(owners=owners(agent))
        record = self.writer.record(RecordKind.UNPIN, left)
        self.pending.keep(record)
        self.kv.unpin_later(left.owners, partial(self.pending.erase_later, [record.key]))

    def pin_later(self, agent: Agent) -> None:
        """The stores could not be told whether the agent is pinned: the log knows that until they are."""
        record = self._untold.get(agent.key)
        if record is None:
            record = self.writer.record(RecordKind.UNPIN, UnpinRecord(owners=owners(agent)))
            self.pending.keep(record)
        self._tell(agent, record)

    def _tell(self, agent: Agent, record: Record) -> None:
        def told() -> None:
            del self._untold[agent.key]
            self.pending.erase_later([record.key])

        self._untold[agent.key] = record
        self.kv.pin_later(agent, done=told)

    def resume_pins(self, records: Sequence[Record]) -> None:
        """Tell the stores what a process before this one could not: the pins of an agent that is gone are given up,
        and one that is here, or back since the disk refused its erasure, is pinned or not as it says."""
        here = {owner: agent for agent in self.registry for owner in owners(agent)} if records else {}
        for record in records:
            if (left := decode(record.payload, UnpinRecord)) is None:
                continue
            agent = next((here[owner] for owner in left.owners if owner in here), None)
            if agent is None:
                self.kv.unpin_later(left.owners, partial(self.pending.erase_later, [record.key]))
            elif agent.key in self._untold:
                self.pending.erase_later([record.key])  # another one says the same
            elif agent.salt != NOBODY:  # else once its tenant is configured again: without its salt it pins nothing
                self._tell(agent, record)


def is_id(text: str) -> bool:
    """Whether an agent can be called so."""
    return ID.fullmatch(text) is not None and text not in RESERVED


def check_id(id: str) -> None:
    """InvalidRequest for what is no agent's id. Ids never become file names."""
    if not is_id(id):
        raise InvalidRequest(
            "an agent's id has 1 to 64 letters, digits, dots, underscores and hyphens, begins with a letter or digit, "
            "and is not 'import'",
            field="id",
        )


def conflict(agent: Agent) -> Conflict:
    """Why the agent's head is not free now."""
    head = agent.head
    if agent.running is not None:
        request = f"{agent.running.request.id:016x}"
        return Conflict(f"turn {head.number} of agent {agent.id} is running (request {request})")
    if agent.starting:
        return Conflict(f"turn {agent.next_number()} of agent {agent.id} is starting, or its head is being moved")
    return Conflict(
        f"turn {head.number} of agent {agent.id} was interrupted; resume it, or roll back to turn {head.before}"
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
    """A new agent whose context begins with `messages`; calls of its `strict` tools fit their schema.

    Raises as `AgentService.new_id` and `AgentService.add` do, and InvalidRequest for what no record can hold.
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
    """An agent that a file holds, under its own id or another. `accept` raises for what may not come in.

    Raises as `portable.read`, `AgentService.new_id` and `AgentService.add` do.
    """
    read = await asyncio.to_thread(portable.read, data, spec.vocab, spec.identity)
    if accept is not None:
        await asyncio.to_thread(accept, read)
    id = read.agent.id if id is None else id
    await agents.free_id(tenant, id)
    id = agents.new_id(tenant, id)
    agent, records = await asyncio.to_thread(_plant, agents.writer, read, tenant, id, agents.pending.now())
    agents.new_id(tenant, id)  # another may have taken it meanwhile
    return await agents.add(agent, *records)


def _plant(writer: Writer, read: portable.Portable, tenant: str, id: str, now: float) -> tuple[Agent, list[Record]]:
    """An agent of what a file holds, and the records that it needs. Any thread may call."""
    agent = portable.plant(read, writer.key, tenant, id, now)
    records = [writer.record(RecordKind.TURN, agent.root.held.began, agent.root.key)]
    for turn in agent.own:
        content = turn.held
        records.append(writer.record(RecordKind.TURN, content.began, turn.key))
        if content.ended is not None:
            records.append(writer.record(RecordKind.END, content.ended, turn.key))
    records.append(writer.record(RecordKind.SAVINGS, SavingsRecord(savings=agent.savings), agent.key))
    return agent, records
