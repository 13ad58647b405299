"""Parent side of `cairn.rag.extract_process`: one helper process a document, killed when it overruns."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from typing import BinaryIO, cast

import msgspec

from cairn.rag.chunking import Section
from cairn.rag.definition import MAX_BYTES, DocumentKind
from cairn.rag.extract_process import MEMORY, SECONDS, Extracted
from cairn.system.helper_process import helper_command, helper_environment
from cairn.text.render.fair_semaphore import FairSemaphore
from cairn.types.errors import InvalidRequest, Unavailable

AT_ONCE = 2
"""Documents read at once: each may take a core and a gigabyte."""
STALLED = 4.0 * SECONDS
"""Wall-clock seconds after which a helper is killed even if it has processor time left."""
PAUSES = (0.1, 0.5, 2.0)
"""Pauses in seconds before starting a helper is tried again."""
MOST_READ = 2 * MAX_BYTES + (16 << 20)
"""Bytes read from a helper at most: the longest document's text and its headings."""


def aside(data: bytes) -> BinaryIO:
    """Return an unnamed temporary file that holds `data`, at its start. Raise Unavailable if the disk refuses it."""
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
    """Reads documents in helper processes: a few at once, at most one of each tenant."""

    def __init__(self) -> None:
        self._slots = FairSemaphore(AT_ONCE, each=1, what="the reader of documents")

    async def read(self, tenant: str, kind: DocumentKind, file: BinaryIO, field: str) -> list[Section]:
        """Return the sections of a document, read from `file`'s current position.

        Raise InvalidRequest, naming `field`, if the document cannot be read or exceeds a limit, and Unavailable if no
        helper can be started. The helper has ended on return, also if the caller is cancelled.
        """
        async with self._slots.slot(tenant):
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
    """Start a helper. A machine under load may refuse one for a moment, so this retries."""
    for pause in (*PAUSES, None):
        try:
            return await asyncio.create_subprocess_exec(
                *helper_command("cairn.rag.extract_process", kind),
                stdin=file,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=helper_environment(),
                start_new_session=True,  # Ctrl-C in a terminal is for the parent
            )
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread to wait for it
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
