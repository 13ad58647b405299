"""Contexts of ordinary requests in the name of agents: their KV goes with the agent, so they are remembered.

Only here: of an ordinary request the log keeps the answer, and of its prompt no more than a digest.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from cairn.agents.tree import CHUNK_TOKENS, Agent

MOST_CONTEXTS = 64
"""Of one agent, the last ones. Older ones are forgotten, and only age takes their KV."""
MOST_IDS = 1 << 24
"""Of all agents together, which takes 64 MiB; the KV of so many tokens takes a thousand times as much."""


class Tied:
    """All agents', the one that was longest without a request first."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Agent, list[array[int]]]] = {}
        """By the agent's key, the oldest first; none that another of the agent begins with."""
        self._size = 0

    def add(self, agent: Agent, ids: Sequence[int]) -> list[tuple[Agent, array[int]]]:
        """One more context. Returns those that there is no room for: no longer here, and their KV is to be given up.

        Never the new one, nor the last of an agent that is pinned: so is its KV.
        """
        new = array("I", ids)
        before = self.take(agent)
        kept = [one for one in before if new[: len(one)] != one]
        after = [*kept, new][-MOST_CONTEXTS:]
        self._of[agent.key] = agent, after
        self._size += sum(map(len, after))
        return self._shrink(agent) if self._size > MOST_IDS else []

    def _shrink(self, latest: Agent) -> list[tuple[Agent, array[int]]]:
        over: list[tuple[Agent, array[int]]] = []
        for agent, contexts in [*self._of.values()]:
            spared = agent is latest or agent.record.pinned
            while self._size > MOST_IDS and len(contexts) > spared:
                over.append((agent, contexts.pop(0)))
                self._size -= len(over[-1][1])
            if not contexts:
                del self._of[agent.key]
            if self._size <= MOST_IDS:
                break
        return over

    def take(self, agent: Agent) -> list[array[int]]:
        """An agent's contexts, which are forgotten here."""
        _, contexts = self._of.pop(agent.key, (agent, []))
        self._size -= sum(map(len, contexts))
        return contexts

    def shared(self, tenant: str, ids: array[int]) -> int:
        """How many leading ids a context of the tenant has too, in whole chunks."""
        longest = 0
        for agent, contexts in self._of.values():
            for one in contexts if agent.tenant == tenant else ():
                if one[:longest] != ids[:longest]:
                    continue
                while len(chunk := ids[longest : longest + CHUNK_TOKENS]) == CHUNK_TOKENS:
                    if one[longest : longest + CHUNK_TOKENS] != chunk:
                        break
                    longest += CHUNK_TOKENS
        return longest
