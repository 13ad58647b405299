"""The parent's side of `render_process.py`: keeps one rendering process and replaces it when it fails."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import msgspec

from cairn.system.frames import frame
from cairn.system.helper_process import HelperProcess
from cairn.text.render.fair_semaphore import FairSemaphore
from cairn.text.render.render_wire import Job, Rendered, Setup
from cairn.types.errors import CairnError, InvalidRequest, ModelFileError, Unavailable

START_TIMEOUT = 120.0
"""Seconds for the process to start and compile the templates, however busy the machine is. Compiling itself is bounded
by processor time."""
STALLED = 15.0
"""Seconds without an answer after which the process counts as stuck. Jobs are bounded by processor time, so a stall is
the machine's fault, not the messages'."""
PATIENCE = 2.0
"""A waiting job is refused once other jobs of its tenant have used this many times a job's time limit."""
OURS = ""
"""The share of the server's own jobs."""


def launch() -> HelperProcess:
    """Start a process and return at once; it imports its modules meanwhile. Raises OSError."""
    return HelperProcess.launch("cairn.text.render.render_process")


class Renderer:
    """Renderer of chat templates: one job at a time, at most `Setup.timeout` seconds of processor time each.

    Every method runs on one event loop.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._slots = FairSemaphore(most=PATIENCE * setup.timeout)
        self._process: HelperProcess | None = None
        self._background: set[asyncio.Future[Any]] = set()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the rendering process; None if there is none."""
        return None if self._process is None else self._process.pid

    async def start(self, process: HelperProcess | None = None) -> None:
        """Start the process, or take over a launched one. Raises ModelFileError if a template does not compile."""
        await self._slots.take(OURS, patient=True)
        try:
            await self._spawn(process)
        finally:
            self._slots.give(OURS, 0.0)

    async def render(self, job: Job, share: str = OURS) -> list[str]:
        """Return one text per conversation; `share` is the tenant whose time is used.

        Raises InvalidRequest (field `messages`) if the template refuses or cannot render them or exceeds its time or
        memory; Overloaded if the process is busy with other jobs of the tenant; Unavailable if it is stuck.
        """
        try:
            data = frame(job)
        except ValueError as error:
            raise InvalidRequest(f"messages is too long: {error}", field="messages") from error
        try:
            async with asyncio.timeout(STALLED):  # unlike `wait_for`, no task for each request
                await self._slots.take(share)
        except TimeoutError:
            raise _stuck() from None
        spent = self._setup.timeout
        try:
            answer = await self._answer(data)
            spent = answer.seconds
        finally:
            self._slots.give(share, spent)
            self._warm()
        if answer.error:
            raise InvalidRequest(answer.error, field="messages")
        return answer.texts

    async def settled(self) -> None:
        """Wait until a failed process has been replaced."""
        while self._background:
            await asyncio.wait(self._background)

    async def close(self) -> None:
        """Stop the process and wait until it is gone."""
        self._closed = True
        await self._slots.take(OURS, patient=True)
        self._end()
        self._slots.give(OURS, 0.0)
        while self._background:
            await asyncio.wait(self._background)

    async def _answer(self, data: bytes) -> Rendered:
        if self._process is None or not self._process.runs:
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
            # Also if the caller was cancelled: the pending answer must not reach the next job.
            if not answered:
                self._end()
        return answer

    async def _twice(self, data: bytes) -> Rendered:
        """Exchange one frame; retry once with a new process if this one died, perhaps not because of the messages."""
        try:
            return await self._within(data)
        except TimeoutError:
            raise
        except (EOFError, OSError):
            self._end()
            await self._spawn()
            return await self._within(data)

    async def _within(self, data: bytes) -> Rendered:
        """Exchange one frame. Raises InvalidRequest if the process used up its processor time."""
        process = self._process
        if process is None:
            raise EOFError
        try:
            async with asyncio.timeout(STALLED):
                return _rendered(await process.exchange(data))
        except (EOFError, ConnectionError):
            if await process.ended() == -signal.SIGPROF:
                seconds = f"{self._setup.timeout:g} s of processor time"
                why = f"the chat template took longer than {seconds} for these messages"
                raise InvalidRequest(why, field="messages") from None
            raise

    async def _spawn(self, process: HelperProcess | None = None) -> None:
        """Start a process, unless one is passed, and wait until it has compiled the templates."""
        if self._closed:
            raise Unavailable("the server is shutting down")
        started = False
        try:
            self._process = process = process or launch()
            await asyncio.wait_for(process.receive(), START_TIMEOUT)
            await self._compile(process)
            started = True
        except (EOFError, OSError, TimeoutError) as error:
            raise CairnError(f"the process that renders chat templates did not start ({error})") from error
        finally:
            if not started:
                self._end()

    async def _compile(self, process: HelperProcess) -> None:
        try:
            answer = _rendered(await asyncio.wait_for(process.exchange(frame(self._setup)), START_TIMEOUT))
        except (EOFError, OSError, TimeoutError):
            raise ModelFileError("the chat template takes too much to compile") from None
        if answer.error:
            raise ModelFileError(f"the chat template is not a valid jinja2 template: {answer.error}")

    def _end(self) -> None:
        """Kill the process, if there is one; it is reaped in the background."""
        process, self._process = self._process, None
        if process is not None:
            self._keep(process.kill())

    def _warm(self) -> None:
        """Start a new process in the background if the last job took the old one down."""
        if self._process is None and not self._closed:
            self._keep(asyncio.ensure_future(self._restart()))

    async def _restart(self) -> None:
        await self._slots.take(OURS, patient=True)
        try:
            if self._process is None and not self._closed:
                await self._spawn()
        finally:
            self._slots.give(OURS, 0.0)

    def _keep(self, work: asyncio.Future[Any]) -> None:
        self._background.add(work)
        work.add_done_callback(self._forget)

    def _forget(self, work: asyncio.Future[Any]) -> None:
        self._background.discard(work)
        if not work.cancelled():
            work.exception()  # retrieved so that asyncio does not log it; the next request meets the failure again


def _rendered(data: bytes) -> Rendered:
    return msgspec.msgpack.decode(data, type=Rendered)


def _stuck() -> Unavailable:
    return Unavailable("the process that renders chat templates does not answer; try again", retry_after=1)
