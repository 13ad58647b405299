"""The interface of stores, which keep KV beyond the pool: chunks of four blocks under the key of their last block.

Of a recurrent state a chunk is the last block alone. A chunk belongs to one cache group (its chain of keys starts at a
root that names the group). It is found by its key and used only if its tokens are the ones asked for; any doubt is a
miss. A store answers how many *leading* keys it has, never which of them, so no hole can be read over.

A *tail* is the beginning of an unfinished chunk: one to three blocks, or the state after them. It has the key of its
last block, which no whole chunk can have, since a key covers all tokens before it. A store keeps no tail beside a chunk
that begins with the same blocks: the longer one replaces the other.

The *standing* of a chunk says who is likely to want it again. It shapes the order of eviction:

    superseded   its branch was rolled back or abandoned: evicted before all others
    once         nobody is known to continue its sequence, until it is used: evicted before others of its age
    waiting      its sequence ended in a tool call whose result is awaited: outlives others of its age
    idle         everything else

It is only a hint, kept in memory for a limited number of chunks, and never changes what is found or an answer.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from cairn.types.model_spec import CHUNK_BLOCKS, CacheGroup
from cairn.types.stats import ImportedKv, TierStats

Standing = Literal["superseded", "once", "idle", "waiting"]

MOST_STANDINGS = 1 << 16
"""Chunks whose standing is remembered: those of 4 million tokens."""


def later(standing: Standing, patience: float) -> float:
    """Return the recency bonus for a standing, in the unit of `patience`."""
    if standing == "superseded":
        return -math.inf
    return {"waiting": patience, "once": -patience}.get(standing, 0)


class Standings:
    """The standings of chunks, stored yet or not. The oldest are forgotten first."""

    def __init__(self, most: int = MOST_STANDINGS) -> None:
        self._of: OrderedDict[bytes, Standing] = OrderedDict()
        self._most = most

    def of(self, id: bytes) -> Standing:
        """Return the standing of a chunk; idle if nothing is known."""
        return self._of.get(id, "idle")

    def set(self, ids: Iterable[bytes], standing: Standing) -> list[bytes]:
        """Set the standing of chunks; return those whose standing changed."""
        changed = []
        for id in ids:
            if self._of.pop(id, "idle") != standing:
                changed.append(id)
            if standing != "idle":
                self._of[id] = standing
        while len(self._of) > self._most:
            changed.append(self._of.popitem(last=False)[0])
        return changed


Watch = Callable[[bool, Sequence[bytes], bytes], None]
"""Called with whether blocks came or went, their heads, each the parent of the next, and the head of the block before
them, empty for none. Called under a lock, from any thread."""

HEAD_BYTES = 8
"""Bytes of a block's *head*, the beginning of its key. By their heads a chunk's blocks before its last are found; its
tokens are compared afterwards."""
OVERHEAD = 8192
"""Most bytes that a stored chunk has beyond its pages."""


def chunk_pages(group: CacheGroup) -> int:
    """Return the pages in a chunk of the group; for a state group 1, the state at the end of the chunk."""
    return 1 if group.kind == "state" else CHUNK_BLOCKS


def chunk_sizes(groups: Sequence[CacheGroup], block_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes of the pages of one chunk of each group."""
    return tuple(chunk_pages(group) * size for group, size in zip(groups, block_bytes, strict=True))


@dataclass(frozen=True, slots=True)
class Chunk:
    """The KV of 64 tokens of one cache group, or the state after them; a tail has fewer tokens, in whole blocks."""

    key: bytes
    """Key of its last block, which covers every token up to the end of the chunk and everything that could change a
    number."""
    parent: bytes
    """Key of the chunk before it; empty for the first. For a state: key of the KV of the same tokens, without which it
    is useless; in a model without KV, key of the stored state before it, if any."""
    tokens: tuple[int, ...]
    """Token ids of the chunk."""
    depth: int
    """Tokens before the chunk, which would have to be computed first to compute it again. For a state, including those
    of the chunk."""
    pages: bytes | memoryview
    """The blocks' pages, one after another, as `Engine.read_blocks` returned them."""
    group: int = 0
    """Number of its cache group, which determines the layout of the pages. The key already tells groups apart."""
    heads: tuple[bytes, ...] = ()
    """The head of each block but the last. Empty for chunks of earlier versions: those are found whole or not at
    all."""
    once: bool = False
    """Whether nobody is known to continue its sequence: evicted first until somebody does."""


def spared(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks that may be kept although the first is refused: all but that one and those that extend it."""
    gone = {chunk.key for chunk in chunks[:1]}
    rest = []
    for chunk in chunks[1:]:
        if chunk.parent in gone:
            gone.add(chunk.key)
        else:
            rest.append(chunk)
    return rest


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """The result of a scrub. Counts are chunks."""

    checked: int
    damaged: int
    """Removed, with the chunks that extended them."""
    unreadable: int
    """Chunks that the disk failed to read; they stay until it is tried again."""


class Store(Protocol):
    """A tier. Any thread may call. No call raises for a failing disk or network: that is a miss, and counted."""

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        """Return how many leading `keys` the store has, without reading the chunks."""
        ...

    def has(self, key: bytes) -> bool:
        """Return whether the store has a chunk; this does not count as a use."""
        ...

    def kept_bytes(self, group: int, size: int) -> int:
        """Return about how many bytes a chunk takes here, headers included.

        `size`: bytes of its pages in the pool.
        """
        ...

    def match_within(self, keys: Sequence[bytes]) -> tuple[int, bytes] | None:
        """Return the most leading blocks of a chunk that one stored chunk has, and that chunk's key.

        `keys`: of the blocks, in order. Return None if no stored chunk is known to have the first of them.
        """
        ...

    def fetch(self, key: bytes, tokens: Sequence[int], buffer: memoryview | None = None) -> Chunk | None:
        """Return the verified chunk if it begins with exactly `tokens`; None in any doubt.

        `buffer`: memory that the store may overwrite in any case, and that the pages may lie in; reused memory costs
        less than new memory.
        """
        ...

    def keep(self, chunks: Sequence[Chunk]) -> int:
        """Store chunks durably, parents before children; return how many leading ones are kept.

        Tails that one of them begins with are removed. A tail that a stored chunk begins with counts as kept. The next
        chunk was refused and is counted with those that extend it: the caller may offer the others (`spared`) again.
        """
        ...

    def drop(self, keys: Sequence[bytes]) -> int:
        """Remove these chunks and all that extend them; return how many were removed."""
        ...

    def pin(self, owner: str, keys: Sequence[bytes]) -> None:
        """Never evict these chunks while `owner` pins them, instead of those that it pinned before. Durable.

        The key of any block of a chunk pins the chunk.
        """
        ...

    def mark(self, keys: Sequence[bytes], standing: Standing) -> None:
        """Set the standing of chunks, also of those kept later; the next `fetch` of a chunk resets it."""
        ...

    def durable(self) -> DurableStore | None:
        """Return the store itself, with its further methods, if it outlives the process; else None."""
        ...

    def stats(self) -> TierStats:
        """Return the store's contents and counters."""
        ...

    def close(self) -> None:
        """Release the folder. No call follows."""
        ...


@runtime_checkable
class WatchedStore(Store, Protocol):
    """A tier that says which blocks come and go."""

    def watch(self, watch: Watch | None) -> None:
        """Tell `watch` of all blocks that are here, and from now on of those that come and go; None: tell nobody."""
        ...


class StoreNotes(Protocol):
    """Notes that a store keeps for the next process. No call raises for a failing disk."""

    def recall_written(self) -> Sequence[tuple[float, int]]:
        """Return what the last `remember_written` of any process stored."""
        ...

    def remember_written(self, written: Sequence[tuple[float, int]]) -> None:
        """Store when how many bytes were written: seconds since 1970 and bytes."""
        ...

    def recall_seen(self) -> bytes:
        """Return what `remember_seen` stored, in any process."""
        ...

    def remember_seen(self, records: bytes, *, anew: bool) -> None:
        """Append records of seen blocks to those that are stored; `anew`: replace them."""
        ...


@runtime_checkable
class SettlingStore(Store, Protocol):
    """A tier whose chunks are on their way for a while, and to which others add theirs."""

    def settle(self, seconds: float) -> bool:
        """Wait until chunks that were kept are there and others' are known; return False after `seconds`."""
        ...


class DurableStore(Store, Protocol):
    """A tier that outlives the process, and so holds chunks of other processes and engines."""

    def drop_of_other_engines(self, keys: Callable[[bytes], Sequence[bytes]]) -> int:
        """Drop chunks of other engines, now or once the disk allows it; return how many were dropped.

        `keys` returns the keys to drop for an engine's identity.
        """
        ...

    def erase_of_model(
        self,
        model: bytes,
        salt: bytes,
        tokens: Sequence[int],
        keep: int,
        searched: Collection[bytes] | None = None,
    ) -> bool:
        """Remove a context, beyond its first `keep` tokens, of a model that is not served now.

        With `searched`, and if no store is named after the model, remove all chunks of these tokens from all stores,
        whatever salt they have: the salt may stand for unknown adapters. Stores of other models in `searched` are left
        to their owners. Return whether nothing of the context can be read any more.
        """
        ...

    @property
    def notes(self) -> StoreNotes:
        """The notes kept beside its chunks."""
        ...

    def was_damaged(self, block: bytes) -> bool:
        """Return whether a chunk with this block was removed lately because it failed a check."""
        ...

    def lingers(self, keys: Sequence[bytes]) -> bool:
        """Return whether a dropped chunk is still there or may come back."""
        ...

    def unsaved(self, owner: str) -> bool:
        """Return whether the last pin or unpin of `owner` is not durable yet."""
        ...

    def paths(self, keys: Sequence[bytes]) -> list[Path]:
        """Return the files of those chunks that are here, in this order."""
        ...

    def import_kv(
        self,
        path: Path,
        keyed: Callable[[int, int, Sequence[int], memoryview], Chunk | None],
        refuse: Callable[[Chunk], None],
    ) -> ImportedKv:
        """Import the KV of a file, after every check of its chunks.

        `keyed` makes the chunk of a group, a depth, tokens and pages; None to refuse it. `refuse` is called with each
        of these chunks that the store does not take.
        """
        ...

    def tend(self) -> None:
        """Do periodic upkeep. Call it about once a second, from a thread that may wait for the disk."""
        ...

    def scrub(self) -> Scrubbed:
        """Read and verify everything; remove damaged chunks and those that extend them."""
        ...

    def prune(self, *, others: bool = False) -> int:
        """Remove chunks unused for the time to live, and with `others` all of other models; return how many."""
        ...
