"""Who is let in: the limits that need the loaded engine, the bounds of the queue, and when to come back."""

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
_BOOKED = 10.0
_GUESS = 0.1
"""Seconds and requests that are assumed to have been measured already: a place a second."""
_TOKEN_GUESS = 1.0
"""Seconds of the queue's own pace that count as much as what the worker says of its speed."""
_ANSWER_GUESS = 256.0
"""Tokens that an answer is taken to have before any has ended."""
_ANSWER_WEIGHT = 0.05
"""How much one answer counts in what they have on the whole."""
LONGEST_RETRY = 600.0
"""Seconds that nobody is told to stay away for longer than."""


class QueuePace:
    """How fast the queue moves, measured while somebody waits; what is older than `_MEMORY` seconds fades."""

    def __init__(self) -> None:
        self._left = self._tokens = self._seconds = self._last = self._due = 0.0
        self._queued = False
        self.token_seconds = 0.0
        """How long the worker takes for a token of a prompt; 0 before it has told."""

    def note(self, now: float, left: int, queued: bool, tokens: int = 0) -> None:
        """`left` requests with so many tokens left the queue since the last call; `queued`: whether others still
        wait."""
        if self._queued:
            passed = now - self._last
            fade = math.exp(-passed / _MEMORY)
            self._left, self._seconds = self._left * fade + left, self._seconds * fade + passed
            self._tokens = self._tokens * fade + tokens
        self._last, self._queued = now, queued

    def ahead(self, requests: int, tokens: int) -> float:
        """Seconds until so many requests that wait, with so many tokens, have begun; 0 where nothing tells.

        What left the queue lately says how long these take, by their number and by their tokens, cached or not; where
        little did, what the worker says of its speed.
        """
        by_number = requests * (self._seconds + _GUESS) / (self._left + _GUESS) if self._left else 0.0
        weight = _TOKEN_GUESS if self.token_seconds else 0.0
        known = self._tokens + (weight / self.token_seconds if weight else 0.0)
        return max(by_number, tokens * (self._seconds + weight) / known if known else 0.0)

    def book(self, now: float, most: int, ahead: float = 0.0, waiting: int = 1) -> float:
        """Seconds until the `waiting` requests, for which so many seconds are `ahead`, have begun, and a place in the
        queue is free that nobody was told of yet; at most `LONGEST_RETRY`.

        Those who were told may not come back, so at most `most` places or `_BOOKED` seconds are kept for them.
        """
        each = max((self._seconds + _GUESS) / (self._left + _GUESS), ahead / max(1, waiting))
        self._due = min(max(self._due, now) + each, now + max(most * each, _BOOKED))
        return min(LONGEST_RETRY, max(1.0, ahead + self._due - now))


class Queue:
    """The requests that no worker has begun to compute, by whose share of the server they take.

    One tenant may have all places while no other wants any. Half of it is for one of several: what one has beyond that
    takes nothing from the others, who find their half of the places free.
    """

    def __init__(self, config: Config) -> None:
        self._limit = config.max_queue
        self._limit_tokens = config.max_queue_tokens
        self._max_running = config.max_running
        self._pace = QueuePace()
        self._blocked = False
        self._places: Counter[str] = Counter()
        self._prompts: Counter[str] = Counter()
        """Requests and tokens of each tenant."""
        self._begun = [0, 0]
        """Requests and tokens that left to be computed since the worker's last step."""
        self._needs: dict[int, int] = {}
        """Tokens of KV that each request will come to need, as far as can be told."""
        self._pools = config.max_queue_pools
        self._answer = _ANSWER_GUESS
        self.requests = 0
        self.tokens = 0
        """Tokens of their prompts."""
        self.needed = 0
        """Tokens of KV that they will come to need."""

    def enter(self, request: Request) -> None:
        """A request was let in."""
        self._needs[request.id] = need = self._need(request)
        self.needed += need
        self._count(request, 1)

    def leave(self, request: Request) -> None:
        """It has ended."""
        self.needed -= self._needs.pop(request.id, 0)
        self._count(request, -1)

    def answered(self, tokens: int) -> None:
        """An answer has ended that had so many tokens."""
        self._answer += _ANSWER_WEIGHT * (tokens - self._answer)

    def _need(self, request: Request) -> int:
        """Its prompt, and as long an answer as it asks for or as answers are on the whole, whichever is less. What it
        shares with others counts all the same."""
        answer = min(request.sampling.max_tokens, round(self._answer))
        return len(request.prompt) + max(answer, len(request.generated))

    def begin(self, request: Request) -> None:
        """It is computed now."""
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
        """The worker made a step."""
        self._blocked = stats.waiting > 0
        self._pace.token_seconds = stats.token_seconds
        left, tokens = self._begun
        self._begun = [0, 0]
        self._pace.note(now, left, self._blocked, tokens)

    def check(self, request: Request, running: int, rows: int, now: float, pool: int = 0) -> None:
        """Raise Overloaded if there is no place, or none before it would have to end. `running` requests are computed,
        `rows` could be; `pool`: tokens of KV that there is room for, 0 for a model that keeps none."""
        self._check_pool(request, pool, now)
        self._check_time(request, now)
        free = 0
        if not self._blocked:  # the worker takes everybody: its free places are for those on the way to it
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
        """Whether the KV of all that waits would fill the pool too many times over: it is refused now, not once it has
        waited for that."""
        need = self._need(request)
        if not pool or not self.requests or self.needed + need <= self._pools * pool:
            return
        raise Overloaded(
            f"what waits will need KV of about {self.needed} tokens, and this request of {need}; the pool holds "
            f"{pool}, and the limit is {self._pools:g} times that (max_queue_pools)",
            retry_after=self.retry_after(now),
        )

    def _check_time(self, request: Request, now: float) -> None:
        """Whether it would begin in time, as fast as the queue moves. Tenants take turns: as many of each are ahead of
        it as of its own."""
        if not self._blocked or not self.requests:
            return
        turns = (self._places[request.share] + 1) * len(self._places)
        ahead = min(1.0, turns / self.requests) * self._pace.ahead(self.requests, self.tokens)
        if request.timeout is not None and ahead > request.timeout:
            raise Overloaded(
                f"what waits takes about {ahead:.0f} s, and this request may take {request.timeout:.3g} s in all",
                retry_after=self.retry_after(now),
            )

    def _has_place(self, request: Request, free: int) -> bool:
        """Whether there is a place, or one of the tenant's half."""
        if self.requests - free < self._limit:
            return True
        half = max(1, self._limit // 2)
        counted = sum(min(count, half) for count in self._places.values())
        return self._places[request.share] < half and counted - free < self._limit

    def _has_tokens(self, request: Request, free: int) -> bool:
        """The same of tokens. The first request of a tenant may have more than its half of them."""
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
        """Seconds until what waits now has begun, and a place is free that nobody was promised yet."""
        ahead = self._pace.ahead(self.requests, self.tokens)
        return self._pace.book(now, self._limit, ahead, self.requests)


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
    check_prompt(request, info.context, info.pool_tokens, info.vocab)
