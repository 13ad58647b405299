"""Where each record of a token log lies, and which of them still count. No bytes, no files."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Set

from cairn.agents.segment import HEADER_BYTES, Header, Record


class Kind(enum.IntEnum):
    """What a record says. Of AGENT, END and SAVINGS only the newest with its key counts."""

    AGENT = 1
    TURN = 2
    TOKENS = 3
    """Tokens of an answer that is not complete; END holds them all."""
    END = 4
    ERASE = 5
    """Keys whose records are to be gone."""
    REPLAY = 6
    SAVINGS = 7


NEWEST = frozenset({Kind.AGENT, Kind.END, Kind.SAVINGS})
TIDY = 64
"""Entries that a segment may gather before it looks for those that do not count any more."""


class Entry:
    """Where a record lies, and whether it counts."""

    __slots__ = ("key", "kind", "live", "lsn", "size")

    def __init__(self, record: Record) -> None:
        self.lsn, self.kind, self.key, self.size = record.lsn, record.kind, record.key, record.size
        self.live = True


class Segment:
    """A file of the log."""

    __slots__ = ("_tidied", "dirty", "entries", "header", "size", "stuck", "superseded")

    def __init__(self, header: Header) -> None:
        self.header = header
        self.entries: list[Entry] = []
        self.superseded: set[int] = set()
        """Keys of records that it holds, that do not count any more, and that `entries` may have no more."""
        self._tidied = 0
        self.size = HEADER_BYTES
        self.dirty = False
        """It may hold bytes that no entry names."""
        self.stuck = False
        """A record in it that counts cannot be read any more, so compaction leaves it alone."""

    def add(self, entry: Entry) -> None:
        """A record lies at the end now. Now and then those that do not count any more are forgotten."""
        self.entries.append(entry)
        if len(self.entries) >= 2 * self._tidied + TIDY:
            self.tidy()

    def tidy(self) -> None:
        """Keep only the keys of entries that do not count any more: they are a third to a half of all."""
        self.superseded.update(entry.key for entry in self.entries if not entry.live)
        self.entries = [entry for entry in self.entries if entry.live]
        self._tidied = len(self.entries)

    def holds(self, keys: Set[int]) -> bool:
        """Whether it has bytes of records with these keys."""
        return not keys.isdisjoint(self.superseded) or any(entry.key in keys for entry in self.entries)

    @property
    def live(self) -> int:
        """Bytes of what counts."""
        return sum(entry.size for entry in self.entries if entry.live)

    @property
    def wasteful(self) -> bool:
        """Whether less than half of it counts."""
        return self.dirty or not self.entries or self.live < (self.size - HEADER_BYTES) // 2


class Index:
    """Which entry supersedes which."""

    def __init__(self) -> None:
        self._newest: dict[int, dict[int, Entry]] = {kind: {} for kind in NEWEST}
        self._pieces: dict[int, list[Entry]] = {}

    def enter(self, entry: Entry) -> None:
        """A record lies where the entry says, perhaps after it lay in a segment that was given up."""
        if entry.kind in NEWEST:
            newest = self._newest[entry.kind]
            old = newest.get(entry.key)
            if old is not None and old.lsn > entry.lsn:
                entry.live = False
                return
            if old is not None:
                old.live = False
            newest[entry.key] = entry
        if entry.kind == Kind.TOKENS:
            self._pieces.setdefault(entry.key, []).append(entry)
        elif entry.kind == Kind.END:
            for piece in self._pieces.pop(entry.key, ()):
                piece.live = False

    def forget(self, keys: Collection[int]) -> None:
        """These keys are gone."""
        for key in keys:
            self._pieces.pop(key, None)
            for newest in self._newest.values():
                newest.pop(key, None)


def encode_keys(keys: Iterable[int]) -> bytes:
    """Keys as an ERASE record holds them."""
    return b"".join(key.to_bytes(8, "little") for key in keys)


def decode_keys(payload: bytes) -> list[int]:
    """The keys of an ERASE record."""
    return [int.from_bytes(payload[at : at + 8], "little") for at in range(0, len(payload) - 7, 8)]
