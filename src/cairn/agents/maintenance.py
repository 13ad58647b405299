"""Regular upkeep of agents: pending writes and the erasure of what has expired."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from cairn.agents.agent_service import AgentService
from cairn.agents.kv import BATCH
from cairn.agents.replay_records import ReplayRecords
from cairn.agents.turn_tree import Agent
from cairn.types.errors import Damaged, Unavailable, trace

log = logging.getLogger(__name__)

TEND_SECONDS = 30.0
ABANDONED_SECONDS = 7 * 86_400.0
"""How long abandoned branches are kept after the head was moved away from them."""


class Maintenance:
    """The upkeep task. It runs on the event loop from its creation until `close`."""

    def __init__(self, agents: AgentService, replays: ReplayRecords, orphans: Sequence[int]) -> None:
        """Start the upkeep. `orphans`: keys in the log that belong to no agent, erased first."""
        self._agents, self._replays = agents, replays
        self._task = asyncio.create_task(self._run(orphans))

    async def close(self) -> None:
        """Stop. May be called again."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, orphans: Sequence[int]) -> None:
        with contextlib.suppress(Unavailable):
            await self._agents.pending.erase(orphans)
        while True:
            await asyncio.sleep(TEND_SECONDS)
            try:
                await self.tend()
            except Unavailable:
                continue  # `TokenLog.trouble` reports it
            except Exception as error:
                log.error("the upkeep of agents failed: %s", trace(error))

    async def tend(self) -> None:
        """Write what is pending, delete expired agents, and erase branches that were abandoned long ago.

        The KV of both is evicted.
        """
        agents, pending = self._agents, self._agents.pending
        await pending.settle()
        now = pending.now()
        pending.erase_later(self._replays.expired(now))
        for looked, agent in enumerate(agents.registry, 1):
            if looked % BATCH == 0:
                await asyncio.sleep(0)
            if agent in agents.registry and not agent.busy and not agent.expired(now):
                own, over = agent.own, set(await self._prune(agent, now - ABANDONED_SECONDS))
                pending.erase_later(over)  # now, so that a deletion of the agent meanwhile waits for these too
                await agents.kv.collect(agent, [turn for turn in own if turn.key in over])
        await self._erase()
        for agent in agents.registry:
            if agent in agents.registry and agent.expired(now) and await self._is_over(agent, now):
                pending.erase_later(await agents.detach(agent))
        await self._erase()  # all at once: each erasure rewrites segments

    async def _prune(self, agent: Agent, before: float) -> Sequence[int]:
        """Remove branches that were abandoned before that time; return the keys of their turns.

        Branches of a shared agent go only together with those in the shared store.
        """
        registry, shared = self._agents.registry, self._agents.sharing(agent)
        if shared is None:
            return registry.prune(agent, before)
        if not registry.abandoned(agent, before):
            return ()
        try:
            return await shared.prune(agent, before)
        except (Unavailable, Damaged):
            return ()  # it is looked at again

    async def _is_over(self, agent: Agent, now: float) -> bool:
        """Return whether to delete an expired agent: not if another server that shares it has used it since."""
        shared = self._agents.sharing(agent)
        if shared is None:
            return True
        try:
            await shared.refresh(agent.tenant, agent.id)
            if agent not in self._agents.registry or not agent.expired(now):
                return False
            await shared.gone(agent)
        except (Unavailable, Damaged):
            return False  # it is looked at again
        return agent in self._agents.registry

    async def _erase(self) -> None:
        pending = self._agents.pending
        if to_erase := pending.to_erase():
            await pending.erase(to_erase)  # if that fails, they are pending again
