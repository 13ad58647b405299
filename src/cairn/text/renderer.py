"""The parent's side of `cairn.text.render`: keeps one rendering process, and replaces it when it overruns."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from math import inf

import msgspec

from cairn.errors import CairnError, InvalidRequest, ModelFileError, Overloaded, Unavailable
from cairn.system import without_secrets
from cairn.text.render_wire import MAX_FRAME, Job, Rendered, Setup, frame

START_TIMEOUT = 120.0
"""Seconds for the process to start and compile the templates, on a machine however busy: what compiling may take is
bounded by its own processor time."""
STALLED = 15.0
"""Seconds without an answer after which the process is taken for stuck: what a job may take is bounded by its own
processor time, so this says something of the machine and nothing of the messages."""
PATIENCE = 2.0
"""Times a job's limit that others may use of the process's time before one that waits for it is refused."""


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
    try:
        with theirs:
            popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "cairn.text.render"],  # -P: nothing from the working directory
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=without_secrets(),
                process_group=0,  # Ctrl-C in a terminal is for the parent
            )
    except BaseException:
        ours.close()
        raise
    return Process(popen, ours)


class _Turns:
    """Whose turn it is: first come, first served. Who waits is refused once others have used `most` seconds of
    processor time meanwhile."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._spent = 0.0
        self._taken = False
        self._waiting: deque[tuple[asyncio.Future[None], float]] = deque()
        """Those that wait, and what had been spent when they came."""

    async def take(self, *, patient: bool = False) -> None:
        """Wait for a turn. Raises Overloaded, but not if `patient`."""
        if not self._taken:
            self._taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, inf if patient else self._spent))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give(0.0)  # it was given the turn and does not take it
            raise

    def give(self, spent: float) -> None:
        """The turn is over: the next one's, if any waits."""
        self._spent += spent
        while self._waiting:
            turn, since = self._waiting.popleft()
            if turn.done():
                continue
            if self._spent - since <= self._most:
                turn.set_result(None)
                return
            turn.set_exception(Overloaded("the chat template is busy with other requests", retry_after=1))
        self._taken = False


class Renderer:
    """Renders one job at a time, within `Setup.timeout` seconds of processor time each.

    Every method runs on one event loop.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._turns = _Turns(PATIENCE * setup.timeout)
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
        await self._turns.take(patient=True)
        try:
            await self._spawn(process)
        finally:
            self._turns.give(0.0)

    async def render(self, job: Job) -> list[str]:
        """One text a conversation.

        Raises InvalidRequest (field `messages`) if the template refuses or cannot render them, takes too long or too
        much memory; Overloaded if the process is busy with others; Unavailable if it is stuck.
        """
        try:
            data = frame(job)
        except ValueError as error:
            raise InvalidRequest(f"the messages are too long to render: {error}", field="messages") from error
        try:
            async with asyncio.timeout(STALLED):  # unlike `wait_for`, no task for each request
                await self._turns.take()
        except TimeoutError:
            raise _stuck() from None
        spent = self._setup.timeout
        try:
            answer = await self._answer(data)
            spent = answer.seconds
        finally:
            self._turns.give(spent)
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
        await self._turns.take(patient=True)
        self._end()
        self._turns.give(0.0)
        while self._background:
            await asyncio.wait(self._background)

    async def _answer(self, data: bytes) -> Rendered:
        if self._process is None or self._process.poll() is not None:
            self._end()
            await self._spawn()
        answered = False
        try:
            answer = await self._twice(data)
            answered = not answer.last
        except TimeoutError:
            raise _stuck() from None
        except (EOFError, OSError, msgspec.MsgspecError):
            raise InvalidRequest("the chat template broke down over these messages", field="messages") from None
        finally:
            # Also when the caller was cancelled: an answer still to come belongs to nobody.
            if not answered:
                self._end()
        return answer

    async def _twice(self, data: bytes) -> Rendered:
        """One exchange; another with a new process if this one is gone, which need not be the messages' fault."""
        try:
            return await self._within(data)
        except TimeoutError:
            raise
        except (EOFError, OSError):
            self._end()
            await self._spawn()
            return await self._within(data)

    async def _within(self, data: bytes) -> Rendered:
        """One exchange. Raises InvalidRequest if the process used up its time over it."""
        process = self._process
        try:
            async with asyncio.timeout(STALLED):
                return await self._exchange(data)
        except (EOFError, ConnectionError):
            if process is not None and await asyncio.to_thread(process.wait) == -signal.SIGPROF:
                limit = f"{self._setup.timeout:g} s of processor time"
                raise InvalidRequest(
                    f"the chat template took longer than {limit} for these messages", field="messages"
                ) from None
            raise

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
                if process is not None and self._writer is None:
                    process.sock.close()
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
        await self._turns.take(patient=True)
        try:
            if self._process is None and not self._closed:
                await self._spawn()
        finally:
            self._turns.give(0.0)

    def _keep(self, work: asyncio.Future[object]) -> None:
        self._background.add(work)
        work.add_done_callback(self._forget)

    def _forget(self, work: asyncio.Future[object]) -> None:
        self._background.discard(work)
        if not work.cancelled():
            work.exception()  # a failed restart shows again when the next request needs the process


def _stuck() -> Unavailable:
    return Unavailable("the process that renders chat templates does not answer; try again", retry_after=1)
