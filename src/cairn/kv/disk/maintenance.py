"""Upkeep of a disk store while it runs: pruning, scrubbing and cleaning."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from cairn.kv.disk import chunk_file
from cairn.kv.disk.budget import DiskState
from cairn.kv.disk.chunk_file import DamagedChunk
from cairn.kv.disk.index import IndexEntry
from cairn.kv.tiers.store import Scrubbed

Keys = Callable[[bytes], Sequence[bytes]]
"""Returns the keys of the chunks to drop for an engine's identity."""

LARGEST_BUDGET = 50 * 10**9
"""Most bytes that a store takes if no budget is set."""


def default_budget(free: int, held: int) -> int:
    """Return a fifth of what the disk has free or the store holds, at most `LARGEST_BUDGET`."""
    return min(LARGEST_BUDGET, (free + held) // 5)


def prune(state: DiskState, before: float, *, keep: bytes = b"") -> int:
    """Remove chunks not used since `before`, and with `keep`, a tag, all with other tags; return how many.

    Pinned chunks and those that a remaining chunk extends stay.
    """
    gone = 0
    among: list[IndexEntry] | None = None
    while True:
        with state.mutex:
            stale = state.index.leaves(lambda entry: entry.used < before or not entry.id.startswith(keep), among)
            for entry in stale:
                state.mark_deleted(entry)
            # Only these may have become leaves; scanning all chunks for each step of depth would take seconds.
            among = state.index.parents(stale)
        cleared = state.clear(stale)
        with state.mutex:
            state.count(evicted=cleared)
        gone += cleared
        if not cleared:
            return gone


def scrub(state: DiskState) -> Scrubbed:
    """Read and verify every chunk of every model; remove damaged chunks and those that extend them."""
    with state.mutex:
        entries = state.index.live()
    checked = damaged = unreadable = 0
    for entry in entries:
        with state.mutex:
            if state.index.get(entry.id) is not entry:
                continue
        checked += 1
        before = state.damaged
        data = state.read(entry)
        if data is not None:
            try:
                chunk_file.verify(data, entry.name)
            except DamagedChunk:
                damaged += state.drop_damaged(entry)
        elif (lost := state.damaged - before) > 0:
            damaged += lost
        else:
            with state.mutex:  # unless it was removed meanwhile
                unreadable += state.index.get(entry.id) is entry
    return Scrubbed(checked, damaged, unreadable)


def clean(state: DiskState) -> None:
    """Remove for good the files that could not be removed before. One thread at a time."""
    with state.mutex:
        deleted = state.index.deleted()
    # Marked before anything is removed, so that whatever fails below, each changed folder is synced some day.
    state.owe(state.folder.digit(entry.name.key) for entry in deleted)
    state.clear(deleted)
    try:
        for folder in state.folder.tidy():
            state.owe([folder])
    except OSError as error:
        state.fail("remove files from", error)
    state.sync(())


def remember_uses(state: DiskState) -> None:
    """Set the files' times to their last use, up to the first that the disk refuses; the rest next time.

    A lost time only makes a chunk look older.
    """
    ahead = state.ahead()
    while (entry := state.take_used()) is not None:
        try:
            with contextlib.suppress(FileNotFoundError):
                state.folder.files.touch(state.folder.path(entry.name), entry.used + ahead)
            entry.saved = entry.used
        except OSError:
            state.put_back(entry)
            return


class OtherEngines:
    """The other engines with chunks in the same folder, and drops of their chunks that the disk did not allow yet."""

    def __init__(self, state: DiskState, tag: bytes, identity: bytes) -> None:
        """Know nothing yet. `tag` and `identity`: of the store's own engine."""
        self._state, self._tag, self._identity = state, tag, identity
        self._identities: dict[bytes, bytes] = {}
        """Tag -> identity, as far as needed."""
        self._owed: dict[frozenset[bytes], Keys] = {}
        """Drops that the disk did not allow, by the keys that they name of this engine."""

    def learn(self) -> bool:
        """Read the identities of the other engines' chunks; return False if that of one remains unknown.

        A failing disk is asked once, not for each chunk; the next call begins with another chunk.
        """
        state = self._state
        with state.mutex:
            entries = state.index.of_other_models({self._tag, *self._identities})
        for entry in sorted(entries, key=lambda one: one.faults):
            if not entry.live or state.failing or entry.name.tag in self._identities:
                continue
            try:
                if (data := state.read(entry)) is not None:
                    self._identities[entry.name.tag] = chunk_file.verify(data, entry.name)[0].identity
            except DamagedChunk:
                state.drop_damaged(entry)
        with state.mutex:
            return all(one.name.tag in self._identities or not state.index.known(one.id) for one in entries)

    def ids(self, keys: Keys) -> set[bytes]:
        """Return the tag and key of each chunk that `keys` names of the known engines."""
        return {tag + key for tag, identity in self._identities.items() for key in keys(identity)}

    def note(self, keys: Keys, *, done: bool) -> None:
        """Remember a drop until it is done."""
        if done and not self._owed:
            return
        mine = frozenset(keys(self._identity))
        with self._state.mutex:
            if done:
                self._owed.pop(mine, None)
            elif mine:
                self._owed[mine] = keys

    def owe(self, keys: Sequence[bytes]) -> bool:
        """Return whether a drop of any of these keys of this engine is still pending."""
        with self._state.mutex:
            return any(not mine.isdisjoint(keys) for mine in self._owed)

    def owed(self) -> list[Keys]:
        """Return the pending drops."""
        with self._state.mutex:
            return list(self._owed.values())
