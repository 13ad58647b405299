"""The disk tier: chunks as files in one folder, for as many models as come; `Store` for one of them.

What survives a crash is decided by the order of steps alone: a chunk is written under a temporary name and synced,
renamed, its folder synced, and only then indexed and reported as kept. The index is rebuilt from names and sizes at
every start; a file is believed only once it was read whole and every checksum was right. Damage is a miss.

Two locks, and neither is held while a chunk is read, written or removed: `_mutex` guards the index, `_chores` lets one
thread at a time repair things. A file's name belongs to one thread at a time: to the `keep` that has its id in
`_writing`, or to whoever doomed the chunk, until its file is gone.

When the disk fails the store says so (`stats().trouble`), refuses to keep, reads what it can, and tries the disk again
after 1, 2, 4 ... 60 seconds of the clock, in `keep`, `fetch` or `tend`.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cairn.kv import chunk_file
from cairn.kv.chunk_file import Damaged, Name
from cairn.kv.codec import Codec
from cairn.kv.pins import load_pins, pin_bytes, pin_name, save_pins
from cairn.kv.shelf import Entry, Shelf, chains
from cairn.kv.store import Chunk, StoreStats
from cairn.kv.store_folder import PINS, StoreFolder, blocks, open_folder
from cairn.seams import Clock, FileSystem

LARGEST_BUDGET = 50 * 10**9
"""Bytes."""
TTL = 30 * 86400.0
"""Seconds that an unused chunk is kept."""
RESERVE = 256 << 20
"""Bytes of the disk that the store leaves free: the logs of agents need them more."""
_USE_STEP = 60.0
"""Seconds: how exactly the time of the last use is remembered."""
_PRUNE_EVERY = 600.0
_BACKOFF = (1.0, 60.0)
_MOST_FAULTS = 2
"""Reads of one chunk that the disk may fail before the chunk is given up."""


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """What a scrub found. Counts are chunks."""

    checked: int
    damaged: int
    """Removed, with what extended them."""
    unreadable: int
    """The disk did not give them; they stay until it is asked again."""


@dataclass(slots=True)
class _Written:
    """A chunk on its way in."""

    name: Name
    temporary: Path
    size: int
    disk: int
    renamed: bool = False


class DiskStore:
    """`Store` in a folder, and upkeep of all that is in it."""

    def __init__(
        self,
        files: FileSystem,
        folder: Path,
        *,
        identity: bytes,
        model: str,
        codec: Codec,
        clock: Clock,
        budget: int | None = None,
        ttl: float = TTL,
        reserve: int = RESERVE,
        fresh: bool = False,
        patience: float = 5.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Take the folder and read its names.

        `identity` and `model`: of the engine, and what people call it. `budget`: bytes on the disk for all models; None
        for a fifth of what the disk has free or the store holds, at most `LARGEST_BUDGET`. `reserve`: bytes of the disk
        that stay free. `fresh`: set a folder aside that can not be used. Raises `ConfigError` or `Conflict` as
        `store_folder.open_folder` says, and `OSError` for a disk that does not work.
        """
        self._lock = open_folder(files, folder, clock, fresh=fresh, patience=patience, sleep=sleep)
        self._identity, self._model, self._codec, self._clock = identity, model, codec, clock
        self._tag = chunk_file.model_tag(identity, codec.name)
        self._ttl, self._reserve = ttl, reserve
        self._folder = StoreFolder(files, folder)
        self._pins = folder / PINS
        self._mutex = threading.Lock()
        self._chores = threading.Lock()
        self._pinning = threading.Lock()
        self._shelf = Shelf()
        self._writing: set[bytes] = set()
        self._dropped: set[bytes] = set()
        """Of `_writing`: what was dropped before it was there."""
        self._reserved = 0
        self._used: dict[bytes, Entry] = {}
        """Chunks whose last use is not yet remembered by their files."""
        self._unsaved: dict[str, tuple[bytes, ...]] = {}
        """Pins that could not be written, by file."""
        self._stats = StoreStats()
        self._trouble, self._next_try, self._backoff = "", 0.0, _BACKOFF[0]
        self._next_prune = 0.0
        try:
            self._budget = self._read_folder(budget)
            self._make_room(0)
        except BaseException:
            self._lock.release()
            raise

    # --------------------------------------------------------------------------------------------------------- Store

    def leading(self, keys: Sequence[bytes]) -> int:
        """By the index alone."""
        with self._mutex:
            last, count = None, 0
            for key in keys:
                entry = self._shelf.get(self._tag + key)
                if entry is None:
                    break
                last, count = entry, count + 1
            if last is not None:
                self._use(last)
            return count

    def fetch(self, key: bytes, tokens: Sequence[int]) -> Chunk | None:
        """Read whole, verified whole."""
        self._try_again()
        with self._mutex:
            entry = self._shelf.get(self._tag + key)
        if entry is None:
            return None
        data = self._read(entry)
        if data is None:
            return None
        try:
            chunk = chunk_file.decode(data, entry.name, identity=self._identity, codec=self._codec)
        except Damaged:
            self._condemn(entry)
            return None
        if chunk.tokens != tuple(tokens):
            return None
        with self._mutex:
            entry.faults = 0
            self._use(entry)
            self._count(read=len(data))
        return chunk

    def keep(self, chunks: Sequence[Chunk]) -> int:
        """Whatever is there counts as kept. A chunk whose parent is neither there nor before it is refused."""
        self._try_again()
        held, work, there = self._plan(chunks)
        written: list[_Written] = []
        try:
            for chunk in work:
                one = self._write(chunk)
                if one is None:
                    break
                written.append(one)
            kept = self._publish(written)
        finally:
            with self._mutex:
                for entry in held:
                    self._shelf.release(entry)
                for chunk in work:
                    self._writing.discard(self._tag + chunk.key)
                    self._dropped.discard(self._tag + chunk.key)
        done = {id(chunk) for chunk in work[:kept]} | there
        count = next((at for at, chunk in enumerate(chunks) if id(chunk) not in done), len(chunks))
        with self._mutex:
            self._count(refused=len(chunks) - count)
        return count

    def drop(self, keys: Sequence[bytes]) -> int:
        """Pinned ones too. When it returns, the bytes are gone for good unless the disk failed."""
        ids = [self._tag + key for key in keys]
        with self._mutex:
            self._dropped.update(self._writing.intersection(ids))
            family = self._shelf.family(ids)
            for entry in family:
                self._shelf.doom(entry)
        return self._clear(family, sync=True)

    def pin(self, owner: str, keys: Sequence[bytes]) -> None:
        """Takes effect at once; where the disk fails it becomes durable when the disk is back."""
        name, keys = pin_name(owner, self._tag), tuple(dict.fromkeys(keys))
        with self._mutex:
            self._shelf.pin(name, [self._tag + key for key in keys])
        self._make_room(pin_bytes(keys))
        with self._pinning, self._mutex:
            self._unsaved[name] = keys
        self._save_pins()

    def stats(self) -> StoreStats:
        """Figures of all models in the folder."""
        with self._mutex:
            return dataclasses.replace(
                self._stats,
                chunks=len(self._shelf),
                bytes=self._shelf.bytes + self._folder.littered,
                budget=self._budget,
                pinned=self._shelf.pinned,
                trouble=self._trouble,
            )

    def close(self) -> None:
        """Remembers when chunks were used last."""
        self._remember_uses()
        self._lock.release()

    # -------------------------------------------------------------------------------------------------------- upkeep

    def tend(self) -> None:
        """What has to be done now and then: call it about once a second, from a thread that may wait for the disk.

        Tries a failed disk again, repeats what it made impossible, forgets chunks that nobody used for `ttl` seconds,
        keeps to the budget, remembers when chunks were used.
        """
        self._try_again()
        if self.stats().trouble:
            return
        self._repair()
        self._remember_uses()
        if self._clock.now() >= self._next_prune:
            self._next_prune = self._clock.now() + _PRUNE_EVERY
            self.prune(older=self._ttl)
        self._make_room(0)

    def scrub(self) -> Scrubbed:
        """Read and verify every chunk of every model; damaged ones go, with what extends them."""
        with self._mutex:
            entries = self._shelf.live()
        checked = damaged = unreadable = 0
        for entry in entries:
            with self._mutex:
                if self._shelf.get(entry.id) is not entry:
                    continue
            checked += 1
            before = self.stats().damaged
            data = self._read(entry)
            if data is not None:
                try:
                    chunk_file.verify(data, entry.name)
                except Damaged:
                    self._condemn(entry)
            elif self.stats().damaged == before:
                unreadable += 1
            damaged += self.stats().damaged - before
        return Scrubbed(checked, damaged, unreadable)

    def prune(self, *, older: float | None = None, others: bool = False) -> int:
        """Remove chunks that nobody used for `older` seconds, or all of other models; never pinned ones, never one that
        a chunk which stays extends. How many went."""
        before = self._now() - older if older is not None else -1.0
        gone = 0
        while True:
            with self._mutex:
                stale = self._shelf.leaves(lambda e: e.used < before or (others and not e.id.startswith(self._tag)))
                for entry in stale:
                    self._shelf.doom(entry)
            cleared = self._clear(stale)
            with self._mutex:
                self._count(evicted=cleared)
            gone += cleared
            if not cleared:
                return gone

    # --------------------------------------------------------------------------------------------------------- start

    def _read_folder(self, budget: int | None) -> int:
        """Fill the index; returns the budget."""
        found = self._folder.scan()
        shelf, now = self._shelf, self._now()
        shelf.bytes += found.other
        entries: dict[bytes, Entry] = {}
        junk = dict(found.junk)
        for name, disk, modified in sorted(found.chunks, key=lambda one: str(one[0])):
            parent = name.tag + name.parent if name.parent else b""
            entry = Entry(name.tag + name.key, parent, name, disk, min(modified, now), modified)
            if entries.setdefault(entry.id, entry) is not entry:
                junk[self._folder.path(name)] = disk
                shelf.bytes += disk
        for entry in chains(list(entries.values())):
            shelf.add(entry)
            del entries[entry.id]
        for entry in entries.values():
            junk[self._folder.path(entry.name)] = entry.disk
            shelf.bytes += entry.disk
        for path, disk in junk.items():
            self._folder.discard(path, disk)
            shelf.bytes -= disk
        for file, ids in load_pins(self._folder, self._pins):
            if ids is None:
                self._folder.discard(self._pins / file, 0)
                self._count(damaged=1)
            else:
                shelf.pin(file, ids)
        if budget is None:
            return min(LARGEST_BUDGET, (self._folder.free() + shelf.bytes) // 5)
        return budget

    # ------------------------------------------------------------------------------------------------------- writing

    def _plan(self, chunks: Sequence[Chunk]) -> tuple[list[Entry], list[Chunk], set[int]]:
        """What is held meanwhile, what has to be written, and (by `id`) what is there; up to the first that cannot."""
        held: list[Entry] = []
        work: list[Chunk] = []
        there: set[int] = set()
        depths: dict[bytes, int] = {b"": -1}
        with self._mutex:
            for chunk in chunks:
                key, parent = self._tag + chunk.key, self._tag + chunk.parent if chunk.parent else b""
                entry, above = self._shelf.get(key), self._shelf.get(parent)
                if entry is not None or key in depths:
                    there.add(id(chunk))
                elif above is not None or parent in depths:
                    depth = above.name.depth if above is not None else depths[parent]
                    if self._trouble or self._shelf.known(key) or key in self._writing or chunk.depth <= depth:
                        break
                    work.append(chunk)
                    depths[key] = chunk.depth
                    self._writing.add(key)
                else:
                    break
                for one in (entry, above):
                    if one is not None:
                        self._shelf.hold(one)
                        held.append(one)
                if entry is not None:
                    self._use(entry)
        return held, work, there

    def _write(self, chunk: Chunk) -> _Written | None:
        """A durable file under a temporary name; None where it cannot be. Its bytes are reserved until `_publish`."""
        try:
            name, parts = chunk_file.encode(chunk, model=self._model, identity=self._identity, codec=self._codec)
        except ValueError:
            return None
        path, need = self._folder.path(name), blocks(name.size)
        if self._folder.is_litter(name) or not self._make_room(need, reserve=True):
            return None
        try:
            temporary, disk = self._folder.write(path.parent, parts)
        except OSError as error:
            self._unreserve(need)
            self._fail("write", error)
            return None
        return _Written(name, temporary, need, disk)

    def _publish(self, written: Sequence[_Written]) -> int:
        """Give files their names, durably, then index them; how many. The rest is removed."""
        good = len(written)
        try:
            for at, one in enumerate(written):
                good = at
                self._folder.files.replace(one.temporary, self._folder.path(one.name))
                one.renamed = True
            good = len(written)
            for folder in dict.fromkeys(self._folder.path(one.name).parent for one in written):
                self._folder.files.sync_folder(folder)
        except OSError as error:
            self._fail("write", error)
            good = 0
        now = self._now()
        kept = 0
        for one in written[:good]:
            key = one.name.tag + one.name.key
            parent = one.name.tag + one.name.parent if one.name.parent else b""
            with self._mutex:
                if key in self._dropped or (parent and self._shelf.get(parent) is None):
                    break
                self._reserved -= one.size
                self._shelf.add(Entry(key, parent, one.name, one.disk, now, now))
                self._count(written=one.name.size)
            kept += 1
        for one in written[kept:]:
            self._folder.discard(self._folder.path(one.name) if one.renamed else one.temporary, one.name.size)
            self._unreserve(one.size)
        if kept:
            with self._mutex:
                self._backoff = _BACKOFF[0]
        return kept

    def _unreserve(self, size: int) -> None:
        with self._mutex:
            self._reserved -= size

    def _make_room(self, need: int, *, reserve: bool = False) -> bool:
        """Evict until `need` more bytes are within the budget and the disk; reserve them. False where it cannot be."""
        while True:
            try:
                free = max(0, self._folder.free() - self._reserve)
            except OSError as error:
                self._fail("read", error)
                return False
            with self._mutex:
                # What the store lacks on a disk that others fill it may not take; what it has it may use again.
                taken = self._shelf.bytes + self._folder.littered + self._reserved
                limit = min(self._budget, taken + free) if need else self._budget
                if taken + need <= limit:
                    self._reserved += need if reserve else 0
                    return True
                if need > self._budget:
                    return False
                victims = self._doom_victims(taken + need - limit)
            cleared = self._clear(victims)
            with self._mutex:
                self._count(evicted=cleared)
            if cleared < max(1, len(victims)):
                return False

    def _doom_victims(self, excess: int) -> list[Entry]:
        victims = []
        while excess > 0 and (victim := self._shelf.victim()) is not None:
            self._shelf.doom(victim)
            victims.append(victim)
            excess -= victim.disk
        return victims

    def _clear(self, doomed: Iterable[Entry], *, sync: bool = False) -> int:
        """Remove the files of chunks that this thread doomed; how many went."""
        gone, folders = 0, dict[Path, None]()
        for entry in doomed:
            path = self._folder.path(entry.name)
            try:
                self._folder.files.remove(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                self._fail("remove files from", error)
                with self._mutex:
                    entry.going = False
                continue
            folders[path.parent] = None
            gone += 1
            with self._mutex:
                self._shelf.forget(entry)
        try:
            for folder in folders if sync else ():
                self._folder.files.sync_folder(folder)
        except OSError as error:
            self._fail("remove files from", error)
        return gone

    # ------------------------------------------------------------------------------------------------------- reading

    def _read(self, entry: Entry) -> bytes | None:
        """The file, or None: gone, or the disk failed."""
        try:
            return self._folder.read(entry.name)
        except FileNotFoundError:
            self._condemn(entry)
        except OSError as error:
            self._fail("read", error)
            with self._mutex:
                entry.faults += 1
            if entry.faults >= _MOST_FAULTS:
                self._condemn(entry)
        return None

    def _condemn(self, entry: Entry) -> None:
        """Drop a damaged chunk and what extends it, unless it went meanwhile by itself."""
        with self._mutex:
            if self._shelf.get(entry.id) is not entry:
                return
            family = self._shelf.family([entry.id])
            for one in family:
                self._shelf.doom(one)
            self._count(damaged=len(family))
        self._clear(family)

    # ------------------------------------------------------------------------------------------------------- trouble

    def _fail(self, action: str, error: OSError) -> None:
        with self._mutex:
            self._trouble = f"the KV store cannot {action} {self._folder.folder}: {error.strerror or error}"
            if self._clock.now() >= self._next_try:
                self._next_try = self._clock.now() + self._backoff
                self._backoff = min(2 * self._backoff, _BACKOFF[1])

    def _try_again(self) -> None:
        """If the disk failed and it is time: does it work now?"""
        if not self._trouble or self._clock.now() < self._next_try or not self._chores.acquire(blocking=False):
            return
        try:
            self._folder.probe()
            with self._mutex:
                self._trouble = ""
        except OSError as error:
            self._fail("write", error)
        finally:
            self._chores.release()

    def _repair(self) -> None:
        """Remove what could not be removed, save what could not be saved."""
        if not self._chores.acquire(blocking=False):
            return
        try:
            with self._mutex:
                doomed = self._shelf.doomed()
            self._clear(doomed)
            self._folder.tidy()
        except OSError as error:
            self._fail("remove files from", error)
        finally:
            self._chores.release()
        self._save_pins()

    def _save_pins(self) -> None:
        with self._pinning:
            for name, keys in list(self._unsaved.items()):
                try:
                    save_pins(self._folder, self._pins, name, keys)
                    del self._unsaved[name]
                except OSError as error:
                    self._fail("write", error)
                    return

    def _remember_uses(self) -> None:
        """Put the time of the last use on the files. Best effort: what is lost makes a chunk look older."""
        with self._mutex:
            used, self._used = self._used, {}
        for entry in used.values():
            try:
                self._folder.files.touch(self._folder.path(entry.name), entry.used)
                entry.saved = entry.used
            except OSError:
                return

    # ---------------------------------------------------------------------------------------------------------- bits

    def _use(self, entry: Entry) -> None:
        """With the lock held."""
        self._shelf.use(entry, self._now())
        if entry.used - entry.saved >= _USE_STEP:
            self._used[entry.id] = entry

    def _count(self, **more: int) -> None:
        """Add to the counters, with the lock held."""
        now = {name: getattr(self._stats, name) + value for name, value in more.items()}
        self._stats = dataclasses.replace(self._stats, **now)

    def _now(self) -> float:
        return self._clock.time_ns() / 1e9
