"""A tenant's agents, and which of them have changed since the last look.

A look compares; nobody who changes an agent has to report it, so no change can be missed. While no turn runs and
nothing was written to the log, a look compares a few numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.log.writer_thread import Writer
from cairn.agents.turn_tree import Agent
from cairn.agents.types import AgentInfo


class Changes(NamedTuple):
    """Result of a look."""

    changed: list[AgentInfo]
    """New and changed agents, as they are now."""
    gone: list[str]
    """Ids of agents that no longer exist."""


class Overview:
    """What one follower has seen of a tenant's agents."""

    def __init__(self, registry: AgentRegistry, writer: Writer, tenant: str, now: Callable[[], float]) -> None:
        self._registry, self._writer, self._tenant, self._now = registry, writer, tenant, now
        self._seen: dict[str, tuple[Any, ...]] = {}
        self._submitted = -1
        self._busy = False
        self._until = math.inf
        """When the next agent may expire."""
        self.requests: dict[int, str] = {}
        """Id of the agent whose turn a running request is, by the request's id."""

    def all(self) -> Iterator[AgentInfo]:
        """Yield every agent, most recently created first. Agents may come and go between two of them."""
        for agent in self._registry.of(self._tenant):
            if agent in self._registry and not agent.expired(self._now()):
                yield agent.info()

    def look(self) -> Changes:
        """Return what has changed since the last look; at the first, everything."""
        submitted = self._writer.submitted
        now, seen = self._now(), self._seen
        if submitted == self._submitted and not self._busy and now < self._until:
            return Changes([], [])
        self._submitted = submitted
        here = [agent for agent in self._registry.of(self._tenant) if not agent.expired(now)]
        running = [agent.running for agent in here if agent.running is not None]
        self.requests = {turn.request.id: turn.agent.id for turn in running}
        self._busy = any(agent.busy or agent.open_requests for agent in here)
        ends = [agent.used + agent.record.ttl for agent in here if agent.record.ttl is not None]
        self._until = min(ends, default=math.inf)
        self._seen = {agent.id: _mark(agent) for agent in here}
        changed = [agent.info() for agent in here if seen.get(agent.id) != self._seen[agent.id]]
        return Changes(changed, [id for id in seen if id not in self._seen])


def _mark(agent: Agent) -> tuple[Any, ...]:
    """Return what the description of an agent depends on, for comparison. Unchanged parts are the same objects."""
    head = agent.head
    return agent.key, agent.record, agent.savings, agent.used, agent.busy, head.key, head.state, head.size
