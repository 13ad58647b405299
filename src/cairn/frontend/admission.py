"""Admission of requests: limits of the loaded engine, bounds of the queue, and when to retry."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from cairn.config.config import Config
from cairn.scheduler.sequence import check_prompt
from cairn.types.errors import ContextTooLong, InvalidRequest, Overloaded
from cairn.types.request import Request
from cairn.worker import wire

_MEMORY = 30.0
"""Seconds over which measurements of the queue's speed fade."""
_BOOKED = 10.0
"""Seconds ahead for which places may always be promised to refused clients."""
_GUESS = 0.1
"""Prior of the queue's speed: as if so many requests had left it in so many seconds, one request a second."""
_TOKEN_GUESS = 1.0
"""Weight of the speed that the worker reports, in seconds of the queue's own measurements."""
_ANSWER_GUESS = 256.0
"""Assumed length of an answer in tokens before any has ended."""
_ANSWER_WEIGHT = 0.05
"""Weight of one answer in the mean length."""
LONGEST_RETRY = 600.0
"""Largest Retry-After, in seconds."""


class QueuePace:
    """The speed at which the queue moves, measured while requests wait.

    Older measurements fade over `_MEMORY` seconds.
    """

    def __init__(self) -> None:
        self._left = self._tokens = self._seconds = self._last = self._due = 0.0
        self._queued = False
        self.token_seconds = 0.0
        """Seconds that the worker takes for a token of a prompt; 0 before it has reported any."""

    def note(self, now: float, left: int, queued: bool, tokens: int = 0) -> None:
        """Record that `left` requests with `tokens` left the queue since the last call.

        `queued`: whether others still wait.
        """
        if self._queued:
            passed = now - self._last
            fade = math.exp(-passed / _MEMORY)
            self._left, self._seconds = self._left * fade + left, self._seconds * fade + passed
            self._tokens = self._tokens * fade + tokens
        self._last, self._queued = now, queued

    def ahead(self, requests: int, tokens: int) -> float:
        """Return the seconds until so many waiting requests, with so many tokens, have begun; 0 if nothing is known.

        The estimate is the larger of one by requests and one by tokens, cached or not, from what left the queue lately;
        where that was little, the speed that the worker reports counts.
        """
        by_number = requests * (self._seconds + _GUESS) / (self._left + _GUESS) if self._left else 0.0
        weight = _TOKEN_GUESS if self.token_seconds else 0.0
        known = self._tokens + (weight / self.token_seconds if weight else 0.0)
        return max(by_number, tokens * (self._seconds + weight) / known if known else 0.0)

    def book(self, now: float, most: int, ahead: float = 0.0, waiting: int = 1) -> float:
        """Promise a refused client a place; return the seconds after which it should ask again.

        By then the waiting requests have begun, which takes `ahead` seconds for `waiting` of them, and so have those of
        clients that were promised a place before. The result is at most `LONGEST_RETRY`. Clients may not come back, so
        at most `most` places or `_BOOKED` seconds are promised.
        """
        each = max((self._seconds + _GUESS) / (self._left + _GUESS), ahead / max(1, waiting))
        self._due = min(max(self._due, now) + each, now + max(most * each, _BOOKED))
        return min(LONGEST_RETRY, max(1.0, ahead + self._due - now))


class Queue:
    """The requests that no worker has begun to compute, counted by tenant.

    One tenant may have all places while no other wants any. With several, each is sure of its half: what one tenant
    holds beyond half of the places does not count against the others.
    """

    def __init__(self, config: Config) -> None:
        self._limit = config.max_queue
        self._limit_tokens = config.max_queue_tokens
        self._max_running = config.max_running
        self._pace = QueuePace()
        self._blocked = False
        self._places: Counter[str] = Counter()
        self._prompts: Counter[str] = Counter()
        """Requests (`_places`) and prompt tokens of each tenant."""
        self._begun = [0, 0]
        """Requests and tokens whose computation began since the worker's last step."""
        self._needs: dict[int, int] = {}
        """Estimated tokens of KV that each request will need."""
        self._pools = config.max_queue_pools
        self._answer = _ANSWER_GUESS
        self.requests = 0
        self.tokens = 0
        """Tokens of their prompts."""
        self.needed = 0
        """Estimated tokens of KV that they will need."""

    def enter(self, request: Request) -> None:
        """Add a request."""
        self._needs[request.id] = need = self._need(request)
        self.needed += need
        self._count(request, 1)

    def leave(self, request: Request) -> None:
        """Remove a request that has ended."""
        self.needed -= self._needs.pop(request.id, 0)
        self._count(request, -1)

    def answered(self, tokens: int) -> None:
        """Record the length in tokens of an answer that has ended."""
        self._answer += _ANSWER_WEIGHT * (tokens - self._answer)

    def _need(self, request: Request) -> int:
        """Return the tokens of KV that a request will need: its prompt and an answer.

        The answer is taken to have the usual length, or that of its limit if lower. Shared prefixes are counted in
        full.
        """
        answer = min(request.sampling.max_tokens, round(self._answer))
        return len(request.prompt) + max(answer, len(request.generated))

    def begin(self, request: Request) -> None:
        """Remove a request whose computation begins."""
        self.leave(request)
        self._begun[0] += 1
        self._begun[1] += len(request.prompt)

    def _count(self, request: Request, sign: int) -> None:
        size, share = sign * len(request.prompt), request.share
        self.requests += sign
        self.tokens += size
        self._places[share] += sign
        self._prompts[share] += size
        if not self._places[share]:
            del self._places[share], self._prompts[share]

    def note(self, now: float, stats: wire.Stats) -> None:
        """Record a step of the worker."""
        self._blocked = stats.waiting > 0
        self._pace.token_seconds = stats.token_seconds
        left, tokens = self._begun
        self._begun = [0, 0]
        self._pace.note(now, left, self._blocked, tokens)

    def seconds(self) -> float:
        """Return the seconds until all that wait now have begun; 0 if nothing waits or nothing is known."""
        return self._pace.ahead(self.requests, self.tokens)

    def check(self, request: Request, running: int, rows: int, now: float, pool: int = 0) -> None:
        """Raise Overloaded if there is no place for a request, or none in time for its deadline.

        `running`: requests being computed; `rows`: how many could be; `pool`: tokens of KV that fit, 0 for a model
        without KV.
        """
        self._check_pool(request, pool, now)
        self._check_time(request, now)
        free = 0
        if not self._blocked:  # the worker has free places, which the requests on the way to it will take
            free = max(0, min(self._max_running, rows) - running)
        if self._has_place(request, free) and self._has_tokens(request, free):
            return
        mine, prompts = self._places[request.share], self._prompts[request.share]
        yours = f", {mine} of them with {prompts} yours" if 0 < mine < self.requests else ""
        raise Overloaded(
            f"the queue is full: {self.requests} requests with {self.tokens} prompt tokens wait{yours} "
            f"(limits: {self._limit} and {self._limit_tokens}, half of that for one of several tenants)",
            retry_after=self.retry_after(now),
        )

    def _check_pool(self, request: Request, pool: int, now: float) -> None:
        """Raise Overloaded if the KV of all waiting requests would fill the pool more often than `max_queue_pools`.

        The request is refused now rather than after a long wait.
        """
        need = self._need(request)
        if not pool or not self.requests or self.needed + need <= self._pools * pool:
            return
        raise Overloaded(
            f"the waiting requests will need KV for about {self.needed} tokens, and this one for {need}; the pool "
            f"holds {pool}, and the limit is {self._pools:g} times that (max_queue_pools)",
            retry_after=self.retry_after(now),
        )

    def _check_time(self, request: Request, now: float) -> None:
        """Raise Overloaded if a request would not begin before its deadline at the queue's present speed.

        Tenants take turns: as many requests of each other tenant are ahead of it as of its own.
        """
        if not self._blocked or not self.requests:
            return
        turns = (self._places[request.share] + 1) * len(self._places)
        ahead = min(1.0, turns / self.requests) * self._pace.ahead(self.requests, self.tokens)
        if request.timeout is not None and ahead > request.timeout:
            raise Overloaded(
                f"the requests ahead take about {ahead:.0f} s, and the timeout of this one is {request.timeout:.3g} s",
                retry_after=self.retry_after(now),
            )

    def _has_place(self, request: Request, free: int) -> bool:
        """Return whether there is a place, or one in the tenant's half."""
        if self.requests - free < self._limit:
            return True
        half = max(1, self._limit // 2)
        counted = sum(min(count, half) for count in self._places.values())
        return self._places[request.share] < half and counted - free < self._limit

    def _has_tokens(self, request: Request, free: int) -> bool:
        """Return whether its prompt fits the token limit or the tenant's half.

        The first request of a tenant may have more than that half.
        """
        size, share = len(request.prompt), request.share
        if self.requests <= free or self.tokens + size <= self._limit_tokens:
            return True
        half = self._limit_tokens // 2
        mine = self._prompts[share]
        if mine and mine + size > half:
            return False
        others = sum(min(count, half) for name, count in self._prompts.items() if name != share)
        return others + min(mine + size, half) <= self._limit_tokens

    def retry_after(self, now: float) -> float:
        """Promise a refused client a place; return the seconds after which it should ask again."""
        ahead = self._pace.ahead(self.requests, self.tokens)
        return self._pace.book(now, self._limit, ahead, self.requests)


def check_together(requests: Sequence[Request], config: Config, rows: int) -> None:
    """Raise InvalidRequest if the choices of one call could not all pass `Queue.check` on an empty server.

    They start together, so a later retry, as Overloaded asks for, would never help. `rows` as there.
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
    """Raise ContextTooLong or InvalidRequest, with the figures, for a request that this engine can never compute."""
    prompt, asked = len(request.prompt), request.sampling.max_tokens
    if prompt + asked > info.context:
        raise ContextTooLong(
            f"the context holds {info.context} tokens; the prompt has {prompt} and the completion asks for {asked}",
            field="prompt" if prompt + 1 > info.context else "max_tokens",
            prompt_tokens=prompt,
            context=info.context,
        )
    check_prompt(request, info.context, info.pool_tokens, info.vocab)
