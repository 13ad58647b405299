"""How many bytes of request bodies the server holds at once: all clients together, and each tenant.

One body is bounded by the guard; this bounds their sum, from the first byte read until the answer has ended, since what
was parsed of a body is held as long. A body of an import goes to a file while it arrives (`spool`) and is not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from cairn.types.errors import Overloaded, Unavailable

RETRY = 2.0
"""Seconds after which a client may ask again: bodies are read and answered faster than that, mostly."""
WRITE_BYTES = 1 << 20
"""A spooled body goes to its file in pieces of about this size, so that a slow disk does not hold up the event loop."""


class BodyBudget:
    """The bytes in hand. `total` bounds all of them, `share` those of one tenant."""

    def __init__(self, total: int, share: int) -> None:
        self._total, self.share = total, share
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """Bytes in hand now."""
        return self._held.total()

    def take(self, tenant: str, size: int) -> None:
        """Count `size` bytes more. Raises Overloaded beyond the tenant's share, Unavailable beyond the total."""
        if self._held[tenant] + size > self.share:
            raise Overloaded(
                f"your requests hold {self._held[tenant]} bytes of bodies at once; the limit for one tenant is "
                f"{self.share} (max_bodies_mib)",
                retry_after=RETRY,
            )
        if self.held + size > self._total:
            raise Unavailable(
                f"the server holds as many bytes of request bodies as it may, {self._total} (max_bodies_mib)",
                retry_after=RETRY,
            )
        self._held[tenant] += size

    def give(self, tenant: str, size: int) -> None:
        """Count `size` bytes less."""
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]


async def spool(pieces: AsyncIterator[bytes], folder: Path) -> BinaryIO:
    """A file without a name on the disk of `folder` that holds a body. The caller closes it.

    Raises what `pieces` does, and Unavailable where the disk refuses.
    """
    try:
        # The system's own folder of temporary files may lie in memory: it is only for a server that keeps nothing.
        file = tempfile.TemporaryFile(dir=folder if folder.is_dir() else None)  # noqa: SIM115
        try:
            waiting = bytearray()
            async for piece in pieces:
                waiting += piece
                if len(waiting) >= WRITE_BYTES:
                    await asyncio.to_thread(file.write, waiting)
                    waiting = bytearray()
            file.write(waiting)
            file.seek(0)
        except BaseException:
            with contextlib.suppress(OSError):  # it tries once more to write what is left
                file.close()
            raise
    except OSError as error:
        raise Unavailable(f"the body cannot be kept in {folder}: {error.strerror or error}") from error
    return file
