"""The requests in flight: the worker's outputs, their metrics, and the one way out.

A frame of the worker is one step of all requests: each request's record (`RequestState`) takes its tokens, and its
consumer is woken once. Every request leaves by `release`, whatever ended it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import msgspec

from cairn.config.config import Config
from cairn.frontend.admission import Queue
from cairn.frontend.miss_explainer import RecentContexts
from cairn.frontend.request_state import RequestState, RequestStatus
from cairn.frontend.supervisor import LESS_MEMORY, Supervisor
from cairn.system.interfaces import Clock
from cairn.system.metrics import Metrics
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import (
    IMPOSSIBLE,
    CairnError,
    Cancelled,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    Unavailable,
    by_code,
    trace,
)
from cairn.types.outputs import FinishReason, Output, Timing
from cairn.worker import wire

log = logging.getLogger(__name__)

KEEP_SECONDS = 600.0
KEEP_REQUESTS = 1000
KEEP_CHARACTERS = 32 << 20
_LATE = 1.0
"""Seconds past a deadline after which the front ends a request itself; the worker normally does."""

Used = Callable[[str, int, int], None]
"""Called at the end of each request that was begun, with its tenant's share of the server and the tokens of its prompt
and its answer. A prompt of several choices counts with the first of them."""


class History:
    """The status of the last requests that ended, bounded by age, number and the size of their text."""

    def __init__(self) -> None:
        self._ended: OrderedDict[int, tuple[float, RequestStatus]] = OrderedDict()
        self._characters = 0

    def add(self, status: RequestStatus, now: float) -> None:
        """Add a status and drop the oldest ones beyond the bounds."""
        self._ended[status.id] = (now, status)
        self._characters += len(status.text) + len(status.reasoning)
        self.forget(now)

    def get(self, id: int) -> RequestStatus | None:
        """Return the status at a request's end, if it is still kept."""
        ended = self._ended.get(id)
        return ended[1] if ended else None

    def forget(self, now: float) -> None:
        """Drop what is beyond the bounds."""
        while self._ended:
            ended, status = next(iter(self._ended.values()))
            many = len(self._ended) > KEEP_REQUESTS or self._characters > KEEP_CHARACTERS
            if not many and now - ended < KEEP_SECONDS:
                break
            self._ended.popitem(last=False)
            self._characters -= len(status.text) + len(status.reasoning)


class RequestTable:
    """All requests of one service, from their admission to their end. One event loop's thread uses it."""

    metrics: Metrics
    tokenizer: Tokenizer
    """Set before the first request, as `metrics` is."""

    def __init__(self, config: Config, supervisor: Supervisor, clock: Clock) -> None:
        self.flights = supervisor.flights
        self.queue = Queue(config)
        self.history = History()
        self.recent = RecentContexts()
        self.used: Used | None = None
        self._supervisor, self._clock = supervisor, clock
        self._stall, self._limit = config.stream_stall, config.stream_buffer_kib << 10
        self._stepped = 0.0
        self._empty = asyncio.Event()

    @property
    def running(self) -> int:
        """Number of requests that are being computed."""
        return len(self.flights) - self.queue.requests

    def enter(self, flight: RequestState) -> None:
        """Add an admitted request. Raises `WireError` if it is too long to be sent."""
        self._supervisor.add(flight)
        self.queue.enter(flight.request)

    async def emptied(self, seconds: float) -> None:
        """Wait until there are no requests, for at most so many seconds."""
        if self.flights:
            self._empty.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), seconds)

    # --------------------------------------------------------------------------------------- what the worker says

    def step(self, step: wire.StepOutputs, before: wire.Stats) -> None:
        """Process a step of the worker; `before`: its figures at the last one."""
        now = self._clock.now()
        for id in step.started:
            self._started(id, now)
        if step.stats != before or step.started:
            self.queue.note(now, step.stats)
            self._measure(before, step.stats)
        tokens = len(step.ids) + sum([len(output.tokens) for output in step.outputs])
        if tokens:
            self.metrics.step_tokens.observe(tokens)
        self._tokens(step, now)
        for output in step.outputs:
            self._output(output, now)

    def _tokens(self, step: wire.StepOutputs, now: float) -> None:
        """Process the single tokens that most requests get in a step.

        All requests that also got one in the last step waited equally long, so their latency is recorded in one call.
        """
        flights, before, together, taken = self.flights, self._stepped, 0, 0
        for id, token in zip(step.ids, step.tokens, strict=True):
            flight = flights.get(id)
            if flight is None:
                continue
            flight.accept_token(token)
            taken += not flight.eager
            if flight.last_at == before:
                together += 1
            else:
                self.metrics.inter_token.observe(now - flight.last_at)
            flight.last_at = now
            self._show(flight)
        if together:
            self.metrics.inter_token.observe(now - before, together)
        self._stepped = now
        self.metrics.generation_tokens += taken

    def _measure(self, old: wire.Stats, new: wire.Stats) -> None:
        metrics = self.metrics
        if new.kv is not None:
            metrics.kv = new.kv
        metrics.token_seconds = new.token_seconds
        metrics.running, metrics.waiting, metrics.kv_usage = new.running, new.waiting, new.kv_usage
        metrics.prefix_queries += new.prefix_queries - old.prefix_queries
        metrics.prefix_hits += new.prefix_hits - old.prefix_hits
        metrics.preemptions += new.preemptions - old.preemptions
        metrics.accepted_guesses += new.accepted - old.accepted
        metrics.rejected_guesses += new.rejected - old.rejected

    def _started(self, id: int, now: float) -> None:
        flight = self.flights.get(id)
        if flight is not None and flight.started_at is None:
            flight.started_at = now
            self.queue.begin(flight.request)

    def _output(self, output: Output, now: float) -> None:
        flight = self.flights.get(output.id)
        if flight is None:
            return
        if output.cache is not None and flight.cache is None:
            output = self._explained(flight, output)
        flight.accept(output)
        if not flight.eager:
            self.metrics.generation_tokens += len(output.tokens)
        if output.tokens:
            self.metrics.generation_tokens_forced += len(output.tokens) - 1 - output.accepted_prediction_tokens
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
            if output.finish is FinishReason.LENGTH and flight.length < flight.limit:
                error = GenerationFailed(LESS_MEMORY)
            self.release(output.id, output.finish, error=error, timing=output.timing)

    def _explained(self, flight: RequestState, output: Output) -> Output:
        """Return a request's first output with the best known reason why a part of its prompt was not cached."""
        cache, request, metrics = output.cache, flight.request, self.metrics
        assert cache is not None
        metrics.prompt_tokens += len(request.prompt)
        metrics.prompt_tokens_cached += cache.cached
        metrics.prompt_length.observe(len(request.prompt))
        metrics.prompt_tokens_loaded["ram"] += cache.ram
        metrics.prompt_tokens_loaded["disk"] += cache.disk
        metrics.prompt_tokens_loaded["shared"] += cache.shared
        if cache.miss is None:
            return output

        def decode(ids: Sequence[int]) -> str:
            return self.tokenizer.decode(ids, skip_special=False)

        miss = self.recent.explain(
            cache.miss, request.salt, request.prompt, flight.origin, decode, adapters=request.adapters
        )
        metrics.misses[miss.reason] += 1
        return msgspec.structs.replace(output, cache=msgspec.structs.replace(cache, miss=miss))

    def refused(self, refused: wire.Refused) -> None:
        """End a request that the worker does not take."""
        error = by_code(refused.code, refused.message, refused.field)
        if isinstance(error, Overloaded | Unavailable):
            error.retry_after = self.queue.retry_after(self._clock.now())
        self.release(refused.id, FinishReason.ERROR, error=error)

    def lost(self, flight: RequestState, error: CairnError) -> None:
        """End a request that its workers did not survive."""
        self.release(flight.request.id, FinishReason.ERROR, error=error)

    def _show(self, flight: RequestState) -> None:
        """Wake the consumer; read a request with stop strings at once."""
        if flight.eager:
            try:
                with self._counting(flight):
                    flight.read()
            except Exception as error:
                self.release(flight.request.id, FinishReason.ERROR, error=_broken(error), tell=True)
                return
            if flight.text.stopped:
                reason = FinishReason.LENGTH if flight.text.looped else FinishReason.STOP
                self.release(flight.request.id, reason, tell=True)
                return
        if flight.waker is not None:
            flight.waker.wake()

    @contextlib.contextmanager
    def _counting(self, flight: RequestState) -> Iterator[None]:
        """Count the tokens read inside, for a request whose text may stop within them.

        All others are counted on arrival, so that the total is the sum of what requests report. Tokens that a worker
        sends for an ended request count nowhere.
        """
        before = flight.text.completion_tokens
        yield
        if flight.eager:
            self.metrics.generation_tokens += flight.text.completion_tokens - before

    # ---------------------------------------------------------------------------------------------- the one way out

    def release(
        self,
        id: int,
        reason: FinishReason,
        *,
        error: CairnError | None = None,
        timing: Timing | None = None,
        tell: bool = False,
    ) -> bool:
        """End a request, whatever ended it; return False if it had ended before.

        `tell`: the worker does not know yet.
        """
        flight = self._supervisor.remove(id, reason if tell else None)
        if flight is None:
            return False
        if flight.started_at is None:
            self.queue.leave(flight.request)
        now = self._clock.now()
        timing = timing or _timing(flight, now)
        try:
            with self._counting(flight):
                flight.end(reason, error, timing)
        except Exception as failure:
            flight.fail(_broken(failure))
        self._remember(flight, reason, timing, now)
        if flight.waker is not None:
            flight.waker.wake()
        if not self.flights:
            self._empty.set()
        return True

    def _remember(self, flight: RequestState, reason: FinishReason, timing: Timing, now: float) -> None:
        """Record the metrics, spans, context and status of a request that has ended."""
        request = flight.request
        if self.used is not None and flight.started_at is not None:
            prompt = len(request.prompt) if request.choice == 0 else 0
            self.used(request.share, prompt, flight.text.completion_tokens)
        _note_spans(flight, flight.reason or reason, timing, now)
        self.metrics.record_end(
            flight.reason or reason,
            timing,
            total=now - flight.arrived,
            first=None if flight.first_at is None else flight.first_at - flight.arrived,
            generated=flight.text.completion_tokens,
            limit=request.sampling.max_tokens,
        )
        if flight.first_at is not None and request.want == "token":
            self.queue.answered(flight.text.completion_tokens)
        if flight.first_at is not None and flight.origin.store:
            context = [*request.prompt, *flight.tokens]
            self.recent.note(
                request.salt, context, len(request.prompt), flight.origin.messages, adapters=request.adapters
            )
        self.history.add(flight.status(), now)

    def end_late(self) -> None:
        """End requests past their deadline that the worker did not end, and those that nobody reads."""
        now = self._clock.now()
        for id, flight in tuple(self.flights.items()):
            timeout, first = flight.request.timeout, flight.request.first_token_timeout
            if timeout is not None and now - flight.arrived > timeout + _LATE:
                self.release(id, FinishReason.DEADLINE, error=_late(), tell=True)
            elif first is not None and flight.first_at is None and now - flight.arrived > first:
                late = DeadlineExceeded(f"no token came within first_token_timeout, {first:g} s")
                self.release(id, FinishReason.DEADLINE, error=late, tell=True)
            elif flight.idle:
                flight.read_at = now
            elif now - flight.read_at > self._stall and flight.backlog > self._limit:
                error = Cancelled(f"nobody read the answer for {self._stall:g} s")
                self.release(id, FinishReason.CANCELLED, error=error, tell=True)
        self.history.forget(now)


def _error(output: Output) -> CairnError | None:
    """Return the error that an unsuccessful end raises; None for a success."""
    if output.finish is FinishReason.DEADLINE:
        return _late()
    if output.finish is FinishReason.CANCELLED:
        return Cancelled("the request was cancelled")
    if output.error in IMPOSSIBLE:
        return InvalidRequest(output.error)
    if output.finish is FinishReason.ERROR:
        return GenerationFailed(output.error or "the generation failed")
    return None


def _late() -> CairnError:
    return DeadlineExceeded("the request reached its time limit before it was done")


def _broken(error: Exception) -> CairnError:
    log.error("the text of an answer could not be built: %s", trace(error))
    return GenerationFailed("the text of the answer could not be built")


def _timing(flight: RequestState, now: float) -> Timing:
    """Return the three spans that the worker reports, as this side saw them."""
    first = now if flight.first_at is None else flight.first_at
    started = now if flight.started_at is None else flight.started_at
    if flight.prefill is not None:
        started = max(flight.arrived, first - flight.prefill)
    return Timing(queue=started - flight.arrived, prefill=max(0.0, first - started), decode=now - first)


def _note_spans(flight: RequestState, reason: FinishReason, timing: Timing, now: float) -> None:
    """Record the spans of a request that has ended, counted back from its end.

    Time before its last worker began with it counts as waiting.
    """
    spans, request = flight.spans, flight.request
    if spans is None:
        return
    named: dict[str, str | int | float] = {"request": f"{request.id:016x}", "choice": request.choice}
    first = max(flight.arrived, now - timing.decode)
    started = max(flight.arrived, first - timing.prefill)
    cache = flight.cache
    spans.add("queue", flight.arrived, started, **named)
    if cache is not None and cache.load > 0:
        began = max(flight.arrived, started - cache.load)
        spans.add("load", began, started, **named, what="kv", tokens=cache.ram + cache.disk + cache.shared)
    if started < now:
        found = {} if cache is None else {"computed": cache.computed, "cached": cache.cached}
        spans.add("prefill", started, first, **named, prompt_tokens=len(request.prompt), **found)
    if flight.first_at is not None and request.want == "token":
        count = flight.text.completion_tokens
        spans.add("decode", first, now, **named, completion_tokens=count, finish_reason=reason.value)
