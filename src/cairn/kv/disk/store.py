"""The disk tier: chunks as files in one folder, shared by any number of engines; a `Store` for one of them.

The index is rebuilt from names and sizes at every start; a file is used only after it was read whole and every checksum
was right. Damage is a miss. No lock is held while a chunk is read, written or removed.

When the disk fails the store reports it (`stats().trouble`), refuses to keep, reads what it can, and tries the disk
again after 1, 2, 4 ... 60 seconds of the clock, in `keep`, `fetch`, `pin` or `tend`. A disk that fails at the start is
treated the same. A folder that somebody removed or replaced is opened anew.
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
from cairn.kv.disk.budget import DiskState
from cairn.kv.disk.chunk_file import HEADER_BYTES, DamagedChunk
from cairn.kv.disk.codec import Codec
from cairn.kv.disk.disk_writer import DiskWriter
from cairn.kv.disk.folder import PROBE_BYTES, StoreFolder, open_folder
from cairn.kv.disk.maintenance import OtherEngines
from cairn.kv.disk.model_folders import ModelFolders
from cairn.kv.disk.notes import Notes, write_layout
from cairn.kv.disk.pins import Pins, pin_bytes, pin_name
from cairn.kv.disk.rebuild_index import rebuild_index
from cairn.kv.disk.token_search import chunks_of_tokens
from cairn.kv.pool.prefix import Layout
from cairn.kv.tiers.store import HEAD_BYTES, Chunk, Scrubbed, Standing, Watch
from cairn.system.interfaces import Clock, FileSystem, Lock
from cairn.types.errors import ConfigError, Conflict
from cairn.types.stats import ImportedKv, TierStats

TTL = 30 * 86400.0
"""Seconds that an unused chunk is kept."""
RESERVE = 256 << 20
"""Bytes of the disk that the store does not grow into: the logs of agents need them more."""
ONCE_SECONDS = 10 * 86400.0
"""Seconds by which the last use of a chunk written `once` is backdated: it is evicted before all that was used since,
and its time to live is that much shorter."""
AHEAD = 2
"""How many chunks ahead reads are announced to the disk: it reads while a chunk is checked."""
_HEADERS = 1 << 20
"""Upper bound on the bytes of a chunk's file that are not pages: headers and tokens."""
_PRUNE_EVERY = 600.0
_PRUNES = 10
"""Least number of prunes within a time to live."""


class DiskStore:
    """A `Store` in a folder, and upkeep of everything in it."""

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
        """Lock the folder and read its names.

        `identity` and `model`: of the engine, and its name for people. `budget`: bytes on the disk for all models, of
        which this one has `share`; None for a fifth of what the disk has free or the stores hold, at most
        `disk_maintenance.LARGEST_BUDGET`. `reserve`: bytes of the disk that stay free. `fresh`: rename a folder that
        cannot be used. `home`: the folder that it shares with the stores of other models, see `ModelFolders`. `layout`:
        of the model, for processes that serve another. Raises `ConfigError` or `Conflict` as `folder.open_folder` says.
        Call `tend` about once a second.
        """
        self._files, self._codec, self._identity = files, codec, identity
        self._tag = chunk_file.model_tag(identity, codec.name)
        self._given, self._budget, self._share, self._ttl = budget, 0, share, ttl
        self._model, self._layout = model, layout
        self._unpinned_elsewhere: set[str] = set()
        """Owners whose pins in other stores of the home could not be removed yet."""
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
        """Pins that could not be written yet, by file."""
        self._forgotten: set[bytes] = set()
        """Ids of chunks that were dropped before the folder could be opened, or whose files remained when it went
        away."""
        self._unpinned: set[str] = set()
        """Name prefixes of the pin files of owners that were unpinned before the folder could be opened."""
        self._other_engines = OtherEngines(self._state, self._tag, identity)
        self._lock: Lock | None = None
        self._next_prune = 0.0
        self._idle = 0.0
        """Seconds since the last use of anything at the start, if that is longer than the time to live."""
        try:
            self._open(fresh=fresh, patience=patience, sleep=sleep)
        except OSError as error:
            self._state.fail("open", error)

    # --------------------------------------------------------------------------------------------------------- Store

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        """See `Store`. Asks only the index; no file is opened."""
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
        """See `Store`. Asks only the index."""
        with self._state.mutex:
            return self._state.index.get(self._tag + key) is not None

    def kept_bytes(self, group: int, size: int) -> int:
        """See `Store`. Returns the encoded size with a header."""
        return self._codec.written(group, size) + HEADER_BYTES

    def match_within(self, keys: Sequence[bytes]) -> tuple[int, bytes] | None:
        """See `Store`. Asks only the index."""
        state = self._state
        with state.mutex:
            found = state.index.within(self._tag + key for key in keys)
            if found is None:
                return None
            count, entry = found
            state.use(entry)
            return count, entry.name.key

    def fetch(self, key: bytes, tokens: Sequence[int], buffer: memoryview | None = None) -> Chunk | None:
        """See `Store`. With a `buffer`, the chunks after this one are expected to be read next."""
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
        """See `Store`. A chunk that is here counts as kept; one without its parent here or before it is refused."""
        self._try_again()
        return self._writer.keep(chunks)

    def watch(self, watch: Watch | None) -> None:
        """See `WatchedStore`. Tells of this engine's blocks."""
        with self._state.mutex:
            self._state.index.watch(self._tag, watch)

    def drop(self, keys: Sequence[bytes]) -> int:
        """See `Store`. Pinned chunks too. On return the bytes are gone for good; if the disk failed, they go later."""
        return self._drop([self._tag + key for key in keys])

    @property
    def notes(self) -> Notes:
        """See `StoreNotes`."""
        return self._notes

    def was_damaged(self, block: bytes) -> bool:
        """See `DurableStore`. Knows only what this process found."""
        with self._state.mutex:
            return self._tag + block[:HEAD_BYTES] in self._state.lost

    def lingers(self, keys: Sequence[bytes]) -> bool:
        """Return whether the file of a dropped chunk is still there or may come back in a power cut.

        Chunks dropped by `drop_of_other_engines` count too.
        """
        return self._other_engines.owe(keys) or self._remain({self._tag + key for key in keys})

    def _remain(self, ids: Collection[bytes]) -> bool:
        state = self._state
        with state.mutex:
            # A chunk that a lookup finds was written after the drop, by a request that continued the context.
            deleted = (id for id in ids if state.index.known(id) and state.index.get(id) is None)
            if any(deleted) or not self._forgotten.isdisjoint(ids):
                return True
        return state.folder.remains(ids) or state.owes({state.folder.digit(id[len(self._tag) :]) for id in ids})

    def drop_of_other_engines(self, keys: Callable[[bytes], Sequence[bytes]]) -> int:
        """See `DurableStore`. If the disk does not allow it, `tend` does it again."""
        with self._state.mutex:
            opened = self._lock is not None
        learned = self._other_engines.learn()
        ids = self._other_engines.ids(keys)
        gone = self._drop(sorted(ids))
        # The index does not know an engine whose last chunk was evicted; after a power cut that may be back.
        synced = opened and self._state.sync(self._state.folder.digits())
        self._other_engines.note(keys, done=learned and synced and not self._remain(ids))
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
        # Also for chunks that are not here now: an evicted chunk's name may be back after a power cut.
        touched = {entry.id for entry in family}.union(flying, ids)
        state.sync(sorted({state.folder.digit(id[len(self._tag) :]) for id in touched}))
        return gone

    def pin(self, owner: str, keys: Sequence[bytes]) -> None:
        """See `Store`. Takes effect at once, and is durable once the disk works. No keys unpin on every model.

        Pins precede the budget: their own few bytes are written even if nothing more can be evicted.
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
        """Remove these owners' pins on models that are not served now."""
        folders, state = self._folders, self._state
        for owner in tuple(self._unpinned_elsewhere):
            if state.failing or folders is None:
                return
            try:
                if folders.unpin(owner):
                    self._unpinned_elsewhere.discard(owner)
            except OSError as error:
                state.fail("write", error)

    def erase_of_model(
        self,
        model: bytes,
        salt: bytes,
        tokens: Sequence[int],
        keep: int,
        searched: Collection[bytes] | None = None,
    ) -> bool:
        """See `DurableStore`."""
        folders = self._folders
        try:
            if searched is None or (folders is not None and folders.has(model)):
                return folders is None or folders.erase(model, salt, tokens, keep)
            elsewhere = folders is None or folders.erase_tokens(tokens, keep, searched)
            return self._erase_tokens(tokens, keep) and elsewhere
        except OSError as error:
            self._state.fail("remove files from", error)
            return False

    def _erase_tokens(self, tokens: Sequence[int], keep: int) -> bool:
        with self._state.mutex:
            opened = self._lock is not None
        ids, complete = chunks_of_tokens(self._state, tokens, keep)
        self._drop(sorted(ids))
        return opened and complete and not self._remain(ids)

    def mark(self, keys: Sequence[bytes], standing: Standing) -> None:
        """See `Store`. For chunks of this engine."""
        with self._state.mutex:
            self._state.index.mark([self._tag + key for key in keys], standing)

    def paths(self, keys: Sequence[bytes]) -> list[Path]:
        """Return the files of those chunks that are here, in this order."""
        with self._state.mutex:
            found = [self._state.index.get(self._tag + key) for key in keys]
        return [self._state.folder.path(entry.name) for entry in found if entry is not None]

    def import_kv(
        self,
        path: Path,
        keyed: Callable[[int, int, Sequence[int], memoryview], Chunk | None],
        refuse: Callable[[Chunk], None],
    ) -> ImportedKv:
        """See `DurableStore`. The file's format is that of `portable_kv`."""
        chunks = size = ignored = refused = 0
        try:
            file = self._files.open(path, "read")
        except OSError:
            return ImportedKv()
        try:
            for at, length in portable_kv.frames(file):
                if not length:
                    break
                if length > self._largest:  # it cannot be a chunk of this model, so do not read it
                    refused += 1
                    continue
                chunk = self._checked(file.read(at, length), keyed)
                if chunk is None:
                    ignored += 1
                elif not isinstance(chunk, Chunk):
                    refused += 1
                elif not self.keep([chunk]):
                    refused += 1
                    refuse(chunk)
                else:
                    chunks, size = chunks + 1, size + len(memoryview(chunk.pages).cast("B"))
        except (OSError, portable_kv.Broken):
            refused += 1
        finally:
            file.close()
        return ImportedKv(chunks=chunks, bytes=size, ignored=ignored, refused=refused)

    @property
    def _largest(self) -> int:
        """Bytes of the largest file that a chunk of this model can have."""
        if self._layout is None:
            return portable_kv.MOST_CHUNK
        return max(self._codec.size(group) for group in range(len(self._layout.groups))) + _HEADERS

    def _checked(
        self, data: bytes, keyed: Callable[[int, int, Sequence[int], memoryview], Chunk | None]
    ) -> Chunk | Literal["refused"] | None:
        """Return a chunk of a file, "refused", or None for one of another engine."""
        try:
            header, tokens, pages = chunk_file.verify(data, chunk_file.name_of(data))
            if header.identity != self._identity or header.codec != self._codec.name:
                return None
            whole = memoryview(self._codec.decode(header.group, pages)).cast("B")
            return keyed(header.group, header.depth, tokens, whole) or "refused"
        except (ValueError, IndexError):
            return "refused"

    def unsaved(self, owner: str) -> bool:
        """See `DurableStore`. Pins on any model count."""
        start = pin_name(owner, b"")
        with self._state.mutex:
            elsewhere = owner in self._unpinned_elsewhere
            return elsewhere or start in self._unpinned or any(name.startswith(start) for name in self._unsaved)

    def durable(self) -> DiskStore:
        """Return this store."""
        return self

    def stats(self) -> TierStats:
        """Return figures of all models in the folder."""
        return self._state.stats()

    def close(self) -> None:
        """Save when chunks were used last, and pins that the disk did not take before; release the folder."""
        if self._unsaved or self._unpinned:
            self._try_again()
            self._save_pins()
        if self._lock is not None:
            disk_maintenance.remember_uses(self._state)
            self._lock.release()
            self._lock = None

    # -------------------------------------------------------------------------------------------------------- upkeep

    def tend(self) -> None:
        """Do periodic upkeep. Call it about once a second, from a thread that may wait for the disk.

        Try a failed disk again, repeat what it made impossible, prune chunks that are too old, keep to the budget, save
        when chunks were used.
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
                # After a long rest, or with a clock that is far ahead, all chunks look old at the start. So ages are
                # counted from the newest chunk.
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
        """Read and verify every chunk of every model; remove damaged chunks and those that extend them."""
        return disk_maintenance.scrub(self._state)

    def prune(self, *, others: bool = False) -> int:
        """Remove chunks unused for the time to live, and with `others` all of other models; return how many.

        Pinned chunks and those that a remaining chunk extends stay.
        """
        return disk_maintenance.prune(self._state, self._state.now() - self._ttl, keep=self._tag if others else b"")

    # ------------------------------------------------------------------------------------------------------- opening

    def _open(self, *, fresh: bool, patience: float, sleep: Callable[[float], None]) -> None:
        """Open the folder. Everything that the disk may refuse comes before the first change of the index."""
        state, folders = self._state, self._folders
        if folders is not None:
            folders.enter(fresh=fresh, patience=patience, sleep=sleep)
        lock = open_folder(self._files, state.folder.folder, state.clock, fresh=fresh, patience=patience, sleep=sleep)
        try:
            if folders is not None:
                folders.adopt(self._tag, self._model)
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
            junk = rebuild_index(state, found)
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
        """Keep all stores of the home within one budget.

        If other processes hold some of them, this store grows only into what they leave, but always to a quarter of its
        part.
        """
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
        """Try the disk if it failed and it is time, or reopen the folder if somebody took it away."""
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
        """Return whether the folder at our path is not the one that we hold: it may be another process's."""
        lock = self._lock
        return lock is not None and not lock.held()

    def _let_go(self) -> bool:
        """Forget everything in the folder, which is gone, but the pins; return False while a chunk is being written."""
        state = self._state
        state.fail("open", "it was removed or replaced")  # from here on nothing is written
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
