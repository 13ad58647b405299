"""How much a tenant may ask for: requests and tokens a minute, and requests at once.

Two buckets a tenant, each as large as what a minute brings; tokens are taken when they are known, at the end of an
answer, so the last request before an empty bucket is answered whole. Headers: OpenAI's `x-ratelimit-*`
(platform.openai.com/docs/guides/rate-limits), and for clients of Anthropic `anthropic-ratelimit-*`
(docs.anthropic.com/en/api/rate-limits). Without keys a tenant is a client, by its address.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import time
from collections.abc import Iterator

from cairn.api.auth import ADMIN
from cairn.api.reply import Call
from cairn.config import Config, TenantLimits
from cairn.errors import RateLimited
from cairn.seams import Clock

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

    def until(self, count: float, now: float) -> float:
        """Seconds until there are so many."""
        return max(0.0, (count - self.left(now)) * MINUTE / self.limit)


class _Tenant:
    """What one tenant has used."""

    __slots__ = ("began", "most", "requests", "seconds", "tokens")

    def __init__(self, limits: TenantLimits, now: float) -> None:
        self.requests = _Bucket(limits.requests_per_minute, now) if limits.requests_per_minute else None
        self.tokens = _Bucket(limits.tokens_per_minute, now) if limits.tokens_per_minute else None
        self.most = limits.max_concurrent
        self.began: list[float] = []
        """When each of the requests that are being answered came, the oldest first."""
        self.seconds = 0.0
        """How long its requests take on the whole; 0 before any has ended."""

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
        self._default = TenantLimits(config.requests_per_minute, config.tokens_per_minute, config.max_concurrent)
        self._of = {one.name: _with(one.limits, self._default) for one in config.tenants}
        self._none = not any(_limited(one) for one in (self._default, *self._of.values()))
        self._tenants: dict[str, _Tenant] = {}

    @contextlib.contextmanager
    def counted(self, call: Call) -> Iterator[None]:
        """While a call is answered. RateLimited, with Retry-After, where its tenant has asked for too much."""
        if self._none or not _counts(call):
            yield
            return
        now = self._clock.now()
        tenant = self._tenant(call, now)
        call.headers += _headers(tenant, now, anthropic=call.path.startswith("/v1/messages"))
        _check(tenant, now)
        if tenant.requests is not None:
            tenant.requests.take(1, now)
        tenant.began.append(now)
        try:
            yield
        finally:
            tenant.ended(now, self._clock.now())
            if tenant.tokens is not None and call.tokens is not None:
                tenant.tokens.take(sum(call.tokens), self._clock.now())

    def _tenant(self, call: Call, now: float) -> _Tenant:
        found = self._tenants.get(call.share)
        if found is None:
            if len(self._tenants) >= MOST_TENANTS:
                self._tenants = {name: one for name, one in self._tenants.items() if one.began}
            found = self._tenants[call.share] = _Tenant(self._of.get(call.tenant, self._default), now)
        return found


def _counts(call: Call) -> bool:
    """Whether a call is one that is limited: those that ask for something to be done, but for the owner's own, and for
    what ends a request."""
    if call.scope["method"] != "POST" or call.path.endswith("/cancel"):
        return False
    return not any(call.path == route or call.path.startswith(f"{route}/") for route in ADMIN)


def _check(tenant: _Tenant, now: float) -> None:
    if tenant.most is not None and len(tenant.began) >= tenant.most:
        raise RateLimited(
            f"{len(tenant.began)} requests of yours are being answered, the limit (max_concurrent {tenant.most})",
            retry_after=tenant.busy_for(now),
        )
    for bucket, what, least in ((tenant.requests, "requests", 1.0), (tenant.tokens, "tokens", 1.0)):
        if bucket is not None and bucket.left(now) < least:
            raise RateLimited(
                f"you have used the {bucket.limit} {what} of a minute ({what}_per_minute)",
                retry_after=bucket.until(least, now),
            )


def _headers(tenant: _Tenant, now: float, *, anthropic: bool) -> list[tuple[bytes, bytes]]:
    """What is left before this request, and in how long there is a whole minute's worth again."""
    found = []
    for bucket, what in ((tenant.requests, "requests"), (tenant.tokens, "tokens")):
        if bucket is None:
            continue
        left, reset = max(0, math.floor(bucket.left(now))), bucket.until(bucket.limit, now)
        if anthropic:
            at = datetime.datetime.fromtimestamp(time.time() + reset, datetime.UTC)
            values = {"limit": str(bucket.limit), "remaining": str(left), "reset": f"{at:%Y-%m-%dT%H:%M:%SZ}"}
            found += [(f"anthropic-ratelimit-{what}-{name}".encode(), text.encode()) for name, text in values.items()]
        else:
            values = {"limit": str(bucket.limit), "remaining": str(left), "reset": _duration(reset)}
            found += [(f"x-ratelimit-{name}-{what}".encode(), text.encode()) for name, text in values.items()]
    return found


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 20ms, 1.5s, 1m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _with(limits: TenantLimits, default: TenantLimits) -> TenantLimits:
    """A tenant's own limits; where it has none the server's."""
    return TenantLimits(
        default.requests_per_minute if limits.requests_per_minute is None else limits.requests_per_minute,
        default.tokens_per_minute if limits.tokens_per_minute is None else limits.tokens_per_minute,
        default.max_concurrent if limits.max_concurrent is None else limits.max_concurrent,
        limits.weight,
    )


def _limited(limits: TenantLimits) -> bool:
    return any((limits.requests_per_minute, limits.tokens_per_minute, limits.max_concurrent))
