"""The front's end of one worker: its process (or thread), the socket to it, and the watchdog on its signs of life."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from cairn.frontend.launch import KILL_SECONDS, Worker
from cairn.system.interfaces import Clock
from cairn.types.errors import trace
from cairn.worker import wire

log = logging.getLogger(__name__)

_RECEIVE = 1 << 16
"""Bytes read at once; a larger buffer would be mapped anew by the kernel for each call."""
_WELL_SECONDS = 60.0
"""Seconds a worker must have served or been idle for its death to be the first in a row."""


_COMPUTING = 0.1
"""CPU seconds that show that a step computes; the heartbeat alone uses far less."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Time limits of a worker in seconds, and the pauses between restarts."""

    load: float = 60.0
    """Without a sign of life while it loads (one is sent every second)."""
    silence: float = 6.0
    """Without a sign of life while it has work: a request, or a question to answer."""
    notice: float = 15.0
    """Without progress, after which the server reports itself as stalled."""
    stall: float = 120.0
    """One step without using the CPU: a step may compute for long, but not wait. (While an answer waits for a disk, the
    worker goes on with steps and reports every second.) Also the limit for steps that bring no request further."""
    step: float = 1800.0
    """One step in all."""
    restarts: int = 8
    """Deaths in a row without progress before the requests in flight end. Another worker is tried all the same."""
    backoff: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0)
    """Pause before each restart in such a row; the last holds for all further ones."""


class Watchdog:
    """The times of the last signs of life of one worker."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.heard_at = self.stepped_at = self._computed_at = self._progressed_at = clock.now()
        """When anything came, and when a step did."""
        self._cpu = 0.0
        self._progress = -1
        self._left = 0
        """Requests that it had at its last step."""

    def rest(self) -> None:
        """Restart all clocks: it had nothing to do, or this process could not have read its messages."""
        self.heard_at = self.stepped_at = self._computed_at = self._progressed_at = self._clock.now()

    def heard(self) -> None:
        """Record that something came."""
        self.heard_at = self._clock.now()

    def beat(self, cpu: float) -> None:
        """Record a heartbeat with the CPU seconds used so far."""
        if cpu - self._cpu > _COMPUTING:
            self._cpu, self._computed_at = cpu, self.heard_at

    def stepped(self, stats: wire.Stats | None = None) -> None:
        """Record a message other than a heartbeat; `stats`: those of a step."""
        self.stepped_at = self.heard_at
        if stats is None or stats.progress != self._progress or not stats.running + stats.waiting:
            self._progressed_at = self.heard_at
        if stats is not None:
            self._progress, self._left = stats.progress, stats.running + stats.waiting

    @property
    def _still(self) -> float:
        """Seconds since a step ended or computed."""
        return self._clock.now() - max(self.stepped_at, self._computed_at)

    @property
    def _fruitless(self) -> float:
        """Seconds of steps that brought no request further."""
        return self.stepped_at - self._progressed_at

    @property
    def seconds(self) -> float:
        """Seconds without progress; a step that computes counts as progress."""
        return max(self._still, self._fruitless)

    def loading(self, patience: Patience) -> str:
        """Return why a worker that loads counts as dead; empty if it is well."""
        silent = self._clock.now() - self.heard_at > patience.load
        return f"no sign of life for {patience.load:g} s while loading" if silent else ""

    def overdue(self, patience: Patience) -> str:
        """Return why a loaded worker that has work counts as dead; empty if it is well."""
        now = self._clock.now()
        if now - self.heard_at > patience.silence:
            return f"no sign of life for {patience.silence:g} s"
        if self._still > patience.stall:
            return f"a step stood still for {patience.stall:g} s"
        if self._fruitless > patience.stall:
            return f"steps brought none of {self._left} requests further for {patience.stall:g} s"
        if now - self.stepped_at > patience.step:
            return f"a step took more than {patience.step:g} s"
        return ""

    def stalled(self, patience: Patience) -> str:
        """Return what to report about a worker that has work but makes no progress; empty if it does."""
        if self._still > patience.notice:
            return f"a step of the worker has stood still for {self._still:.0f} s"
        if self._fruitless > patience.notice:
            return f"the worker has brought none of {self._left} requests further for {self._fruitless:.0f} s"
        return ""


class WorkerConnection:
    """One worker's life: its process (or thread), the socket to it, and its watchdog."""

    def __init__(self, worker: Worker, clock: Clock, receive: Callable[[wire.ToFront], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._receive = receive
        self._frames = wire.front_frames()
        self._backlog = bytearray()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """Why it ended, once it has."""
        self.progressed = False
        """Whether it was of use: a request progressed in it, a question was answered, or it was well for long."""
        self._ready_at: float | None = None
        self._ended_here = False
        """Whether the front killed it."""
        self.watchdog = Watchdog(clock)
        self._process, self._thread, self._sock = worker.process, worker.thread, worker.sock
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock, self._on_readable)

    @property
    def pid(self) -> int | None:
        """The worker's process id; None in-process."""
        return self._process.pid if self._process else None

    @property
    def killed(self) -> bool:
        """Whether its process has ended and was killed by others than the front."""
        return self._process is not None and self._process.returncode == -signal.SIGKILL and not self._ended_here

    @property
    def ready(self) -> bool:
        """Whether it has loaded the model and may be used."""
        return self._ready_at is not None

    def welcome(self) -> None:
        """Mark it as ready: it has loaded the right model."""
        self._ready_at = self.watchdog.stepped_at

    def send(self, message: wire.ToWorker) -> None:
        """Send a frame now or as soon as the worker reads. The reader notices a worker that is gone."""
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
        """Return why it counts as dead; empty if it is well. `working`: whether it has a request or a question."""
        if self.ended.done() or (self._process is None and not self.ready):
            return ""
        if not self.ready:
            return self.watchdog.loading(patience)
        if not working:
            self.rest()
        return self.watchdog.overdue(patience) if self._process is not None else ""

    def rest(self) -> None:
        """See `Watchdog.rest`."""
        self.watchdog.rest()

    def kill(self, reason: str) -> None:
        """End the process at once."""
        self._kill()
        self.end(reason)

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._ended_here = True
            self._process.kill()

    def end(self, reason: str) -> None:
        """Cut the connection and end the process. Does nothing the second time."""
        if self.ended.done():
            return
        with contextlib.suppress(RuntimeError):  # some event loops refuse this once they have ended
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
        with contextlib.suppress(OSError):  # ends the connection even if a fork of this process has the socket
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        if self._ready_at is not None and self.watchdog.stepped_at - self._ready_at > _WELL_SECONDS:
            self.progressed = True
        self.ended.set_result(reason)

    async def reap(self, grace: float, *, surely: bool = False) -> str:
        """Wait until the process or thread is gone; return how it ended, in words.

        A process that is still there after `grace` seconds is killed. If it does not end even then, because a disk or a
        device holds it, it is abandoned, or with `surely` waited for.
        """
        if self._process is None:
            if self._thread is not None:
                await asyncio.to_thread(self._thread.join, 5.0 + grace)
            return "its thread ended"
        if not await self._gone(grace):
            self._kill()
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
        """Wait for the process's end, at most so many seconds; return whether it ended.

        Not on a thread, which the end of the program would wait for.
        """
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
        self.watchdog.heard()
        try:
            messages = self._frames.feed(data)
        except wire.WireError as error:
            self.end(str(error))
            return
        for message in messages:
            if isinstance(message, wire.Beat):
                self.watchdog.beat(message.cpu)
                continue
            if not (isinstance(message, wire.KVAnswer) and message.routine):
                self.watchdog.stepped(message.stats if isinstance(message, wire.StepOutputs) else None)
            try:
                self._receive(message)
            except Exception as error:  # this message is lost, but not earlier tokens: another worker continues
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
