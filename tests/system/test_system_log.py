"""The log that a process of the server writes to stderr."""

from __future__ import annotations

import fcntl
import logging
import os

from cairn.system.posix import _Patient


def test_an_unread_pipe_blocks_no_request() -> None:
    """A program that starts the server with a pipe may never read it; the access log must not stop the service."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    with os.fdopen(read, "rb") as reader, os.fdopen(write, "w", buffering=1) as stream:
        handler = _Patient(stream)

        def tell(level: int, text: str) -> None:
            handler.handle(logging.LogRecord("cairn.access", level, "", 0, text, None, None))

        for _ in range(1000):  # far more than the pipe holds: it would block for ever
            tell(logging.INFO, "x" * 99)
        os.set_blocking(read, False)
        while reader.read():
            pass
        tell(logging.INFO, "again")
        tell(logging.WARNING, "and this")
        assert reader.read() == b"again\nand this\n"
