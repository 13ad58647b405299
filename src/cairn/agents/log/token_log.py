"""The durable token log: append-only records in segments that all agents share.

All agents share the segments, for two reasons. The ends of all turns that wait cost one sync together, and a fork
shares its history with the agent that it came from. The price is paid at deletion: segments with erased records are
rewritten without them.

A segment grows only at its end and is never changed otherwise. Compaction and erasure write the remaining records into
new segments, make those durable, and then remove the old ones. A crash in between leaves duplicates, which are
recognized by their `lsn`. An erasure begins with a synced record that names the keys; a start that finds that record
erases first.

After a failed write or sync, nothing unsynced in that segment is trusted. The segment is closed for good, and what was
not durable is written again into a new one.

A segment ends with a seal once all of it is durable. What a start finds without a seal may be in the system's cache and
not on the disk - the process was killed, or a sync failed - so it is rewritten before anything builds on it.

Everything read is checked. Bytes that are not a record - a torn end, a damaged sector - are skipped and counted, and
left out when the start rewrites their segment. The whole log is read once; only the place of each record is kept in
memory. One thread at a time may use a log, but any may `read` from it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Sequence, Set
from pathlib import Path

from cairn.agents.log.index import Index, RecordKind, Segment, decode_keys, encode_keys
from cairn.agents.log.recovery import DAMAGED, LOG, NEW, Folder, RecoveredLog, fetch, loss_sentence, read_segments
from cairn.agents.log.segment import HEADER_BYTES, SEAL, Record, SegmentHeader, encode_record, scan
from cairn.system.interfaces import File, FileSystem, Lock, Rng

log = logging.getLogger(__name__)


def clear(folder: Folder, index: Index) -> None:
    """Remove files that are not segments: unreadable ones, and those whose creation was cut off."""
    for ending in (DAMAGED, NEW, LOG):
        for number in folder.numbers(ending):
            if ending != LOG or number not in index.segments:
                folder.remove(number, ending)


def choose(index: Index, active: Segment | None, size: int, small: int) -> list[int]:
    """Return the closed segments to rewrite as one of about `size` bytes; empty if nothing is gained.

    Segments in which little counts come first. If there are none, and more than `small` of less than half the size,
    those are merged.
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
    """Write what counts in these closed segments, except `erasing` keys, into a new one, and remove them.

    The new segment is durable before an old one goes. With `keep_all`, leave them alone if a record that counts cannot
    be read any more. Raise OSError.
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
    else:  # the records that supersede them may be in a file whose name an earlier process did not sync
        folder.sync()
    # A segment that cannot be removed now must not return its records later: they may be superseded by then.
    for number in numbers:
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
"""Size at which a segment is closed and another begun."""
SMALL_SEGMENTS = 8
"""Closed segments of less than half that size that may exist before they are merged."""


class TokenLog:
    """The log in one folder. `TokenLog.open` reads it; `recovered` holds its records."""

    def __init__(self, files: FileSystem, folder: Folder, rng: Rng, lock: Lock) -> None:
        self._files, self._folder, self._rng, self._lock = files, folder, rng, lock
        self._index = Index({})
        self._file: File | None = None
        self._active: Segment | None = None
        self._next_number = 1
        self._lsns = itertools.count(1)
        self._unsynced: list[Record] = []
        """Accepted records that may not be durable: they are lost if the segment fails."""
        self._erasing: set[int] = set()
        """Keys whose erasure is durable, but whose bytes may still be on the disk."""
        self._next_erasing: set[int] = set()
        """Such keys, of erasures that began while others were under way: they are next."""
        self._doubtful = False
        """Whether what was read at the start may not be durable."""
        self.recovered: list[Record] = []
        """Every record that counts, in order. Clear it after reading."""
        self.damaged = 0
        """Bytes found at the start that are not records."""
        self.loss = ""
        """What the start found lost, as a sentence; empty for nothing."""
        self.trouble = ""
        """Why the log cannot be written, as a sentence; empty while it can."""

    # --------------------------------------------------------------------------------------------------- the start

    @classmethod
    def open(cls, files: FileSystem, path: Path, rng: Rng) -> TokenLog | None:
        """Lock and read the log; return None while another process holds it.

        Raise ConfigError, and change nothing, for a folder that is not ours or of a newer format; OSError if the disk
        fails.
        """
        folder = Folder(files, path)
        folder.check()
        lock = files.lock(path)
        if lock is None:
            return None
        made = cls(files, folder, rng, lock)
        try:
            folder.remove_uploads()
            made._recover()
        except BaseException:
            lock.release()
            raise
        return made

    def _recover(self) -> None:
        read = read_segments(self._folder)
        self._index, self.damaged = Index(read.segments), read.damaged
        if read.damaged:
            log.warning(
                "%d bytes of the token log are not records: a write was cut off, or they are damaged", read.damaged
            )
        self.loss = loss_sentence(self._folder, read.loss)
        if self.loss:
            log.error("%s", self.loss)
        self._next_number = read.next_number
        self._lsns = itertools.count(1 + max(read.records, default=0))
        self._recall(read)
        self._doubtful = True
        try:
            self._finish()
        except OSError as error:  # damaged and erased records stay unreachable; this is tried again
            self._note(error)

    def _recall(self, read: RecoveredLog) -> None:
        """Determine which records still count."""
        for record in read.records.values():
            if record.kind == RecordKind.ERASE:
                self._erasing.update(decode_keys(record.payload))
        for lsn in sorted(read.records):
            number, offset = read.places[lsn]
            if read.records[lsn].key in self._erasing:
                read.segments[number].drop(offset)
            else:
                self._index.enter(read.records[lsn], read.segments[number], offset)
        counting = sorted(lsn for segment in read.segments.values() for lsn, _ in segment.counting())
        self.recovered = [read.records[lsn] for lsn in counting if read.records[lsn].kind != RecordKind.ERASE]
        for segment in read.segments.values():
            segment.tidy()

    def read(self, wanted: Sequence[tuple[int, int]]) -> list[Record | None]:
        """Return the records with these (kind, key) that are written and count; TOKENS and REPLAY are never found.

        None for a record that does not exist or is damaged. Any thread may call. Raise OSError.
        """
        return fetch(self._folder, self._index, wanted)

    # ------------------------------------------------------------------------------------------------------ writing

    def next_lsn(self) -> int:
        """Return a number for a new record, or a new key. Any thread may call."""
        return next(self._lsns)

    @property
    def unsynced(self) -> bool:
        """Whether a crash now could lose something."""
        return bool(self._unsynced)

    def write(self, records: Sequence[Record], *, sync: bool) -> None:
        """Append records; with `sync`, they and all before them are durable on return.

        Raise OSError. A later start may still find a record that was refused so.
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
        # With `trouble`, even an empty write creates a segment, to find out whether the disk works again.
        if not records and not self.trouble:
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
        """Make all accepted records durable: they may supersede what is about to be left out."""
        if self._file is None:
            self._append(self._unsynced)
            self._place(self._unsynced)
        self._sync()

    def _place(self, records: Sequence[Record]) -> None:
        """Index the records that were just appended."""
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
        """Close the growing segment. The seal itself needs no sync: it only confirms the sync before it."""
        self._sync()
        if self._file is None or self._active is None:
            return
        try:
            self._file.append(encode_record(self._active.header, self._active.size, SEAL))
        except OSError:  # the rest is durable; a start will rewrite the segment needlessly
            self._abandon()
            return
        self._active.size += SEAL.size
        self._file.close()
        self._file = self._active = None

    def _abandon(self) -> None:
        """Never use the growing segment again: its contents beyond the last sync are unknown."""
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
        """Remove every byte of the records with these keys; on return they are gone, also after a crash.

        Raise OSError. Even then no later start reads these records, and their bytes go as soon as the disk works.
        """
        self.begin_erasure(keys)
        while self._erasing:
            self.erase_some()

    def begin_erasure(self, keys: Iterable[int]) -> None:
        """Note durably that the records with these keys are to be erased; `erase_some` does it. Raise OSError."""
        wanted = sorted(set(keys))
        if not wanted:
            return
        self.write([Record(self.next_lsn(), RecordKind.ERASE, 0, encode_keys(wanted))], sync=True)
        (self._next_erasing if self._erasing else self._erasing).update(wanted)

    def erased(self, keys: Iterable[int]) -> bool:
        """Return whether no byte of the records with these keys is left, after their erasure began."""
        return self._erasing.isdisjoint(keys) and self._next_erasing.isdisjoint(keys)

    def erase_some(self) -> bool:
        """Rewrite one segment with erased records; return whether the erasures that were under way are done.

        Raise OSError if there are only segments that cannot be rewritten now.
        """
        try:
            return self._rewrite_next()
        except OSError as error:
            self._note(error)
            raise

    def _finish(self) -> None:
        """Rewrite damaged segments and those with erased records."""
        while not self._rewrite_next() or self._erasing:
            pass

    def _rewrite_next(self) -> bool:
        """Rewrite the damaged segments, or the next with erased records; return whether there was none left."""
        segments = self._index.segments
        if self._erasing:
            clear(self._folder, self._index)
        if self._active is not None and self._active.holds(self._erasing):
            self._seal()
        # As one: a record of the second may supersede one of the first, and neither is known to be durable.
        if doubtful := [number for number, segment in sorted(segments.items()) if segment.dirty]:
            self._rewrite(doubtful, keep_all=False)
        failure: OSError | None = None
        for number, segment in sorted(segments.items()):
            if not segment.holds(self._erasing):
                continue
            try:
                self._rewrite([number], keep_all=False)
            except OSError as error:  # the others are erased first
                failure = failure or error
            else:
                return False
        if failure is not None:
            raise failure
        self._doubtful = False
        if not self._erasing:
            return True
        self._folder.sync()
        self._index.forget(self._erasing)
        self._erasing, self._next_erasing = self._next_erasing, set()
        if not self._erasing:
            for segment in segments.values():
                segment.drop_all(kind=RecordKind.ERASE)
        return True

    def compact(self) -> bool:
        """Do one step of compaction, if there is any; return whether there may be more. Raise OSError."""
        if not self._erasing and not self._chosen():
            return False
        self.write((), sync=True)  # before the records that it supersedes are dropped
        if self._erasing:
            self._rewrite_next()
        elif chosen := self._chosen():
            self._rewrite(chosen, keep_all=True)
        return True

    def _chosen(self) -> list[int]:
        return choose(self._index, self._active, SEGMENT_BYTES, SMALL_SEGMENTS)

    def _rewrite(self, numbers: Sequence[int], *, keep_all: bool) -> None:
        rewrite(self._folder, self._index, self._header(), numbers, self._erasing, keep_all=keep_all)

    def bytes_of(self, keys: Set[int]) -> int:
        """Return the bytes of the records with these keys that count.

        Any thread may call; what is written meanwhile may be missed.
        """
        return sum(segment.bytes_of(keys) for segment in tuple(self._index.segments.values()))

    @property
    def bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in tuple(self._index.segments.values()))

    def close(self) -> None:
        """Sync and release the folder. Raise OSError if the sync fails; the folder is released all the same."""
        try:
            self._seal()
        finally:
            self._abandon()
            self._lock.release()
