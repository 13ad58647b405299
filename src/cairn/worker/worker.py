"""The process that steps: `python -m cairn.worker.worker <fd>`, the socket's number as its only argument.

It loads what the first frame names, then repeats: read what the front sent, plan, run, commit, send one frame. It keeps
nothing that the front could not send again, so it may be killed at any moment; it ends by itself when the front is
gone. SIGINT and SIGTERM are the front's to decide about. In-process use runs the same `serve` on a thread.
"""

from __future__ import annotations

import faulthandler
import gc
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

from cairn.kv.pool.cache import Cache
from cairn.kv.tiers.tiers import Tiers
from cairn.kv.tiers.write_behind import WriteLimits
from cairn.models.hub.digests import watched
from cairn.models.spec.config import with_tokenizer
from cairn.scheduler.encoder_queue import TextQueue
from cairn.scheduler.plan import Limits, Plan, Planner
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.sequence import Matcher
from cairn.system.interfaces import Clock
from cairn.system.posix import SystemClock, SystemFiles, log_to_stderr
from cairn.text.grammar.vocabulary import read_vocabulary
from cairn.types.errors import CairnError, DeviceError, DeviceMemoryError, ModelError
from cairn.types.outputs import Output
from cairn.types.request import Request
from cairn.types.stats import KvStats
from cairn.types.step import Engine
from cairn.worker import wire
from cairn.worker.grammars import Grammars
from cairn.worker.kv_queries import KVQueries
from cairn.worker.progress import Shown
from cairn.worker.stores import GB, check_pool, keyed, open_stores, stored_bytes

BEAT_SECONDS = 1.0
ORPHAN_SECONDS = 2.0
"""How long a step may go on after the front is gone."""
FAILED_STEPS = 3
"""Steps in a row whose engine call raised, after which the worker ends and is replaced."""
LOOK_SECONDS = 0.05
"""How often to look at deadlines, and whether loads are late, while requests only wait for loads."""
REST_SECONDS = 0.2
"""How long nobody must have wanted a step before KV is stored: the next turn of a conversation often comes at once."""
_NEWS_SECONDS = 0.5
NO_MEMORY = (
    "there is not the memory that the model and its KV take: use --kv-gb for less of it, or let this process have more "
    "(ulimit -v)"
)
_PULSE_SECONDS = 5.0
_STORE_SECONDS = 4.0
"""How long what is to be written holds up the end."""


class Pulse:
    """A thread that tells the front once a second that the process is alive, while it loads or has work.

    It also notices at once that the front is gone. The loop does, too, but not in the middle of a step; a `process`
    whose loop has not ended `ORPHAN_SECONDS` later is ended here.
    """

    def __init__(self, channel: wire.Channel, process: bool) -> None:
        self.busy = True
        self._channel = channel
        self._process = process
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="cairn-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Say nothing more."""
        self._over.set()

    def join(self) -> None:
        """Wait for the thread's end, once the channel has hung up: until then it may be blocked in a send."""
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
    """One thread that steps until the front is gone."""

    def __init__(self, channel: wire.Channel, loaded: LoadedEngine, pulse: Pulse) -> None:
        self._channel = channel
        self._engine = loaded.engine
        self._scheduler = loaded.scheduler
        self._tiers = loaded.tiers
        self._grammars = loaded.grammars
        self._answers = KVQueries(channel, loaded.cache, loaded.tiers)
        self._clock = loaded.clock
        self._pulse = pulse
        self._failures = 0
        self._stepped_at = -math.inf
        self._kv_at = -math.inf
        """When the stores were asked for their numbers."""
        self._told_at = -math.inf
        """When the front was last told of a step, if only one that had nothing to compute."""
        self._progress = 0
        """As in `wire.Stats`."""
        self._brought = 0
        """Tokens that the stores had brought up, and loads that had ended, when they were last asked."""

    def run(self) -> None:
        """Serve. Raises `EOFError` or `OSError` when the front is gone, `WireError` when it sends nonsense."""
        wait: float | None = None
        while True:
            self._pulse.busy = wait is not None and wait <= BEAT_SECONDS
            messages = self._channel.receive(wait)
            self._pulse.busy = True
            for message in messages:
                self._take(message)
            self._take_ready()
            plan = self._scheduler.plan()
            kv = self._kv_news()
            if plan is not None:
                self._tell(self._step(plan, kv))
            elif messages or kv is not None or self._overdue():
                self._tell(wire.StepOutputs(stats=self._stats(kv)))
            wait = self._tend(plan is None)

    def _tell(self, step: wire.StepOutputs) -> None:
        self._channel.send(step)
        self._told_at = self._clock.now()

    def _overdue(self) -> bool:
        """Whether the front, which waits, should hear that this loop lives although a disk or a grammar is slow, or
        that it finds nothing to do."""
        waited = self._answers.owed > 0 or self._grammars.pending or not self._scheduler.idle
        return waited and self._clock.now() - self._told_at >= BEAT_SECONDS

    def _tend(self, idle: bool) -> float | None:
        """Between two steps: what the tiers have to do; returns how long to wait for messages then."""
        tiers = self._tiers
        rested = idle and self._clock.now() - self._stepped_at >= REST_SECONDS
        more = tiers is not None and tiers.turn(rested)
        if more or not idle:
            return 0
        if (tiers is not None and tiers.loading) or not self._scheduler.idle or self._grammars.pending:
            return LOOK_SECONDS
        if tiers is not None and not rested and tiers.write_behind.chunks:
            return REST_SECONDS
        wait = BEAT_SECONDS if self._answers.owed else math.inf
        if tiers is not None:
            wait = min(wait, tiers.write_behind.due)
        return None if wait == math.inf else max(wait, LOOK_SECONDS)

    def _take(self, message: wire.ToWorker) -> None:
        if isinstance(message, wire.Add):
            if message.request.held:
                self._grammars.add(message.request)
            else:
                self._add(message.request)
        elif isinstance(message, wire.Drop):
            self._grammars.drop(message.id)
            self._scheduler.drop(message.id, message.reason)
        elif isinstance(message, wire.KVQuery):
            self._answers.take(message)
        else:
            raise wire.WireError("a worker loads once")

    def _take_ready(self) -> None:
        """Requests whose grammar can be followed now."""
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

    def _kv_news(self) -> KvStats | None:
        """What has changed below the pool, twice a second."""
        if self._tiers is None or self._clock.now() - self._kv_at < _NEWS_SECONDS:
            return None
        self._kv_at = self._clock.now()
        news = self._tiers.news()
        if news is not None and news.loaded + news.abandoned != self._brought:
            self._brought = news.loaded + news.abandoned
            self._progress += 1
        return news

    def _step(self, plan: Plan, kv: KvStats | None) -> wire.StepOutputs:
        began = self._clock.now()
        results = plan.run(self._engine)
        self._stepped_at = self._clock.now()
        seconds = self._stepped_at - began
        if isinstance(results, Exception):
            self._failures += 1
            traceback.print_exception(results, file=sys.stderr)
            # Nothing on a device that failed can be relied on: neither KV nor weights.
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
            progress=self._progress,
        )


def _columns(outputs: list[Output]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Output, ...]]:
    """Outputs that are one token and nothing else as two columns, and the others."""
    ids: list[int] = []
    tokens: list[int] = []
    others: list[Output] = []
    for output in outputs:
        plain = not (output.finish or output.logprobs or output.prompt_logprobs or output.cache or output.timing)
        plain = plain and output.mu is None
        if plain and len(output.tokens) == 1:
            ids.append(output.id)
            tokens.append(output.tokens[0])
        else:
            others.append(output)
    return tuple(ids), tuple(tokens), tuple(others)


def serve(sock: socket.socket, *, process: bool = False) -> None:
    """Load what the front asks for and step until the front is gone. An unforeseen error is raised.

    `process`: the whole process exists for this and may be ended with the front.
    """
    channel = wire.Channel(sock)
    pulse = Pulse(channel, process)
    loaded: LoadedEngine | None = None
    try:
        (first, *rest) = channel.receive(None)
        if not isinstance(first, wire.LoadModel) or rest:
            raise wire.WireError("the first frame must say what to load, and nothing may follow before the answer")
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
            gc.freeze()  # what was loaded stays; looking through it again and again would hold up steps
        WorkerLoop(channel, loaded, pulse).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    finally:
        pulse.stop()
        if loaded is not None:
            if loaded.tiers is not None:
                loaded.tiers.close(_STORE_SECONDS)
            loaded.engine.close()
            loaded.grammars.close()
        channel.hang_up()
        pulse.join()
        channel.close()


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """What one worker runs."""

    engine: Engine
    cache: Cache
    scheduler: Planner
    tiers: Tiers | None
    grammars: Grammars
    clock: Clock
    ready: wire.ModelReady


def _load_visibly(channel: wire.Channel, load: wire.LoadModel) -> LoadedEngine | None:
    """`_load`, saying how far it is where that takes long."""
    shown = Shown(load.config.model, sys.stderr, SystemClock())
    try:
        with watched(shown):
            return _load(channel, load)
    finally:
        shown.end()


def _load(channel: wire.Channel, load: wire.LoadModel) -> LoadedEngine | None:
    """All that is needed to step, or None after telling the front why not."""
    config, clock, files, engine = load.config, SystemClock(), SystemFiles(), None
    try:
        from cairn.engine.device import check_files, load_engine

        if load.wait:
            check_files(config, Path(load.folder))
            channel.send(wire.FilesChecked())
            if channel.receive(None) != [wire.StartLoading()]:
                raise wire.WireError("a worker that waits is told to start loading, and nothing else")
        spec, engine = load_engine(config, Path(load.folder), stored_bytes(config, files), load.blocks)
        told = with_tokenizer(spec, config.tokenizer)
        known = keyed(engine.info, config.kv_codec)
        generates = engine.info.generates
        check_pool(config, engine.info, files, os.environ)
        part = load.kv_part
        stores, trouble = open_stores(config, spec, known, clock, files, os.environ, part) if generates else ({}, "")
    except EOFError:  # the front is gone, or wants this model no more
        raise
    except Exception as error:
        if engine is not None:
            engine.close()
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
        written = WriteLimits(day_bytes=config.kv_write_gb * GB)
        tiers = Tiers(cache, engine, clock, stores, load=config.kv_load, limits=written, wake=channel.wake)
        tiers.start()
    limits = Limits(
        max_running=config.max_running,
        step_tokens=config.step_tokens,
        step_seconds=config.step_seconds,
        weights=load.turns.weights,
        priorities=load.turns.priorities,
    )
    scheduler: Planner = Scheduler(cache, limits, clock) if generates else TextQueue(known, limits, clock)
    info = wire.Info(
        context=known.context,
        pool_tokens=cache.longest,
        vocab=known.vocab,
        max_rows=known.max_rows,
        blocks=known.blocks,
        identity=known.identity,
        note=known.note,
    )
    vocabulary = partial(read_vocabulary, Path(load.folder), config.tokenizer, known.vocab, spec.eos_ids)
    grammars = Grammars(vocabulary, channel.wake, clock)
    return LoadedEngine(engine, cache, scheduler, tiers, grammars, clock, wire.ModelReady(told, info, trouble))


def main() -> int:
    """The process: 0 when the front is gone, 1 after an unforeseen error."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    faulthandler.enable()
    gc.disable()  # while the model is loaded: what is made then stays
    try:
        serve(socket.socket(fileno=int(sys.argv[1])), process=True)
    except Exception:
        traceback.print_exc(file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to clean up, and a thread blocked in a send must not hold the exit up
