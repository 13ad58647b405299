"""Index of a token log: where each record lies, and which records still count. It reads no files.

A log holds a few records of every turn that ever ran, so the index is packed: some 25 bytes a record in its segment,
and a slot of an `OffsetTable` for those that are looked up.
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
"""2**64 over the golden ratio: it spreads consecutive keys over the table."""
_OFFSET_BITS = 34
_FEWEST = 8


class OffsetTable:
    """A packed hash table from keys to (segment number, offset).

    A history of a million turns has two million keys. Each slot takes 16 bytes, and at least a third of the slots are
    free (open addressing). Keys are 1 to 2**64 - 1, numbers 1 to 2**30 - 1, offsets below 2**34. Not thread-safe.
    """

    __slots__ = ("_keys", "_places", "_used")

    def __init__(self) -> None:
        self._keys = array("Q", bytes(8 * _FEWEST))
        """0 for a slot that was never used."""
        self._places = array("Q", bytes(8 * _FEWEST))
        """0 for a key that was dropped."""
        self._used = 0

    def get(self, key: int) -> tuple[int, int]:
        """Return (number, offset); (0, 0) for an unknown key."""
        place = self._places[self._slot(key)]
        return place >> _OFFSET_BITS, place & ((1 << _OFFSET_BITS) - 1)

    def put(self, key: int, number: int, offset: int) -> None:
        """Set the place of a key. Raise OverflowError if the number is too large."""
        slot = self._slot(key)
        self._places[slot] = number << _OFFSET_BITS | offset
        if not self._keys[slot]:
            self._keys[slot] = key
            self._used += 1
            if 3 * self._used > 2 * len(self._keys):
                self._rehash()

    def drop(self, key: int) -> None:
        """Remove a key. Its slot is free again once the table grows."""
        self._places[self._slot(key)] = 0

    def _slot(self, key: int) -> int:
        """Return the slot of the key, or the free one that it would get."""
        last = len(self._keys) - 1
        slot = (key * _SPREAD >> 20) & last
        while (stored := self._keys[slot]) and stored != key:
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
    """Kinds of records. Of AGENT, END, SAVINGS and JOURNAL only the newest with its key counts."""

    AGENT = 1
    TURN = 2
    TOKENS = 3
    """Tokens of an incomplete answer; END holds all of them."""
    END = 4
    ERASE = 5
    """Keys whose records must be erased."""
    REPLAY = 6
    SAVINGS = 7
    UNPIN = 8
    """Pins that the stores still have to give up: their agent is deleted."""
    JOURNAL = 9
    """The head of a journal, in its current state."""
    ENTRY = 10
    """An entry of a journal, with a key of its own."""


NEWEST = frozenset({RecordKind.AGENT, RecordKind.END, RecordKind.SAVINGS, RecordKind.JOURNAL})
FOUND = NEWEST | {RecordKind.TURN}
"""Kinds that are looked up by kind and key."""
TIDY = 64
"""A segment drops its dead rows when there are this many, and as many as live ones."""


class RecordLocation(NamedTuple):
    """Place of a record."""

    header: SegmentHeader
    offset: int
    size: int


class Segment:
    """A file of the log, with a row for each record that counts, by offset."""

    def __init__(self, header: SegmentHeader) -> None:
        self.header = header
        self._lsns, self._keys, self._sizes = array("Q"), array("Q"), array("I")
        self._offsets = array("Q")
        self._kinds = bytearray()
        """0 for a record that no longer counts."""
        self._dead = 0
        """Rows of records that no longer count."""
        self._superseded = array("Q")
        """Keys of records in the file that have no row any more."""
        self.live = 0
        """Bytes of the records that count."""
        self.size = HEADER_BYTES
        self.dirty = False
        """Whether the file may hold bytes without a row."""
        self.stuck = False
        """Whether a record that counts cannot be read any more, so that compaction leaves the file alone."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._lsns)

    def add(self, record: Record, offset: int) -> None:
        """Add the row of a record at that offset, which is beyond all others. Dead rows are dropped now and then."""
        if self._dead >= TIDY and 2 * self._dead >= len(self):
            self.tidy()
        self._lsns.append(record.lsn)
        self._keys.append(record.key)
        self._sizes.append(record.size)
        self._offsets.append(offset)
        self._kinds.append(record.kind)
        self.live += record.size

    def drop(self, offset: int) -> None:
        """Mark the record at that offset as no longer counting."""
        row = self._row(offset)
        if row is not None:
            self._drop(row)

    def drop_all(self, *, lsns: Collection[int] = (), kind: int = 0) -> None:
        """Mark the records with these sequence numbers, or of this kind, as no longer counting."""
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
        """Drop dead rows, a third to a half of all, and keep only their keys."""
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
        """Return whether the file has bytes of records with these keys."""
        return bool(keys) and not (keys.isdisjoint(self._superseded) and keys.isdisjoint(self._keys))

    def counting(self) -> Iterator[tuple[int, int]]:
        """Return (lsn, key) of the records that count."""
        return ((lsn, key) for lsn, key, kind in zip(self._lsns, self._keys, self._kinds, strict=True) if kind)

    def bytes_of(self, keys: Set[int]) -> int:
        """Return the bytes of the records that count and have these keys.

        An estimate if another thread changes the segment meanwhile.
        """
        rows = zip(self._keys[:], self._sizes[:], bytes(self._kinds), strict=False)
        return sum(size for key, size, kind in rows if kind and key in keys)

    def lsn(self, offset: int) -> int:
        """Return the lsn of the record at that offset; 0 without a row."""
        row = self._row(offset)
        return 0 if row is None else self._lsns[row]

    def place(self, offset: int) -> RecordLocation | None:
        """Return the place of the record at that offset; None without a row."""
        row = self._row(offset)
        return None if row is None else RecordLocation(self.header, offset, self._sizes[row])

    @property
    def wasteful(self) -> bool:
        """Whether less than half of the file counts."""
        return self.dirty or not self.live or self.live < (self.size - HEADER_BYTES) // 2


class Index:
    """All segments, and which record supersedes which. One thread changes it; any may call `locate`."""

    def __init__(self, segments: dict[int, Segment]) -> None:
        """Create an index of `segments`, by number. Their owner adds and removes them."""
        self.segments = segments
        self._places = {int(kind): OffsetTable() for kind in FOUND}
        self._pieces: dict[int, list[tuple[int, int]]] = {}
        """Places of the TOKENS of turns without an end."""
        self._lock = threading.Lock()

    def add(self, record: Record, segment: Segment, offset: int) -> None:
        """Add a record that was written at that offset. It may have been in a segment before that was abandoned."""
        with self._lock:
            segment.add(record, offset)
            self._enter(record, segment, offset)

    def enter(self, record: Record, segment: Segment, offset: int) -> None:
        """Add a record that was found at that offset and has its row."""
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
                if (piece_segment := self.segments.get(piece_number)) is not None:
                    piece_segment.drop(piece_offset)

    def move(self, record: Record, number: int, offset: int, left: Collection[int]) -> None:
        """Set the new place of a record that counts.

        `left`: numbers of the segments where it was.
        """
        with self._lock:
            if record.kind in FOUND:
                self._places[record.kind].put(record.key, number, offset)
            elif record.kind == RecordKind.TOKENS:
                others = [place for place in self._pieces.get(record.key, ()) if place[0] not in left]
                self._pieces[record.key] = [*others, (number, offset)]

    def forget(self, keys: Collection[int]) -> None:
        """Remove these keys."""
        with self._lock:
            for key in keys:
                self._pieces.pop(key, None)
                for table in self._places.values():
                    table.drop(key)

    def locate(self, kind: int, key: int) -> RecordLocation | None:
        """Return the place of the record that counts, or None."""
        with self._lock:
            number, offset = self._places[kind].get(key)
            segment = self.segments.get(number)
            return None if segment is None else segment.place(offset)


def encode_keys(keys: Iterable[int]) -> bytes:
    """Encode keys for an ERASE record."""
    return b"".join(key.to_bytes(8, "little") for key in keys)


def decode_keys(payload: bytes) -> list[int]:
    """Decode the keys of an ERASE record."""
    return [int.from_bytes(payload[at : at + 8], "little") for at in range(0, len(payload) - 7, 8)]
