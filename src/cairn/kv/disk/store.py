"""The disk tier: chunks as files in one folder, for as many engines as come; `Store` for one of them.

The index is rebuilt from names and sizes at every start; a file is believed only once it was read whole and every
checksum was right. Damage is a miss. No lock is held while a chunk is read, written or removed.

When the disk fails the store says so (`stats().trouble`), refuses to keep, reads what it can, and tries the disk again
after 1, 2, 4 ... 60 seconds of the clock, in `keep`, `fetch`, `pin` or `tend`. A disk that fails at the start is such a
disk. A folder that somebody removed or replaced is opened as at a start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from cairn.kv.disk import chunk_file, portable_kv
from cairn.kv.disk import maintenance as disk_maintenance
from cairn.kv.disk.chunk_file import HEADER_BYTES, DamagedChunk
from cairn.kv.disk.codec import Codec
from cairn.kv.disk.disk_writer import DiskWriter
from cairn.kv.disk.folder import PROBE_BYTES, StoreFolder, open_folder
from cairn.kv.disk.maintenance import OtherEngines
from cairn.kv.disk.model_folders import ModelFolders
from cairn.kv.disk.notes import Notes, write_layout
from cairn.kv.disk.pins import Pins, pin_bytes, pin_name
from cairn.kv.disk.state import DiskState
from cairn.kv.pool.prefix import Layout
from cairn.kv.tiers.store import HEAD_BYTES, Chunk, Scrubbed, Standing
from cairn.system.interfaces import Clock, FileSystem, Lock
from cairn.types.errors import ConfigError, Conflict
from cairn.types.stats import TakenIn, TierStats

TTL = 30 * 86400.0
"""Seconds that an unused chunk is kept."""
RESERVE = 256 << 20
"""Bytes of the disk that the store does not grow into: the logs of agents need them more."""
ONCE_SECONDS = 10 * 86400.0
"""How much earlier than now a chunk counts as used that is written `once`: it goes before all that was used since, and
is kept as long again as it is of the time to live."""
AHEAD = 2
"""How many chunks on the disk is told what will be read: it reads while a chunk is checked."""
_HEADERS = 1 << 20
"""More than a chunk's file has beside its pages: headers and tokens."""
_PRUNE_EVERY = 600.0
_PRUNES = 10
"""Looks for what is unused within a time to live, at least."""


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
        share: float = 1.0,
        ttl: float = TTL,
        reserve: int = RESERVE,
        fresh: bool = False,
        home: Path | None = None,
        layout: Layout | None = None,
        patience: float = 5.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Take the folder and read its names.

        `identity` and `model`: of the engine, and what people call it. `budget`: bytes on the disk for all models, of
        which this one has `share`; None for a fifth of what the disk has free or the stores hold, at most
        `disk_maintenance.LARGEST_BUDGET`. `reserve`: bytes of the disk that stay free. `fresh`: set a folder aside
        that can not be used. `home`: the folder that it shares with the stores of other models, see `ModelFolders`.
        `layout`: of the model, for those that serve another. Raises `ConfigError` or `Conflict` as
        `folder.open_folder` says. Call `tend` about once a second.
        """
        self._files, self._codec, self._identity = files, codec, identity
        self._tag = chunk_file.model_tag(identity, codec.name)
        self._given, self._budget, self._share, self._ttl = budget, 0, share, ttl
        self._model, self._layout = model, layout
        self._unpinned_elsewhere: set[str] = set()
        """Owners whose pins in other stores of the home could not be removed."""
        self._folders = None if home is None else ModelFolders(files, home, folder, clock)
        self._state = DiskState(StoreFolder(files, folder), clock, reserve, self._tag, codec.state_sizes)
        once = min(ONCE_SECONDS, ttl / 2)
        self._writer = DiskWriter(self._state, identity=identity, model=model, codec=codec, once=once)
        self._pins = Pins(self._state.folder)
        self._notes = Notes(self._state)
        self._chores = threading.Lock()
        """Held by the thread that repairs things."""
        self._pinning = threading.Lock()
        """Held by the thread that writes pins."""
        self._unsaved: dict[str, tuple[bytes, ...]] = {}
        """Pins that could not be written, by file."""
        self._forgotten: set[bytes] = set()
        """Ids of chunks that were dropped before the folder could be opened, or that it had still when it went away."""
        self._unpinned: set[str] = set()
        """How the files of owners begin that were unpinned before the folder could be opened."""
        self._other_engines = OtherEngines(self._state, self._tag, identity)
        self._lock: Lock | None = None
        self._next_prune = 0.0
        self._idle = 0.0
        """Seconds that nothing had been used at the start, where that is longer than the time to live."""
        try:
            self._open(fresh=fresh, patience=patience, sleep=sleep)
        except OSError as error:
            self._state.fail("open", error)

    # --------------------------------------------------------------------------------------------------------- Store

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        """Asks the index alone; no file is opened."""
        state = self._state
        with state.mutex:
            last, count = None, 0
            for key in keys:
                entry = state.index.get(self._tag + key)
                if entry is None:
                    break
                last, count = entry, count + 1
            if last is not None:
                state.use(last)
            return count

    def has(self, key: bytes) -> bool:
        """Asks the index alone."""
        with self._state.mutex:
            return self._state.index.get(self._tag + key) is not None

    def kept_bytes(self, group: int, size: int) -> int:
        """As the codec writes it, with a header."""
        return self._codec.written(group, size) + HEADER_BYTES

    def match_within(self, keys: Sequence[bytes]) -> tuple[int, bytes] | None:
        """Asks the index alone."""
        state = self._state
        with state.mutex:
            found = state.index.within(self._tag + key for key in keys)
            if found is None:
                return None
            count, entry = found
            state.use(entry)
            return count, entry.name.key

    def fetch(self, key: bytes, tokens: Sequence[int], buffer: memoryview | None = None) -> Chunk | None:
        """Read whole, verified whole. With a `buffer`, more of the context is taken to be wanted next."""
        state = self._state
        self._try_again()
        with state.mutex:
            entry = state.index.get(self._tag + key)
            next_one = state.index.after(entry, AHEAD) if entry is not None else None
        if next_one is not None and buffer is not None:
            state.folder.announce(next_one.name)
        data = state.read(entry, buffer) if entry is not None else None
        if entry is None or data is None:
            return None
        try:
            chunk = chunk_file.decode(data, entry.name, identity=self._identity, codec=self._codec)
        except DamagedChunk:
            state.drop_damaged(entry)
            return None
        if chunk.tokens[: len(tokens)] != tuple(tokens):
            return None
        with state.mutex:
            state.use(entry)
            state.index.mark((entry.id,), "idle")
            state.count(read=len(data))
        return chunk

    def keep(self, chunks: Sequence[Chunk]) -> int:
        """Whatever is there counts as kept. A chunk whose parent is neither there nor before it is refused."""
        self._try_again()
        return self._writer.keep(chunks)

    def drop(self, keys: Sequence[bytes]) -> int:
        """Pinned ones too. When it returns, the bytes are gone for good unless the disk failed; then they go later."""
        return self._drop([self._tag + key for key in keys])

    @property
    def notes(self) -> Notes:
        """See `StoreNotes`."""
        return self._notes

    def was_damaged(self, block: bytes) -> bool:
        """As far as this process has found out."""
        with self._state.mutex:
            return self._tag + block[:HEAD_BYTES] in self._state.lost

    def lingers(self, keys: Sequence[bytes]) -> bool:
        """Whether a file of what was dropped, by `drop_of_other_engines` too, is still there or may come back in a
        power cut, since the disk did not let it go."""
        return self._other_engines.owe(keys) or self._remain({self._tag + key for key in keys})

    def _remain(self, ids: Collection[bytes]) -> bool:
        state = self._state
        with state.mutex:
            # One that is found was written after the drop, by a request that went on with the context.
            deleted = (id for id in ids if state.index.known(id) and state.index.get(id) is None)
            if any(deleted) or not self._forgotten.isdisjoint(ids):
                return True
        return state.folder.remains(ids) or state.owes({state.folder.digit(id[len(self._tag) :]) for id in ids})

    def drop_of_other_engines(self, keys: Callable[[bytes], Sequence[bytes]]) -> int:
        """Drop what `keys` says of the identity of each other engine that has chunks here; how many went.

        Where the disk does not tell whose chunks they are, or does not let them go, `tend` does it again.
        """
        with self._state.mutex:
            opened = self._lock is not None
        told = self._other_engines.learn()
        ids = self._other_engines.ids(keys)
        gone = self._drop(sorted(ids))
        # Nothing tells of an engine whose last chunk was evicted, and in a power cut that may come back.
        synced = opened and self._state.sync(self._state.folder.digits())
        self._other_engines.note(keys, done=told and synced and not self._remain(ids))
        return gone

    def _drop(self, ids: Sequence[bytes]) -> int:
        state = self._state
        with state.mutex:
            if self._lock is None:
                self._forgotten.update(ids)
                return 0
            flying = frozenset(state.writing)
            state.dropped.update(flying.intersection(ids))
            family = state.index.family(ids)
            for entry in family:
                state.mark_deleted(entry)
        gone = state.clear(family)
        self._writer.wait(flying)
        # Also of those that are not here now: an evicted chunk's name may yet come back in a power cut.
        touched = {entry.id for entry in family}.union(flying, ids)
        state.sync(sorted({state.folder.digit(id[len(self._tag) :]) for id in touched}))
        return gone

    def pin(self, owner: str, keys: Sequence[bytes]) -> None:
        """At once; where the disk fails it becomes durable when the disk is back. No keys unpin on every model.

        Pins come before the budget: their own few bytes are written even where nothing more can be evicted.
        """
        state, name, keys = self._state, pin_name(owner, self._tag), tuple(dict.fromkeys(keys))
        self._try_again()
        with self._pinning, state.mutex:
            changed, start = [name], pin_name(owner, b"")
            if not keys:
                changed = [one for one in self._unsaved if one.startswith(start)]
            if not keys and self._lock is None:
                self._unpinned.add(start)
            elif not keys:
                changed += self._pins.of(owner)
            for one in changed:
                self._unsaved[one] = keys
                state.index.pin(one, [self._tag + key for key in keys])
        self._save_pins()
        if not keys and self._folders is not None:
            self._unpinned_elsewhere.add(owner)
            self._unpin_elsewhere()

    def _unpin_elsewhere(self) -> None:
        """Also what models have pinned that are not served now."""
        folders, state = self._folders, self._state
        for owner in tuple(self._unpinned_elsewhere):
            if state.failing or folders is None:
                return
            try:
                if folders.unpin(owner):
                    self._unpinned_elsewhere.discard(owner)
            except OSError as error:
                state.fail("write", error)

    def erase_of_model(self, model: bytes, salt: bytes, tokens: Sequence[int], keep: int) -> bool:
        """Remove what the stores of another model, which is not served now, have of a context beyond its first `keep`
        tokens; whether nothing of it can be read any more."""
        if self._folders is None:
            return True
        try:
            return self._folders.erase(model, salt, tokens, keep)
        except OSError as error:
            self._state.fail("remove files from", error)
            return False

    def mark(self, keys: Sequence[bytes], standing: Standing) -> None:
        """See `Store`. Of the chunks of this engine."""
        with self._state.mutex:
            self._state.index.mark([self._tag + key for key in keys], standing)

    def paths(self, keys: Sequence[bytes]) -> list[Path]:
        """The files of those that are here, in this order."""
        with self._state.mutex:
            found = [self._state.index.get(self._tag + key) for key in keys]
        return [self._state.folder.path(entry.name) for entry in found if entry is not None]

    def take_in(self, path: Path, keyed: Callable[[int, int, Sequence[int], memoryview], Chunk | None]) -> TakenIn:
        """Keep what a file has of KV, see `portable_kv`, after every check.

        `keyed` makes the chunk of what a group, a depth, tokens and pages are; None for what is to be refused.
        """
        chunks = size = ignored = refused = 0
        try:
            file = self._files.open(path, "read")
        except OSError:
            return TakenIn()
        try:
            for at, length in portable_kv.frames(file):
                if not length:
                    break
                if length > self._largest:  # unpacking it would cost more than any chunk of this model
                    refused += 1
                    continue
                chunk = self._checked(file.read(at, length), keyed)
                if chunk is None:
                    ignored += 1
                elif not isinstance(chunk, Chunk) or not self.keep([chunk]):
                    refused += 1
                else:
                    chunks, size = chunks + 1, size + len(memoryview(chunk.pages).cast("B"))
        except (OSError, portable_kv.Broken):
            refused += 1
        finally:
            file.close()
        return TakenIn(chunks=chunks, bytes=size, ignored=ignored, refused=refused)

    @property
    def _largest(self) -> int:
        """Bytes of the largest file that a chunk of this model can have."""
        if self._layout is None:
            return portable_kv.MOST_CHUNK
        return max(self._codec.size(group) for group in range(len(self._layout.groups))) + _HEADERS

    def _checked(
        self, data: bytes, keyed: Callable[[int, int, Sequence[int], memoryview], Chunk | None]
    ) -> Chunk | Literal["refused"] | None:
        """A chunk of a file; None for one of another engine."""
        try:
            header, tokens, pages = chunk_file.verify(data, chunk_file.name_of(data))
            if header.identity != self._identity or header.codec != self._codec.name:
                return None
            whole = memoryview(self._codec.decode(header.group, pages)).cast("B")
            return keyed(header.group, header.depth, tokens, whole) or "refused"
        except (ValueError, IndexError):
            return "refused"

    def unsaved(self, owner: str) -> bool:
        """Whether what `owner` pinned or unpinned last, on any model, is not durable, since the disk refuses it."""
        start = pin_name(owner, b"")
        with self._state.mutex:
            elsewhere = owner in self._unpinned_elsewhere
            return elsewhere or start in self._unpinned or any(name.startswith(start) for name in self._unsaved)

    def durable(self) -> DiskStore:
        """It is."""
        return self

    def stats(self) -> TierStats:
        """Figures of all models in the folder."""
        return self._state.stats()

    def close(self) -> None:
        """Remembers when chunks were used last, and what is pinned if the disk did not take it before."""
        if self._unsaved or self._unpinned:
            self._try_again()
            self._save_pins()
        if self._lock is not None:
            disk_maintenance.remember_uses(self._state)
            self._lock.release()
            self._lock = None

    # -------------------------------------------------------------------------------------------------------- upkeep

    def tend(self) -> None:
        """What has to be done now and then: call it about once a second, from a thread that may wait for the disk.

        Tries a failed disk again, repeats what it made impossible, forgets chunks that nobody used for the time to
        live, keeps to the budget, remembers when chunks were used.
        """
        state = self._state
        self._try_again()
        if state.failing or not self._chores.acquire(blocking=False):
            return
        try:
            disk_maintenance.clean(state)
            disk_maintenance.remember_uses(state)
            if state.clock.now() >= self._next_prune:
                self._next_prune = state.clock.now() + min(_PRUNE_EVERY, self._ttl / _PRUNES)
                # A start with a clock that is far ahead finds all of it old, as one after a long rest does: what was
                # used last is young then, and the rest ages from there.
                disk_maintenance.prune(state, state.now() - self._idle - self._ttl)
            state.look_again()
            self._share_room()
            self._unpin_elsewhere()
            for keys in self._other_engines.owed():
                if not state.failing:
                    self.drop_of_other_engines(keys)
        finally:
            self._chores.release()
        self._save_pins()

    def scrub(self) -> Scrubbed:
        """Read and verify every chunk of every model; damaged ones go, with what extends them."""
        return disk_maintenance.scrub(self._state)

    def prune(self, *, others: bool = False) -> int:
        """Remove chunks that nobody used for the time to live, and with `others` all of other models, unless they are
        pinned or a chunk that stays extends them. How many went."""
        return disk_maintenance.prune(self._state, self._state.now() - self._ttl, keep=self._tag if others else b"")

    # ------------------------------------------------------------------------------------------------------- opening

    def _open(self, *, fresh: bool, patience: float, sleep: Callable[[float], None]) -> None:
        """Everything that the disk may refuse comes before the first change of the index."""
        state, folders = self._state, self._folders
        if folders is not None:
            folders.enter(fresh=fresh, patience=patience, sleep=sleep)
        lock = open_folder(self._files, state.folder.folder, state.clock, fresh=fresh, patience=patience, sleep=sleep)
        try:
            if folders is not None:
                folders.take_in(self._tag, self._model)
            if self._layout is not None:
                write_layout(state.folder, self._layout)
            found = state.folder.scan()
            self._notes.load()
            pins = self._pins.load(found)
            held = sum(disk for _, disk, _ in found.chunks) + (folders.others_bytes() if folders is not None else 0)
            budget = self._given
            if budget is None:
                budget = disk_maintenance.default_budget(state.folder.free(), held)
            idle = state.now() - max((modified for _, _, modified in found.chunks), default=state.now())
        except BaseException:
            lock.release()
            raise
        with state.mutex:
            self._budget = budget
            state.budget, self._idle = int(self._share * budget), idle if idle > self._ttl else 0.0
            junk = disk_maintenance.fill(state, found)
            gone = [name for name in self._pins.sizes if name.startswith(tuple(self._unpinned))]
            self._unsaved = dict.fromkeys(gone, ()) | self._unsaved
            self._unpinned.clear()
            for name, ids in pins.items():
                if name not in self._unsaved:
                    state.index.pin(name, ids)
            self._lock = lock
            forgotten, self._forgotten = self._forgotten, set()
        for path, disk in junk:
            state.folder.discard(path, disk)
        state.works()
        self._drop(sorted(forgotten))
        state.make_room(0)

    def _share_room(self) -> None:
        """One budget for all stores of the home. Where another process has some of them, this one grows no further than
        to what they leave; to a quarter of its part in any case."""
        state, folders = self._state, self._folders
        if folders is None or not folders.due(self._budget, state.index.bytes):
            return
        try:
            in_use = folders.tend(self._budget, state.index.bytes, self._ttl)
        except OSError as error:
            state.fail("look over", error)
            return
        part = int(self._share * self._budget)
        with state.mutex:
            state.budget = min(part, max(part // 4, self._budget - in_use))
        state.make_room(0)

    def _try_again(self) -> None:
        """If the disk failed and it is time, or somebody took the folder away: does it work now?"""
        state = self._state
        if not (state.due or self._lost()) or not self._chores.acquire(blocking=False):
            return
        try:
            if (self._lost() or (self._lock is not None and not state.folder.marked())) and not self._let_go():
                return
            if self._lock is None:
                self._open(fresh=False, patience=0, sleep=lambda seconds: None)
            else:
                state.write(PROBE_BYTES, state.folder.probe)
                state.works()
        except (ConfigError, Conflict) as error:
            state.fail("open", str(error))
        except OSError as error:
            state.fail("open" if self._lock is None else "write", error)
        finally:
            self._chores.release()

    def _lost(self) -> bool:
        """Whether the folder at our path is another one than we hold, or none: it may be another process's."""
        lock = self._lock
        return lock is not None and not lock.held()

    def _let_go(self) -> bool:
        """The folder has to be opened anew, and nothing of what was in it is there: forget it, but not what is pinned.
        False while somebody writes into it."""
        state = self._state
        state.fail("open", "it was removed or replaced")  # from here on nothing more is written
        with self._pinning, state.mutex:
            if state.writing or self._lock is None:
                return False
            self._forgotten.update(state.index.lingering)  # the files may be there all the same
            state.emptied()
            pins = {name: tuple(id[len(self._tag) :] for id in ids) for name, ids in state.index.pins.items()}
            self._unsaved = pins | self._unsaved
            lock, self._lock = self._lock, None
        lock.release()
        return True

    def _save_pins(self) -> None:
        state = self._state
        with self._pinning:
            for name, keys in list(self._unsaved.items()):
                if state.failing or self._lock is None:
                    return
                old = self._pins.sizes.get(name, 0)
                state.make_room(pin_bytes(keys))
                try:
                    state.write(pin_bytes(keys), partial(self._pins.save, name, keys))
                except OSError as error:
                    state.fail("write", error)
                    return
                finally:
                    with state.mutex:
                        state.index.bytes += self._pins.sizes.get(name, 0) - old
                with state.mutex:
                    del self._unsaved[name]
