"""How much of their beginnings contexts share, told without their ids: a digest for each chunk."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from cairn.agents.records import pack
from cairn.agents.turn_tree import CHUNK_TOKENS, Agent, Turn

DIGEST_BYTES = 8
"""Bytes of one."""
MOST_BYTES = 1 << 24
"""Of the marks of heads: these are of 128 million tokens."""


def prefix_digests(ids: Sequence[int]) -> bytes:
    """For each whole chunk a digest of the context up to its end."""
    data, step, last, found = pack(ids), 4 * CHUNK_TOKENS, b"", bytearray()
    for end in range(step, len(data) + 1, step):
        last = hashlib.sha256(last + data[end - step : end]).digest()
        found += last[:DIGEST_BYTES]
    return bytes(found)


def common_chunks(one: bytes, other: bytes) -> int:
    """How many leading chunks two contexts have in common, by their marks."""
    low, high = 0, min(len(one), len(other)) // DIGEST_BYTES
    while low < high:  # where two chunks have the same mark, all before them have
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
    """Marks of the contexts at agents' heads, as far as they were read: else each deletion would read them all."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Turn, bytes]] = {}
        """By the agent's key."""
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
