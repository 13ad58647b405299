"""The durable token log: append-only records in segments that all agents share.

Segments are shared, not one file an agent, because the ends of all turns that are waiting then cost one sync together,
and because a fork shares its history with the agent it came from. The price is paid at deletion: the segments that
hold what is erased are written anew without it.

A segment grows only at its end and is never changed otherwise. Compaction and erasure write what is to stay into new
segments, make those durable, and then remove the old ones; a crash in between leaves records twice, and their `lsn`
tells. An erasure begins with a synced record that names the keys; a start that finds that record erases first.

After a failed write or sync nothing unsynced of that segment is relied on: it is closed for ever, and what was not
yet durable is written again into a new one.

A segment ends with a seal once all of it is durable. What a start finds without one may be known to the system and not
to the disk - the process was killed, or a sync failed - so it is written anew before anything builds on it.

Everything read is checked. Bytes that are no record - a torn end, a damaged sector - are skipped and counted, and left
out when their segment is written anew at the start. The whole log is read into memory once; nothing is kept of it here
but where each record lies. One thread at a time may use a log, except that any may `read` from it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Sequence, Set
from pathlib import Path

from cairn.agents.log.index import Index, RecordKind, Segment, decode_keys, encode_keys
from cairn.agents.log.recovery import DAMAGED, LOG, NEW, Folder, RecoveredLog, fetch, read_segments, told
from cairn.agents.log.segment import HEADER_BYTES, SEAL, Record, SegmentHeader, encode_record, scan
from cairn.system.interfaces import File, FileSystem, Lock, Rng

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


SEGMENT_BYTES = 4 << 20
"""A segment that has reached this is closed and another begun."""
SMALL_SEGMENTS = 8
"""Closed segments of less than half that size which may lie about before they are put together."""


class Log:
    """One folder's log. `Log.open` reads it; `recovered` is what it held."""

    def __init__(self, files: FileSystem, folder: Folder, rng: Rng, lock: Lock) -> None:
        self._files, self._folder, self._rng, self._lock = files, folder, rng, lock
        self._index = Index({})
        self._file: File | None = None
        self._active: Segment | None = None
        self._next_number = 1
        self._lsns = itertools.count(1)
        self._unsynced: list[Record] = []
        """Accepted, perhaps not durable: what a failure of the segment would take along."""
        self._erasing: set[int] = set()
        """Keys whose bytes may still be on the disk although their erasure is durable."""
        self._doubtful = False
        """Whether what was read at the start may not be durable."""
        self.recovered: list[Record] = []
        """Every record that counts, in order. Empty it once it was read."""
        self.damaged = 0
        """Bytes that were found to be no record at the start."""
        self.loss = ""
        """What was found lost at the start, as a sentence; empty for nothing."""
        self.trouble = ""
        """Why it cannot be written, as a sentence; empty when it can."""

    # --------------------------------------------------------------------------------------------------- the start

    @classmethod
    def open(cls, files: FileSystem, path: Path, rng: Rng) -> Log | None:
        """Lock and read the log; None while another process holds it.

        Raises ConfigError for a folder that is not ours or of a newer format (and changes nothing then), OSError where
        the disk fails.
        """
        folder = Folder(files, path)
        folder.check()
        lock = files.lock(path)
        if lock is None:
            return None
        made = cls(files, folder, rng, lock)
        try:
            made._recover()
        except BaseException:
            lock.release()
            raise
        return made

    def _recover(self) -> None:
        found = read_segments(self._folder)
        self._index, self.damaged = Index(found.segments), found.damaged
        if found.damaged:
            log.warning("%d bytes of the token log are no records: a write was cut off, or damage", found.damaged)
        self.loss = told(self._folder, found.loss)
        if self.loss:
            log.error("%s", self.loss)
        self._next_number = found.next_number
        self._lsns = itertools.count(1 + max(found.records, default=0))
        self._recall(found)
        self._doubtful = True
        try:
            self._finish()
        except OSError as error:  # what is to be cut or erased stays out of reach, and is tried again
            self._note(error)

    def _recall(self, found: RecoveredLog) -> None:
        """Find out which records still count."""
        for record in found.records.values():
            if record.kind == RecordKind.ERASE:
                self._erasing.update(decode_keys(record.payload))
        for lsn in sorted(found.records):
            number, offset = found.places[lsn]
            if found.records[lsn].key in self._erasing:
                found.segments[number].drop(offset)
            else:
                self._index.enter(found.records[lsn], found.segments[number], offset)
        counting = sorted(lsn for segment in found.segments.values() for lsn, _ in segment.counting())
        self.recovered = [found.records[lsn] for lsn in counting if found.records[lsn].kind != RecordKind.ERASE]
        for segment in found.segments.values():
            segment.tidy()

    def read(self, wanted: Sequence[tuple[int, int]]) -> list[Record | None]:
        """The records with these kinds and keys that were written and count, TOKENS and REPLAY never.

        None for one that is not there, or is damaged. Any thread may call. Raises OSError.
        """
        return fetch(self._folder, self._index, wanted)

    # ------------------------------------------------------------------------------------------------------ writing

    def next_lsn(self) -> int:
        """A number that no record has: of a record to be written, or a key. Any thread may call."""
        return next(self._lsns)

    @property
    def unsynced(self) -> bool:
        """Whether a crash now could lose something."""
        return bool(self._unsynced)

    def write(self, records: Sequence[Record], *, sync: bool) -> None:
        """Append records; `sync`: they, and all before them, are durable on return.

        Raises OSError. A record refused that way may still be found by a later start.
        """
        for last in (False, True):
            try:
                if sync and self._doubtful:
                    self._confirm()
                    self._finish()
                if self._active is not None and self._active.size >= SEGMENT_BYTES:
                    self._seal()
                news = list(records) if self._file is not None else [*self._unsynced, *records]
                self._append(news)
                if sync:
                    self._sync()
                break
            except OSError as error:
                self._abandon()
                if last:
                    self._note(error)
                    raise
        self._place(news)
        if not sync:
            self._unsynced += records
        self.trouble = ""

    def _append(self, records: Sequence[Record]) -> None:
        if not records and not self.trouble:  # a disk that refused a write is asked by one, if only of a header
            return
        if self._file is None:
            header = self._header()
            self._file = self._folder.create(header, b"")
            self._active = self._index.segments[header.number] = Segment(header)
        segment = self._active
        assert segment is not None
        data = bytearray()
        for record in records:
            data += encode_record(segment.header, segment.size + len(data), record)
        self._file.append(data)
        segment.size += len(data)

    def _confirm(self) -> None:
        """Make durable what was accepted: it may supersede what is about to be left out."""
        if self._file is None:
            self._append(self._unsynced)
            self._place(self._unsynced)
        self._sync()

    def _place(self, records: Sequence[Record]) -> None:
        """These are the last that were appended."""
        segment = self._active
        offset = segment.size - sum(record.size for record in records) if segment is not None else 0
        for record in records:
            assert segment is not None
            self._index.add(record, segment, offset)
            offset += record.size

    def _header(self) -> SegmentHeader:
        self._next_number += 1
        return SegmentHeader(self._next_number - 1, self._rng.bits64())

    def _sync(self) -> None:
        if self._file is not None:
            self._file.sync()
            self._unsynced = []

    def _seal(self) -> None:
        """Close the segment that grows. Its seal needs no sync: it says that the one before it did well."""
        self._sync()
        if self._file is None or self._active is None:
            return
        try:
            self._file.append(encode_record(self._active.header, self._active.size, SEAL))
        except OSError:  # all the rest is durable; what is written anew for want of a seal is written anew in vain
            self._abandon()
            return
        self._active.size += SEAL.size
        self._file.close()
        self._file = self._active = None

    def _abandon(self) -> None:
        """Never touch the segment that grows again: nobody knows what it holds beyond what was synced."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        if self._active is not None:
            self._active.dirty = True
            self._active.drop_all(lsns={record.lsn for record in self._unsynced})
        self._file = self._active = None

    def _note(self, error: OSError) -> None:
        self.trouble = f"the token log in {self._folder.path} cannot be written: {error.strerror or error}"

    # ----------------------------------------------------------------------------------------- erasure, compaction

    def erase(self, keys: Iterable[int]) -> None:
        """Remove every byte of the records with these keys; returns when they are gone, also after a crash.

        Raises OSError; no later start reads the keys' records then, and their bytes go as soon as the disk works.
        """
        wanted = sorted(set(keys))
        if not wanted:
            return
        self.write([Record(self.next_lsn(), RecordKind.ERASE, 0, encode_keys(wanted))], sync=True)
        self._erasing.update(wanted)
        try:
            self._finish()
        except OSError as error:
            self._note(error)
            raise

    def _finish(self) -> None:
        """Write damaged segments and those with erased records anew."""
        segments = self._index.segments
        if self._erasing:
            clear(self._folder, self._index)
        if self._active is not None and self._active.holds(self._erasing):
            self._seal()
        # As one: what supersedes a record of the first may be in the second, and no more durable than it.
        if doubtful := [number for number, segment in sorted(segments.items()) if segment.dirty]:
            self._rewrite(doubtful, keep_all=False)
        for number, segment in sorted(segments.items()):
            if segment.holds(self._erasing):
                self._rewrite([number], keep_all=False)
        self._doubtful = False
        if not self._erasing:
            return
        self._folder.sync()
        self._index.forget(self._erasing)
        self._erasing.clear()
        for segment in segments.values():
            segment.drop_all(kind=RecordKind.ERASE)

    def compact(self) -> bool:
        """Do a part of the work that saves space, if there is any; whether there may be more. Raises OSError."""
        if not self._erasing and not self._chosen():
            return False
        self.write((), sync=True)  # before what it supersedes is dropped
        if self._erasing:
            self._finish()
        elif chosen := self._chosen():
            self._rewrite(chosen, keep_all=True)
        return True

    def _chosen(self) -> list[int]:
        return choose(self._index, self._active, SEGMENT_BYTES, SMALL_SEGMENTS)

    def _rewrite(self, numbers: Sequence[int], *, keep_all: bool) -> None:
        rewrite(self._folder, self._index, self._header(), numbers, self._erasing, keep_all=keep_all)

    def bytes_of(self, keys: Set[int]) -> int:
        """What the records with these keys take that count. Any thread; what is written meanwhile may be missed."""
        return sum(segment.bytes_of(keys) for segment in tuple(self._index.segments.values()))

    @property
    def bytes(self) -> int:
        """What the segments take."""
        return sum(segment.size for segment in tuple(self._index.segments.values()))

    def close(self) -> None:
        """Sync, and let others have the folder. Raises OSError where the sync fails; the folder is free then too."""
        try:
            self._seal()
        finally:
            self._abandon()
            self._lock.release()
