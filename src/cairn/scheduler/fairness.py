"""Whose turn it is among tenants: each in turn has one of those of its own that wait, whoever has how many.

A tenant is known here while something of it waits. It joins behind the others, and steps behind them again when one of
its own was served: so between two of one tenant every other has one, and nobody is passed by tenants that come later.
Where weights are given, a tenant steps behind only once it was served as often as its weight says.

Tenants may be of classes (`Classes`), which come one after the other: turns are then taken within a class.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice, zip_longest
from typing import Any, Generic, TypeVar

T = TypeVar("T")

AGE_SECONDS = 5.0
"""Waiting that weighs as much as one level of priority."""


class RoundRobin(Generic[T]):
    """What waits, in a line for each tenant."""

    __slots__ = ("_had", "_lines", "_turns")

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: of tenants, 1 where nothing is said; only what they are to each other counts."""
        least = min((1.0, *weights.values())) if weights else 1.0
        self._turns = {tenant: max(1, round(weight / least)) for tenant, weight in {"": 1.0, **(weights or {})}.items()}
        """How many turns a round has for a tenant; for those that are not named as many as for ""."""
        self._had: dict[str, int] = {}
        """How many of them a tenant, which waits, has had in this round."""
        self._lines: dict[str, list[T]] = {}
        """The next tenant's first. None is empty."""

    def __iter__(self) -> Iterator[T]:
        """One of each tenant, then a second of each, and so on. What waits may change meanwhile; this does not."""
        return self._in_turns(self._lines)

    def by_level(self, levels: Mapping[str, int]) -> Iterator[T]:
        """Those of the tenants of the lowest level first, each level in turns of its own."""
        groups = dict[int, dict[str, list[T]]]()
        for tenant, line in self._lines.items():
            groups.setdefault(levels[tenant], {})[tenant] = line
        return chain.from_iterable([self._in_turns(groups[level]) for level in sorted(groups)])

    def firsts(self) -> list[tuple[str, T]]:
        """The first of each tenant that waits."""
        return [(tenant, line[0]) for tenant, line in self._lines.items()]

    def _in_turns(self, waiting: Mapping[str, list[T]]) -> Iterator[T]:
        if len(self._turns) > 1:
            return self._weighted(waiting)
        lines = [tuple(line) for line in waiting.values()]
        if len(lines) == 1:
            return iter(lines[0])
        return (item for around in zip_longest(*lines) for item in around if item is not None)

    def _of_round(self, tenant: str) -> int:
        return self._turns.get(tenant, self._turns[""])

    def _weighted(self, waiting: Mapping[str, list[T]]) -> Iterator[T]:
        """What the first of all has left of its round, then what the others have, and so on."""
        lines = [
            (iter(tuple(line)), self._of_round(tenant), self._had.get(tenant, 0)) for tenant, line in waiting.items()
        ]
        found: list[T] = []
        while lines:
            left = []
            for line, turns, had in lines:
                some = list(islice(line, turns - had))
                found += some
                if len(some) == turns - had:
                    left.append((line, turns, 0))
            lines = left
        return iter(found)

    def tagged(self) -> Iterator[tuple[str, T]]:
        """The same, each with its tenant."""
        lines = [[(tenant, item) for item in line] for tenant, line in self._lines.items()]
        return (pair for around in zip_longest(*lines) for pair in around if pair is not None)

    def line(self, tenant: str) -> list[T]:
        """What waits of one tenant; not to be changed."""
        return self._lines.get(tenant, [])

    def add(self, tenant: str, item: T, key: Callable[[T], Any] | None = None) -> None:
        """Queue an item of a tenant: last of its own, or by its place among them."""
        line = self._lines.setdefault(tenant, [])
        if key is None:
            line.append(item)
        else:
            insort(line, item, key=key)

    def remove(self, tenant: str, item: T) -> None:
        """It waits no more."""
        line = self._lines[tenant]
        line.remove(item)
        if not line:
            del self._lines[tenant]
            self._had.pop(tenant, None)

    def served(self, tenant: str) -> None:
        """The tenant has had its turn."""
        had = self._had.get(tenant, 0) + 1
        if tenant in self._lines and had < self._of_round(tenant):
            self._had[tenant] = had
            return
        self._had.pop(tenant, None)
        if line := self._lines.pop(tenant, None):
            self._lines[tenant] = line


class Classes:
    """Which tenants come before others: those of a lower priority number, as of requests. A class of which something
    waits counts as one level lower for each `AGE_SECONDS` that none of it was served, down to the lowest there is: so
    it gets on, however much the others ask for."""

    __slots__ = ("_first", "_of", "_served")

    def __init__(self, priorities: Mapping[str, int]) -> None:
        """`priorities`: of tenants, 0 where nothing is said."""
        self._of = dict(priorities)
        self._first = min((0, *priorities.values()))
        self._served: dict[int, float] = {}
        """When one of each class was served last."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._of)

    def levels(self, firsts: Iterable[tuple[str, float]], now: float) -> dict[str, int]:
        """Where each tenant stands now, of those that wait: `firsts` has when the first of each came."""
        tenants = [(tenant, self._of.get(tenant, 0), came) for tenant, came in firsts]
        since = dict[int, float]()
        for _, priority, came in tenants:
            since[priority] = min(since.get(priority, came), came)
        levels = dict[int, int]()
        for priority, came in since.items():
            waited = now - max(came, self._served.get(priority, came))
            levels[priority] = max(self._first, priority - int(waited / AGE_SECONDS))
        return {tenant: levels[priority] for tenant, priority, _ in tenants}

    def served(self, tenant: str, now: float) -> None:
        """One of the tenant's was served."""
        self._served[self._of.get(tenant, 0)] = now
