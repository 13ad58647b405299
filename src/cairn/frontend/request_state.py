"""The front's record of a request: the worker's output, and what its consumer has not read yet.

The tokens so far are all that is needed to continue in another worker. They are turned into text when the consumer
reads, so a consumer that lags gets what it missed as one event. Only if the text itself may end a request (a stop
string, a first tool call, a repetition) is it read at once, so that the worker stops whether anybody reads or not.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from cairn.frontend.miss_explainer import PromptOrigin
from cairn.frontend.waker import Waker
from cairn.system.spans import Spans
from cairn.text.output.stream import TextStream
from cairn.types.errors import CairnError
from cairn.types.outputs import (
    REPETITION,
    Delta,
    Done,
    Event,
    FinishReason,
    Output,
    Timing,
    TokenLogprob,
    Usage,
    joined_calls,
)
from cairn.types.request import Request
from cairn.types.stats import CacheReport


class PackedLogprobs:
    """A FIFO queue of `TokenLogprob` in a tenth of the memory of the objects."""

    __slots__ = ("_counts", "_ids", "_values")

    def __init__(self) -> None:
        self._counts = array("I")
        """Alternatives of each entry."""
        self._ids = array("I")
        """Each entry's token, then those of its alternatives."""
        self._values = array("d")
        """The log-probabilities, in the order of `_ids`."""

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def nbytes(self) -> int:
        """Bytes that the entries take."""
        return 4 * (len(self._counts) + len(self._ids)) + 8 * len(self._values)

    def extend(self, entries: Iterable[TokenLogprob]) -> None:
        """Append entries."""
        for entry in entries:
            self._counts.append(len(entry.top))
            self._ids.append(entry.token)
            self._values.append(entry.logprob)
            for token, value in entry.top:
                self._ids.append(token)
                self._values.append(value)

    def take(self, count: int) -> tuple[TokenLogprob, ...]:
        """Remove and return the first `count` entries, or as many as there are."""
        taken = []
        at = 0
        for alternatives in self._counts[:count]:
            end = at + 1 + alternatives
            top = tuple(zip(self._ids[at + 1 : end], self._values[at + 1 : end], strict=True))
            taken.append(TokenLogprob(self._ids[at], self._values[at], top))
            at = end
        del self._counts[:count], self._ids[:at], self._values[:at]
        return tuple(taken)


State = Literal["waiting", "running", "finished", "failed", "cancelled"]
PLAIN = PromptOrigin()
_MERGE_AT = 32
"""Unread events of a request that is read at once, above which they are merged."""


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a request, now or at its end."""

    id: int
    state: State
    prompt_tokens: int
    completion_tokens: int
    text: str
    """Content so far, without text that a stop string or a split character may still change."""
    reasoning: str = ""
    reason: FinishReason | None = None
    error: str = ""
    salt: bytes = b""
    """The tenant's salt, so that a tenant sees only its own requests."""
    choice: int = 0
    """Its index among the choices of one prompt."""


class InFlight(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a request that waits or runs."""

    id: int
    state: Literal["waiting", "prefill", "running"]
    """`prefill`: its prompt is being computed."""
    seconds: float
    """Seconds since it arrived."""
    prompt_tokens: int
    cached_tokens: int | None
    """None until it is known."""
    completion_tokens: int


class RequestState:
    """A request from its admission to its end. One event loop's thread uses it."""

    __slots__ = (
        "_events",
        "_guessed",
        "_logprobs",
        "_merge_at",
        "_parts",
        "_reasoning",
        "_unread",
        "_unscored",
        "accepted",
        "arrived",
        "cache",
        "deaths",
        "done",
        "eager",
        "error",
        "first_at",
        "last_at",
        "limit",
        "moved",
        "mu",
        "origin",
        "prefill",
        "prompt_logprobs",
        "read_at",
        "reason",
        "rejected",
        "request",
        "skip",
        "spans",
        "started_at",
        "survived",
        "text",
        "tokens",
        "vector",
        "waker",
    )

    def __init__(self, request: Request, text: TextStream, arrived: float, origin: PromptOrigin = PLAIN) -> None:
        self.request = request
        self.origin = origin
        self.text = text
        output = request.output
        self.eager = bool(request.stop) or output.one_call or output.calls_only or request.repetition_stop
        self.tokens = list(request.generated)
        """Every token of the answer so far, including those generated before a resumption."""
        self.mu = request.mu
        """Mirostat's state after `tokens`, if that is on."""
        self.moved = ""
        """A sentence for the client, once the CPU computes the rest because the device that began it failed."""
        self.limit = len(request.prompt) + request.sampling.max_tokens
        """Most tokens, prompt included, that it was admitted for. If a worker ends it for its length before that, the
        worker has less memory than the one before."""
        self.accepted = self.rejected = 0
        """Guesses that are in the answer, and those that are not."""
        self.prompt_logprobs = 0
        """Prompt log-probabilities received; `skip` of those from a new worker are repetitions."""
        self.skip = 0
        self.cache: CacheReport | None = None
        self.arrived = arrived
        self.started_at: float | None = None
        self.prefill: float | None = None
        """Seconds that the worker spent from its start to its first token, reported with that token."""
        self.first_at: float | None = None
        self.last_at = arrived
        self.read_at = arrived
        """When the consumer last took everything there was."""
        self.reason: FinishReason | None = None
        self.error: CairnError | None = None
        self.deaths = 0
        """Consecutive workers that died with this request in flight and without a new token of it."""
        self.survived = len(self.tokens)
        """Length of `tokens` at the last such death."""
        self.done = False
        self.vector = b""
        """The hidden state, for a request that wants one."""
        self.waker: Waker | None = None
        self.spans: Spans | None = None
        """Collector of the spans of its time, if anybody wants them."""
        self._unread: list[int] = []
        self._guessed: list[tuple[int, int]] = []
        """For each unread output with accepted guesses, which come first in it: the number of its first token, and how
        many there are. Kept only while the text itself may end the request."""
        self._logprobs = PackedLogprobs()
        """Log-probabilities of tokens that no delta has reported; a delta gets those of its `kinds` when it is
        taken."""
        self._unscored = text.undecided
        """Leading tokens that an earlier request sampled, so that their log-probabilities are unknown."""
        self._events: list[Event] = []
        self._merge_at = _MERGE_AT
        self._parts = [delta.text for delta in text.before]
        self._reasoning = [delta.reasoning for delta in text.before]

    # -------------------------------------------------------------------------------------- what the worker says

    def accept(self, output: Output) -> None:
        """Record an output of the worker. The service handles its end."""
        if output.cache is not None and self.cache is None:
            self.cache = output.cache
            self.prefill = None if output.timing is None else output.timing.prefill
        if output.prompt_logprobs:
            news = output.prompt_logprobs[self.skip :]
            self.skip = max(0, self.skip - len(output.prompt_logprobs))
            self.prompt_logprobs += len(news)
            if news:
                self._events.append(Delta(prompt_logprobs=news))
        if output.progress is not None:
            self._events.append(Delta(progress=(output.progress,)))
        self.vector = output.vector or self.vector
        self.mu = self.mu if output.mu is None else output.mu
        if output.accepted_prediction_tokens and self.eager:
            self._guessed.append((len(self.tokens) - len(self.request.generated), output.accepted_prediction_tokens))
        self.accepted += output.accepted_prediction_tokens
        self.rejected += output.rejected_prediction_tokens
        self.tokens.extend(output.tokens)
        self._unread.extend(output.tokens)
        self._logprobs.extend(output.logprobs)

    def accept_token(self, token: int) -> None:
        """Record an output that is one token and nothing else."""
        self.tokens.append(token)
        self._unread.append(token)

    def resume(self, now: float) -> Request:
        """Return the request for another worker, which continues after the tokens received so far."""
        sampling = self.request.sampling
        if sampling.prompt_logprobs and self.tokens:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=False)
        self.skip = self.prompt_logprobs
        timeout = self.request.timeout
        if timeout is not None:
            timeout = max(0.0, timeout - (now - self.arrived))
        return msgspec.structs.replace(
            self.request, generated=tuple(self.tokens), mu=self.mu, sampling=sampling, timeout=timeout
        )

    def read(self) -> None:
        """Turn the tokens received so far into events."""
        if self._unread:
            tokens, self._unread = self._unread, []
            self._add(self.text.push(tokens))
            if self._guessed:
                self._settle_guesses()

    def _settle_guesses(self) -> None:
        """Count guesses as rejected whose tokens the text ignores, since they follow its end."""
        if self.text.stopped:
            for first, count in self._guessed:
                ignored = max(0, count - max(0, self.text.completion_tokens - first))
                self.accepted -= ignored
                self.rejected += ignored
        self._guessed.clear()

    def end(self, reason: FinishReason, error: CairnError | None, timing: Timing | None) -> None:
        """Close the text and queue the last event. The consumer gets `error` after all text before it.

        An error with LENGTH means that there was no room for more tokens. If the text has met a stop already, nothing
        is missing, and the error is dropped. Text that only `finish` releases is no such stop: more tokens might have
        changed how it is parsed.
        """
        self.read()
        short = error is not None and reason is FinishReason.LENGTH
        if self.text.stopped and (error is None or short):
            reason, error, short = FinishReason.LENGTH if self.text.looped else FinishReason.STOP, None, False
        deltas, self.reason = self.text.finish(reason)
        self._add(deltas)
        if short:
            self.reason = FinishReason.ERROR
        self.error = error
        self.done = True
        if error is None:
            cache = self.cache or CacheReport()
            end = Done(
                reason=self.reason,
                usage=self.usage,
                cache=cache,
                timing=timing or Timing(),
                vector=self.vector,
                unread_call=self.text.unread_call,
                moved=self.moved,
                detail=REPETITION if self.text.looped and self.reason is FinishReason.LENGTH else "",
            )
            self._events.append(end)

    def fail(self, error: CairnError) -> None:
        """End without touching the text, because the text failed."""
        self.reason, self.error, self.done = FinishReason.ERROR, error, True

    def _add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.text:
                self._parts.append(delta.text)
            if delta.reasoning:
                self._reasoning.append(delta.reasoning)
        self._events.extend(deltas)
        if len(self._events) > self._merge_at:
            self._events = joined(self._events)
            self._merge_at = max(_MERGE_AT, 2 * len(self._events))

    # ----------------------------------------------------------------------------------- what the consumer reads

    def take(self) -> list[Event]:
        """Return all new events, with a lagging consumer's deltas merged."""
        self.read()
        events = self._events
        if len(events) > 1:
            events = joined(events)
        self._events = []
        self._merge_at = _MERGE_AT
        return [self._with_logprobs(event) for event in events] if self._logprobs else events

    def _with_logprobs(self, event: Event) -> Event:
        if isinstance(event, Done) or not event.kinds:
            return event
        kinds = event.kinds[self._unscored :]
        self._unscored -= len(event.kinds) - len(kinds)
        return msgspec.structs.replace(event, kinds=kinds, logprobs=self._logprobs.take(len(kinds)))

    @property
    def length(self) -> int:
        """Tokens of the prompt and the answer so far."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to take."""
        return not (self._unread or self._events or self.done)

    @property
    def backlog(self) -> int:
        """Approximate bytes that wait for the consumer."""
        size = 8 * len(self._unread) + self._logprobs.nbytes
        for event in self._events:
            if isinstance(event, Delta):
                size += len(event.text) + len(event.reasoning) + 8 * len(event.tokens)
                size += sum(64 + 128 * len(p.top) for p in event.prompt_logprobs)
                size += sum(len(call.arguments) for call in event.tool_calls)
        return size

    @property
    def usage(self) -> Usage:
        """Tokens of the prompt and the answer; tokens past a stop are not counted."""
        cached = self.cache.cached if self.cache else 0
        prompt = len(self.request.prompt)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self.text.completion_tokens,
            cached_tokens=min(cached, prompt),
            accepted_prediction_tokens=self.accepted,
            rejected_prediction_tokens=self.rejected,
        )

    def status(self) -> RequestStatus:
        """Return the status with the whole text, including that before a resumption."""
        self.read()
        before = sum(len(delta.tokens) for delta in self.text.before)
        return RequestStatus(
            id=self.request.id,
            state=self._state(),
            prompt_tokens=len(self.request.prompt),
            completion_tokens=before + self.text.completion_tokens,
            text="".join(self._parts),
            reasoning="".join(self._reasoning),
            reason=self.reason,
            error=str(self.error or ""),
            salt=self.request.salt,
            choice=self.request.choice,
        )

    def figures(self, now: float) -> InFlight:
        """Return its figures at the time `now`, without its text."""
        state: Literal["waiting", "prefill", "running"] = "running"
        if self.started_at is None:
            state = "waiting"
        elif not self.tokens:
            state = "prefill"
        return InFlight(
            id=self.request.id,
            state=state,
            seconds=now - self.arrived,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=None if self.cache is None else self.cache.cached,
            completion_tokens=len(self.tokens),
        )

    def _state(self) -> State:
        if not self.done:
            return "waiting" if self.started_at is None else "running"
        if self.reason is FinishReason.CANCELLED:
            return "cancelled"
        return "finished" if self.error is None else "failed"


def joined(events: list[Event]) -> list[Event]:
    """Merge runs of deltas as far as that keeps their order.

    Within one delta reasoning comes first, then text, then calls.
    """
    merged: list[Event] = []
    run: list[Delta] = []
    said = 0
    for event in events:
        if isinstance(event, Delta) and _first(event) >= said:
            run.append(event)
            said = max(said, _last(event))
            continue
        if run:
            merged.append(_one(run))
        run, said = ([event], _last(event)) if isinstance(event, Delta) else ([], 0)
        if not run:
            merged.append(event)
    if run:
        merged.append(_one(run))
    return merged


def _first(delta: Delta) -> int:
    """Return the rank of the first part of a delta: reasoning 0, text 1, calls or nothing 2."""
    return 0 if delta.reasoning else 1 if delta.text else 2


def _last(delta: Delta) -> int:
    """Return the rank of the last part of a delta."""
    return 2 if delta.tool_calls else 1 if delta.text else 0


def _one(deltas: list[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=joined_calls([call for delta in deltas for call in delta.tool_calls]),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        kinds=b"".join(delta.kinds for delta in deltas),
        prompt_logprobs=tuple(logprob for delta in deltas for logprob in delta.prompt_logprobs),
        progress=tuple(one for delta in deltas for one in delta.progress),
    )
