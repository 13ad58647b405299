"""Where each record of a token log lies, and which of them still count. No bytes, no files.

A log holds a few records of every turn that was ever said, so what is kept of one is packed: some 25 bytes in its
segment, and for those that are looked up a slot of an `OffsetTable`.
"""

from __future__ import annotations

import enum
import threading
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Set
from typing import NamedTuple

from cairn.agents.log.segment import HEADER_BYTES, Record, SegmentHeader

_SPREAD = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: keys that follow each other come to lie far apart."""
_OFFSET_BITS = 34
_FEWEST = 8


class OffsetTable:
    """A packed table from keys to (file's number, offset): a history of a million turns has two million of them.

    It takes 16 bytes a slot, of which at least a third are not used (open addressing).

    Keys are 1 to 2**64 - 1, numbers 1 to 2**30 - 1, offsets below 2**34. Not safe to use from several threads at once.
    """

    __slots__ = ("_keys", "_places", "_used")

    def __init__(self) -> None:
        self._keys = array("Q", bytes(8 * _FEWEST))
        """0 where a slot was never used."""
        self._places = array("Q", bytes(8 * _FEWEST))
        """0 for a key that was dropped."""
        self._used = 0

    def get(self, key: int) -> tuple[int, int]:
        """(number, offset); (0, 0) for a key that is not there."""
        place = self._places[self._slot(key)]
        return place >> _OFFSET_BITS, place & ((1 << _OFFSET_BITS) - 1)

    def put(self, key: int, number: int, offset: int) -> None:
        """The key is there now. OverflowError for a number beyond the limit."""
        slot = self._slot(key)
        self._places[slot] = number << _OFFSET_BITS | offset
        if not self._keys[slot]:
            self._keys[slot] = key
            self._used += 1
            if 3 * self._used > 2 * len(self._keys):
                self._rehash()

    def drop(self, key: int) -> None:
        """The key is nowhere. Its slot is used again when the table grows."""
        self._places[self._slot(key)] = 0

    def _slot(self, key: int) -> int:
        """The key's, or the one that it would get."""
        last = len(self._keys) - 1
        slot = (key * _SPREAD >> 20) & last
        while (found := self._keys[slot]) and found != key:
            slot = (slot + 1) & last
        return slot

    def _rehash(self) -> None:
        kept = [(key, place) for key, place in zip(self._keys, self._places, strict=True) if place]
        slots = _FEWEST
        while slots < 3 * len(kept):
            slots *= 2
        self._keys, self._places, self._used = array("Q", bytes(8 * slots)), array("Q", bytes(8 * slots)), len(kept)
        for key, place in kept:
            slot = self._slot(key)
            self._keys[slot], self._places[slot] = key, place


class RecordKind(enum.IntEnum):
    """What a record says. Of AGENT, END, SAVINGS and JOURNAL only the newest with its key counts."""

    AGENT = 1
    TURN = 2
    TOKENS = 3
    """Tokens of an answer that is not complete; END holds them all."""
    END = 4
    ERASE = 5
    """Keys whose records are to be gone."""
    REPLAY = 6
    SAVINGS = 7
    UNPIN = 8
    """Pins in the stores that are to be given up: the agent that had them is erased."""
    JOURNAL = 9
    """What several agents or requests work on together, as it is now."""
    ENTRY = 10
    """One entry of a journal; its key is its own."""


NEWEST = frozenset({RecordKind.AGENT, RecordKind.END, RecordKind.SAVINGS, RecordKind.JOURNAL})
FOUND = NEWEST | {RecordKind.TURN}
"""What is looked up by kind and key."""
TIDY = 64
"""Rows that do not count any more which a segment may gather, beside as many as do."""


class RecordLocation(NamedTuple):
    """Where a record lies."""

    header: SegmentHeader
    offset: int
    size: int


class Segment:
    """A file of the log. A row for each record that counts, in the order of their offsets."""

    def __init__(self, header: SegmentHeader) -> None:
        self.header = header
        self._lsns, self._keys, self._sizes = array("Q"), array("Q"), array("I")
        self._offsets = array("Q")
        self._kinds = bytearray()
        """0 where the record does not count any more."""
        self._dead = 0
        """How many those are."""
        self._superseded = array("Q")
        """Keys of records that it holds and that have no row any more."""
        self.live = 0
        """Bytes of what counts."""
        self.size = HEADER_BYTES
        self.dirty = False
        """It may hold bytes that no row names."""
        self.stuck = False
        """A record in it that counts cannot be read any more, so compaction leaves it alone."""

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self._lsns)

    def add(self, record: Record, offset: int) -> None:
        """A record lies there, behind all others. Now and then rows that do not count any more are forgotten."""
        if self._dead >= TIDY and 2 * self._dead >= len(self):
            self.tidy()
        self._lsns.append(record.lsn)
        self._keys.append(record.key)
        self._sizes.append(record.size)
        self._offsets.append(offset)
        self._kinds.append(record.kind)
        self.live += record.size

    def drop(self, offset: int) -> None:
        """The record there does not count any more."""
        row = self._row(offset)
        if row is not None:
            self._drop(row)

    def drop_all(self, *, lsns: Collection[int] = (), kind: int = 0) -> None:
        """Nor do those with these numbers, or of this kind."""
        for row, lsn in enumerate(self._lsns):
            if lsn in lsns or (kind and self._kinds[row] == kind):
                self._drop(row)

    def _drop(self, row: int) -> None:
        if self._kinds[row]:
            self._kinds[row] = 0
            self._dead += 1
            self.live -= self._sizes[row]

    def _row(self, offset: int) -> int | None:
        row = bisect_left(self._offsets, offset)
        return row if row < len(self) and self._offsets[row] == offset else None

    def tidy(self) -> None:
        """Keep only the keys of rows that do not count any more: they are a third to a half of all."""
        if not self._dead:
            return
        gone = {key for key, kind in zip(self._keys, self._kinds, strict=True) if not kind}
        self._superseded = array("Q", sorted(gone.union(self._superseded)))
        rows = [row for row, kind in enumerate(self._kinds) if kind]
        for name in ("_lsns", "_keys", "_sizes", "_offsets"):
            column: array[int] = getattr(self, name)
            setattr(self, name, array(column.typecode, [column[row] for row in rows]))
        self._kinds = bytearray(self._kinds[row] for row in rows)
        self._dead = 0

    def holds(self, keys: Set[int]) -> bool:
        """Whether it has bytes of records with these keys."""
        return bool(keys) and not (keys.isdisjoint(self._superseded) and keys.isdisjoint(self._keys))

    def counting(self) -> Iterator[tuple[int, int]]:
        """(lsn, key) of what counts."""
        return ((lsn, key) for lsn, key, kind in zip(self._lsns, self._keys, self._kinds, strict=True) if kind)

    def bytes_of(self, keys: Set[int]) -> int:
        """Bytes of what counts and has these keys. Another thread may change it meanwhile: then it is about so many."""
        rows = zip(self._keys[:], self._sizes[:], bytes(self._kinds), strict=False)
        return sum(size for key, size, kind in rows if kind and key in keys)

    def lsn(self, offset: int) -> int:
        """The lsn of the record that lies there; 0 where no row tells."""
        row = self._row(offset)
        return 0 if row is None else self._lsns[row]

    def place(self, offset: int) -> RecordLocation | None:
        """The place of the record that lies there, if a row tells."""
        row = self._row(offset)
        return None if row is None else RecordLocation(self.header, offset, self._sizes[row])

    @property
    def wasteful(self) -> bool:
        """Whether less than half of it counts."""
        return self.dirty or not self.live or self.live < (self.size - HEADER_BYTES) // 2


class Index:
    """All segments, and which record supersedes which. One thread changes it; any may call `locate`."""

    def __init__(self, segments: dict[int, Segment]) -> None:
        """`segments`: by number. Whoever owns them adds and removes them."""
        self.segments = segments
        self._places = {int(kind): OffsetTable() for kind in FOUND}
        self._pieces: dict[int, list[tuple[int, int]]] = {}
        """Where TOKENS of turns without an end lie."""
        self._lock = threading.Lock()

    def add(self, record: Record, segment: Segment, offset: int) -> None:
        """A record was written there, perhaps after it lay in a segment that was given up."""
        with self._lock:
            segment.add(record, offset)
            self._enter(record, segment, offset)

    def enter(self, record: Record, segment: Segment, offset: int) -> None:
        """A record was found there: it has its row."""
        with self._lock:
            self._enter(record, segment, offset)

    def _enter(self, record: Record, segment: Segment, offset: int) -> None:
        number = segment.header.number
        if record.kind in FOUND:
            table = self._places[record.kind]
            old_number, old_offset = table.get(record.key)
            old = self.segments.get(old_number)
            if old is not None and record.kind in NEWEST:
                if old.lsn(old_offset) > record.lsn:
                    segment.drop(offset)
                    return
                old.drop(old_offset)
            table.put(record.key, number, offset)
        if record.kind == RecordKind.TOKENS:
            self._pieces.setdefault(record.key, []).append((number, offset))
        elif record.kind == RecordKind.END:
            for piece_number, piece_offset in self._pieces.pop(record.key, ()):
                if (one := self.segments.get(piece_number)) is not None:
                    one.drop(piece_offset)

    def move(self, record: Record, number: int, offset: int, left: Collection[int]) -> None:
        """A record that counts has a row there now; `left`: the numbers of the segments where it was."""
        with self._lock:
            if record.kind in FOUND:
                self._places[record.kind].put(record.key, number, offset)
            elif record.kind == RecordKind.TOKENS:
                others = [place for place in self._pieces.get(record.key, ()) if place[0] not in left]
                self._pieces[record.key] = [*others, (number, offset)]

    def forget(self, keys: Collection[int]) -> None:
        """These keys are gone."""
        with self._lock:
            for key in keys:
                self._pieces.pop(key, None)
                for table in self._places.values():
                    table.drop(key)

    def locate(self, kind: int, key: int) -> RecordLocation | None:
        """Where the record lies that counts; None where there is none."""
        with self._lock:
            number, offset = self._places[kind].get(key)
            segment = self.segments.get(number)
            return None if segment is None else segment.place(offset)


def encode_keys(keys: Iterable[int]) -> bytes:
    """Keys as an ERASE record holds them."""
    return b"".join(key.to_bytes(8, "little") for key in keys)


def decode_keys(payload: bytes) -> list[int]:
    """The keys of an ERASE record."""
    return [int.from_bytes(payload[at : at + 8], "little") for at in range(0, len(payload) - 7, 8)]
