"""The parent's side of `cairn.text.render.process`: keeps one rendering process, and replaces it when it overruns."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from cairn.system.posix import without_secrets
from cairn.text.grammar.grammar import Grammar, Shape
from cairn.text.render.fair_time import SharedTurns
from cairn.text.render.render_wire import (
    GRAMMAR_MEMORY,
    GRAMMAR_SECONDS,
    MAX_FRAME,
    Compile,
    Job,
    Rendered,
    Setup,
    frame,
)
from cairn.types.errors import CairnError, InvalidRequest, ModelFileError, Unavailable

START_TIMEOUT = 120.0
"""Seconds for the process to start and compile the templates, on a machine however busy: what compiling may take is
bounded by its own processor time."""
STALLED = 15.0
"""Seconds without an answer after which the process is taken for stuck: what a job may take is bounded by its own
processor time, so this says something of the machine and nothing of the messages."""
PATIENCE = 2.0
"""Times a job's limit that others of a tenant may use of the process's time before one of its that waits is refused."""
_PIECE = 1 << 20
OURS = ""
"""Whose turns the server's own are, among those of tenants."""


class _Words(NamedTuple):
    """How the sender of a job is told what became of it."""

    subject: str
    of: str
    """What it was done with, behind a verb."""
    field: str


_MESSAGES = _Words("the chat template", " these messages", "messages")


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
                [sys.executable, "-P", "-m", "cairn.text.render.process"],  # -P: nothing from the working directory
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


class Renderer:
    """Renders one job at a time, within `Setup.timeout` seconds of processor time each.

    Every method runs on one event loop.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._turns = SharedTurns(PATIENCE * setup.timeout)
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        """No transport of asyncio: that can be closed only as long as its event loop has not ended."""
        self._background: set[asyncio.Future[object]] = set()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The rendering process, if one runs."""
        return None if self._process is None else self._process.pid

    async def start(self, process: Process | None = None) -> None:
        """Start the process, or take over one. Raises ModelFileError if a template is no valid template."""
        await self._turns.take(OURS, patient=True)
        try:
            await self._spawn(process)
        finally:
            self._turns.give(OURS, 0.0)

    async def render(self, job: Job, share: str = OURS) -> list[str]:
        """One text a conversation; `share`: of which tenant's time.

        Raises InvalidRequest (field `messages`) if the template refuses or cannot render them, takes too long or too
        much memory; Overloaded if the process is busy with others of the tenant; Unavailable if it is stuck.
        """
        return (await self._asked(job, share, _MESSAGES)).texts

    async def compile(self, shape: Shape, field: str, share: str = OURS) -> Grammar:
        """The grammar of an answer.

        Raises InvalidRequest naming the `field` for one that cannot be compiled, or not within the limits; else as
        `render`.
        """
        answer = await self._asked(Compile(shape=shape), share, _Words("compiling it", "", field))
        return Grammar(answer.texts[0], answer.warnings)

    async def _asked(self, job: Job | Compile, share: str, words: _Words) -> Rendered:
        try:
            data = frame(job)
        except ValueError as error:
            raise InvalidRequest(f"{words.field} is too long: {error}", field=words.field) from error
        try:
            async with asyncio.timeout(STALLED):  # unlike `wait_for`, no task for each request
                await self._turns.take(share)
        except TimeoutError:
            raise _stuck() from None
        spent = self._setup.timeout
        try:
            answer = await self._answer(data, words)
            spent = answer.seconds
        finally:
            self._turns.give(share, spent)
            self._warm()
        if answer.error:
            said = answer.error if words is _MESSAGES else f"{words.field} cannot be followed: {answer.error}"
            raise InvalidRequest(said, field=words.field)
        return answer

    async def settled(self) -> None:
        """Wait until the process that takes the place of one that overran is there."""
        while self._background:
            await asyncio.wait(self._background)

    async def close(self) -> None:
        """End the process and wait until it is gone."""
        self._closed = True
        await self._turns.take(OURS, patient=True)
        self._end()
        self._turns.give(OURS, 0.0)
        while self._background:
            await asyncio.wait(self._background)

    async def _answer(self, data: bytes, words: _Words) -> Rendered:
        if self._process is None or self._process.poll() is not None:
            self._end()
            await self._spawn()
        answered = False
        try:
            answer = await self._twice(data, words)
            answered = not answer.last
        except TimeoutError:
            raise _stuck() from None
        except (EOFError, OSError, msgspec.MsgspecError):
            why = f"{words.subject} broke down over{words.of or ' ' + words.field}"
            raise InvalidRequest(why, field=words.field) from None
        finally:
            # Also when the caller was cancelled: an answer still to come belongs to nobody.
            if not answered:
                self._end()
        return answer

    async def _twice(self, data: bytes, words: _Words) -> Rendered:
        """One exchange; another with a new process if this one is gone, which need not be the messages' fault."""
        try:
            return await self._within(data, words)
        except TimeoutError:
            raise
        except (EOFError, OSError):
            self._end()
            await self._spawn()
            return await self._within(data, words)

    async def _within(self, data: bytes, words: _Words) -> Rendered:
        """One exchange. Raises InvalidRequest if the process used up its time over it, or a grammar's memory."""
        process = self._process
        try:
            async with asyncio.timeout(STALLED):
                return await self._exchange(data)
        except (EOFError, ConnectionError):
            ended = None if process is None else await asyncio.to_thread(process.wait)
            if ended == -signal.SIGABRT and words is not _MESSAGES:  # what compiles grammars ends so without memory
                why = f"{words.field}: {words.subject} took more than {GRAMMAR_MEMORY >> 20} MiB of memory"
                raise InvalidRequest(why, field=words.field) from None
            if ended == -signal.SIGPROF:
                seconds = self._setup.timeout if words is _MESSAGES else GRAMMAR_SECONDS
                what = f" for{words.of}" if words.of else ""
                why = f"{words.subject} took longer than {seconds:g} s of processor time{what}"
                raise InvalidRequest(why if words.of else f"{words.field}: {why}", field=words.field) from None
            raise

    async def _spawn(self, process: Process | None = None) -> None:
        """Start a process, unless there is one, and wait until it has compiled the templates."""
        if self._closed:
            raise Unavailable("the server is shutting down")
        started = False
        try:
            process = process or launch()
            self._process, self._sock = process.popen, process.sock
            self._sock.setblocking(False)
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
        if self._sock is None:
            raise EOFError
        await asyncio.get_running_loop().sock_sendall(self._sock, data)
        return await self._receive()

    async def _receive(self) -> Rendered:
        size = int.from_bytes(await self._exactly(4), "little")
        if size > MAX_FRAME:
            raise EOFError
        return msgspec.msgpack.decode(await self._exactly(size), type=Rendered)

    async def _exactly(self, size: int) -> bytes:
        """The next so many bytes that the process sends. Raises EOFError where it ends before."""
        data = bytearray()
        while len(data) < size:
            if self._sock is None:
                raise EOFError
            piece = await asyncio.get_running_loop().sock_recv(self._sock, min(size - len(data), _PIECE))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def _end(self) -> None:
        """Kill the process, if there is one; it is reaped in the background."""
        process, sock = self._process, self._sock
        self._process = self._sock = None
        loop = asyncio.get_running_loop()
        if sock is not None:
            # What a cancelled exchange left on the loop goes at its next turn only: another may have the number then.
            loop.remove_reader(sock)
            loop.remove_writer(sock)
            sock.close()
        if process is not None:
            process.kill()
            self._keep(loop.run_in_executor(None, process.wait))

    def _warm(self) -> None:
        """Have a process ready for the next request if this one took it down."""
        if self._process is None and not self._closed:
            self._keep(asyncio.ensure_future(self._restart()))

    async def _restart(self) -> None:
        await self._turns.take(OURS, patient=True)
        try:
            if self._process is None and not self._closed:
                await self._spawn()
        finally:
            self._turns.give(OURS, 0.0)

    def _keep(self, work: asyncio.Future[object]) -> None:
        self._background.add(work)
        work.add_done_callback(self._forget)

    def _forget(self, work: asyncio.Future[object]) -> None:
        self._background.discard(work)
        if not work.cancelled():
            work.exception()  # a failed restart shows again when the next request needs the process


def _stuck() -> Unavailable:
    return Unavailable("the process that renders chat templates does not answer; try again", retry_after=1)
