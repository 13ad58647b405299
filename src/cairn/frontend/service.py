"""The front of one model: `generate`, `abort`, `status`, `drain`, `close`. HTTP, CLI and Python all come through here.

Everything runs on one event loop. `RequestTable` handles a request after its admission.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from cairn.config.config import Config
from cairn.frontend.admission import check_tokens
from cairn.frontend.last_hour import LastHour
from cairn.frontend.launch import First, launch_first
from cairn.frontend.miss_explainer import PromptOrigin
from cairn.frontend.request_options import NO_PARAMS, RequestParams, SamplingOptions, requests
from cairn.frontend.request_state import PLAIN, InFlight, RequestState, RequestStatus
from cairn.frontend.request_table import RequestTable, Used
from cairn.frontend.sampling_defaults import with_options
from cairn.frontend.stored_kv import StoredKv
from cairn.frontend.stream import RequestStream
from cairn.frontend.supervisor import Supervisor
from cairn.frontend.worker_connection import Patience
from cairn.models.hub.hub import locate
from cairn.models.spec.tokenizer_files import check_fits
from cairn.system.deadline import left
from cairn.system.interfaces import Clock
from cairn.system.metrics import Metrics
from cairn.system.posix import SystemClock
from cairn.system.spans import PRESENT
from cairn.text.chat.prompt import Chat
from cairn.text.output.stream import TextStream, hidden_controls
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import Cancelled, Conflict, DeadlineExceeded, InvalidRequest, Unavailable, trace
from cairn.types.model_spec import ModelSpec
from cairn.types.model_variant import ModelVariant, variant
from cairn.types.outputs import FinishReason
from cairn.types.request import Adapters, Request
from cairn.types.stats import KvStats
from cairn.types.step import AdapterFacts
from cairn.worker import wire

log = logging.getLogger(__name__)

FULL = 0.9
"""Share of the KV pool in use by requests above which the server reports that it is not ready."""
SHUTTING_DOWN = "the server is shutting down"
DRAINED = "the server's owner has drained it: it takes no new requests"
_TICK = 0.25
"""Seconds between checks of the worker and of the requests' deadlines."""
_LOOK = 0.02
"""Seconds between checks whether an adapter's requests have ended."""


def names_of(config: Config, spec: ModelSpec) -> frozenset[str]:
    """Return the names of a model: its own, those of the options, and the last part of a path or hub name."""
    option = config.model
    ends = {option, option.rstrip("/").rpartition("/")[2]}
    ends |= {end.removesuffix(".gguf") for end in ends} | {end.partition(":")[0] for end in ends if "/" in option}
    return frozenset({spec.name, config.served_name or spec.name, *config.alias, *ends} - {""})


class RequestIds:
    """Request ids: strictly increasing, below 2**63, and above those of earlier runs, since they follow the clock.

    All services of a server share one.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = 0

    def draw(self) -> int:
        """Return the next id."""
        self._last = max(self._last + 1, self._clock.time_ns())
        return self._last


class ServiceStats(msgspec.Struct, frozen=True, kw_only=True):
    """Present figures of the service."""

    running: int
    waiting: int
    kv_usage: float
    worker_pid: int | None
    worker_restarts: int


class Service(StoredKv):
    """One model being served. Make it with `await Service.start(config)`; end it with `await close()`."""

    spec: ModelSpec
    """The model."""
    info: wire.Info
    """The capabilities of the loaded engine."""
    tokenizer: Tokenizer
    chat: Chat
    name: str
    """The model's name for clients."""
    names: frozenset[str]
    """All names that clients may use for it."""
    strict: bool
    """Whether clients may use no other name."""
    variant: ModelVariant
    """The model and its adapters, as its KV is stored."""
    applied: Adapters = ()
    """Adapters that its requests are computed with."""

    def __init__(
        self,
        config: Config,
        *,
        patience: Patience | None = None,
        clock: Clock | None = None,
        ids: RequestIds | None = None,
    ) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._ids = ids or RequestIds(self._clock)
        self._supervisor = Supervisor(
            patience=patience or Patience(),
            clock=self._clock,
            on_ready=self._on_ready,
            on_end=self._on_end,
            on_step=self._on_step,
            on_refused=lambda refused: self._traffic.refused(refused),
            on_lost=lambda flight, error: self._traffic.lost(flight, error),
        )
        self._traffic = RequestTable(config, self._supervisor, self._clock)
        self._flights, self._queue, self._history = self._traffic.flights, self._traffic.queue, self._traffic.history
        self.recent = self._traffic.recent
        self._stats = wire.Stats()
        self._trouble = ""
        StoredKv.__init__(self, self._supervisor)
        self._telling: asyncio.Task[None] | None = None
        """Sends the marks of the last worker to a new one."""
        self.hour = LastHour()
        self.attached: tuple[tuple[str, str, AdapterFacts], ...] = ()
        """Name, path and facts of the adapters that were loaded with the model."""
        self._loaded = self._waits = False
        self.leaving = ""
        """Why it takes no more requests; empty if it does."""
        self._closed = False
        self._ticker: asyncio.Task[None] | None = None
        self._places: tuple[wire.AdapterPlace, ...] = ()

    @classmethod
    async def start(
        cls,
        config: Config,
        first: First | None = None,
        *,
        in_process: bool = False,
        patience: Patience | None = None,
        clock: Clock | None = None,
        ids: RequestIds | None = None,
    ) -> Service:
        """Load the model in a worker process (`in_process`: on a thread) and serve it.

        `first`: a worker that was started already, with this configuration. `ids`: the source of ids that all services
        of the server share. Raises ModelError, or the error that the model's files cause, and leaves nothing running.
        """
        if first is None:
            first = launch_first(config, in_process, await asyncio.to_thread(locate, config.model))
        service = await cls.prepare(config, first, patience=patience, clock=clock, ids=ids)
        await service.load()
        return service

    @classmethod
    async def prepare(
        cls,
        config: Config,
        first: First,
        *,
        patience: Patience | None = None,
        clock: Clock | None = None,
        ids: RequestIds | None = None,
    ) -> Service:
        """Make a service whose tokenizer and templates are ready; then call `load`.

        With a worker that is to `wait`, the model's files are checked too. Options and errors as for `start`.
        """
        service = cls(config, patience=patience, clock=clock, ids=ids)
        try:
            service._places = first.load.adapters
            service._supervisor.start(first)
            service._ticker = asyncio.create_task(service._tick())
            service.chat = await Chat.start(Path(first.load.folder), config, service._clock)
            service.tokenizer = service._traffic.tokenizer = service.chat.tokenizer
            if first.load.wait:
                await service._supervisor.checked()
        except BaseException:
            await service.close()
            raise
        service._waits = first.load.wait
        return service

    async def load(self) -> None:
        """Load the model of a prepared service. Raises the error that its files cause, and leaves nothing running."""
        try:
            await self._load()
        except BaseException:
            await self.close()
            raise

    async def _load(self) -> None:
        if self._waits:
            self._supervisor.start_loading()
        await self._supervisor.loaded()
        self.controls = hidden_controls(self.tokenizer)
        """Text -> id of the control tokens that are never shown."""
        self.chat.set_engine(self.info.context, self.info.vocab, self.spec.eos_ids)
        self.spec = with_options(self._with_ends(self.spec), self._config)
        if self._config.tokenizer is not None:
            check_fits(self.spec, self._config.tokenizer, self.tokenizer.largest_id)
        if self.tokenizer.vocab_size > self.spec.vocab:
            log.warning(
                "the tokenizer has %d tokens and the model rows for %d: texts that need the others are refused",
                self.tokenizer.vocab_size,
                self.spec.vocab,
            )
        if lacking := self.tokenizer.missing_bytes:
            log.debug(  # said where the model is pulled, and by `cairn show`; not at every start
                "the vocabulary lacks the bytes %s: they are left out of prompts",
                " ".join(f"{byte:02x}" for byte in sorted(lacking)),
            )
        if self.spec.kind != "chat":
            await asyncio.to_thread(importlib.import_module, "numpy")  # vectors are processed with it
        self._loaded = True

    # ---------------------------------------------------------------------------------------------- for callers

    def next_id(self) -> int:
        """Return a new request id: see `RequestIds`."""
        return self._ids.draw()

    @property
    def used(self) -> Used | None:
        """The callback that gets each request's use of tokens, if any."""
        return self._traffic.used

    @used.setter
    def used(self, used: Used) -> None:
        self._traffic.used = used

    def check_generates(self) -> None:
        """Raise InvalidRequest for a model that does not generate text."""
        if self.spec.kind != "chat":
            use = "/v1/rerank" if self.spec.kind == "rerank" else "/v1/embeddings"
            made = "judges texts" if self.spec.kind == "rerank" else "makes embeddings"
            raise InvalidRequest(f"{self.name} {made} and answers nothing; use {use}", field="model")

    def make_requests(
        self,
        prompt: Sequence[int],
        options: SamplingOptions,
        params: RequestParams = NO_PARAMS,
        *,
        ids: Callable[[], int] | None = None,
        max_choices: int = 1,
    ) -> tuple[Request, ...]:
        """Make the requests of a prompt, one per choice, within the limits of the model and the configuration.

        `ids` returns each one's id. Raises as `cairn.frontend.request_options.requests`.
        """
        return requests(
            self.spec,
            prompt,
            options,
            params,
            ids=ids or self.next_id,
            context=self.info.context,
            max_choices=max_choices,
            timeout=self._config.request_timeout,
            controls=self.controls,
            sampler_order=self._config.sampler_order,
            encode=self.tokenizer.encode,
        )

    def generate(self, request: Request, origin: PromptOrigin | None = None) -> RequestStream:
        """Start a request and return its events as an async iterator, which raises later errors.

        `origin`: helps to explain why a part of the prompt was not cached.

        Raises before anything is computed: ContextTooLong, InvalidRequest, DeadlineExceeded, Overloaded and Unavailable
        (both with `retry_after`). A request without a timeout gets the configured one, or what remains of its call's.
        """
        now = self._clock.now()
        most = self._config.request_timeout if request.timeout is None else request.timeout
        if not (timeout := left(now, most)):
            raise DeadlineExceeded("the request reached its time limit before it was begun")
        if request.timeout != timeout:
            request = msgspec.structs.replace(request, timeout=timeout)
        self._admit(request)
        flight = RequestState(request, TextStream(self.tokenizer, request), now, origin or PLAIN)
        flight.spans = PRESENT.get()
        stream = RequestStream(flight, self.abort)
        try:
            self._traffic.enter(flight)
        except wire.WireError as error:
            flight.end(FinishReason.ERROR, error, None)
            raise InvalidRequest(str(error), field="prompt") from error
        return stream

    def abort(self, id: int) -> bool:
        """Cancel a request; return False if it does not run.

        Its stream raises `Cancelled` after the events before it.
        """
        error = Cancelled("the request was cancelled")
        return self._traffic.release(id, FinishReason.CANCELLED, error=error, tell=True)

    def status(self, id: int) -> RequestStatus | None:
        """Return the status of a request; None if it never existed or ended too long ago."""
        flight = self._flights.get(id)
        if flight is not None:
            return flight.status()
        return self._history.get(id)

    def in_flight(self, salt: bytes) -> list[InFlight]:
        """Return figures of a tenant's requests that have not ended, the oldest first."""
        now = self._clock.now()
        return [flight.figures(now) for flight in self._flights.values() if flight.request.salt == salt]

    def stats(self) -> ServiceStats:
        """Return the present figures."""
        return ServiceStats(
            running=self._traffic.running,
            waiting=self._queue.requests,
            kv_usage=self._stats.kv_usage,
            worker_pid=self._supervisor.pid,
            worker_restarts=self._supervisor.restarts,
        )

    @property
    def busy(self) -> bool:
        """Whether it has requests."""
        return bool(self._flights)

    def unready(self) -> list[str]:
        """Return why new requests would not be served well now; empty if they would."""
        reasons = []
        if self._supervisor.trouble:
            reasons.append(self._supervisor.trouble)
        elif not self._loaded:
            reasons.append("the model is being loaded")
        elif not self._supervisor.up:
            reasons.append("the worker is being replaced")
        elif self.stalled:
            reasons.append(self.stalled)
        if self.leaving:
            reasons.append(self.leaving)
        if self._stats.kv_usage > FULL:
            reasons.append(f"requests hold {self._stats.kv_usage:.0%} of the KV pool")
        return reasons

    @property
    def stores_kv(self) -> bool:
        """Whether its KV is stored where it outlives the worker."""
        config = self._config
        return (config.kv_disk and config.kv_dir is not None) or config.shared_store is not None

    @property
    def gave_up(self) -> str:
        """Why there will be no other worker; empty if there is one, or will be."""
        return self._supervisor.gave_up

    @property
    def stalled(self) -> str:
        """Why the worker, which has work, makes no progress; empty if it does."""
        return self._supervisor.stalled

    def troubles(self) -> list[str]:
        """Return what fails now although requests are served: a sentence for each store of KV."""
        if not self._loaded:
            return []
        tiers = (self.metrics.kv.ram, self.metrics.kv.disk, self.metrics.kv.shared)
        troubles = [tier.trouble for tier in tiers if tier is not None and tier.trouble]
        return [self._trouble, *troubles] if self._trouble else troubles

    def kv(self) -> KvStats:
        """Return the figures of the stores below the pool, at most about a second old."""
        return self.metrics.kv

    def queue_seconds(self) -> float:
        """Return the seconds until all requests that wait now have begun."""
        return self._traffic.queue.seconds()

    async def drain(self, grace: float, why: str = SHUTTING_DOWN) -> None:
        """Take no more requests, wait up to `grace` seconds for running ones, and end the rest with Unavailable.

        The error's message is `why`.
        """
        self.leaving = why
        await self._traffic.emptied(grace)
        self._end_all()

    async def close(self) -> None:
        """End everything at once: requests, the worker, the template helper. May be called again."""
        self.leaving = self.leaving or SHUTTING_DOWN
        self._end_all()
        if self._closed:
            return
        self._closed = True
        for task in (self._ticker, self._telling):
            if task is not None:
                task.cancel()
        try:
            await self._supervisor.close()
        finally:
            if hasattr(self, "chat"):
                await self.chat.close()

    # ------------------------------------------------------------------------------------------------ adapters

    async def attach(self, path: Path) -> AdapterFacts:
        """Read an adapter and attach it, while requests run. Raise InvalidRequest if it cannot be used."""
        answer = self._answered(await self._supervisor.ask("attach", path=str(path)))
        if answer.refused or answer.adapter is None:
            raise InvalidRequest(answer.refused, field="lora_path")
        digest = answer.adapter.digest
        self._supervisor.adapters[digest] = wire.AdapterPlace(path.name, str(path), digest)
        return answer.adapter

    async def detach(self, digest: bytes) -> None:
        """Free an adapter."""
        self._supervisor.adapters.pop(digest, None)
        with contextlib.suppress(Unavailable):  # the next worker does not get it
            self._answered(await self._supervisor.ask("detach", adapter=digest))

    async def drain_adapter(self, digest: bytes, grace: float, why: str) -> None:
        """Wait up to `grace` seconds for the requests that use an adapter, and end the rest with Unavailable.

        The error's message is `why`.
        """
        end = self._clock.now() + grace
        while users := [id for id, one in self._flights.items() if any(digest == d for d, _ in one.request.adapters)]:
            if self._clock.now() >= end:
                for id in users:
                    error = Unavailable(why, retry_after=1.0)
                    self._traffic.release(id, FinishReason.ERROR, error=error, tell=True)
                return
            await asyncio.sleep(_LOOK)

    # ------------------------------------------------------------------------------------------------ admission

    def _admit(self, request: Request) -> None:
        if self.leaving:
            raise self._refusal()
        if self.gave_up:
            raise Unavailable(self.gave_up, retry_after=60.0)
        if self._supervisor.trouble:
            raise Unavailable(self._supervisor.trouble, retry_after=self._supervisor.pause)
        if request.id in self._flights:
            raise Conflict(f"request {request.id} runs already")
        if request.want == "token":
            self.check_generates()
        check_tokens(request, self.info)
        pool = self.info.pool_tokens if request.want == "token" else 0
        self._queue.check(request, self._traffic.running, self.info.max_rows, self._clock.now(), pool)

    # --------------------------------------------------------------------------------------- what the worker says

    def _on_ready(self, ready: wire.ModelReady) -> None:
        self.spec, self.info, self._trouble = self._with_ends(ready.spec), ready.info, ready.trouble
        self.variant = variant(ready.spec.identity)
        log.info("%s computes on %s (%s)", ready.spec.name, ready.info.device, ready.info.device_text)
        if ready.info.note:
            log.info("%s", ready.info.note)
        if ready.trouble:
            log.warning("%s", ready.trouble)
        if not self._loaded:
            self.name = self._config.served_name or ready.spec.name
            self.names, self.strict = names_of(self._config, ready.spec), self._config.strict_model
            facts = zip(self._places, ready.adapters, strict=False)
            self.attached = tuple((one.name, one.path, found) for one, found in facts if found is not None)
            for name, place, one in self.attached:
                self._supervisor.adapters[one.digest] = wire.AdapterPlace(name, place, one.digest)
            self.metrics = self._traffic.metrics = Metrics(self._config.metrics_prefix, self.name)
        else:
            self._telling = asyncio.create_task(self._mark_again())
        self.metrics.worker_restarts = self._supervisor.restarts
        self.metrics.worker_failures = lambda: self._supervisor.failures
        self.metrics.worker_still = lambda: self._supervisor.still

    def _with_ends(self, spec: ModelSpec) -> ModelSpec:
        """Return the spec with all tokens that end an answer, also those of the tokenizer and the chat template."""
        more = sorted(self.tokenizer.end_ids) if hasattr(self, "tokenizer") else ()
        ends = dict.fromkeys((*spec.eos_ids, *(i for i in more if i < spec.vocab)))
        return msgspec.structs.replace(spec, eos_ids=tuple(ends))

    def _on_end(self) -> None:
        """Reset the figures of a worker that has ended."""
        self._stats = wire.Stats()
        if hasattr(self, "metrics"):  # it had loaded
            self.metrics.worker_replaced()

    def _on_step(self, step: wire.StepOutputs) -> None:
        before, self._stats = self._stats, step.stats
        self._traffic.step(step, before)
        if step.stats.kv is not None:
            self._log_troubles(step.stats.kv)

    # ------------------------------------------------------------------------------------------------------ the end

    def _end_all(self) -> None:
        for id in tuple(self._flights):
            self._traffic.release(id, FinishReason.ERROR, error=self._refusal(), tell=True)

    def _refusal(self) -> Unavailable:
        at_end = self.leaving in (SHUTTING_DOWN, DRAINED)
        return Unavailable(self.leaving, retry_after=max(1.0, self._config.shutdown_grace) if at_end else 1.0)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            try:
                self._supervisor.look()
                self._traffic.end_late()
                if self._loaded:
                    self.hour.note(self._clock, self.metrics)
            except Exception as error:
                log.error("the periodic check failed: %s", trace(error))
