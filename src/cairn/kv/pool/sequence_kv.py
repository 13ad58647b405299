"""A sequence's KV in three: the blocks that it holds, who computes what, and how far the stores have got with it."""

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
"""Keys that a `RecentKeys` holds."""

TierName = str
"""Tiers are a mapping of names to stores, the fastest first."""


BlockedOn = bytes | BlockPool | Literal["load"]
"""The key of a block that another computes or loads, a pool with too few blocks, or the load into its own tables."""


class Match(NamedTuple):
    """What the cache has of a context's tokens, and what its computation has to wait for."""

    covered: int
    """Leading tokens whose blocks the pools have; one token is left to compute."""
    missing: int
    """All other tokens."""
    blocked_on: BlockedOn | None = None


class Brought(NamedTuple):
    """A stretch of a context that a load brought up."""

    begin: int
    """Where it begins: the number of its first token."""
    end: int
    tier: TierName
    """The lowest that any of it came from."""


class BlockTable:
    """The blocks that a sequence holds, a list a cache group. Only the `Cache` changes it."""

    __slots__ = ("capacity", "groups", "published", "snapshots")

    def __init__(self, groups: int, spacing: int) -> None:
        self.groups: tuple[list[int], ...]
        """Ids of blocks in order; `NO_BLOCK` where a window has passed, a load needs nothing, or no state is kept."""
        self.published: list[int]
        """Leading blocks of each group that keys find, or that a window has passed; of states, that were computed."""
        self.capacity: int
        """Positions that every group covers."""
        self.snapshots = Snapshots(spacing)
        """Which states are kept."""
        self._clear(groups)

    def clear(self) -> None:
        """Hold nothing; whoever calls has given the blocks back."""
        self.snapshots.clear()
        self._clear(len(self.groups))

    def _clear(self, groups: int) -> None:
        self.groups = tuple([] for _ in range(groups))
        self.published = [0] * groups
        self.capacity = 0

    def measure(self, block_tokens: int) -> None:
        """The groups have grown."""
        self.capacity = min(len(blocks) for blocks in self.groups) * block_tokens


class Claim:
    """Who computes what: the blocks that a sequence brings for others, and what it waits for of theirs.

    Only the `Cache` and its `Waiters` change it.
    """

    __slots__ = ("blocks", "match", "tried", "wanted", "watched")

    def __init__(self) -> None:
        self.blocks = range(0)
        """Numbers of those that the sequence is computing or loading: others that need one of them may wait for it."""
        self.wanted = False
        """Whether a sequence has waited for what is being loaded into the tables of this one."""
        self.match: Match | None = None
        """What was found at the last look, while it waits and nothing has happened that could change it."""
        self.watched: tuple[bytes, ...] = ()
        """Keys that end this when they are settled: see `Waiters`."""
        self.tried = False
        """Whether a load was begun for it since it was open last."""


class StoreProgress:
    """How far a context has got on its way to the stores, and what came up from there.

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
        "stored",
    )

    def __init__(self, groups: int, durable: bool, stored: bool, once: bool) -> None:
        self.durable = durable
        """To be stored before those of which this is not said."""
        self.once = once
        """Whether nobody is known to go on with it: then it is the first to be evicted from stores."""
        self.stored = stored
        """Whether it may go to stores at all."""
        self.noted = [0] * groups
        """Leading chunks of each group about which was decided whether to store them."""
        self.breaks, self.looked = -1, -math.inf
        """How often a line of chunks had been broken, and the time, when that was decided anew from the first on."""
        self.loading = False
        """The sequence's tables are being filled from below."""
        self.declined = False
        """A load was not worth it, or took so long that computing was better."""
        self.brought: list[Brought] = []
        self.load_seconds = 0.0
        """From the decision to load until the last stretch lay in the pool."""

    def bring(self, begin: int, end: int, tier: TierName) -> None:
        """A load has brought tokens `begin` to `end` up. What an earlier one brought from there on was lost again."""
        if self.brought and self.brought[-1].end == begin and self.brought[-1].tier == tier:
            self.brought[-1] = self.brought[-1]._replace(end=end)
            return
        kept = [Brought(first, min(last, begin), where) for first, last, where in self.brought if first < begin]
        self.brought = [*kept, Brought(begin, end, tier)]

    def origin(self, covered: int) -> dict[TierName, int]:
        """How many of the first `covered` tokens each tier gave; the others were in the pool."""
        found: dict[TierName, int] = {"ram": 0, "disk": 0}
        for begin, end, tier in self.brought:
            found[tier] += max(0, min(end, covered) - begin)
        return found


class SequenceKV:
    """One sequence's KV: the keys of its full blocks, and three things that each have one owner.

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
    """What keeps KV beyond the pools and brings it back: `tiers.Tiers`."""

    def findable(self, seq_kv: SequenceKV, tokens: Sequence[int]) -> None:
        """More of this context's blocks can be found in the pools."""
        ...

    def load(self, seq_kv: SequenceKV, tokens: Sequence[int], hit: int, spare: int, most: int | None) -> bool:
        """Begin to bring up what follows the pools' `hit` blocks, if that is worth it; whether it was begun.

        `most`: how many tokens may be left to compute.
        """
        ...

    def stop(self, seq_kv: SequenceKV) -> None:
        """A context that was being loaded is closed."""
        ...

    def ended(self, seq_kv: SequenceKV, tokens: Sequence[int], boundary: int, computed: int) -> None:
        """A context is about to be closed of which so many positions were computed: no later snapshot takes the place
        of the one at this boundary any more; 0: there is none."""
        ...

    def unwanted(self, key: bytes) -> None:
        """The snapshot with this key is about to be forgotten, and need not be stored."""
        ...

    def yield_blocks(self) -> bool:
        """Give up one load, because running sequences need its blocks; False if there is none."""
        ...

    def lacks(self, block: bytes) -> MissReason | None:
        """Why a block of the leading group, which no pool has, comes from no store, as far as the stores know."""
        ...


class RecentKeys:
    """The keys that were added last."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        """Remember a key, in the place of the one added longest ago."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > REMEMBERED_KEYS:
            self._keys.popitem(last=False)
