"""A sequence's KV: the blocks that it holds, its claim on blocks to compute, and its progress in the stores."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from cairn.kv.pool.blocks import BlockPool
from cairn.kv.pool.prefix import Chain
from cairn.kv.pool.snapshots import SPACING, Snapshots
from cairn.types.stats import MissReason

REMEMBERED_KEYS = 1 << 15
"""Most keys in a `RecentKeys`."""

TierName = str
"""Name of a store below the pool; tiers are a mapping of names to stores, the fastest first."""


BlockedOn = bytes | BlockPool | Literal["load"]
"""A key that another sequence computes or loads, a pool with too few blocks, or "load" for the sequence's own load."""


class Match(NamedTuple):
    """The cached prefix of a sequence, and what its computation has to wait for."""

    covered: int
    """Leading tokens whose blocks the pools have; one token is always left to compute."""
    missing: int
    """All other tokens."""
    blocked_on: BlockedOn | None = None


class Brought(NamedTuple):
    """A stretch of a sequence that a load brought up."""

    begin: int
    """Number of its first token."""
    end: int
    tier: TierName
    """The lowest tier that any of it came from."""


class BlockTable:
    """The blocks that a sequence holds, a list a cache group. Only the `Cache` changes it."""

    __slots__ = ("capacity", "groups", "published", "snapshots", "spares")

    def __init__(self, groups: int, spacing: int) -> None:
        self.groups: tuple[list[int], ...]
        """Ids of blocks in order; `NO_BLOCK` where a window has passed, a load needs nothing, or no state is kept."""
        self.published: list[int]
        """Leading blocks of each group that are published or that a window has passed; for states, blocks that were
        computed."""
        self.capacity: int
        """Positions that every group covers."""
        self.snapshots = Snapshots(spacing)
        """The states that are kept."""
        self.spares: list[int] = []
        """During a step that checks guesses: for each state group the block with a copy of the state before it."""
        self._clear(groups)

    def clear(self) -> None:
        """Hold nothing; the caller has released the blocks."""
        self.snapshots.clear()
        self._clear(len(self.groups))

    def _clear(self, groups: int) -> None:
        self.groups = tuple([] for _ in range(groups))
        self.published = [0] * groups
        self.capacity = 0

    def measure(self, block_tokens: int) -> None:
        """Update the capacity after the groups have grown."""
        self.capacity = min(len(blocks) for blocks in self.groups) * block_tokens


class Claim:
    """A sequence's claim on blocks: those that it computes for others, and those of others that it waits for.

    Only the `Cache` and its `Waiters` change it.
    """

    __slots__ = ("blocks", "match", "tried", "wanted", "watched")

    def __init__(self) -> None:
        self.blocks = range(0)
        """Numbers of the blocks that the sequence is computing or loading; others that need one of them may wait for
        it."""
        self.wanted = False
        """Whether a sequence has waited for a block that is being loaded into the tables of this one."""
        self.match: Match | None = None
        """The last match, kept while the sequence waits and nothing has happened that could change it."""
        self.watched: tuple[bytes, ...] = ()
        """Keys whose settling discards the match: see `Waiters`."""
        self.tried = False
        """Whether a load was begun for it since it was open last."""


class StoreProgress:
    """Progress of a sequence's chunks to the stores, and the record of what was loaded from there.

    Only `LowerTiers` change it.
    """

    __slots__ = (
        "breaks",
        "brought",
        "declined",
        "durable",
        "load_seconds",
        "loading",
        "looked",
        "noted",
        "once",
        "own",
        "stored",
    )

    def __init__(self, groups: int, durable: bool, stored: bool, once: bool) -> None:
        self.durable = durable
        """Whether its chunks are stored before those of sequences that are not durable."""
        self.once = once
        """Whether nobody is known to continue it; then stores evict it first."""
        self.stored = stored
        """Whether it may go to stores at all."""
        self.noted = [0] * groups
        """Leading chunks of each group for which it was decided whether to store them."""
        self.own = [0] * groups
        """Leading chunks of each group that were decided before the sequence was closed last: to see them again does
        not mean that another sequence has them."""
        self.breaks, self.looked = -1, -math.inf
        """The count of broken chains, and the time, when all chunks were last decided anew from the first on."""
        self.loading = False
        """Whether the sequence's tables are being filled from a store."""
        self.declined = False
        """Whether a load was not worth it, or took so long that computing was better."""
        self.brought: list[Brought] = []
        self.load_seconds = 0.0
        """Seconds from the decision to load until the last stretch lay in the pool."""

    def bring(self, begin: int, end: int, tier: TierName) -> None:
        """Record that a load brought up tokens `begin` to `end`.

        What an earlier load brought up from there on had been evicted again.
        """
        if self.brought and self.brought[-1].end == begin and self.brought[-1].tier == tier:
            self.brought[-1] = self.brought[-1]._replace(end=end)
            return
        kept = [Brought(first, min(last, begin), where) for first, last, where in self.brought if first < begin]
        self.brought = [*kept, Brought(begin, end, tier)]

    def origin(self, covered: int) -> dict[TierName, int]:
        """Return how many of the first `covered` tokens came from each tier; the others were in the pool."""
        found: dict[TierName, int] = {"ram": 0, "disk": 0, "shared": 0}
        for begin, end, tier in self.brought:
            found[tier] += max(0, min(end, covered) - begin)
        return found


class SequenceKV:
    """One sequence's KV: the keys of its full blocks, and three parts that each have one owner.

    Made once a sequence by `Cache.context`; it stays while the sequence is closed and opened again.
    """

    __slots__ = ("chains", "claim", "progress", "table")

    def __init__(
        self,
        chains: tuple[Chain, ...],
        durable: bool = False,
        stored: bool = True,
        spacing: int = SPACING,
        once: bool = False,
    ) -> None:
        self.chains = chains
        self.table = BlockTable(len(chains), spacing)
        self.claim = Claim()
        self.progress = StoreProgress(len(chains), durable, stored, once)


class LowerTiers(Protocol):
    """The tiers below the pools, which store KV and bring it back: `tiers.Tiers`."""

    def findable(self, seq_kv: SequenceKV, tokens: Sequence[int]) -> None:
        """Note that more of this sequence's blocks can be found in the pools."""
        ...

    def load(self, seq_kv: SequenceKV, tokens: Sequence[int], hit: int, spare: int, most: int | None) -> bool:
        """Begin to load what follows the pools' `hit` blocks if that is worth it; return whether it was begun.

        `most`: how many tokens may be left to compute.
        """
        ...

    def stop(self, seq_kv: SequenceKV) -> None:
        """End the load of a sequence that is being closed."""
        ...

    def ended(self, seq_kv: SequenceKV, tokens: Sequence[int], boundary: int, computed: int) -> None:
        """Note that a sequence is about to be closed after `computed` positions.

        `boundary`: of its newest snapshot after the prompt, which no later one will replace; 0 if there is none.
        """
        ...

    def unwanted(self, key: bytes) -> None:
        """Note that the snapshot with this key is about to be evicted and need not be stored."""
        ...

    def yield_blocks(self) -> bool:
        """Give up one load, because running sequences need its blocks; return False if there is none."""
        ...

    def lacks(self, block: bytes) -> MissReason | None:
        """Return why no store has a block of the leading group that no pool has; None if the stores do not know."""
        ...


class RecentKeys:
    """The most recently added keys."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        """Remember a key and forget the oldest one above the limit."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > REMEMBERED_KEYS:
            self._keys.popitem(last=False)
