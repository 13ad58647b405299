"""Fair sharing among tenants of the process that renders templates and of threads for long texts.

Turns are given round robin: a job waits for at most one job of each other tenant per round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import ParamSpec, TypeVar

from cairn.scheduler.fairness import RoundRobin
from cairn.types.errors import Overloaded

P = ParamSpec("P")
T = TypeVar("T")
AT_ONCE = 2
"""Long texts processed at once; more would take the processors from the model."""
LONGEST_RETRY = 600.0
_WEIGHT = 0.2


@dataclass(slots=True, eq=False)
class _Waiter:
    turn: asyncio.Future[None]
    patient: bool
    used: float = 0.0
    """Seconds of processor time that others of the same share have used since it began to wait."""


class SharedTurns:
    """A semaphore of `places`, shared round robin among tenants.

    A waiter is refused once others of the same share have used `most` seconds of processor time while it waited.
    """

    def __init__(self, most: float = inf, places: int = 1, what: str = "the chat template") -> None:
        """Take the limits; `what` names the resource in error messages."""
        self._most, self._what = most, what
        self._free = places
        self._waiting: RoundRobin[_Waiter] = RoundRobin()
        self._each = 0.0
        """Moving average of the seconds that a turn takes."""

    async def take(self, share: str = "", *, patient: bool = False) -> None:
        """Wait for a turn. Raises Overloaded, but not if `patient`."""
        if self._free:
            self._free -= 1
            return
        waiter = _Waiter(asyncio.get_running_loop().create_future(), patient)
        self._waiting.add(share, waiter)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            turn = waiter.turn
            if turn.cancelled():
                self._forget(share, waiter)
            elif turn.done() and turn.exception() is None:
                self.give(share, 0.0)  # the turn was granted before the cancellation; pass it on
            raise

    def give(self, share: str, spent: float) -> None:
        """End a turn that took `spent` seconds and grant it to the next waiter, if there is one."""
        self._each += _WEIGHT * (spent - self._each)
        for waiter in self._waiting.line(share):
            waiter.used += spent
        for share, waiter in self._waiting.tagged():
            if waiter.turn.done():
                continue  # cancelled: it removes itself
            refused = waiter.used > self._most and not waiter.patient
            if refused:
                ahead = self._each * len(self._waiting.line(share))
                busy = Overloaded(
                    f"{self._what} is busy with other requests of yours",
                    retry_after=min(LONGEST_RETRY, max(1.0, ahead)),
                )
                waiter.turn.set_exception(busy)
            else:
                waiter.turn.set_result(None)
            self._forget(share, waiter)
            if not refused:
                self._waiting.served(share)
                return
        self._free += 1

    def _forget(self, share: str, waiter: _Waiter) -> None:
        if waiter in self._waiting.line(share):
            self._waiting.remove(share, waiter)


class LongTexts:
    """Threads that parse, count and encode long texts, `AT_ONCE` at a time."""

    def __init__(self) -> None:
        self._turns = SharedTurns(places=AT_ONCE)

    async def run(self, share: str, work: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """Run `work(*args, **more)` in a thread when it is the tenant's turn.

        The turn ends when the work ends, even if the caller is cancelled earlier.
        """
        await self._turns.take(share)
        done = asyncio.ensure_future(asyncio.to_thread(work, *args, **more))
        done.add_done_callback(lambda _: self._turns.give(share, 0.0))
        return await asyncio.shield(done)
