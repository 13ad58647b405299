"""Figures of a model for each of the last 60 minutes: tokens, and time to first token."""

from __future__ import annotations

from collections import deque

import msgspec

from cairn.system.interfaces import Clock
from cairn.system.metrics import Metrics

MINUTES = 60
_SECONDS = 60.0


class Minute(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one minute."""

    at: float
    """Its end, in seconds since 1970."""
    generated: int
    prompt: int
    """Prompt tokens; `cached` of them were not computed again."""
    cached: int
    answers: int
    """Answers that began; `first_token` is the sum of the seconds that this took."""
    first_token: float


class LastHour:
    """Differences of the counters, one minute each. Call `note` from time to time."""

    def __init__(self) -> None:
        self.minutes: deque[Minute] = deque(maxlen=MINUTES)
        self._due: float | None = None
        self._before: tuple[float, ...] = ()

    def note(self, clock: Clock, metrics: Metrics) -> None:
        """Record the counters if a minute is over."""
        now = clock.now()
        if self._due is not None and now < self._due:
            return
        first = metrics.first_token
        counts = (metrics.generation_tokens, metrics.prompt_tokens, metrics.prompt_tokens_cached, first.count)
        here = (*counts, first.sum)
        if self._due is not None:
            generated, prompt, cached, answers, seconds = (a - b for a, b in zip(here, self._before, strict=True))
            self.minutes.append(
                Minute(
                    at=clock.time_ns() / 1e9,
                    generated=int(generated),
                    prompt=int(prompt),
                    cached=int(cached),
                    answers=int(answers),
                    first_token=seconds,
                )
            )
        self._due, self._before = now + _SECONDS, here
