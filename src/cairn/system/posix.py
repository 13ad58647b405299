"""The real implementations of `interfaces`: this machine's clocks, random numbers, network and files."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import logging
import os
import secrets
import select
import socket
import stat
import struct
import sys
import time
from pathlib import Path
from typing import Literal, TextIO

from cairn.config.config import PREFIX
from cairn.system.interfaces import LOCK_FILE, FolderEntry


def without_secrets() -> dict[str, str]:
    """Return the environment without Cairn's variables and keys, for a process that gets those in a frame."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX) and name != "HF_TOKEN"}


def log_to_stderr(level: str, form: Literal["text", "json"] = "text") -> None:
    """Log to standard error from `level` on, for Cairn's own loggers only: libraries might log clients' data."""
    handler = _Patient(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else plain)
    logging.basicConfig(handlers=[handler])
    logging.getLogger("cairn").setLevel(level.upper())


FACTS = "facts"
"""Key of a log call's `extra` whose dict becomes further fields of a JSON line."""


class JsonLines(logging.Formatter):
    """Formats each record as a JSON object on one line: time, level, logger, message, and its `FACTS`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's line."""
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, object] = {
            "time": f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FACTS, {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class _Patient(logging.StreamHandler[TextIO]):
    """Drops records up to INFO while the stream cannot take more: writing to a full pipe would block this process."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or drop it if it is not important and writing would block."""
        if record.levelno > logging.INFO or _takes(self.stream):
            super().emit(record)


def _takes(stream: TextIO) -> bool:
    """Return whether a line can be written without blocking."""
    try:
        handle = stream.fileno()
    except (OSError, ValueError):  # in memory, or closed
        return True
    poll = select.poll()
    poll.register(handle, select.POLLOUT)
    return bool(poll.poll(0))


class SystemClock:
    """The machine's clocks."""

    now = staticmethod(time.monotonic)
    """Returns seconds of the monotonic clock. Without a frame of its own: each step reads it some ten times."""
    time_ns = staticmethod(time.time_ns)
    """Returns nanoseconds of the wall clock."""


class SystemRng:
    """The operating system's generator."""

    def bits64(self) -> int:
        """Return random bits from `secrets`."""
        return secrets.randbits(63)


_SIOCGIFADDR = 0x8915
"""Linux's call for an interface's address."""
_INET6 = Path("/proc/net/if_inet6")


class SystemNetwork:
    """Addresses of the machine's interfaces; if none is found, the source address of packets to the internet."""

    def addresses(self) -> list[str]:
        """Return the machine's addresses, without loopback and link-local ones."""
        import ipaddress  # for a server alone

        found = [*self._interfaces(), *self._inet6()] or self._outside()
        usual = [one for one in map(ipaddress.ip_address, found) if not (one.is_loopback or one.is_link_local)]
        return [str(one) for one in dict.fromkeys(usual)]

    @staticmethod
    def _interfaces() -> list[str]:
        found = []
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # it has no address
                    told = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    found.append(socket.inet_ntoa(told[20:24]))
        return found

    @staticmethod
    def _inet6() -> list[str]:
        try:
            lines = _INET6.read_text().splitlines()
        except OSError:
            return []
        return [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])) for line in lines]

    @staticmethod
    def _outside() -> list[str]:
        """Return the source address that a packet to the internet would have. Nothing is sent."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            try:
                sock.connect(("192.0.2.1", 9))
                return [str(sock.getsockname()[0])]
            except OSError:
                return []


class SystemFiles:
    """The machine's file system, on POSIX."""

    def open(self, path: Path, mode: Literal["read", "append", "create"]) -> SystemFile:
        """Open a regular file. Symbolic links are not followed, and child processes do not inherit the descriptor."""
        flags = {"read": os.O_RDONLY, "append": os.O_RDWR | os.O_APPEND}.get(mode)
        if flags is None:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return SystemFile(handle)

    def announce(self, path: Path) -> None:
        """Start reading a file into the system's cache by `posix_fadvise`, if the system has it."""
        advise = getattr(os, "posix_fadvise", None)
        if advise is not None:
            with contextlib.suppress(OSError), contextlib.closing(self.open(path, "read")) as file:
                advise(file.handle, 0, 0, os.POSIX_FADV_WILLNEED)

    def replace(self, source: Path, target: Path) -> None:
        """Rename by `rename(2)`, which is atomic."""
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Link by `link(2)`; a symbolic link is linked itself, not its target."""
        os.link(source, target, follow_symlinks=False)

    def remove(self, path: Path) -> None:
        """Remove by `unlink(2)`."""
        os.unlink(path)

    def make_folder(self, path: Path) -> None:
        """Make a folder and its missing parents; sync the parent of each."""
        if path.is_dir():  # maybe just made by a process that was killed before it synced the parent
            with contextlib.suppress(PermissionError):  # this user may enter the parent but not read it
                self.sync_folder(path.parent)
            return
        if path.parent != path:
            self.make_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        self.sync_folder(path.parent)

    def list(self, path: Path) -> list[FolderEntry]:
        """List a folder. Symbolic links count as files of their own; entries that vanish meanwhile are left out."""
        entries = []
        with os.scandir(path) as found:
            for one in found:
                with contextlib.suppress(FileNotFoundError):
                    facts = one.stat(follow_symlinks=False)
                    if stat.S_ISDIR(facts.st_mode):
                        entries.append(FolderEntry(one.name, 0, True, facts.st_mtime))
                    else:
                        disk = facts.st_blocks * 512
                        entries.append(FolderEntry(one.name, facts.st_size, False, facts.st_mtime, disk))
        return entries

    def mode(self, path: Path) -> int:
        """Return the permission bits of the path itself, not of a link's target."""
        return stat.S_IMODE(os.lstat(path).st_mode)

    def owned(self, path: Path) -> bool:
        """Return whether the effective user owns the file or folder."""
        return os.lstat(path).st_uid == os.geteuid()

    def touch(self, path: Path, modified: float) -> None:
        """Set the times of access and modification by `utimensat(2)`."""
        os.utime(path, (modified, modified), follow_symlinks=False)

    def sync_folder(self, path: Path) -> None:
        """Sync a folder by `fsync(2)`, which makes its names durable."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync(handle)
        finally:
            os.close(handle)

    def free(self, path: Path) -> int:
        """Return the bytes that `statvfs(2)` reports as free for an ordinary user."""
        facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize

    def lock(self, path: Path) -> SystemLock | None:
        """Lock a file in the folder by `flock(2)`; None if another process has it.

        The file is never removed: two processes could otherwise each lock one of their own.
        """
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
        return SystemLock(handle, path / LOCK_FILE)


class SystemFile:
    """An open file, by its descriptor."""

    __slots__ = ("_failed", "_handle")

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._failed: OSError | None = None

    @property
    def handle(self) -> int:
        """The descriptor."""
        return self._handle

    def read(self, offset: int, size: int) -> bytes:
        """Read by `pread(2)` until `size` bytes are there or the file ends."""
        data = os.pread(self._handle, size, offset)
        if len(data) in (0, size):
            return data
        parts, got = [data], len(data)
        while got < size and (data := os.pread(self._handle, size - got, offset + got)):
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read by `preadv(2)` until `buffer` is full or the file ends; return the number of bytes."""
        got = 0
        while got < len(buffer) and (more := os.preadv(self._handle, [buffer[got:]], offset + got)):
            got += more
        return got

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """Write by `write(2)` until all of `data` is there."""
        rest = memoryview(data).cast("B")
        while rest:
            done = os.write(self._handle, rest)
            if done == 0:
                raise OSError(errno.EIO, "nothing was written")
            rest = rest[done:]

    def truncate(self, size: int) -> None:
        """Cut the file by `ftruncate(2)`."""
        os.ftruncate(self._handle, size)

    def size(self) -> int:
        """Return the size of the open file, also after its name is removed."""
        return os.fstat(self._handle).st_size

    def disk(self) -> int:
        """Return the bytes of the file's blocks."""
        return os.fstat(self._handle).st_blocks * 512

    def sync(self) -> None:
        """Sync by `fsync(2)`. After a failure every further call fails: the kernel forgets what it could not write."""
        if self._failed is not None:
            raise OSError(self._failed.errno, "an earlier sync failed")
        try:
            _sync(self._handle)
        except OSError as error:
            self._failed = error
            raise

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            os.close(handle)


class SystemLock:
    """A lock by `flock(2)`, held while its descriptor is open."""

    __slots__ = ("_handle", "_path")

    def __init__(self, handle: int, path: Path) -> None:
        self._handle, self._path = handle, path

    def held(self) -> bool:
        """Return whether the path still names the open file; True if the disk fails to answer."""
        try:
            there = os.lstat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        try:
            return os.path.samestat(there, os.fstat(self._handle))
        except OSError as error:  # NFS reports ESTALE for a file that another machine removed
            return error.errno != errno.ESTALE

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            # A fork of this process has the file open still, and would keep the lock.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


_NO_FULL_SYNC = (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY)
"""Errors of volumes that do not support macOS' F_FULLFSYNC, such as some network volumes."""


def _sync(handle: int) -> None:
    """Sync a file as far as the drive: macOS needs a call of its own for that."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        try:
            fcntl.fcntl(handle, full)
            return
        except OSError as error:
            if error.errno not in _NO_FULL_SYNC:
                raise
    os.fsync(handle)
