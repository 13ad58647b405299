"""Weighted round robin between tenants, and priority classes of tenants.

A tenant is in the rotation while it has waiting items. It joins at the end and moves to the end each time one of its
items is served. So between two items of one tenant every other tenant gets one, and new tenants never overtake. With
weights, a tenant moves to the end only after as many items as its weight says.

Tenants may belong to classes (`Classes`), which are served one after the other; turns are then taken within a class.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice, zip_longest
from typing import Any, Generic, TypeVar

T = TypeVar("T")

AGE_SECONDS = 5.0
"""Seconds of waiting that raise a request's priority by one level."""


class RoundRobin(Generic[T]):
    """Waiting items in a queue for each tenant, served in turns."""

    __slots__ = ("_had", "_lines", "_turns")

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """Make an empty queue. `weights`: tenant -> weight, 1 if not named; only their ratios count."""
        least = min((1.0, *weights.values())) if weights else 1.0
        self._turns = {tenant: max(1, round(weight / least)) for tenant, weight in {"": 1.0, **(weights or {})}.items()}
        """Turns that a tenant has in a round; "" for tenants that are not named."""
        self._had: dict[str, int] = {}
        """Turns that a waiting tenant has had in this round."""
        self._lines: dict[str, list[T]] = {}
        """Waiting items by tenant, the tenant whose turn is next first. No list is empty."""

    def __iter__(self) -> Iterator[T]:
        """Return an iterator over one item of each tenant, then a second of each, and so on.

        It is a snapshot: the queue may change during the iteration.
        """
        return self._in_turns(self._lines)

    def by_level(self, levels: Mapping[str, int]) -> Iterator[T]:
        """Return an iterator over the tenants' items by level, the lowest first, in turns within a level."""
        groups = dict[int, dict[str, list[T]]]()
        for tenant, line in self._lines.items():
            groups.setdefault(levels[tenant], {})[tenant] = line
        return chain.from_iterable([self._in_turns(groups[level]) for level in sorted(groups)])

    def firsts(self) -> list[tuple[str, T]]:
        """Return each waiting tenant and its first item."""
        return [(tenant, line[0]) for tenant, line in self._lines.items()]

    def _in_turns(self, waiting: Mapping[str, list[T]]) -> Iterator[T]:
        if len(self._turns) > 1:
            return self._weighted(waiting)
        lines = [tuple(line) for line in waiting.values()]
        if len(lines) == 1:
            return iter(lines[0])
        return (item for around in zip_longest(*lines) for item in around if item is not None)

    def _turns_of(self, tenant: str) -> int:
        return self._turns.get(tenant, self._turns[""])

    def _weighted(self, waiting: Mapping[str, list[T]]) -> Iterator[T]:
        """Iterate in rounds: the next tenant's remaining turns of this round, then the others', and so on."""
        lines = [
            (iter(tuple(line)), self._turns_of(tenant), self._had.get(tenant, 0)) for tenant, line in waiting.items()
        ]
        ordered: list[T] = []
        while lines:
            left = []
            for line, turns, had in lines:
                some = list(islice(line, turns - had))
                ordered += some
                if len(some) == turns - had:
                    left.append((line, turns, 0))
            lines = left
        return iter(ordered)

    def tagged(self) -> Iterator[tuple[str, T]]:
        """Return an iterator over (tenant, item) in turns, without weights."""
        lines = [[(tenant, item) for item in line] for tenant, line in self._lines.items()]
        return (pair for around in zip_longest(*lines) for pair in around if pair is not None)

    def line(self, tenant: str) -> list[T]:
        """Return a tenant's waiting items. The caller must not change the list."""
        return self._lines.get(tenant, [])

    def add(self, tenant: str, item: T, key: Callable[[T], Any] | None = None) -> None:
        """Queue an item of a tenant: at the end of its queue, or sorted by `key`."""
        line = self._lines.setdefault(tenant, [])
        if key is None:
            line.append(item)
        else:
            insort(line, item, key=key)

    def remove(self, tenant: str, item: T) -> None:
        """Remove a waiting item of a tenant. Raises `KeyError` or `ValueError` if it does not wait."""
        line = self._lines[tenant]
        line.remove(item)
        if not line:
            del self._lines[tenant]
            self._had.pop(tenant, None)

    def served(self, tenant: str) -> None:
        """Count a turn of the tenant; at the end of its turns it moves behind the others."""
        had = self._had.get(tenant, 0) + 1
        if tenant in self._lines and had < self._turns_of(tenant):
            self._had[tenant] = had
            return
        self._had.pop(tenant, None)
        if line := self._lines.pop(tenant, None):
            self._lines[tenant] = line


class Classes:
    """Priority classes of tenants: lower numbers are served first.

    A waiting class moves down one level for each `AGE_SECONDS` in which none of its tenants was served, down to the
    lowest level. So no class starves, whatever the load of the others.
    """

    __slots__ = ("_first", "_of", "_served")

    def __init__(self, priorities: Mapping[str, int]) -> None:
        """Make the classes. `priorities`: tenant -> class number, 0 if not named."""
        self._of = dict(priorities)
        self._first = min((0, *priorities.values()))
        self._served: dict[int, float] = {}
        """When each class was last served."""

    def __bool__(self) -> bool:
        """Tell whether any tenant has a class."""
        return bool(self._of)

    def levels(self, firsts: Iterable[tuple[str, float]], now: float) -> dict[str, int]:
        """Return each waiting tenant's level now. `firsts`: (tenant, arrival of its first waiting item)."""
        tenants = [(tenant, self._of.get(tenant, 0), arrival) for tenant, arrival in firsts]
        since = dict[int, float]()
        for _, priority, arrival in tenants:
            since[priority] = min(since.get(priority, arrival), arrival)
        levels = dict[int, int]()
        for priority, arrival in since.items():
            waited = now - max(arrival, self._served.get(priority, arrival))
            levels[priority] = max(self._first, priority - int(waited / AGE_SECONDS))
        return {tenant: levels[priority] for tenant, priority, _ in tenants}

    def served(self, tenant: str, now: float) -> None:
        """Record that one of the tenant's items was served."""
        self._served[self._of.get(tenant, 0)] = now
