"""Until when the call that is being answered wants its answer: all that is done for it looks here."""

from __future__ import annotations

from contextvars import ContextVar

DEADLINE: ContextVar[float | None] = ContextVar("cairn_deadline", default=None)
"""The monotonic clock's time; None where the call says nothing. Tasks that a call starts have its own."""


def left(now: float, most: float) -> float:
    """Seconds until then, at most so many; 0 where it is past."""
    deadline = DEADLINE.get()
    return most if deadline is None else max(0.0, min(most, deadline - now))
