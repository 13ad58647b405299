"""How long a call may take, as its headers say: in seconds, or until a moment.

X-Request-Timeout: 30            seconds from when the headers came; also 500ms, 30s, 2m
X-Cairn-Deadline: 1767225600     Unix time in seconds, for who passes a deadline on; also 2026-01-01T00:00:00Z

The earlier one counts, and `timeout` of a body and the server's request_timeout beside it. It covers all that is done
for the call: waiting for a model that is loaded, for the queue, and computing. What would not begin before it is
refused at once.
"""

from __future__ import annotations

import datetime
import re

from cairn.api.http.call import HTTPCall
from cairn.system.interfaces import Clock
from cairn.types.errors import DeadlineExceeded, InvalidRequest

TIMEOUT = b"x-request-timeout"
UNTIL = b"x-cairn-deadline"
_SECONDS = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m)?")
_UNIX = re.compile(r"[0-9]{1,11}(?:\.[0-9]{1,9})?")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0}


def deadline_of(call: HTTPCall, clock: Clock) -> float | None:
    """The monotonic clock's time until which a call wants its answer; None where it does not say.

    InvalidRequest for a header that says no time, DeadlineExceeded for one that is past.
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
    """Unix time."""
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
