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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from cairn.kv.pool.cache import Cache
from cairn.kv.tiers.tiers import Tiers
from cairn.models.hub.digests import watched
from cairn.models.spec.config import with_tokenizer
from cairn.scheduler.drafts.ahead import AheadHead
from cairn.scheduler.drafts.draft_model import DraftModel
from cairn.scheduler.drafts.policy import chosen_policy
from cairn.scheduler.drafts.twice import GuessingModel
from cairn.scheduler.encoder_queue import TextQueue
from cairn.scheduler.plan import Limits, Planner, SubmittedStep
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.sequence import Matcher
from cairn.system.interfaces import Clock
from cairn.system.posix import SystemClock, SystemFiles, log_to_stderr
from cairn.system.stages import Stages, process_age
from cairn.types.errors import CairnError, DeviceError, DeviceMemoryError, ModelError
from cairn.types.outputs import Output
from cairn.types.request import Request
from cairn.types.stats import KvStats
from cairn.types.step import Engine
from cairn.worker import wire
from cairn.worker.adapters import AdapterLoads, attach_first
from cairn.worker.grammars import Grammars, read_vocabulary
from cairn.worker.kv_queries import KVQueries
from cairn.worker.stores import check_pool, keyed, open_stores, stored_bytes, write_limits

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
NO_MEMORY = (
    "not enough memory for the model and its KV: lower --kv-gb, or raise the memory limit of this process (ulimit -v)"
)
_PULSE_SECONDS = 5.0
_STORE_SECONDS = 4.0
"""Most seconds that pending writes may delay the exit."""
QUIET_SECONDS = 1.0
"""Shorter loads print nothing on a terminal."""
LINE_SECONDS = 5.0
"""Seconds between two log lines."""
_DRAW_SECONDS = 0.2
_CLEAR = "\r\x1b[K"
_WIDTH = 30


class LoadProgress:
    """A `digests.Watch` that shows a load's progress: a progress bar on a terminal, otherwise lines in the log.

    It hides no cursor and draws on no thread of its own, because a worker may be killed at any moment.
    """

    def __init__(self, model: str, out: TextIO, clock: Clock) -> None:
        self._model, self._out, self._clock = model, out, clock
        self._terminal = out.isatty()
        self._began = clock.now()
        self._next = self._began + (QUIET_SECONDS if self._terminal else LINE_SECONDS)
        self._drawn = False

    def __call__(self, doing: str, done: int, total: int) -> None:
        """Show the progress if an update is due."""
        now = self._clock.now()
        if now < self._next or not log.isEnabledFor(logging.INFO):
            return
        share = min(1.0, done / max(1, total))
        seconds = now - self._began
        if self._terminal:
            self._next = now + _DRAW_SECONDS
            bar = "━" * round(share * _WIDTH)
            self._write(f"{_CLEAR}Loading: {doing} {bar:<{_WIDTH}} {share:4.0%} {seconds:4.0f} s")
            self._drawn = True
        else:
            self._next = now + LINE_SECONDS
            log.info("loading %s for %.0f s: %s, %.0f %%", self._model, seconds, doing, 100 * share)

    def end(self) -> None:
        """Clear the progress bar."""
        if self._drawn:
            self._write(_CLEAR)

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, UnicodeError):
            self._next = float("inf")  # closed, or unable to encode the bar: draw no more


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
            (self._adapters if message.what in ("attach", "detach") else self._answers).take(message)
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
        self._progress += sum(output.finish is not None for output in outputs)
        ids, tokens, others = _columns(outputs)
        return wire.StepOutputs(
            stats=self._stats(kv), ids=ids, tokens=tokens, outputs=others, started=tuple(plan.started)
        )

    def _stats(self, kv: KvStats | None) -> wire.Stats:
        stats = self._scheduler.stats()
        usage = max((use.held / max(1, use.free + use.cached + use.held) for use in stats.groups), default=0.0)
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
    try:
        (first, *rest) = channel.receive(None)
        if not isinstance(first, wire.LoadModel) or rest:
            raise wire.WireError("the first frame must be LoadModel, and nothing may follow before its answer")
        if process:
            log_to_stderr(first.config.log_level, first.config.log_format)
            loaded = _load_visibly(channel, first)
        else:
            loaded = _load(channel, first)
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
        finally:
            loop.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    finally:
        pulse.stop()
        if loaded is not None:
            if loaded.tiers is not None:
                loaded.tiers.close(_STORE_SECONDS)
            loaded.engine.close()
            if loaded.guesser is not None:
                loaded.guesser.close()
            loaded.grammars.close()
        channel.hang_up()
        pulse.join()
        channel.close()


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A loaded model with its scheduler, stores and grammars."""

    engine: Engine
    cache: Cache
    scheduler: Planner
    tiers: Tiers | None
    grammars: Grammars
    clock: Clock
    ready: wire.ModelReady
    guesser: DraftModel | None = None


def _load_visibly(channel: wire.Channel, load: wire.LoadModel) -> LoadedEngine | None:
    """Load as `_load` does, showing progress if it takes long."""
    shown = LoadProgress(load.config.model, sys.stderr, SystemClock())
    try:
        with watched(shown):
            return _load(channel, load)
    finally:
        shown.end()


def _load(channel: wire.Channel, load: wire.LoadModel) -> LoadedEngine | None:
    """Load everything that steps need; on failure send `LoadFailed` and return None."""
    config, clock, files, engine = load.config, SystemClock(), SystemFiles(), None
    stages = Stages(clock, process_age())
    guesser: DraftModel | None = None
    try:
        from cairn.engine.ahead import guess_note, guesses
        from cairn.engine.device import check_files, head_of, import_engine, load_engine

        import_engine(config)
        stages.end("imports")

        if load.wait:
            check_files(config, Path(load.folder))
            channel.send(wire.FilesChecked())
            if channel.receive(None) != [wire.StartLoading()]:
                raise wire.WireError("after FilesChecked only StartLoading may follow")
        if load.draft and guesses(config):  # before the model, whose pool takes a part of the memory that is free then
            from cairn.worker.draft_model import load_draft_model

            guesser = load_draft_model(config, Path(load.draft), Path(config.tokenizer or load.folder))
        expected = stored_bytes(config, files)
        spec, engine = load_engine(config, Path(load.folder), expected, load.blocks, stages.end)
        head = head_of(engine)
        adapters = attach_first(engine, load.adapters)
        served_spec = with_tokenizer(spec, config.tokenizer)
        known = keyed(engine.info, config.kv_codec)
        generates = engine.info.generates
        check_pool(config, engine.info, files, os.environ)
        part = load.kv_part
        stores, trouble = open_stores(config, spec, known, clock, files, os.environ, part) if generates else ({}, "")
    except EOFError:  # the front is gone, or no longer wants this model
        raise
    except Exception as error:
        for one in (engine, guesser):
            if one is not None:
                one.close()
        if isinstance(error, CairnError):
            channel.send(wire.LoadFailed(error.code, str(error)))
        elif isinstance(error, MemoryError):
            channel.send(wire.LoadFailed(ModelError.code, NO_MEMORY))
        else:
            traceback.print_exc(file=sys.stderr)
            channel.send(wire.LoadFailed(CairnError.code, f"the model could not be loaded: {error!r}"))
        return None
    cache = Cache(known)
    tiers = None
    if stores:
        limited = write_limits(config)
        tiers = Tiers(cache, engine, clock, stores, load=config.kv_load, limits=limited, wake=channel.wake)
        tiers.start()
    limits = Limits(
        max_running=config.max_running,
        step_tokens=config.step_tokens,
        step_seconds=config.step_seconds,
        weights=load.turns.weights,
        priorities=load.turns.priorities,
    )
    states = any(group.kind == "state" for group in known.groups)
    model: GuessingModel | None = guesser if head is None else AheadHead(head)
    drafts = chosen_policy(config.speculate, states=states, model=model) if guesses(config) else None
    scheduler: Planner = Scheduler(cache, limits, clock, drafts) if generates else TextQueue(known, limits, clock)
    info = wire.Info(
        context=known.context,
        pool_tokens=cache.longest,
        vocab=known.vocab,
        max_rows=known.max_rows,
        blocks=known.blocks,
        identity=known.identity,
        note="; ".join(one for one in (known.note, guess_note(config)) if one),
        device=known.device,
        device_text=known.device_text,
    )
    vocabulary = partial(read_vocabulary, Path(load.folder), config.tokenizer, known.vocab, spec.eos_ids)
    grammars = Grammars(vocabulary, channel.wake, clock)
    stages.end("stores")
    if config.verbose:
        log.info("start of the worker, in seconds (of the processor): %s", stages.sentence())
    ready = wire.ModelReady(served_spec, info, trouble, adapters)
    return LoadedEngine(engine, cache, scheduler, tiers, grammars, clock, ready, guesser)


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
