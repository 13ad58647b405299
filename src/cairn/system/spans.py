"""Spans of a call's time: recorded where it passes, and reported to traces and logs.

A call whose time is wanted has a `Spans`, which everything that is done for it finds in `PRESENT`, also in tasks that
it starts. Where neither traces nor logs want any there is none, and nothing is noted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Literal

import msgspec

Name = Literal["queue", "load", "prefill", "decode"]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a call's time. Times are the clock's, in seconds."""

    name: Name
    began: float
    ended: float
    attributes: dict[str, str | int | float]
    """Figures and names; never what was asked or answered."""


class Spans:
    """The parts of one call's time. Those of choices that are computed at once add up to more than it took."""

    __slots__ = ("_tell", "seconds")

    def __init__(self, tell: Callable[[Span], None] | None = None) -> None:
        """`tell` gets each part once it is over; some may come when the call has been answered."""
        self._tell = tell
        self.seconds: Counter[Name] = Counter()
        """Of each kind, all together."""

    def add(self, name: Name, began: float, ended: float, **attributes: str | int | float) -> None:
        """Record a finished span."""
        self.seconds[name] += max(0.0, ended - began)  # type: ignore[assignment]
        if self._tell is not None:
            self._tell(Span(name=name, began=began, ended=max(began, ended), attributes=attributes))


PRESENT: ContextVar[Spans | None] = ContextVar("cairn_spans", default=None)
"""The one of the call that is being answered."""
