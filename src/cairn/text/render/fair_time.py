"""What all tenants share to make prompts: the process that renders templates, and threads for long texts.

Whose turn it is, is said by `RoundRobin`: nobody waits for more than one job of each other tenant.
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
"""Long texts that are worked on at once: more would take the processors from the model."""
LONGEST_RETRY = 600.0
_WEIGHT = 0.2


@dataclass(slots=True, eq=False)
class _Waiter:
    turn: asyncio.Future[None]
    patient: bool
    used: float = 0.0
    """What others of the same share have used since it came."""


class SharedTurns:
    """So many `places`, and a turn for each tenant. Who waits is refused once others of the same share have used `most`
    seconds of processor time meanwhile."""

    def __init__(self, most: float = inf, places: int = 1, what: str = "the chat template") -> None:
        """`what` the turns are for, as who is refused is told."""
        self._most, self._what = most, what
        self._free = places
        self._waiting: RoundRobin[_Waiter] = RoundRobin()
        self._each = 0.0
        """Seconds that a turn takes."""

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
                self.give(share, 0.0)  # it was given the turn and does not take it
            raise

    def give(self, share: str, spent: float) -> None:
        """The turn is over, and has taken so many seconds: the next one's, if any waits."""
        self._each += _WEIGHT * (spent - self._each)
        for waiter in self._waiting.line(share):
            waiter.used += spent
        for share, waiter in self._waiting.tagged():
            if waiter.turn.done():
                continue  # it was cancelled, and goes by itself
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
    """Threads in which long texts are read, counted and encoded, `AT_ONCE` at a time."""

    def __init__(self) -> None:
        self._turns = SharedTurns(places=AT_ONCE)

    async def run(self, share: str, work: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """`work(*args)`, when it is the tenant's turn, which is over when the work is, whoever still waits for it."""
        await self._turns.take(share)
        done = asyncio.ensure_future(asyncio.to_thread(work, *args, **more))
        done.add_done_callback(lambda _: self._turns.give(share, 0.0))
        return await asyncio.shield(done)
