"""The KV of an agent's context in front of its exported file, and out of such a file again (`kv.portable_kv`)."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import BinaryIO

from cairn.agents.kv import AgentKv
from cairn.agents.turn_tree import Agent
from cairn.kv.disk import portable_kv
from cairn.types.errors import InvalidRequest, Unavailable
from cairn.types.stats import TakenIn

COPY_BYTES = 1 << 20


async def with_kv(
    pieces: AsyncGenerator[bytes, None], kv: AgentKv, agent: Agent, most: int
) -> AsyncGenerator[bytes, None]:
    """The pieces of a file, with what the disk has of the agent's context before them: at most `most` bytes, of the
    beginning of the context. Where the model is not loaded, or stores nothing, there is none.

    Nothing comes before the first of `pieces` is there.
    """
    async with contextlib.aclosing(pieces):
        first = await anext(pieces)
        yield portable_kv.MAGIC
        left = most
        for path in await kv.paths(agent):
            data = await asyncio.to_thread(_read, path)
            if len(data) > left:
                break
            left -= len(data)
            if data:
                yield portable_kv.framed(len(data))
                yield data
        yield portable_kv.END
        yield first
        async for piece in pieces:
            yield piece


def _read(path: Path) -> bytes:
    """A chunk's file; nothing where it was evicted meanwhile, or the disk fails: what it has is computed again."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


class _Readable:
    """A file that was sent, as `interfaces.File` has those that are read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, offset: int, size: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(size)

    def size(self) -> int:
        return self._file.seek(0, 2)


def kv_bytes(file: BinaryIO) -> int:
    """How many bytes of a file are KV. InvalidRequest for one that is cut off. Reads the lengths alone."""
    end = 0
    try:
        for at, length in portable_kv.frames(_Readable(file)):
            end = at + length
    except portable_kv.Broken as error:
        raise InvalidRequest(f"the file is damaged or cut off: {error}") from None
    return end


@contextlib.contextmanager
def kv_file(file: BinaryIO, size: int, folder: Path) -> Iterator[Path]:
    """A file by name with the KV of one that has none. Unavailable where the disk refuses. Any thread."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder if folder.is_dir() else None, prefix="kv-of-import-") as copy:
            file.seek(0)
            while size > 0 and (data := file.read(min(size, COPY_BYTES))):
                copy.write(data)
                size -= len(data)
            copy.flush()
            yield Path(copy.name)
    except OSError as error:
        raise Unavailable(f"the KV cannot be kept in {folder}: {error.strerror or error}") from error


async def take_in(kv: AgentKv, agent: Agent, file: BinaryIO, size: int, folder: Path) -> tuple[TakenIn, str]:
    """Store the KV in a file for an agent that was just made of it; what was taken, and why not more."""
    if not kv.answers(agent):
        return TakenIn(), "the KV is of a model that is not loaded here"
    entered = kv_file(file, size, folder)
    path = await asyncio.to_thread(entered.__enter__)
    try:
        taken = await kv.take_in(agent, path)
    finally:
        await asyncio.to_thread(entered.__exit__, None, None, None)
    why = ""
    if taken.ignored:
        why = f"{taken.ignored} chunks were made under other arithmetic than this server's"
    elif taken.refused:
        why = f"{taken.refused} chunks are damaged, not of this context, or have no room"
    elif not taken.chunks:
        why = "the file has no KV, or this server stores none"
    return taken, why
