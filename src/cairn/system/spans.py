"""Spans of a call's time: recorded where the time is spent, and reported to traces and logs.

A call that is measured has a `Spans` in `PRESENT`, which its tasks inherit. Without traces and logs that want spans
there is none, and nothing is recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Literal

import msgspec

Name = Literal["queue", "load", "prefill", "decode"]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a call's time. `began` and `ended` are seconds of the monotonic clock."""

    name: Name
    began: float
    ended: float
    attributes: dict[str, str | int | float]
    """Figures and names; never texts of prompts or answers."""


class Spans:
    """The parts of one call's time. Parts of choices computed in parallel add up to more than the call took."""

    __slots__ = ("_tell", "seconds")

    def __init__(self, tell: Callable[[Span], None] | None = None) -> None:
        """Collect spans. `tell` is called with each finished one, some of them after the call was answered."""
        self._tell = tell
        self.seconds: Counter[Name] = Counter()
        """Total seconds by kind of span."""

    def add(self, name: Name, began: float, ended: float, **attributes: str | int | float) -> None:
        """Record a finished span."""
        self.seconds[name] += max(0.0, ended - began)  # type: ignore[assignment]
        if self._tell is not None:
            self._tell(Span(name=name, began=began, ended=max(began, ended), attributes=attributes))


PRESENT: ContextVar[Spans | None] = ContextVar("cairn_spans", default=None)
"""The spans of the current call; None if it is not measured."""
