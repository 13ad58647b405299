"""Pins of chunks: one small file per owner and model.

Its name is `<sha256 of the owner>.<model tag>`, since a name that a client chose must not become a file name. It holds:
magic, format, number of keys; XXH3-128 of these, the name and the keys; the keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import struct
from collections.abc import Sequence

import xxhash

from cairn.kv.disk.folder import PINS, FolderScan, StoreFolder, blocks
from cairn.system.interfaces import FolderEntry

_MAGIC = b"cairn pn"
_FORMAT = 1
_PREFIX = struct.Struct("<8sII")
_START = _PREFIX.size + 16
_KEY = 32
_NAME = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}")


class Pins:
    """The files with the pins of all owners. One thread at a time. Raises `OSError` as the system does."""

    def __init__(self, folder: StoreFolder) -> None:
        self._folder, self._path = folder, folder.folder / PINS
        self.sizes: dict[str, int] = {}
        """Bytes on the disk, by name."""

    def load(self, found: FolderScan) -> dict[str, frozenset[bytes]]:
        """Return the ids (tag and key) that each file pins.

        Damaged files are added to the junk; unreadable ones pin nothing this time.
        """
        self.sizes, pinned = {}, {}
        for entry in found.pins:
            if entry.folder or not _NAME.fullmatch(entry.name):
                found.other += entry.disk
                continue
            try:
                data = self._read(entry)
            except OSError:
                found.other += entry.disk
                self.sizes[entry.name] = entry.disk  # so that an unpin removes it all the same
                continue
            ids = _parse(data, entry.name)
            if ids is None:
                found.junk.append((self._path / entry.name, entry.disk))
            else:
                found.other += entry.disk
                self.sizes[entry.name], pinned[entry.name] = entry.disk, ids
        return pinned

    def _read(self, entry: FolderEntry) -> bytes:
        with contextlib.closing(self._folder.files.open(self._path / entry.name, "read")) as file:
            return file.read(0, entry.size)

    def of(self, owner: str) -> list[str]:
        """Return the files of an owner, for all models."""
        start = pin_name(owner, b"")
        return [name for name in self.sizes if name.startswith(start)]

    def save(self, name: str, keys: Sequence[bytes]) -> None:
        """Replace the file durably, or remove it if there are no keys.

        After an error the old or the new file is there.
        """
        path = self._path / name
        if keys:
            body = b"".join(keys)
            prefix = _PREFIX.pack(_MAGIC, _FORMAT, len(keys))
            self.sizes[name] = self._folder.replace(path, [prefix + _check(prefix, name, body) + body])
        elif name in self.sizes:
            with contextlib.suppress(FileNotFoundError):
                self._folder.files.remove(path)
            del self.sizes[name]
        self._folder.files.sync_folder(self._path)


def pin_name(owner: str, tag: bytes) -> str:
    """Return the name of the file of an owner's pins on a model."""
    return f"{hashlib.sha256(owner.encode('utf-8', 'surrogatepass')).hexdigest()}.{tag.hex()}"


def pin_bytes(keys: Sequence[bytes]) -> int:
    """Return the bytes on the disk of a file that pins these keys."""
    return blocks(_START + _KEY * len(keys)) if keys else 0


def _check(prefix: bytes, name: str, body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(prefix + name.encode() + body)


def _parse(data: bytes, name: str) -> frozenset[bytes] | None:
    if len(data) < _START:
        return None
    magic, version, count = _PREFIX.unpack_from(data)
    body = data[_START:]
    if magic != _MAGIC or version != _FORMAT or len(body) != _KEY * count:
        return None
    if _check(data[: _PREFIX.size], name, body) != data[_PREFIX.size : _START]:
        return None
    tag = bytes.fromhex(name.partition(".")[2])
    return frozenset(tag + body[at : at + _KEY] for at in range(0, len(body), _KEY))
