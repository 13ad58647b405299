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

    def remember(self, context: SequenceKV, match: Match, keys: Iterable[bytes]) -> None:
        """What was found for a context holds until one of `keys` is settled, or what it is blocked on ends."""
        context.claim.match, context.claim.watched = match, tuple(keys)
        for key in context.claim.watched:
            self._watched.setdefault(key, set()).add(context)
        if isinstance(match.blocked_on, BlockPool):
            self.short(context, match.blocked_on)
        elif match.blocked_on is not None:
            self._blocked[context] = None

    def short(self, context: SequenceKV, pool: BlockPool) -> None:
        """A context found too little room in a pool."""
        self._short[context] = pool, pool.available

    def wake(self, context: SequenceKV) -> None:
        """Forget what was found for a context."""
        context.claim.match = None
        for key in context.claim.watched:
            watching = self._watched[key]
            watching.discard(context)
            if not watching:
                del self._watched[key]
        context.claim.watched = ()
        self._short.pop(context, None)
        self._blocked.pop(context, None)

    def settled(self, key: bytes) -> None:
        """The block with this key can be found, or who computed it does so no more."""
        for context in tuple(self._watched.get(key, ())):
            self.wake(context)

    def freed(self) -> None:
        """Blocks were given back."""
        for context, (pool, had) in tuple(self._short.items()):
            if pool.available > had:
                self.wake(context)

    def taken(self) -> None:
        """Somebody holds cached blocks: a context that would use the same needs fewer of what is left."""
        for context in tuple(self._short):
            self.wake(context)

    def next_blocked(self) -> SequenceKV | None:
        """One of the blocked, each in turn."""
        if not self._blocked:
            return None
        context = next(iter(self._blocked))
        self._blocked[context] = self._blocked.pop(context)
        return context
