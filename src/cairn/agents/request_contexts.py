"""Contexts of ordinary requests in the name of agents: their KV goes with the agent, so they are remembered.

Only here: of an ordinary request the log keeps the answer, and of its prompt no more than a digest.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from cairn.agents.prefix_digests import prefix_digests
from cairn.agents.turn_tree import Agent

MOST_CONTEXTS = 64
"""Of one agent, the last ones."""
MOST_IDS = 1 << 24
"""Of all agents together, which takes 64 MiB; the KV of so many tokens takes a thousand times as much."""


class _Context(NamedTuple):
    ids: array[int]
    prefix_digests: bytes


class RequestContexts:
    """All agents', the one that was longest without a request first. Of what is forgotten, only age takes the KV."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Agent, list[_Context]]] = {}
        """By the agent's key, the oldest first; none that another of the agent begins with."""
        self._size = 0

    def add(self, agent: Agent, ids: Sequence[int]) -> None:
        """One more context. Where it is one too many, others are forgotten: never the last of a pinned agent, which
        has its KV pinned too."""
        new = array("I", ids)
        kept = [one for one in self._take(agent) if new[: len(one.ids)] != one.ids]
        after = [*kept, _Context(new, prefix_digests(new))][-MOST_CONTEXTS:]
        self._of[agent.key] = agent, after
        self._size += sum(len(one.ids) for one in after)
        if self._size > MOST_IDS:
            self._shrink(agent)

    def _shrink(self, latest: Agent) -> None:
        for agent, contexts in [*self._of.values()]:
            spared = agent is latest or agent.record.pinned
            while self._size > MOST_IDS and len(contexts) > spared:
                self._size -= len(contexts.pop(0).ids)
            if not contexts:
                del self._of[agent.key]
            if self._size <= MOST_IDS:
                return

    def take(self, agent: Agent) -> list[array[int]]:
        """An agent's contexts, which are forgotten here."""
        return [one.ids for one in self._take(agent)]

    def _take(self, agent: Agent) -> list[_Context]:
        _, contexts = self._of.pop(agent.key, (agent, []))
        self._size -= sum(len(one.ids) for one in contexts)
        return contexts

    def prefix_digests(self, agent: Agent, *, own: bool) -> list[bytes]:
        """Of the contexts of all other agents of the tenant; `own`: of the agent's, too."""
        return [
            one.prefix_digests
            for other, contexts in self._of.values()
            if other.tenant == agent.tenant and (own or other is not agent)
            for one in contexts
        ]
