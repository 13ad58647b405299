"""The way of one request's events from the worker's frames to its consumer.

A `Flight` is the front's record of a request that has not ended: the tokens so far (all that is needed to go on
in another worker) and what its consumer has not read yet. Tokens are turned into text when the consumer reads, so a
consumer that lags gets what it missed as one event; only a request with stop strings is read at once, because a
stop must reach the worker whether anybody reads or not. A `Stream` is the consumer's handle on a flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Literal

import msgspec

from cairn.errors import CairnError
from cairn.text.stream import TextStream
from cairn.types import CacheReport, Delta, Done, Event, FinishReason, Output, Request, Timing, TokenLogprob, Usage

State = Literal["waiting", "running", "finished", "failed", "cancelled"]
_MERGE_AT = 32  # unread events of a stream that is read at once, before they are made one


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a request, now or after its end."""

    id: int
    state: State
    prompt_tokens: int
    completion_tokens: int
    text: str
    """Content so far; what a stop string or a split character may still change is not in it."""
    reasoning: str = ""
    reason: FinishReason | None = None
    error: str = ""
    salt: bytes = b""
    """The tenant's salt, so that a tenant is shown its own requests only."""


class Waker:
    """Lets one consumer sleep until any of its streams has something to say."""

    __slots__ = ("_future", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[bool] | None = None

    def wake(self) -> None:
        """Wake the consumer; it costs nothing if it is awake."""
        if self._future is not None and not self._future.done():
            self._future.set_result(True)

    async def sleep(self, timeout: float | None = None) -> bool:
        """Sleep until `wake` (True) or until `timeout` seconds have passed (False)."""
        self._future = self._loop.create_future()
        timer = None if timeout is None else self._loop.call_later(timeout, self._expire, self._future)
        try:
            return await self._future
        finally:
            self._future = None
            if timer is not None:
                timer.cancel()

    @staticmethod
    def _expire(future: asyncio.Future[bool]) -> None:
        if not future.done():
            future.set_result(False)


class Flight:
    """A request from its admission to its end. One event loop's thread uses it."""

    __slots__ = (
        "_events",
        "_logprobs",
        "_parts",
        "_reasoning",
        "_unread",
        "arrived",
        "cache",
        "deaths",
        "done",
        "eager",
        "error",
        "first_at",
        "last_at",
        "prompt_logprobs",
        "read_at",
        "reason",
        "request",
        "skip",
        "started_at",
        "survived",
        "text",
        "timing",
        "tokens",
        "waker",
    )

    def __init__(self, request: Request, text: TextStream, arrived: float) -> None:
        self.request = request
        self.text = text
        self.eager = bool(request.stop)
        self.tokens = list(request.generated)
        """Every token of the answer so far, also what was generated before."""
        self.prompt_logprobs = 0
        """Prompt log-probabilities received, and (`skip`) how many of a new worker's are repetitions."""
        self.skip = 0
        self.cache: CacheReport | None = None
        self.arrived = arrived
        self.started_at: float | None = None
        self.first_at: float | None = None
        self.last_at = arrived
        self.read_at = arrived
        """When the consumer last took everything there was."""
        self.timing: Timing | None = None
        self.reason: FinishReason | None = None
        self.error: CairnError | None = None
        self.deaths = 0
        """Workers that died in a row with this request in flight and without a new token of it."""
        self.survived = len(self.tokens)
        """Length of `tokens` at the last such death."""
        self.done = False
        self.waker: Waker | None = None
        self._unread: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._events: list[Event] = []
        self._parts: list[str] = []
        self._reasoning: list[str] = []

    # -------------------------------------------------------------------------------------- what the worker says

    def accept(self, output: Output) -> None:
        """Take an output of the worker; its end is the service's business."""
        if output.cache is not None and self.cache is None:
            self.cache = output.cache
        if output.prompt_logprobs:
            news = output.prompt_logprobs[self.skip :]
            self.skip = max(0, self.skip - len(output.prompt_logprobs))
            self.prompt_logprobs += len(news)
            if news:
                self._events.append(Delta(prompt_logprobs=news))
        self.tokens.extend(output.tokens)
        self._unread.extend(output.tokens)
        self._logprobs.extend(output.logprobs)

    def accept_token(self, token: int) -> None:
        """Take an output that is one token and nothing else."""
        self.tokens.append(token)
        self._unread.append(token)

    def resume(self, now: float) -> Request:
        """The request for another worker: it goes on after the tokens that this front already has."""
        sampling = self.request.sampling
        if sampling.prompt_logprobs and self.tokens:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=False)
        self.skip = self.prompt_logprobs
        timeout = self.request.timeout
        if timeout is not None:
            timeout = max(0.0, timeout - (now - self.arrived))
        return msgspec.structs.replace(self.request, generated=tuple(self.tokens), sampling=sampling, timeout=timeout)

    def read(self) -> None:
        """Turn the tokens received so far into events."""
        if self._unread:
            tokens, logprobs = self._unread, self._logprobs
            self._unread, self._logprobs = [], []
            self._add(self.text.push(tokens, logprobs))

    def end(self, reason: FinishReason, error: CairnError | None, timing: Timing | None) -> None:
        """Close the text and queue the last event. `error` is raised to the consumer after what was said before."""
        self.read()
        if self.text.stopped and error is None:
            reason = FinishReason.STOP
        deltas, self.reason = self.text.finish(reason)
        self._add(deltas)
        self.error = error
        self.timing = timing
        self.done = True
        if error is None:
            cache = self.cache or CacheReport()
            self._events.append(Done(reason=self.reason, usage=self.usage, cache=cache, timing=timing or Timing()))

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
        if len(self._events) > _MERGE_AT:
            self._events = joined(self._events)

    # ----------------------------------------------------------------------------------- what the consumer reads

    def take(self) -> list[Event]:
        """Everything new, a lagging consumer's deltas as one."""
        self.read()
        events = self._events
        if len(events) > 1:
            events = joined(events)
        self._events = []
        return events

    @property
    def idle(self) -> bool:
        """Whether there is nothing to take."""
        return not (self._unread or self._events or self.done)

    @property
    def backlog(self) -> int:
        """About how many bytes wait for the consumer."""
        size = 8 * len(self._unread) + sum(64 + 32 * len(logprob.top) for logprob in self._logprobs)
        for event in self._events:
            if isinstance(event, Delta):
                size += len(event.text) + len(event.reasoning) + 8 * len(event.tokens)
                size += sum(64 + 32 * len(p.top) for p in (*event.logprobs, *event.prompt_logprobs))
                size += sum(len(call.arguments) for call in event.tool_calls)
        return size

    @property
    def usage(self) -> Usage:
        """Tokens of the prompt and the answer; tokens past a stop are not counted."""
        cached = self.cache.pool if self.cache else 0
        prompt = len(self.request.prompt)
        return Usage(
            prompt_tokens=prompt, completion_tokens=self.text.completion_tokens, cached_tokens=min(cached, prompt)
        )

    def status(self) -> RequestStatus:
        """What to tell somebody who asks for this request."""
        self.read()
        return RequestStatus(
            id=self.request.id,
            state=self._state(),
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self.text.completion_tokens,
            text="".join(self._parts),
            reasoning="".join(self._reasoning),
            reason=self.reason,
            error=str(self.error or ""),
            salt=self.request.salt,
        )

    def _state(self) -> State:
        if not self.done:
            return "waiting" if self.started_at is None else "running"
        if self.reason is FinishReason.CANCELLED:
            return "cancelled"
        return "finished" if self.error is None else "failed"


def joined(events: list[Event]) -> list[Event]:
    """The same events with every run of deltas made one."""
    merged: list[Event] = []
    run: list[Delta] = []
    for event in events:
        if isinstance(event, Delta):
            run.append(event)
            continue
        if run:
            merged.append(_one(run))
            run = []
        merged.append(event)
    if run:
        merged.append(_one(run))
    return merged


def _one(deltas: list[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=tuple(call for delta in deltas for call in delta.tool_calls),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        prompt_logprobs=tuple(logprob for delta in deltas for logprob in delta.prompt_logprobs),
    )


class Stream:
    """The events of one request, for one consumer: an async iterator that ends after `Done` or raises a typed error.

    Closing it (`aclose`, `close`), cancelling the task that waits for it, or letting go of it cancels the request.
    """

    def __init__(self, flight: Flight, cancel: Callable[[int], object]) -> None:
        self._flight = flight
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._events: list[Event] = []
        self._over = False
        flight.waker = Waker()

    @property
    def id(self) -> int:
        """The request's id."""
        return self._flight.request.id

    @property
    def over(self) -> bool:
        """Whether everything was read."""
        return self._over

    def wake_with(self, waker: Waker) -> None:
        """Let `waker` be woken instead of this stream's own: one consumer reads several streams."""
        self._flight.waker = waker

    def take(self) -> list[Event]:
        """The events that are there, without waiting: perhaps none. Raises the request's error once all is read."""
        flight = self._flight
        if self._over or flight.idle:
            return []
        events = flight.take()
        if flight.done:
            if flight.error is None:
                self._over = True
            elif not events:
                self._over = True
                raise flight.error
        return events

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Event:
        """The next event. Cancelling the wait cancels the request."""
        while not self._events:
            self._events = self.take()
            if self._events:
                self._events.reverse()
            elif self._over:
                raise StopAsyncIteration
            else:
                await self._sleep()
        return self._events.pop()

    async def _sleep(self) -> None:
        waker = self._flight.waker
        assert waker is not None
        try:
            await waker.sleep()
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        """Cancel the request if it still runs. Nothing more can be read."""
        self._over = True
        if not self._flight.done:
            self._cancel(self.id)

    async def aclose(self) -> None:
        """`close`, for `contextlib.aclosing`."""
        self.close()

    def __del__(self) -> None:
        # The consumer let go of it in the middle. The collector may run in any thread.
        if not self._flight.done and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel, self.id)


async def merge(
    streams: Sequence[Stream], *, heartbeat: float | None = None
) -> AsyncGenerator[tuple[int, Event] | None, None]:
    """(index, event) of all streams as they come; None when nothing came for `heartbeat` seconds.

    The first error of any stream is raised. However it ends - the end of all, an error, `aclose`, a cancelled task -
    every stream is closed.
    """
    waker = Waker()
    for stream in streams:
        stream.wake_with(waker)
    try:
        alive = list(enumerate(streams))
        while alive:
            quiet = True
            for index, stream in alive:
                for event in stream.take():
                    quiet = False
                    yield index, event
            alive = [pair for pair in alive if not pair[1].over]
            if quiet and alive and not await waker.sleep(heartbeat):
                yield None
    finally:
        for stream in streams:
            stream.close()
