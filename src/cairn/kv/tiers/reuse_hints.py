"""What is known of who will want a stored chunk again, beside when it was used: it shapes which of them is evicted.

    superseded   of a branch that was rolled back or left: nobody is to come back, so it goes before all others
    once         of a context that nobody is known to go on with, until it is used: it goes before what is as old
    waiting      of a context that ended in a call and goes on with its result: it outlives what is merely as old
    idle         everything else

A hint, no more: it is kept in memory, for so many chunks, and never changes what is found or what an answer is.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Literal

Standing = Literal["superseded", "once", "idle", "waiting"]

MOST_STANDINGS = 1 << 16
"""Chunks of which one is remembered: of 4 million tokens."""


def later(standing: Standing, patience: float) -> float:
    """By how much the last use of a chunk counts as later for how it stands, in whatever a store measures that."""
    if standing == "superseded":
        return -math.inf
    return {"waiting": patience, "once": -patience}.get(standing, 0)


class Standings:
    """How chunks stand, whether they are stored yet or not. Those that were told longest ago are forgotten first."""

    def __init__(self, most: int = MOST_STANDINGS) -> None:
        self._of: OrderedDict[bytes, Standing] = OrderedDict()
        self._most = most

    def of(self, id: bytes) -> Standing:
        """How this one stands; idle where nothing is known."""
        return self._of.get(id, "idle")

    def set(self, ids: Iterable[bytes], standing: Standing) -> list[bytes]:
        """These stand so from now on; those for which that is new."""
        changed = []
        for id in ids:
            if self._of.pop(id, "idle") != standing:
                changed.append(id)
            if standing != "idle":
                self._of[id] = standing
        while len(self._of) > self._most:
            changed.append(self._of.popitem(last=False)[0])
        return changed
