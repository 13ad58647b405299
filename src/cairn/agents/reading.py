"""What a token log's folder holds at the start: its segments, and every record of them once."""

from __future__ import annotations

import logging
from typing import NamedTuple

from cairn.agents.folder import DAMAGED, LOG, NEW, Folder
from cairn.agents.index import Entry, Segment
from cairn.agents.segment import SEAL, VERSION, Header, Record, decode_header, scan
from cairn.errors import ConfigError

log = logging.getLogger(__name__)


class Found(NamedTuple):
    """What was read. Segments that have to be written anew are `dirty`."""

    segments: dict[int, Segment]
    records: dict[int, Record]
    """By lsn, those that are erased or superseded too; no seals."""
    damaged: int
    """Bytes that are no record."""
    next_number: int
    """Beyond those of all files."""


def read_segments(folder: Folder) -> Found:
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
    lost = 0
    for number, data in reversed(read):  # of a record that is there twice the later one is known to be durable
        header = headers[number]
        if header is None or header.number != number:
            log.warning("%s: no readable header; set aside", folder.name(number))
            lost += len(data)
            folder.set_aside(number)
            continue
        segments[number], damaged = _enter(header, data, records)
        lost += damaged
    return Found(segments, records, lost, following)


def _enter(header: Header, data: bytes, records: dict[int, Record]) -> tuple[Segment, int]:
    """A segment with those of its records that are not there yet, and its damaged bytes."""
    segment = Segment(header)
    found, damaged = scan(header, data)
    segment.size, segment.dirty = len(data), damaged > 0 or found[-1:] != [SEAL]
    for record in found:
        if record.kind == SEAL.kind:
            continue
        if record.lsn in records:
            segment.dirty = True
            continue
        records[record.lsn] = record
        segment.entries.append(Entry(record))
    return segment, damaged
