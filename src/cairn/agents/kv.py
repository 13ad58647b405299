"""The KV of agents' contexts: where it lies, what is pinned, brought up and given up."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from cairn.agents.archive import Archive
from cairn.agents.content import shared
from cairn.agents.damage import Unreadable
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
MOST_RETRY_SECONDS = 30.0
"""Between two attempts at what the worker could not do: twice as long each time."""


class AgentKv:
    """All agents'. What the worker cannot do while it is being replaced is Unavailable."""

    def __init__(self, service: Service, roster: Roster, archive: Archive) -> None:
        self._service, self._roster, self._archive = service, roster, archive
        self._tasks: set[asyncio.Task[None]] = set()
        self._pinning: dict[str, asyncio.Task[None]] = {}
        """By owner, the last that was begun."""
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
            if head.number and head.identity != self._service.spec.identity:
                return None  # another model's: what is pinned of its KV stays pinned
            ids = await self.ids(head)
            if agent.head is head and agent.record.pinned and agent in self._roster:
                return await self._service.pin(_owner(agent), ids, agent.salt)

    def tied(self, agent: Agent, ids: Sequence[int]) -> None:
        """An ordinary request in the agent's name is over, and this is its context: its KV goes with the agent."""
        self._tied.add(agent, ids)

    def pin_later(self, agent: Agent, ids: Sequence[int] | None = None) -> None:
        """Pin the agent's context, or beside it that of the last request in its name; nobody waits for it."""
        owner = _owner(agent, tied=ids is not None)
        if (before := self._pinning.pop(owner, None)) is not None:
            before.cancel()

        def over(task: asyncio.Task[None]) -> None:
            if self._pinning.get(owner) is task:
                del self._pinning[owner]

        work = partial(self.pin, agent) if ids is None else partial(self._pin_tied, agent, ids)
        self._pinning[owner] = self._later(work)
        self._pinning[owner].add_done_callback(over)

    async def _pin_tied(self, agent: Agent, ids: Sequence[int]) -> None:
        if agent.record.pinned and agent in self._roster:
            await self._service.pin(_owner(agent, tied=True), ids, agent.salt)

    def drop_later(self, agent: Agent, ids: Sequence[int]) -> None:
        """An ordinary request in the name of an agent that is deleted is over: give up what only it needs."""
        self._later(partial(self._give_up, agent, [(ids, None)]))

    async def prefetch(self, agent: Agent) -> Placed:
        """Bring the context up into the pool; where it is then."""
        return await self._service.prefetch(await self.ids(agent.head), agent.salt)

    async def evict(self, agent: Agent, *, disk: bool) -> Placed:
        """Give up the context, except what other agents of the tenant share; where it is then."""
        ids = await self.ids(agent.head)
        [keep] = await self._shared(agent, [(ids, agent.head)])
        return await self._service.evict(ids, agent.salt, keep=keep, disk=disk)

    async def drop(self, agent: Agent) -> None:
        """Give up what only this agent needs.

        Where there is no worker now it is done once there is one; where the server ends before, by the stores' time to
        live.
        """
        contexts: list[tuple[Sequence[int], Turn | None]] = [(one, None) for one in self._tied.take(agent)]
        self._service.recent.forget(agent.salt)  # its text is shown to nobody any more
        for turn in {agent.head, *agent.leaves()}:
            contexts += await self._contexts(turn)
        await asyncio.sleep(0)  # a pin that was asked for before comes before
        try:
            await self._give_up(agent, contexts)
        except Unavailable:
            self._later(partial(self._give_up, agent, contexts))

    async def collect(self, agent: Agent, turns: Sequence[Turn]) -> None:
        """Give up what nobody needs of turns that are the agent's no more.

        They are still in the log. What cannot be done now is left to the stores' time to live.
        """
        parents = {turn.parent for turn in turns}
        for turn in turns:
            if turn not in parents:
                contexts = [(ids, one) for ids, one in await self._contexts(turn) if one in turns]
                with contextlib.suppress(Unavailable):
                    await self._evict_all(agent, contexts, own=True)

    async def _contexts(self, end: Turn) -> list[tuple[Sequence[int], Turn]]:
        """Of the branch that ends there, for the model that is served: the contexts that no later one extends."""
        path = list(end.path())
        for at, one in enumerate(path):
            with contextlib.suppress(Unavailable):  # the log cannot be read: only age takes the KV of what follows
                branch = await self._archive.branch(one)
                turns = path[at:][::-1]
                return [(ids, turns[place]) for place, ids in branch.contexts(self._service.spec.identity)]
        return []

    async def _give_up(self, agent: Agent, contexts: Contexts) -> None:
        await self._unpin(agent)
        await self._evict_all(agent, contexts)

    async def _evict_all(self, agent: Agent, contexts: Contexts, *, own: bool = False) -> None:
        """Give up these contexts but for what is shared. Unavailable where one does not go; the others do."""
        failure = None
        for (ids, _), keep in zip(contexts, await self._shared(agent, contexts, own=own), strict=True):
            try:
                await self._service.evict(ids, agent.salt, keep=keep, disk=True)
            except Unavailable as error:
                failure = error
        if failure is not None:
            raise failure

    async def settled(self) -> None:
        """Return when nothing is under way that nobody waits for."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Give up what nobody waits for."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _unpin(self, agent: Agent) -> None:
        await self._service.unpin(_owner(agent))
        await self._service.unpin(_owner(agent, tied=True))

    async def _shared(self, agent: Agent, contexts: Contexts, *, own: bool = False) -> list[int]:
        """How many leading tokens of each other agents of the tenant have too, in whole chunks.

        `own`: what the agent's own head has counts as well.
        """
        longest = [0] * len(contexts)
        firsts = [turn.first if turn is not None else hash(pack(ids[:CHUNK_TOKENS])) for ids, turn in contexts]
        for other in self._roster.of(agent.tenant):
            near = [
                at
                for at, (ids, _) in enumerate(contexts)
                if max(longest[at] + 1, CHUNK_TOKENS) <= len(ids)
                and (not firsts[at] or other.head.first in (0, firsts[at]))
            ]
            if (other is agent and not own) or not near:
                continue
            theirs: Sequence[int] = ()
            with contextlib.suppress(Unavailable):  # it was deleted meanwhile, or damaged: what it shares is made anew
                theirs = await self.ids(other.head)
            for at in near:
                ids, length = contexts[at][0], longest[at] + 1
                if tuple(theirs[:length]) == tuple(ids[:length]):
                    longest[at] = shared(ids, theirs)
        return [length // CHUNK_TOKENS * CHUNK_TOKENS for length in longest]

    def _later(self, work: Callable[[], Awaitable[object]]) -> asyncio.Task[None]:
        """Do this once the worker can; nobody waits for it."""

        async def run() -> None:
            pause = RETRY_SECONDS
            while True:
                try:
                    await work()
                    return
                except Unreadable:  # damage does not pass
                    return
                except Unavailable:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, MOST_RETRY_SECONDS)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _owner(agent: Agent, *, tied: bool = False) -> str:
    """Of the pins of its context, or of an ordinary request's: the same for ever, whichever logs share a store."""
    record = agent.record
    text = f"{record.tenant}\0{record.id}\0{record.created!r}" + "\0tied" * tied
    return hashlib.sha256(text.encode()).hexdigest()[:32]
