"""What a disk store does besides reading and writing chunks: learn at a start what is there, look after it later."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from cairn.kv import chunk_file
from cairn.kv.chunk_file import Damaged
from cairn.kv.disk_state import DiskState
from cairn.kv.shelf import Entry, chains
from cairn.kv.store_folder import Found

LARGEST_BUDGET = 50 * 10**9
"""Bytes."""


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """What a scrub found. Counts are chunks."""

    checked: int
    damaged: int
    """Removed, with what extended them."""
    unreadable: int
    """The disk did not give them; they stay until it is asked again."""


def default_budget(free: int, held: int) -> int:
    """A fifth of what the disk has free or the store holds."""
    return min(LARGEST_BUDGET, (free + held) // 5)


def fill(state: DiskState, found: Found) -> list[tuple[Path, int]]:
    """The index of what a start found. Returns what has to go: junk, what hangs on nothing, what is there twice."""
    shelf, now = state.shelf, state.now()
    shelf.bytes = found.other
    entries: dict[bytes, Entry] = {}
    for name, disk, modified in sorted(found.chunks, key=lambda one: str(one[0])):
        parent = name.tag + name.parent if name.parent else b""
        used = min(modified, now)
        entry = Entry(name.tag + name.key, parent, name, disk, used, used)
        if modified > now:  # else it would look new at each start, until that time has come
            state.used[entry.id] = entry
        if entries.setdefault(entry.id, entry) is not entry:
            found.junk.append((state.folder.path(name), disk))
    for entry in chains(list(entries.values())):
        shelf.add(entry)
        del entries[entry.id]
    return found.junk + [(state.folder.path(entry.name), entry.disk) for entry in entries.values()]


def prune(state: DiskState, before: float, *, keep: bytes = b"") -> int:
    """Remove chunks not used since `before`, and with `keep`, a tag, all that do not have it; how many went.

    Never a pinned one, never one that a chunk which stays extends.
    """
    gone = 0
    among: list[Entry] | None = None
    while True:
        with state.mutex:
            stale = state.shelf.leaves(lambda entry: entry.used < before or not entry.id.startswith(keep), among)
            for entry in stale:
                state.doom(entry)
            # Only these may have become leaves: to look at all again for each step of depth takes seconds.
            among = state.shelf.parents(stale)
        cleared = state.clear(stale)
        with state.mutex:
            state.count(evicted=cleared)
        gone += cleared
        if not cleared:
            return gone


def scrub(state: DiskState) -> Scrubbed:
    """Read and verify every chunk of every model; damaged ones go, with what extends them."""
    with state.mutex:
        entries = state.shelf.live()
    checked = damaged = unreadable = 0
    for entry in entries:
        with state.mutex:
            if state.shelf.get(entry.id) is not entry:
                continue
        checked += 1
        before = state.damaged
        data = state.read(entry)
        if data is not None:
            try:
                chunk_file.verify(data, entry.name)
            except Damaged:
                damaged += state.condemn(entry)
        elif (lost := state.damaged - before) > 0:
            damaged += lost
        else:
            with state.mutex:  # else it went meanwhile
                unreadable += state.shelf.get(entry.id) is entry
    return Scrubbed(checked, damaged, unreadable)


def clean(state: DiskState) -> None:
    """Remove for good what could not be removed before. One thread at a time."""
    with state.mutex:
        doomed = state.shelf.doomed()
    # Owed before anything goes, so that whatever fails below, each folder that changed is synced some day.
    state.owe(state.folder.digit(entry.name.key) for entry in doomed)
    state.clear(doomed)
    try:
        for folder in state.folder.tidy():
            state.owe([folder])
    except OSError as error:
        state.fail("remove files from", error)
    state.sync(())


def remember_uses(state: DiskState) -> None:
    """Put the time of the last use on the files, up to the first that the disk refuses; the rest next time.

    Best effort: what is lost makes a chunk look older.
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
