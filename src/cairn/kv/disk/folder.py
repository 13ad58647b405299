"""The folder of a disk store: its owner and format, its scan, and single files in it.

    <folder>/cairn-kv-store        the marker: that this is a store, and its format
    <folder>/.lock                 held by the process that has it open
    <folder>/pins/                 see `pins`
    <folder>/0/ ... <folder>/f/    chunks, by the first digit of their key; see `chunk_file`
    <folder>/models/               where models share the folder: a store for each; see `model_folders`

Files are written under a name that starts with `tmp-` and renamed when they are durable. A file with such a name at a
start is a leftover.
"""

from __future__ import annotations

import contextlib
import errno
import re
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cairn.kv.disk.chunk_file import FORMAT, MOST_BEFORE_PAGES, Name, parse_name, tokens_of
from cairn.system.interfaces import LOCK_FILE, Clock, FileSystem, FolderEntry, Lock
from cairn.types.errors import ConfigError, Conflict

MARKER = "cairn-kv-store"
PINS = "pins"
OF_MODELS = "models"
DIGITS = "0123456789abcdef"
_TEMPORARY = "tmp-"
_BLOCK = 4096
_PROBE = b"cairn" * 800
PROBE_BYTES = _BLOCK
"""Bytes of a probe on the disk."""


@dataclass(slots=True)
class FolderScan:
    """The result of a scan at a start. Bytes are on the disk."""

    chunks: list[tuple[Name, int, float]] = field(default_factory=list)
    """Name, bytes and time of each file that has a chunk's name and the size that the name says."""
    pins: list[FolderEntry] = field(default_factory=list)
    """Files that may be pins."""
    junk: list[tuple[Path, int]] = field(default_factory=list)
    """Path and bytes of useless files: leftovers, cut or misplaced chunks."""
    other: int = 0
    """Bytes of all other files."""


def open_folder(
    files: FileSystem,
    folder: Path,
    clock: Clock,
    *,
    fresh: bool,
    patience: float,
    sleep: Callable[[float], None],
    bare: bool = False,
) -> Lock:
    """Lock the folder after making or checking it; `bare`: without the folders of chunks and pins.

    Raise `ConfigError` for a folder that is not a store, that others may enter or that a newer Cairn wrote; with
    `fresh` rename it and make a new one instead. Raise `Conflict`, also with `fresh`, if another process still holds it
    after `patience` seconds.
    """
    try:
        check_folder(files, folder)
    except ConfigError:
        if not fresh:
            raise
        _set_aside(files, folder, clock, patience, sleep)
    files.make_folder(folder)
    lock = _wait(files, folder, clock, patience, sleep)
    try:
        if not check_folder(files, folder):
            _mark(files, folder)
        if not bare:
            make_folders(files, folder)
        # Names are relied on from here on, also those that a killed process had not synced.
        for name in ("",) if bare else ("", PINS, *DIGITS):
            files.sync_folder(folder / name)
    except BaseException:
        lock.release()
        raise
    return lock


def make_folders(files: FileSystem, folder: Path) -> None:
    """Make the folders of pins and chunks."""
    for name in (PINS, *DIGITS):
        files.make_folder(folder / name)


def _set_aside(files: FileSystem, folder: Path, clock: Clock, patience: float, sleep: Callable[[float], None]) -> None:
    """Rename the folder, unless a process has it open: that one would continue by its path in the new folder."""
    lock = None
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # then nobody holds it
        if files.owned(folder) and any(entry.name == LOCK_FILE for entry in files.list(folder)):
            lock = _wait(files, folder, clock, patience, sleep)
    try:
        files.replace(folder, folder.with_name(f"{folder.name}.aside-{clock.time_ns()}"))
        files.sync_folder(folder.parent)
    finally:
        if lock is not None:
            lock.release()


def _wait(files: FileSystem, folder: Path, clock: Clock, patience: float, sleep: Callable[[float], None]) -> Lock:
    """Lock the folder; wait for a process that is about to end. Raise `Conflict` after `patience` seconds."""
    until = clock.now() + patience
    while (lock := files.lock(folder)) is None:
        if clock.now() >= until:
            raise Conflict(
                f"kv_dir: {folder} is in use by another process, which did not release it within {patience:g} s"
            )
        sleep(0.1)
    return lock


def check_folder(files: FileSystem, folder: Path) -> bool:
    """Return whether there is a store, False if there is nothing. Raise `ConfigError` for anything else."""
    try:
        mode = files.mode(folder)
    except FileNotFoundError:
        return False
    if not files.owned(folder):
        raise ConfigError(f"kv_dir: {folder} belongs to another user", field="kv_dir")
    if mode & 0o077:
        raise ConfigError(
            f"kv_dir: {folder} is open to others (mode {mode:04o}); it must have mode 0700", field="kv_dir"
        )
    try:
        names = {entry.name for entry in files.list(folder)}
    except NotADirectoryError:
        raise ConfigError(f"kv_dir: {folder} is not a folder", field="kv_dir") from None
    if MARKER not in names:
        if any(name not in (LOCK_FILE, OF_MODELS) and not name.startswith(_TEMPORARY) for name in names):
            raise ConfigError(f"kv_dir: {folder} is not empty and not a KV store of Cairn", field="kv_dir")
        return False
    with contextlib.closing(files.open(folder / MARKER, "read")) as file:
        text = file.read(0, 100)
    said = re.fullmatch(rb"cairn kv store ([1-9][0-9]{0,8})\n", text)
    if said is None:
        raise ConfigError(f"kv_dir: {folder / MARKER} is not a marker of Cairn", field="kv_dir")
    if int(said[1]) > FORMAT:
        raise ConfigError(
            f"kv_dir: {folder} has format {int(said[1])} of a newer Cairn; this one reads up to {FORMAT}",
            field="kv_dir",
        )
    return True


def _mark(files: FileSystem, folder: Path) -> None:
    temporary = folder / (_TEMPORARY + MARKER)
    with contextlib.suppress(FileNotFoundError):
        files.remove(temporary)
    with contextlib.closing(files.open(temporary, "create")) as file:
        file.append(f"cairn kv store {FORMAT}\n".encode())
        file.sync()
    files.replace(temporary, folder / MARKER)
    files.sync_folder(folder)


def held(files: FileSystem, folder: Path, most: int) -> int:
    """Return the bytes of the chunks in a folder by their names; stop counting at `most`."""
    size = 0
    for digit in DIGITS:
        if size < most:
            names = (parse_name(entry.name) for entry in files.list(folder / digit))
            size += sum(name.size for name in names if name is not None)
    return min(size, most)


class StoreFolder:
    """The files in a folder that is locked. Calls raise `OSError` as the system does. Any thread."""

    def __init__(self, files: FileSystem, folder: Path) -> None:
        self.files = files
        self.folder = folder
        self._next = 0
        self._mutex = threading.Lock()
        self._litter: dict[Path, int] = {}
        """Files that should be gone but could not be removed, with their bytes."""

    @property
    def littered(self) -> int:
        """Bytes of files that should be gone."""
        with self._mutex:
            return sum(self._litter.values())

    def path(self, name: Name) -> Path:
        """Return the path of a chunk's file."""
        return self.digit(name.key) / str(name)

    def digit(self, key: bytes) -> Path:
        """Return the folder of the chunks whose keys start like this one."""
        return self.folder / key.hex()[0]

    def digits(self) -> list[Path]:
        """Return the folders of all chunks."""
        return [self.folder / digit for digit in DIGITS]

    def scan(self) -> FolderScan:
        """List the folder by names and sizes, without reading a file."""
        found = FolderScan()
        for entry in self._sift(self.folder, found):
            found.other += entry.disk
        for digit in DIGITS:
            folder = self.folder / digit
            for entry in self._sift(folder, found):
                name = None if entry.folder else parse_name(entry.name)
                if name is None:
                    found.other += entry.disk
                elif name.size == entry.size and entry.name[0] == digit:
                    found.chunks.append((name, entry.disk, entry.modified))
                else:
                    found.junk.append((folder / entry.name, entry.disk))
        found.pins = list(self._sift(self.folder / PINS, found))
        return found

    def _sift(self, folder: Path, found: FolderScan) -> Iterator[FolderEntry]:
        """Yield the entries that are not leftovers; add those to the junk."""
        for entry in self.files.list(folder):
            if entry.name.startswith(_TEMPORARY) and not entry.folder:
                found.junk.append((folder / entry.name, entry.disk))
            else:
                yield entry

    def read(self, name: Name, buffer: memoryview | None = None) -> bytes | memoryview:
        """Return the whole file, in `buffer` if it has room.

        A file that is longer than its name says is read one byte further, which shows it.
        """
        with contextlib.closing(self.files.open(self.path(name), "read")) as file:
            if buffer is None or len(buffer) <= name.size:
                return file.read(0, name.size + 1)
            return buffer[: file.read_into(0, buffer[: name.size + 1])]

    def read_tokens(self, name: Name) -> tuple[int, ...]:
        """Return the tokens of a chunk without reading its pages. Raise `DamagedChunk` and `OSError`."""
        with contextlib.closing(self.files.open(self.path(name), "read")) as file:
            return tokens_of(file.read(0, MOST_BEFORE_PAGES), name)

    def announce(self, name: Name) -> None:
        """Tell the disk that a chunk's file will be read soon."""
        self.files.announce(self.path(name))

    def remove(self, name: Name) -> None:
        """Remove a chunk's file if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.files.remove(self.path(name))

    def remove_leftovers(self) -> None:
        """Remove what a killed process left beside the chunks' folders.

        For a caller that has written nothing yet and does not `scan`: `write` would try the same name.
        """
        found = FolderScan()
        for _ in self._sift(self.folder, found):
            pass
        for path, _ in found.junk:
            self.files.remove(path)

    def write(self, folder: Path, parts: list[bytes | memoryview]) -> tuple[Path, int]:
        """Write a new durable file under a temporary name; return its path and bytes on the disk.

        Nothing is left if that fails. For some seconds after a sync ZFS reports next to no bytes for the file, so never
        fewer are counted than were written.
        """
        with self._mutex:
            self._next += 1
            while (temporary := folder / f"{_TEMPORARY}{self._next}") in self._litter:
                self._next += 1
        file = self.files.open(temporary, "create")
        try:
            try:
                for part in parts:
                    file.append(part)
                file.sync()
                return temporary, max(file.disk(), blocks(sum(len(part) for part in parts)))
            finally:
                file.close()
        except OSError:
            self.discard(temporary, sum(len(part) for part in parts))
            raise

    def replace(self, path: Path, parts: list[bytes | memoryview]) -> int:
        """Write a file as `write` does and rename it to `path`; return its bytes on the disk.

        After an error, what was at `path` is still there. The caller makes the name durable.
        """
        temporary, size = self.write(path.parent, parts)
        try:
            self.files.replace(temporary, path)
        except OSError:
            self.discard(temporary, size)
            raise
        return size

    def discard(self, path: Path, size: int) -> None:
        """Remove a file; if that fails, `tidy` removes it later."""
        try:
            self.files.remove(path)
        except FileNotFoundError:
            pass
        except OSError:
            with self._mutex:
                self._litter[path] = blocks(size)

    def tidy(self) -> Iterator[Path]:
        """Remove the files that could not be removed before; yield each one's folder just before.

        One thread at a time.
        """
        with self._mutex:
            paths = list(self._litter)
        for path in paths:
            yield path.parent
            with contextlib.suppress(FileNotFoundError):
                self.files.remove(path)
            with self._mutex:
                del self._litter[path]

    def is_litter(self, path: Path) -> bool:
        """Return whether the path is that of a file that should be gone."""
        with self._mutex:
            return path in self._litter

    def remains(self, ids: Collection[bytes]) -> bool:
        """Return whether a chunk with one of these ids (tag and key) has a file that should be gone."""
        with self._mutex:
            names = [parse_name(path.name) for path in self._litter]
        return any(name is not None and name.tag + name.key in ids for name in names)

    def marked(self) -> bool:
        """Return whether the marker is there."""
        try:
            self.files.mode(self.folder / MARKER)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def probe(self) -> None:
        """Write, sync, read and remove a file. Make folders that somebody removed."""
        make_folders(self.files, self.folder)
        path, size = self.write(self.folder, [_PROBE])
        try:
            with contextlib.closing(self.files.open(path, "read")) as file:
                if file.read(0, len(_PROBE)) != _PROBE:
                    raise OSError(errno.EIO, "what was written does not read the same")
        finally:
            self.discard(path, size)

    def free(self) -> int:
        """Return the free bytes of the disk."""
        return self.files.free(self.folder)


def blocks(size: int) -> int:
    """Return the bytes on the disk of a file of `size` bytes, assuming blocks of the usual size."""
    return -(-size // _BLOCK) * _BLOCK
