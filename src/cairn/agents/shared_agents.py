"""Agents that several servers share. An agent's chain in the shared store is authoritative; each server has a copy.

Before an agent is used, `refresh` applies what other servers wrote to its chain. A turn's beginning is in the chain
before any of its answer is sent, and its end before the last event: a server that has lost the agent meanwhile cannot
acknowledge the turn. After a failed write nobody knows whether it is in the chain; the next `refresh` reads it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.archive import Archive
from cairn.agents.kv import AgentKv, owners
from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import EndRecord, SavingsRecord, pack, unpack
from cairn.agents.log.segment import Record
from cairn.agents.log.writer_thread import Writer
from cairn.agents.pending_writes import PendingWrites
from cairn.agents.shared_bodies import (
    Replayed,
    SharedAgent,
    SharedEnd,
    SharedTurn,
    keyed,
    numbered,
    plant,
    plant_turn,
    shared_agent,
    shared_turn,
)
from cairn.agents.shared_replays import SharedReplays
from cairn.agents.turn_tree import Agent, Turn
from cairn.cluster.beats import Beats
from cairn.cluster.chain import MOST_CHAINS, AgentChain, ChainRecord, Kind, Moved, Running, forget_oldest
from cairn.cluster.shared import SharedStore
from cairn.system.concurrency import CountedLock
from cairn.system.interfaces import Clock, Rng
from cairn.types.errors import Conflict, Damaged, Unavailable, trace

log = logging.getLogger(__name__)

UNSHARED = ("resp_", "conv_")
"""Prefixes of ids of agents that keep a stored response or conversation: these are not shared."""
RETRY_SECONDS = 1.0
"""Pause between attempts to write the end of a turn that nobody waits for."""


class _Followed:
    """A chain that this server follows."""

    __slots__ = ("applied", "chain", "known", "lock")

    def __init__(self, chain: AgentChain) -> None:
        self.chain, self.lock = chain, CountedLock()
        self.known = False
        """Whether the server's own copy of the agent agrees with the chain up to `chain.tail`."""
        self.applied = 0
        """How often records of others have changed the copy."""

    @property
    def needed(self) -> bool:
        """Whether it must not be forgotten: somebody reads or writes it, or a turn of this server runs in it."""
        return bool(self.lock.users or (self.chain.mine and self.chain.tail.running))


class SharedAgents:
    """The chains of a server's agents. Runs on the event loop."""

    def __init__(
        self,
        store: SharedStore,
        clock: Clock,
        rng: Rng,
        registry: AgentRegistry,
        writer: Writer,
        pending: PendingWrites,
        archive: Archive,
        kv: AgentKv,
    ) -> None:
        """Start the server's heartbeats in the shared store; no chain is read yet."""
        self._store, self._registry, self._writer, self._pending = store, registry, writer, pending
        self._archive, self._kv = archive, kv
        self.holder = f"{rng.bits64():016x}"
        """Random id of this server process among those that share the store."""
        self.beats = Beats(store.blobs.soon, store.keys, clock, self.holder)
        self.beats.start()
        self.replays: SharedReplays | None = None
        """What was sampled for ordinary requests, which goes with the agent in whose name they were made."""
        self._followed: OrderedDict[tuple[str, str], _Followed] = OrderedDict()
        self._ending: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait briefly for pending ends of turns to be written, then stop."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=2 * RETRY_SECONDS)
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self.beats.close()

    @property
    def trouble(self) -> str:
        """Why the store does not work now, as a sentence; empty if it works."""
        trouble = self._store.blobs.trouble
        return f"the shared store does not work, so agents cannot go on: {trouble}" if trouble else ""

    def _follow(self, tenant: str, id: str) -> _Followed:
        found = self._followed.get((tenant, id))
        if found is None:
            chain = AgentChain(self._store.blobs.soon, self._store.keys, tenant, id, self.holder)
            found = self._followed[tenant, id] = _Followed(chain)
        self._followed.move_to_end((tenant, id))
        forget_oldest(self._followed, (tenant, id), MOST_CHAINS, self._needs)
        return found

    def _needs(self, name: tuple[str, str]) -> bool:
        """Return whether a chain is in use: then its position must not be forgotten."""
        agent = self._registry.find(*name)
        return self._followed[name].needed or (agent is not None and agent.busy)

    # ------------------------------------------------------------------------------------------------------- reading

    async def refresh(self, tenant: str, id: str) -> None:
        """Update the server's own copy of an agent from its chain.

        Raise Unavailable if the store does not answer, Damaged if the chain cannot be used.
        """
        followed = self._follow(tenant, id)
        try:
            async with followed.lock:
                await self._refresh(followed, tenant, id)
        finally:
            # Whoever asks for agents that do not exist takes no room from those that do.
            unknown = followed.chain.tail.kind == "gone" and self._registry.find(tenant, id) is None
            if unknown and not followed.needed and self._followed.get((tenant, id)) is followed:
                del self._followed[tenant, id]

    async def ensure(self, tenant: str, id: str) -> None:
        """Call `refresh`, unless the chain was read before and no failure has made the copy doubtful."""
        if not self._follow(tenant, id).known:
            await self.refresh(tenant, id)

    async def _refresh(self, followed: _Followed, tenant: str, id: str) -> None:
        agent = self._registry.find(tenant, id)
        if agent is not None and agent.busy and followed.known:
            return
        if followed.known and agent is None and followed.chain.tail.kind != "gone":
            followed.known = False  # it was removed here alone
        if followed.known:
            records = await followed.chain.news()
            followed.known = not records  # the chain has them now, and the copy only once they are applied
            if records and agent is not None and not any(record.kind in ("made", "gone") for record in records):
                followed.applied += 1
                if not agent.busy:  # a turn that has begun meanwhile is built on the copy as it was
                    followed.known = await self._apply(agent, records)
        if not followed.known:
            chain = AgentChain(self._store.blobs.soon, self._store.keys, tenant, id, self.holder)
            records = await chain.news()
            followed.chain = chain  # not before: the end of a turn needs to know where the turn began
            if len(records) > 1 and chain.tail.kind == "gone":
                await self._forget(chain, tenant, id)  # whoever deleted the agent did not get that far
            followed.known = await self._rebuild(records, tenant, id)

    async def _rebuild(self, records: Sequence[ChainRecord], tenant: str, id: str) -> bool:
        """Replace the server's own copy by the agent that a whole chain describes, if they differ.

        Return whether they agree then; while a turn of the agent runs here, its copy stays as it is.
        """
        replayed = Replayed()
        for record in records:
            _replay(replayed, id, record)
        agent = self._registry.find(tenant, id)
        if agent is not None and records:
            if replayed.same(agent):
                return True
            if agent.busy:
                return False
            if number := replayed.lost(agent):
                raise Damaged(
                    f"the shared store has lost turn {number} of agent {id}, which this server acknowledged; export "
                    "the agent here, delete it, and import it"
                )
            self._pending.erase_later(self._registry.remove(agent))
            if replayed.record is None:
                self._pending.erase_replays(agent.key)
            if replayed.record is None and agent.record.pinned:
                self._kv.unpin_later(owners(agent), lambda: None)
        if replayed.record is None:
            return True
        made, written = plant(replayed, self._writer.key, self._writer.record, tenant, id)
        if agent is not None and agent.record.created == made.record.created:
            made.savings = agent.savings
            written.append(self._writer.record(RecordKind.SAVINGS, SavingsRecord(savings=made.savings), made.key))
        self._used(made, replayed.used)
        self._registry.add(made)
        await self._write(made, written)
        for turn in (*made.base.path(), *made.own):
            turn.release()
        if made.record.pinned:
            self._kv.pin_later(made)
        return True

    def _used(self, agent: Agent, at: float) -> None:
        """Note that another server used an agent at a time of that server's clock.

        An agent with a time to live counts as used now: it must not expire because the clocks differ.
        """
        agent.used = max(agent.used, at) if agent.record.ttl is None else self._pending.now()

    async def _write(self, agent: Agent, written: Sequence[Record]) -> None:
        """Write what others did to an agent, and the agent. Raise Unavailable if the disk refuses: it follows later."""
        records = (*written, self._pending.note(agent))
        try:
            await self._pending.sync(*records)
        except BaseException:
            for record in records:
                self._pending.keep(record)
            raise

    async def _apply(self, agent: Agent, records: Sequence[ChainRecord]) -> bool:
        """Apply records that other servers wrote to the server's own copy. Raise Damaged, and apply none, for bad ones.

        Return False if they name a turn that it does not have: then it must be made anew from the whole chain. Raise
        Unavailable if the disk refuses them.
        """
        bodies = [_body(agent.id, record) for record in records]
        written: list[Record] = []
        before, own, gone = agent.head, agent.own, set[int]()
        for body in bodies:
            if isinstance(body, SharedTurn):
                if (parent := agent.turn(body.began.parent)) is None:
                    return False
                turn, more = plant_turn(body, self._writer.key(), agent.key, parent, self._writer.record)
                self._registry.add_turn(agent, turn)
                written += more
                self._used(agent, body.began.began)
            elif isinstance(body, SharedEnd):
                if (ended := agent.turn(body.number)) is not None:
                    ended.end(body.ended)
                    written.append(self._writer.record(RecordKind.END, body.ended, ended.key))
                self._used(agent, body.ended.ended)
            elif isinstance(body, SharedAgent):
                if (head := agent.turn(body.record.head)) is None:
                    return False
                agent.record, agent.head = keyed(body.record, agent), head
                self._used(agent, body.record.used)
                pruned = self._registry.cut(agent, [turn for turn in agent.own if turn.number in body.pruned])
                self._pending.erase_later(pruned)
                gone.update(pruned)
        agent.straight = False
        await self._write(agent, written)
        for turn in agent.own:
            turn.release()
        if agent.record.pinned and agent.head is not before:
            self._kv.pin_later(agent)
        if gone:
            with contextlib.suppress(Unavailable, Damaged):  # then its KV expires
                await self._kv.collect(agent, [turn for turn in own if turn.key in gone])
        return True

    # ------------------------------------------------------------------------------------------------------- writing
    # These raise Unavailable if the store does not answer or another server has the agent. The caller then undoes its
    # change; the next `refresh` reads whether it is in the chain after all.

    async def made(self, agent: Agent) -> None:
        """Write a new agent with all its turns. Raise Conflict if the id is taken."""
        followed = self._follow(agent.tenant, agent.id)
        turns = list({turn.key: turn for turn in (agent.root, *reversed([*agent.base.path()]), *agent.own)}.values())
        contents = await self._archive.contents(turns)
        body = msgspec.msgpack.encode(shared_agent(agent, turns, contents))
        async with followed.lock:
            await followed.chain.news()
            if followed.chain.tail.kind != "gone":
                followed.known = False
                raise Conflict(f"there is an agent {agent.id} already", field="id")
            await self._append(followed, "made", body)
            followed.known = True

    async def began(self, agent: Agent, turn: Turn) -> None:
        """Write the beginning of a turn; until its end no other server may write."""
        followed = self._follow(agent.tenant, agent.id)
        body = msgspec.msgpack.encode(shared_turn(turn, turn.held.began, None, own=True))
        async with followed.lock:
            await self._hold(followed, agent)
            try:
                await self._append(followed, "began", body, turn.number)
            except Moved:
                raise
            except BaseException:  # it may be there
                self._settle_later(agent, turn, _interrupted(turn.began), followed.chain.tail.number + 1)
                raise

    async def resumed(self, agent: Agent) -> None:
        """Take over the interrupted turn at the head. Raise Conflict while it runs on another server."""
        followed, turn = self._follow(agent.tenant, agent.id), agent.head
        async with followed.lock:
            self._check_known(followed, agent)
            await self._share(followed, agent)
            if await followed.chain.news():
                followed.known = False
                raise Conflict(f"another server has gone on with agent {agent.id}")
            followed.chain.check_free(self.beats.alive)
            try:
                await self._append(followed, "taken", b"", turn.number)
            except Moved:
                raise
            except BaseException:  # it may be there
                self._settle_later(agent, turn, _interrupted_end(turn), followed.chain.tail.number + 1)
                raise

    async def ended(self, agent: Agent, turn: Turn, end: EndRecord) -> None:
        """Write the end of a turn. When it returns, the turn is acknowledged."""
        followed = self._follow(agent.tenant, agent.id)
        async with followed.lock:
            try:
                if not followed.known:  # a change during the turn may be there, though its outcome was unknown
                    await followed.chain.news()
                await followed.chain.end(turn.number, msgspec.msgpack.encode(SharedEnd(turn.number, end)))
            except BaseException as error:
                # In memory the turn has ended; the next `refresh` tells whether it has in the chain.
                turn.state, followed.known = "interrupted", False
                if not isinstance(error, Moved):
                    self._settle_later(agent, turn, _interrupted(end.ended), followed.chain.tail.since)
                raise

    def ended_later(self, agent: Agent, turn: Turn, end: EndRecord) -> None:
        """Write the end of a turn that nobody waits for, as soon as the store takes it.

        Until then no other server may go on with the agent while this one is alive.
        """
        self._settle_later(agent, turn, end, self._follow(agent.tenant, agent.id).chain.tail.since)

    def not_resumed(self, agent: Agent) -> None:
        """Write later that the turn at the head, which `resumed` took over, does not run after all."""
        self.ended_later(agent, agent.head, _interrupted_end(agent.head))

    def _settle_later(self, agent: Agent, turn: Turn, end: EndRecord, since: int) -> None:
        """Write the end of the turn that record `since` of the chain began, if it still runs there."""

        async def write() -> None:
            while since >= 0:  # also once the agent was read again or deleted here: the chain says what is to be done
                followed = self._follow(agent.tenant, agent.id)
                try:
                    async with followed.lock:
                        followed.known = False
                        body = msgspec.msgpack.encode(SharedEnd(turn.number, end))
                        return await followed.chain.settle(since, body)
                except Moved:
                    return
                except Unavailable:
                    await asyncio.sleep(RETRY_SECONDS)
                except Exception as error:
                    log.error("the end of a turn could not be shared: %s", trace(error))
                    return

        task = asyncio.create_task(write())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def changed(self, agent: Agent) -> None:
        """Write the agent as it is now: its head, its pin, its metadata."""
        followed = self._follow(agent.tenant, agent.id)
        applied = followed.applied
        async with followed.lock:
            followed.known &= followed.applied == applied  # else the change may be overwritten in the copy
            await self._hold(followed, agent)
            # What runs now is a turn of this server, and its end is still to come.
            running = followed.chain.tail.running
            await self._append(followed, "changed", msgspec.msgpack.encode(SharedAgent(numbered(agent))), running)

    async def prune(self, agent: Agent, before: float) -> Sequence[int]:
        """Remove branches that were abandoned before that time, here and in the chain; return their turns' keys.

        Only the server that wrote last does so, or any if that one is silent; the others follow when they read it.
        Raise Unavailable or Damaged as `refresh` does.
        """
        followed = self._follow(agent.tenant, agent.id)
        async with followed.lock:
            await self._refresh(followed, agent.tenant, agent.id)
            chain, tail = followed.chain, followed.chain.tail
            if agent not in self._registry or agent.busy or not followed.known:
                return ()
            if tail.kind == "gone":  # it was made before the store was shared
                return self._registry.prune(agent, before)
            if tail.running or not (chain.mine or not self.beats.alive(tail.holder)):
                return ()
            turns = self._registry.abandoned(agent, before)
            if not turns:
                return ()
            # At once, so that nobody goes on with them while the record is written.
            keys = self._registry.cut(agent, turns)
            try:
                await self._hold(followed, agent)
                body = SharedAgent(numbered(agent), pruned=tuple(turn.number for turn in turns))
                await self._append(followed, "changed", msgspec.msgpack.encode(body))
            except BaseException:
                followed.known = False  # if the chain still has them, the agent is made anew with them
                self._pending.erase_later(keys)
                raise
            return keys

    async def gone(self, agent: Agent) -> None:
        """Record that the agent is deleted, and remove its other records."""
        followed = self._follow(agent.tenant, agent.id)
        async with followed.lock:
            if agent not in self._registry:
                return  # deleted meanwhile
            try:
                await followed.chain.delete()
                await self._forget(followed.chain, agent.tenant, agent.id)
            except BaseException:
                followed.known = False
                raise

    async def _forget(self, chain: AgentChain, tenant: str, id: str) -> None:
        """Remove from the store what a deleted agent has left there. Raise Unavailable if the store does not answer."""
        if self.replays is not None:
            await self.replays.forget(tenant, id)
        await chain.forget()

    async def _hold(self, followed: _Followed, agent: Agent) -> None:
        """Acquire the right to write to the chain; see `AgentChain.hold`.

        Raise Moved if the server's own copy is doubtful, as after a refused end of a turn.
        """
        self._check_known(followed, agent)
        await self._share(followed, agent)
        try:
            await followed.chain.hold(self.beats.alive)
        except BaseException as error:
            followed.known = isinstance(error, Running)
            raise

    def _check_known(self, followed: _Followed, agent: Agent) -> None:
        if not followed.known or agent not in self._registry:
            raise Moved(f"agent {agent.id} is being read again; send the request again", retry_after=1.0)

    async def _share(self, followed: _Followed, agent: Agent) -> None:
        """Write an agent that was made before the store was shared."""
        if followed.chain.tail.kind != "gone":
            return
        followed.known = False
        await followed.chain.expect_no_news()
        # A turn that is about to run has a record of its own.
        turns = [turn for turn in (agent.root, *agent.turns()) if turn.state != "running"]
        body = shared_agent(agent, turns, await self._archive.contents(turns))
        if agent.head.state == "running":
            under = agent.head.parent or agent.root
            record = msgspec.structs.replace(body.record, head=under.number, under=under.parent_number)
            body = SharedAgent(record, body.turns)
        await self._append(followed, "made", msgspec.msgpack.encode(body))
        followed.known = True

    async def _append(self, followed: _Followed, kind: Kind, body: bytes = b"", running: int = 0) -> None:
        try:
            await followed.chain.append(kind, body, running)
        except BaseException:
            followed.known = False
            raise


def _interrupted(at: float) -> EndRecord:
    """Return the record of a turn that ended before any of its answer was stored."""
    return EndRecord(state="interrupted", ids=b"", ended=at)


def _interrupted_end(turn: Turn) -> EndRecord:
    """Return the end of an interrupted turn that could not be resumed: with the answer that it has."""
    held = turn.held
    ended = held.ended or _interrupted(turn.began)
    return msgspec.structs.replace(ended, state="interrupted", ids=pack(held.tokens), message=held.answer)


def _replay(replayed: Replayed, id: str, record: ChainRecord) -> None:
    body = _body(id, record)
    if record.kind == "gone":
        replayed.gone()
    elif isinstance(body, SharedTurn):
        replayed.began(body)
    elif isinstance(body, SharedEnd):
        replayed.ended(body)
    elif isinstance(body, SharedAgent) and record.kind == "made":
        replayed.made(body)
    elif isinstance(body, SharedAgent):
        replayed.changed(body)


def _body(id: str, record: ChainRecord) -> SharedAgent | SharedTurn | SharedEnd | None:
    """Return what a record of an agent's chain holds; None for nothing. Raise Damaged if it cannot be decoded."""
    body: SharedAgent | SharedTurn | SharedEnd | None = None
    try:
        if record.kind == "began":
            body = msgspec.msgpack.decode(record.body, type=SharedTurn)
        elif record.kind == "ended":
            body = end = msgspec.msgpack.decode(record.body, type=SharedEnd)
            unpack(end.ended.ids)
        elif record.kind in ("made", "changed"):
            body = msgspec.msgpack.decode(record.body, type=SharedAgent)
    except (msgspec.DecodeError, ValueError) as error:
        raise Damaged(
            f"record {record.number} of agent {id} in the shared store cannot be decoded: {error}; if another version "
            "of Cairn wrote it, use the agent there, or update this server"
        ) from None
    return body
