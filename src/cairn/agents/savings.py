"""Savings of the prefix cache, in tokens and seconds: by agent, by tenant, and by tenant and day."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import reduce

import msgspec

from cairn.agents.log.records import Savings
from cairn.types.outputs import Done


def counted(savings: Savings, done: Done, speed: float) -> Savings:
    """Return the savings with one more answer. `speed`: seconds to prefill one token, 0 if unknown."""
    cache, timing = done.cache, done.timing
    return msgspec.structs.replace(
        savings,
        requests=savings.requests + 1,
        computed=savings.computed + cache.computed,
        pool=savings.pool + cache.pool,
        ram=savings.ram + cache.ram,
        disk=savings.disk + cache.disk,
        shared=savings.shared + cache.shared,
        generated=savings.generated + done.usage.completion_tokens,
        guessed=savings.guessed + done.usage.accepted_prediction_tokens,
        prefill_seconds=savings.prefill_seconds + timing.prefill,
        load_seconds=savings.load_seconds + cache.load,
        seconds_avoided=savings.seconds_avoided + max(0.0, cache.cached * speed - cache.load),
    )


def summed(one: Savings, other: Savings) -> Savings:
    """Return the sum of two lines."""
    pairs = zip(msgspec.structs.astuple(one), msgspec.structs.astuple(other), strict=True)
    return Savings(**dict(zip(Savings.__struct_fields__, (a + b for a, b in pairs), strict=True)))


class SavingsTotals:
    """Totals of tenants, and the measured speed of prefill. Agents keep their own lines."""

    def __init__(self) -> None:
        self.totals: dict[str, Savings] = {}
        self._total: Savings | None = None
        """Sum over all tenants; None if it is to be added up anew."""
        self.dirty: set[str] = set()
        """Tenants whose total is not written yet."""
        self.days: dict[str, dict[int, Savings]] = {}
        """Savings of each tenant by day, in days since 1970 (UTC)."""
        self.dirty_days: set[tuple[str, int]] = set()
        self._traffic: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._before = 0, 0

    def load_bytes(self, read: int, written: int) -> None:
        """Set the bytes of the stores that the log recorded."""
        self._before = read, written

    def watch(self, traffic: Callable[[], tuple[int, int]]) -> None:
        """Count the stores' bytes of this process: `traffic` returns (read, written).

        What it returns now is counted already.
        """
        (read, written), (now_read, now_written) = self._before, traffic()
        self._before, self._traffic = (read - now_read, written - now_written), traffic

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of KV (read from, written to) the disk for all tenants."""
        (read, written), (now_read, now_written) = self._before, self._traffic()
        return read + now_read, written + now_written

    def load(self, tenant: str, savings: Savings) -> None:
        """Set a tenant's total that the log recorded."""
        self.totals[tenant], self._total = savings, None

    def load_day(self, tenant: str, day: int, savings: Savings) -> None:
        """Set a tenant's day that the log recorded."""
        self.days.setdefault(tenant, {})[day] = savings

    def count(self, tenant: str, done: Done, now: float) -> float:
        """Add an answer that ended `now` to its tenant's total and day.

        Return the prefill speed at which it was valued, in seconds a token.
        """
        speed, day = self.speed, int(now // DAY_SECONDS)
        self._total = counted(self.total, done, speed)
        self.totals[tenant] = counted(self.totals.get(tenant, Savings()), done, speed)
        days = self.days.setdefault(tenant, {})
        days[day] = counted(days.get(day, Savings()), done, speed)
        self.dirty.add(tenant)
        self.dirty_days.add((tenant, day))
        return speed

    def forget_days(self, now: float) -> list[int]:
        """Drop the days older than KEEP_DAYS; return the keys of their records."""
        oldest = int(now // DAY_SECONDS) - KEEP_DAYS
        gone = [(tenant, day) for tenant, days in self.days.items() for day in days if day < oldest]
        for tenant, day in gone:
            del self.days[tenant][day]
            self.dirty_days.discard((tenant, day))
        return [day_key(tenant, day) for tenant, day in gone]

    def mark_dirty(self) -> None:
        """Mark every line to be written again."""
        self.dirty.update(self.totals)
        self.dirty_days.update((tenant, day) for tenant, days in self.days.items() for day in days)

    @property
    def total(self) -> Savings:
        """Sum over all tenants."""
        if self._total is None:
            self._total = reduce(summed, self.totals.values(), Savings())
        return self._total

    @property
    def speed(self) -> float:
        """Mean seconds to prefill one token; 0 before the first answer."""
        total = self.total
        spent = max(0.0, total.prefill_seconds - total.load_seconds)
        return spent / total.computed if total.computed else 0.0


LINES = 1 << 63
"""First key of totals."""
BYTES_KEY = LINES | 1 << 62
"""Key of the record of the stores' bytes."""
DAY_LINES = LINES | 1 << 61
"""Bits of the keys of days; keys of totals have only the first of them."""
DAY_SECONDS = 86_400
KEEP_DAYS = 400
"""Days whose lines are kept."""


def total_key(tenant: str) -> int:
    """Return the key of a tenant's total in the log. It never is that of an agent or a turn: those count from 1."""
    return LINES | int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:7], "little")


def day_key(tenant: str, day: int) -> int:
    """Return the key of a tenant's day in the log."""
    return DAY_LINES | int.from_bytes(hashlib.sha256(f"{day} {tenant}".encode()).digest()[:7], "little")
