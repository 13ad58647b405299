"""Marks of contexts' standings that were sent to a worker, for the next one: workers keep them only in memory."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cairn.kv.tiers.store import Standing
from cairn.types.model_spec import CHUNK_TOKENS

MOST_TOKENS = 1 << 20
"""Most tokens of all marked contexts: 4 MiB. The oldest marks are forgotten first."""


class Mark(NamedTuple):
    """The standing of a context beyond its first `keep` tokens."""

    tokens: Sequence[int]
    salt: bytes
    standing: Standing
    keep: int


class SentMarks:
    """The marks in the order in which they were sent: a later one may concern chunks of an earlier one too."""

    def __init__(self, most: int = MOST_TOKENS) -> None:
        self._marks: OrderedDict[tuple[bytes, bytes], Mark] = OrderedDict()
        self._most, self._tokens = most, 0

    def __iter__(self) -> Iterator[Mark]:
        return iter(tuple(self._marks.values()))

    def add(self, mark: Mark) -> None:
        """Record a mark sent to the worker.

        Idle marks are dropped (idle is the default) unless they share a first chunk with a recorded one.
        """
        ids = array("I", mark.tokens)
        key = mark.salt, ids.tobytes()
        self._remove(key)
        if mark.standing == "idle" and not self._with(ids[:CHUNK_TOKENS], mark.salt):
            return
        self._marks[key] = mark._replace(tokens=ids)
        self._tokens += len(ids)
        while self._tokens > self._most:
            self._remove(next(iter(self._marks)))

    def forget(self, tokens: Sequence[int], salt: bytes, keep: int) -> None:
        """Forget marks of contexts that continue this one beyond its first `keep` tokens, which are erased."""
        if len(tokens) > keep:
            for key in self._with(array("I", tokens[: keep + 1]), salt):
                self._remove(key)

    def _with(self, beginning: array[int], salt: bytes) -> list[tuple[bytes, bytes]]:
        """Return the keys of a tenant's marks whose contexts begin with these ids."""
        wanted = beginning.tobytes()
        return [key for key in self._marks if key[0] == salt and key[1].startswith(wanted)]

    def _remove(self, key: tuple[bytes, bytes]) -> None:
        if (one := self._marks.pop(key, None)) is not None:
            self._tokens -= len(one.tokens)
