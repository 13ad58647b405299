"""What caching saved, in tokens and seconds: a line for each agent, and one for each tenant."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec

from cairn.agents.info import Savings
from cairn.types import Done


def counted(savings: Savings, done: Done, speed: float) -> Savings:
    """With one more answer. `speed`: seconds that the prefill of a token takes here, 0 where it is not known."""
    cache, timing = done.cache, done.timing
    return msgspec.structs.replace(
        savings,
        requests=savings.requests + 1,
        computed=savings.computed + cache.computed,
        pool=savings.pool + cache.pool,
        ram=savings.ram + cache.ram,
        disk=savings.disk + cache.disk,
        generated=savings.generated + done.usage.completion_tokens,
        prefill_seconds=savings.prefill_seconds + timing.prefill,
        load_seconds=savings.load_seconds + cache.load,
        seconds_avoided=savings.seconds_avoided + max(0.0, cache.cached * speed - cache.load),
    )


def summed(one: Savings, other: Savings) -> Savings:
    """The sum of two lines."""
    pairs = zip(msgspec.structs.astuple(one), msgspec.structs.astuple(other), strict=True)
    return Savings(**dict(zip(Savings.__struct_fields__, (a + b for a, b in pairs), strict=True)))


class SavingsTotals:
    """The totals of tenants, and the measured speed of prefill. Agents keep their own lines."""

    def __init__(self) -> None:
        self.totals: dict[str, Savings] = {}
        self.dirty: set[str] = set()
        """Tenants whose total is not written yet."""
        self._traffic: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._before = 0, 0

    def load_bytes(self, read: int, written: int) -> None:
        """What the log held of the stores' bytes."""
        self._before = read, written

    def watch(self, traffic: Callable[[], tuple[int, int]]) -> None:
        """`traffic` gives the bytes (read, written) of this process; what it says now was counted before."""
        (read, written), (now_read, now_written) = self._before, traffic()
        self._before, self._traffic = (read - now_read, written - now_written), traffic

    @property
    def bytes(self) -> tuple[int, int]:
        """Of KV, (read from, written to) the disk for all tenants."""
        (read, written), (now_read, now_written) = self._before, self._traffic()
        return read + now_read, written + now_written

    def load(self, tenant: str, savings: Savings) -> None:
        """A total that the log held."""
        self.totals[tenant] = savings

    def count(self, tenant: str, done: Done) -> float:
        """Add an answer to its tenant's total; the speed it was valued at, in seconds a token."""
        speed = self.speed
        self.totals[tenant] = counted(self.totals.get(tenant, Savings()), done, speed)
        self.dirty.add(tenant)
        return speed

    @property
    def total(self) -> Savings:
        """The sum over all tenants."""
        found = Savings()
        for savings in self.totals.values():
            found = summed(found, savings)
        return found

    @property
    def speed(self) -> float:
        """Seconds that the prefill of one token took, on average over everything; 0 before the first answer."""
        total = self.total
        spent = max(0.0, total.prefill_seconds - total.load_seconds)
        return spent / total.computed if total.computed else 0.0


LINES = 1 << 63
"""Keys from here on are those of totals."""
BYTES_KEY = LINES | 1 << 62
"""The key of the line of bytes, beside those of the totals."""


def total_key(tenant: str) -> int:
    """The key of a tenant's total in the log: never that of an agent or a turn, which count from 1."""
    return LINES | int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:7], "little")
