"""The folder of a token log, and the reading of its segments at a start and of single records later.

    .lock                       held by the process that uses the folder
    0000000000000003.log        segments, numbered in the order of their creation
    0000000000000004.new        unfinished; removed at the next start
    0000000000000002.damaged    a segment without a readable header, kept until the next erasure

Names of files are numbers; nothing that a client chose is in them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from cairn.agents.log.index import Index, RecordLocation, Segment
from cairn.agents.log.segment import (
    HEADER_BYTES,
    SEAL,
    VERSION,
    Record,
    SegmentHeader,
    decode_header,
    decode_record,
    encode_header,
    walk,
)
from cairn.system.interfaces import LOCK_FILE, UPLOADED, File, FileSystem
from cairn.types.errors import ConfigError

LOG, NEW, DAMAGED = "log", "new", "damaged"
PIECE = 4096
"""Bytes that are read at once of a file that cannot be read as a whole: a sector of today's disks."""
MOST_UNREADABLE = 64
"""Most pieces of a segment that count as damage if they cannot be read."""


class Folder:
    """The folder of one log. Raises OSError if the disk refuses."""

    def __init__(self, files: FileSystem, path: Path) -> None:
        self._files = files
        self.path = path

    def check(self) -> None:
        """Create the folder if needed.

        Raise ConfigError unless it is private and holds only a log, and uploads to its server.
        """
        files, path = self._files, self.path
        files.make_folder(path)
        try:
            held = files.list(path)
        except NotADirectoryError:
            raise ConfigError(f"{path}: is a file; the token log needs a folder of its own") from None
        if not files.owned(path):
            raise ConfigError(f"{path}: belongs to another user; the token log needs a folder of its own")
        if files.mode(path) & 0o077:
            raise ConfigError(f"{path}: others may read it; make it private with chmod 700 {path}")
        for entry in held:
            expected = entry.name == LOCK_FILE or entry.name.startswith(UPLOADED) or _parse(entry.name) is not None
            if entry.folder or not expected:
                raise ConfigError(
                    f"{path}: holds {entry.name!r}, which is not part of a token log; name another folder"
                )

    def remove_uploads(self) -> None:
        """Remove uploads that a server left that was killed. Called with the lock held."""
        for entry in self._files.list(self.path):
            if entry.name.startswith(UPLOADED):
                with contextlib.suppress(OSError):
                    self._files.remove(self.path / entry.name)

    def numbers(self, ending: str) -> list[int]:
        """Return the numbers of the files with this ending, in order."""
        parsed = [_parse(entry.name) for entry in self._files.list(self.path)]
        return sorted(name[0] for name in parsed if name is not None and name[1] == ending)

    def name(self, number: int, ending: str = LOG) -> Path:
        """Return the path of the file with this number and ending."""
        return self.path / f"{number:016x}.{ending}"

    def create(self, header: SegmentHeader, body: bytes | bytearray) -> File:
        """Create a durable segment and return it, open for appending."""
        temporary = self.name(header.number, NEW)
        file = self._files.open(temporary, "create")
        try:
            file.append(encode_header(header) + body)
            file.sync()
            self._files.replace(temporary, self.name(header.number))
            self.sync()
        except BaseException:
            file.close()
            for path in (temporary, self.name(header.number)):
                with contextlib.suppress(OSError):
                    self._files.remove(path)
            raise
        return file

    def open(self, number: int) -> File:
        """Open a segment for reading."""
        return self._files.open(self.name(number), "read")

    def read(self, number: int) -> bytes:
        """Return the bytes of a segment, with zeros in place of a few unreadable sectors.

        Raise OSError if it cannot be opened, or if more than `MOST_UNREADABLE` pieces cannot be read: then the disk is
        at fault, maybe for a moment, and not this file.
        """
        with contextlib.closing(self.open(number)) as file:
            size = file.size()
            try:
                return file.read(0, size)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                return self._read_by_pieces(number, file, size)

    def _read_by_pieces(self, number: int, file: File, size: int) -> bytes:
        data, unreadable = bytearray(size), 0
        for start in range(0, size, PIECE):
            try:
                data[start : start + PIECE] = file.read(start, min(PIECE, size - start))
            except OSError:
                unreadable += 1
                if unreadable > min(MOST_UNREADABLE, size // PIECE):
                    raise
        log.warning("%s: %d pieces of %d bytes cannot be read", self.name(number), unreadable, PIECE)
        return bytes(data)

    def header(self, number: int) -> SegmentHeader | None:
        """Return a segment's header; None if both copies are damaged."""
        with contextlib.closing(self.open(number)) as file:
            size = min(HEADER_BYTES, file.size())
            try:
                return decode_header(file.read(0, size))
            except OSError:
                return decode_header(self._read_by_pieces(number, file, size))

    def remove(self, number: int, ending: str = LOG) -> None:
        """Remove a file; durable after `sync`."""
        self._files.remove(self.name(number, ending))

    def set_aside(self, number: int) -> None:
        """Rename a segment that cannot be read, and keep it."""
        self._files.replace(self.name(number), self.name(number, DAMAGED))

    def sync(self) -> None:
        """Make the names durable."""
        self._files.sync_folder(self.path)


def _parse(name: str) -> tuple[int, str] | None:
    stem, _, ending = name.partition(".")
    if len(stem) != 16 or stem.strip("0123456789abcdef") or ending not in (LOG, NEW, DAMAGED):
        return None
    return int(stem, 16), ending


log = logging.getLogger(__name__)

TRIES = 8
"""How often a record is looked up: compaction may move it at the same time."""


class RecoveredLog(NamedTuple):
    """What a start has read. Segments that must be rewritten are `dirty`."""

    segments: dict[int, Segment]
    records: dict[int, Record]
    """Records by lsn, erased and superseded ones included, without seals."""
    places: dict[int, tuple[int, int]]
    """(Segment number, offset) by lsn. Each has a row in its segment."""
    damaged: int
    """Bytes that are not records."""
    loss: str
    """Damage that no cut-off write explains, as the end of a sentence; empty for none."""
    next_number: int
    """A number above those of all files."""


def read_segments(folder: Folder) -> RecoveredLog:
    """Read all segments, remove unfinished files, and set aside segments without a header.

    Raise ConfigError, and change nothing, for a newer format.
    """
    headers = {number: folder.header(number) for number in folder.numbers(LOG)}
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
    for number, header in reversed(headers.items()):  # of a duplicate, the later copy is known to be durable
        data = folder.read(number)
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
    """Describe damage that no cut-off write explains.

    `aside`: files without a header. `inside`: bytes between records.
    """
    parts = [f"{aside} of its files had no readable header and were set aside as *.{DAMAGED}"] if aside else []
    parts += [f"{inside} bytes between records are damaged"] if inside else []
    return " and ".join(parts)


def look(folder: Folder) -> str:
    """Return what the log in a folder has lost, as a sentence; empty for nothing.

    Changes nothing; a server may hold the folder.
    """
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
    return loss_sentence(folder, loss(aside, inside))


def loss_sentence(folder: Folder, lost: str) -> str:
    """Return a loss as a sentence; empty for none."""
    return f"the token log in {folder.path} was damaged: {lost}; agents and turns in them are lost" if lost else ""


def _enter(
    header: SegmentHeader, data: bytes, records: dict[int, Record], places: dict[int, tuple[int, int]]
) -> tuple[Segment, int, int]:
    """Return a segment with its new records, its damaged bytes, and how many of them are at its end.

    A cut-off write leaves damaged bytes at the end.
    """
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
    """Return the records with these (kind, key) that count; None for one that does not exist or is damaged.

    Any thread may call while another writes and compacts: a record that was moved is looked up again. Raise OSError.
    """
    records: list[Record | None] = [None] * len(wanted)
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
                    records[at] = record
        before = places
        missing = [at for at in places if records[at] is None]
    return records


def _read(folder: Folder, number: int, places: Iterable[RecordLocation]) -> list[bytes]:
    """Return the bytes at these places of a segment; empty if it was removed meanwhile."""
    try:
        file = folder.open(number)
    except FileNotFoundError:
        return []
    try:
        return [file.read(place.offset, place.size) for place in places]
    finally:
        file.close()
