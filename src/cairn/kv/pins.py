"""Who pins which chunks: one small file an owner and model.

It is called `<sha256 of the owner>.<model tag>`, because what a client chose is nobody's file name, and holds: magic,
format, number of keys; XXH3-128 of these, the name and the keys; the keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from cairn.kv.store_folder import StoreFolder, blocks

_MAGIC = b"cairn pn"
_FORMAT = 1
_PREFIX = struct.Struct("<8sII")
_START = _PREFIX.size + 16
_KEY = 32
_NAME = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}")


def pin_name(owner: str, tag: bytes) -> str:
    """The file of an owner's pins on a model."""
    return f"{hashlib.sha256(owner.encode('utf-8', 'surrogatepass')).hexdigest()}.{tag.hex()}"


def pin_bytes(keys: Sequence[bytes]) -> int:
    """Bytes on the disk of a file that pins these."""
    return blocks(_START + _KEY * len(keys)) if keys else 0


def save_pins(folder: StoreFolder, pins: Path, name: str, keys: Sequence[bytes]) -> None:
    """Replace the file, durably; without keys there is none. Raises `OSError`, and then the old or the new is there."""
    if keys:
        body = b"".join(keys)
        prefix = _PREFIX.pack(_MAGIC, _FORMAT, len(keys))
        temporary, size = folder.write(pins, [prefix + _check(prefix, name, body) + body])
        try:
            folder.files.replace(temporary, pins / name)
        except OSError:
            folder.discard(temporary, size)
            raise
    else:
        with contextlib.suppress(FileNotFoundError):
            folder.files.remove(pins / name)
    folder.files.sync_folder(pins)


def load_pins(folder: StoreFolder, pins: Path) -> Iterator[tuple[str, frozenset[bytes] | None]]:
    """Each file's name with the ids (tag and key) that it pins, or None where it is damaged. Raises `OSError`."""
    for entry in folder.files.list(pins):
        if entry.folder or not _NAME.fullmatch(entry.name):
            continue
        file = folder.files.open(pins / entry.name, "read")
        try:
            data = file.read(0, entry.size)
        finally:
            file.close()
        yield entry.name, _parse(data, entry.name)


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
