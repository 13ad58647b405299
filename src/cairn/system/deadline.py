"""The deadline of the current call, for everything that is done to answer it."""

from __future__ import annotations

from contextvars import ContextVar

DEADLINE: ContextVar[float | None] = ContextVar("cairn_deadline", default=None)
"""Monotonic time by which the current call wants its answer; None if it sets no limit. Its tasks inherit it."""


def left(now: float, most: float) -> float:
    """Return the seconds until the call's deadline, at least 0 and at most `most`; `most` without a deadline."""
    deadline = DEADLINE.get()
    return most if deadline is None else max(0.0, min(most, deadline - now))
