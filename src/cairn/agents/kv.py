"""The KV of agents' contexts: where it lies, what is pinned, brought up and given up."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.archive import Archive, Unreadable
from cairn.agents.log.records import pack
from cairn.agents.request_contexts import (
    DIGEST_BYTES,
    HeadDigests,
    RequestContexts,
    common_chunks,
    prefix_digests,
)
from cairn.agents.turn_tree import NOBODY, Agent, Turn
from cairn.frontend.service import Service
from cairn.kv.tiers.store import Standing
from cairn.router.services import Services
from cairn.types.block_size import CHUNK_TOKENS
from cairn.types.errors import Conflict, Unavailable
from cairn.types.stats import KvStats, Placed, TakenIn


class Context(NamedTuple):
    """Ids whose KV is meant, of the model with this identity."""

    ids: Sequence[int]
    turn: Turn | None
    """Whose they are; None for an ordinary request's."""
    identity: bytes


RETRY_SECONDS = 1.0
MOST_RETRY_SECONDS = 30.0
"""Between two attempts at what the worker could not do: twice as long each time."""
MOST_CONTEXT = 1 << 22
"""Tokens of the longest context of a model of which nothing is known."""
BATCH = 32
"""Agents or turns that are looked at in a row before others get their turn on the event loop."""


class AgentKv:
    """The KV of all agents. What a worker cannot do while it is being replaced, or its model is not loaded, is
    Unavailable."""

    def __init__(self, services: Services, registry: AgentRegistry, archive: Archive) -> None:
        self._services, self._registry, self._archive = services, registry, archive
        self._tasks: set[asyncio.Task[None]] = set()
        self._pinning: dict[str, asyncio.Task[None]] = {}
        """The last pin of each owner that was begun."""
        self._waiting: set[int] = set()
        """Keys of agents whose contexts are marked as waiting for the result of a call."""
        self._request_contexts = RequestContexts()
        self._head_digests = HeadDigests()

    async def ids(self, turn: Turn) -> Sequence[int]:
        """The context behind a turn, for the model that answered it; none where this server has it not.

        Unavailable where the log cannot be read.
        """
        return await self._known_ids(turn) if self._services.known(turn.identity) else ()

    async def _known_ids(self, turn: Turn) -> Sequence[int]:
        """The context behind a turn, whichever model answered it."""
        if not turn.number:
            return ()
        return (await self._archive.branch(turn)).known(self._longest(turn.identity))

    def _longest(self, identity: bytes) -> int:
        """The longest context that there is KV of."""
        return self._services.context(identity) if self._services.known(identity) else MOST_CONTEXT

    def _service(self, identity: bytes) -> Service:
        """The service of a model. Unavailable where it is not loaded now."""
        if (found := self._services.of(identity)) is None:
            raise Unavailable("the model that made this context is not loaded", retry_after=RETRY_SECONDS)
        return found

    def _at_head(self, agent: Agent) -> Service:
        """The service of the model that answered at the agent's head. Of a model that is none of this server's there is
        no KV: any service says so."""
        known = agent.head.number and self._services.known(agent.head.identity)
        return self._service(agent.head.identity) if known else self._services.first

    async def where(self, agent: Agent) -> Placed:
        """How many leading tokens each tier has."""
        return await self._at_head(agent).where(await self.ids(agent.head), agent.salt)

    async def pin(self, agent: Agent) -> None:
        """Tell the stores what is pinned now."""
        if not agent.record.pinned:
            return await self._unpin_everywhere(owners(agent))
        while agent.record.pinned and agent in self._registry:  # it may be unpinned or deleted while its head is read
            head = agent.head
            if head.number and not self._services.known(head.identity):
                return None  # another model's: what is pinned of its KV stays pinned
            ids = await self.ids(head)
            if agent.head is head and agent.record.pinned and agent in self._registry:
                return await self._at_head(agent).pin(owners(agent)[0], ids, agent.salt)

    def add_request_context(self, agent: Agent, ids: Sequence[int], identity: bytes) -> None:
        """An ordinary request in the agent's name is over, and this is its context: its KV goes with the agent."""
        self._request_contexts.add(agent, ids, identity)

    def pin_later(
        self,
        agent: Agent,
        ids: Sequence[int] | None = None,
        identity: bytes = b"",
        *,
        done: Callable[[], None] | None = None,
    ) -> None:
        """Pin the agent's context, or beside it that of the last request in its name, which the model with this
        identity answered; nobody waits for it. `done` is
        called once the stores were told, unless another pin takes the place of this one before."""
        owner = owners(agent)[ids is not None]
        if (before := self._pinning.pop(owner, None)) is not None:
            before.cancel()

        def over(task: asyncio.Task[None]) -> None:
            if self._pinning.get(owner) is task:
                del self._pinning[owner]

        async def work() -> None:
            await (self.pin(agent) if ids is None else self._pin_request_context(agent, ids, identity))
            if done is not None:
                done()

        self._pinning[owner] = self._later(work)
        self._pinning[owner].add_done_callback(over)

    async def _pin_request_context(self, agent: Agent, ids: Sequence[int], identity: bytes) -> None:
        if agent.record.pinned and agent in self._registry:
            await self._service(identity).pin(owners(agent)[1], ids, agent.salt)

    def drop_later(self, agent: Agent, ids: Sequence[int], identity: bytes) -> None:
        """An ordinary request in the name of an agent that is deleted is over: give up what only it needs."""
        self._forget_texts(agent)  # its end has put its text there
        self._later(partial(self._evict_rest, agent, [Context(array("I", ids), None, identity)]))

    def _forget_texts(self, agent: Agent) -> None:
        for service in self._services:
            service.recent.forget(agent.salt)

    def turn_ended(self, agent: Agent, context: Callable[[], Sequence[int]], *, in_call: bool) -> None:
        """A turn of the agent is over, with this `context`: while it waits for the result of a call, that outlives
        others."""
        standing: Standing = "waiting" if in_call else "idle"
        if in_call:
            self._waiting.add(agent.key)
        elif agent.key in self._waiting:
            self._waiting.discard(agent.key)
        else:
            return
        self._attempt(partial(self._mark, context(), agent.salt, agent.head.identity, standing))

    def moved(self, agent: Agent, before: Turn) -> None:
        """The agent's head has left a turn: what only leads there goes first, until somebody comes back."""
        self._waiting.discard(agent.key)
        if agent.head not in before.path():
            self.wanted_again(agent)
        self._mark_later(agent, before, "superseded")

    def wanted_again(self, agent: Agent) -> None:
        """The agent stands on a branch that somebody had left."""
        self._mark_later(agent, agent.head, "idle")

    def request_ended_in_call(self, salt: bytes, ids: Sequence[int], identity: bytes) -> None:
        """An ordinary request has ended in a call, so its context is likely to go on with the result."""
        self._attempt(partial(self._mark, ids, salt, identity, "waiting"))

    def _mark_later(self, agent: Agent, turn: Turn, standing: Standing) -> None:
        async def work() -> None:
            ids, keep = await self.ids(turn), 0
            if standing == "superseded" and ids:
                [keep] = await self._shared(agent, [Context(ids, turn, turn.identity)], own=True)
            await self._mark(ids, agent.salt, turn.identity, standing, keep)

        self._attempt(work)

    async def _mark(self, ids: Sequence[int], salt: bytes, identity: bytes, standing: Standing, keep: int = 0) -> None:
        service = self._services.of(identity)
        if service is not None and len(ids) >= CHUNK_TOKENS and service.kv() != KvStats():
            await service.mark(ids, salt, standing, keep=keep)

    def answers(self, agent: Agent) -> bool:
        """Whether the model that answered at the agent's head is loaded."""
        return bool(agent.head.number) and self._services.of(agent.head.identity) is not None

    async def paths(self, agent: Agent) -> list[Path]:
        """The files that the disk has of the context, what is extended before what extends it; what waits to be stored
        is stored before. None where its model is not loaded."""
        if not self.answers(agent):
            return []
        with contextlib.suppress(Unavailable):  # its KV is computed again
            service, ids = self._at_head(agent), await self.ids(agent.head)
            await service.flush()
            return await service.kv_paths(ids, agent.salt)
        return []

    async def take_in(self, agent: Agent, path: Path) -> TakenIn:
        """Store what a file has of the context's KV."""
        return await self._at_head(agent).take_in(path, await self.ids(agent.head), agent.salt)

    async def prefetch(self, agent: Agent) -> Placed:
        """Bring the context up into the pool; where it is then."""
        return await self._at_head(agent).prefetch(await self.ids(agent.head), agent.salt)

    async def evict(self, agent: Agent, *, disk: bool) -> Placed:
        """Give up the context, except what other agents of the tenant share; where it is then. Conflict where it is
        pinned and was to go from the disk too."""
        service, ids = self._at_head(agent), await self.ids(agent.head)
        [keep] = await self._shared(agent, [Context(ids, agent.head, agent.head.identity)])
        if disk and agent.record.pinned:  # now, for it may have been pinned meanwhile
            raise Conflict(f"agent {agent.id} is pinned; unpin it first")
        return await service.evict(ids, agent.salt, keep=keep, disk=disk)

    async def drop(self, agent: Agent) -> bool:
        """Give up what only this agent needs; whether its pins are given up too. If not, call `unpin_later`.

        KV that does not go now, since there is no worker, goes once there is one. Where the server ends before, it goes
        by the stores' time to live, which spares what is pinned. So does that of an agent whose tenant is not
        configured any more.
        """
        self._waiting.discard(agent.key)
        tied = self._request_contexts.take(agent)
        self._head_digests.forget(agent)
        self._forget_texts(agent)  # its text is shown to nobody any more
        await asyncio.sleep(0)  # a pin that was asked for before comes before
        unpinned = False
        with contextlib.suppress(Unavailable):
            await self._unpin_everywhere(owners(agent))
            unpinned = True
        if agent.salt == NOBODY:
            return unpinned
        rest = await self._evict_all(agent, [Context(one.ids, None, one.identity) for one in tied])
        rest += await self._evict_turns(agent, [*agent.turns(), *agent.head.path()])
        if rest:
            self._later(partial(self._evict_rest, agent, rest))
        return unpinned

    def unpin_later(self, owners: Sequence[str], done: Callable[[], None]) -> None:
        """Give up the pins of an agent that is gone once the worker can, and call `done`."""

        async def unpin() -> None:
            await self._unpin_everywhere(owners)
            done()

        self._later(unpin)

    async def _unpin_everywhere(self, owners: Sequence[str]) -> None:
        """Give up what these pinned, on models that are not loaded too: they share the folder of one that is.

        Unavailable where that cannot be done now; the others have done it all the same.
        """
        refused: Unavailable | None = None
        for service in self._working():
            for owner in owners:
                try:
                    await service.unpin(owner)
                except Unavailable as error:
                    refused = error
        if refused is not None:
            raise refused
        absent = self._services.away() or any(service.gave_up for service in self._services)
        if absent and not self._stores_on_disk():
            raise Unavailable("a model that may have the pins is not loaded", retry_after=RETRY_SECONDS)

    def _working(self) -> list[Service]:
        """The services that have a worker, or are to have one again."""
        return [service for service in self._services if not service.gave_up]

    def _stores_on_disk(self) -> bool:
        """Whether a model that is loaded has a store on the disk, as far as its worker has said."""
        return any(service.kv().disk is not None for service in self._working())

    async def collect(self, agent: Agent, turns: Sequence[Turn]) -> None:
        """Give up what nobody needs of turns that are the agent's no more.

        They are still in the log. What cannot be done now is left to the stores' time to live.
        """
        if agent.salt == NOBODY:
            return
        await self._evict_turns(agent, turns, own=True)

    async def _evict_turns(self, agent: Agent, turns: Sequence[Turn], *, own: bool = False) -> list[Context]:
        """Give up the contexts of those; see `_evict_all`. Of what the log does not give back only age takes the KV."""
        rest = list[Context]()
        for identity in dict.fromkeys(turn.identity for turn in turns if turn.number and turn.identity):
            mine = [turn for turn in turns if turn.number and turn.identity == identity]
            async with contextlib.aclosing(self._archive.contexts(mine, self._longest(identity))) as found:
                async for contexts in found:  # all of them together may be gigabytes
                    rest += await self._evict_all(agent, [Context(*one, identity) for one in contexts], own=own)
        return rest

    async def _evict_all(self, agent: Agent, contexts: Sequence[Context], *, own: bool = False) -> list[Context]:
        """Give up these contexts but for what is shared; those that do not go now."""
        if not contexts:  # what others share is looked for among all agents of the tenant
            return []
        rest: list[Context] = []
        for one, keep in zip(contexts, await self._shared(agent, contexts, own=own), strict=True):
            try:
                service = self._services.of(one.identity)
                if service is None or service.gave_up:
                    await self._erase_away(one, agent.salt, keep)
                else:
                    await service.evict(one.ids, agent.salt, keep=keep, disk=True)
            except Unavailable:  # the ids themselves: soon the log has them no more
                rest.append(one._replace(ids=array("I", one.ids)))
        return rest

    async def _erase_away(self, one: Context, salt: bytes, keep: int) -> None:
        """Erase what a model that has no worker has stored of a context: any that has, and shares its folder, can."""
        for service in self._working():
            await service.erase_of_model(one.identity, one.ids, salt, keep=keep)
        if self._services.known(one.identity) and not self._stores_on_disk():
            raise Unavailable("the model that made this context is not loaded", retry_after=RETRY_SECONDS)

    async def _evict_rest(self, agent: Agent, rest: list[Context]) -> None:
        """Try it again with those. Unavailable where one does not go; the others do."""
        for service in self._working():  # what is shared is much to find out where there is no worker
            await service.where((), agent.salt)
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

    async def _shared(self, agent: Agent, contexts: Sequence[Context], *, own: bool = False) -> list[int]:
        """How many leading tokens of each other agents of the tenant have too, in whole chunks.

        `own`: what the agent's own head and ordinary requests have counts as well.
        """
        found = [prefix_digests(one.ids) for one in contexts]
        tied = self._request_contexts.prefix_digests(agent, own=own)
        longest = [
            max((common_chunks(one, other) for other in tied if other[:DIGEST_BYTES] == one[:DIGEST_BYTES]), default=0)
            for one in found
        ]
        firsts = [one.turn.first if one.turn is not None else hash(pack(one.ids[:CHUNK_TOKENS])) for one in contexts]
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
        """The digests of the context at the agent's head."""
        head = agent.head
        if (known := self._head_digests.get(agent)) is not None:
            return known
        try:
            found = prefix_digests(await self._known_ids(head))
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

        return self._begin(run())

    def _attempt(self, work: Callable[[], Awaitable[object]]) -> None:
        """Do this if the worker can now; nothing depends on it."""

        async def run() -> None:
            with contextlib.suppress(Unavailable):
                await work()

        self._begin(run())

    def _begin(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def owners(agent: Agent) -> tuple[str, str]:
    """The owners of the pins of its context, and of an ordinary request's: they stay the same for ever, whichever logs
    share a store."""
    record = agent.record
    text = f"{record.tenant}\0{record.id}\0{record.created!r}"
    context, tied = (hashlib.sha256(one.encode()).hexdigest()[:32] for one in (text, text + "\0tied"))
    return context, tied
