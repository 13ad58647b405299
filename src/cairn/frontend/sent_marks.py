"""What a worker was told of how contexts stand, for the next one: workers keep that in memory only."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cairn.kv.tiers.reuse_hints import Standing
from cairn.types.model_spec import CHUNK_TOKENS

MOST_TOKENS = 1 << 20
"""Of all contexts together: 4 MiB. Those that were told longest ago are forgotten first."""


class Mark(NamedTuple):
    """A context that stands so beyond its first `keep` tokens."""

    tokens: Sequence[int]
    salt: bytes
    standing: Standing
    keep: int


class SentMarks:
    """The marks, in the order in which they were told: a later one is about chunks of an earlier one, too."""

    def __init__(self, most: int = MOST_TOKENS) -> None:
        self._marks: OrderedDict[tuple[bytes, bytes], Mark] = OrderedDict()
        self._most, self._tokens = most, 0

    def __iter__(self) -> Iterator[Mark]:
        return iter(tuple(self._marks.values()))

    def add(self, mark: Mark) -> None:
        """The worker is told this. What is idle is what nobody was told of, unless it begins like one of these."""
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
        """This context is erased beyond its first `keep` tokens, and so is what goes on with it."""
        if len(tokens) > keep:
            for key in self._with(array("I", tokens[: keep + 1]), salt):
                self._remove(key)

    def _with(self, beginning: array[int], salt: bytes) -> list[tuple[bytes, bytes]]:
        """Those of a tenant whose contexts begin with these."""
        wanted = beginning.tobytes()
        return [key for key in self._marks if key[0] == salt and key[1].startswith(wanted)]

    def _remove(self, key: tuple[bytes, bytes]) -> None:
        if (one := self._marks.pop(key, None)) is not None:
            self._tokens -= len(one.tokens)
