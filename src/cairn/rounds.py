"""Whose turn it is among tenants: each in turn has one of those of its own that wait, whoever has how many.

A tenant is known here while something of it waits. It joins behind the others, and steps behind them again when one of
its own was served: so between two of one tenant every other has one, and nobody is passed by tenants that come later.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Rounds(Generic[T]):
    """What waits, in a line for each tenant."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: dict[str, list[T]] = {}
        """The next tenant's first. None is empty."""

    def __iter__(self) -> Iterator[T]:
        """One of each tenant, then a second of each, and so on. What waits may change meanwhile; this does not."""
        lines = [tuple(line) for line in self._lines.values()]
        if len(lines) == 1:
            return iter(lines[0])
        return (item for around in zip_longest(*lines) for item in around if item is not None)

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

    def served(self, tenant: str) -> None:
        """The tenant has had its turn."""
        if line := self._lines.pop(tenant, None):
            self._lines[tenant] = line
