"""Places in lists that every server orders alike: a page may begin after a place, also where its item is unknown."""

from __future__ import annotations

import contextlib
import math
from typing import NamedTuple, Self


class ListPlace(NamedTuple):
    """Where an item stands in a list: the newest first, and those of one time by their ids."""

    minus_created: float
    """Minus the seconds from 1970 to the making of the item."""
    id: str

    @classmethod
    def of(cls, created: float, id: str) -> Self:
        """Return the place of an item."""
        return cls(-created, id)

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Return the place that is written as `created:id`, or None."""
        created, mark, id = text.rpartition(":")
        with contextlib.suppress(ValueError):
            if mark and math.isfinite(time := float(created)):
                return cls.of(time, id)
        return None

    def __str__(self) -> str:
        """Return the place as `created:id`."""
        return f"{-self.minus_created!r}:{self.id}"
