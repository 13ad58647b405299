"""Notes that are saved beside the stored chunks for the next process: the day's bytes, and which blocks were seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from cairn.kv.pool.seen_blocks import SeenBlocks
from cairn.kv.tiers.day_budget import DayBudget, Written
from cairn.kv.tiers.store import StoreNotes
from cairn.kv.tiers.store_writer import StoreWriter
from cairn.system.interfaces import Clock

SAVE_SECONDS = 1.0
"""Least seconds between two times that seen blocks are saved."""
SEEN_BYTES = 1 << 19
"""Records of seen blocks that are appended on the disk before all of them are written anew."""


class SavedNotes:
    """Saves notes through the thread that writes chunks, in order with them. One thread calls."""

    def __init__(
        self, notes: StoreNotes | None, seen: SeenBlocks, writer: StoreWriter, clock: Clock, day_bytes: float
    ) -> None:
        """Load the notes of earlier processes. `notes`: None if no store outlives the process."""
        self._notes, self._seen, self._writer, self._clock = notes, seen, writer, clock
        self.budget = DayBudget(clock, day_bytes, self._remember_written)
        self._saved_at, self._appended = -math.inf, 0
        """When seen blocks were saved last, and the bytes appended since all of them were written."""
        if notes is not None:
            self.budget.restore(notes.recall_written())
            seen.restore(notes.recall_seen())

    def turn(self) -> None:
        """Save the blocks that were seen since the last time, at most once in `SAVE_SECONDS`."""
        if self._notes is None:
            return
        now = self._clock.now()
        if now - self._saved_at < SAVE_SECONDS or not (news := self._seen.news()):
            return
        self._saved_at, self._appended = now, self._appended + len(news)
        if self._appended > SEEN_BYTES:
            self.write_seen()
        else:
            self._writer.push(partial(self._notes.remember_seen, news, anew=False))

    def write_seen(self) -> None:
        """Save all seen blocks in place of those on the disk."""
        if self._notes is not None:
            self._appended = 0
            self._writer.push(partial(self._notes.remember_seen, self._seen.records(), anew=True))

    def forget(self, blocks: Sequence[bytes]) -> None:
        """Forget these blocks, here and on the disk."""
        if self._seen.forget(blocks):
            self.write_seen()

    def close(self) -> None:
        """Save exactly how many bytes were written. The writer has ended."""
        if self._notes is not None:
            self._notes.remember_written(self.budget.record())

    def _remember_written(self, written: Sequence[Written]) -> None:
        if self._notes is not None:
            self._writer.push(partial(self._notes.remember_written, written))
