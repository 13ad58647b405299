"""Notes that a disk store keeps beside its chunks: the bytes written lately, the blocks seen, the model's layout.

    <store>/written     see `record`
    <store>/layout      see `record`; lets a process that serves another model erase a context from this store
    <store>/seen        records of `kv.pool.seen_blocks`, appended, and now and then written anew

No answer depends on them. `seen` is never synced: what a power cut takes of it only explains less.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

from cairn.kv.disk.budget import DiskState
from cairn.kv.disk.folder import StoreFolder, blocks
from cairn.kv.disk.record import read_record, write_record
from cairn.kv.pool.prefix import Layout

SEEN = "seen"
_MOST_SEEN = 4 << 20
_WRITTEN, _MAGIC = "written", b"cairn kv written"
_LAYOUT, _LAYOUT_MAGIC = "layout", b"cairn kv layout1"


def write_layout(folder: StoreFolder, layout: Layout) -> None:
    """Store the layout durably in a store that this process holds, unless the store has the same one already."""
    if read_layout(folder) != layout:
        write_record(folder, _LAYOUT, _LAYOUT_MAGIC, layout)


def read_layout(folder: StoreFolder) -> Layout | None:
    """Return the layout of a store; None if it has none, or its file is damaged."""
    return read_record(folder, _LAYOUT, _LAYOUT_MAGIC, Layout)


class Notes:
    """The files `written` and `seen` of one store.

    One thread at a time. If the disk fails, the file is tried again with the next change.
    """

    def __init__(self, state: DiskState) -> None:
        self._state = state
        self._written: tuple[tuple[float, int], ...] = ()
        self._seen = b""
        self._appends = False
        """Whether `seen` is there and whole, so that it can be appended to."""
        self._counted: dict[str, int] = {}
        """Bytes on the disk of each file that the index counts."""

    def load(self) -> None:
        """Read the files; the index counts their bytes already. Raises `OSError` as the system does."""
        folder, self._seen = self._state.folder, b""
        beside = {entry.name: entry for entry in folder.files.list(folder.folder)}
        self._written = read_record(folder, _WRITTEN, _MAGIC, tuple[tuple[float, int], ...]) or ()
        self._appends = SEEN in beside
        if self._appends:
            with contextlib.closing(folder.files.open(folder.folder / SEEN, "read")) as file:
                self._seen = file.read(0, _MOST_SEEN)
        self._counted = {name: beside[name].disk for name in (_WRITTEN, SEEN) if name in beside}

    def recall_written(self) -> Sequence[tuple[float, int]]:
        """Return the spans as read when the folder was opened."""
        return self._written

    def remember_written(self, written: Sequence[tuple[float, int]]) -> None:
        """Replace the file of written spans."""
        folder = self._state.folder
        self._write(_WRITTEN, 16 * len(written), lambda: write_record(folder, _WRITTEN, _MAGIC, tuple(written)))

    def recall_seen(self) -> bytes:
        """Return the records as read when the folder was opened."""
        return self._seen

    def remember_seen(self, records: bytes, *, anew: bool) -> None:
        """Append records of seen blocks; `anew`: replace the file."""
        work = self._append if self._appends and not anew else self._replace
        self._appends = False
        self._appends = self._write(SEEN, len(records), partial(work, records))

    def _replace(self, records: bytes) -> None:
        folder = self._state.folder
        folder.replace(folder.folder / SEEN, [records])

    def _append(self, records: bytes) -> None:
        with contextlib.closing(self._state.folder.files.open(self._state.folder.folder / SEEN, "append")) as file:
            file.append(records)

    def _write(self, name: str, size: int, work: Callable[[], None]) -> bool:
        """Write a file and count its bytes; return whether that worked."""
        state, files = self._state, self._state.folder.files
        if state.failing:
            return False
        state.make_room(blocks(size))
        try:
            state.write(blocks(size), work)
            with contextlib.closing(files.open(state.folder.folder / name, "read")) as file:
                disk = blocks(file.size())
        except OSError as error:
            state.fail("write", error)
            return False
        with state.mutex:
            state.index.bytes += disk - self._counted.get(name, 0)
            self._counted[name] = disk
        return True
