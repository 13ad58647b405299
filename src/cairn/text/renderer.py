"""The parent's side of `cairn.text.render`: keeps one rendering process, and replaces it when it overruns."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from dataclasses import dataclass

import msgspec

from cairn.errors import CairnError, InvalidRequest, ModelFileError, Overloaded, Unavailable
from cairn.system import without_secrets
from cairn.text.render_wire import MAX_FRAME, Job, Rendered, Setup, frame

START_TIMEOUT = 20.0
"""Seconds for the process to start and compile the templates."""


@dataclass(frozen=True, slots=True)
class Process:
    """A rendering process that was not told any templates yet, and our end of the socket to it."""

    popen: subprocess.Popen[bytes]
    sock: socket.socket

    def end(self) -> None:
        """End it and wait until it is gone."""
        self.sock.close()
        self.popen.kill()
        self.popen.wait()


def launch() -> Process:
    """Start a process; it imports what it needs meanwhile. Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "cairn.text.render"],  # -P: nothing from the working directory
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=without_secrets(),
            process_group=0,  # Ctrl-C in a terminal is for the parent
        )
    return Process(popen, ours)


class Renderer:
    """Renders one job at a time, within `Setup.timeout` seconds each; who waits longer than that for a turn is refused.

    Every method runs on one event loop.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._background: set[asyncio.Future[object]] = set()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The rendering process, if one runs."""
        return None if self._process is None else self._process.pid

    async def start(self, process: Process | None = None) -> None:
        """Start the process, or take over one. Raises ModelFileError if a template is no valid template."""
        async with self._turn:
            await self._spawn(process)

    async def render(self, job: Job) -> list[str]:
        """One text a conversation.

        Raises InvalidRequest (field `messages`) if the template refuses or cannot render them, takes too long or too
        much memory; Overloaded if the process is busy with others.
        """
        try:
            data = frame(job)
        except ValueError as error:
            raise InvalidRequest(f"the messages are too long to render: {error}", field="messages") from error
        timeout = self._setup.timeout
        try:
            async with asyncio.timeout(timeout):  # unlike `wait_for`, no task for each request
                await self._turn.acquire()
        except TimeoutError:
            raise Overloaded("the chat template is busy with other requests", retry_after=1) from None
        try:
            answer = await self._answer(data, timeout)
        finally:
            self._turn.release()
            self._warm()
        if answer.error:
            raise InvalidRequest(answer.error, field="messages")
        return answer.texts

    async def settled(self) -> None:
        """Wait until the process that takes the place of one that overran is there."""
        while self._background:
            await asyncio.wait(self._background)

    async def close(self) -> None:
        """End the process and wait until it is gone."""
        self._closed = True
        async with self._turn:
            self._end()
        while self._background:
            await asyncio.wait(self._background)

    async def _answer(self, data: bytes, timeout: float) -> Rendered:
        if self._process is None or self._process.poll() is not None:
            self._end()
            await self._spawn()
        answered = False
        try:
            answer = await self._twice(data, timeout)
            answered = not answer.last
        except TimeoutError:
            raise InvalidRequest(
                f"the chat template took longer than {timeout:g} s for these messages", field="messages"
            ) from None
        except (EOFError, OSError, msgspec.MsgspecError):
            raise InvalidRequest("the chat template broke down over these messages", field="messages") from None
        finally:
            # Also when the caller was cancelled: an answer still to come belongs to nobody.
            if not answered:
                self._end()
        return answer

    async def _twice(self, data: bytes, timeout: float) -> Rendered:
        """One exchange; another with a new process if this one is gone, which need not be the messages' fault.

        Each has the whole time: how long a process takes to start says nothing about the messages.
        """
        try:
            return await self._within(data, timeout)
        except TimeoutError:
            raise
        except (EOFError, OSError):
            self._end()
            await self._spawn()
            return await self._within(data, timeout)

    async def _within(self, data: bytes, timeout: float) -> Rendered:
        async with asyncio.timeout(timeout):
            return await self._exchange(data)

    async def _spawn(self, process: Process | None = None) -> None:
        """Start a process, unless there is one, and wait until it has compiled the templates."""
        if self._closed:
            raise Unavailable("the server is shutting down")
        started = False
        try:
            process = process or launch()
            self._process = process.popen
            self._reader, self._writer = await asyncio.open_connection(sock=process.sock)
            await asyncio.wait_for(self._receive(), START_TIMEOUT)
            await self._compile()
            started = True
        except (EOFError, OSError, TimeoutError) as error:
            raise CairnError(f"the process that renders chat templates did not start ({error})") from error
        finally:
            if not started:
                self._end()

    async def _compile(self) -> None:
        try:
            answer = await asyncio.wait_for(self._exchange(frame(self._setup)), START_TIMEOUT)
        except (EOFError, OSError, TimeoutError):
            raise ModelFileError("the chat template takes too much to compile") from None
        if answer.error:
            raise ModelFileError(f"the chat template is not a valid jinja2 template: {answer.error}")

    async def _exchange(self, data: bytes) -> Rendered:
        if self._writer is None:
            raise EOFError
        self._writer.write(data)
        await self._writer.drain()
        return await self._receive()

    async def _receive(self) -> Rendered:
        if self._reader is None:
            raise EOFError
        size = int.from_bytes(await self._reader.readexactly(4), "little")
        if size > MAX_FRAME:
            raise EOFError
        return msgspec.msgpack.decode(await self._reader.readexactly(size), type=Rendered)

    def _end(self) -> None:
        """Kill the process, if there is one; it is reaped in the background."""
        process, writer = self._process, self._writer
        self._process = self._reader = self._writer = None
        if writer is not None:
            writer.close()
        if process is not None:
            process.kill()
            self._keep(asyncio.get_running_loop().run_in_executor(None, process.wait))

    def _warm(self) -> None:
        """Have a process ready for the next request if this one took it down."""
        if self._process is None and not self._closed:
            self._keep(asyncio.ensure_future(self._restart()))

    async def _restart(self) -> None:
        async with self._turn:
            if self._process is None and not self._closed:
                await self._spawn()

    def _keep(self, work: asyncio.Future[object]) -> None:
        self._background.add(work)
        work.add_done_callback(self._forget)

    def _forget(self, work: asyncio.Future[object]) -> None:
        self._background.discard(work)
        if not work.cancelled():
            work.exception()  # a failed restart shows again when the next request needs the process
