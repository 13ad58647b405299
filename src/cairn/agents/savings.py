"""What caching saved, in tokens and seconds: of each agent, of each tenant, and of each of its days."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec

from cairn.agents.log.records import Savings
from cairn.types.outputs import Done


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
        self.days: dict[str, dict[int, Savings]] = {}
        """What each tenant saved on a day, by the number of days since 1970 (UTC)."""
        self.dirty_days: set[tuple[str, int]] = set()
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
        """How many bytes of KV were (read from, written to) the disk for all tenants."""
        (read, written), (now_read, now_written) = self._before, self._traffic()
        return read + now_read, written + now_written

    def load(self, tenant: str, savings: Savings) -> None:
        """A total that the log held."""
        self.totals[tenant] = savings

    def load_day(self, tenant: str, day: int, savings: Savings) -> None:
        """A tenant's day that the log held."""
        self.days.setdefault(tenant, {})[day] = savings

    def count(self, tenant: str, done: Done, now: float) -> float:
        """Add an answer, which ended `now`, to its tenant's total and day; the speed it was valued at, in seconds a
        token."""
        speed, day = self.speed, int(now // DAY_SECONDS)
        self.totals[tenant] = counted(self.totals.get(tenant, Savings()), done, speed)
        days = self.days.setdefault(tenant, {})
        days[day] = counted(days.get(day, Savings()), done, speed)
        self.dirty.add(tenant)
        self.dirty_days.add((tenant, day))
        return speed

    def forget_days(self, now: float) -> list[int]:
        """Forget the days that are too long ago; the keys of their lines."""
        oldest = int(now // DAY_SECONDS) - KEEP_DAYS
        gone = [(tenant, day) for tenant, days in self.days.items() for day in days if day < oldest]
        for tenant, day in gone:
            del self.days[tenant][day]
            self.dirty_days.discard((tenant, day))
        return [day_key(tenant, day) for tenant, day in gone]

    def mark_dirty(self) -> None:
        """Every line is to be written again."""
        self.dirty.update(self.totals)
        self.dirty_days.update((tenant, day) for tenant, days in self.days.items() for day in days)

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
DAY_LINES = LINES | 1 << 61
"""Keys of days have these bits; those of totals have none of them but the first."""
DAY_SECONDS = 86_400
KEEP_DAYS = 400
"""Days whose lines are kept."""


def total_key(tenant: str) -> int:
    """The key of a tenant's total in the log: never that of an agent or a turn, which count from 1."""
    return LINES | int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:7], "little")


def day_key(tenant: str, day: int) -> int:
    """The key of a tenant's day in the log."""
    return DAY_LINES | int.from_bytes(hashlib.sha256(f"{day} {tenant}".encode()).digest()[:7], "little")
