"""Time, chance and files, injectable. Scheduler, KV and agents reach the outside world through these and nothing else.

Each seam has a real implementation here and a simulated one in the tests, so that time, chance and failure can be
replayed from a seed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
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
        """An unpredictable number in [0, 2**63)."""
        ...


LOCK_FILE = ".lock"
"""What `FileSystem.lock` leaves in a folder."""


class Entry(NamedTuple):
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
        """The file will be read soon: the system may begin to bring it into memory. Waits for nothing, never raises."""
        ...

    def replace(self, source: Path, target: Path) -> None:
        """Give the file or folder the name `target`, in the place of a file that has it, at once and whole."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file."""
        ...

    def make_folder(self, path: Path) -> None:
        """Make a folder with mode 0700, with its parents, unless it is there. What it made is durable on return."""
        ...

    def list(self, path: Path) -> list[Entry]:
        """What the folder holds, in no order. `FileNotFoundError` without it."""
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


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def time_ns(self) -> int:
        """Wall clock."""
        return time.time_ns()


class SystemRng:
    """The operating system's generator."""

    def bits64(self) -> int:
        """From `secrets`."""
        return secrets.randbits(63)


class SystemFiles:
    """`FileSystem` over the machine's own. POSIX only."""

    def open(self, path: Path, mode: Literal["read", "append", "create"]) -> SystemFile:
        """Never through a symbolic link, never inherited by a child process."""
        flags = {"read": os.O_RDONLY, "append": os.O_RDWR | os.O_APPEND}.get(mode)
        if flags is None:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return SystemFile(handle)

    def announce(self, path: Path) -> None:
        """`posix_fadvise`, where there is one."""
        advise = getattr(os, "posix_fadvise", None)
        if advise is not None:
            with contextlib.suppress(OSError):
                file = self.open(path, "read")
                try:
                    advise(file.handle, 0, 0, os.POSIX_FADV_WILLNEED)
                finally:
                    file.close()

    def replace(self, source: Path, target: Path) -> None:
        """`rename`."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """`unlink`."""
        os.unlink(path)

    def make_folder(self, path: Path) -> None:
        """Each folder that is made is synced into its parent."""
        if path.is_dir():
            return
        if path.parent != path:
            self.make_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        self.sync_folder(path.parent)

    def list(self, path: Path) -> list[Entry]:
        """Links are listed as what they are, files of their own size. What vanishes meanwhile is left out."""
        entries = []
        with os.scandir(path) as found:
            for one in found:
                with contextlib.suppress(FileNotFoundError):
                    facts = one.stat(follow_symlinks=False)
                    if stat.S_ISDIR(facts.st_mode):
                        entries.append(Entry(one.name, 0, True, facts.st_mtime))
                    else:
                        disk = facts.st_blocks * 512
                        entries.append(Entry(one.name, facts.st_size, False, facts.st_mtime, disk))
        return entries

    def mode(self, path: Path) -> int:
        """Of the name itself, not of what a link leads to."""
        return stat.S_IMODE(os.lstat(path).st_mode)

    def owned(self, path: Path) -> bool:
        """By the effective user."""
        return os.lstat(path).st_uid == os.geteuid()

    def touch(self, path: Path, modified: float) -> None:
        """`utimensat`."""
        os.utime(path, (modified, modified), follow_symlinks=False)

    def sync_folder(self, path: Path) -> None:
        """`fsync` of the folder."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync(handle)
        finally:
            os.close(handle)

    def free(self, path: Path) -> int:
        """What `statvfs` leaves to an ordinary user."""
        facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize

    def lock(self, path: Path) -> SystemLock | None:
        """`flock` on a file in the folder. The file stays: removing it would let two processes hold two of them."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(path / LOCK_FILE, flags, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        return SystemLock(handle)


class SystemFile:
    """`File` over a descriptor."""

    __slots__ = ("_failed", "_handle")

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._failed: OSError | None = None

    @property
    def handle(self) -> int:
        """The descriptor."""
        return self._handle

    def read(self, offset: int, size: int) -> bytes:
        """`pread` until all is there or the file ends."""
        data = os.pread(self._handle, size, offset)
        if len(data) in (0, size):
            return data
        parts, got = [data], len(data)
        while got < size and (data := os.pread(self._handle, size - got, offset + got)):
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """`preadv` until it is full or the file ends."""
        got = 0
        while got < len(buffer) and (more := os.preadv(self._handle, [buffer[got:]], offset + got)):
            got += more
        return got

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """`write` until all is there."""
        rest = memoryview(data).cast("B")
        while rest:
            done = os.write(self._handle, rest)
            if done == 0:
                raise OSError(errno.EIO, "nothing was written")
            rest = rest[done:]

    def truncate(self, size: int) -> None:
        """`ftruncate`."""
        os.ftruncate(self._handle, size)

    def size(self) -> int:
        """Of the open file, also when its name is gone."""
        return os.fstat(self._handle).st_size

    def disk(self) -> int:
        """Its blocks."""
        return os.fstat(self._handle).st_blocks * 512

    def sync(self) -> None:
        """`fsync`. Once it failed it fails for ever: the kernel forgets what it could not write."""
        if self._failed is not None:
            raise OSError(self._failed.errno, "an earlier sync failed")
        try:
            _sync(self._handle)
        except OSError as error:
            self._failed = error
            raise

    def close(self) -> None:
        """A second call does nothing."""
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            os.close(handle)


class SystemLock:
    """A `flock`, held while its descriptor is open."""

    __slots__ = ("_handle",)

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def release(self) -> None:
        """A second call does nothing."""
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            os.close(handle)


def _sync(handle: int) -> None:
    """`fsync` as far as the drive: macOS needs its own call for that."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        fcntl.fcntl(handle, full)
    else:
        os.fsync(handle)
