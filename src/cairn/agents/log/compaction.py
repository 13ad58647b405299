"""How a token log's segments are written anew: what counts goes into a new one, and the old ones are removed.

Nothing is changed in place. The new segment is durable before an old one goes; a crash in between leaves records
twice, and their `lsn` tells.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set

from cairn.agents.log.folder import DAMAGED, LOG, NEW, Folder
from cairn.agents.log.index import Index, Segment
from cairn.agents.log.segment import HEADER_BYTES, SEAL, Record, SegmentHeader, encode_record, scan

log = logging.getLogger(__name__)


def clear(folder: Folder, index: Index) -> None:
    """Remove what is no segment: one that cannot be read, and those whose making failed halfway."""
    for ending in (DAMAGED, NEW, LOG):
        for number in folder.numbers(ending):
            if ending != LOG or number not in index.segments:
                folder.remove(number, ending)


def choose(index: Index, active: Segment | None, size: int, small: int) -> list[int]:
    """The closed segments that are best written anew as one of about `size` bytes; none if nothing is gained.

    Those of which little counts come first; more than `small` of less than half the size are put together.
    """
    closed = {
        number: segment
        for number, segment in sorted(index.segments.items())
        if segment is not active and not segment.stuck
    }
    chosen = [number for number, segment in closed.items() if segment.wasteful]
    if not chosen:
        chosen = [number for number, segment in closed.items() if segment.live < size // 2]
        if len(chosen) <= small:
            return []
    group: list[int] = []
    total = 0
    for number in chosen:
        total += closed[number].live
        if group and total > size:
            break
        group.append(number)
    return group


def rewrite(
    folder: Folder, index: Index, header: SegmentHeader, numbers: Sequence[int], erasing: Set[int], *, keep_all: bool
) -> None:
    """Put what counts of these closed segments, except `erasing` keys, into one with this header, and remove them.

    `keep_all`: leave them alone if a record that counts cannot be read any more. Raises OSError.
    """
    segments = index.segments
    wanted = {lsn for number in numbers for lsn, key in segments[number].counting() if key not in erasing}
    records: dict[int, Record] = {}
    for number in numbers:
        found = scan(segments[number].header, folder.read(number)).records
        records |= {record.lsn: record for record in found if record.lsn in wanted}
    if len(records) < len(wanted):
        log.warning("segments %s: %d records are damaged", numbers, len(wanted) - len(records))
        if keep_all:
            for number in numbers:
                segments[number].stuck = True
            return
    if records:
        _make(folder, index, header, [records[lsn] for lsn in sorted(records)], numbers)
    else:  # what supersedes them may be in a file that a process made which was killed before it synced the name
        folder.sync()
    for number in numbers:  # one that cannot be removed now must not give them out again: they may be superseded then
        segments[number].drop_all(lsns=wanted)
    for number in numbers:
        folder.remove(number)
        del segments[number]
    folder.sync()


def _make(folder: Folder, index: Index, header: SegmentHeader, records: Sequence[Record], left: Sequence[int]) -> None:
    made = Segment(header)
    data = bytearray()
    for record in records:
        made.add(record, HEADER_BYTES + len(data))
        data += encode_record(header, HEADER_BYTES + len(data), record)
    data += encode_record(header, HEADER_BYTES + len(data), SEAL)
    made.size += len(data)
    folder.create(header, data).close()
    index.segments[header.number] = made
    offset = HEADER_BYTES
    for record in records:
        index.move(record, header.number, offset, left)
        offset += record.size
