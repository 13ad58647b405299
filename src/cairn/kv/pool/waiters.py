"""Who waits for what to happen in the cache: nobody is looked at again before that."""

from __future__ import annotations

from collections.abc import Iterable

from cairn.kv.pool.blocks import BlockPool
from cairn.kv.pool.sequence_kv import Match, SequenceKV


class Waiters:
    """Contexts whose last `Match` holds until an event, which takes it away (`wake`): they have to be looked at anew.

    The events are: a block with a watched key can be found or is computed by nobody any more (`settled`), a pool has
    more room than it had for one that found too little (`freed`), others hold blocks that it would use (`taken`).
    To wake one too often costs a look; so whoever is in doubt wakes.
    """

    def __init__(self) -> None:
        self._watched: dict[bytes, set[SequenceKV]] = {}
        self._short: dict[SequenceKV, tuple[BlockPool, int]] = {}
        """Those that found too few blocks: in which pool, and how many."""
        self._blocked: dict[SequenceKV, None] = {}
        """Those that wait for a key or for their own load; the next to be verified first."""

    @property
    def blocked(self) -> int:
        """How many wait for a key or for their own load."""
        return len(self._blocked)

    def remember(self, seq_kv: SequenceKV, match: Match, keys: Iterable[bytes]) -> None:
        """What was found for a context holds until one of `keys` is settled, or what it is blocked on ends."""
        seq_kv.claim.match, seq_kv.claim.watched = match, tuple(keys)
        for key in seq_kv.claim.watched:
            self._watched.setdefault(key, set()).add(seq_kv)
        if isinstance(match.blocked_on, BlockPool):
            self.short(seq_kv, match.blocked_on)
        elif match.blocked_on is not None:
            self._blocked[seq_kv] = None

    def short(self, seq_kv: SequenceKV, pool: BlockPool) -> None:
        """A context found too little room in a pool."""
        self._short[seq_kv] = pool, pool.available

    def wake(self, seq_kv: SequenceKV) -> None:
        """Forget what was found for a context."""
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
        """The block with this key can be found, or who computed it does so no more."""
        for seq_kv in tuple(self._watched.get(key, ())):
            self.wake(seq_kv)

    def freed(self) -> None:
        """Blocks were given back."""
        for seq_kv, (pool, had) in tuple(self._short.items()):
            if pool.available > had:
                self.wake(seq_kv)

    def taken(self) -> None:
        """Somebody holds cached blocks: a context that would use the same needs fewer of what is left."""
        for seq_kv in tuple(self._short):
            self.wake(seq_kv)

    def next_blocked(self) -> SequenceKV | None:
        """One of the blocked, each in turn."""
        if not self._blocked:
            return None
        seq_kv = next(iter(self._blocked))
        self._blocked[seq_kv] = self._blocked.pop(seq_kv)
        return seq_kv
