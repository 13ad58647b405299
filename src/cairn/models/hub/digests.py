"""SHA-256 of files, cached by path and file status so that a start does not hash gigabytes again.

The key includes ctime, which nobody can set: an archive or a copy may bring an old mtime, and inode numbers are reused.
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
"""Receives the progress of a load: what is being done, how much is done, and the total."""

_watch: ContextVar[Watch | None] = ContextVar("cairn_loading", default=None)


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Pass the progress of loads on this thread to `watch` while inside."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def tell(doing: str, done: int, total: int) -> None:
    """Report progress of a load."""
    if (watch := _watch.get()) is not None:
        watch(doing, done, total)


REMEMBER_FROM = 64 << 20
"""Least bytes to cache; smaller files take at most some 30 ms to hash."""

_PIECE = 1 << 20

_hashed: dict[str, tuple[str, bytes]] = {}
"""Digests of this process by path, with their keys: a start asks twice, and the cache folder may not be writable."""


def file_digest(path: Path) -> bytes:
    """Return the SHA-256 of a file's bytes; raise `ModelFileError` if it cannot be read."""
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
    # Drop earlier digests of the same path, which would never be used again.
    _save({old: known[old] for old in known if not old.startswith(place)} | {key: digest.hex()})
    return digest


def _hashed_whole(file: BufferedReader, size: int) -> bytes:
    """Hash a file as `hashlib.file_digest` does and report progress: a large file on a slow disk takes minutes."""
    hasher, buffer, done = hashlib.sha256(), memoryview(bytearray(_PIECE)), 0
    while count := file.readinto(buffer):
        tell("checking the files", done, size)
        hasher.update(buffer[:count])
        done += count
    return hasher.digest()


def vouched(path: Path, file: BufferedReader | FileIO, value: bytes) -> bool:
    """Return whether `vouch` stored this value for the file and nothing modified it since."""
    return _load().get(_key(path, file)) == value.hex()


def vouch(path: Path, file: BufferedReader | FileIO, value: bytes) -> None:
    """Store 32 bytes about a file's content, valid until the file is modified."""
    known, place = _load(), f"{path.resolve()}|"
    _save({old: known[old] for old in known if not old.startswith(place)} | {_key(path, file): value.hex()})


def _key(path: Path, file: BufferedReader | FileIO) -> str:
    stat = os.fstat(file.fileno())
    return f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}|{stat.st_dev}:{stat.st_ino}"


def memory_path() -> Path:
    """Return the file of cached digests: derived data, safe to delete."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else home() / ".cache") / "cairn" / "digests.json"


def _load() -> dict[str, str]:
    """Return the cached digests; anything doubtful is dropped, which costs one more hash."""
    try:
        known = json.loads(memory_path().read_bytes())
        return {key: value for key, value in known.items() if len(bytes.fromhex(value)) == 32}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, ConfigError):
        return {}


def _save(known: dict[str, str]) -> None:
    """Store digests if possible: an unwritable home costs one hash at every start."""
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
                os.unlink(temporary)  # left by a failed write, such as on a full disk
