"""Which requests belong to a call: one of several choices, or one that its client gave a name (X-Request-ID).

Any other call has the id of its only request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from cairn.system.interfaces import Clock
from cairn.types.errors import Conflict

KEEP_SECONDS = 600.0
KEEP_CALLS = 1000
PREFIXES = ("chatcmpl-", "cmpl-", "req-", "msg_", "resp_")


class CallTable:
    """Calls by number, and by the names that clients gave them. Ended ones are kept 10 minutes and at most 1,000."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._live: dict[int, _Call] = {}
        self._ended: OrderedDict[int, tuple[float, _Call]] = OrderedDict()
        self._names: dict[tuple[bytes, str], _Name] = {}

    def open(self, number: int, ids: Sequence[int], *, name: str | None = None, salt: bytes = b"") -> None:
        """A call began with these requests. `name`: what the client, whose salt this is, calls it."""
        if len(ids) == 1 and name is None:
            return
        key = None if name is None else (salt, name)
        self._live[number] = _Call(tuple(ids), key)
        if key is not None:
            named = self._names.setdefault(key, _Name())
            named.shared |= bool(named.live)
            named.live.add(number)
            named.last = number
            named.calls += 1

    def close(self, number: int) -> None:
        """The call ended."""
        call = self._live.pop(number, None)
        if call is None:
            return
        if call.key is not None:
            named = self._names[call.key]
            named.live.discard(number)
            named.shared &= bool(named.live)
        now = self._clock.now()
        self._ended[number] = (now, call)
        while len(self._ended) > KEEP_CALLS or next(iter(self._ended.values()))[0] < now - KEEP_SECONDS:
            _, (_, old) = self._ended.popitem(last=False)
            if old.key is not None:
                self._names[old.key].calls -= 1
                if not self._names[old.key].calls:
                    del self._names[old.key]

    def ids(self, number: int) -> tuple[int, ...]:
        """The requests of a call; for one that is not known, the request of the same number."""
        found = self._live.get(number)
        if found is None and number in self._ended:
            found = self._ended[number][1]
        return found.ids if found is not None else (number,)

    def find(self, text: str, salt: bytes) -> int | None:
        """The number of the call that a client means by a name of its own or by an id of ours; None for neither.

        A name is the call's that has it now, else the last one's that had it. Conflict where several had it at once
        and one of them still runs: which one is meant nobody can tell, and the wrong one must not be ended.
        """
        named = self._names.get((salt, text))
        if named is None:
            return parse_id(text)
        if named.shared:
            raise Conflict(
                "several requests in flight have had this X-Request-ID; use the id of the answer, which is also in "
                "its X-Cairn-Request-ID",
                field="id",
            )
        return next(iter(named.live), named.last)


@dataclass(slots=True)
class _Call:
    ids: tuple[int, ...]
    key: tuple[bytes, str] | None


@dataclass(slots=True)
class _Name:
    """A name of a tenant's."""

    live: set[int] = field(default_factory=set)
    last: int = 0
    calls: int = 0
    """That have or had it and are not forgotten."""
    shared: bool = False
    """Whether two calls had it at once, and one of those that came since still runs."""


def parse_id(text: str) -> int | None:
    """The number in an id as clients saw it (X-Request-ID, or the `id` of an answer), or None."""
    for prefix in PREFIXES:
        text = text.removeprefix(prefix)
    if len(text) != 16 or not all(char in "0123456789abcdef" for char in text):
        return None
    return int(text, 16)
