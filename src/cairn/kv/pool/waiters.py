"""Sequences that wait for an event in the cache; none is looked at again before its event."""

from __future__ import annotations

from collections.abc import Iterable

from cairn.kv.pool.blocks import BlockPool
from cairn.kv.pool.sequence_kv import Match, SequenceKV


class Waiters:
    """Sequences whose last `Match` stays valid until an event discards it (`wake`); then they are matched anew.

    The events are: a block with a watched key was published or is no longer being computed (`settled`), a pool has more
    room than it had for a sequence that found too little (`freed`), others now hold blocks that the sequence would use
    (`taken`). An unneeded wake costs one lookup, so callers wake when in doubt.
    """

    def __init__(self) -> None:
        self._watched: dict[bytes, set[SequenceKV]] = {}
        self._short: dict[SequenceKV, tuple[BlockPool, int]] = {}
        """Sequences that found too few blocks: the pool, and how many it had."""
        self._blocked: dict[SequenceKV, None] = {}
        """Sequences that wait for a key or for their own load; the next to be verified comes first."""

    @property
    def blocked(self) -> int:
        """Number of sequences that wait for a key or for their own load."""
        return len(self._blocked)

    def remember(self, seq_kv: SequenceKV, match: Match, keys: Iterable[bytes]) -> None:
        """Keep a sequence's match until one of `keys` is settled, or what it is blocked on ends."""
        seq_kv.claim.match, seq_kv.claim.watched = match, tuple(keys)
        for key in seq_kv.claim.watched:
            self._watched.setdefault(key, set()).add(seq_kv)
        if isinstance(match.blocked_on, BlockPool):
            self.short(seq_kv, match.blocked_on)
        elif match.blocked_on is not None:
            self._blocked[seq_kv] = None

    def short(self, seq_kv: SequenceKV, pool: BlockPool) -> None:
        """Record that a sequence found too little room in a pool."""
        self._short[seq_kv] = pool, pool.available

    def wake(self, seq_kv: SequenceKV) -> None:
        """Discard a sequence's match."""
        seq_kv.claim.match = None
        for key in seq_kv.claim.watched:
            watching = self._watched[key]
            watching.discard(seq_kv)
            if not watching:
                del self._watched[key]
        seq_kv.claim.watched = ()
        self._short.pop(seq_kv, None)
        self._blocked.pop(seq_kv, None)

    def settled(self, key: bytes) -> None:
        """Wake the sequences that watch this key: the block can be found, or nobody computes it any more."""
        for seq_kv in tuple(self._watched.get(key, ())):
            self.wake(seq_kv)

    def freed(self) -> None:
        """Wake the sequences that were short of blocks in a pool that has more now."""
        for seq_kv, (pool, had) in tuple(self._short.items()):
            if pool.available > had:
                self.wake(seq_kv)

    def taken(self) -> None:
        """Wake all sequences that were short: held cached blocks are shared, so they may need fewer new ones."""
        for seq_kv in tuple(self._short):
            self.wake(seq_kv)

    def next_blocked(self) -> SequenceKV | None:
        """Return one of the blocked sequences, in turn; None if there is none."""
        if not self._blocked:
            return None
        seq_kv = next(iter(self._blocked))
        self._blocked[seq_kv] = self._blocked.pop(seq_kv)
        return seq_kv
