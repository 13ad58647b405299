"""The files of a token log's folder: which may be there, how one is made, read and removed.

    .lock                       held by the process that uses the folder
    0000000000000003.log        segments; the numbers give the order of their making
    0000000000000004.new        one being made; found at the start, it is removed
    0000000000000002.damaged    a segment without a readable header, kept until the next erasure

Names are numbers; nothing that a client chose is in them.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from cairn.agents.log.segment import SegmentHeader, encode_header
from cairn.system.interfaces import LOCK_FILE, File, FileSystem
from cairn.types.errors import ConfigError

LOG, NEW, DAMAGED = "log", "new", "damaged"


class Folder:
    """One log's folder. What the disk refuses is an OSError."""

    def __init__(self, files: FileSystem, path: Path) -> None:
        self._files = files
        self.path = path

    def check(self) -> None:
        """Make the folder if it is missing. Raises ConfigError unless it is ours alone and holds nothing else."""
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
            if entry.name != LOCK_FILE and (entry.folder or _parse(entry.name) is None):
                raise ConfigError(f"{path}: holds {entry.name!r}, which is no part of a token log; name another folder")

    def numbers(self, ending: str) -> list[int]:
        """The numbers of the files with this ending, in order."""
        found = [_parse(entry.name) for entry in self._files.list(self.path)]
        return sorted(one[0] for one in found if one is not None and one[1] == ending)

    def name(self, number: int, ending: str = LOG) -> Path:
        """The path of the file with this number and ending."""
        return self.path / f"{number:016x}.{ending}"

    def create(self, header: SegmentHeader, body: bytes | bytearray) -> File:
        """A durable segment under its name, open for more."""
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
        """A segment, to be read."""
        return self._files.open(self.name(number), "read")

    def read(self, number: int) -> bytes:
        """The bytes of a whole segment."""
        file = self.open(number)
        try:
            return file.read(0, file.size())
        finally:
            file.close()

    def remove(self, number: int, ending: str = LOG) -> None:
        """Remove a file; durable after `sync`."""
        self._files.remove(self.name(number, ending))

    def set_aside(self, number: int) -> None:
        """Keep a segment that cannot be read under another name."""
        self._files.replace(self.name(number), self.name(number, DAMAGED))

    def sync(self) -> None:
        """Make the names durable."""
        self._files.sync_folder(self.path)


def _parse(name: str) -> tuple[int, str] | None:
    stem, _, ending = name.partition(".")
    if len(stem) != 16 or stem.strip("0123456789abcdef") or ending not in (LOG, NEW, DAMAGED):
        return None
    return int(stem, 16), ending
