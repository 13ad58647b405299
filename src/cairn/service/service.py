"""The front of one model: `generate`, `abort`, `status`, `drain`, `close`. HTTP, CLI and Python all come through here.

Everything runs on one event loop. A frame of the worker is one step of all requests: each request's record (`Flight`)
takes its tokens, and its consumer is woken once. Every request leaves by `_release`, whatever ended it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

import msgspec

from cairn.config import Config
from cairn.errors import (
    CairnError,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    Unavailable,
    trace,
)
from cairn.metrics import Metrics
from cairn.models.hub import locate
from cairn.seams import Clock, SystemClock
from cairn.service import wire
from cairn.service.admission import Queue, check_tokens
from cairn.service.flight import PLAIN, Flight, RequestStatus
from cairn.service.history import History
from cairn.service.link import Patience
from cairn.service.recent import RecentContexts, Told
from cairn.service.stream import Stream
from cairn.service.supervisor import Supervisor
from cairn.text.chat import Chat
from cairn.text.stream import TextStream
from cairn.text.tokenizer import Tokenizer
from cairn.types import FinishReason, KvStats, Miss, ModelSpec, Output, Placed, Request, Swept, Timing

log = logging.getLogger(__name__)

FULL = 0.9
"""Share of the KV pool in use by requests from which the server says that it is not ready."""
SHUTTING_DOWN = "the server is shutting down"
_TICK = 0.25
_LATE = 1.0
"""Seconds past a deadline after which the front ends a request itself; the worker normally does."""


class ServiceStats(msgspec.Struct, frozen=True, kw_only=True):
    """The service now."""

    running: int
    waiting: int
    kv_usage: float
    worker_pid: int | None
    worker_restarts: int


class Service:
    """One model being served. Make it with `await Service.start(config)`; end it with `await close()`."""

    spec: ModelSpec
    """The model."""
    info: wire.Info
    """What the loaded engine can do."""
    tokenizer: Tokenizer
    chat: Chat
    metrics: Metrics
    name: str
    """What clients call the model."""

    def __init__(
        self, config: Config, *, in_process: bool = False, patience: Patience | None = None, clock: Clock | None = None
    ) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._supervisor = Supervisor(
            config,
            in_process=in_process,
            patience=patience or Patience(),
            clock=self._clock,
            on_ready=self._on_ready,
            on_step=self._on_step,
            on_refused=self._on_refused,
            on_lost=self._on_lost,
        )
        self._flights = self._supervisor.flights
        self._stats = wire.Stats()
        self._queue = Queue(config)
        self._history = History()
        self.recent = RecentContexts()
        self._trouble = ""
        self._stepped = 0.0
        self._last_id = 0
        self._loaded = False
        self._draining = False
        self._closed = False
        self._empty = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, config: Config, *, in_process: bool = False, patience: Patience | None = None, clock: Clock | None = None
    ) -> Service:
        """Load the model in a worker process (`in_process`: on a thread) and serve it.

        Raises ModelError (or what else the model's files deserve) with nothing left running.
        """
        service = cls(config, in_process=in_process, patience=patience, clock=clock)
        try:
            await service._load()
        except BaseException:
            await service.close()
            raise
        return service

    async def _load(self) -> None:
        folder = await asyncio.to_thread(locate, self._config.model)
        self._ticker = asyncio.create_task(self._tick())
        loading = asyncio.create_task(self._supervisor.start(folder))
        try:
            self.tokenizer = await asyncio.to_thread(Tokenizer.load, folder)
            await loading
        finally:
            loading.cancel()
        self.chat = await Chat.start(folder, self.tokenizer, self._config)
        self._loaded = True

    # ---------------------------------------------------------------------------------------------- for callers

    def next_id(self) -> int:
        """A request id: strictly increasing, below 2**63, and beyond those of earlier runs (it follows the clock)."""
        self._last_id = max(self._last_id + 1, self._clock.time_ns())
        return self._last_id

    def generate(self, request: Request, told: Told | None = None) -> Stream:
        """Start a request. The events follow as an async iterator; what goes wrong later is raised by it.

        `told`: what helps to say why a part of the prompt was not found.

        Raises here, before anything is computed: ContextTooLong, InvalidRequest, Overloaded and Unavailable (both with
        `retry_after`). A request without a timeout gets the configured one.
        """
        self._admit(request)
        if request.timeout is None:
            request = msgspec.structs.replace(request, timeout=self._config.request_timeout)
        flight = Flight(request, TextStream(self.tokenizer, request), self._clock.now(), told or PLAIN)
        stream = Stream(flight, self.abort)
        try:
            self._supervisor.add(flight)
        except wire.WireError as error:
            flight.end(FinishReason.ERROR, error, None)
            raise InvalidRequest(str(error), field="prompt") from error
        self._queue.enter(request)
        return stream

    def abort(self, id: int) -> bool:
        """Cancel a request: its stream raises `Cancelled` after what was said. False if it does not run."""
        return self._release(id, FinishReason.CANCELLED, error=Cancelled("the request was cancelled"), tell=True)

    def status(self, id: int) -> RequestStatus | None:
        """What is known of a request; None if it never was, or ended too long ago."""
        flight = self._flights.get(id)
        if flight is not None:
            return flight.status()
        return self._history.get(id)

    def stats(self) -> ServiceStats:
        """Numbers of now."""
        return ServiceStats(
            running=len(self._flights) - self._queue.requests,
            waiting=self._queue.requests,
            kv_usage=self._stats.kv_usage,
            worker_pid=self._supervisor.pid,
            worker_restarts=self._supervisor.restarts,
        )

    def unready(self) -> list[str]:
        """Why new requests would not be served well now; empty when they would."""
        reasons = []
        if self._supervisor.gave_up:
            reasons.append(self._supervisor.gave_up)
        elif not self._loaded:
            reasons.append("the model is being loaded")
        elif not self._supervisor.up:
            reasons.append("the worker is being replaced")
        if self._draining:
            reasons.append(SHUTTING_DOWN)
        if self._stats.kv_usage > FULL:
            reasons.append(f"requests hold {self._stats.kv_usage:.0%} of the KV pool")
        return reasons

    def troubles(self) -> list[str]:
        """What does not work now although requests are served: stores of KV, a sentence each."""
        if not self._loaded:
            return []
        tiers = (self.metrics.kv.ram, self.metrics.kv.disk)
        found = [tier.trouble for tier in tiers if tier is not None and tier.trouble]
        return [self._trouble, *found] if self._trouble else found

    def kv(self) -> KvStats:
        """The stores below the pool, at most about a second old."""
        return self.metrics.kv

    async def drain(self, grace: float) -> None:
        """Take no more requests, wait up to `grace` seconds for those that run, and end the rest with Unavailable."""
        self._draining = True
        if self._flights:
            self._empty.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), grace)
        self._end_all()

    async def close(self) -> None:
        """End everything at once: requests, the worker, the template helper. Nothing is left. May be called again."""
        self._draining = True
        self._end_all()
        if self._closed:
            return
        self._closed = True
        if self._ticker is not None:
            self._ticker.cancel()
        await self._supervisor.close()
        if hasattr(self, "chat"):
            await self.chat.close()

    # ------------------------------------------------------------------------------------- KV beyond the requests
    # All of these raise Unavailable while the worker is being replaced.

    async def flush(self) -> None:
        """Return when all KV that was to be stored until now is durable. Unavailable if a part of it was given up."""
        self._answered(await self._supervisor.ask("flush"))

    async def pin(self, owner: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        """Keep the chunks of this context in every store from eviction, also those that are written later.

        They take the place of what `owner` pinned before. Durable when it returns.
        """
        self._answered(await self._supervisor.ask("pin", owner=owner, tokens=tuple(tokens), salt=salt))

    async def unpin(self, owner: str) -> None:
        """Give up what `owner` pinned."""
        self._answered(await self._supervisor.ask("pin", owner=owner))

    async def prefetch(self, tokens: Sequence[int], salt: bytes = b"") -> Placed:
        """Bring what the stores have of this context up into the pool; where it is then."""
        return self._answered(await self._supervisor.ask("prefetch", tokens=tuple(tokens), salt=salt)).placed

    async def evict(self, tokens: Sequence[int], salt: bytes = b"", *, keep: int = 0, disk: bool = False) -> Placed:
        """Give up the KV of this context in the pool and in RAM, and with `disk` everywhere; where it is then.

        Its first `keep` tokens stay, because others need them; so does what a running request holds.
        """
        asked = self._supervisor.ask("evict", tokens=tuple(tokens), salt=salt, keep=keep, disk=disk)
        return self._answered(await asked).placed

    async def where(self, tokens: Sequence[int], salt: bytes = b"") -> Placed:
        """How many leading tokens of this context each tier has."""
        return self._answered(await self._supervisor.ask("where", tokens=tuple(tokens), salt=salt)).placed

    async def scrub(self) -> Swept:
        """Read and check every stored chunk, and remove the damaged ones."""
        return self._answered(await self._supervisor.ask("scrub")).swept

    async def prune(self) -> Swept:
        """Remove what nobody has used for longer than the stores' time to live."""
        return self._answered(await self._supervisor.ask("prune")).swept

    def _answered(self, answer: wire.Answer) -> wire.Answer:
        if answer.trouble:
            raise Unavailable(answer.trouble, retry_after=self._supervisor.pause)
        return answer

    # ------------------------------------------------------------------------------------------------ admission

    def _admit(self, request: Request) -> None:
        if self._draining:
            raise Unavailable("the server is shutting down", retry_after=max(1.0, self._config.shutdown_grace))
        if self._supervisor.gave_up:
            raise Unavailable(self._supervisor.gave_up, retry_after=60.0)
        if self._supervisor.failing and not self._supervisor.up:
            raise Unavailable("the worker is being replaced", retry_after=self._supervisor.pause)
        if request.id in self._flights:
            raise Conflict(f"request {request.id} runs already")
        check_tokens(request, self.info)
        running = len(self._flights) - self._queue.requests
        self._queue.check(request, running, self.info.max_rows, self._clock.now())

    # --------------------------------------------------------------------------------------- what the worker says

    def _on_ready(self, ready: wire.Ready) -> None:
        self._stats = wire.Stats()
        self.spec, self.info, self._trouble = ready.spec, ready.info, ready.trouble
        if ready.trouble:
            log.warning("%s", ready.trouble)
        if not self._loaded:
            self.name = self._config.served_name or ready.spec.name
            self.metrics = Metrics(self._config.metrics_prefix, self.name)
        self.metrics.worker_restarts = self._supervisor.restarts
        self.metrics.worker_replaced()

    def _on_step(self, step: wire.Step) -> None:
        now = self._clock.now()
        for id in step.started:
            self._on_started(id, now)
        if step.stats != self._stats or step.started:
            self._note_stats(step, now)
        metrics, flights, before, together = self.metrics, self._flights, self._stepped, 0
        tokens = len(step.ids) + sum([len(output.tokens) for output in step.outputs])
        if tokens:
            metrics.generation_tokens += tokens
            metrics.step_tokens.observe(tokens)
        for id, token in zip(step.ids, step.tokens, strict=True):
            flight = flights.get(id)
            if flight is None:
                continue
            flight.accept_token(token)
            if flight.last_at == before:
                together += 1
            else:
                metrics.inter_token.observe(now - flight.last_at)
            flight.last_at = now
            self._show(flight)
        if together:
            metrics.inter_token.observe(now - before, together)
        self._stepped = now
        for output in step.outputs:
            self._on_output(output, now)

    def _note_stats(self, step: wire.Step, now: float) -> None:
        metrics, old, new = self.metrics, self._stats, step.stats
        if new.kv is not None:
            metrics.kv = new.kv
        self._stats = new
        self._queue.note(now, len(step.started), new)
        metrics.running, metrics.waiting, metrics.kv_usage = new.running, new.waiting, new.kv_usage
        metrics.prefix_queries += new.prefix_queries - old.prefix_queries
        metrics.prefix_hits += new.prefix_hits - old.prefix_hits
        metrics.preemptions += new.preemptions - old.preemptions

    def _on_started(self, id: int, now: float) -> None:
        flight = self._flights.get(id)
        if flight is not None and flight.started_at is None:
            flight.started_at = now
            self._queue.leave(flight.request)

    def _on_output(self, output: Output, now: float) -> None:
        flight = self._flights.get(output.id)
        if flight is None:
            return
        if output.cache is not None and flight.cache is None:
            self.metrics.prompt_tokens += len(flight.request.prompt)
            self.metrics.prompt_tokens_cached += output.cache.cached
            self.metrics.prompt_length.observe(len(flight.request.prompt))
            self.metrics.prompt_tokens_loaded["ram"] += output.cache.ram
            self.metrics.prompt_tokens_loaded["disk"] += output.cache.disk
            if output.cache.miss is not None:
                miss = self._explained(flight, output.cache.miss)
                self.metrics.misses[miss.reason] += 1
                output = msgspec.structs.replace(output, cache=msgspec.structs.replace(output.cache, miss=miss))
        flight.accept(output)
        if output.tokens:
            if flight.first_at is None:
                flight.first_at = now
                self.metrics.first_token.observe(now - flight.arrived)
            else:
                self.metrics.inter_token.observe(now - flight.last_at)
            flight.last_at = now
        if output.finish is None:
            self._show(flight)
        else:
            error = _error(output)
            self._release(output.id, output.finish, error=error, timing=output.timing)

    def _explained(self, flight: Flight, miss: Miss) -> Miss:
        def decode(ids: Sequence[int]) -> str:
            return self.tokenizer.decode(ids, skip_special=False)

        request = flight.request
        return self.recent.explain(miss, request.salt, request.prompt, flight.told, decode)

    def _on_refused(self, refused: wire.Refused) -> None:
        error = wire.error(refused.code, refused.message, refused.field)
        if isinstance(error, Overloaded | Unavailable):
            error.retry_after = self._queue.retry_after(self._clock.now())
        self._release(refused.id, FinishReason.ERROR, error=error)

    def _on_lost(self, flight: Flight, error: CairnError) -> None:
        self._release(flight.request.id, FinishReason.ERROR, error=error)

    def _show(self, flight: Flight) -> None:
        """Let the consumer know of news; a request with stop strings is read at once."""
        if flight.eager:
            try:
                flight.read()
            except Exception as error:
                self._release(flight.request.id, FinishReason.ERROR, error=_broken(error), tell=True)
                return
            if flight.text.stopped:
                self._release(flight.request.id, FinishReason.STOP, tell=True)
                return
        if flight.waker is not None:
            flight.waker.wake()

    # ---------------------------------------------------------------------------------------------- the one way out

    def _release(
        self,
        id: int,
        reason: FinishReason,
        *,
        error: CairnError | None = None,
        timing: Timing | None = None,
        tell: bool = False,
    ) -> bool:
        """End a request, whatever ended it. `tell`: the worker does not know yet. False if it had ended before."""
        flight = self._supervisor.remove(id, reason if tell else None)
        if flight is None:
            return False
        if flight.started_at is None:
            self._queue.leave(flight.request)
        now = self._clock.now()
        timing = timing or _timing(flight, now)
        try:
            flight.end(reason, error, timing)
        except Exception as failure:
            flight.fail(_broken(failure))
        self.metrics.record_end(
            flight.reason or reason,
            timing,
            total=now - flight.arrived,
            first=None if flight.first_at is None else flight.first_at - flight.arrived,
            generated=flight.text.completion_tokens,
            limit=flight.request.sampling.max_tokens,
        )
        if flight.first_at is not None and flight.told.store:
            request = flight.request
            context = [*request.prompt, *flight.tokens]
            self.recent.note(request.salt, context, len(request.prompt), flight.told.messages)
        self._history.add(flight.status(), now)
        if flight.waker is not None:
            flight.waker.wake()
        if not self._flights:
            self._empty.set()
        return True

    def _end_all(self) -> None:
        for id in tuple(self._flights):
            error = Unavailable("the server is shutting down", retry_after=max(1.0, self._config.shutdown_grace))
            self._release(id, FinishReason.ERROR, error=error, tell=True)

    # --------------------------------------------------------------------------------------------------- the clock

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            try:
                self._supervisor.look()
                self._end_late(self._clock.now())
                self._history.forget(self._clock.now())
            except Exception as error:
                log.error("the periodic check failed: %s", trace(error))

    def _end_late(self, now: float) -> None:
        """End what is past its deadline although the worker did not say so, and what nobody reads."""
        for id, flight in tuple(self._flights.items()):
            timeout = flight.request.timeout
            if timeout is not None and now - flight.arrived > timeout + _LATE:
                self._release(id, FinishReason.DEADLINE, error=_late(), tell=True)
            elif flight.idle:
                flight.read_at = now
            elif now - flight.read_at > self._config.stream_stall and flight.backlog > self._limit:
                error = Cancelled(f"nobody read the answer for {self._config.stream_stall:g} s")
                self._release(id, FinishReason.CANCELLED, error=error, tell=True)

    @property
    def _limit(self) -> int:
        return self._config.stream_buffer_kib << 10


def _error(output: Output) -> CairnError | None:
    """What an end that is no success raises."""
    if output.finish is FinishReason.DEADLINE:
        return _late()
    if output.finish is FinishReason.CANCELLED:
        return Cancelled("the request was cancelled")
    if output.finish is FinishReason.ERROR:
        return GenerationFailed(output.error or "the generation failed")
    return None


def _late() -> CairnError:
    return DeadlineExceeded("the request reached its time limit before it was done")


def _broken(error: Exception) -> CairnError:
    log.error("the text of an answer could not be built: %s", trace(error))
    return GenerationFailed("the text of the answer could not be built")


def _timing(flight: Flight, now: float) -> Timing:
    """The same three spans that the worker reports, as this side saw them."""
    started = now if flight.started_at is None else flight.started_at
    first = now if flight.first_at is None else flight.first_at
    return Timing(queue=started - flight.arrived, prefill=max(0.0, first - started), decode=now - first)
