"""Rebuilding of a disk store's index at a start, from the names of the files in its folder.

No log has to be replayed after a crash: a chunk's file is whole or absent, and its name says what the index needs.
"""

from __future__ import annotations

from pathlib import Path

from cairn.kv.disk.budget import DiskState
from cairn.kv.disk.chunk_file import parse_name
from cairn.kv.disk.folder import FolderScan
from cairn.kv.disk.index import IndexEntry, chains


def rebuild_index(state: DiskState, found: FolderScan) -> list[tuple[Path, int]]:
    """Fill the index from a scan; return the files to remove, with their bytes.

    Those are junk, orphans, duplicates, and tails that another chunk begins with, which a killed process could not
    remove.
    """
    index, now = state.index, state.now()
    index.bytes = found.other
    cut = tuple(found.junk)
    entries: dict[bytes, IndexEntry] = {}
    for name, disk, modified in sorted(found.chunks, key=lambda one: str(one[0])):
        entry = state.entry(name, disk, min(modified, now))
        if modified > now:  # save it, or the chunk would look new at every start until that time
            state.used[entry.id] = entry
        if entries.setdefault(entry.id, entry) is not entry:
            found.junk.append((state.folder.path(name), disk))
    for entry in chains(list(entries.values())):
        index.add(entry)
        del entries[entry.id]
    for lost in (*(entry.name for entry in entries.values()), *(parse_name(path.name) for path, _ in cut)):
        if lost is not None:
            state.lose(lost)
    replaced = index.family([entry.id for entry in index.live() if index.replaces(entry.id)])
    for entry in replaced:
        index.mark_deleted(entry)
        index.forget(entry)
    return found.junk + [(state.folder.path(entry.name), entry.disk) for entry in (*entries.values(), *replaced)]
