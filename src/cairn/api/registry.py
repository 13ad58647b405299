"""Which requests belong to a call of several choices. A call of one choice has the id of its only request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from cairn.seams import Clock

KEEP_SECONDS = 600.0
KEEP_CALLS = 1000
PREFIXES = ("chatcmpl-", "cmpl-", "req-")


class Registry:
    """Calls by number. Ended calls are kept 10 minutes and at most 1,000 of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._live: dict[int, tuple[int, ...]] = {}
        self._ended: OrderedDict[int, tuple[float, tuple[int, ...]]] = OrderedDict()

    def open(self, number: int, ids: Sequence[int]) -> None:
        """A call began with these requests."""
        if len(ids) > 1:
            self._live[number] = tuple(ids)

    def close(self, number: int) -> None:
        """The call ended."""
        ids = self._live.pop(number, None)
        if ids is None:
            return
        now = self._clock.now()
        self._ended[number] = (now, ids)
        while len(self._ended) > KEEP_CALLS or next(iter(self._ended.values()))[0] < now - KEEP_SECONDS:
            self._ended.popitem(last=False)

    def ids(self, number: int) -> tuple[int, ...]:
        """The requests of a call; for one that is not known, the request of the same number."""
        found = self._live.get(number)
        if found is None and number in self._ended:
            found = self._ended[number][1]
        return found or (number,)


def parse_id(text: str) -> int | None:
    """The number in an id as clients saw it (X-Request-ID, or the `id` of an answer), or None."""
    for prefix in PREFIXES:
        text = text.removeprefix(prefix)
    if len(text) != 16 or not all(char in "0123456789abcdef" for char in text):
        return None
    return int(text, 16)
