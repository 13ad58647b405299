"""How long a connection may take for each thing it does."""

from __future__ import annotations

import enum

from cairn.api.http.call import too_slow
from cairn.config.config import Config
from cairn.types.errors import CairnError

LINGER_SECONDS = 2.0
"""How long a refused client is still listened to, so that it can read the refusal before the reset."""


class Phase(enum.Enum):
    """Where a connection is in its exchange."""

    NEW = "new"
    HEAD = "head"
    BODY = "body"
    ANSWER = "answer"
    IDLE = "idle"
    LINGER = "linger"
    CLOSED = "closed"


class Verdict(enum.Enum):
    """What to do without a word."""

    CLOSE = "close"
    ABORT = "abort"


class Times:
    """What one connection's clock says. Times are the event loop's, in seconds."""

    def __init__(self, config: Config, now: float) -> None:
        self._config = config
        self.since = now
        """When the phase began."""
        self.heard = now
        """When bytes came last."""
        self._sent = 0
        self._stuck: float | None = None
        """Since when the client has read nothing of what is written."""

    def look(self, now: float, sent: int, unsent: int) -> None:
        """So many bytes have gone out, so many wait."""
        if unsent == 0:
            self._stuck = None
        elif self._stuck is None or sent != self._sent:
            self._stuck = now
        self._sent = sent

    def verdict(self, now: float, phase: Phase, body_bytes: int, *, reading: bool) -> Verdict | CairnError | None:
        """What the client has earned by now: a refusal, an end, or nothing. `reading`: whether a body may come in."""
        config = self._config
        if self._stuck is not None and now - self._stuck > config.stream_stall:
            return Verdict.ABORT
        elapsed = now - self.since
        match phase:
            case Phase.NEW if elapsed > config.header_timeout:
                return Verdict.CLOSE
            case Phase.HEAD if elapsed > config.header_timeout:
                return too_slow("headers", config.header_timeout)
            case Phase.BODY if reading:
                if now - self.heard > config.body_timeout:
                    return too_slow("next piece of the body", config.body_timeout)
                if elapsed > config.body_timeout and body_bytes < config.min_body_rate * elapsed:
                    return too_slow(f"body, at {config.min_body_rate} bytes a second or more,", elapsed)
            case Phase.IDLE if elapsed > config.idle_timeout:
                return Verdict.CLOSE
            case Phase.LINGER if elapsed > LINGER_SECONDS and self._stuck is None:
                return Verdict.ABORT
        return None
