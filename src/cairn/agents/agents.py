"""Agents: named contexts with history, on one `Service` and one token log.

A turn is answered by an ordinary request whose prompt is the exact ids of the agent's context and what the new message
adds. Its message is in the log before anything of the answer is given out, its tokens follow as they come, and its end
is durable before the last event. What an agent is, is what the log says; everything here can be rebuilt from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cairn.agents import portable
from cairn.agents.index import Kind
from cairn.agents.info import AgentInfo, AgentPage, Savings, TurnInfo
from cairn.agents.kv import AgentKv
from cairn.agents.ledger import counted, total_key
from cairn.agents.log import Log
from cairn.agents.records import AgentRecord, EndRecord, SavingsRecord, TurnRecord, pack
from cairn.agents.replays import Replays
from cairn.agents.roster import Roster
from cairn.agents.running import RunningTurn, said_before
from cairn.agents.segment import Record
from cairn.agents.tree import Agent, Turn, digest
from cairn.agents.writer import Writer
from cairn.config import Config
from cairn.errors import ConfigError, Conflict, InvalidRequest, NotFound, Overloaded, Unavailable, trace
from cairn.seams import Clock, FileSystem, Rng
from cairn.service.requests import PLAIN, SamplingOptions, requests
from cairn.service.service import Service
from cairn.service.stream import Stream
from cairn.text.chat import Prompt, Sampled
from cairn.types import Done, Event, Placed, Request

log = logging.getLogger(__name__)

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RESERVED = frozenset({"import"})
"""Ids that are routes."""
LOCK_SECONDS = 5.0
"""How long a start waits for a process that still holds the folder."""
MAX_AGENTS = 10_000
"""Of one tenant."""
TEND_SECONDS = 30.0
ABANDONED_SECONDS = 7 * 86_400.0
"""Age at which turns off an agent's path are collected."""
CLOSE_SECONDS = 2.0


class Agents:
    """All agents of one server. Make them with `await Agents.open(...)`; end them with `await close()`.

    Every method runs on the event loop of its service. Where an agent is named: InvalidRequest for what is no id,
    NotFound for an agent that is not there or is another tenant's. What the disk refuses is Unavailable, and nothing
    has changed then.
    """

    def __init__(self, service: Service, log: Log, clock: Clock, rng: Rng, config: Config) -> None:
        self.service, self.clock = service, clock
        self._rng, self._config = rng, config
        self._roster = Roster()
        self._owed: list[Record] = []
        self._refused: list[int] = []
        """Keys of records that the disk refused and may have all the same."""
        orphans = self._roster.load(log.recovered)
        self._replays = Replays(service.spec.identity)
        for tenant, sampled in self._replays.load(log.recovered):
            service.chat.recall(tenant, sampled)
        log.recovered = []
        self.kv = AgentKv(service, self._roster)
        self.writer = Writer(log)
        self._tending = asyncio.create_task(self._tend(orphans))

    @classmethod
    async def open(
        cls, service: Service, files: FileSystem, folder: Path, clock: Clock, rng: Rng, config: Config
    ) -> Agents:
        """Lock the folder and read the log.

        Raises ConfigError for a folder that another process holds, that is not ours or of a newer format, or that the
        disk does not let us use.
        """
        end = clock.now() + LOCK_SECONDS
        while True:
            try:
                opened = await asyncio.to_thread(Log.open, files, folder, rng)
            except OSError as error:
                raise ConfigError(f"{folder}: the token log cannot be read: {error.strerror or error}") from error
            if opened is not None:
                return cls(service, opened, clock, rng, config)
            if clock.now() >= end:
                raise ConfigError(
                    f"{folder}: another process holds the token log; end it, or name another folder with --agents-dir"
                )
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        """Interrupt what runs, write what is left, and let others have the folder. May be called again."""
        self._tending.cancel()
        await asyncio.gather(self._tending, return_exceptions=True)
        await self.kv.close()
        for turn in [agent.running for agent in self._roster if agent.running is not None]:
            turn.cancel()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(turn.over.wait(), CLOSE_SECONDS)
            if not turn.over.is_set():
                await turn.close()
        with contextlib.suppress(Unavailable):
            self._settle()
            await self.writer.close()

    @property
    def trouble(self) -> str:
        """Why the log does not work now, as a sentence; empty when it does."""
        return self.writer.trouble

    # ---------------------------------------------------------------------------------------------------- to look at

    def get(self, tenant: str, id: str) -> AgentInfo:
        """One agent."""
        return self._find(tenant, id).info()

    def page(self, tenant: str, *, limit: int = 20, after: str = "") -> AgentPage:
        """A tenant's agents, `after` the one of that id; InvalidRequest if that is not there."""
        agents = self._roster.of(tenant)
        start = 0
        if after:
            ids = [agent.id for agent in agents]
            if after not in ids:
                raise InvalidRequest("after must be the id of an agent", field="after")
            start = ids.index(after) + 1
        page = agents[start : start + limit]
        return AgentPage(agents=tuple(agent.info() for agent in page), more=start + limit < len(agents))

    def turns(self, tenant: str, id: str) -> tuple[TurnInfo, ...]:
        """Every turn, abandoned branches included, by number."""
        agent = self._find(tenant, id)
        path = {turn.key for turn in agent.head.path()}
        return tuple(turn.info(current=turn.key in path) for turn in agent.turns())

    def beginning(self, tenant: str, id: str) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """What the agent was told before its first turn, and its tools."""
        began = self._find(tenant, id).root.began
        return began.messages, began.tools

    def context(self, tenant: str, id: str) -> tuple[int, ...]:
        """The ids of the agent's context for the model that is served; none before its first turn with it."""
        return tuple(self.kv.ids(self._find(tenant, id).head))

    def savings(self, tenant: str) -> Savings:
        """The sum over a tenant's agents and requests, also those that are gone."""
        return self._roster.ledger.totals.get(tenant, Savings())

    # ---------------------------------------------------------------------------------------------------- its KV

    async def where(self, tenant: str, id: str, salt: bytes) -> Placed:
        """How many leading tokens of the context each tier has. Unavailable while the worker is being replaced."""
        agent = self._find(tenant, id, salt)
        return await self.kv.where(agent)

    async def pin(self, tenant: str, id: str, salt: bytes, pinned: bool) -> AgentInfo:
        """Keep the KV of the agent's context in the stores from eviction, now and after every turn; or no longer."""
        agent = self._find(tenant, id, salt)
        old = agent.record
        agent.record = msgspec.structs.replace(old, pinned=pinned)
        try:
            await self.writer.sync(self._note(agent))
        except Unavailable:
            agent.record = old
            self.owe(self._note(agent))
            raise
        await self.kv.pin(agent)
        return agent.info()

    async def prefetch(self, tenant: str, id: str, salt: bytes) -> Placed:
        """Bring the KV of the context up into the pool; where it is then."""
        agent = self._find(tenant, id, salt)
        return await self.kv.prefetch(agent)

    async def evict(self, tenant: str, id: str, salt: bytes, *, disk: bool = False) -> Placed:
        """Give up the KV of the context, except what other agents of the tenant share; where it is then."""
        agent = self._find(tenant, id, salt)
        return await self.kv.evict(agent, disk=disk)

    def keep(self, tenant: str, sampled: Sampled) -> None:
        """Keep what was sampled for an ordinary request in the log, where that is wanted."""
        if not self._config.log:
            return
        now = self._now()
        record = self.writer.record(Kind.REPLAY, self._replays.payload(tenant, sampled, now))
        with contextlib.suppress(Unavailable):  # the log is closed
            self.writer.append(record)
            self._replays.add(record, now)

    def account(self, tenant: str, id: str | None, salt: bytes, ids: Sequence[int], done: Done) -> None:
        """Count an ordinary request on its tenant's account, and on an agent's if it named one.

        `ids`: prompt and answer, whose KV is then pinned if the agent is.
        """
        agent = self._roster.find(tenant, id) if id is not None else None
        if agent is None:
            self._roster.ledger.count(tenant, done)
            return
        agent.salt, agent.used = salt, self._now()
        with contextlib.suppress(Unavailable):
            self.writer.append(*self._count(agent, done), self._note(agent))
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
        id = self._new_id(tenant, id)
        now = self._now()
        root = self.writer.record(
            Kind.TURN, TurnRecord(agent=0, number=0, messages=tuple(messages), tools=tuple(tools))
        )
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
            metadata=metadata or {},
        )
        return (await self._add(record, beginning, beginning, root)).info()

    async def delete(self, tenant: str, id: str, salt: bytes = b"") -> None:
        """Interrupt what runs, and erase every byte of the agent that no other shares; gone from disk on return.

        Its KV goes too, except what other agents of the tenant share.
        """
        agent = self._find(tenant, id, salt)
        if agent.starting:
            raise self._conflict(agent)
        running = agent.running
        if running is not None:
            running.discarded = True
            running.cancel()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(running.over.wait(), CLOSE_SECONDS)
        await self._remove(agent)

    async def fork(self, tenant: str, id: str, *, turn: int | None = None, new_id: str | None = None) -> AgentInfo:
        """A new agent that shares this one's history up to a turn (default: the head); nothing is copied.

        NotFound for a turn that is not there, Conflict for one whose answer is not whole.
        """
        agent = self._find(tenant, id)
        at = agent.head if turn is None else self._turn(agent, turn)
        if at.state != "finished":
            raise Conflict(f"turn {at.number} of agent {agent.id} is {at.state}; fork at turn {_before(at)}")
        return (await self._fork(agent, at, new_id)).info()

    def export(self, tenant: str, id: str) -> Iterator[bytes]:
        """The agent as one file, piece by piece. Conflict while a turn runs."""
        agent = self._find(tenant, id)
        if agent.starting or agent.running is not None:
            raise self._conflict(agent)
        return portable.export(agent, self._rng)

    async def take_in(self, tenant: str, data: bytes, id: str | None = None) -> AgentInfo:
        """Make an agent of an exported file, under its own id or another.

        InvalidRequest for a file that is damaged or none of ours, Conflict if the id is taken.
        """
        spec = self.service.spec
        read = await asyncio.to_thread(portable.read, data, spec.vocab, spec.identity)
        id = self._new_id(tenant, read.agent.id if id is None else id)
        agent = portable.plant(read, self.writer.key, tenant, id, self._now())
        records = [self.writer.record(Kind.TURN, agent.root.began, agent.root.key)]
        for turn in agent.own:
            records.append(self.writer.record(Kind.TURN, turn.began, turn.key))
            if turn.ended is not None:
                records.append(self.writer.record(Kind.END, turn.ended, turn.key))
        line = self.writer.record(Kind.SAVINGS, SavingsRecord(savings=agent.savings), agent.key)
        return (await self._seat(agent, *records, line)).info()

    async def rollback(self, tenant: str, id: str, *, turn: int) -> AgentInfo:
        """Make another turn the head, 0 for the beginning. What followed it stays listed until it is collected."""
        agent = self._find(tenant, id)
        at = self._turn(agent, turn)
        if agent.starting or agent.running is not None:
            raise self._conflict(agent)
        old = agent.head
        agent.head = at
        try:
            await self.writer.sync(self._note(agent))
        except Unavailable:
            agent.head = old
            self.owe(self._note(agent))
            raise
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
        salt: bytes = b"",
        fork_on_conflict: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> RunningTurn:
        """Begin a turn with new messages only; read its `batches`.

        Conflict while another turn runs or one was interrupted, unless `fork_on_conflict`: then it is the turn of a
        new agent. ContextTooLong with the figures, Overloaded and Unavailable as for any request.
        """
        agent, forked = self._find(tenant, id, salt), False
        if agent.starting or agent.running is not None or agent.head.state != "finished":
            if not fork_on_conflict:
                raise self._conflict(agent)
            agent, forked = await self._fork(agent, _whole(agent.head), None), True
            agent.salt = salt
        agent.starting = True
        try:
            return await self._begin(agent, messages, options, request, template_args)
        except BaseException:
            if forked:
                with contextlib.suppress(Unavailable):
                    await self._remove(agent)
            raise
        finally:
            agent.starting = False

    async def resume(self, tenant: str, id: str, *, request: int, salt: bytes = b"") -> RunningTurn:
        """Go on with the interrupted turn at the head: what it said before comes again, and then the rest.

        Conflict if there is none, or if another model began it.
        """
        agent = self._find(tenant, id, salt)
        turn = agent.head
        if agent.starting or agent.running is not None:
            raise self._conflict(agent)
        if turn.state != "interrupted" or turn.began.sampling is None:
            raise Conflict(
                f"turn {turn.number} of agent {agent.id} is {turn.state}; only an interrupted one is resumed"
            )
        began, prompt, back = turn.began, turn.prompt(), f"roll back to turn {_before(turn)}"
        if began.identity != self.service.spec.identity:
            raise Conflict(f"turn {turn.number} of agent {agent.id} was begun with another model; {back}")
        if digest(prompt) != began.digest:
            raise Conflict(f"damage to the log cost what came before turn {turn.number} of agent {agent.id}; {back}")
        asked = Request(
            id=request,
            prompt=tuple(prompt),
            sampling=turn.began.sampling,
            stop=began.stop,
            output=began.output,
            salt=salt,
            timeout=self._config.request_timeout,
            durable=True,
        )
        first, reason = said_before(self.service, asked, list(turn.tokens))
        stream = None
        if reason is None:
            stream = self.service.generate(msgspec.structs.replace(asked, generated=tuple(turn.tokens)))
        return self._run(agent, turn, asked, stream, first)

    async def _begin(
        self,
        agent: Agent,
        messages: Sequence[dict[str, Any]],
        options: SamplingOptions,
        number: int,
        template_args: Mapping[str, Any] | None,
    ) -> RunningTurn:
        service, parent = self.service, agent.head
        prompt, prefix = await self._prompt(agent, messages, template_args)
        (request,) = requests(
            service.spec,
            prompt.tokens,
            options,
            ids=lambda: number,
            context=service.info.context,
            max_choices=1,
            output=prompt.output,
            salt=agent.salt,
            timeout=self._config.request_timeout,
        )
        request = msgspec.structs.replace(request, durable=True)
        began = TurnRecord(
            agent=agent.key,
            number=agent.next_number(),
            parent=parent.key,
            messages=tuple(messages),
            prefix=prefix,
            ids=pack(prompt.tokens[prefix:]),
            digest=digest(prompt.tokens),
            identity=service.spec.identity,
            sampling=request.sampling,
            stop=request.stop,
            output=request.output,
            began=self._now(),
            request=number,
        )
        # What cannot be served is refused here, so nothing is written of it. The answer is computed while the message
        # is being synced, and nobody sees any of it before.
        stream = service.generate(request)
        record = self.writer.record(Kind.TURN, began)
        turn = Turn(record.key, began, parent)
        self._roster.add_turn(agent, turn)
        try:
            await self.writer.sync(record)
        except BaseException:
            stream.close()
            self._roster.take_back(agent, turn)
            self._refused.append(turn.key)
            raise
        agent.used = began.began
        return self._run(agent, turn, request, stream, [])

    async def _prompt(
        self, agent: Agent, messages: Sequence[dict[str, Any]], template_args: Mapping[str, Any] | None
    ) -> tuple[Prompt, int]:
        """The prompt of the next turn, and how many of its ids are the context of the head."""
        chat, head, root = self.service.chat, agent.head, agent.root.began
        history, tools = agent.history(), list(root.tools) or None
        before = None
        if head.number and head.began.identity == self.service.spec.identity:
            before = head.context()
        if before is not None:
            extended = await chat.extend(before, history, messages, tools, template_args=template_args)
            if extended is not None:
                return extended, len(before)
        whole = [*history, *messages]
        return await chat.prompt(whole, tools, tenant=agent.tenant, template_args=template_args), 0

    def _run(
        self, agent: Agent, turn: Turn, request: Request, stream: Stream | None, first: Sequence[Event]
    ) -> RunningTurn:
        turn.state = "running"
        agent.running = RunningTurn(self, agent, turn, request, stream, first)
        return agent.running

    def ended(self, agent: Agent, done: Done | None, end: EndRecord) -> Sequence[Record]:
        """A turn is over: count it. What is to be written with its end."""
        agent.used = end.ended
        if agent.record.pinned and end.state == "finished":
            self.kv.pin_later(agent)
        return self._count(agent, done) if done is not None else ()

    def owe(self, *records: Record) -> None:
        """Write these as soon as the disk takes them."""
        self._owed += records

    def _count(self, agent: Agent, done: Done) -> Sequence[Record]:
        speed = self._roster.ledger.count(agent.tenant, done)
        agent.savings = counted(agent.savings, done, speed)
        line = SavingsRecord(savings=agent.savings)
        return [self.writer.record(Kind.SAVINGS, line, agent.key), *self._totals()]

    def _totals(self) -> list[Record]:
        """The tenants' totals that are not written yet."""
        ledger = self._roster.ledger
        lines = [(name, SavingsRecord(savings=ledger.totals[name], tenant=name)) for name in sorted(ledger.dirty)]
        ledger.dirty.clear()
        return [self.writer.record(Kind.SAVINGS, line, total_key(name)) for name, line in lines]

    # -------------------------------------------------------------------------------------------------------- within

    def _find(self, tenant: str, id: str, salt: bytes | None = None) -> Agent:
        check_id(id)
        agent = self._roster.find(tenant, id)
        if agent is None:
            raise NotFound(f"there is no agent {id}", field="id")
        if salt is not None:
            agent.salt = salt
        return agent

    def _turn(self, agent: Agent, number: int) -> Turn:
        turn = agent.turn(number)
        if turn is None:
            raise NotFound(f"agent {agent.id} has no turn {number}", field="turn")
        return turn

    def _conflict(self, agent: Agent) -> Conflict:
        head = agent.head
        if agent.running is not None:
            request = f"{agent.running.request.id:016x}"
            return Conflict(f"turn {head.number} of agent {agent.id} is running (request {request})")
        if agent.starting:
            return Conflict(f"turn {agent.next_number()} of agent {agent.id} is starting")
        return Conflict(
            f"turn {head.number} of agent {agent.id} was interrupted; resume it, or roll back to turn {_before(head)}"
        )

    def _new_id(self, tenant: str, id: str | None) -> str:
        if len(self._roster.of(tenant)) >= MAX_AGENTS:
            raise Overloaded(f"there are {MAX_AGENTS} agents, the limit; delete some", retry_after=60.0)
        if id is None:
            return f"agent-{self._rng.bits64():016x}"
        check_id(id)
        if self._roster.find(tenant, id) is not None:
            raise Conflict(f"there is an agent {id} already", field="id")
        return id

    async def _add(self, record: AgentRecord, root: Turn, base: Turn, *more: Record) -> Agent:
        """A new agent, durable."""
        return await self._seat(Agent(self.writer.key(), record, root, base), *more)

    async def _seat(self, agent: Agent, *more: Record) -> Agent:
        written = self.writer.record(Kind.AGENT, agent.record, agent.key)
        agent.starting = True
        self._roster.add(agent)
        try:
            await self.writer.sync(*more, written)
        except BaseException:
            self._roster.remove(agent)
            self._refused += [written.key, *(record.key for record in more)]
            raise
        finally:
            agent.starting = False
        return agent

    async def _fork(self, agent: Agent, at: Turn, id: str | None) -> Agent:
        now = self._now()
        old = agent.record
        record = msgspec.structs.replace(
            old,
            id=self._new_id(agent.tenant, id),
            created=now,
            used=now,
            base=at.key,
            head=at.key,
            origin=old.id,
            pinned=False,
        )
        return await self._add(record, agent.root, at)

    def _note(self, agent: Agent) -> Record:
        """The agent as it is now, to be written."""
        agent.record = msgspec.structs.replace(agent.record, used=agent.used, head=agent.head.key)
        return self.writer.record(Kind.AGENT, agent.record, agent.key)

    async def _remove(self, agent: Agent) -> None:
        await self.kv.drop(agent)
        keys = self._roster.remove(agent)
        try:
            await self.writer.erase(keys)
        except Unavailable:
            self._roster.restore(agent)
            raise

    def _now(self) -> float:
        return self.clock.time_ns() / 1e9

    # ------------------------------------------------------------------------------------------------------- upkeep

    async def _tend(self, orphans: Sequence[int]) -> None:
        """Collect what nobody needs any more, for as long as the server runs."""
        with contextlib.suppress(Unavailable):
            await self.writer.erase(orphans)
        while True:
            await asyncio.sleep(TEND_SECONDS)
            try:
                await self.tend()
            except Unavailable:
                continue  # the log says so itself, in `trouble`
            except Exception as error:
                log.error("the upkeep of agents failed: %s", trace(error))

    async def tend(self) -> None:
        """Write what is owed, delete agents whose time is over, erase branches that were abandoned long ago."""
        self._settle()
        now = self._now()
        gone: list[int] = []
        for agent in self._roster:
            if agent.starting or agent.running is not None:
                continue
            if agent.record.ttl is not None and now - agent.used > agent.record.ttl:
                await self._remove(agent)
            else:
                gone += self._roster.prune(agent, now - ABANDONED_SECONDS)
        gone += self._replays.over(now)
        gone += self._refused
        self._refused = []
        if gone:
            await self.writer.erase(gone)

    def _settle(self) -> None:
        owed, self._owed = self._owed, []
        records = [*owed, *self._totals()]
        if records:
            self.writer.append(*records)


def check_id(id: str) -> None:
    """InvalidRequest for what is no agent's id. Ids never become file names."""
    if not ID.fullmatch(id) or id in RESERVED:
        raise InvalidRequest(
            "an agent's id has 1 to 64 letters, digits, dots, underscores and hyphens, begins with a letter or digit, "
            "and is not 'import'",
            field="id",
        )


def _before(turn: Turn) -> int:
    return turn.parent.number if turn.parent is not None else 0


def _whole(turn: Turn) -> Turn:
    """The last turn on the path whose answer is whole."""
    return next(one for one in turn.path() if one.state == "finished")
