"""A folder as a shared store: on one machine, or on a network file system that all replicas mount.

An object is written under a temporary name, synced, and given its name by a hard link, which fails if the name is
taken. So an object is there whole or not at all, and of two writers one wins, also over NFS.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from cairn.cluster.blobs import LARGEST
from cairn.system.interfaces import FileSystem, Rng

TEMPORARY = ".new"


class FolderBlobs:
    """`Blobs` in a folder."""

    def __init__(self, files: FileSystem, root: Path, rng: Rng) -> None:
        self._files, self._root, self._rng = files, root, rng
        self._made: set[Path] = set()
        """Folders known to exist."""

    def create(self, name: str, data: bytes) -> bool:
        """See `Blobs`."""
        target = self._root / name
        source = self._written(target, data)
        try:
            self._files.link(source, target)
        except FileExistsError:
            return False
        finally:
            with contextlib.suppress(OSError):
                self._files.remove(source)
        self._files.sync_folder(target.parent)
        return True

    def replace(self, name: str, data: bytes) -> None:
        """See `Blobs`. Not durable: what is replaced is written again soon."""
        target = self._root / name
        source = self._written(target, data, sync=False)
        try:
            self._files.replace(source, target)
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.remove(source)
            raise

    def read(self, name: str) -> bytes | None:
        """See `Blobs`."""
        try:
            file = self._files.open(self._root / name, "read")
        except FileNotFoundError:
            return None
        try:
            return file.read(0, min(file.size(), LARGEST))
        finally:
            file.close()

    def list(self, folder: str, after: str = "") -> Sequence[str]:
        """See `Blobs`. Folders that end before `after` are not looked into."""
        return sorted(name for name in self._walk(folder, after) if name > after)

    def _walk(self, folder: str, after: str) -> Iterator[str]:
        try:
            entries = self._files.list(self._root / folder)
        except FileNotFoundError:
            return
        for entry in entries:
            name = f"{folder}/{entry.name}"
            if entry.folder:
                if name >= after[: len(name)]:
                    yield from self._walk(name, after)
            elif not entry.name.startswith(TEMPORARY):
                yield name

    def delete(self, names: Sequence[str]) -> None:
        """See `Blobs`."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._files.remove(self._root / name)

    def _written(self, target: Path, data: bytes, *, sync: bool = True) -> Path:
        """Write a file beside `target` under a temporary name; return its path."""
        try:
            return self._write(target, data, sync)
        except FileNotFoundError:  # somebody removed the folder since it was made
            self._made.discard(target.parent)
            return self._write(target, data, sync)

    def _write(self, target: Path, data: bytes, sync: bool) -> Path:
        if target.parent not in self._made:
            self._files.make_folder(target.parent)
            self._made.add(target.parent)
        source = target.parent / f"{TEMPORARY}-{self._rng.bits64():016x}"
        file = self._files.open(source, "create")
        try:
            file.append(data)
            if sync:
                file.sync()
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.remove(source)
            raise
        finally:
            file.close()
        return source
