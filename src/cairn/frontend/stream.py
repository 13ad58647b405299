"""The consumer's handle on a request: an iterator of events, one wait per frame, cancelled when abandoned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from cairn.frontend.request_state import RequestState
from cairn.frontend.waker import Waker
from cairn.types.outputs import Event
from cairn.types.request import Request
from cairn.types.stats import CacheReport


class RequestStream:
    """The events of one request, for one consumer: an async iterator that ends after `Done` or raises a typed error.

    Closing it (`aclose`, `close`), cancelling the task that waits for it, or dropping the last reference cancels the
    request.
    """

    def __init__(self, flight: RequestState, cancel: Callable[[int], object]) -> None:
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
    def tokens(self) -> Sequence[int]:
        """Every token of the answer so far, read or not."""
        return self._flight.tokens

    @property
    def cache(self) -> CacheReport | None:
        """The origin of the prompt's KV, once known."""
        return self._flight.cache

    @property
    def over(self) -> bool:
        """Whether everything was read."""
        return self._over

    def wake_with(self, waker: Waker) -> None:
        """Use another consumer's waker, so that one consumer can read several streams."""
        self._flight.waker = waker

    def take(self) -> list[Event]:
        """Return the events that are there, perhaps none, without waiting.

        Raise the request's error once all are read.
        """
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

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Event:
        """Return the next event. Cancelling the wait cancels the request."""
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
        """Do the same as `close`, for `contextlib.aclosing`."""
        self.close()

    def __del__(self) -> None:
        # The consumer abandoned it before its end. The garbage collector may run in any thread.
        if not self._flight.done and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel, self.id)


async def merge(
    start: Callable[[Request], RequestStream],
    requests: Sequence[Request],
    *,
    heartbeat: Callable[[], float] | None = None,
    announce: bool = False,
) -> AsyncGenerator[list[tuple[int, Event]], None]:
    """Start the requests of one call and yield lists of (index, event), all that is there at once.

    An empty list means that nothing came for as many seconds as `heartbeat` returned when the wait began. With
    `announce` one is yielded first, once all requests were admitted. The first error of any of them is raised after the
    events that came before it. However this ends (all are done, an error, `aclose`, a cancelled task), every request is
    closed.
    """
    waker = Waker()
    streams: list[RequestStream] = []
    try:
        for request in requests:
            stream = start(request)
            streams.append(stream)
            stream.wake_with(waker)
        if announce:
            yield []
        alive = list(enumerate(streams))
        while alive:
            news: list[tuple[int, Event]] = []
            failed: Exception | None = None
            over = False
            for index, stream in alive:
                try:
                    for event in stream.take():
                        news.append((index, event))
                except Exception as error:
                    failed = failed or error
                over |= stream.over
            if over:
                alive = [pair for pair in alive if not pair[1].over]
            if news:
                yield news
            if failed is not None:
                raise failed
            if not news and alive and not await waker.sleep(None if heartbeat is None else heartbeat()):
                yield []
    finally:
        for stream in streams:
            stream.close()
