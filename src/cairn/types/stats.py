"""KV statistics: the source of each prompt's tokens, reasons of misses, and usage of pools and stores.

Frozen msgspec structs like those of `cairn.types.request`: they cross the wire between worker and front as they are.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MissReason = Literal[
    "different tokens",
    "system text changed",
    "template",
    "evicted",
    "not stored yet",
    "not stored",
    "damaged",
    "no snapshot",
    "model changed",
    "never seen",
    "faster to compute",
]
"""Why a block of a prompt had to be computed. A worker reports one of these:

    evicted           it was stored, or in a pool without stores, and was evicted
    not stored yet    it left the pool and is queued to be written to disk
    not stored        it was computed (perhaps before a restart) and lost before a store took it
    damaged           its copy on disk failed a check
    no snapshot       the KV exists, but the model has recurrent states and no snapshot is kept there
    faster to compute
    never seen        it is new, or forgotten

The front, which knows the tenant's other contexts, may replace `never seen` by one of the other reasons. No reason
reveals what other tenants have asked."""


class Differs(msgspec.Struct, frozen=True, kw_only=True):
    """The first difference between a prompt and the nearest known context of the same tenant."""

    position: int
    """Position of the first differing token."""
    known: str
    """The known context's text from there on: a few dozen characters."""
    given: str
    """The prompt's text from there on."""


class Miss(msgspec.Struct, frozen=True, kw_only=True):
    """The first token of a prompt that no tier had. The last, incomplete block does not count."""

    position: int
    """Its position in the prompt."""
    reason: MissReason
    differs: Differs | None = None
    """Set with `different tokens`, `system text changed` and `template`."""


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """Sources of a prompt's KV, in tokens. `computed + pool + ram + disk + shared` is the prompt's length.

    A prompt that needed no step counts as cached as a whole.
    """

    computed: int = 0
    pool: int = 0
    ram: int = 0
    disk: int = 0
    shared: int = 0
    """From the store that all replicas share."""
    load: float = 0.0
    """Seconds from the decision to load until the last chunk used was in the pool."""
    miss: Miss | None = None
    """None if everything but the last, incomplete block was found."""

    @property
    def cached(self) -> int:
        """Tokens that were not computed."""
        return self.pool + self.ram + self.disk + self.shared


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """Leading tokens of a context that each tier has, counted independently."""

    pool: int = 0
    ram: int = 0
    disk: int = 0
    shared: int = 0


Medium = Literal["GPU", "CPU", "DISK"]
"""Where KV is, in the words of vLLM's events: the pool on any device, memory below it, the disk."""


class BlockChange(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one context that a tier has now, or has no longer."""

    medium: Medium
    blocks: tuple[int, ...]
    """Hashes (`cluster.kv_events.block_hash`), each the parent of the next."""
    stored: bool
    parent: int | None = None
    """The block before the first; None at the beginning of a context, or if unknown."""


class BlockChanges(msgspec.Struct, frozen=True, array_like=True):
    """How the blocks that a worker holds changed since it was last asked."""

    changes: tuple[BlockChange, ...] = ()
    whole: bool = False
    """Whether they are all that it holds, and nothing said before counts."""


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a scan over the stored chunks."""

    checked: int = 0
    removed: int = 0
    """Chunks removed."""
    bytes: int = 0
    """Bytes freed."""
    unreadable: int = 0
    """Chunks that could not be read; they are kept and tried again next time."""


class ImportedKv(msgspec.Struct, frozen=True, kw_only=True):
    """Result of importing KV from a file."""

    chunks: int = 0
    bytes: int = 0
    """Bytes of the imported chunks' pages."""
    ignored: int = 0
    """Chunks of another model, or of the same one under other arithmetic."""
    refused: int = 0
    """Chunks that were damaged, had other tokens, or found no room."""


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one KV store. Counters are totals since it was opened."""

    chunks: int = 0
    bytes: int = 0
    """Bytes used, file headers included."""
    budget: int = 0
    pinned: int = 0
    """Chunks that may not be evicted."""
    written: int = 0
    """Bytes written."""
    read: int = 0
    """Bytes read."""
    evicted: int = 0
    damaged: int = 0
    """Chunks removed because they failed a check."""
    refused: int = 0
    """Chunks that were not stored: no room, or the disk failed."""
    trouble: str = ""
    """Why the store does not work now, as a sentence; empty if it works."""


class KvStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the stores below the pool. Counters are totals of one worker's life."""

    ram: TierStats | None = None
    """None without such a store."""
    disk: TierStats | None = None
    shared: TierStats | None = None
    queued: int = 0
    """Chunks that wait to be written."""
    dropped: int = 0
    """Chunks dropped before they were written: the queue was full, or the pool needed their blocks."""
    deferred: int = 0
    """Chunks not stored because the daily write limit was reached."""
    loaded: int = 0
    """Tokens loaded into the pool."""
    load_seconds: float = 0.0
    """Seconds that contexts waited for loads."""
    abandoned: int = 0
    """Loads that ended early: too slow, a chunk missing, or no room in the pool."""


class GroupUse(msgspec.Struct, frozen=True):
    """Blocks of one group's pool. `free + cached + held` is its size."""

    free: int
    cached: int
    held: int


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the scheduler. Counters are totals since its start."""

    running: int
    waiting: int
    waiting_tokens: int
    groups: tuple[GroupUse, ...]
    """Block usage of each cache group."""
    prefix_queries: int
    """Prompt tokens looked up in the prefix index."""
    prefix_hits: int
    """Prompt tokens found there."""
    preemptions: int
    token_seconds: float = 0.0
    """Measured seconds for each prompt token; 0 before the first measurement."""
    accepted: int = 0
    """Guesses that were right and are in an answer."""
    rejected: int = 0
    """All other guesses."""
