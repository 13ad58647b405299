"""What is remembered beside the stored chunks for the next process: the day's bytes, and which blocks were seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from cairn.kv.pool.seen_blocks import SeenBlocks
from cairn.kv.tiers.day_budget import DayBudget, Written
from cairn.kv.tiers.store import StoreNotes
from cairn.kv.tiers.write_behind import StoreWriter
from cairn.system.interfaces import Clock

TELL_SECONDS = 1.0
"""How often, at most, what was seen is written down."""
SEEN_BYTES = 1 << 19
"""Records of what was seen that are added to those on the disk before all are written anew."""


class StoreMemory:
    """Has it written by the thread that writes chunks, in order with them. One thread calls."""

    def __init__(
        self, notes: StoreNotes | None, seen: SeenBlocks, writer: StoreWriter, clock: Clock, day_bytes: float
    ) -> None:
        """`notes`: None where no store outlives the process."""
        self._notes, self._seen, self._writer, self._clock = notes, seen, writer, clock
        self.budget = DayBudget(clock, day_bytes, self._remember_written)
        self._told, self._appended = -math.inf, 0
        """When what was seen was written down last, and bytes since all of it was."""
        if notes is not None:
            self.budget.restore(notes.recall_written())
            seen.restore(notes.recall_seen())

    def turn(self) -> None:
        """Write down what was seen since the last time, now and then."""
        now = self._clock.now()
        if self._notes is None or now - self._told < TELL_SECONDS or not (news := self._seen.news()):
            return
        self._told, self._appended = now, self._appended + len(news)
        if self._appended > SEEN_BYTES:
            self.write_seen()
        else:
            self._writer.push(partial(self._notes.remember_seen, news, anew=False))

    def write_seen(self) -> None:
        """Write down all that was seen, in the place of what was before."""
        if self._notes is not None:
            self._appended = 0
            self._writer.push(partial(self._notes.remember_seen, self._seen.records(), anew=True))

    def forget(self, blocks: Sequence[bytes]) -> None:
        """Remember nothing of these blocks, here and on the disk."""
        if self._seen.forget(blocks):
            self.write_seen()

    def close(self) -> None:
        """The writer has ended: say how many bytes were written, and no more than that."""
        if self._notes is not None:
            self._notes.remember_written(self.budget.record())

    def _remember_written(self, written: Sequence[Written]) -> None:
        if self._notes is not None:
            self._writer.push(partial(self._notes.remember_written, written))
