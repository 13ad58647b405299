"""The disk budget, and what else the threads of a disk store share: the index, the folder, and whether the disk works.

`mutex` guards the index and the figures and is never held during a disk access. A chunk's file belongs to one thread at
a time: to the one that writes it (`writing`), or to the one that deleted the chunk, until its file is gone.
"""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from cairn.kv.disk.chunk_file import Name
from cairn.kv.disk.folder import StoreFolder
from cairn.kv.disk.index import STATE_SAVES, DiskIndex, IndexEntry
from cairn.kv.tiers.store import HEAD_BYTES, OVERHEAD
from cairn.system.interfaces import Clock
from cairn.types.stats import TierStats

T = TypeVar("T")

_USE_STEP = 60.0
"""Seconds: resolution at which the time of the last use is saved."""
_JUMP_SECONDS = 86400.0
"""How far the wall clock must jump before the times of all files are corrected: that costs a disk access for each, and
the time to live is counted in days."""
_BACKOFF = (1.0, 60.0)
_LATE_SECONDS = 60.0
"""How long a disk may take to show the room of a removed file. ZFS and btrfs take seconds; if a snapshot holds the
file, it never shows."""
_MOST_LOST = 1 << 16
_MOST_FAULTS = 2
"""Consecutive failed reads of one chunk, while the disk works otherwise, after which the chunk is given up."""


class DiskState:
    """The chunks of one folder, in memory. Any thread."""

    def __init__(
        self, folder: StoreFolder, clock: Clock, reserve: int, tag: bytes = b"", state_sizes: Collection[int] = ()
    ) -> None:
        """Start with an empty index and no budget.

        `reserve`: bytes of the disk that the store never grows into; when fewer than a quarter of them are free it
        evicts. `tag`, `state_sizes`: of the store's own engine, and the encoded sizes of its states.
        """
        self.folder, self.clock = folder, clock
        self._tag, self._state_sizes = tag, tuple(state_sizes)
        self.mutex = threading.Lock()
        self.index = DiskIndex()
        self.budget = 0
        """Most bytes that the store may take."""
        self.reserved = 0
        """Bytes of the budget for chunks that are being written."""
        self.writing: set[bytes] = set()
        """Ids of chunks that are being written."""
        self.dropped: set[bytes] = set()
        """Those of `writing` that were dropped meanwhile."""
        self.lost = OrderedDict[bytes, None]()
        """Tag and head of blocks whose chunk was removed lately because it was damaged."""
        self.used = OrderedDict[bytes, IndexEntry]()
        """Chunks whose last use is not saved in their files' times yet."""
        self._reserve = reserve
        self._free_before, self._freed, self._freed_at = 0, 0, 0.0
        """For evictions that make room for other users of the disk: its free bytes before the first of them, the bytes
        evicted since that it may not report as free yet, and when the first of those were evicted."""
        self._unsynced: dict[Path, object] = {}
        """Folders whose sync failed, each with a mark of its last failure."""
        self._counts = TierStats()
        self._trouble, self._full = "", ""
        self._next_try, self._backoff = 0.0, _BACKOFF[0]
        # The wall clock is read once: if it jumps while the store is open, chunks must not suddenly be old.
        self._epoch = clock.time_ns() / 1e9 - clock.now()
        self._jumped = 0.0
        """How far the wall clock was ahead of `now` when the times of all files were corrected last."""

    def entry(self, name: Name, disk: int, used: float) -> IndexEntry:
        """Return a chunk for the index. Its size says whether it is a state, so that a start reads no file."""
        parent = name.tag + name.parent if name.parent else b""
        beyond = (name.size - size for size in self._state_sizes if name.tag == self._tag)
        saves = STATE_SAVES if any(0 < more <= OVERHEAD for more in beyond) else 1
        return IndexEntry(name.tag + name.key, parent, name, disk, used, used, saves=saves)

    def now(self) -> float:
        """Return seconds since 1970 that never go back."""
        return self._epoch + self.clock.now()

    def ahead(self) -> float:
        """Return how far the wall clock, on which the next start relies, is ahead of `now`.

        If it jumped, the uses of all chunks are to be saved again.
        """
        ahead = self.clock.time_ns() / 1e9 - self.now()
        with self.mutex:
            if abs(ahead - self._jumped) >= _JUMP_SECONDS:
                self._jumped = ahead
                self.used = OrderedDict((one.id, one) for one in self.index.live())
        return ahead

    def take_used(self) -> IndexEntry | None:
        """Take the next chunk whose file's time is to be set to its last use; None if there is none."""
        with self.mutex:
            return self.used.popitem(last=False)[1] if self.used else None

    def put_back(self, entry: IndexEntry) -> None:
        """Append a chunk whose file's time could not be set, so that it does not block the others."""
        with self.mutex:
            if self.index.get(entry.id) is entry:
                self.used.setdefault(entry.id, entry)

    def emptied(self) -> None:
        """Forget all chunks, since the folder is gone. With the mutex held."""
        self.index, self.used = self.index.emptied(), OrderedDict()

    def stats(self) -> TierStats:
        """Return figures of all models in the folder."""
        with self.mutex:
            return msgspec.structs.replace(
                self._counts,
                chunks=len(self.index),
                bytes=self.index.bytes + self.folder.littered,
                budget=self.budget,
                pinned=self.index.pinned,
                trouble=self._trouble or self._full or self._crowded(),
            )

    def _crowded(self) -> str:
        """Return a message if more is pinned than the budget holds; else an empty string. With the mutex held."""
        need = self.index.pinned_bytes
        if need <= self.budget:
            return ""
        return (
            f"pinned KV needs about {need:,} bytes and {self.folder.folder} may take {self.budget:,}: not all of it "
            "can be kept; unpin some, or raise --kv-disk-gb"
        )

    @property
    def damaged(self) -> int:
        """Chunks that failed a check so far; cheaper than `stats`."""
        return self._counts.damaged

    def count(self, **more: int) -> None:
        """Add to the counters. With the mutex held."""
        now = {name: getattr(self._counts, name) + value for name, value in more.items()}
        self._counts = msgspec.structs.replace(self._counts, **now)

    def use(self, entry: IndexEntry) -> None:
        """Record a use of a chunk. With the mutex held."""
        self.index.use(entry, self.now())
        self._note_use(entry)

    def mark_deleted(self, entry: IndexEntry) -> None:
        """Hide a chunk from lookups; its parent inherits its last use. With the mutex held."""
        self.index.mark_deleted(entry)
        parent = self.index.get(entry.parent)
        if parent is not None:
            self._note_use(parent)

    def _note_use(self, entry: IndexEntry) -> None:
        if entry.used - entry.saved >= _USE_STEP:
            self.used[entry.id] = entry

    # ------------------------------------------------------------------------------------------------------- trouble

    @property
    def failing(self) -> bool:
        """Whether the disk failed and has not worked since."""
        return bool(self._trouble)

    def fail(self, action: str, error: OSError | str) -> None:
        """Record that the disk refused. Nothing is written until it is tried again, after 1, 2, 4 ... 60 seconds."""
        why = error if isinstance(error, str) else error.strerror or type(error).__name__
        with self.mutex:
            self._trouble = f"the KV store cannot {action} {self.folder.folder}: {why}"
            if self.clock.now() >= self._next_try:
                self._next_try = self.clock.now() + self._backoff
                self._backoff = min(2 * self._backoff, _BACKOFF[1])

    @property
    def due(self) -> bool:
        """Whether it is time to try a failed disk again."""
        return self.failing and self.clock.now() >= self._next_try

    def works(self) -> None:
        """Record that a trial of the disk succeeded."""
        with self.mutex:
            self._trouble = ""

    def wrote(self) -> None:
        """Reset the back-off: a chunk was written, which proves more than a trial."""
        with self.mutex:
            if not self._trouble:
                self._backoff = _BACKOFF[0]

    # ---------------------------------------------------------------------------------------------------------- room

    def make_room(self, need: int, *, reserve: bool = False) -> bool:
        """Evict until `need` more bytes fit into the budget and on the disk; return False if they cannot.

        `reserve`: also reserve them in the budget.
        """
        freed = given = before = 0
        while True:
            try:
                free = self.folder.free()
            except OSError as error:
                self.fail("read", error)
                return False
            with self.mutex:
                over = self.index.bytes + self.folder.littered + self.reserved + need - self.budget
                # On a disk that others fill the store does not grow, but it may reuse what it freed itself.
                lack = need - max(free - self._reserve, freed) if need else 0
                if given and free > before:  # this disk shows freed room at once
                    self._freed = max(0, self._freed - given)
                owed = self._owed_to_others(free)
                lack = max(lack, owed)
                if over <= 0 and lack <= 0:
                    self.reserved += need if reserve else 0
                    if need:
                        self._full = ""
                    return True
                victims = [] if need > self.budget else self._delete_victims(max(over, lack))
                given, before = min(max(0, owed), sum(one.disk for one in victims)), free
                self._freed_at = self._freed_at if self._freed else self.clock.now()
                self._freed += given
            cleared = self.clear(victims)
            freed += sum(one.disk for one in victims)
            with self.mutex:
                self.count(evicted=cleared)
                if cleared < max(1, len(victims)):
                    if lack > 0:
                        self._full = self._no_room(free)
                    return False

    def _no_room(self, free: int) -> str:
        """Return the message for a disk on which the store may take no more."""
        room = f"{free:,} bytes of its disk are free, and {self._reserve:,} are left to others"
        advice = "; name a folder on a larger disk with --kv-dir, or store none with --no-kv-disk"
        return f"the KV store cannot write {self.folder.folder}: {room}{advice}"

    def _owed_to_others(self, free: int) -> int:
        """Return how far the disk is below a quarter of the reserve, in bytes. With the mutex held.

        Bytes that were freed for that and do not show yet count as free; otherwise everything would be evicted before
        the first shows.
        """
        mark = self._reserve // 4
        if free >= mark or not self._freed or self.clock.now() - self._freed_at > _LATE_SECONDS:
            self._free_before, self._freed = free, 0
        return mark - free - min(self._freed, max(0, self._free_before + self._freed - free))

    def write(self, need: int, work: Callable[[], T]) -> T:
        """Do work that needs so many bytes; if a hidden quota ends it, evict and try once more.

        Raises `OSError` as the system does.
        """
        try:
            return work()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._give_way(need):
                raise
        return work()

    def _give_way(self, need: int) -> bool:
        """Evict so many bytes, at least a quarter of the reserve; return whether that may help."""
        with self.mutex:
            victims = self._delete_victims(max(need, self._reserve // 4))
        cleared = self.clear(victims)
        with self.mutex:
            self.count(evicted=cleared)
        # Some disks free the room of removed files only once the removal is durable.
        return cleared > 0 and self.sync(self.folder.digit(one.name.key) for one in victims)

    def look_again(self) -> None:
        """Clear the message of a full disk if it has room again."""
        try:
            if self.make_room(0) and self._full and self.folder.free() > self._reserve:
                with self.mutex:
                    self._full = ""
        except OSError as error:
            self.fail("read", error)

    def _delete_victims(self, excess: int) -> list[IndexEntry]:
        victims = []
        while excess > 0 and (victim := self.index.victim()) is not None:
            self.mark_deleted(victim)
            victims.append(victim)
            excess -= victim.disk
        return victims

    def clear(self, deleted: Iterable[IndexEntry]) -> int:
        """Remove the files of chunks that this thread marked as deleted, in this order; return how many went."""
        gone = 0
        for entry in deleted:
            try:
                self.folder.remove(entry.name)
            except OSError as error:
                self.fail("remove files from", error)
                with self.mutex:
                    entry.going = False
                continue
            gone += 1
            with self.mutex:
                self.index.forget(entry)
        return gone

    def sync(self, folders: Iterable[Path]) -> bool:
        """Make names in these folders durable, and in those whose sync failed before; return whether they are."""
        with self.mutex:
            owed = dict(self._unsynced)
        waiting = list(owed | dict.fromkeys(folders))
        for at, folder in enumerate(waiting):
            try:
                self.folder.files.sync_folder(folder)
            except OSError as error:
                self.owe(waiting[at:])
                self.fail("write", error)
                return False
            with self.mutex:
                # If another thread's sync failed meanwhile, this one may have come before that thread's change.
                if self._unsynced.get(folder) is owed.get(folder):
                    self._unsynced.pop(folder, None)
        return True

    def owe(self, folders: Iterable[Path]) -> None:
        """Mark folders as not durable until a `sync` that begins now or later."""
        with self.mutex:
            self._unsynced.update((folder, object()) for folder in folders)

    def owes(self, folders: Iterable[Path]) -> bool:
        """Return whether a power cut may bring back a file that was removed from one of these folders."""
        with self.mutex:
            return any(folder in self._unsynced for folder in folders)

    # ------------------------------------------------------------------------------------------------------- reading

    def read(self, entry: IndexEntry, buffer: memoryview | None = None) -> bytes | memoryview | None:
        """Return the file, in `buffer` if it has room; None if it is gone or the disk failed."""
        try:
            data = self.folder.read(entry.name, buffer)
            entry.faults = 0
            return data
        except FileNotFoundError:
            self.drop_damaged(entry)
        except OSError as error:
            # If the whole disk fails, that says nothing about this chunk.
            alone = not self.failing
            self.fail("read", error)
            with self.mutex:
                entry.faults += alone
            if entry.faults >= _MOST_FAULTS:
                self.drop_damaged(entry)
        return None

    def lose(self, name: Name) -> None:
        """Remember that the blocks of a chunk were removed because it was damaged. With the mutex held."""
        for head in (*name.heads, name.key[:HEAD_BYTES]):
            self.lost[name.tag + head] = None
        while len(self.lost) > _MOST_LOST:
            self.lost.popitem(last=False)

    def drop_damaged(self, entry: IndexEntry) -> int:
        """Drop a damaged chunk and those that extend it, unless it is gone already; return how many."""
        with self.mutex:
            if self.index.get(entry.id) is not entry:
                return 0
            family = self.index.family([entry.id])
            for one in family:
                self.mark_deleted(one)
            self.count(damaged=len(family))
            for one in family:
                self.lose(one.name)
        self.clear(family)
        return len(family)
