"""Contexts of ordinary requests in the name of agents: their KV goes with the agent, so they are remembered.

Only here: of an ordinary request the log keeps the answer, and of its prompt no more than a digest.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from cairn.agents.log.records import pack
from cairn.agents.turn_tree import Agent, Turn
from cairn.types.block_size import CHUNK_TOKENS

DIGEST_BYTES = 8
"""Bytes of one digest."""
MOST_BYTES = 1 << 24
"""The most bytes that digests of heads take: so many are of 128 million tokens."""


def prefix_digests(ids: Sequence[int]) -> bytes:
    """A digest of the context up to the end of each whole chunk: what contexts share is told by these, without ids."""
    data, step, last, found = pack(ids), 4 * CHUNK_TOKENS, b"", bytearray()
    for end in range(step, len(data) + 1, step):
        last = hashlib.sha256(last + data[end - step : end]).digest()
        found += last[:DIGEST_BYTES]
    return bytes(found)


def common_chunks(one: bytes, other: bytes) -> int:
    """How many leading chunks two contexts have in common, by their digests."""
    low, high = 0, min(len(one), len(other)) // DIGEST_BYTES
    while low < high:  # where two chunks have the same digest, all before them have
        middle = (low + high + 1) // 2
        if (
            one[(middle - 1) * DIGEST_BYTES : middle * DIGEST_BYTES]
            == other[(middle - 1) * DIGEST_BYTES : middle * DIGEST_BYTES]
        ):
            low = middle
        else:
            high = middle - 1
    return low


class HeadDigests:
    """Digests of the contexts at agents' heads, as far as they were read: else each deletion would read them all."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Turn, bytes]] = {}
        """The turn at an agent's head and its digests, by the agent's key."""
        self._bytes = 0

    def get(self, agent: Agent) -> bytes | None:
        """Those of the turn where the agent stands; None where they are not known."""
        turn, found = self._of.get(agent.key, (None, b""))
        return found if turn is agent.head else None

    def put(self, agent: Agent, turn: Turn, found: bytes) -> None:
        """Remember those of a turn that is finished, whose context never changes; what was read long ago gives way."""
        self.forget(agent)
        self._of[agent.key] = turn, found
        self._bytes += len(found)
        while self._bytes > MOST_BYTES:
            oldest = next(iter(self._of))
            self._bytes -= len(self._of.pop(oldest)[1])

    def forget(self, agent: Agent) -> None:
        """The agent is gone."""
        _, found = self._of.pop(agent.key, (None, b""))
        self._bytes -= len(found)


MOST_CONTEXTS = 64
"""How many contexts of one agent are kept: the last ones."""
MOST_IDS = 1 << 24
"""How many ids of all agents together are kept, which takes 64 MiB; the KV of so many tokens takes a thousand times as
much."""


class RequestContext(NamedTuple):
    """One of them, and the identity of the model whose KV it is."""

    ids: array[int]
    prefix_digests: bytes
    identity: bytes


class RequestContexts:
    """The contexts of all agents, the one that was longest without a request first. Of what is forgotten, only age
    takes the KV."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Agent, list[RequestContext]]] = {}
        """Each agent's contexts by its key, the oldest first; none that another of the agent begins with."""
        self._size = 0

    def add(self, agent: Agent, ids: Sequence[int], identity: bytes = b"") -> None:
        """One more context. Where it is one too many, others are forgotten: never the last of a pinned agent, which
        has its KV pinned too."""
        new = array("I", ids)
        kept = [one for one in self.take(agent) if one.identity != identity or new[: len(one.ids)] != one.ids]
        after = [*kept, RequestContext(new, prefix_digests(new), identity)][-MOST_CONTEXTS:]
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

    def take(self, agent: Agent) -> list[RequestContext]:
        """An agent's contexts, which are forgotten here."""
        _, contexts = self._of.pop(agent.key, (agent, []))
        self._size -= sum(len(one.ids) for one in contexts)
        return contexts

    def prefix_digests(self, agent: Agent, *, own: bool) -> list[bytes]:
        """The digests of the contexts of all other agents of the tenant; `own`: of the agent's, too."""
        return [
            one.prefix_digests
            for other, contexts in self._of.values()
            if other.tenant == agent.tenant and (own or other is not agent)
            for one in contexts
        ]
