"""A tenant's agents, page by page, and the turns of one."""

from __future__ import annotations

import contextlib
import math

from cairn.agents.archive import Archive
from cairn.agents.info import AgentPage, TurnInfo
from cairn.agents.roster import Roster
from cairn.agents.tree import Agent
from cairn.errors import InvalidRequest, NotFound


def page(roster: Roster, tenant: str, limit: int, after: str, now: float) -> AgentPage:
    """Those whose time is not over, `after` an id or what `next` of another page says; InvalidRequest for all else."""
    agents = [agent for agent in roster.of(tenant) if not agent.over(now)]
    if after:
        last = _named(roster, tenant, after)
        agents = [agent for agent in agents if _place(agent) > last]
    some, more = agents[:limit], len(agents) > limit
    next = f"{some[-1].record.created!r}:{some[-1].id}" if more else None
    return AgentPage(agents=tuple(agent.info() for agent in some), more=more, next=next)


async def turns(roster: Roster, archive: Archive, agent: Agent, after: int, limit: int | None) -> tuple[TurnInfo, ...]:
    """Turns of an agent beyond a number, as far as the log gives them. NotFound if the agent is deleted meanwhile."""
    while True:
        some, path = agent.turns(), {turn.key for turn in agent.head.path()}
        some = [turn for turn in some if turn.number > after][:limit]
        pairs = list(zip(some, await archive.readable(some), strict=True))
        if agent not in roster:
            raise NotFound(f"there is no agent {agent.id}", field="id")
        if all((content is not None and not content.lost) or roster.holds(turn) for turn, content in pairs):
            return tuple(turn.info(content, current=turn.key in path) for turn, content in pairs)


def _named(roster: Roster, tenant: str, after: str) -> tuple[float, str]:
    """The place in the list that `after` names; one with a time is a place also where no agent is any more."""
    created, mark, id = after.rpartition(":")
    if mark:
        with contextlib.suppress(ValueError):
            if math.isfinite(time := float(created)):
                return -time, id
    elif (agent := roster.find(tenant, id)) is not None:
        return _place(agent)
    raise InvalidRequest("after must be the id of an agent, or what `next` of a list said", field="after")


def _place(agent: Agent) -> tuple[float, str]:
    """Where an agent is in the list, as `Roster.of` sorts it."""
    return -agent.record.created, agent.id
