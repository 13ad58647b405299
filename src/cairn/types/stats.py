"""What is told of KV: where a prompt's came from, why a part of it was missing, and what pools and stores hold.

Frozen msgspec structs like those of `cairn.types.request`: they cross the wire between worker and front as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
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
"""Why a block of a prompt had to be computed. A worker says

    evicted           it was stored, or in a pool above no store, and made room for others
    not stored yet    the pool gave it up, and it is on its way to the disk
    not stored        it was computed, also before a restart, and no store took it before it was gone
    damaged           what the disk had of it failed a check
    no snapshot       the KV is there, but the model has recurrent states, of which only some are kept
    faster to compute
    never seen        it is new, or so long ago that nothing is known of it

and the front, which knows the tenant's other contexts, may say `never seen` more exactly with one of the others. None
of them speaks of other tenants: what those have asked is not to be told."""


class Differs(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prompt leaves the nearest known context of the same tenant, and how both go on there."""

    position: int
    """Where the first token is that is another one."""
    known: str
    """The beginning of what was there before: a few dozen characters."""
    given: str
    """The beginning of what stands in the prompt."""


class Miss(msgspec.Struct, frozen=True, kw_only=True):
    """The first token of a prompt that no tier gave, where that is not in its last, incomplete block."""

    position: int
    """Where it is in the prompt."""
    reason: MissReason
    differs: Differs | None = None
    """With `different tokens`, `system text changed` and `template`."""


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """Where the KV of a prompt came from, in tokens. `computed + pool + ram + disk` is the prompt's length.

    Of a prompt that no step was needed for all counts as found: none of it was computed.
    """

    computed: int = 0
    pool: int = 0
    ram: int = 0
    disk: int = 0
    load: float = 0.0
    """Seconds from the decision to load until the last chunk that was used lay in the pool."""
    miss: Miss | None = None
    """None where everything was found but the last, incomplete block."""

    @property
    def cached(self) -> int:
        """Tokens that were not computed."""
        return self.pool + self.ram + self.disk


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """How many leading tokens of a context each tier has, every tier for itself."""

    pool: int = 0
    ram: int = 0
    disk: int = 0


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """What a look over the stored chunks found and removed."""

    checked: int = 0
    removed: int = 0
    """How many chunks went."""
    bytes: int = 0
    """What the removed chunks took."""
    unreadable: int = 0
    """Chunks that the disk did not give: they stay until it is asked again."""


class TakenIn(msgspec.Struct, frozen=True, kw_only=True):
    """What was taken of the KV in a file."""

    chunks: int = 0
    bytes: int = 0
    """Of the pages of those chunks."""
    ignored: int = 0
    """Chunks of another model, or of the same one under other arithmetic: they are of no use here."""
    refused: int = 0
    """Chunks that were damaged or of other tokens, and those for which there was no room."""


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """One store of KV now. Counters are totals since it was opened."""

    chunks: int = 0
    bytes: int = 0
    """What it takes, headers of files included."""
    budget: int = 0
    pinned: int = 0
    """Chunks that may not be evicted."""
    written: int = 0
    """How many bytes were written."""
    read: int = 0
    """How many bytes were read."""
    evicted: int = 0
    damaged: int = 0
    """Chunks that failed a check; they are gone."""
    refused: int = 0
    """Chunks that were not kept: no room, or the disk failed."""
    trouble: str = ""
    """Why it does not work now, as a sentence; empty when it does."""


class KvStats(msgspec.Struct, frozen=True, kw_only=True):
    """The stores below the pool. Counters are totals of one worker's life."""

    ram: TierStats | None = None
    """None where there is no such store."""
    disk: TierStats | None = None
    queued: int = 0
    """Chunks that wait to be written."""
    dropped: int = 0
    """Chunks that were given up before they were written: the queue was full, or the pool needed their blocks."""
    deferred: int = 0
    """Chunks that were not stored because the day's bytes were written."""
    loaded: int = 0
    """Tokens brought up into the pool."""
    load_seconds: float = 0.0
    """Time that contexts waited for what was brought up."""
    abandoned: int = 0
    """Loads that ended early: too slow, a chunk was gone, or the pool had no room."""


@dataclass(frozen=True, slots=True)
class GroupUse:
    """Blocks of one group's pool. `free + cached + held` is its size."""

    free: int
    cached: int
    held: int


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler now. Counters are totals since its start."""

    running: int
    waiting: int
    waiting_tokens: int
    groups: tuple[GroupUse, ...]
    """Blocks, a cache group."""
    prefix_queries: int
    """Prompt tokens looked up in the prefix index."""
    prefix_hits: int
    """Prompt tokens found there."""
    preemptions: int
    token_seconds: float = 0.0
    """How long a token of a prompt takes, as measured; 0 before any was."""
