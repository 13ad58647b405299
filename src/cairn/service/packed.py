"""Log-probabilities that wait for their reader, a tenth of the size of the objects they are read as."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from cairn.types import TokenLogprob


class PackedLogprobs:
    """A queue of `TokenLogprob`: in at the end, out at the front."""

    __slots__ = ("_counts", "_ids", "_values")

    def __init__(self) -> None:
        self._counts = array("I")
        """Alternatives of each entry."""
        self._ids = array("I")
        """Each entry's token, then those of its alternatives."""
        self._values = array("d")
        """The log-probabilities, in the order of `_ids`."""

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def nbytes(self) -> int:
        """Bytes that the entries take."""
        return 4 * (len(self._counts) + len(self._ids)) + 8 * len(self._values)

    def extend(self, entries: Iterable[TokenLogprob]) -> None:
        """Append entries."""
        for entry in entries:
            self._counts.append(len(entry.top))
            self._ids.append(entry.token)
            self._values.append(entry.logprob)
            for token, value in entry.top:
                self._ids.append(token)
                self._values.append(value)

    def take(self, count: int) -> tuple[TokenLogprob, ...]:
        """Remove and return the first `count` entries, or as many as there are."""
        taken = []
        at = 0
        for alternatives in self._counts[:count]:
            end = at + 1 + alternatives
            top = tuple(zip(self._ids[at + 1 : end], self._values[at + 1 : end], strict=True))
            taken.append(TokenLogprob(self._ids[at], self._values[at], top))
            at = end
        del self._counts[:count], self._ids[:at], self._values[:at]
        return tuple(taken)
