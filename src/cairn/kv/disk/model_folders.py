"""The folder that all models of a user share: each has a store of its own in it, by the identity of its weights.

    <home>/cairn-kv-store            the marker, as in a store
    <home>/.lock                     held while something is done to the home itself, never for long
    <home>/checked-...               see `codec_comparison`
    <home>/models/<identity>/        the store of one model: see `folder`
    <home>/models/<identity>-2/      of the same model in another process at the same time
    <home>/0/ ... f/, pins/          chunks of servers with one model, stored before each model had a folder

So a model finds its KV whichever server has it. A process that opens the store of a model takes in the model's chunks
from the last two places, unless another process holds them: the files are renamed, parents before children, so that a
crash on the way leaves chains whole. Chunks of other models stay there until those are opened, and age.

All stores of the home share one budget. A store that nobody holds gives way to those that are held, the least recently
used first, and its chunks age like any others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cairn.kv.disk import chunk_file
from cairn.kv.disk import maintenance as disk_maintenance
from cairn.kv.disk.budget import DiskState
from cairn.kv.disk.chunk_file import DamagedChunk, Name, parse_name
from cairn.kv.disk.folder import DIGITS, MARKER, OF_MODELS, PINS, StoreFolder, check_folder, open_folder
from cairn.kv.disk.notes import SEEN, read_layout
from cairn.kv.disk.pins import Pins, pin_name
from cairn.kv.disk.rebuild_index import rebuild_index
from cairn.kv.disk.token_search import chunks_of_tokens
from cairn.system.interfaces import Clock, FileSystem, FolderEntry, Lock
from cairn.types.errors import ConfigError, Conflict
from cairn.types.model_spec import CHUNK_BLOCKS

NAME_DIGITS = 32
"""Hexadecimal digits of a model's identity in the name of its folder."""
TWINS = ("", "-2", "-3", "-4")
"""Suffixes of the folder's name, for a model that is loaded more than once."""
_LOOK_EVERY = 600.0
_GROWTH = 64
"""The other stores are scanned again when this one has grown by the budget divided by this."""


def places(home: Path, model: bytes) -> tuple[Path, ...]:
    """Return the possible folders of a model's store, the usual one first. `model`: the identity of its weights."""
    return tuple(home / OF_MODELS / (model.hex()[:NAME_DIGITS] + twin) for twin in TWINS)


@dataclass(slots=True)
class _Store:
    """Another store of the home, from the names of its files."""

    path: Path
    size: int
    """Bytes of its chunks on the disk."""
    oldest: float
    newest: float


class ModelFolders:
    """The home, as the store of one model sees it. One thread at a time. Raises `OSError` as the system does."""

    def __init__(self, files: FileSystem, home: Path, own: Path, clock: Clock) -> None:
        self._files, self._home, self._own, self._clock = files, home, own, clock
        twin = own.name[NAME_DIGITS:]
        self._twins = () if twin else tuple(own.with_name(own.name + one) for one in TWINS[1:])
        """Stores of the same model that the one in the usual place takes in."""
        self._next, self._grown = 0.0, 0
        self._idle: float | None = None
        """Seconds since the last use of anything in the home at the first scan, if that is longer than the time to
        live."""

    def enter(self, *, fresh: bool, patience: float, sleep: Callable[[float], None]) -> None:
        """Make or check the home, as `open_folder` does a store. Nothing that has a store in use is renamed."""
        if fresh:
            try:
                check_folder(self._files, self._home)
            except ConfigError:
                if any(self._in_use(path) for path in self._stores()):
                    raise Conflict(f"kv_dir: stores in {self._home} are in use by other processes") from None
        try:
            lock = open_folder(
                self._files, self._home, self._clock, fresh=fresh, patience=patience, sleep=sleep, bare=True
            )
        except Conflict:  # the holder has marked it; the stores below have locks of their own
            check_folder(self._files, self._home)
            return
        lock.release()

    def others_bytes(self) -> int:
        """Return the bytes of the home's other stores."""
        return sum(one.size for one in self._others())

    # ---------------------------------------------------------------------------------------------- what is taken in

    def adopt(self, tag: bytes, model: str) -> None:
        """Move this model's chunks from elsewhere in the home into its store, which the caller holds.

        `tag`: of its engine. `model`: its name for people; chunks of the same name from other kernels or codecs move
        too.
        """
        with self._held(self._home) as held:
            if held:
                self._move(self._home, lambda found: self._ours(found, tag, model))
        for twin in self._twins:
            with self._held(twin) as held:
                if held:
                    self._move(twin, lambda found: {name.tag for name in found})

    @contextlib.contextmanager
    def _held(self, folder: Path) -> Iterator[bool]:
        """Hold a store if it exists and nobody else holds it; yield whether it is held."""
        lock: Lock | None = None
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if any(one.name == MARKER for one in self._files.list(folder)):
                lock = self._files.lock(folder)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.release()

    def _chunks(self, folder: Path) -> Iterator[tuple[Name, FolderEntry]]:
        """Yield the chunks in a folder, if it has any, and their files."""
        for digit in DIGITS:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                for entry in self._files.list(folder / digit):
                    name = None if entry.folder else parse_name(entry.name)
                    if name is not None and name.size == entry.size and entry.name[0] == digit:
                        yield name, entry

    def _ours(self, found: list[Name], tag: bytes, model: str) -> set[bytes]:
        """Return the tags of the model's chunks: its engine's, and those whose files name the model."""
        ours, folder = {tag}, StoreFolder(self._files, self._home)
        for other in {name.tag for name in found} - ours:
            name = next(one for one in found if one.tag == other)
            with contextlib.suppress(OSError, DamagedChunk):
                if chunk_file.verify(folder.read(name), name)[0].model == model[:256]:
                    ours.add(other)
        return ours

    def _move(self, source: Path, ours: Callable[[list[Name]], set[bytes]]) -> None:
        files = self._files
        found = sorted((name for name, _ in self._chunks(source)), key=lambda one: one.depth)
        tags = ours(found)
        there = {(name.tag, name.key) for name, _ in self._chunks(self._own)}
        touched = set[str]()
        for name in (one for one in found if one.tag in tags):
            digit = name.key.hex()[0]
            touched.add(digit)
            if (name.tag, name.key) in there:
                files.remove(source / digit / str(name))
            else:
                files.replace(source / digit / str(name), self._own / digit / str(name))
        if self._move_pins(source, {tag.hex() for tag in tags}):
            touched.add(PINS)
        for folder in (self._own, source):
            for one in sorted(touched):
                files.sync_folder(folder / one)

    def _move_pins(self, source: Path, tags: set[str]) -> bool:
        """Move pins that were not set anew in the model's own store; return whether there were any."""
        try:
            names = [one.name for one in self._files.list(source / PINS) if one.name.rpartition(".")[2] in tags]
        except (FileNotFoundError, NotADirectoryError):
            return False
        there = {one.name for one in self._files.list(self._own / PINS)}
        for name in names:
            if name in there:
                self._files.remove(source / PINS / name)
            else:
                self._files.replace(source / PINS / name, self._own / PINS / name)
        return bool(names)

    # ------------------------------------------------------------------------------------------------ what others have

    def due(self, total: int, own: int) -> bool:
        """Return whether it is time to `tend`: at intervals, and when the caller's store has grown."""
        return self._clock.now() >= self._next or own - self._grown > total // _GROWTH

    def tend(self, total: int, own: int, ttl: float) -> int:
        """Evict from the other stores that nobody holds until all stores of the home have at most `total` bytes.

        `own`: bytes of the caller's store. They also lose chunks unused for `ttl` seconds. Return the bytes of those
        that are held.
        """
        self._next, self._grown = self._clock.now() + _LOOK_EVERY, own
        others = sorted(self._others(), key=lambda one: one.newest)
        held = {one.path: one for one in others if self._in_use(one.path)}
        now = self._clock.time_ns() / 1e9
        if self._idle is None:
            newest = max((file.modified for _, file in self._chunks(self._own)), default=0.0)
            idle = now - max((newest, *(one.newest for one in others)))
            self._idle = idle if idle > ttl else 0.0
        in_use = sum(one.size for one in held.values())
        excess = sum(one.size for one in others) + own - total
        for one in others:
            stale = one.oldest < now - ttl - self._idle
            if one.path not in held and one.size and (excess > 0 or stale):
                excess -= self._shrink(one, max(0, one.size - max(0, excess)), ttl)
        return in_use

    def _others(self) -> Iterator[_Store]:
        """Yield all stores but the caller's, from the names of their files."""
        for path in (self._home, *self._stores()):
            if path != self._own:
                found = [file for _, file in self._chunks(path)]
                times = [file.modified for file in found]
                size = sum(file.disk for file in found)
                yield _Store(path, size, min(times, default=0.0), max(times, default=0.0))

    def _stores(self) -> list[Path]:
        """Return the folders of the models' stores."""
        try:
            listed = self._files.list(self._home / OF_MODELS)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return []
        return [self._home / OF_MODELS / entry.name for entry in listed if entry.folder]

    def _in_use(self, path: Path) -> bool:
        try:
            lock = self._files.lock(path)
        except PermissionError:
            return False  # it is another user's, so no process of ours has it
        if lock is not None:
            lock.release()
        return lock is None

    def _shrink(self, other: _Store, budget: int, ttl: float) -> int:
        """Evict from a store that nobody holds down to `budget`, and what is too old; return the bytes removed."""
        try:
            with self._opened(other.path) as state:
                before = state.index.bytes
                state.budget = budget + before - sum(one.disk for one in state.index.live())
                disk_maintenance.prune(state, state.now() - ttl - (self._idle or 0.0))
                state.make_room(0)
                return before - state.index.bytes
        except (ConfigError, Conflict):  # it is not a store, or was opened just now
            return 0

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[DiskState]:
        """Open another store and yield its state. Raises `ConfigError` and `Conflict` as `open_folder` does."""
        files = self._files
        lock = open_folder(files, path, self._clock, fresh=False, patience=0, sleep=lambda seconds: None)
        try:
            state = DiskState(StoreFolder(files, path), self._clock, 0)
            found = state.folder.scan()
            pins = Pins(state.folder).load(found)
            with state.mutex:
                junk = rebuild_index(state, found)
                state.budget = state.index.bytes
                for name, ids in pins.items():
                    state.index.pin(name, ids)
            for leftover, disk in junk:
                state.folder.discard(leftover, disk)
            yield state
        finally:
            lock.release()

    # ---------------------------------------------------------------------------------- what owners give up elsewhere

    def unpin(self, owner: str) -> bool:
        """Remove an owner's pins from the stores that nobody holds; return False if another process holds some."""
        start, done = pin_name(owner, b""), True
        for path in (self._home, *self._stores()):
            names: list[str] = []
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                names = [one.name for one in self._files.list(path / PINS) if one.name.startswith(start)]
            if path == self._own or not names:
                continue
            with self._held(path) as held:
                for name in names if held else ():
                    with contextlib.suppress(FileNotFoundError):
                        self._files.remove(path / PINS / name)
                if held:
                    self._files.sync_folder(path / PINS)
                done = done and held
        return done

    def erase(self, model: bytes, salt: bytes, tokens: Sequence[int], keep: int) -> bool:
        """Erase a context beyond its first `keep` tokens from the stores of another model.

        Return False if a store is in use or the disk refuses. Chunks of stores without a layout, of earlier versions,
        stay until their model is served or they are too old.
        """
        return all([self._erase(path, salt, tokens, keep) for path in places(self._home, model) if path != self._own])

    def has(self, model: bytes) -> bool:
        """Return whether there is a store that is named after this model."""
        return any(StoreFolder(self._files, path).marked() for path in places(self._home, model))

    def erase_tokens(self, tokens: Sequence[int], keep: int, searched: Collection[bytes]) -> bool:
        """Erase a context beyond its first `keep` tokens from the other stores, whatever salt its chunks have.

        The stores of the models in `searched` are left out. Return False if a store is in use or the disk refuses.
        """
        spared = {self._own, *(path for model in searched for path in places(self._home, model))}
        others = [path for path in (self._home, *self._stores()) if path not in spared]
        return all([self._erase_tokens(path, tokens, keep) for path in others])

    def _erase_tokens(self, path: Path, tokens: Sequence[int], keep: int) -> bool:
        if not any(self._chunks(path)):
            return True
        try:
            with self._opened(path) as state:
                ids, complete = chunks_of_tokens(state, tokens, keep)
                return self._remove(state, ids) and complete
        except Conflict:
            return False
        except ConfigError:  # not a store of this version: the version that reads it erases it
            return True

    def _erase(self, path: Path, salt: bytes, tokens: Sequence[int], keep: int) -> bool:
        folder = StoreFolder(self._files, path)
        if not folder.marked() or (layout := read_layout(folder)) is None:
            return True
        first = -(-keep // (CHUNK_BLOCKS * layout.block_tokens))
        try:
            with self._opened(path) as state:
                engines = disk_maintenance.OtherEngines(state, b"", b"")
                known = engines.learn()
                ids = engines.ids(lambda identity: layout.keys(identity, salt, tokens, first))
                return self._remove(state, ids) and known
        except Conflict:
            return False
        except ConfigError:  # not a store of this version: the version that reads it erases it
            return True

    def _remove(self, state: DiskState, ids: Collection[bytes]) -> bool:
        """Remove these chunks and all that extend them from another store; return whether they are gone for good."""
        with state.mutex:
            family = state.index.family(ids)
            for entry in family:
                state.mark_deleted(entry)
        state.clear(family)
        with contextlib.suppress(FileNotFoundError):
            self._files.remove(state.folder.folder / SEEN)
        # The index no longer knows evicted chunks, and after a power cut their names may be back.
        return state.sync(state.folder.digits()) and not state.index.lingering
