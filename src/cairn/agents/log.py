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
but where each record lies. One thread at a time may use a log.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from cairn.agents.folder import DAMAGED, LOG, NEW, Folder
from cairn.agents.index import Entry, Index, Kind, Segment, decode_keys, encode_keys
from cairn.agents.reading import read_segments
from cairn.agents.segment import HEADER_BYTES, SEAL, Header, Record, encode_record, scan
from cairn.seams import File, FileSystem, Lock, Rng

log = logging.getLogger(__name__)

SEGMENT_BYTES = 4 << 20
"""A segment that has reached this is closed and another begun."""
SMALL_SEGMENTS = 8
"""Closed segments of less than half that size which may lie about before they are put together."""


class Log:
    """One folder's log. `Log.open` reads it; `recovered` is what it held."""

    def __init__(self, files: FileSystem, folder: Folder, rng: Rng, lock: Lock) -> None:
        self._files, self._folder, self._rng, self._lock = files, folder, rng, lock
        self._segments: dict[int, Segment] = {}
        self._file: File | None = None
        self._active: Segment | None = None
        self._next_number = 1
        self._lsns = itertools.count(1)
        self._unsynced: list[Record] = []
        """Accepted, perhaps not durable: what a failure of the segment would take along."""
        self._index = Index()
        self._erasing: set[int] = set()
        """Keys whose bytes may still be on the disk although their erasure is durable."""
        self._doubtful = False
        """Whether what was read at the start may not be durable."""
        self.recovered: list[Record] = []
        """Every record that counts, in order. Empty it once it was read."""
        self.damaged = 0
        """Bytes that were found to be no record at the start."""
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
        folder = self._folder
        found = read_segments(folder)
        self._segments, self.damaged = found.segments, found.damaged
        self._next_number = found.next_number
        self._lsns = itertools.count(1 + max(found.records, default=0))
        self._recall(found.records)
        self._doubtful = True
        try:
            self._finish()
        except OSError as error:  # what is to be cut or erased stays out of reach, and is tried again
            self._note(error)

    def _recall(self, found: dict[int, Record]) -> None:
        """Find out which records still count."""
        entries = {entry.lsn: entry for segment in self._segments.values() for entry in segment.entries}
        for record in found.values():
            if record.kind == Kind.ERASE:
                self._erasing.update(decode_keys(record.payload))
        for lsn in sorted(found):
            if found[lsn].key in self._erasing:
                entries[lsn].live = False
            else:
                self._index.enter(entries[lsn])
        self.recovered = [found[lsn] for lsn in sorted(found) if entries[lsn].live and found[lsn].kind != Kind.ERASE]
        for segment in self._segments.values():
            segment.tidy()

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
        if not records:
            return
        if self._file is None:
            header = self._header()
            self._file = self._folder.create(header, b"")
            self._active = self._segments[header.number] = Segment(header)
        segment = self._active
        assert segment is not None
        data = bytearray()
        for record in records:
            data += encode_record(segment.header, segment.size + len(data), record)
        self._file.append(data)
        segment.size += len(data)

    def _place(self, records: Sequence[Record]) -> None:
        for record in records:
            assert self._active is not None
            entry = Entry(record)
            self._active.add(entry)
            self._index.enter(entry)

    def _header(self) -> Header:
        self._next_number += 1
        return Header(self._next_number - 1, self._rng.bits64())

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
            lost = {record.lsn for record in self._unsynced}
            for entry in self._active.entries:
                entry.live &= entry.lsn not in lost
        self._file = self._active = None

    def _note(self, error: OSError) -> None:
        self.trouble = f"the token log in {self._folder.path} cannot be written: {error.strerror or error}"

    # ----------------------------------------------------------------------------------------- erasure, compaction

    def erase(self, keys: Iterable[int]) -> None:
        """Remove every byte of the records with these keys; returns when they are gone, also after a crash.

        Raises OSError; the keys' records are then not read again, and their bytes go as soon as the disk works.
        """
        wanted = sorted(set(keys))
        if not wanted:
            return
        self.write([Record(self.next_lsn(), Kind.ERASE, 0, encode_keys(wanted))], sync=True)
        self._erasing.update(wanted)
        try:
            self._finish()
        except OSError as error:
            self._note(error)
            raise

    def _finish(self) -> None:
        """Write damaged segments and those with erased records anew."""
        if self._erasing:
            self._clear()
        for number, segment in sorted(self._segments.items()):
            if segment.dirty or segment.holds(self._erasing):
                if segment is self._active:
                    self._seal()
                self._rewrite([number], keep_all=False)
        self._doubtful = False
        if not self._erasing:
            return
        self._folder.sync()
        self._index.forget(self._erasing)
        self._erasing.clear()
        for segment in self._segments.values():
            for entry in segment.entries:
                entry.live &= entry.kind != Kind.ERASE

    def _clear(self) -> None:
        """Remove what is no segment: one that cannot be read, and those whose making failed halfway."""
        for ending in (DAMAGED, NEW, LOG):
            for number in self._folder.numbers(ending):
                if ending != LOG or number not in self._segments:
                    self._folder.remove(number, ending)

    def compact(self) -> bool:
        """Do a part of the work that saves space, if there is any; whether there may be more. Raises OSError."""
        closed = {
            number: segment
            for number, segment in sorted(self._segments.items())
            if segment is not self._active and not segment.stuck
        }
        chosen = [number for number, segment in closed.items() if segment.wasteful]
        if not chosen:
            chosen = [number for number, segment in closed.items() if segment.live < SEGMENT_BYTES // 2]
            if len(chosen) <= SMALL_SEGMENTS and not self._erasing:
                return False
        self.write((), sync=True)  # before what it supersedes is dropped
        if self._erasing:
            self._finish()
            return True
        group: list[int] = []
        for number in chosen:
            if group and sum(closed[one].live for one in (*group, number)) > SEGMENT_BYTES:
                break
            group.append(number)
        self._rewrite(group, keep_all=True)
        return True

    def _rewrite(self, numbers: Sequence[int], *, keep_all: bool) -> None:
        """Put what counts of these closed segments into a new one and remove them.

        `keep_all`: leave them alone if a record that counts cannot be read any more.
        """
        kept = [entry for number in numbers for entry in self._segments[number].entries if entry.live]
        entries = {entry.lsn: entry for entry in kept if entry.key not in self._erasing}
        records: dict[int, Record] = {}
        for number in numbers:
            found = scan(self._segments[number].header, self._folder.read(number)).records
            records |= {record.lsn: record for record in found if record.lsn in entries}
        if len(records) < len(entries):
            log.warning("segments %s: %d records are damaged", numbers, len(entries) - len(records))
            if keep_all:
                for number in numbers:
                    self._segments[number].stuck = True
                return
        if records:
            made = Segment(self._header())
            data = bytearray()
            for lsn in sorted(records):
                data += encode_record(made.header, HEADER_BYTES + len(data), records[lsn])
                made.entries.append(entries[lsn])
            data += encode_record(made.header, HEADER_BYTES + len(data), SEAL)
            made.size += len(data)
            self._folder.create(made.header, data).close()
            self._segments[made.header.number] = made
        for number in numbers:
            self._folder.remove(number)
            del self._segments[number]
        self._folder.sync()

    @property
    def bytes(self) -> int:
        """What the segments take."""
        return sum(segment.size for segment in tuple(self._segments.values()))

    def close(self) -> None:
        """Sync, and let others have the folder. Raises OSError where the sync fails; the folder is free then too."""
        try:
            self._seal()
        finally:
            self._abandon()
            self._lock.release()
