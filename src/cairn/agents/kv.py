"""The KV of agents' contexts: where it lies, what is pinned, brought up and given up."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Coroutine, Sequence
from typing import Any

from cairn.agents.archive import Archive
from cairn.agents.content import shared
from cairn.agents.records import pack
from cairn.agents.roster import Roster
from cairn.agents.tied import Tied
from cairn.agents.tree import CHUNK_TOKENS, Agent, Turn
from cairn.errors import Unavailable
from cairn.figures import Placed
from cairn.service.service import Service

Contexts = Sequence[tuple[Sequence[int], Turn | None]]
"""Ids, and whose they are: None for an ordinary request's."""
RETRY_SECONDS = 1.0
"""Between two attempts to give up the KV of an agent that is deleted."""


class AgentKv:
    """All agents'. What the worker cannot do while it is being replaced is Unavailable."""

    def __init__(self, service: Service, roster: Roster, archive: Archive) -> None:
        self._service, self._roster, self._archive = service, roster, archive
        self._tasks: set[asyncio.Task[None]] = set()
        self._tied = Tied()

    async def ids(self, turn: Turn) -> Sequence[int]:
        """The context behind a turn, for the model that is served; none where another model answered it.

        Unavailable where the log cannot be read.
        """
        if not turn.number or turn.identity != self._service.spec.identity:
            return ()
        return (await self._archive.branch(turn)).known()

    async def where(self, agent: Agent) -> Placed:
        """How many leading tokens each tier has."""
        return await self._service.where(await self.ids(agent.head), agent.salt)

    async def pin(self, agent: Agent) -> None:
        """Tell the stores what is pinned now."""
        if not agent.record.pinned:
            return await self._unpin(agent)
        while agent.record.pinned and agent in self._roster:  # it may be unpinned or deleted while its head is read
            head = agent.head
            ids = await self.ids(head)
            if agent.head is head and agent.record.pinned and agent in self._roster:
                return await self._service.pin(_owner(agent), ids, agent.salt)

    def tied(self, agent: Agent, ids: Sequence[int]) -> None:
        """An ordinary request in the agent's name was answered, and this is its context: its KV goes with the agent."""
        self._tied.add(agent, ids)

    def pin_later(self, agent: Agent, ids: Sequence[int] | None = None) -> None:
        """Pin the agent's context, or beside it that of the last request in its name; nobody waits for it."""
        self._later(self.pin(agent) if ids is None else self._service.pin(_owner(agent, tied=True), ids, agent.salt))

    def drop_later(self, agent: Agent, ids: Sequence[int]) -> None:
        """An ordinary request in the name of an agent that is deleted was answered: give up what only it needs."""
        self._later(self._insist(agent, [(ids, None)]))

    async def prefetch(self, agent: Agent) -> Placed:
        """Bring the context up into the pool; where it is then."""
        return await self._service.prefetch(await self.ids(agent.head), agent.salt)

    async def evict(self, agent: Agent, *, disk: bool) -> Placed:
        """Give up the context, except what other agents of the tenant share; where it is then."""
        ids = await self.ids(agent.head)
        return await self._service.evict(ids, agent.salt, keep=await self._shared(agent, ids, agent.head), disk=disk)

    async def drop(self, agent: Agent) -> None:
        """Give up what only this agent needs.

        Where there is no worker now it is done once there is one; where the server ends before, by the stores' time to
        live.
        """
        contexts: list[tuple[Sequence[int], Turn | None]] = [(one, None) for one in self._tied.take(agent)]
        self._service.recent.forget(agent.salt)  # its text is shown to nobody any more
        for turn in {agent.head, *agent.leaves()}:
            for one in turn.path():
                with contextlib.suppress(Unavailable):  # the log cannot be read: only age takes the KV of what follows
                    contexts.append((await self.ids(one), one))
                    break
        await asyncio.sleep(0)  # a pin that was asked for before comes before
        try:
            await self._give_up(agent, contexts)
        except Unavailable:
            self._later(self._insist(agent, contexts))

    async def collect(self, agent: Agent, turns: Sequence[Turn]) -> None:
        """Give up what nobody needs of turns that are the agent's no more.

        They are still in the log. What cannot be done now is left to the stores' time to live.
        """
        parents = {turn.parent for turn in turns}
        for turn in turns:
            if turn not in parents:
                with contextlib.suppress(Unavailable):
                    ids = await self.ids(turn)
                    keep = await self._shared(agent, ids, turn, own=True)
                    await self._service.evict(ids, agent.salt, keep=keep, disk=True)

    async def _insist(self, agent: Agent, contexts: Contexts) -> None:
        while True:
            with contextlib.suppress(Unavailable):
                return await self._give_up(agent, contexts)
            await asyncio.sleep(RETRY_SECONDS)

    async def _give_up(self, agent: Agent, contexts: Contexts) -> None:
        await self._unpin(agent)
        for ids, turn in contexts:
            if ids:
                await self._service.evict(ids, agent.salt, keep=await self._shared(agent, ids, turn), disk=True)

    async def settled(self) -> None:
        """Return when nothing is under way that nobody waits for."""
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """Give up what nobody waits for."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _unpin(self, agent: Agent) -> None:
        await self._service.unpin(_owner(agent))
        await self._service.unpin(_owner(agent, tied=True))

    async def _shared(self, agent: Agent, ids: Sequence[int], turn: Turn | None, *, own: bool = False) -> int:
        """How many leading tokens other agents of the tenant have too, in whole chunks. `turn`: whose context it is.

        `own`: what the agent's own head has counts as well.
        """
        if len(ids) < CHUNK_TOKENS:
            return 0
        longest, first = 0, turn.first if turn is not None else hash(pack(ids[:CHUNK_TOKENS]))
        for other in self._roster.of(agent.tenant):
            if (other is agent and not own) or len(ids) == longest or (first and other.head.first not in (0, first)):
                continue
            theirs: Sequence[int] = ()
            with contextlib.suppress(Unavailable):  # it was deleted meanwhile, or damaged: what it shares is made anew
                theirs = await self.ids(other.head)
            if tuple(theirs[: longest + 1]) == tuple(ids[: longest + 1]):
                longest = max(longest, shared(ids, theirs))
        return longest // CHUNK_TOKENS * CHUNK_TOKENS

    def _later(self, work: Coroutine[Any, Any, object]) -> None:
        async def run() -> None:
            with contextlib.suppress(Unavailable):  # the next turn tries again
                await work

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _owner(agent: Agent, *, tied: bool = False) -> str:
    """Of the pins of its context, or of an ordinary request's: the same for ever, whichever logs share a store."""
    record = agent.record
    text = f"{record.tenant}\0{record.id}\0{record.created!r}" + "\0tied" * tied
    return hashlib.sha256(text.encode()).hexdigest()[:32]
