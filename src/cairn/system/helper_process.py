"""Parent side of helper processes, which read untrusted input so that a bomb costs only the helper.

A helper inherits no descriptor but its end of a socket, as standard input, and no environment variable but those that
Python needs to start. It sets its own limits (`helper_limits`) and talks in frames (`frames`).
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
"""Variables that helpers inherit: Python may not start without the first four, templates read the time by TZ."""


def helper_environment() -> dict[str, str]:
    """Return a helper's environment, which names no key, user or folder."""
    return {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}


def helper_command(module: str, *arguments: str) -> list[str]:
    """Return a helper's command line; -P keeps it from importing from the working folder."""
    return [sys.executable, "-P", "-m", module, *arguments]


class HelperProcess:
    """A helper and the parent's end of its socket. All but `launch` and `end` runs on one event loop.

    It uses no asyncio transport, because those cannot be closed once their event loop has ended.
    """

    def __init__(self, popen: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.popen, self.sock = popen, sock
        sock.setblocking(False)

    @classmethod
    def launch(cls, module: str) -> HelperProcess:
        """Start a helper and return before it has imported its modules. Raise OSError if it cannot be started."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                popen = subprocess.Popen(
                    helper_command(module),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=helper_environment(),
                    process_group=0,  # Ctrl-C in a terminal must reach the parent alone
                )
        except BaseException:
            ours.close()
            raise
        return cls(popen, ours)

    @property
    def pid(self) -> int:
        """Process id, which is its process group's too."""
        return self.popen.pid

    @property
    def runs(self) -> bool:
        """Whether the helper still runs."""
        return self.popen.poll() is None

    async def exchange(self, data: bytes) -> bytes:
        """Send a frame and return the answer's content. Raise EOFError or OSError if the helper has ended."""
        await asyncio.get_running_loop().sock_sendall(self.sock, data)
        return await self.receive()

    async def receive(self) -> bytes:
        """Return the content of the next frame. Raise EOFError or OSError if the helper has ended."""
        size = int.from_bytes(await self._exactly(4), "little")
        if size > MAX_FRAME:
            raise EOFError
        return await self._exactly(size)

    async def ended(self) -> int:
        """Wait until it has ended; return its exit status, as of `subprocess`."""
        return await asyncio.to_thread(self.popen.wait)

    def stop(self) -> None:
        """Kill the helper and its children; a pending `receive` raises EOFError."""
        if self.runs:  # else the process id may belong to another by now
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.popen.kill()

    def kill(self) -> asyncio.Future[int]:
        """Kill the helper while no exchange is pending; return a future that is done when it is gone."""
        loop = asyncio.get_running_loop()
        # A cancelled exchange leaves its callbacks until the next loop iteration, when another socket may have the fd.
        loop.remove_reader(self.sock)
        loop.remove_writer(self.sock)
        self.sock.close()
        self.stop()
        return loop.run_in_executor(None, self.popen.wait)

    def end(self) -> None:
        """Kill the helper and wait until it is gone."""
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
