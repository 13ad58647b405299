"""A semaphore that is shared round robin among tenants: for rendering, compiling, long texts and documents.

A job waits for at most one job of each other tenant per round, however many these have waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from math import inf
from typing import ParamSpec, TypeVar

from cairn.scheduler.fairness import RoundRobin
from cairn.system.deadline import DEADLINE
from cairn.types.errors import DeadlineExceeded, Overloaded

P = ParamSpec("P")
T = TypeVar("T")
AT_ONCE = 2
"""Long texts processed at once; more would take the processors from the model."""
LONGEST_RETRY = 600.0
_WEIGHT = 0.2


@dataclass(slots=True, eq=False)
class _Waiter:
    slot: asyncio.Future[None]
    patient: bool
    used: float = 0.0
    """Seconds of processor time that others of the same share have used since it began to wait."""


class FairSemaphore:
    """A semaphore over `slots` slots, granted round robin among tenants.

    A tenant holds at most `each` of them. A waiter is refused once others of the same share have used `most` seconds of
    processor time while it waited.
    """

    def __init__(
        self, slots: int = 1, *, each: float = inf, most: float = inf, what: str = "the chat template"
    ) -> None:
        """Take the limits; `what` names the resource in error messages."""
        self._each, self._most, self._what = each, most, what
        self._free = slots
        self._held: Counter[str] = Counter()
        """Slots that each share holds."""
        self._waiting: RoundRobin[_Waiter] = RoundRobin()
        self._seconds = 0.0
        """Moving average of the seconds for which a slot is held."""

    async def take(self, share: str = "", *, patient: bool = False) -> None:
        """Wait for a slot. Raise Overloaded, but not if `patient`."""
        if self._free and self._held[share] < self._each:
            self._grant(share)
            return
        waiter = _Waiter(asyncio.get_running_loop().create_future(), patient)
        self._waiting.add(share, waiter)
        try:
            await waiter.slot
        except asyncio.CancelledError:
            slot = waiter.slot
            if slot.cancelled():
                self._forget(share, waiter)
            elif slot.done() and slot.exception() is None:
                self.give(share, 0.0)  # the slot was granted before the cancellation; pass it on
            raise

    def give(self, share: str, spent: float) -> None:
        """Release a slot whose holder used `spent` seconds, and grant it to the next waiter that may have one."""
        self._seconds += _WEIGHT * (spent - self._seconds)
        self._free += 1
        self._held[share] -= 1
        if not self._held[share]:
            del self._held[share]
        for waiter in self._waiting.line(share):
            waiter.used += spent
        for share, waiter in self._waiting.tagged():
            if waiter.slot.done():
                continue  # cancelled: it removes itself
            if waiter.used > self._most and not waiter.patient:
                ahead = self._seconds * len(self._waiting.line(share))
                busy = Overloaded(
                    f"{self._what} is busy with other requests of yours",
                    retry_after=min(LONGEST_RETRY, max(1.0, ahead)),
                )
                waiter.slot.set_exception(busy)
                self._forget(share, waiter)
            elif self._held[share] < self._each:
                waiter.slot.set_result(None)
                self._forget(share, waiter)
                self._grant(share)
                self._waiting.served(share)
                return

    @contextlib.asynccontextmanager
    async def slot(self, share: str) -> AsyncIterator[None]:
        """Hold a slot while entered. Raise DeadlineExceeded if none frees up before the call's deadline."""
        await self.take_in_time(share)
        began = time.monotonic()
        try:
            yield
        finally:
            self.give(share, time.monotonic() - began)

    async def take_in_time(self, share: str) -> None:
        """Wait for a slot. Raise DeadlineExceeded if none frees up before the call's deadline."""
        deadline = DEADLINE.get()
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                await self.take(share)
        except TimeoutError:
            raise DeadlineExceeded(f"the request reached its time limit while it waited for {self._what}") from None

    async def run(self, share: str, work: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """Run `work(*args, **more)` in a thread while holding a slot.

        Raise DeadlineExceeded if there is none before the call's deadline. The slot is released when the work ends,
        even if the caller is cancelled earlier: a thread cannot be stopped.
        """
        await self.take_in_time(share)
        began = time.monotonic()
        done = asyncio.ensure_future(asyncio.to_thread(work, *args, **more))
        done.add_done_callback(lambda _: self.give(share, time.monotonic() - began))
        return await asyncio.shield(done)

    def _grant(self, share: str) -> None:
        self._free -= 1
        self._held[share] += 1

    def _forget(self, share: str, waiter: _Waiter) -> None:
        if waiter in self._waiting.line(share):
            self._waiting.remove(share, waiter)


class LongTexts(FairSemaphore):
    """Threads that parse, count and encode long texts, `AT_ONCE` at a time, one of each tenant."""

    def __init__(self) -> None:
        super().__init__(AT_ONCE, each=1, what="the threads that read long texts")
