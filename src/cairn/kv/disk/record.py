"""Small files beside the chunks of a store, each replaced as a whole: magic, XXH3-128 of the rest, msgpack."""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

import msgspec
import xxhash

from cairn.kv.disk.folder import StoreFolder

T = TypeVar("T")

_DIGEST = 16
_LARGEST = 1 << 20


def write_record(folder: StoreFolder, name: str, magic: bytes, value: Any) -> None:
    """Write a value durably to the store's file of this name. Raises `OSError` as the system does."""
    data = msgspec.msgpack.encode(value)
    folder.replace(folder.folder / name, [magic + xxhash.xxh3_128_digest(data), data])
    folder.files.sync_folder(folder.folder)


def read_record(folder: StoreFolder, name: str, magic: bytes, kind: type[T]) -> T | None:
    """Return the value in the store's file; None if there is no file or it is damaged. Raises `OSError`."""
    try:
        with contextlib.closing(folder.files.open(folder.folder / name, "read")) as file:
            content = file.read(0, _LARGEST)
    except (FileNotFoundError, NotADirectoryError):
        return None
    start, data = len(magic) + _DIGEST, content[len(magic) + _DIGEST :]
    if content[:start] == magic + xxhash.xxh3_128_digest(data):
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.msgpack.decode(data, type=kind)
    return None
