"""How much a tenant may ask for: requests and tokens a minute, and requests at once.

Buckets of each tenant, each as large as what a minute brings; tokens are taken when they are known, at the end of each
request that a model computes (an answer, a member's turn, a text that becomes a vector), whoever waits for it, so what
is begun before the bucket is empty is answered whole. Headers: OpenAI's `x-ratelimit-*`
(platform.openai.com/docs/guides/rate-limits), and for clients of Anthropic `anthropic-ratelimit-*`
(docs.anthropic.com/en/api/rate-limits). Without keys a tenant is a client, by its address,
whatever agent it names.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import time
from collections.abc import Iterator

from cairn.api.http.auth import is_admin, payer_of
from cairn.api.http.call import HTTPCall
from cairn.config.config import LIMITS, Config, TenantLimits, limits_of
from cairn.system.interfaces import Clock
from cairn.types.errors import RateLimited

MINUTE = 60.0
MOST_TENANTS = 10_000
"""How many tenants are remembered; of more, those that ask for nothing now are forgotten."""
BUSY_SECONDS = 1.0
"""Seconds after which a tenant whose requests are too many at once may ask again, at the least."""
WEIGHT = 0.2
"""How much one request counts in how long a tenant's take."""


class _Bucket:
    """So many a minute, at most a minute's worth at once. It may be in debt."""

    __slots__ = ("_at", "_left", "limit")

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self._left, self._at = float(limit), now

    def left(self, now: float) -> float:
        self._left = min(self.limit, self._left + (now - self._at) * self.limit / MINUTE)
        self._at = now
        return self._left

    def take(self, count: float, now: float) -> None:
        self._left = self.left(now) - count

    def resized(self, limit: int, now: float) -> _Bucket:
        """One of another size, of which as much is used."""
        found = _Bucket(limit, now)
        found.take(self.limit - self.left(now), now)
        return found

    def until(self, count: float, now: float) -> float:
        """Seconds until there are so many."""
        return max(0.0, (count - self.left(now)) * MINUTE / self.limit)


class _Tenant:
    """What one tenant has used."""

    __slots__ = ("began", "buckets", "most", "seconds")

    def __init__(self, limits: TenantLimits, now: float) -> None:
        self.buckets: dict[str, _Bucket] = {}
        """By what is counted in them: requests, tokens, and those of prompts and answers alone."""
        self.bound(limits, now)
        self.began: list[float] = []
        """When each of the requests that are being answered came, the oldest first."""
        self.seconds = 0.0
        """How long its requests take on the whole; 0 before any has ended."""

    def bound(self, limits: TenantLimits, now: float) -> None:
        """These limits hold from now on. What was used of a bucket stays used."""
        self.most = limits.max_concurrent
        most = {
            "requests": limits.requests_per_minute,
            "tokens": limits.tokens_per_minute,
            "input_tokens": limits.input_tokens_per_minute,
            "output_tokens": limits.output_tokens_per_minute,
        }
        self.buckets = {
            what: self.buckets[what].resized(limit, now) if what in self.buckets else _Bucket(limit, now)
            for what, limit in most.items()
            if limit
        }

    def take(self, now: float, tokens: tuple[int, int]) -> None:
        """A request has ended, with so many tokens of its prompt and of its own."""
        for what, count in (("tokens", sum(tokens)), ("input_tokens", tokens[0]), ("output_tokens", tokens[1])):
            if what in self.buckets:
                self.buckets[what].take(count, now)

    def busy_for(self, now: float) -> float:
        """Seconds until one of its requests will have ended, as long as they took so far."""
        return max(BUSY_SECONDS, self.seconds - (now - self.began[0])) if self.began else BUSY_SECONDS

    def ended(self, began: float, now: float) -> None:
        """A request that came then has ended."""
        self.began.remove(began)
        self.seconds += (now - began - self.seconds) * (WEIGHT if self.seconds else 1.0)


class RateLimits:
    """The limits of one server."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._names: dict[str, str] = {}
        """The tenant's name of each payer: without keys a payer is a client's address."""
        self.configure(config)

    def configure(self, config: Config) -> None:
        """The limits of these options hold from now on."""
        self._of = limits_of(config)
        every = (self._of(""), *(self._of(one.name) for one in config.tenants))
        self._none = not any(_limited(one) for one in every)
        for share, tenant in self._tenants.items():
            tenant.bound(self._of(self._names[share]), self._clock.now())

    @contextlib.contextmanager
    def counted(self, call: HTTPCall) -> Iterator[None]:
        """While a call is answered. RateLimited, with Retry-After, where its tenant has asked for too much."""
        if self._none or not _counts(call):
            yield
            return
        now = self._clock.now()
        tenant = self._tenant(call, now)
        call.headers += _headers(tenant, now, anthropic=call.path.startswith("/v1/messages"))
        _check(tenant, now)
        if "requests" in tenant.buckets:
            tenant.buckets["requests"].take(1, now)
        tenant.began.append(now)
        try:
            yield
        finally:
            tenant.ended(now, self._clock.now())

    def used(self, share: str, prompt_tokens: int, completion_tokens: int) -> None:
        """A request that takes this share of the server has ended, with so many tokens."""
        if (tenant := self._tenants.get(payer_of(share))) is not None:
            tenant.take(self._clock.now(), (prompt_tokens, completion_tokens))

    def _tenant(self, call: HTTPCall, now: float) -> _Tenant:
        found = self._tenants.get(call.payer)
        if found is None:
            if len(self._tenants) >= MOST_TENANTS:
                self._tenants = {name: one for name, one in self._tenants.items() if one.began}
                self._names = {name: self._names[name] for name in self._tenants}
            found = self._tenants[call.payer] = _Tenant(self._of(call.tenant), now)
            self._names[call.payer] = call.tenant
        return found


def _counts(call: HTTPCall) -> bool:
    """Whether a call is one that is limited: those that ask for something to be done, but for the owner's own, and for
    what ends a request."""
    if call.scope["method"] != "POST" or call.path.endswith("/cancel"):
        return False
    return not is_admin(call.path)


def _check(tenant: _Tenant, now: float) -> None:
    if tenant.most is not None and len(tenant.began) >= tenant.most:
        raise RateLimited(
            f"{len(tenant.began)} requests of yours are being answered, the limit (max_concurrent {tenant.most})",
            retry_after=tenant.busy_for(now),
        )
    for what, bucket in tenant.buckets.items():
        if bucket.left(now) < 1.0:
            raise RateLimited(
                f"you have used the {bucket.limit} {what.replace('_', ' ')} of a minute ({what}_per_minute)",
                retry_after=bucket.until(1.0, now),
            )


def _headers(tenant: _Tenant, now: float, *, anthropic: bool) -> list[tuple[bytes, bytes]]:
    """What is left before this request, and in how long there is a whole minute's worth again."""
    found = []
    for name, bucket in tenant.buckets.items():
        what = name.replace("_", "-")
        left, reset = max(0, math.floor(bucket.left(now))), bucket.until(bucket.limit, now)
        if anthropic:
            at = datetime.datetime.fromtimestamp(time.time() + reset, datetime.UTC)
            values = {"limit": str(bucket.limit), "remaining": str(left), "reset": f"{at:%Y-%m-%dT%H:%M:%SZ}"}
            found += [(f"anthropic-ratelimit-{what}-{kind}".encode(), text.encode()) for kind, text in values.items()]
        else:
            values = {"limit": str(bucket.limit), "remaining": str(left), "reset": _duration(reset)}
            found += [(f"x-ratelimit-{kind}-{what}".encode(), text.encode()) for kind, text in values.items()]
    return found


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 20ms, 1.5s, 1m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _limited(limits: TenantLimits) -> bool:
    return any(getattr(limits, name) for name in LIMITS if name.endswith("_per_minute") or name == "max_concurrent")
