"""The disk store: what it keeps, what it gives back, what it gives up."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.files import CrashFiles

from cairn.kv.codec import Raw
from cairn.kv.disk import DiskStore
from cairn.kv.store import Chunk

FOLDER = Path("/kv")
SIZE = 400


class Time:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 1_000_000.0

    def now(self) -> float:
        return self.seconds

    def time_ns(self) -> int:
        return round(self.seconds * 1e9)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def chain(count: int, *, salt: bytes = b"", size: int = SIZE, after: Chunk | None = None) -> list[Chunk]:
    """Chunks that extend each other."""
    chunks: list[Chunk] = []
    parent, depth = (after.key, after.depth + 64) if after else (b"", 0)
    for number in range(count):
        key = hashlib.sha256(salt + parent + bytes([number])).digest()
        tokens = tuple(int.from_bytes(key[:2], "little") + i for i in range(64))
        pages = (key * (size // 32 + 1))[:size]
        chunks.append(Chunk(key, parent, tokens, depth + 64 * number, pages))
        parent = key
    return chunks


def test_what_was_kept_is_found_after_a_restart() -> None:
    files, time = CrashFiles(), Time()
    store = DiskStore(files, FOLDER, identity=b"model", model="model", codec=Raw([SIZE // 4]), clock=time)
    chunks = chain(5)
    assert store.keep(chunks) == 5
    store.close()
    again = DiskStore(files, FOLDER, identity=b"model", model="model", codec=Raw([SIZE // 4]), clock=time)
    assert again.leading([chunk.key for chunk in chunks]) == 5
    assert [again.fetch(chunk.key, chunk.tokens) for chunk in chunks] == chunks
