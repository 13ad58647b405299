"""The parent's side of `cairn.rag.extraction`: a process for each document, killed when it overruns."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from typing import BinaryIO, cast

import msgspec

from cairn.rag.definition import MAX_BYTES, DocumentKind
from cairn.rag.extraction import MEMORY, SECONDS, Extracted
from cairn.rag.outline import Section
from cairn.rag.turns import TenantPlaces
from cairn.system.helper_process import helper_command, helper_environment
from cairn.types.errors import InvalidRequest, Unavailable

AT_ONCE = 2
"""Documents that are read at once: each may take a core and a gigabyte."""
STALLED = 4.0 * SECONDS
"""Seconds after which a process is killed that has not used up its own processor time: the machine is busy, or it
waits for something."""
PAUSES = (0.1, 0.5, 2.0)
"""Seconds after which a process that the system refused is asked for again."""
MOST_READ = 2 * MAX_BYTES + (16 << 20)
"""Bytes that a process may answer: text of the longest document, and headings."""


def aside(data: bytes) -> BinaryIO:
    """A real file without a name that holds this, at its beginning. Unavailable where the disk refuses it."""
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
        try:
            file.write(data)
            file.seek(0)
        except BaseException:
            file.close()
            raise
    except OSError as error:
        raise Unavailable(f"the document cannot be kept: {error.strerror or error}", retry_after=10.0) from error
    return cast(BinaryIO, file)


class Extractor:
    """Reads documents, a few at once, one of a tenant."""

    def __init__(self) -> None:
        self._turns = TenantPlaces(AT_ONCE)

    async def read(self, tenant: str, kind: DocumentKind, file: BinaryIO, field: str) -> list[Section]:
        """The sections of a document in a real file, from where it stands.

        InvalidRequest naming `field` for what cannot be read, or not within the limits; Unavailable where no process
        can be started. The process is gone on return, also when the caller was cancelled.
        """
        async with self._turns.place(tenant):
            process = await _started(kind, file)
            try:
                async with asyncio.timeout(STALLED):
                    data = await _all(process)
                    ended = await process.wait()
            except TimeoutError:
                raise Unavailable(f"the document was not read in {STALLED:g} s; try again", retry_after=30.0) from None
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        return _read(data, ended, field)


async def _started(kind: DocumentKind, file: BinaryIO) -> asyncio.subprocess.Process:
    """A process that reads a document. A machine under load refuses one for a moment: it is asked again."""
    for pause in (*PAUSES, None):
        try:
            return await asyncio.create_subprocess_exec(
                *helper_command("cairn.rag.extraction", kind),
                stdin=file,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=helper_environment(),
                start_new_session=True,  # Ctrl-C in a terminal is for the parent
            )
        except (OSError, RuntimeError) as error:  # a RuntimeError: of the thread that waits for the process
            if pause is None:
                raise Unavailable(f"the document cannot be read now: {error}", retry_after=5.0) from error
            await asyncio.sleep(pause)
    raise AssertionError("the last try returns or raises")


async def _all(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    data = bytearray()
    while piece := await process.stdout.read(1 << 20):
        data += piece
        if len(data) > MOST_READ:
            process.kill()
            return b""
    return bytes(data)


def _read(data: bytes, ended: int, field: str) -> list[Section]:
    if ended == -signal.SIGXCPU:
        raise InvalidRequest(f"{field}: reading the document takes more than {SECONDS} s, the limit", field=field)
    try:
        found = msgspec.msgpack.decode(data, type=Extracted)
    except msgspec.MsgspecError:
        why = f"broke down over it; it may take {SECONDS} s and {MEMORY >> 20} MiB"
        raise InvalidRequest(f"{field}: what reads documents {why}", field=field) from None
    if found.error:
        raise InvalidRequest(f"{field}: {found.error}", field=field)
    return found.sections
