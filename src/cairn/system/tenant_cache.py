"""An LRU cache bounded in bytes, in total and for each tenant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

V = TypeVar("V")

PARTS = 4
"""Divisor of the total limit: a tenant may use a fourth of it."""


class TenantCache(Generic[V]):
    """Values by tenant and key. A tenant never sees another's values, and evicts them only if the total is full."""

    def __init__(self, most: int, size: Callable[[V], int], held: Callable[[V], bool] = lambda _: False) -> None:
        """Make an empty cache of `most` bytes. `size` returns a value's bytes now, `held` whether it is in use."""
        self._most, self._size, self._held = most, size, held
        self._values: OrderedDict[tuple[str, Hashable], V] = OrderedDict()
        """Values by (tenant, key), the least recently used first."""

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._values)

    def get(self, tenant: str, key: Hashable) -> V | None:
        """Return a tenant's value and mark it as most recently used; None if it is not cached."""
        value = self._values.get((tenant, key))
        if value is not None:
            self._values.move_to_end((tenant, key))
        return value

    def remove(self, tenant: str, key: Hashable) -> None:
        """Remove a value if it is cached."""
        self._values.pop((tenant, key), None)

    def bytes(self, tenant: str | None = None) -> int:
        """Return the bytes of one tenant's values, or of all."""
        return sum(self._size(value) for _, value in self._of(tenant))

    def make_room(self, tenant: str, size: int) -> bool:
        """Evict entries to fit `size` bytes; return False, and evict nothing, if entries in use leave no room."""
        goes: list[tuple[str, Hashable]] = []
        for whose, limit in ((tenant, self._most // PARTS), (None, self._most)):
            over = self.bytes(whose) + size - limit
            over -= sum(self._size(self._values[key]) for key in goes if whose is None or key[0] == whose)
            for key, value in self._of(whose):
                if over <= 0:
                    break
                if key not in goes and not self._held(value):
                    goes.append(key)
                    over -= self._size(value)
            if over > 0:
                return False
        for key in goes:
            del self._values[key]
        return True

    def put(self, tenant: str, key: Hashable, value: V) -> None:
        """Add a value. Call `make_room` first: this evicts nothing."""
        self._values[tenant, key] = value
        self._values.move_to_end((tenant, key))

    def _of(self, tenant: str | None) -> Iterator[tuple[tuple[str, Hashable], V]]:
        return (item for item in self._values.items() if tenant is None or item[0][0] == tenant)
