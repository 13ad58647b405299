"""Who is let in: the limits that need the loaded engine, the bounds of the queue, and when to come back."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cairn.config import Config
from cairn.errors import ContextTooLong, InvalidRequest, Overloaded
from cairn.service import wire
from cairn.types import Request

_MEMORY = 30.0
_BOOKED = 10.0
_GUESS = 0.1
"""Seconds and requests that are assumed to have been measured already: a place a second."""


class Pace:
    """How fast the queue moves, measured while somebody waits; what is older than `_MEMORY` seconds fades."""

    def __init__(self) -> None:
        self._left = self._seconds = self._last = self._due = 0.0
        self._queued = False

    def note(self, now: float, left: int, queued: bool) -> None:
        """`left` requests left the queue since the last call; `queued`: whether others still wait."""
        if self._queued:
            passed = now - self._last
            fade = math.exp(-passed / _MEMORY)
            self._left, self._seconds = self._left * fade + left, self._seconds * fade + passed
        self._last, self._queued = now, queued

    def book(self, now: float, most: int) -> float:
        """Seconds until a place in the queue is free that nobody was told of yet.

        Those who were told may not come back, so at most `most` places or `_BOOKED` seconds are kept for them.
        """
        each = (self._seconds + _GUESS) / (self._left + _GUESS)
        self._due = min(max(self._due, now) + each, now + max(most * each, _BOOKED))
        return max(1.0, self._due - now)


class Queue:
    """The requests that no worker has begun to compute."""

    def __init__(self, config: Config) -> None:
        self._limit = config.max_queue
        self._limit_tokens = config.max_queue_tokens
        self._max_running = config.max_running
        self._pace = Pace()
        self._blocked = False
        self.requests = 0
        self.tokens = 0
        """Tokens of their prompts."""

    def enter(self, request: Request) -> None:
        """A request was let in."""
        self.requests += 1
        self.tokens += len(request.prompt)

    def leave(self, request: Request) -> None:
        """It is computed now, or has ended."""
        self.requests -= 1
        self.tokens -= len(request.prompt)

    def note(self, now: float, started: int, stats: wire.Stats) -> None:
        """The worker made a step, which `started` so many requests."""
        self._blocked = stats.waiting > 0
        self._pace.note(now, started, self._blocked)

    def check(self, request: Request, running: int, rows: int, now: float) -> None:
        """Raise Overloaded if there is no place. `running` requests are computed, `rows` could be."""
        waiting = self.requests
        if not self._blocked:  # the worker takes everybody: its free places are for those on the way to it
            waiting -= max(0, min(self._max_running, rows) - running)
        full = waiting >= self._limit
        if full or (waiting > 0 and self.tokens + len(request.prompt) > self._limit_tokens):
            raise Overloaded(
                f"the queue is full: {self.requests} requests with {self.tokens} prompt tokens wait "
                f"(limits: {self._limit} and {self._limit_tokens})",
                retry_after=self.retry_after(now),
            )

    def retry_after(self, now: float) -> float:
        """Seconds until a place is free that nobody was promised yet."""
        return self._pace.book(now, self._limit)


def check_together(requests: Sequence[Request], config: Config, rows: int) -> None:
    """Raise InvalidRequest for the choices of one call that would not all get past `Queue.check` on an empty server.

    They start together, so to come back later, as Overloaded asks for, would never help. `rows` as there.
    """
    count, tokens = len(requests), sum(len(request.prompt) for request in requests)
    places = min(config.max_running, rows)
    field = "prompt" if sum(request.choice == 0 for request in requests) > 1 else "n"
    if count > places + config.max_queue:
        raise InvalidRequest(
            f"{field} asks for {count} answers at once; this server takes {places + config.max_queue} "
            f"(max_running {config.max_running}, max_queue {config.max_queue})",
            field=field,
        )
    if count > places + 1 and tokens > config.max_queue_tokens:
        raise InvalidRequest(
            f"{field} asks for {count} answers at once, with {tokens} prompt tokens together; this server takes more "
            f"than {places + 1} with at most {config.max_queue_tokens} (max_queue_tokens)",
            field=field,
        )


def check_tokens(request: Request, info: wire.Info) -> None:
    """Raise ContextTooLong or InvalidRequest, with the figures, for what this engine could never compute."""
    prompt, asked = len(request.prompt), request.sampling.max_tokens
    if prompt + asked > info.context:
        raise ContextTooLong(
            f"the context holds {info.context} tokens; the prompt has {prompt} and the completion asks for {asked}",
            field="prompt" if prompt + 1 > info.context else "max_tokens",
            prompt_tokens=prompt,
            context=info.context,
        )
    if prompt + min(asked, 1) > info.pool_tokens:
        raise InvalidRequest(
            f"the prompt has {prompt} tokens and the whole KV pool holds {info.pool_tokens}; "
            "a larger --kv-gb makes room",
            field="prompt",
        )
    tokens = (*request.prompt, *request.generated) if request.generated else request.prompt
    if min(tokens) < 0 or max(tokens) >= info.vocab:
        raise InvalidRequest(f"token ids must be from 0 to {info.vocab - 1}", field="prompt")
