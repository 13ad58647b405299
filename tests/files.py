"""A file system in memory that crashes, forgets and fails, behind the seam `cairn.system.interfaces.FileSystem`.

Every write and every change of a name is pending until it is synced. `CrashFiles.crash(rng)` returns a file system as a
power cut could leave it: each file's unsynced writes are kept, lost, cut at any byte, zeroed or garbled one by one; any
unsynced name may have changed or not, except that a later change of a name needs the earlier ones. Synced data is
always there. `after_change` is called after every change, so that a harness can crash there.

Faults: `CrashFiles.fail(Fault(at, error))` makes call number `at` (or the first one after it that can fail that way)
raise; sticky faults go on until `heal`.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cairn.system.interfaces import LOCK_FILE, FolderEntry

BLOCK = 4096
SECTOR = 512
ENDLESS = 1 << 40
"""Capacity of a disk that is never full."""

READS = {"open", "read", "list", "free", "mode", "owned", "size", "disk"}
GROWS = {"create", "append", "link", "make_folder", "lock"}
CHANGES = {
    "create",
    "append",
    "truncate",
    "sync",
    "replace",
    "link",
    "remove",
    "make_folder",
    "sync_folder",
    "touch",
    "lock",
}


class SeededRng:
    """An `Rng` that draws the same numbers every time."""

    def __init__(self, seed: int = 1) -> None:
        self._rng = random.Random(seed)

    def bits64(self) -> int:
        return self._rng.getrandbits(63)


class Crash(BaseException):
    """The machine stops here. Not an `Exception`, so that no code handles it and goes on."""


@dataclass(frozen=True)
class Fault:
    """A planned failure. `error` is an errno: `ENOSPC` and `EDQUOT` hit calls that need room, `EROFS` changes."""

    at: int
    error: int = errno.EIO
    sticky: bool = False
    short: bool = False
    """Whether an append that fails leaves a part of its data."""
    only: frozenset[str] = frozenset()
    """Kinds of calls that fail; if empty, all that the error fits."""

    def hits(self, kind: str) -> bool:
        if self.only:
            return kind in self.only
        if self.error in (errno.ENOSPC, errno.EDQUOT):
            return kind in GROWS
        if self.error == errno.EROFS:
            return kind in CHANGES - {"sync", "sync_folder"}
        return kind not in {"free", "mode", "owned", "size", "disk"}


@dataclass(eq=False)
class _Node:
    """One file: its durable content, the writes since, and what a reader sees."""

    durable: bytes = b""
    live: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """(offset, data) for a write, (size, None) for a cut."""
    modified: float = 0.0
    parted: bool = False
    """Whether a sync failed, so that readers see something else than the disk has."""

    def sync(self, failed: random.Random | None) -> None:
        """Make the pending writes durable, all or some of them."""
        if failed is not None:
            self.durable, self.parted = self.settle(failed), True
        elif self.parted:
            content = bytearray(self.durable)
            for at, data in self.pending:
                if data is None:
                    del content[at:]
                else:
                    content += bytes(max(0, at - len(content)))
                    content[at : at + len(data)] = data
            self.durable = bytes(content)
        else:
            self.durable = bytes(self.live)
        self.pending = []

    def settle(self, rng: random.Random) -> bytes:
        """Return a content that the disk may have after a crash."""
        if not self.pending or rng.random() < 0.15:
            return self.durable
        content = bytearray(self.durable)
        last = len(self.pending) if rng.random() < 0.3 else rng.randrange(1, len(self.pending) + 1)
        ordered = rng.random() < 0.3
        for number, (at, data) in enumerate(self.pending[:last]):
            fate = "kept" if ordered else rng.choice(("kept", "kept", "lost", "zero", "garbage", "sector"))
            if number == last - 1 and data and rng.random() < 0.6:
                data = data[: rng.randrange(len(data) + 1)]
            if data is None:
                if fate != "lost":
                    del content[at:]
                continue
            if fate == "lost" and number < last - 1:
                fate = "zero"
            if fate == "lost" or not data:
                continue
            if len(content) < at:
                content += bytes(at - len(content))
            content[at : at + len(data)] = _bend(data, fate, rng)
        return bytes(content)


def _bend(data: bytes, fate: str, rng: random.Random) -> bytes:
    if fate == "zero":
        return bytes(len(data))
    if fate == "garbage":
        return rng.randbytes(len(data))
    if fate == "sector":
        at = rng.randrange(len(data)) // SECTOR * SECTOR
        size = min(SECTOR, len(data) - at)
        return data[:at] + rng.choice((bytes(size), rng.randbytes(size))) + data[at + size :]
    return data


_Name = tuple[Path, "_Node | None"]
"""The change of one name: its path and new node, or None if the name is removed."""


class CrashFiles:
    """A whole file system in memory. Paths are absolute; `/` exists."""

    def __init__(self, *, seed: int = 0, capacity: int = ENDLESS, now: Callable[[], float] = lambda: 0.0) -> None:
        """Make an empty disk of `capacity` bytes. `now`: seconds since 1970."""
        self.rng = random.Random(seed)
        self.capacity = capacity
        self.now = now
        self.calls = 0
        """Calls so far, which is the number of the next one."""
        self.log: list[tuple[str, str]] | None = None
        """Kind and name of every call, if a test sets a list."""
        self.after_change: Callable[[str], None] = lambda kind: None
        """Called after every change with its kind, outside all locks; it may raise `Crash`."""
        self.announced: list[Path] = []
        self.dead = False
        self.fault: Fault | None = None
        self.fired = 0
        """How often a fault was raised."""
        self._names: dict[Path, _Node] = {}
        self._durable: dict[Path, _Node] = {}
        self._pending: list[tuple[_Name, ...]] = []
        self._folders: dict[Path, int] = {Path("/"): 0o700}
        self._modes: dict[Path, int] = {}
        self._strangers: set[Path] = set()
        self._locks: dict[Path, CrashLock] = {}
        self._mutex = threading.RLock()

    # ---------------------------------------------------------------------------------------------- crash and faults

    def crash(self, rng: random.Random) -> CrashFiles:
        """Return the disk as after a power cut now. This one goes on as if nothing had happened."""
        with self._mutex:
            after = CrashFiles(seed=rng.getrandbits(32), capacity=self.capacity, now=self.now)
            names = dict(self._durable)
            blocked: set[Path] = set()
            ordered = rng.random() < 0.4
            cut = rng.randrange(len(self._pending) + 1) if ordered else len(self._pending)
            for change in self._pending[:cut]:
                if not ordered and (any(path in blocked for path, _ in change) or rng.random() < 0.4):
                    blocked.update(path for path, _ in change)
                    continue
                if not ordered and len(change) == 2 and rng.random() < 0.1:
                    # The new name without the end of the old one.
                    blocked.update(path for path, node in change if node is None)
                    change = tuple((path, node) for path, node in change if node is not None)
                for path, node in change:
                    if node is None:
                        names.pop(path, None)
                    else:
                        names[path] = node
            contents: dict[int, bytes] = {}
            for path, node in names.items():
                content = contents.setdefault(id(node), node.settle(rng))
                kept = _Node(content, bytearray(content), [], node.modified)
                after._names[path] = after._durable[path] = kept
            after._folders = dict(self._folders)
            after._modes = {path: mode for path, mode in self._modes.items() if path in names}
            after._strangers = set(self._strangers)
            return after

    def crash_while(self, rng: random.Random, most: int, action: Callable[[], object]) -> CrashFiles:
        """Crash at one of the next `most` changes while `action` runs, or after it."""
        left = rng.randrange(most)
        after: CrashFiles | None = None

        def stop(_: str) -> None:
            nonlocal left, after
            left -= 1
            if left < 0 and after is None:
                after = self.crash(rng)
                self.dead = True
                raise Crash

        self.after_change = stop
        try:
            action()
        except Crash:
            assert after is not None
            return after
        self.after_change = lambda _: None
        return self.crash(rng)

    def kill(self) -> CrashFiles:
        """Return the disk that the next process finds after a kill: all content, no locks. This one is dead."""
        with self._mutex:
            after = CrashFiles(seed=self.rng.getrandbits(32), capacity=self.capacity, now=self.now)
            after._names, after._durable = dict(self._names), dict(self._durable)
            after._pending, after._folders = list(self._pending), dict(self._folders)
            after._modes, after._strangers = dict(self._modes), set(self._strangers)
            self.dead = True
            return after

    def fail(self, fault: Fault) -> None:
        """Plan a fault; `fault.at` counts calls from the beginning of this file system."""
        self.fault = fault

    def heal(self) -> None:
        """Remove all faults."""
        self.fault = None

    # ------------------------------------------------------------------------------------------------- for harnesses

    def files(self, folder: Path | None = None) -> dict[Path, bytes]:
        """Return every file below a folder as a reader sees it."""
        start = f"{folder}/"
        with self._mutex:
            return {
                path: bytes(node.live)
                for path, node in self._names.items()
                if folder is None or str(path).startswith(start)
            }

    def put(self, path: Path, data: bytes) -> None:
        """Write a whole, durable file over what is there: for damage, or a foreign file."""
        with self._mutex:
            self._names[path] = self._durable[path] = _Node(data, bytearray(data), [], self.now())
            self._pending = [change for change in self._pending if all(name != path for name, _ in change)]

    def damage(self, path: Path, at: int) -> None:
        """Flip one bit of a byte, also for open files; a second call flips it back."""
        with self._mutex:
            node = self._names[path]
            node.live[at] ^= 1
            if at < len(node.durable):
                node.durable = node.durable[:at] + bytes([node.durable[at] ^ 1]) + node.durable[at + 1 :]

    def vanish(self, path: Path) -> None:
        """Remove a file behind the back of its users."""
        with self._mutex:
            self._names.pop(path, None)
            self._durable.pop(path, None)
            self._pending = [change for change in self._pending if all(name != path for name, _ in change)]

    def chmod(self, path: Path, mode: int) -> None:
        self._modes[path] = mode
        if path in self._folders:
            self._folders[path] = mode

    def disown(self, path: Path) -> None:
        """Give the file or folder to another user."""
        self._strangers.add(path)

    def used(self) -> int:
        """The bytes taken on the disk; counted only if it has a capacity."""
        if self.capacity >= ENDLESS:
            return 0
        with self._mutex:
            return sum(_blocks(len(node.live)) for node in {id(n): n for n in self._names.values()}.values())

    # ------------------------------------------------------------------------------------------------------ the seam

    def open(self, path: Path, mode: Literal["read", "append", "create"]) -> CrashFile:
        kind = "create" if mode == "create" else "open"
        with self._call(kind, path):
            node = self._names.get(path)
            if mode == "create":
                self._parent(path)
                if node is not None or path in self._folders:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
                if self.used() + BLOCK > self.capacity:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                node = _Node(modified=self.now())
                self._change((path, node))
            elif node is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        self._changed(kind)
        return CrashFile(self, node, path, writable=mode != "read")

    def announce(self, path: Path) -> None:
        self.announced.append(path)

    def replace(self, source: Path, target: Path) -> None:
        with self._call("replace", source):
            if source in self._folders:
                self._move_folder(source, target)
            else:
                node = self._get(source)
                self._parent(target)
                if target in self._folders:
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
                self._change((target, node), (source, None))
        self._changed("replace")

    def link(self, source: Path, target: Path) -> None:
        with self._call("link", target):
            node = self._get(source)
            self._parent(target)
            if target in self._names or target in self._folders:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
            self._change((target, node))
        self._changed("link")

    def remove(self, path: Path) -> None:
        with self._call("remove", path):
            self._get(path)
            self._change((path, None))
        self._changed("remove")

    def make_folder(self, path: Path) -> None:
        with self._call("make_folder", path):
            for folder in () if path in self._folders else (path, *path.parents):
                if folder in self._names:
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
                self._folders.setdefault(folder, 0o700)
        self._changed("make_folder")

    def list(self, path: Path) -> list[FolderEntry]:
        with self._call("list", path):
            if path not in self._folders:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            # Strings: a path's parent is slow, and harnesses list a million folders.
            start = f"{path}/".replace("//", "/")
            size = len(start)
            entries = []
            for folder in self._folders:
                if (text := str(folder)).startswith(start) and "/" not in text[size:] and text != start:
                    entries.append(FolderEntry(text[size:], 0, True, 0.0))
            for folder, node in self._names.items():
                if (text := str(folder)).startswith(start) and "/" not in text[size:]:
                    live = len(node.live)
                    entries.append(FolderEntry(text[size:], live, False, node.modified, _blocks(live)))
        self.rng.shuffle(entries)
        return entries

    def mode(self, path: Path) -> int:
        with self._call("mode", path):
            if path in self._folders:
                return self._folders[path]
            self._get(path)
            return self._modes.get(path, 0o600)

    def owned(self, path: Path) -> bool:
        with self._call("owned", path):
            if path not in self._folders:
                self._get(path)
            return path not in self._strangers

    def touch(self, path: Path, modified: float) -> None:
        with self._call("touch", path):
            self._get(path).modified = modified
        self._changed("touch")

    def sync_folder(self, path: Path) -> None:
        with self._call("sync_folder", path):
            if path not in self._folders:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            rest = []
            needed: set[Path] = set()
            # A synced change takes along the earlier ones of the same names.
            for change in reversed(self._pending):
                if any(name.parent == path or name in needed for name, _ in change):
                    needed.update(name for name, _ in change)
            for change in self._pending:
                if any(name in needed for name, _ in change):
                    self._settle(change)
                else:
                    rest.append(change)
            self._pending = rest
        self._changed("sync_folder")

    def free(self, path: Path) -> int:
        with self._call("free", path):
            return max(0, self.capacity - self.used())

    def lock(self, path: Path) -> CrashLock | None:
        with self._call("lock", path):
            if path not in self._folders:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            if path in self._locks:
                return None
            if path / LOCK_FILE not in self._names:
                self._change((path / LOCK_FILE, _Node(modified=self.now())))
            lock = self._locks[path] = CrashLock(self, path)
        self._changed("lock")
        return lock

    # ------------------------------------------------------------------------------------------------------- within

    def _call(self, kind: str, path: Path) -> _Call:
        return _Call(self, kind, path)

    def _changed(self, kind: str) -> None:
        if kind in CHANGES:
            self.after_change(kind)

    def _strike(self, kind: str, path: Path) -> Fault | None:
        """Count a call; return the fault that hits it, if any."""
        if self.dead:
            raise Crash
        number, self.calls = self.calls, self.calls + 1
        if self.log is not None:
            self.log.append((kind, path.name))
        fault = self.fault
        if fault is None or number < fault.at or not fault.hits(kind):
            return None
        self.fired += 1
        if not fault.sticky:
            self.fault = None
        return fault

    def _get(self, path: Path) -> _Node:
        node = self._names.get(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return node

    def _parent(self, path: Path) -> None:
        if path.parent not in self._folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def _change(self, *change: _Name) -> None:
        for path, node in change:
            if node is None:
                self._names.pop(path, None)
            else:
                self._names[path] = node
        self._pending.append(change)

    def _settle(self, change: tuple[_Name, ...]) -> None:
        for path, node in change:
            if node is None:
                self._durable.pop(path, None)
            else:
                self._durable[path] = node

    def _move_folder(self, source: Path, target: Path) -> None:
        """Move a folder durably at once: no test needs half a move."""
        if target in self._names or any(path.is_relative_to(target) for path in self._folders):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(target))
        self._parent(target)

        def moved(path: Path) -> Path:
            return target / path.relative_to(source) if path.is_relative_to(source) else path

        self._names = {moved(path): node for path, node in self._names.items()}
        self._durable = {moved(path): node for path, node in self._durable.items()}
        self._folders = {moved(path): mode for path, mode in self._folders.items()}
        self._pending = [tuple((moved(path), node) for path, node in change) for change in self._pending]
        self._locks = {moved(path): lock for path, lock in self._locks.items()}


class _Call:
    """One call of the file system: counted, exclusive, and failing if a fault hits it."""

    def __init__(self, files: CrashFiles, kind: str, path: Path) -> None:
        self._files, self._kind, self._path = files, kind, path

    def __enter__(self) -> None:
        self._files._mutex.acquire()
        try:
            fault = self._files._strike(self._kind, self._path)
            if fault is not None:
                raise OSError(fault.error, os.strerror(fault.error), str(self._path))
        except BaseException:
            self._files._mutex.release()
            raise

    def __exit__(self, *error: object) -> None:
        self._files._mutex.release()


class CrashFile:
    """An open file of `CrashFiles`."""

    def __init__(self, files: CrashFiles, node: _Node, path: Path, *, writable: bool) -> None:
        self._files, self._node, self._path, self._writable = files, node, path, writable
        self._closed = False

    def read(self, offset: int, size: int) -> bytes:
        with self._call("read"):
            return bytes(self._node.live[offset : offset + size])

    def read_into(self, offset: int, buffer: memoryview) -> int:
        with self._call("read"):
            data = self._node.live[offset : offset + len(buffer)]
            buffer[: len(data)] = data
            return len(data)

    def append(self, data: bytes | bytearray | memoryview) -> None:
        files, node, data = self._files, self._node, bytes(data)
        with files._mutex:
            self._check(writing=True)
            fault = files._strike("append", self._path)
            error = fault.error if fault else 0
            if fault:
                data = data[: files.rng.randrange(len(data) + 1)] if fault.short else b""
            room = files.capacity - files.used() + _blocks(len(node.live)) - len(node.live)
            if len(data) > room:
                data, error = data[: max(0, room)], error or errno.ENOSPC
            if data:
                node.pending.append((len(node.live), data))
                node.live += data
                node.modified = files.now()
        files._changed("append")
        if error:
            raise OSError(error, os.strerror(error), str(self._path))

    def truncate(self, size: int) -> None:
        with self._call("truncate", writing=True):
            node = self._node
            if size > len(node.live):
                node.pending.append((len(node.live), bytes(size - len(node.live))))
                node.live += bytes(size - len(node.live))
            else:
                node.pending.append((size, None))
                del node.live[size:]
        self._files._changed("truncate")

    def size(self) -> int:
        with self._call("size"):
            return len(self._node.live)

    def disk(self) -> int:
        with self._call("disk"):
            return _blocks(len(self._node.live))

    def sync(self) -> None:
        files, node = self._files, self._node
        with files._mutex:
            self._check(writing=True)
            fault = files._strike("sync", self._path)
            # After a failure the system thinks the pages clean: readers may see them, the disk may never.
            node.sync(files.rng if fault else None)
        files._changed("sync")
        if fault:
            raise OSError(fault.error, os.strerror(fault.error), str(self._path))

    def close(self) -> None:
        self._closed = True

    def _check(self, *, writing: bool = False) -> None:
        if self._closed or (writing and not self._writable):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(self._path))

    def _call(self, kind: str, *, writing: bool = False) -> _Call:
        self._check(writing=writing)
        return self._files._call(kind, self._path)


class CrashLock:
    def __init__(self, files: CrashFiles, path: Path) -> None:
        self._files, self._path = files, path

    def held(self) -> bool:
        with self._files._mutex:
            return self._files._locks.get(self._path) is self and self._path / LOCK_FILE in self._files._names

    def release(self) -> None:
        with self._files._mutex:
            if self._files._locks.get(self._path) is self:
                del self._files._locks[self._path]


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def corrupted(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes with one kind of damage."""
    kind, at = rng.randrange(6), rng.randrange(len(data))
    if kind <= 1:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == 2:
        start = at // 512 * 512
        return data[:start] + bytes(min(512, len(data) - start)) + data[start + 512 :]
    if kind == 3:
        return data[:at]
    if kind == 4:
        return data + data[at:]
    size = rng.randrange(1, 200)
    other = rng.randrange(len(data))
    return (data[:at] + data[other : other + size] + data[at + size :])[: len(data)]
