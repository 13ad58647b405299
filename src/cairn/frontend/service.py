"""The front of one model: `generate`, `abort`, `status`, `drain`, `close`. HTTP, CLI and Python all come through here.

Everything runs on one event loop. What becomes of a request after its admission is `RequestTable`.
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
from cairn.frontend.request_state import PLAIN, InFlight, RequestState, RequestStatus
from cairn.frontend.request_table import RequestTable, Used
from cairn.frontend.requests import SamplingOptions, requests, with_options
from cairn.frontend.sent_marks import Mark, SentMarks
from cairn.frontend.stream import RequestStream
from cairn.frontend.supervisor import Supervisor
from cairn.frontend.watchdog import Patience
from cairn.kv.tiers.reuse_hints import Standing
from cairn.models.hub.hub import locate
from cairn.models.spec.config import check_fits
from cairn.router.services import RequestIds
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
from cairn.types.outputs import FinishReason
from cairn.types.request import Grammar, OutputFormat, Request
from cairn.types.stats import KvStats, Placed, Swept, TakenIn
from cairn.worker import wire

log = logging.getLogger(__name__)

FULL = 0.9
"""Share of the KV pool in use by requests from which the server says that it is not ready."""
SHUTTING_DOWN = "the server is shutting down"
DRAINED = "the server's owner has drained it: it takes no new requests"
_TICK = 0.25


def names_of(config: Config, spec: ModelSpec) -> frozenset[str]:
    """What a model may be called: its names, what was given to `serve`, and the end of that where it is a path or a
    name on the hub."""
    given = config.model
    ends = {given, given.rstrip("/").rpartition("/")[2]}
    ends |= {end.removesuffix(".gguf") for end in ends} | {end.partition(":")[0] for end in ends if "/" in given}
    return frozenset({spec.name, config.served_name or spec.name, *config.alias, *ends} - {""})


class ServiceStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the service does now."""

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
    names: frozenset[str]
    """All that they may call it."""
    strict: bool
    """Whether they may call it nothing else."""

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
        self._logged: dict[str, str] = {}
        """The trouble of each store as the log has it."""
        self._marks = SentMarks()
        self._telling: asyncio.Task[None] | None = None
        """Tells a new worker what the one before it was told."""
        self.hour = LastHour()
        self._loaded = self._waits = False
        self.leaving = ""
        """Why it takes no more requests; empty where it does."""
        self._closed = False
        self._ticker: asyncio.Task[None] | None = None

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

        `first`: a worker that was started with this configuration before. `ids`: where other services of the server
        draw theirs, too. Raises ModelError (or what else the model's
        files deserve) with nothing left running.
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
        """Make a service whose tokenizer and templates are ready, and with a worker that is to `wait` its model's files
        are checked; then `load`. Options and errors as of `start`."""
        service = cls(config, patience=patience, clock=clock, ids=ids)
        try:
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
        """Load the model of a service that is prepared. Raises what its files deserve, with nothing left running."""
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
        self.chat.knows_engine(self.info.context, self.info.vocab, self.spec.eos_ids)
        self.spec = with_options(self._with_ends(self.spec), self._config)
        if self._config.tokenizer is not None:
            check_fits(self.spec, self._config.tokenizer, self.tokenizer.largest_id)
        if self.tokenizer.vocab_size > self.spec.vocab:
            log.warning(
                "the tokenizer has %d tokens and the model rows for %d: texts that need the others are refused",
                self.tokenizer.vocab_size,
                self.spec.vocab,
            )
        if lacking := self.tokenizer.unspelt_bytes:
            log.debug(  # said where the model is pulled, and by `cairn show`; not at every start
                "the vocabulary lacks the bytes %s: they are left out of prompts",
                " ".join(f"{byte:02x}" for byte in sorted(lacking)),
            )
        if self.spec.kind != "chat":
            await asyncio.to_thread(importlib.import_module, "numpy")  # for what is done with vectors here
        self._loaded = True

    # ---------------------------------------------------------------------------------------------- for callers

    def next_id(self) -> int:
        """A request id: see `RequestIds`."""
        return self._ids.draw()

    @property
    def used(self) -> Used | None:
        """Who is told what each request has used, if anybody."""
        return self._traffic.used

    @used.setter
    def used(self, used: Used) -> None:
        self._traffic.used = used

    def check_generates(self) -> None:
        """InvalidRequest for a model that was not made to answer."""
        if self.spec.kind != "chat":
            use = "/v1/rerank" if self.spec.kind == "rerank" else "/v1/embeddings"
            made = "judges texts" if self.spec.kind == "rerank" else "makes embeddings"
            raise InvalidRequest(f"{self.name} {made} and answers nothing; use {use}", field="model")

    def make_requests(
        self,
        prompt: Sequence[int],
        options: SamplingOptions,
        *,
        ids: Callable[[], int] | None = None,
        max_choices: int = 1,
        output: OutputFormat | None = None,
        grammar: Grammar | None = None,
        salt: bytes = b"",
        share: str = "",
        durable: bool = False,
        stored: bool = True,
        allow_empty: bool = False,
    ) -> tuple[Request, ...]:
        """The requests of a prompt, one a choice, with this model's limits and the configuration's. `ids` gives each
        its id. Raises as `cairn.frontend.requests.requests`."""
        return requests(
            self.spec,
            prompt,
            options,
            ids=ids or self.next_id,
            context=self.info.context,
            max_choices=max_choices,
            output=output,
            salt=salt,
            share=share,
            timeout=self._config.request_timeout,
            allow_empty=allow_empty,
            durable=durable,
            stored=stored,
            controls=self.controls,
            sampler_order=self._config.sampler_order,
            grammar=grammar,
            encode=self.tokenizer.encode,
        )

    def generate(self, request: Request, told: PromptOrigin | None = None) -> RequestStream:
        """Start a request. The events follow as an async iterator; what goes wrong later is raised by it.

        `told`: what helps to say why a part of the prompt was not found.

        Raises here, before anything is computed: ContextTooLong, InvalidRequest, DeadlineExceeded, Overloaded and
        Unavailable (both with `retry_after`). A request without a timeout gets the configured one, or what is left of
        its call's.
        """
        now = self._clock.now()
        most = self._config.request_timeout if request.timeout is None else request.timeout
        if not (timeout := left(now, most)):
            raise DeadlineExceeded("the request reached its time limit before it was begun")
        if request.timeout != timeout:
            request = msgspec.structs.replace(request, timeout=timeout)
        self._admit(request)
        flight = RequestState(request, TextStream(self.tokenizer, request), now, told or PLAIN)
        flight.spans = PRESENT.get()
        stream = RequestStream(flight, self.abort)
        try:
            self._traffic.enter(flight)
        except wire.WireError as error:
            flight.end(FinishReason.ERROR, error, None)
            raise InvalidRequest(str(error), field="prompt") from error
        return stream

    def abort(self, id: int) -> bool:
        """Cancel a request: its stream raises `Cancelled` after what was said. False if it does not run."""
        error = Cancelled("the request was cancelled")
        return self._traffic.release(id, FinishReason.CANCELLED, error=error, tell=True)

    def status(self, id: int) -> RequestStatus | None:
        """What is known of a request; None if it never was, or ended too long ago."""
        flight = self._flights.get(id)
        if flight is not None:
            return flight.status()
        return self._history.get(id)

    def in_flight(self, salt: bytes) -> list[InFlight]:
        """A tenant's requests that have not ended, the oldest first."""
        now = self._clock.now()
        return [flight.figures(now) for flight in self._flights.values() if flight.request.salt == salt]

    def stats(self) -> ServiceStats:
        """The numbers of this moment."""
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
        """Why new requests would not be served well now; empty when they would."""
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
    def gave_up(self) -> str:
        """Why there will be no other worker; empty where there is one, or will be."""
        return self._supervisor.gave_up

    @property
    def stalled(self) -> str:
        """Why the worker, which has work, does not get on; empty where it does."""
        return self._supervisor.stalled

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

    async def drain(self, grace: float, why: str = SHUTTING_DOWN) -> None:
        """Take no more requests, wait up to `grace` seconds for those that run, and end the rest with Unavailable,
        which says `why`."""
        self.leaving = why
        await self._traffic.emptied(grace)
        self._end_all()

    async def close(self) -> None:
        """End everything at once: requests, the worker, the template helper. Nothing is left. May be called again."""
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

    async def mark(self, tokens: Sequence[int], salt: bytes, standing: Standing, *, keep: int = 0) -> None:
        """Say how soon the stores may evict this context beyond its first `keep` tokens: see `kv.standing`. The next
        worker is told so, too."""
        self._marks.add(Mark(tokens, salt, standing, keep))
        asked = self._supervisor.ask("mark", tokens=tuple(tokens), salt=salt, keep=keep, standing=standing)
        self._answered(await asked)

    async def prefetch(self, tokens: Sequence[int], salt: bytes = b"") -> Placed:
        """Bring what the stores have of this context up into the pool; where it is then."""
        return self._answered(await self._supervisor.ask("prefetch", tokens=tuple(tokens), salt=salt)).placed

    async def evict(self, tokens: Sequence[int], salt: bytes = b"", *, keep: int = 0, disk: bool = False) -> Placed:
        """Give up the KV of this context in the pool and in RAM, and with `disk` everywhere; where it is then.

        Its first `keep` tokens stay, because others need them; so does what a running request holds.
        """
        if disk:
            self._marks.forget(tokens, salt, keep)
        asked = self._supervisor.ask("evict", tokens=tuple(tokens), salt=salt, keep=keep, disk=disk)
        return self._answered(await asked).placed

    async def kv_paths(self, tokens: Sequence[int], salt: bytes = b"") -> list[Path]:
        """The files that the disk has of this context: each may be gone by the time it is read."""
        asked = self._supervisor.ask("paths", tokens=tuple(tokens), salt=salt)
        return [Path(path) for path in self._answered(await asked).paths]

    async def take_in(self, path: Path, tokens: Sequence[int], salt: bytes = b"") -> TakenIn:
        """Store what a file has of this context's KV (`kv.portable_kv`), after every check."""
        asked = self._supervisor.ask("take_in", path=str(path), tokens=tuple(tokens), salt=salt)
        return self._answered(await asked).taken

    async def erase_of_model(self, model: bytes, tokens: Sequence[int], salt: bytes = b"", *, keep: int = 0) -> None:
        """Erase the KV of a context beyond its first `keep` tokens that another model, which is not loaded, has stored
        in the same folder. Unavailable where that cannot be done now."""
        asked = self._supervisor.ask("evict", tokens=tuple(tokens), salt=salt, keep=keep, model=model)
        self._answered(await asked)

    async def where(self, tokens: Sequence[int], salt: bytes = b"") -> Placed:
        """How many leading tokens of this context each tier has."""
        return self._answered(await self._supervisor.ask("where", tokens=tuple(tokens), salt=salt)).placed

    async def scrub(self) -> Swept:
        """Read and check every stored chunk, and remove the damaged ones."""
        return self._answered(await self._supervisor.ask("scrub")).swept

    async def prune(self) -> Swept:
        """Remove what nobody has used for longer than the stores' time to live."""
        return self._answered(await self._supervisor.ask("prune")).swept

    def _answered(self, answer: wire.KVAnswer) -> wire.KVAnswer:
        if answer.kv is not None:
            self.metrics.kv = answer.kv
            self._log_troubles(answer.kv)
        if answer.trouble:
            raise Unavailable(answer.trouble, retry_after=self._supervisor.pause)
        return answer

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
        if ready.info.note:
            log.info("%s", ready.info.note)
        if ready.trouble:
            log.warning("%s", ready.trouble)
        if not self._loaded:
            self.name = self._config.served_name or ready.spec.name
            self.names, self.strict = names_of(self._config, ready.spec), self._config.strict_model
            self.metrics = self._traffic.metrics = Metrics(self._config.metrics_prefix, self.name)
        else:
            self._telling = asyncio.create_task(self._mark_again())
        self.metrics.worker_restarts = self._supervisor.restarts
        self.metrics.worker_failures = lambda: self._supervisor.failures
        self.metrics.worker_still = lambda: self._supervisor.still

    async def _mark_again(self) -> None:
        """Tell a new worker how contexts stand, as the one before it knew."""
        with contextlib.suppress(Unavailable):  # it is gone again: the next one is told
            for tokens, salt, standing, keep in self._marks:
                await self._supervisor.ask("mark", tokens=tuple(tokens), salt=salt, keep=keep, standing=standing)

    def _with_ends(self, spec: ModelSpec) -> ModelSpec:
        """The spec with all that ends an answer: with what the tokenizer and the chat template know, once loaded."""
        more = sorted(self.tokenizer.end_ids) if hasattr(self, "tokenizer") else ()
        ends = dict.fromkeys((*spec.eos_ids, *(i for i in more if i < spec.vocab)))
        return msgspec.structs.replace(spec, eos_ids=tuple(ends))

    def _on_end(self) -> None:
        """A worker has ended, and nothing runs until there is another, if there ever is."""
        self._stats = wire.Stats()
        if hasattr(self, "metrics"):  # it had loaded
            self.metrics.worker_replaced()

    def _on_step(self, step: wire.StepOutputs) -> None:
        before, self._stats = self._stats, step.stats
        self._traffic.step(step, before)
        if step.stats.kv is not None:
            self._log_troubles(step.stats.kv)

    def _log_troubles(self, kv: KvStats) -> None:
        """Say once what a store cannot do, and once that it works again. Of a store that is not there nothing new."""
        for name, tier in (("in memory", kv.ram), ("on the disk", kv.disk)):
            if tier is None or tier.trouble == self._logged.get(name, ""):
                continue
            self._logged[name] = tier.trouble
            if tier.trouble:
                log.warning("%s", tier.trouble)
            else:
                log.info("the KV store %s works again", name)

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
