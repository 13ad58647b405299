"""Interfaces to time, chance, the network and files: everything outside the process is reached through these alone.

Each has a real implementation in `posix` and a simulated one in the tests, so that time, chance and failure can be
replayed from a seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple, Protocol


class Clock(Protocol):
    """Source of time."""

    def now(self) -> float:
        """Return seconds on a clock that never goes back."""
        ...

    def time_ns(self) -> int:
        """Return nanoseconds since 1970, by a clock that may be set."""
        ...


class Rng(Protocol):
    """Source of random numbers."""

    def bits64(self) -> int:
        """Return an unpredictable integer in [0, 2**63)."""
        ...


class Network(Protocol):
    """The machine as others see it."""

    def addresses(self) -> list[str]:
        """Return the IP addresses that others reach this machine at, IPv4 first; empty if none is known."""
        ...


LOCK_FILE = ".lock"
"""Name of the file that `FileSystem.lock` makes in a folder."""
UPLOADED = "kv-of-import-"
"""Beginning of the names of temporary files with uploads, which lie in the token log's folder."""


class FolderEntry(NamedTuple):
    """An entry of a folder's list."""

    name: str
    size: int
    """Length in bytes; 0 for a folder."""
    folder: bool
    modified: float
    """Seconds since 1970."""
    disk: int = 0
    """Bytes that it takes on the disk, in whole blocks; 0 for a folder."""


class File(Protocol):
    """An open file. Every call raises `OSError` as the system does; a short write is an error, never silent."""

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, fewer only at the end of the file."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` with bytes from `offset`; return how many, fewer than it holds only at the end of the file."""
        ...

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data` at the end. After an error, any part of it may be there."""
        ...

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes."""
        ...

    def size(self) -> int:
        """Return the file's length in bytes."""
        ...

    def disk(self) -> int:
        """Return the bytes that the file takes on the disk. Until a sync the number may still change."""
        ...

    def sync(self) -> None:
        """Return when all that was written is durable. After an error, never rely on anything that was not synced."""
        ...

    def close(self) -> None:
        """Close the file without syncing it."""
        ...


class Lock(Protocol):
    """A folder held by this process."""

    def held(self) -> bool:
        """Return whether the path still leads to the locked folder: False once it was removed, moved or replaced."""
        ...

    def release(self) -> None:
        """Release the folder. The end of the process does the same."""
        ...


class FileSystem(Protocol):
    """Files and folders. `File.sync` makes contents durable, `sync_folder` names made, replaced or removed.

    The last part of a path is never followed if it is a symbolic link: opening it is an error.
    """

    def open(self, path: Path, mode: Literal["read", "append", "create"]) -> File:
        """Open a file to read, or to append; `create` makes a new one with mode 0600 and raises if it exists."""
        ...

    def announce(self, path: Path) -> None:
        """Advise the system that the file will be read soon. Return at once and never raise."""
        ...

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file or folder to `target` atomically, replacing a file of that name."""
        ...

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name atomically. Raise FileExistsError if `target` exists."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file."""
        ...

    def make_folder(self, path: Path) -> None:
        """Make a folder and its missing parents with mode 0700. What was made is durable on return."""
        ...

    def list(self, path: Path) -> list[FolderEntry]:
        """Return the folder's entries, unordered. Raise FileNotFoundError if it does not exist."""
        ...

    def mode(self, path: Path) -> int:
        """Return the permission bits."""
        ...

    def owned(self, path: Path) -> bool:
        """Return whether the file or folder belongs to the user that this process runs as."""
        ...

    def touch(self, path: Path, modified: float) -> None:
        """Set when the file was last modified, in seconds since 1970. Not durable: a crash may forget it."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Return when the folder's names are durable."""
        ...

    def free(self, path: Path) -> int:
        """Return the bytes that this user may still write to the folder's disk."""
        ...

    def lock(self, path: Path) -> Lock | None:
        """Lock the folder for this process; None if another holds it. The file `LOCK_FILE` stays in the folder."""
        ...
