"""Shared stores for tests: one in memory that can be made to fail, and keys that are the same every time."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from cairn.cluster.keys import ClusterKeys


class Draws:
    """An `Rng` that counts up."""

    def __init__(self, first: int = 1) -> None:
        self._numbers = itertools.count(first)

    def bits64(self) -> int:
        return next(self._numbers) * 0x9E3779B97F4A7C15 % (1 << 63)


def keys(first: int = 1) -> ClusterKeys:
    return ClusterKeys(b"n" * 32, (b"k" * 32,), Draws(first))


class MemoryBlobs:
    """`Blobs` in memory. `dead`: every call fails; `slow`: seconds that every call takes."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.dead = False
        self.slow = 0.0
        self.calls = 0
        self.before: Callable[[str, str], None] = lambda call, name: None
        self._lock = threading.Lock()

    def _call(self, call: str, name: str = "") -> None:
        self.calls += 1
        self.before(call, name)
        if self.slow:
            time.sleep(self.slow)
        if self.dead:
            raise OSError("the store is dead")

    def create(self, name: str, data: bytes) -> bool:
        self._call("create", name)
        with self._lock:
            return self.objects.setdefault(name, data) is data

    def replace(self, name: str, data: bytes) -> None:
        self._call("replace", name)
        self.objects[name] = data

    def read(self, name: str) -> bytes | None:
        self._call("read", name)
        return self.objects.get(name)

    def list(self, folder: str, after: str = "") -> Sequence[str]:
        self._call("list", folder)
        return sorted(name for name in tuple(self.objects) if name.startswith(folder + "/") and name > after)

    def delete(self, names: Sequence[str]) -> None:
        self._call("delete")
        for name in names:
            self.objects.pop(name, None)


class Awaited:
    """An `AsyncBlobs` over a `Blobs`, without threads or deadlines."""

    def __init__(self, blobs: MemoryBlobs) -> None:
        self._blobs = blobs

    async def create(self, name: str, data: bytes) -> bool:
        return self._blobs.create(name, data) or self._blobs.read(name) == data

    async def replace(self, name: str, data: bytes) -> None:
        self._blobs.replace(name, data)

    async def read(self, name: str) -> bytes | None:
        return self._blobs.read(name)

    async def read_several(self, names: Sequence[str], *, waits: bool = True) -> Sequence[bytes | OSError | None]:
        found: list[bytes | OSError | None] = []
        for name in names:
            try:
                found.append(await self.read(name))
            except OSError as error:
                found.append(error)
        return found

    async def list(self, folder: str, after: str = "") -> Sequence[str]:
        return self._blobs.list(folder, after)

    async def delete(self, names: Sequence[str]) -> None:
        self._blobs.delete(names)
