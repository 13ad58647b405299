"""Chunks, a clock and a store for the tests of the disk store."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from cairn.kv.disk.codec import Raw
from cairn.kv.disk.store import DiskStore
from cairn.kv.tiers.store import Chunk
from cairn.system.interfaces import FileSystem
from tests.files import CrashFiles

FOLDER = Path("/kv")
SIZE = 400
"""Bytes of a chunk's pages."""


class Time:
    """A clock that the test moves; its wall clock agrees until it is set."""

    def __init__(self) -> None:
        self.seconds = 1_000_000.0
        self.wall = 0.0

    def now(self) -> float:
        return self.seconds

    def time_ns(self) -> int:
        return round((self.seconds + self.wall) * 1e9)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def chain(count: int, *, salt: bytes = b"", size: int = SIZE, after: Chunk | None = None) -> list[Chunk]:
    """Return chunks that extend each other."""
    chunks: list[Chunk] = []
    parent, depth = (after.key, after.depth + 64) if after else (b"", 0)
    for number in range(count):
        key = hashlib.sha256(salt + parent + number.to_bytes(4, "little")).digest()
        tokens = tuple(int.from_bytes(key[:2], "little") + i for i in range(64))
        pages = (key * (size // 32 + 1))[:size]
        chunks.append(Chunk(key, parent, tokens, depth + 64 * number, pages))
        parent = key
    return chunks


def keys(chunks: list[Chunk]) -> list[bytes]:
    return [chunk.key for chunk in chunks]


def open_store(files: FileSystem, time: Time, *, folder: Path = FOLDER, size: int = SIZE, **how: Any) -> DiskStore:
    """Open a store that never really waits."""
    how = {"identity": b"model", "model": "model", "codec": Raw([size // 4]), "sleep": time.sleep, "reserve": 0, **how}
    return DiskStore(files, folder, clock=time, **how)


def on_disk(files: CrashFiles) -> int:
    """Return the bytes that the store's files take."""
    return sum(-(-len(data) // 4096) * 4096 for data in files.files(FOLDER).values())


def chunk_path(files: CrashFiles, chunk: Chunk) -> Path:
    """Return the path of a chunk's file."""
    [path] = [path for path in files.files(FOLDER) if path.name.startswith(chunk.key.hex())]
    return path


def held(files: CrashFiles, chunks: list[Chunk]) -> int:
    """Return how many of these chunks have a file; asking the store would count as a use."""
    names = {path.name.partition(".")[0] for path in files.files(FOLDER)}
    return sum(chunk.key.hex() in names for chunk in chunks)
