"""The KV of agents' contexts: where it lies, what is pinned, brought up and given up."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.archive import Archive, Unreadable
from cairn.agents.prefix_digests import DIGEST_BYTES, HeadDigests, common_chunks, prefix_digests
from cairn.agents.records import pack
from cairn.agents.request_contexts import RequestContexts
from cairn.agents.turn_tree import CHUNK_TOKENS, NOBODY, Agent, Turn
from cairn.errors import Conflict, Unavailable
from cairn.figures import Placed
from cairn.service.service import Service

Context = tuple[Sequence[int], Turn | None]
"""Ids, and whose they are: None for an ordinary request's."""
RETRY_SECONDS = 1.0
MOST_RETRY_SECONDS = 30.0
"""Between two attempts at what the worker could not do: twice as long each time."""
BATCH = 32
"""Agents or turns that are looked at in a row before others get their turn on the event loop."""


class AgentKv:
    """All agents'. What the worker cannot do while it is being replaced is Unavailable."""

    def __init__(self, service: Service, registry: AgentRegistry, archive: Archive) -> None:
        self._service, self._registry, self._archive = service, registry, archive
        self._tasks: set[asyncio.Task[None]] = set()
        self._pinning: dict[str, asyncio.Task[None]] = {}
        """By owner, the last that was begun."""
        self._request_contexts = RequestContexts()
        self._head_digests = HeadDigests()

    async def ids(self, turn: Turn) -> Sequence[int]:
        """The context behind a turn, for the model that is served; none where another model answered it.

        Unavailable where the log cannot be read.
        """
        if not turn.number or turn.identity != self._service.spec.identity:
            return ()
        return (await self._archive.branch(turn)).known(self._service.spec.context)  # there is no KV beyond it

    async def where(self, agent: Agent) -> Placed:
        """How many leading tokens each tier has."""
        return await self._service.where(await self.ids(agent.head), agent.salt)

    async def pin(self, agent: Agent) -> None:
        """Tell the stores what is pinned now."""
        if not agent.record.pinned:
            return await self._unpin(agent)
        while agent.record.pinned and agent in self._registry:  # it may be unpinned or deleted while its head is read
            head = agent.head
            if head.number and head.identity != self._service.spec.identity:
                return None  # another model's: what is pinned of its KV stays pinned
            ids = await self.ids(head)
            if agent.head is head and agent.record.pinned and agent in self._registry:
                return await self._service.pin(owners(agent)[0], ids, agent.salt)

    def add_request_context(self, agent: Agent, ids: Sequence[int]) -> None:
        """An ordinary request in the agent's name is over, and this is its context: its KV goes with the agent."""
        self._request_contexts.add(agent, ids)

    def pin_later(
        self, agent: Agent, ids: Sequence[int] | None = None, *, done: Callable[[], None] | None = None
    ) -> None:
        """Pin the agent's context, or beside it that of the last request in its name; nobody waits for it. `done` is
        called once the stores were told, unless another pin takes the place of this one before."""
        owner = owners(agent)[ids is not None]
        if (before := self._pinning.pop(owner, None)) is not None:
            before.cancel()

        def over(task: asyncio.Task[None]) -> None:
            if self._pinning.get(owner) is task:
                del self._pinning[owner]

        async def work() -> None:
            await (self.pin(agent) if ids is None else self._pin_request_context(agent, ids))
            if done is not None:
                done()

        self._pinning[owner] = self._later(work)
        self._pinning[owner].add_done_callback(over)

    async def _pin_request_context(self, agent: Agent, ids: Sequence[int]) -> None:
        if agent.record.pinned and agent in self._registry:
            await self._service.pin(owners(agent)[1], ids, agent.salt)

    def drop_later(self, agent: Agent, ids: Sequence[int]) -> None:
        """An ordinary request in the name of an agent that is deleted is over: give up what only it needs."""
        self._service.recent.forget(agent.salt)  # its end has put its text there
        self._later(partial(self._evict_rest, agent, [(array("I", ids), None)]))

    async def prefetch(self, agent: Agent) -> Placed:
        """Bring the context up into the pool; where it is then."""
        return await self._service.prefetch(await self.ids(agent.head), agent.salt)

    async def evict(self, agent: Agent, *, disk: bool) -> Placed:
        """Give up the context, except what other agents of the tenant share; where it is then. Conflict where it is
        pinned and was to go from the disk too."""
        ids = await self.ids(agent.head)
        [keep] = await self._shared(agent, [(ids, agent.head)])
        if disk and agent.record.pinned:  # now, for it may have been pinned meanwhile
            raise Conflict(f"agent {agent.id} is pinned; unpin it first")
        return await self._service.evict(ids, agent.salt, keep=keep, disk=disk)

    async def drop(self, agent: Agent) -> bool:
        """Give up what only this agent needs; whether its pins are given up too. If not, call `unpin_later`.

        KV that does not go now, since there is no worker, goes once there is one. Where the server ends before, it goes
        by the stores' time to live, which spares what is pinned. So does that of an agent whose tenant is not
        configured any more.
        """
        tied = self._request_contexts.take(agent)
        self._head_digests.forget(agent)
        self._service.recent.forget(agent.salt)  # its text is shown to nobody any more
        await asyncio.sleep(0)  # a pin that was asked for before comes before
        unpinned = False
        with contextlib.suppress(Unavailable):
            await self._unpin(agent)
            unpinned = True
        if agent.salt == NOBODY:
            return unpinned
        rest = await self._evict_all(agent, [(ids, None) for ids in tied])
        rest += await self._evict_turns(agent, [*agent.turns(), *agent.head.path()])
        if rest:
            self._later(partial(self._evict_rest, agent, rest))
        return unpinned

    def unpin_later(self, owners: Sequence[str], done: Callable[[], None]) -> None:
        """Give up the pins of an agent that is gone once the worker can, and call `done`."""

        async def unpin() -> None:
            for owner in owners:
                await self._service.unpin(owner)
            done()

        self._later(unpin)

    async def collect(self, agent: Agent, turns: Sequence[Turn]) -> None:
        """Give up what nobody needs of turns that are the agent's no more.

        They are still in the log. What cannot be done now is left to the stores' time to live.
        """
        if agent.salt == NOBODY:
            return
        await self._evict_turns(agent, turns, own=True)

    async def _evict_turns(self, agent: Agent, turns: Sequence[Turn], *, own: bool = False) -> list[Context]:
        """Give up the contexts of those that the served model answered; see `_evict_all`. Of what the log does not give
        back only age takes the KV."""
        spec, rest = self._service.spec, list[Context]()
        mine = [turn for turn in turns if turn.number and turn.identity == spec.identity]
        async with contextlib.aclosing(self._archive.contexts(mine, spec.context)) as found:
            async for contexts in found:  # all of them together may be gigabytes
                rest += await self._evict_all(agent, contexts, own=own)
        return rest

    async def _evict_all(self, agent: Agent, contexts: Sequence[Context], *, own: bool = False) -> list[Context]:
        """Give up these contexts but for what is shared; those that do not go now."""
        if not contexts:  # what others share is looked for among all agents of the tenant
            return []
        rest: list[Context] = []
        for (ids, turn), keep in zip(contexts, await self._shared(agent, contexts, own=own), strict=True):
            try:
                await self._service.evict(ids, agent.salt, keep=keep, disk=True)
            except Unavailable:
                rest.append((array("I", ids), turn))  # the ids themselves: soon the log has them no more
        return rest

    async def _evict_rest(self, agent: Agent, rest: list[Context]) -> None:
        """Try it again with those. Unavailable where one does not go; the others do."""
        await self._service.where((), agent.salt)  # what is shared is much to find out where there is no worker
        rest[:] = await self._evict_all(agent, rest)
        if rest:
            raise Unavailable(f"{len(rest)} contexts of agent {agent.id} do not go")

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
        for owner in owners(agent):
            await self._service.unpin(owner)

    async def _shared(self, agent: Agent, contexts: Sequence[Context], *, own: bool = False) -> list[int]:
        """How many leading tokens of each other agents of the tenant have too, in whole chunks.

        `own`: what the agent's own head and ordinary requests have counts as well.
        """
        found = [prefix_digests(ids) for ids, _ in contexts]
        tied = self._request_contexts.prefix_digests(agent, own=own)
        longest = [
            max((common_chunks(one, other) for other in tied if other[:DIGEST_BYTES] == one[:DIGEST_BYTES]), default=0)
            for one in found
        ]
        firsts = [turn.first if turn is not None else hash(pack(ids[:CHUNK_TOKENS])) for ids, turn in contexts]
        for looked, other in enumerate(self._registry.of(agent.tenant), 1):
            if looked % BATCH == 0:
                await asyncio.sleep(0)
            near = [
                at
                for at, one in enumerate(found)
                if longest[at] * DIGEST_BYTES < len(one) and (not firsts[at] or other.head.first in (0, firsts[at]))
            ]
            if (other is agent and not own) or not near:
                continue
            theirs = await self._digests_at_head(other)
            for at in near:
                longest[at] = max(longest[at], common_chunks(found[at], theirs))
        return [length * CHUNK_TOKENS for length in longest]

    async def _digests_at_head(self, agent: Agent) -> bytes:
        """Of the context at the agent's head."""
        head = agent.head
        if head.identity != self._service.spec.identity:
            return b""
        if (known := self._head_digests.get(agent)) is not None:
            return known
        try:
            found = prefix_digests(await self.ids(head))
        except Unavailable:  # it was deleted meanwhile, or damaged: what it shares is made anew
            return b""
        if head.state == "finished" and agent.head is head and agent in self._registry:
            self._head_digests.put(agent, head, found)
        return found

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


def owners(agent: Agent) -> tuple[str, str]:
    """Of the pins of its context, and of an ordinary request's: the same for ever, whichever logs share a store."""
    record = agent.record
    text = f"{record.tenant}\0{record.id}\0{record.created!r}"
    context, tied = (hashlib.sha256(one.encode()).hexdigest()[:32] for one in (text, text + "\0tied"))
    return context, tied
