"""One worker's life as the front sees it: the process (or thread), the socket to it, and the signs of life."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from cairn.errors import trace
from cairn.seams import Clock
from cairn.service import wire
from cairn.service.launch import KILL_SECONDS, Worker

log = logging.getLogger(__name__)

_RECEIVE = 1 << 16  # more would be a fresh mapping from the kernel for each call
_COMPUTING = 0.1
"""CPU seconds that show that a step computes; the pulse alone uses far less."""
_WELL_SECONDS = 60.0
"""How long a worker must have served or been idle for its death to be the first in a row."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a worker may stay silent, in seconds, and how soon another takes its place."""

    load: float = 60.0
    """Without a sign of life while it loads (one is sent every second)."""
    silence: float = 6.0
    """Without a sign of life while it has work: a request, or a question to answer."""
    stall: float = 120.0
    """How long one step may take without using the CPU: a step may take long, but not by waiting. While an answer
    waits for a disk the worker steps, and says so every second."""
    step: float = 1800.0
    """How long one step may take at all."""
    restarts: int = 8
    """Deaths in a row without progress before the requests in flight end. Another worker is tried all the same."""
    backoff: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0)
    """Pause before each restart in such a row; the last holds for all further ones, for ever."""


class WorkerConnection:
    """One worker's life: its process (or thread), the socket to it, and what was last heard."""

    def __init__(self, worker: Worker, clock: Clock, receive: Callable[[wire.ToFront], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._receive = receive
        self._frames = wire.front_frames()
        self._backlog = bytearray()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """Why it ended, once it has."""
        self.progressed = False
        """Whether it was of use: a request got further in it, a question was answered, or it was well for long."""
        self._ready_at: float | None = None
        self._heard = self._stepped = self._computed = clock.now()
        self._cpu = 0.0
        self._process, self._thread, self._sock = worker.process, worker.thread, worker.sock
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock, self._on_readable)

    @property
    def pid(self) -> int | None:
        """The worker's process id; None in-process."""
        return self._process.pid if self._process else None

    @property
    def ready(self) -> bool:
        """Whether it has loaded the model, and may be used."""
        return self._ready_at is not None

    def welcome(self) -> None:
        """It has loaded the right model."""
        self._ready_at = self._stepped

    def send(self, message: wire.ToWorker) -> None:
        """Send a frame now or as soon as the worker reads. A worker that is gone is noticed by the reader."""
        if self.ended.done():
            return
        data = wire.encode(message)
        if not self._backlog:
            try:
                sent = self._sock.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                return
            if sent == len(data):
                return
            data = data[sent:]
            self._loop.add_writer(self._sock, self._on_writable)
        self._backlog += data

    def overdue(self, patience: Patience, working: bool) -> str:
        """Why it has to be taken for dead; empty if it is well. `working`: whether it has a request or a question."""
        now = self._clock.now()
        if self._process is None or self.ended.done():
            return ""
        if not self.ready:
            silent = now - self._heard > patience.load
            return f"no sign of life for {patience.load:g} s while loading" if silent else ""
        if not working:
            self.rest()
        elif now - self._heard > patience.silence:
            return f"no sign of life for {patience.silence:g} s"
        elif now - max(self._stepped, self._computed) > patience.stall:
            return f"a step stood still for {patience.stall:g} s"
        elif now - self._stepped > patience.step:
            return f"a step took more than {patience.step:g} s"
        return ""

    def rest(self) -> None:
        """Forget how long it has been silent: it had nothing to do, or nobody could have heard it."""
        self._heard = self._stepped = self._computed = self._clock.now()

    def kill(self, reason: str) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()
        self.end(reason)

    def end(self, reason: str) -> None:
        """Cut the connection and end the process. Does nothing the second time."""
        if self.ended.done():
            return
        with contextlib.suppress(RuntimeError):  # its event loop has ended, and some refuse even this then
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
        with contextlib.suppress(OSError):  # the worker sees the end also where a fork of this process has the socket
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        if self._ready_at is not None and self._stepped - self._ready_at > _WELL_SECONDS:
            self.progressed = True
        self.ended.set_result(reason)

    async def reap(self, grace: float, *, surely: bool = False) -> str:
        """Wait until nothing is left of it; a process that is still there after `grace` seconds is killed.

        One that does not end even then, because a disk or a device holds it, is given up, or with `surely` waited for.
        Returns how it ended, in words.
        """
        if self._process is None:
            if self._thread is not None:
                await asyncio.to_thread(self._thread.join, 5.0 + grace)
            return "its thread ended"
        if not await self._gone(grace):
            self._process.kill()
            if not await self._gone(KILL_SECONDS):
                how = f"its process {self._process.pid} was killed and does not end: a disk or a device holds it"
                log.error("a worker: %s", how)
                if not surely:
                    return how
                await self._gone(None)
        code = self._process.returncode
        if code >= 0:
            return f"its process ended with exit code {code}"
        names = {number.value: number.name for number in signal.Signals}  # not every signal has a name
        return f"its process was ended by {names.get(-code, f'signal {-code}')}"

    async def _gone(self, seconds: float | None) -> bool:
        """Wait for the process's end. Not on a thread, which the end of the program would wait for."""
        assert self._process is not None
        pause = 0.001
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._process.poll() is None:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, 0.05)
        return self._process.poll() is not None

    def _on_readable(self) -> None:
        try:
            data = self._sock.recv(_RECEIVE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.end(f"the connection broke: {error}")
            return
        if not data:
            self.end("it closed the connection")
            return
        self._heard = self._clock.now()
        try:
            messages = self._frames.feed(data)
        except wire.WireError as error:
            self.end(str(error))
            return
        for message in messages:
            if isinstance(message, wire.Beat):
                self._note_cpu(message.cpu)
                continue
            self._stepped = self._heard
            try:
                self._receive(message)
            except Exception as error:  # what it said is lost, but not the tokens before: another worker goes on
                log.error("a frame of the worker could not be used: %s", trace(error))
                self.kill(f"the front failed: {type(error).__name__}")
                return

    def _on_writable(self) -> None:
        try:
            sent = self._sock.send(self._backlog)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            sent = len(self._backlog)
        del self._backlog[:sent]
        if not self._backlog:
            self._loop.remove_writer(self._sock)

    def _note_cpu(self, cpu: float) -> None:
        if cpu - self._cpu > _COMPUTING:
            self._cpu, self._computed = cpu, self._heard
