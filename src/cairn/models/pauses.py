"""What a server that has too much to do asks for: to wait, and how long. Within bounds, and never without a word."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from cairn.errors import ModelError
from cairn.seams import Clock

MOST_AT_ONCE = 600.0
"""Seconds: the hub counts requests in five minutes."""
MOST = 1800.0
"""Seconds that one download waits in all."""
_UNSAID = (5.0, 10.0, 20.0, 40.0)
"""Pauses where a server only says that it was asked too often."""
_RESET = re.compile(r";\s*r=0\s*;\s*t=(\d{1,9})(?:\s*[;,]|\s*$)")
"""The hub's own header, `RateLimit: "resolvers";r=0;t=55`: none are left, more in 55 seconds."""


class Pauses:
    """The pauses of one download."""

    def __init__(self, clock: Clock, sleep: Callable[[float], None], say: Callable[[str], None]) -> None:
        """`say` gets a sentence before each pause that somebody should know of."""
        self._clock, self._sleep, self._say = clock, sleep, say
        self._left = MOST

    def short(self, seconds: float) -> None:
        """Wait a moment before the same is tried again."""
        self._sleep(seconds)

    def asked(self, status: int, headers: Mapping[str, str], attempt: int, host: str) -> bool:
        """Wait if the answer to attempt number `attempt` (from 0) asks for it; then the same may be asked again.

        Raises ModelError where it would be too long.
        """
        if status not in (429, 503):
            return False
        seconds = self._told(headers)
        if seconds is None and status == 429:
            seconds = _UNSAID[attempt] if attempt < len(_UNSAID) else None
        if seconds is None:
            return False
        why = f"({status} {HTTPStatus(status).phrase})"
        if seconds > min(MOST_AT_ONCE, self._left):
            raise ModelError(f"{host} asks to wait {seconds:,.0f} s {why}; run the same command again after that")
        self._left -= seconds
        self._say(f"{host} asks to wait {seconds:.0f} s {why} ...")
        self._sleep(seconds)
        return True

    def _told(self, headers: Mapping[str, str]) -> float | None:
        """The seconds that an answer's headers name, at least one; None where they name none."""
        said = headers.get("retry-after", "").strip()
        if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", said):
            return max(1.0, float(said))
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            until = parsedate_to_datetime(said)
            try:  # by the server's own clock: this machine's may be wrong
                now = parsedate_to_datetime(headers.get("date", "")).timestamp()
            except (ValueError, TypeError):
                now = self._clock.time_ns() / 1e9
            return max(1.0, until.timestamp() - now)
        reset = _RESET.search(headers.get("ratelimit", ""))
        return max(1.0, float(reset[1])) if reset else None
