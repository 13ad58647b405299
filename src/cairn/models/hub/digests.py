"""SHA-256 of files, remembered by path and what the system says of them, so that a start does not hash gigabytes again.

The time of the last change (ctime) is the one that nobody can set: an archive or a copy may bring an old mtime, and an
inode number is used again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from io import BufferedReader, FileIO
from pathlib import Path

from cairn.config.paths import home
from cairn.models.files import opened
from cairn.types.errors import ConfigError

Watch = Callable[[str, int, int], None]
"""Told how far the load of a model is: what is being done, how much of it is done, and of how much."""

_watch: ContextVar[Watch | None] = ContextVar("cairn_loading", default=None)


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Inside, on this thread, `watch` is told of every step of a load."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def tell(doing: str, done: int, total: int) -> None:
    """Something of a load is done."""
    if (watch := _watch.get()) is not None:
        watch(doing, done, total)


REMEMBER_FROM = 64 << 20
"""Bytes: smaller files are hashed each time, which takes at most some 30 ms."""

_PIECE = 1 << 20

_hashed: dict[str, tuple[str, bytes]] = {}
"""What this process hashed, by path, with its key: a start asks twice, and the cache folder may not be writable."""


def file_digest(path: Path) -> bytes:
    """SHA-256 of a file's bytes. Raises `ModelFileError` if it cannot be read."""
    with opened(path) as file:
        stat = os.fstat(file.fileno())
        if stat.st_size < REMEMBER_FROM:
            return hashlib.file_digest(file, "sha256").digest()
        place = f"{path.resolve()}|"
        key = _key(path, file)
        mine, digest = _hashed.get(place, ("", b""))
        if mine == key:
            return digest
        known = _load()
        if key in known:
            return bytes.fromhex(known[key])
        digest = _hashed_whole(file, stat.st_size)
    _hashed[place] = key, digest
    # What was in this place before will not come back, and would be kept for ever.
    _save({old: known[old] for old in known if not old.startswith(place)} | {key: digest.hex()})
    return digest


def _hashed_whole(file: BufferedReader, size: int) -> bytes:
    """Hash a file as `hashlib.file_digest` does, telling how far it is: a large file on a slow disk takes minutes."""
    hasher, buffer, done = hashlib.sha256(), memoryview(bytearray(_PIECE)), 0
    while count := file.readinto(buffer):
        tell("checking the files", done, size)
        hasher.update(buffer[:count])
        done += count
    return hasher.digest()


def vouched(path: Path, file: BufferedReader | FileIO, value: bytes) -> bool:
    """Whether `vouch` said this of a file, and nothing touched it since."""
    return _load().get(_key(path, file)) == value.hex()


def vouch(path: Path, file: BufferedReader | FileIO, value: bytes) -> None:
    """Remember 32 bytes that say what a file holds, as digests are remembered: until anything touches it."""
    known, place = _load(), f"{path.resolve()}|"
    _save({old: known[old] for old in known if not old.startswith(place)} | {_key(path, file): value.hex()})


def _key(path: Path, file: BufferedReader | FileIO) -> str:
    stat = os.fstat(file.fileno())
    return f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}|{stat.st_dev}:{stat.st_ino}"


def memory_path() -> Path:
    """Where digests are remembered: derived data, safe to delete."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else home() / ".cache") / "cairn" / "digests.json"


def _load() -> dict[str, str]:
    """What was remembered; anything in doubt is forgotten, which costs one more hash."""
    try:
        known = json.loads(memory_path().read_bytes())
        return {key: value for key, value in known.items() if len(bytes.fromhex(value)) == 32}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, ConfigError):
        return {}


def _save(known: dict[str, str]) -> None:
    """Best effort: a home that cannot be written costs one hash at every start and nothing else."""
    with contextlib.suppress(OSError, ConfigError):
        path = memory_path()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(known, file)
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)  # of a disk that is full; otherwise it has its name by now
