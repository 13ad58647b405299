"""Contexts of ordinary requests in the name of agents, so that their KV can be deleted with the agent.

They are kept in memory only: the log has the answer of an ordinary request, and only a digest of its prompt.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from cairn.agents.log.records import pack
from cairn.agents.turn_tree import Agent, Turn
from cairn.types.model_spec import CHUNK_TOKENS
from cairn.types.model_variant import ModelVariant, known_variant

DIGEST_BYTES = 8
"""Bytes of one digest."""
MOST_BYTES = 1 << 24
"""Limit on the bytes of head digests; enough for 128 million tokens."""


def prefix_digests(ids: Sequence[int]) -> bytes:
    """Return a digest of the context up to the end of each whole chunk, concatenated.

    What contexts share is computed from these, without their ids.
    """
    data, step, last, digests = pack(ids), 4 * CHUNK_TOKENS, b"", bytearray()
    for end in range(step, len(data) + 1, step):
        last = hashlib.sha256(last + data[end - step : end]).digest()
        digests += last[:DIGEST_BYTES]
    return bytes(digests)


def common_chunks(one: bytes, other: bytes) -> int:
    """Return how many leading chunks two contexts have in common, by their prefix digests."""
    low, high = 0, min(len(one), len(other)) // DIGEST_BYTES
    while low < high:  # equal digests of a chunk mean that all chunks before it are equal
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
    """Cached digests of the contexts at agents' heads: else each deletion would read them all from the log."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Turn, bytes]] = {}
        """(Head turn, its digests) by the agent's key."""
        self._bytes = 0

    def get(self, agent: Agent) -> bytes | None:
        """Return the digests at the agent's current head, or None."""
        turn, digests = self._of.get(agent.key, (None, b""))
        return digests if turn is agent.head else None

    def put(self, agent: Agent, turn: Turn, digests: bytes) -> None:
        """Store the digests of a finished turn, whose context never changes. The oldest are dropped first."""
        self.forget(agent)
        self._of[agent.key] = turn, digests
        self._bytes += len(digests)
        while self._bytes > MOST_BYTES:
            oldest = next(iter(self._of))
            self._bytes -= len(self._of.pop(oldest)[1])

    def forget(self, agent: Agent) -> None:
        """Drop the digests of a deleted agent."""
        _, digests = self._of.pop(agent.key, (None, b""))
        self._bytes -= len(digests)


MOST_CONTEXTS = 64
"""Contexts kept for one agent: the newest."""
MOST_IDS = 1 << 24
"""Ids kept for all agents together: 64 MiB. The KV of so many tokens takes a thousand times as much."""


class RequestContext(NamedTuple):
    """A context, and the identity of the model whose KV it is."""

    ids: array[int]
    prefix_digests: bytes
    identity: bytes
    variant: ModelVariant | None
    """The model and its adapters, held so that `known_variant` finds them; None if unknown."""


class RequestContexts:
    """Contexts of all agents, the agent longest without a request first.

    KV of a forgotten context expires by its age.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[Agent, list[RequestContext]]] = {}
        """Each agent's contexts by its key, oldest first; none is a prefix of another of the same model."""
        self._size = 0

    def add(self, agent: Agent, ids: Sequence[int], identity: bytes = b"") -> None:
        """Add a context of an agent.

        Beyond the limit others are dropped, but never the last one of a pinned agent: its KV is pinned too.
        """
        new = array("I", ids)
        kept = [one for one in self.take(agent) if one.identity != identity or new[: len(one.ids)] != one.ids]
        after = [*kept, RequestContext(new, prefix_digests(new), identity, known_variant(identity))][-MOST_CONTEXTS:]
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
        """Remove and return an agent's contexts."""
        _, contexts = self._of.pop(agent.key, (agent, []))
        self._size -= sum(len(one.ids) for one in contexts)
        return contexts

    def prefix_digests(self, agent: Agent, *, own: bool) -> list[bytes]:
        """Return the digests of the contexts of all other agents of the tenant; with `own`, also of this one."""
        return [
            one.prefix_digests
            for other, contexts in self._of.values()
            if other.tenant == agent.tenant and (own or other is not agent)
            for one in contexts
        ]
