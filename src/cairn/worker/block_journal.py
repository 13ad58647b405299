"""The blocks that a worker holds, as changes since they were last asked for. Nothing is noted while nobody follows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

from cairn.cluster.kv_events import block_hash
from cairn.kv.pool.blocks import BlockPool, Published
from cairn.kv.pool.cache import Cache
from cairn.kv.pool.sequence_kv import TierName
from cairn.kv.tiers.store import Watch
from cairn.kv.tiers.tiers import Tiers
from cairn.types.stats import BlockChange, BlockChanges, Medium
from cairn.worker import wire

MOST_BLOCKS = 1 << 18
"""Most queued block changes (a router remembers as many). Beyond it the next answer lists all blocks, cut at this
number: those of a large disk would fill a frame and be decoded on an event loop."""
MOST_JOINED = 256
"""Blocks of one change that further ones are joined to."""
_MEDIUM: dict[TierName, Medium] = {"ram": "CPU", "disk": "DISK"}


class BlockJournal:
    """Notes which blocks come and go, from the first question on. One thread asks."""

    def __init__(self, channel: wire.Channel, cache: Cache, tiers: Tiers | None) -> None:
        self._channel = channel
        self._pool, self._tiers = cache.leading_pool, tiers
        self._block_tokens = cache.info.block_tokens
        self._changes = list[BlockChange]()
        self._blocks = 0
        """Blocks in `_changes`."""
        self._lock = threading.Lock()
        """Held to touch both: any thread notes changes."""
        self._follows = self._lost = False

    def take(self, ask: wire.KVQuery) -> None:
        """Answer a query: `follow` with what changed since the last one, `unfollow` by noting nothing any more."""
        if ask.what == "unfollow":
            self._stop()
        blocks = BlockChanges() if ask.what == "unfollow" else self._changed(whole=ask.whole)
        self._channel.send(wire.KVAnswer(ask.id, blocks=blocks, routine=True))

    def _changed(self, *, whole: bool) -> BlockChanges:
        """Return what changed since the last call: all blocks at the first, if `whole`, or if changes were lost."""
        whole = whole or self._lost or not self._follows
        if whole:
            self._stop()
            self._follows = True
            self._watch()
            self._lost = False  # beyond `MOST_BLOCKS` the others are left out
        found = list[BlockChange]()
        for one in self._take_all():
            if found and _goes_on(found[-1], one):
                last = found.pop()
                one = BlockChange(one.medium, last.blocks + one.blocks, True, last.parent)
            found.append(one)
        return BlockChanges(tuple(found), whole)

    def _stop(self) -> None:
        self._follows = False
        if self._pool is not None:
            self._pool.watch = None
        if self._tiers is not None:
            self._tiers.watch(None)
        self._take_all()

    def _take_all(self) -> Sequence[BlockChange]:
        """Return the changes that wait, and keep none of them."""
        with self._lock:
            taken, self._changes, self._blocks = self._changes, [], 0
        return taken

    def _watch(self) -> None:
        if self._pool is not None:
            for published in self._pool.all_published():
                self._in_pool(self._pool, True, published)
            self._pool.watch = partial(self._in_pool, self._pool)
        if self._tiers is not None:
            self._tiers.watch(self._watch_of)

    def _in_pool(self, pool: BlockPool, stored: bool, published: Published) -> None:
        if len(published.tokens) == self._block_tokens:  # a part is no block to others
            parent = block_hash(published.parent) if pool.knows(published.parent) else None
            self._note(BlockChange("GPU", (block_hash(published.key),), stored, parent))

    def _watch_of(self, name: TierName) -> Watch:
        medium = _MEDIUM[name]

        def note(stored: bool, heads: Sequence[bytes], before: bytes) -> None:
            parent = block_hash(before) if before else None
            self._note(BlockChange(medium, tuple(map(block_hash, heads)), stored, parent))

        return note

    def _note(self, change: BlockChange) -> None:
        with self._lock:
            if self._blocks + len(change.blocks) <= MOST_BLOCKS:
                self._changes.append(change)
                self._blocks += len(change.blocks)
            else:
                self._lost = True


def _goes_on(before: BlockChange, after: BlockChange) -> bool:
    """Return whether two changes are one: the second's blocks extend the first's in the same tier."""
    same = before.stored and after.stored and before.medium == after.medium
    return same and before.blocks[-1] == after.parent and len(before.blocks) < MOST_JOINED
