"""What a token log's folder holds: at the start its segments with every record once, and later single records."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cairn.agents.log.folder import DAMAGED, LOG, NEW, Folder
from cairn.agents.log.index import Index, RecordLocation, Segment
from cairn.agents.log.segment import (
    HEADER_BYTES,
    SEAL,
    VERSION,
    Record,
    SegmentHeader,
    decode_header,
    decode_record,
    walk,
)
from cairn.types.errors import ConfigError

log = logging.getLogger(__name__)

TRIES = 8
"""How often a record is looked for where it is said to lie: compaction may move it at the same time."""


class RecoveredLog(NamedTuple):
    """What was read. Segments that have to be written anew are `dirty`."""

    segments: dict[int, Segment]
    records: dict[int, Record]
    """Records by lsn, those that are erased or superseded too; no seals."""
    places: dict[int, tuple[int, int]]
    """The number of a segment and an offset by lsn. Each has a row there."""
    damaged: int
    """Bytes that are no record."""
    loss: str
    """What of that no write that was cut off can have left, as the end of a sentence; empty where nothing is."""
    next_number: int
    """Beyond those of all files."""


def read_segments(folder: Folder) -> RecoveredLog:
    """Read all, remove what was being made, and set aside what has no header.

    Raises ConfigError for a newer format, and changes nothing then.
    """
    read = [(number, folder.read(number)) for number in folder.numbers(LOG)]
    headers = {number: decode_header(data) for number, data in read}
    for number, header in headers.items():
        if header is not None and header.version > VERSION:
            raise ConfigError(
                f"{folder.name(number)}: written by a newer Cairn (format {header.version}); "
                f"this one reads formats up to {VERSION}"
            )
    following = 1 + max([0, *headers, *folder.numbers(NEW), *folder.numbers(DAMAGED)])
    for number in folder.numbers(NEW):
        folder.remove(number, NEW)
    segments: dict[int, Segment] = {}
    records: dict[int, Record] = {}
    places: dict[int, tuple[int, int]] = {}
    lost = inside = 0
    for number, data in reversed(read):  # of a record that is there twice the later one is known to be durable
        header = headers[number]
        if header is None or header.number != number:
            log.warning("%s: no readable header; set aside", folder.name(number))
            lost += len(data)
            folder.set_aside(number)
            continue
        segments[number], damaged, torn = _enter(header, data, records, places)
        lost += damaged
        inside += damaged - torn
    return RecoveredLog(segments, records, places, lost, loss(len(folder.numbers(DAMAGED)), inside), following)


def loss(aside: int, inside: int) -> str:
    """What a log lost that no write which was cut off explains: segments without a header, bytes between records."""
    found = [f"{aside} of its files had no readable header and were set aside as *.{DAMAGED}"] if aside else []
    found += [f"{inside} bytes in the midst of it are no records"] if inside else []
    return " and ".join(found)


def look(folder: Folder) -> str:
    """What the log in a folder has lost, as a sentence; empty for nothing. Changes nothing; a server may hold it."""
    aside, inside = len(folder.numbers(DAMAGED)), 0
    for number in folder.numbers(LOG):
        try:
            data = folder.read(number)
        except FileNotFoundError:  # compacted meanwhile
            continue
        header = decode_header(data)
        if header is None or header.number != number:
            aside += 1
        elif header.version <= VERSION:
            _, damaged, torn = _enter(header, data, {}, {})
            inside += damaged - torn
    return told(folder, loss(aside, inside))


def told(folder: Folder, lost: str) -> str:
    """A loss as a sentence; empty for none."""
    return f"the token log in {folder.path} was damaged: {lost}; agents and turns in them are lost" if lost else ""


def _enter(
    header: SegmentHeader, data: bytes, records: dict[int, Record], places: dict[int, tuple[int, int]]
) -> tuple[Segment, int, int]:
    """A segment with those of its records that are not there yet, its damaged bytes, and how many of them end it, as
    those of a write that was cut off do."""
    segment, last = Segment(header), None
    sound, end = 0, HEADER_BYTES
    for offset, record in walk(header, data):
        last, end = record, offset + record.size
        sound += record.size
        if record.kind == SEAL.kind:
            continue
        if record.lsn in records:
            segment.dirty = True
            continue
        records[record.lsn], places[record.lsn] = record, (header.number, offset)
        segment.add(record, offset)
    damaged = max(len(data) - HEADER_BYTES, 0) - sound
    segment.size = len(data)
    segment.dirty |= damaged > 0 or last != SEAL
    return segment, damaged, max(len(data) - end, 0)


def fetch(folder: Folder, index: Index, wanted: Sequence[tuple[int, int]]) -> list[Record | None]:
    """The records with these kinds and keys that count; None for one that is not there, or is damaged.

    Any thread may call, while another writes and compacts: a record that was moved is looked for again. Raises OSError.
    """
    found: list[Record | None] = [None] * len(wanted)
    missing: Iterable[int] = range(len(wanted))
    before: dict[int, RecordLocation] = {}
    for _ in range(TRIES):
        places = {at: place for at in missing if (place := index.locate(*wanted[at])) is not None}
        new = {at: place for at, place in places.items() if before.get(at) != place}
        if not new:
            break
        by_segment: dict[int, list[int]] = {}
        for at, place in new.items():
            by_segment.setdefault(place.header.number, []).append(at)
        for number, some in by_segment.items():
            for at, data in zip(some, _read(folder, number, [new[at] for at in some]), strict=False):
                record = decode_record(new[at].header, new[at].offset, data)
                if record is not None and (record.kind, record.key) == wanted[at]:
                    found[at] = record
        before = places
        missing = [at for at in places if found[at] is None]
    return found


def _read(folder: Folder, number: int, places: Iterable[RecordLocation]) -> list[bytes]:
    """The bytes at these places of a segment; nothing where it was removed meanwhile."""
    try:
        file = folder.open(number)
    except FileNotFoundError:
        return []
    try:
        return [file.read(place.offset, place.size) for place in places]
    finally:
        file.close()
