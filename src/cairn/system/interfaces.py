"""Time, chance and files, injectable. Scheduler, KV and agents reach the outside world through these and nothing else.

Each seam has a real implementation in `posix` and a simulated one in the tests, so that time, chance and failure can
be replayed from a seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple, Protocol


class Clock(Protocol):
    """Time."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""
        ...

    def time_ns(self) -> int:
        """Nanoseconds since 1970; may jump."""
        ...


class Rng(Protocol):
    """Chance."""

    def bits64(self) -> int:
        """Return an unpredictable integer in [0, 2**63)."""
        ...


class Network(Protocol):
    """What other machines see of this one."""

    def addresses(self) -> list[str]:
        """Return the IP addresses that others reach this machine at, IPv4 first; empty if none is known."""
        ...


LOCK_FILE = ".lock"
"""What `FileSystem.lock` leaves in a folder."""


class FolderEntry(NamedTuple):
    """What a folder lists."""

    name: str
    size: int
    """Bytes; 0 for a folder."""
    folder: bool
    modified: float
    """Seconds since 1970."""
    disk: int = 0
    """Bytes it takes on the disk, in whole blocks; 0 for a folder."""


class File(Protocol):
    """An open file. Every call raises `OSError` as the system does; a short write is an error, never silent."""

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`; fewer only where the file ends."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` with bytes from `offset`; how many: fewer than it takes only where the file ends."""
        ...

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data` at the end. After an error, any part of it may be there."""
        ...

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes."""
        ...

    def size(self) -> int:
        """Bytes in the file."""
        ...

    def disk(self) -> int:
        """Bytes that the file takes on the disk; settled once it is synced."""
        ...

    def sync(self) -> None:
        """Return when all that was written is durable. After an error nothing unsynced may be relied on, ever."""
        ...

    def close(self) -> None:
        """Close it; nothing is synced by that."""
        ...


class Lock(Protocol):
    """A folder held by this process."""

    def held(self) -> bool:
        """Whether the folder's path still leads to what is held. False once it was removed, moved or replaced."""
        ...

    def release(self) -> None:
        """Let others have it. The end of the process does the same."""
        ...


class FileSystem(Protocol):
    """Files. What is written is durable after `File.sync`; a name made, replaced or removed after `sync_folder`.

    A path that is a symbolic link is never followed in its last part: opening it is an error.
    """

    def open(self, path: Path, mode: Literal["read", "append", "create"]) -> File:
        """Open for reading, for appending to a file that exists, or a new file with mode 0600 that must not exist."""
        ...

    def announce(self, path: Path) -> None:
        """Advise the system that the file will be read soon. Return at once and never raise."""
        ...

    def replace(self, source: Path, target: Path) -> None:
        """Give the file or folder the name `target`, in the place of a file that has it, at once and whole."""
        ...

    def link(self, source: Path, target: Path) -> None:
        """Give the file the name `target` too, at once and whole. Raise FileExistsError if something has it."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file."""
        ...

    def make_folder(self, path: Path) -> None:
        """Make a folder with mode 0700, with its parents, unless it is there. What it made is durable on return."""
        ...

    def list(self, path: Path) -> list[FolderEntry]:
        """Return the folder's entries in no order. Raise FileNotFoundError if it does not exist."""
        ...

    def mode(self, path: Path) -> int:
        """Permission bits."""
        ...

    def owned(self, path: Path) -> bool:
        """Whether the file or folder belongs to the user that this process runs as."""
        ...

    def touch(self, path: Path, modified: float) -> None:
        """Set when the file was last modified, in seconds since 1970. Not durable: a crash may forget it."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Return when the folder's names are durable."""
        ...

    def free(self, path: Path) -> int:
        """Bytes that this user may still write to the disk that holds the folder."""
        ...

    def lock(self, path: Path) -> Lock | None:
        """Hold the folder for this process alone, or None where it is held. Ends with the process; leaves a file."""
        ...
