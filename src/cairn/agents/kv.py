"""KV of agents' contexts: lookup, pinning, prefetch and eviction."""

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
from cairn.served_models.services import Services
from cairn.types.errors import Conflict, Unavailable
from cairn.types.model_spec import CHUNK_TOKENS
from cairn.types.model_variant import ModelVariant, known_variant
from cairn.types.stats import ImportedKv, KvStats, Placed


class Context(NamedTuple):
    """Token ids whose KV is meant, with the identity of their model."""

    ids: Sequence[int]
    turn: Turn | None
    """Turn whose context it is; None for that of an ordinary request."""
    identity: bytes
    variant: ModelVariant | None = None
    """The model and its adapters, for contexts that outlive their turn or have none; None if unknown."""


RETRY_SECONDS = 1.0
MOST_RETRY_SECONDS = 30.0
"""Longest pause between attempts that the worker refused; each pause is twice the one before."""
MOST_CONTEXT = 1 << 22
"""Assumed longest context, in tokens, of an unknown model."""
BATCH = 32
"""Agents or turns handled in a row before the event loop runs other work."""


class AgentKv:
    """The KV of all agents.

    Methods raise Unavailable while the worker is being replaced, or if the model is not loaded.
    """

    def __init__(self, services: Services, registry: AgentRegistry, archive: Archive) -> None:
        self._services, self._registry, self._archive = services, registry, archive
        self._tasks: set[asyncio.Task[None]] = set()
        self._pinning: dict[str, asyncio.Task[None]] = {}
        """Newest pin task of each owner."""
        self._waiting: set[int] = set()
        """Keys of agents whose contexts are marked as waiting for a tool result."""
        self._request_contexts = RequestContexts()
        self._head_digests = HeadDigests()

    async def ids(self, turn: Turn) -> Sequence[int]:
        """Return the token ids of the context after `turn`; empty if the model that answered it is not served here.

        Raise Unavailable if the log cannot be read.
        """
        return await self._known_ids(turn) if self._services.known(turn.identity) else ()

    async def _known_ids(self, turn: Turn) -> Sequence[int]:
        """Return the token ids of the context after `turn`, whichever model answered it."""
        if not turn.number:
            return ()
        return (await self._archive.branch(turn)).known(self._longest(turn.identity))

    def _longest(self, identity: bytes) -> int:
        """Return the length of the longest context that can have KV."""
        return self._services.context(identity) if self._services.known(identity) else MOST_CONTEXT

    def _service(self, identity: bytes) -> Service:
        """Return the service of a model. Raise Unavailable if it is not loaded."""
        if (service := self._services.storing(identity)) is None:
            raise Unavailable("the model that made this context is not loaded", retry_after=RETRY_SECONDS)
        return service

    def _at_head(self, agent: Agent) -> Service:
        """Return the service of the model that answered at the agent's head.

        For a model that this server does not have there is no KV, and any service answers so.
        """
        known = agent.head.number and self._services.known(agent.head.identity)
        return self._service(agent.head.identity) if known else self._services.first

    async def where(self, agent: Agent) -> Placed:
        """Return how many leading tokens of the context each tier holds."""
        return await self._at_head(agent).where(await self.ids(agent.head), agent.salt)

    async def pin(self, agent: Agent) -> None:
        """Send the stores the agent's current pin, or give it up."""
        if not agent.record.pinned:
            return await self._unpin_everywhere(owners(agent))
        while agent.record.pinned and agent in self._registry:  # may change while its head is read
            head = agent.head
            if head.number and not self._services.known(head.identity):
                return None  # of another model, whose KV stays pinned
            ids = await self.ids(head)
            if agent.head is head and agent.record.pinned and agent in self._registry:
                return await self._at_head(agent).pin(owners(agent)[0], ids, agent.salt)

    def add_request_context(self, agent: Agent, ids: Sequence[int], identity: bytes) -> None:
        """Record the context of a finished ordinary request in the agent's name: its KV is deleted with the agent."""
        self._request_contexts.add(agent, ids, identity)

    def pin_later(
        self,
        agent: Agent,
        ids: Sequence[int] | None = None,
        identity: bytes = b"",
        *,
        done: Callable[[], None] | None = None,
    ) -> None:
        """Pin the agent's context, without waiting for it.

        With `ids`, pin the context of the last ordinary request in the agent's name instead, answered by the model
        `identity`. `done` is called once the stores have the pin, unless a newer pin replaces this one before.
        """
        owner = owners(agent)[ids is not None]
        if (before := self._pinning.pop(owner, None)) is not None:
            before.cancel()

        def forget(task: asyncio.Task[None]) -> None:
            if self._pinning.get(owner) is task:
                del self._pinning[owner]

        async def work() -> None:
            await (self.pin(agent) if ids is None else self._pin_request_context(agent, ids, identity))
            if done is not None:
                done()

        self._pinning[owner] = self._later(work)
        self._pinning[owner].add_done_callback(forget)

    async def _pin_request_context(self, agent: Agent, ids: Sequence[int], identity: bytes) -> None:
        if agent.record.pinned and agent in self._registry:
            await self._service(identity).pin(owners(agent)[1], ids, agent.salt)

    def drop_later(self, agent: Agent, ids: Sequence[int], identity: bytes) -> None:
        """Evict the context of an ordinary request whose agent was deleted, except what other agents share."""
        self._forget_texts(agent)  # the end of the request has added its text
        self._later(
            partial(self._evict_rest, agent, [Context(array("I", ids), None, identity, known_variant(identity))])
        )

    def _forget_texts(self, agent: Agent) -> None:
        for service in self._services:
            service.recent.forget(agent.salt)

    def turn_ended(self, agent: Agent, context: Callable[[], Sequence[int]], *, in_call: bool) -> None:
        """Mark the agent's context as waiting or idle after a turn.

        A context that waits for a tool result is evicted after others. `context` returns its ids.
        """
        standing: Standing = "waiting" if in_call else "idle"
        if in_call:
            self._waiting.add(agent.key)
        elif agent.key in self._waiting:
            self._waiting.discard(agent.key)
        else:
            return
        self._attempt(partial(self._mark, context(), agent.salt, agent.head.identity, standing))

    def moved(self, agent: Agent, before: Turn) -> None:
        """Mark the branch that the agent's head has left: what only it needs is evicted first."""
        self._waiting.discard(agent.key)
        if agent.head not in before.path():
            self.branch_resumed(agent)
        self._mark_later(agent, before, "superseded")

    def branch_resumed(self, agent: Agent) -> None:
        """Mark the context at the head as idle instead of superseded: its branch was abandoned before."""
        self._mark_later(agent, agent.head, "idle")

    def request_ended_in_call(self, salt: bytes, ids: Sequence[int], identity: bytes) -> None:
        """Mark the context of an ordinary request that ended in a tool call as waiting for the result."""
        self._attempt(partial(self._mark, ids, salt, identity, "waiting"))

    def _mark_later(self, agent: Agent, turn: Turn, standing: Standing) -> None:
        async def work() -> None:
            ids, keep = await self.ids(turn), 0
            if standing == "superseded" and ids:
                [keep] = await self._shared(agent, [Context(ids, turn, turn.identity)], own=True)
            await self._mark(ids, agent.salt, turn.identity, standing, keep)

        self._attempt(work)

    async def _mark(self, ids: Sequence[int], salt: bytes, identity: bytes, standing: Standing, keep: int = 0) -> None:
        service = self._services.storing(identity)
        if service is not None and len(ids) >= CHUNK_TOKENS and service.kv() != KvStats():
            await service.mark(ids, salt, standing, keep=keep)

    def answers(self, agent: Agent) -> bool:
        """Return whether the model that answered at the agent's head is loaded."""
        return bool(agent.head.number) and self._services.storing(agent.head.identity) is not None

    async def paths(self, agent: Agent) -> list[Path]:
        """Return the disk store's files of the context, from its beginning on, after storing what is not stored yet.

        Empty if the model is not loaded.
        """
        if not self.answers(agent):
            return []
        with contextlib.suppress(Unavailable):  # the KV will be computed again
            service, ids = self._at_head(agent), await self.ids(agent.head)
            await service.flush()
            return await service.kv_paths(ids, agent.salt)
        return []

    async def import_kv(self, agent: Agent, path: Path) -> ImportedKv:
        """Store the KV in a file that belongs to the agent's context."""
        return await self._at_head(agent).import_kv(path, await self.ids(agent.head), agent.salt)

    async def prefetch(self, agent: Agent) -> Placed:
        """Load the KV of the context into the pool; return where it is then."""
        return await self._at_head(agent).prefetch(await self.ids(agent.head), agent.salt)

    async def evict(self, agent: Agent, *, disk: bool) -> Placed:
        """Evict the KV of the context, except what other agents of the tenant share; return where it is then.

        With `disk` also from the disk. Then raise Conflict if the agent is pinned.
        """
        service, ids = self._at_head(agent), await self.ids(agent.head)
        [keep] = await self._shared(agent, [Context(ids, agent.head, agent.head.identity)])
        if disk and agent.record.pinned:  # checked after the awaits: it may have been pinned meanwhile
            raise Conflict(f"agent {agent.id} is pinned; unpin it first")
        return await service.evict(ids, agent.salt, keep=keep, disk=disk)

    async def drop(self, agent: Agent) -> bool:
        """Evict what only this deleted agent needs; return whether its pins are given up. If not, call `unpin_later`.

        KV that cannot be evicted without a worker is evicted once there is one. If the server ends before, it expires
        by the stores' time to live, which spares pinned KV. So does the KV of an agent whose tenant is no longer
        configured.
        """
        self._waiting.discard(agent.key)
        tied = self._request_contexts.take(agent)
        self._head_digests.forget(agent)
        self._forget_texts(agent)  # its text must not be shown any more
        await asyncio.sleep(0)  # let a pin that was requested before be sent first
        unpinned = False
        with contextlib.suppress(Unavailable):
            await self._unpin_everywhere(owners(agent))
            unpinned = True
        if agent.salt == NOBODY:
            return unpinned
        rest = await self._evict_all(agent, [Context(one.ids, None, one.identity, one.variant) for one in tied])
        rest += await self._evict_turns(agent, [*agent.turns(), *agent.head.path()])
        if rest:
            self._later(partial(self._evict_rest, agent, rest))
        return unpinned

    def unpin_later(self, owners: Sequence[str], done: Callable[[], None]) -> None:
        """Give up the pins of a deleted agent once the worker can, and call `done`."""

        async def unpin() -> None:
            await self._unpin_everywhere(owners)
            done()

        self._later(unpin)

    async def _unpin_everywhere(self, owners: Sequence[str]) -> None:
        """Give up the pins of these owners, also those of models that are not loaded: they share a folder.

        Raise Unavailable if some service cannot do it now, after all others have.
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
        if self._services.away() and not self._stores_on_disk():
            raise Unavailable("a model that may have the pins is not loaded", retry_after=RETRY_SECONDS)

    def _working(self) -> list[Service]:
        """Return the services that have a worker, or will have one again."""
        return [service for service in self._services if not service.gave_up]

    def _stores_on_disk(self) -> bool:
        """Return whether a loaded model has a disk store, as far as its worker has reported."""
        return any(service.kv().disk is not None for service in self._working())

    async def collect(self, agent: Agent, turns: Sequence[Turn]) -> None:
        """Evict what nobody needs of turns that no longer belong to the agent.

        The turns are still in the log. KV that cannot be evicted now expires by the stores' time to live.
        """
        if agent.salt == NOBODY:
            return
        await self._evict_turns(agent, turns, own=True)

    async def _evict_turns(self, agent: Agent, turns: Sequence[Turn], *, own: bool = False) -> list[Context]:
        """Evict the contexts of these turns; see `_evict_all`.

        KV of turns that cannot be read expires by its age.
        """
        rest = list[Context]()
        for identity in dict.fromkeys(turn.identity for turn in turns if turn.number and turn.identity):
            mine = [turn for turn in turns if turn.number and turn.identity == identity]
            known = known_variant(identity)
            async with contextlib.aclosing(self._archive.contexts(mine, self._longest(identity))) as batches:
                async for contexts in batches:  # in batches: all together may be gigabytes
                    rest += await self._evict_all(agent, [Context(*one, identity, known) for one in contexts], own=own)
        return rest

    async def _evict_all(self, agent: Agent, contexts: Sequence[Context], *, own: bool = False) -> list[Context]:
        """Evict these contexts except what is shared; return those that could not be evicted."""
        if not contexts:  # `_shared` would visit all agents of the tenant
            return []
        rest: list[Context] = []
        for one, keep in zip(contexts, await self._shared(agent, contexts, own=own), strict=True):
            try:
                service = self._services.storing(one.identity)
                if service is None or service.gave_up:
                    await self._erase_away(one, agent.salt, keep)
                else:
                    await service.evict(one.ids, agent.salt, keep=keep, disk=True)
            except Unavailable:  # copy the ids: they are about to be erased from the log
                rest.append(one._replace(ids=array("I", one.ids)))
        return rest

    async def _erase_away(self, context: Context, salt: bytes, keep: int) -> None:
        """Erase the stored KV of a model without a worker, through a worker that shares its folder.

        If an old log does not tell the model's adapters, the KV is looked for in all stores, by its tokens.
        """
        identity, searched = context.identity, None
        if (known := context.variant) is not None:
            identity, salt = known.base, known.salt(salt)
        else:
            searched = [service.spec.identity for service in self._working()]
        for service in self._working():
            await service.erase_of_model(identity, context.ids, salt, keep=keep, searched=searched)
        if identity in self._services.away() and not self._stores_on_disk():
            raise Unavailable("the model that made this context is not loaded", retry_after=RETRY_SECONDS)

    async def _evict_rest(self, agent: Agent, rest: list[Context]) -> None:
        """Try to evict these again. Raise Unavailable if some remain."""
        for service in self._working():  # fails early without a worker: `_shared` is expensive
            await service.where((), agent.salt)
        rest[:] = await self._evict_all(agent, rest)
        if rest:
            raise Unavailable(f"{len(rest)} contexts of agent {agent.id} cannot be evicted now")

    async def settled(self) -> None:
        """Wait until no background work is left."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel the background work."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _shared(self, agent: Agent, contexts: Sequence[Context], *, own: bool = False) -> list[int]:
        """Return how many leading tokens of each context other agents of the tenant have, in whole chunks.

        With `own`, the agent's own head and ordinary requests count as well.
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
        """Return the digests of the context at the agent's head; empty if it cannot be read."""
        head = agent.head
        if (known := self._head_digests.get(agent)) is not None:
            return known
        try:
            digests = prefix_digests(await self._known_ids(head))
        except Unavailable:  # deleted meanwhile, or damaged: what it shares will be computed again
            return b""
        if head.state == "finished" and agent.head is head and agent in self._registry:
            self._head_digests.put(agent, head, digests)
        return digests

    def _later(self, work: Callable[[], Awaitable[object]]) -> asyncio.Task[None]:
        """Run `work` in the background, again and again until it is not Unavailable."""

        async def run() -> None:
            pause = RETRY_SECONDS
            while True:
                try:
                    await work()
                    return
                except Unreadable:  # no retry helps against damage
                    return
                except Unavailable:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, MOST_RETRY_SECONDS)

        return self._begin(run())

    def _attempt(self, work: Callable[[], Awaitable[object]]) -> None:
        """Run `work` once in the background; ignore Unavailable."""

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
    """Return the pin owners of an agent: one for its context, one for that of an ordinary request.

    They never change, and differ between agents of logs that share a store.
    """
    record = agent.record
    text = f"{record.tenant}\0{record.id}\0{record.created!r}"
    context, tied = (hashlib.sha256(one.encode()).hexdigest()[:32] for one in (text, text + "\0tied"))
    return context, tied
