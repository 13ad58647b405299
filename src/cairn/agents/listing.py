"""Pages of a tenant's agents, lists of an agent's turns, and which agents have changed since the last look.

A look compares; nobody who changes an agent has to report it, so no change can be missed. While no turn runs and
nothing was written to the log, a look compares a few numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.archive import Archive
from cairn.agents.log.writer_thread import Writer
from cairn.agents.turn_tree import Agent, Turn
from cairn.agents.types import AgentInfo, AgentPage, TurnInfo
from cairn.types.errors import InvalidRequest, NotFound
from cairn.types.list_place import ListPlace


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


def list_agents(
    candidates: Iterable[Agent], registry: AgentRegistry, tenant: str, limit: int, after: str, now: float
) -> AgentPage:
    """Return a page of the agents that have not expired.

    `after`: an id, or `next` of another page; raise InvalidRequest for anything else.
    """
    agents = [agent for agent in candidates if not agent.expired(now)]
    if after:
        last = _named(registry, tenant, after)
        agents = [agent for agent in agents if _place(agent) > last]
    page, more = agents[:limit], len(agents) > limit
    next = str(_place(page[-1])) if more else None
    return AgentPage(agents=tuple(agent.info() for agent in page), more=more, next=next)


async def list_turns(
    registry: AgentRegistry, archive: Archive, agent: Agent, after: int, limit: int | None
) -> tuple[TurnInfo, ...]:
    """Return an agent's turns beyond a number, as far as the log can be read.

    Raise NotFound if the agent is deleted meanwhile.
    """
    before: list[Turn] | None = None
    while True:
        some, path = agent.turns(), {turn.key for turn in agent.head.path()}
        some = [turn for turn in some if turn.number > after][:limit]
        pairs = list(zip(some, await archive.readable(some), strict=True))
        if agent not in registry:
            raise NotFound(f"there is no agent {agent.id}", field="id")
        whole = all((content is not None and not content.lost) or registry.holds(turn) for turn, content in pairs)
        if whole or some == before:  # a turn was erased meanwhile: read again, but not what has not changed
            return tuple(turn.info(content, current=turn.key in path) for turn, content in pairs)
        before = some


def _named(registry: AgentRegistry, tenant: str, after: str) -> ListPlace:
    """Return the place that `after` names. One with a time remains valid when its agent is gone."""
    if (place := ListPlace.read(after)) is not None:
        return place
    if (agent := registry.find(tenant, after)) is not None:
        return _place(agent)
    raise InvalidRequest("after must be the id of an agent, or the `next` of a list", field="after")


def _place(agent: Agent) -> ListPlace:
    """Return an agent's place in the list, as `AgentRegistry.of` sorts it."""
    return ListPlace.of(agent.record.created, agent.id)
