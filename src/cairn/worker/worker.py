"""The worker process: `python -m cairn.worker.worker <fd>`, with the number of its socket as the only argument.

It loads the model named in the first frame, then repeats: read messages, plan, run, commit, send one frame. All its
state can be sent again by the front, so it may be killed at any moment; it exits when the front is gone. It ignores
SIGINT and SIGTERM, which the front handles. In-process use runs the same `serve` on a thread.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback

from cairn.scheduler.planned_step import SubmittedStep
from cairn.scheduler.sequence import Matcher
from cairn.system.posix import log_to_stderr
from cairn.types.errors import CairnError, DeviceError, DeviceMemoryError
from cairn.types.outputs import Output
from cairn.types.request import Request
from cairn.types.stats import KvStats
from cairn.worker import wire
from cairn.worker.adapter_loading import AdapterLoads
from cairn.worker.block_journal import BlockJournal
from cairn.worker.kv_queries import KVQueries
from cairn.worker.loading import LoadedEngine, load, load_visibly

log = logging.getLogger("cairn.worker.worker")  # not __name__: the process runs this module as __main__

BEAT_SECONDS = 1.0
ORPHAN_SECONDS = 2.0
"""Seconds that a step may go on after the front is gone."""
FAILED_STEPS = 3
"""Consecutive failed engine calls after which the worker exits and is replaced."""
LOOK_SECONDS = 0.05
"""Seconds between checks of deadlines and late loads while requests only wait for loads."""
REST_SECONDS = 0.2
"""Idle seconds before KV is stored: the next turn of a conversation often follows at once."""
_NEWS_SECONDS = 0.5
_PULSE_SECONDS = 5.0
_STORE_SECONDS = 4.0
"""Most seconds that pending writes may delay the exit."""


class Pulse:
    """A thread that sends a heartbeat once a second while the process loads or has work.

    It also notices at once when the front is gone, which the loop only does between steps. If `process`, it exits the
    process when the loop has not ended `ORPHAN_SECONDS` later.
    """

    def __init__(self, channel: wire.Channel, process: bool) -> None:
        self.busy = True
        self._channel = channel
        self._process = process
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="cairn-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send no more heartbeats."""
        self._over.set()

    def join(self) -> None:
        """Wait for the thread's end. Hang up the channel first: the thread may be blocked in a send."""
        self._thread.join(_PULSE_SECONDS)

    def _beat(self) -> None:
        while not self._channel.hung_up(BEAT_SECONDS) and not self._over.is_set():
            if self.busy:
                try:
                    self._channel.send(wire.Beat(cpu=time.process_time()))
                except OSError:
                    break
        if not self._over.wait(ORPHAN_SECONDS) and self._process:
            os._exit(1)


class WorkerLoop:
    """The loop that runs steps until the front is gone, on one thread."""

    def __init__(self, channel: wire.Channel, loaded: LoadedEngine, pulse: Pulse) -> None:
        self._channel = channel
        self._engine = loaded.engine
        self._scheduler = loaded.scheduler
        self._tiers = loaded.tiers
        self._grammars = loaded.grammars
        self._answers = KVQueries(channel, loaded.cache, loaded.tiers)
        self._adapters = AdapterLoads(channel, loaded.engine)
        journal = BlockJournal(channel, loaded.cache, loaded.tiers)
        self._takers: dict[wire.What, AdapterLoads | BlockJournal] = {
            "attach": self._adapters,
            "detach": self._adapters,
            "follow": journal,
            "unfollow": journal,
        }
        """Who answers which queries; `_answers` all others."""
        self._clock = loaded.clock
        self._pulse = pulse
        self._failures = 0
        self._stepped_at = -math.inf
        self._began = -math.inf
        """Time at which the engine began the step that is to be finished next."""
        self._ahead: SubmittedStep | None = None
        """A step that was planned and submitted while the one before it runs."""
        self._kv_at = -math.inf
        """Time of the last query of the stores' statistics."""
        self._sent_at = -math.inf
        """Time of the last `StepOutputs` frame, even an empty one."""
        self._progress = 0
        """As in `wire.Stats`."""
        self._brought = 0
        """Tokens loaded plus loads abandoned, at the last query of the stores."""

    def close(self) -> None:
        """End the thread that reads adapters."""
        self._adapters.close()

    def run(self) -> None:
        """Run until an error: `EOFError` or `OSError` when the front is gone, `WireError` for a bad frame."""
        wait: float | None = None
        while True:
            self._pulse.busy = wait is not None and wait <= BEAT_SECONDS
            messages = self._channel.receive(wait)
            self._pulse.busy = True
            for message in messages:
                self._handle(message)
            self._take_ready()
            if self._adapters.owed:
                self._adapters.attach_read()
            step = self._next_step()
            kv = self._kv_stats()
            if step is not None:
                self._send_outputs(self._finish(step, kv))
            elif messages or kv is not None or self._overdue():
                self._send_outputs(wire.StepOutputs(stats=self._stats(kv)))
            wait = self._work_between_steps(step is None)

    def _send_outputs(self, step: wire.StepOutputs) -> None:
        self._channel.send(step)
        self._sent_at = self._clock.now()

    def _overdue(self) -> bool:
        """Tell whether a waiting front must get a sign of life: a disk or grammar is slow, or no step is possible."""
        waited = self._answers.owed + self._adapters.owed > 0 or self._grammars.pending or not self._scheduler.idle
        return waited and self._clock.now() - self._sent_at >= BEAT_SECONDS

    def _work_between_steps(self, idle: bool) -> float | None:
        """Run the tiers' pending work; return how many seconds to wait for messages (None: forever)."""
        tiers = self._tiers
        rested = idle and self._clock.now() - self._stepped_at >= REST_SECONDS
        more = tiers is not None and tiers.turn(rested)
        if more or not idle:
            return 0
        if (tiers is not None and tiers.loading) or not self._scheduler.idle or self._grammars.pending:
            return LOOK_SECONDS
        if tiers is not None and not rested and tiers.write_behind.chunks:
            return REST_SECONDS
        wait = BEAT_SECONDS if self._answers.owed + self._adapters.owed else math.inf
        if tiers is not None:
            wait = min(wait, tiers.write_behind.due)
        return None if wait == math.inf else max(wait, LOOK_SECONDS)

    def _handle(self, message: wire.ToWorker) -> None:
        if isinstance(message, wire.Add):
            if message.request.held:
                self._grammars.add(message.request)
            else:
                self._add(message.request)
        elif isinstance(message, wire.Drop):
            self._grammars.drop(message.id)
            self._scheduler.drop(message.id, message.reason)
        elif isinstance(message, wire.KVQuery):
            self._takers.get(message.what, self._answers).take(message)
        else:
            raise wire.WireError("a worker loads one model only once")

    def _take_ready(self) -> None:
        """Pass requests with a compiled grammar on to the scheduler; refuse those whose grammar failed."""
        for request, matcher, error in self._grammars.ready() if self._grammars.pending else ():
            self._progress += 1
            if error is None:
                self._add(request, matcher)
            else:
                self._refuse(request, error)

    def _add(self, request: Request, matcher: Matcher | None = None) -> None:
        try:
            self._scheduler.add(request, matcher)
        except CairnError as error:
            self._refuse(request, error)

    def _refuse(self, request: Request, error: CairnError) -> None:
        self._channel.send(wire.Refused(request.id, error.code, str(error), error.field))

    def _kv_stats(self) -> KvStats | None:
        """Return the stores' statistics if they changed; asked at most twice a second."""
        if self._tiers is None or self._clock.now() - self._kv_at < _NEWS_SECONDS:
            return None
        self._kv_at = self._clock.now()
        news = self._tiers.news()
        if news is not None and news.loaded + news.abandoned != self._brought:
            self._brought = news.loaded + news.abandoned
            self._progress += 1
        return news

    def _next_step(self) -> SubmittedStep | None:
        """Return the step that runs, started now if none does; None if there is nothing to compute.

        On a device the step after it is planned and submitted now, where it does not need this one's results.
        """
        step, self._ahead = self._ahead, None
        self._began = self._stepped_at
        if step is None:
            if (plan := self._scheduler.plan()) is None:
                return None
            self._began = self._clock.now()
            step = plan.submit(self._engine)
        if self._engine.info.overlaps and (after := self._scheduler.follow(step.plan)) is not None:
            self._ahead = after.submit(self._engine)
        return step

    def _finish(self, step: SubmittedStep, kv: KvStats | None) -> wire.StepOutputs:
        """Wait for a step, commit it, and return its outputs."""
        plan, results = step.plan, step.results()
        self._stepped_at = self._clock.now()
        seconds = self._stepped_at - self._began
        if isinstance(results, Exception):
            self._failures += 1
            traceback.print_exception(results, file=sys.stderr)
            # After a device failure neither KV nor weights on it can be relied on.
            lost = isinstance(results, DeviceError) and not isinstance(results, DeviceMemoryError)
            if lost:
                self._channel.send(wire.DeviceFailed(str(results)))
            if lost or self._failures >= FAILED_STEPS:
                raise results
        elif plan.rows:
            self._failures = 0
            if self._tiers is not None and (counted := plan.prompt_tokens):
                self._tiers.load_policy.computed(counted, seconds)
            self._progress += plan.singles + plan.chunked
        outputs = self._scheduler.commit(plan, results, seconds)
        ids, tokens, others = _columns(outputs)
        for output in others:
            self._progress += output.finish is not None
        return wire.StepOutputs(
            stats=self._stats(kv), ids=ids, tokens=tokens, outputs=others, started=tuple(plan.started)
        )

    def _stats(self, kv: KvStats | None) -> wire.Stats:
        stats = self._scheduler.stats()
        usage = 0.0
        for use in stats.groups:
            if (held := use.held / (use.free + use.cached + use.held)) > usage:
                usage = held
        return wire.Stats(
            running=stats.running,
            waiting=stats.waiting,
            kv_usage=usage,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            preemptions=stats.preemptions,
            kv=kv,
            token_seconds=stats.token_seconds,
            accepted=stats.accepted,
            rejected=stats.rejected,
            progress=self._progress,
        )


def _columns(outputs: list[Output]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Output, ...]]:
    """Split outputs into columns (ids, tokens) of those that are one token only, and the others."""
    ids: list[int] = []
    tokens: list[int] = []
    others: list[Output] = []
    for output in outputs:
        plain = not (output.finish or output.logprobs or output.prompt_logprobs or output.cache or output.timing)
        plain = plain and output.mu is None and not output.rejected_prediction_tokens
        if plain and len(output.tokens) == 1:
            ids.append(output.id)
            tokens.append(output.tokens[0])
        else:
            others.append(output)
    return tuple(ids), tuple(tokens), tuple(others)


def serve(sock: socket.socket, *, process: bool = False) -> None:
    """Load the model that the front names and run steps until the front is gone. Unexpected errors are raised.

    `process`: this process is a worker and nothing else, so it may exit with the front.
    """
    channel = wire.Channel(sock)
    pulse = Pulse(channel, process)
    loaded: LoadedEngine | None = None
    intact = True
    try:
        (first, *rest) = channel.receive(None)
        if not isinstance(first, wire.LoadModel) or rest:
            raise wire.WireError("the first frame must be LoadModel, and nothing may follow before its answer")
        if process:
            log_to_stderr(first.config.log_level, first.config.log_format)
            loaded = load_visibly(channel, first)
        else:
            loaded = load(channel, first)
        if loaded is None:
            return
        channel.send(loaded.ready)
        if process:
            gc.enable()
            gc.collect()
            gc.freeze()  # loaded objects stay: scanning them in each collection would delay steps
        loop = WorkerLoop(channel, loaded, pulse)
        try:
            loop.run()
        except DeviceError as error:
            intact = isinstance(error, DeviceMemoryError)
            raise
        finally:
            loop.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    finally:
        pulse.stop()
        if loaded is not None:
            if loaded.tiers is not None:
                loaded.tiers.close(_STORE_SECONDS, intact=intact)
            loaded.engine.close()
            if loaded.guesser is not None:
                loaded.guesser.close()
            loaded.grammars.close()
        channel.hang_up()
        pulse.join()
        channel.close()


def main() -> int:
    """Run the worker process; return its exit code: 0 when the front is gone, 1 after an unexpected error."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    faulthandler.enable()
    gc.disable()  # while the model loads: its objects are permanent
    try:
        serve(socket.socket(fileno=int(sys.argv[1])), process=True)
    except Exception:
        traceback.print_exc(file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to clean up, and a thread blocked in a send must not delay the exit
