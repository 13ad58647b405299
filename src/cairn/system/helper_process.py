"""Helper processes, as the process that starts them sees them: each reads what a stranger wrote, so that a bomb costs
that helper and nothing else.

A helper gets no descriptor but its end of a socket, which is its standard input, and no variable of the environment
but those that Python needs to start. It sets its own limits (`helper_limits`) and talks in frames (`frames`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

from cairn.system.frames import MAX_FRAME, PIECE

KEPT_VARIABLES = ("DYLD_LIBRARY_PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "TZ")
"""Without the first four this Python, or the package, may not start; chat templates are told the local time by TZ."""


def helper_environment() -> dict[str, str]:
    """Return all variables that a helper gets: no key, no name, no folder of the user."""
    return {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}


def helper_command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a helper. -P: nothing is imported from the working folder."""
    return [sys.executable, "-P", "-m", module, *arguments]


class HelperProcess:
    """A helper and the parent's end of the socket to it. All but `launch` and `end` runs on one event loop.

    No transport of asyncio is used: that can be closed only as long as its event loop has not ended.
    """

    def __init__(self, popen: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.popen, self.sock = popen, sock
        sock.setblocking(False)

    @classmethod
    def launch(cls, module: str) -> HelperProcess:
        """Start a helper; it imports what it needs meanwhile. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                popen = subprocess.Popen(
                    helper_command(module),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=helper_environment(),
                    process_group=0,  # Ctrl-C in a terminal is for the parent
                )
        except BaseException:
            ours.close()
            raise
        return cls(popen, ours)

    @property
    def pid(self) -> int:
        """Its number, which is that of its process group too."""
        return self.popen.pid

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.popen.poll() is None

    async def exchange(self, data: bytes) -> bytes:
        """Send a frame and return the content of the answer. Raises EOFError or OSError where the helper has ended."""
        await asyncio.get_running_loop().sock_sendall(self.sock, data)
        return await self.receive()

    async def receive(self) -> bytes:
        """Return the content of the next frame. Raises EOFError or OSError where the helper has ended."""
        size = int.from_bytes(await self._exactly(4), "little")
        if size > MAX_FRAME:
            raise EOFError
        return await self._exactly(size)

    async def ended(self) -> int:
        """Wait until it has ended; return its exit status, as of `subprocess`."""
        return await asyncio.to_thread(self.popen.wait)

    def stop(self) -> None:
        """End it and what it has started; what waits for its answer raises EOFError."""
        if self.runs:  # else its number may be another's by now
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.popen.kill()

    def kill(self) -> asyncio.Future[int]:
        """End it where nothing waits for its answer; the future is done when it is gone."""
        loop = asyncio.get_running_loop()
        # What a cancelled exchange left on the loop goes at its next turn only: another may have the number then.
        loop.remove_reader(self.sock)
        loop.remove_writer(self.sock)
        self.sock.close()
        self.stop()
        return loop.run_in_executor(None, self.popen.wait)

    def end(self) -> None:
        """End it and wait until it is gone."""
        self.sock.close()
        self.stop()
        self.popen.wait()

    async def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = await asyncio.get_running_loop().sock_recv(self.sock, min(size - len(data), PIECE))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)
