"""Rate limits of a tenant: requests and tokens a minute, and requests at once; also the deadline of a call.

Each tenant has buckets as large as one minute's worth. Tokens are taken when they are known, at the end of each request
that a model computes (an answer, a member's turn, a text that becomes a vector). So what begins before the bucket is
empty is answered whole. Headers: OpenAI's `x-ratelimit-*` (platform.openai.com/docs/guides/rate-limits), and for
clients of Anthropic `anthropic-ratelimit-*` (docs.anthropic.com/en/api/rate-limits). Without keys a tenant is a client,
by its address, whatever agent it names.

Servers that share a store count what tenants use on the others, as their last beats say (`cluster/beats.py`), so a
tenant may pass a limit by what it begins on other servers within about a second.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import re
import time
from collections.abc import Iterator, Mapping

from cairn.api.http.auth import payer_of
from cairn.api.http.call import HTTPCall
from cairn.cluster.beats import TenantUsage
from cairn.config.config import Config, limits_of
from cairn.config.values import LIMITS, TenantLimits
from cairn.system.interfaces import Clock
from cairn.types.errors import DeadlineExceeded, InvalidRequest, RateLimited

TIMEOUT = b"x-request-timeout"
UNTIL = b"x-cairn-deadline"
_SECONDS = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m)?")
_UNIX = re.compile(r"[0-9]{1,11}(?:\.[0-9]{1,9})?")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0}


def deadline_of(call: HTTPCall, clock: Clock) -> float | None:
    """Return the call's deadline on the monotonic clock; None if it sets none.

    Raises InvalidRequest for a header that is no time, DeadlineExceeded for a time that is past.
    """
    given, until = call.header(TIMEOUT), call.header(UNTIL)
    if given is None and until is None:
        return None
    found = []
    if given is not None:
        match = _SECONDS.fullmatch(given.strip().decode("latin-1"))
        seconds = float(match[1]) * _UNITS[match[2] or "s"] if match is not None else 0.0
        if seconds <= 0:
            raise InvalidRequest(
                "X-Request-Timeout must be a number of seconds above 0, or one with ms, s or m, such as 30 or 500ms",
                field="X-Request-Timeout",
            )
        found.append(seconds)
    if until is not None:
        found.append(_moment(until.strip().decode("latin-1")) - clock.time_ns() / 1e9)
        if found[-1] <= 0:
            raise DeadlineExceeded("the time that X-Cairn-Deadline names is past", field="X-Cairn-Deadline")
    return clock.now() + min(found)


def _moment(text: str) -> float:
    """Parse a Unix time, or a date and time with its zone, into Unix seconds."""
    if _UNIX.fullmatch(text):
        return float(text)
    try:
        at = datetime.datetime.fromisoformat(text)
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        raise InvalidRequest(
            "X-Cairn-Deadline must be Unix time in seconds, or a time with its zone such as 2026-01-01T00:00:00Z",
            field="X-Cairn-Deadline",
        )
    return at.timestamp()


MINUTE = 60.0
MOST_TENANTS = 10_000
"""How many tenants are remembered; of more, those that ask for nothing now are forgotten."""
BUSY_SECONDS = 1.0
"""Least Retry-After in seconds of a tenant with too many requests at once."""
REPORT_SECONDS = 600.0
"""How long after its last request a tenant's usage is reported to the other servers."""
WEIGHT = 0.2
"""Weight of one request in a tenant's mean duration."""


class _Bucket:
    """A rate limit: `limit` a minute, at most one minute's worth at once. It may be in debt."""

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
        """Return a bucket of another size with the same amount used."""
        found = _Bucket(limit, now)
        found.take(self.limit - self.left(now), now)
        return found

    def until(self, count: float, now: float) -> float:
        """Return the seconds until `count` are available."""
        return max(0.0, (count - self.left(now)) * MINUTE / self.limit)


class _Tenant:
    """The usage of one tenant."""

    __slots__ = ("began", "buckets", "elsewhere", "most", "seconds", "spent", "used_at")

    def __init__(self, limits: TenantLimits, now: float) -> None:
        self.buckets: dict[str, _Bucket] = {}
        """By kind: requests, all tokens, tokens of prompts, tokens of answers."""
        self.bound(limits, now)
        self.began: list[float] = []
        """When each of the requests that are being answered came, the oldest first."""
        self.seconds = 0.0
        """How long its requests take on the whole; 0 before any has ended."""
        self.spent = (0, 0, 0)
        """Requests, tokens of prompts and tokens of answers since the server started."""
        self.used_at = now
        self.elsewhere: dict[str, int] = {}
        """Requests that are being answered on other servers, by the server."""

    @property
    def running(self) -> int:
        """How many of its requests are being answered."""
        return len(self.began) + sum(self.elsewhere.values())

    def bound(self, limits: TenantLimits, now: float) -> None:
        """Apply new limits; what was used of a bucket stays used."""
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

    def began_here(self, now: float) -> None:
        """Count a request that begins."""
        self.take(now, 1)
        self.began.append(now)
        self._spend(now, 1, 0, 0)

    def ended_here(self, now: float, tokens: tuple[int, int]) -> None:
        """Count the tokens of a request that has ended: of its prompt, and of its answer."""
        self.take(now, 0, tokens)
        self._spend(now, 0, *tokens)

    def _spend(self, now: float, requests: int, prompt: int, completion: int) -> None:
        before = self.spent
        self.spent = before[0] + requests, before[1] + prompt, before[2] + completion
        self.used_at = now

    def take(self, now: float, requests: int, tokens: tuple[int, int] = (0, 0)) -> None:
        """Take requests, and tokens of prompts and of answers, from the buckets."""
        prompt, completion = tokens
        used = {
            "requests": requests,
            "tokens": prompt + completion,
            "input_tokens": prompt,
            "output_tokens": completion,
        }
        for what, count in used.items():
            if count and what in self.buckets:
                self.buckets[what].take(count, now)

    def busy_for(self, now: float) -> float:
        """Estimate the seconds until one of the tenant's requests ends, from how long earlier ones took."""
        return max(BUSY_SECONDS, self.seconds - (now - self.began[0])) if self.began else BUSY_SECONDS

    def ended(self, began: float, now: float) -> None:
        """Note the end of a request that began at `began`."""
        self.began.remove(began)
        self.seconds += (now - began - self.seconds) * (WEIGHT if self.seconds else 1.0)


class RateLimits:
    """The limits of one server."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._names: dict[str, str] = {}
        """The tenant's name of each payer: without keys a payer is a client's address."""
        self._others: dict[str, dict[str, TenantUsage]] = {}
        """What other servers have told, by server and payer."""
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Apply the limits of these options."""
        self._of = limits_of(config)
        every = (self._of(""), *(self._of(one.name) for one in config.tenants))
        self._none = not any(_limited(one) for one in every)
        for share, tenant in self._tenants.items():
            tenant.bound(self._of(self._names[share]), self._clock.now())

    @contextlib.contextmanager
    def counted(self, call: HTTPCall, *, admin: bool) -> Iterator[None]:
        """Count a call while it is answered. Raises RateLimited, with Retry-After, if its tenant asks for too much.

        Calls of `admin` routes, of other methods than POST, and those that end a request are free.
        """
        if self._none or admin or call.scope["method"] != "POST" or call.path.endswith("/cancel"):
            yield
            return
        now = self._clock.now()
        tenant = self._tenant(call.payer, call.tenant, now)
        call.headers += _headers(tenant, now, anthropic=call.path.startswith("/v1/messages"))
        _check(tenant, now)
        tenant.began_here(now)
        try:
            yield
        finally:
            tenant.ended(now, self._clock.now())

    def used(self, share: str, prompt_tokens: int, completion_tokens: int) -> None:
        """Count the tokens of a request that has ended, by the share it was scheduled under."""
        if (tenant := self._tenants.get(payer_of(share))) is not None:
            tenant.ended_here(self._clock.now(), (prompt_tokens, completion_tokens))

    def own_usage(self) -> dict[str, TenantUsage]:
        """Return what is used here, by payer; of those alone who asked for something a short time ago."""
        if self._none:
            return {}
        since = self._clock.now() - REPORT_SECONDS
        return {
            payer: TenantUsage(self._names[payer], *one.spent, len(one.began))
            for payer, one in self._tenants.items()
            if one.began or one.used_at >= since
        }

    def count_others(self, holder: str, usage: Mapping[str, TenantUsage]) -> None:
        """Count what is used at another server, by payer.

        What a server had counted before it is first heard of is past, and is not taken from anybody's bucket.
        """
        if self._none:
            return
        now, known = self._clock.now(), self._others.get(holder)
        for payer in (known or {}).keys() - usage.keys():
            if payer in self._tenants:
                self._tenants[payer].elsewhere.pop(holder, None)
        for payer, one in usage.items():
            tenant = self._tenant(payer, one.tenant, now)
            tenant.elsewhere[holder] = one.running
            if known is not None:
                tenant.take(now, *_used_since(known.get(payer), one))
        # Payers missing here may return with counts that continue from these.
        self._others[holder] = dict(list(((known or {}) | dict(usage)).items())[-MOST_TENANTS:])

    def forget_other(self, holder: str) -> None:
        """Count no request as running at a server that is silent."""
        self._others.pop(holder, None)
        for tenant in self._tenants.values():
            tenant.elsewhere.pop(holder, None)

    def _tenant(self, payer: str, name: str, now: float) -> _Tenant:
        found = self._tenants.get(payer)
        if found is None:
            if len(self._tenants) >= MOST_TENANTS:
                self._tenants = {name: one for name, one in self._tenants.items() if one.running}
                self._names = {name: self._names[name] for name in self._tenants}
            found = self._tenants[payer] = _Tenant(self._of(name), now)
            self._names[payer] = name
        return found


def _used_since(before: TenantUsage | None, now: TenantUsage) -> tuple[int, tuple[int, int]]:
    """Return the requests and the tokens, of prompts and of answers, between two beats of a server."""
    if before is None or now.requests < before.requests:  # it had forgotten the tenant, and counts anew
        return now.requests, (now.prompt_tokens, now.completion_tokens)
    tokens = max(0, now.prompt_tokens - before.prompt_tokens), max(0, now.completion_tokens - before.completion_tokens)
    return now.requests - before.requests, tokens


def _check(tenant: _Tenant, now: float) -> None:
    if tenant.most is not None and tenant.running >= tenant.most:
        raise RateLimited(
            f"{tenant.running} requests of yours are being answered, the limit (max_concurrent {tenant.most})",
            retry_after=tenant.busy_for(now),
        )
    for what, bucket in tenant.buckets.items():
        if bucket.left(now) < 1.0:
            raise RateLimited(
                f"you have used the {bucket.limit} {what.replace('_', ' ')} of a minute ({what}_per_minute)",
                retry_after=bucket.until(1.0, now),
            )


def _headers(tenant: _Tenant, now: float, *, anthropic: bool) -> list[tuple[bytes, bytes]]:
    """Return the headers that report what is left before this request, and when a full minute's worth is available."""
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
    """Format seconds as OpenAI does: 20ms, 1.5s, 1m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _limited(limits: TenantLimits) -> bool:
    return any(getattr(limits, name) for name in LIMITS if name.endswith("_per_minute") or name == "max_concurrent")
