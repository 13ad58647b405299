"""Pages of a tenant's agents, and lists of an agent's turns."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable

from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.archive import Archive
from cairn.agents.turn_tree import Agent
from cairn.agents.types import AgentPage, TurnInfo
from cairn.types.errors import InvalidRequest, NotFound


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
    next = f"{page[-1].record.created!r}:{page[-1].id}" if more else None
    return AgentPage(agents=tuple(agent.info() for agent in page), more=more, next=next)


async def list_turns(
    registry: AgentRegistry, archive: Archive, agent: Agent, after: int, limit: int | None
) -> tuple[TurnInfo, ...]:
    """Return an agent's turns beyond a number, as far as the log can be read.

    Raise NotFound if the agent is deleted meanwhile.
    """
    while True:
        some, path = agent.turns(), {turn.key for turn in agent.head.path()}
        some = [turn for turn in some if turn.number > after][:limit]
        pairs = list(zip(some, await archive.readable(some), strict=True))
        if agent not in registry:
            raise NotFound(f"there is no agent {agent.id}", field="id")
        if all((content is not None and not content.lost) or registry.holds(turn) for turn, content in pairs):
            return tuple(turn.info(content, current=turn.key in path) for turn, content in pairs)


def _named(registry: AgentRegistry, tenant: str, after: str) -> tuple[float, str]:
    """Return the list position that `after` names. A position with a time remains valid when its agent is gone."""
    created, mark, id = after.rpartition(":")
    if mark:
        with contextlib.suppress(ValueError):
            if math.isfinite(time := float(created)):
                return -time, id
    elif (agent := registry.find(tenant, id)) is not None:
        return _place(agent)
    raise InvalidRequest("after must be the id of an agent, or the `next` of a list", field="after")


def _place(agent: Agent) -> tuple[float, str]:
    """Return an agent's position in the list, as `AgentRegistry.of` sorts it."""
    return -agent.record.created, agent.id
