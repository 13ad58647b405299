"""What keeps KV beyond the pool: chunks of four blocks under the key of their last block, behind one small seam. Of a
recurrent state a chunk is the last block alone.

A chunk belongs to one cache group (its chain of keys starts at a root that names the group). It is found by its key
and used only if its tokens are the ones asked for; any doubt is a miss. A store answers how many *leading* keys it
has, never which of them, so that a hole can not be read over.

A *tail* is the beginning of a chunk that is not whole yet: one to three blocks, or the state after them. It has the
key of its last block, which no whole chunk can have, since that counts all tokens before it. A store keeps no tail
beside a chunk that begins with the same blocks: whichever is longer replaces the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cairn.kv.tiers.reuse_hints import Standing
from cairn.types.model_spec import CHUNK_BLOCKS, CacheGroup
from cairn.types.stats import TakenIn, TierStats

HEAD_BYTES = 8
"""How much of a block's key tells that a chunk has that block, not as its last. A chunk's tokens are compared after."""
OVERHEAD = 8192
"""Bytes that a chunk as it is kept may have beyond its pages, at most."""


def chunk_pages(group: CacheGroup) -> int:
    """Pages in a chunk of the group: of a state group only the last, which is the state at the end of the chunk."""
    return 1 if group.kind == "state" else CHUNK_BLOCKS


def chunk_sizes(groups: Sequence[CacheGroup], block_bytes: Sequence[int]) -> tuple[int, ...]:
    """Bytes of the pages of one chunk of each group."""
    return tuple(chunk_pages(group) * size for group, size in zip(groups, block_bytes, strict=True))


@dataclass(frozen=True, slots=True)
class Chunk:
    """The KV of 64 tokens of one cache group, or the state after them; of a tail fewer tokens, in whole blocks."""

    key: bytes
    """The key of its last block, which covers every token up to the end of the chunk and everything that could change
    a number."""
    parent: bytes
    """Key of the chunk before it; empty for the first. Of a state: of the KV of the same tokens, without which it is of
    no use; where a model has none, of the state before it that is stored, if any."""
    tokens: tuple[int, ...]
    """The tokens themselves."""
    depth: int
    """Tokens before the chunk: what computing it again would need first. Of a state, those of the chunk too."""
    pages: bytes | memoryview
    """The blocks' pages, one after another, as `Engine.read_blocks` gave them."""
    group: int = 0
    """Number of its cache group: what the pages are made of. The key already tells groups apart."""
    heads: tuple[bytes, ...] = ()
    """The first `HEAD_BYTES` of the key of each block but the last. None of what earlier versions stored: such chunks
    are found whole or not at all."""
    once: bool = False
    """Of a context that nobody is known to go on with: the first to be evicted until somebody does."""


def spared(chunks: Sequence[Chunk]) -> list[Chunk]:
    """What may be kept although the first of these is refused: all but that one and what extends it."""
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
    """What a scrub found. Counts are chunks."""

    checked: int
    damaged: int
    """Removed, with what extended them."""
    unreadable: int
    """The disk did not give them; they stay until it is asked again."""


class Store(Protocol):
    """A tier. Any thread may call; no call raises for what a disk or a network does: it is a miss, counted."""

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        """How many of the first `keys` it has, without reading them: the length of the run that starts at the first."""
        ...

    def has(self, key: bytes) -> bool:
        """Whether a chunk is here; to ask is no use of it."""
        ...

    def kept_bytes(self, group: int, size: int) -> int:
        """About what a chunk of a group with so many bytes of pages takes here, headers included."""
        ...

    def match_within(self, keys: Sequence[bytes]) -> tuple[int, bytes] | None:
        """How many of these blocks, the first ones of one chunk in order, one stored chunk has most, and its key.

        None where none is known to have the first of them.
        """
        ...

    def fetch(self, key: bytes, tokens: Sequence[int], buffer: memoryview | None = None) -> Chunk | None:
        """The chunk, every check passed, if it begins with exactly `tokens`; None in any doubt.

        `buffer`: bytes that the store may write to, whatever comes of it, and whose content the pages may be: memory
        that was used before costs less than new memory.
        """
        ...

    def keep(self, chunks: Sequence[Chunk]) -> int:
        """Keep these, parents before children; how many leading ones are kept now. Returns when they are durable.

        Tails that one of them begins with go. A tail that a chunk which is here begins with counts as kept.

        The next one was refused, and counts with what extends it: the caller may offer the others (`spared`) again.
        """
        ...

    def drop(self, keys: Sequence[bytes]) -> int:
        """Forget these and everything that extends them, and remove their bytes; how many chunks went."""
        ...

    def pin(self, owner: str, keys: Sequence[bytes]) -> None:
        """Never evict these while `owner` pins them; they take the place of what it pinned before. Durable.

        A chunk is also pinned by the key of any block that it has.
        """
        ...

    def mark(self, keys: Sequence[bytes], standing: Standing) -> None:
        """How soon these may be evicted, also those that are kept later: a hint, which the next `fetch` of one ends."""
        ...

    def durable(self) -> DurableStore | None:
        """The store itself, with what it can do beside, where it outlives the process; else None."""
        ...

    def stats(self) -> TierStats:
        """What the store holds and has done so far."""
        ...

    def close(self) -> None:
        """Give the folder back. No call follows."""
        ...


class StoreNotes(Protocol):
    """What a store remembers for the next process. No call raises for what a disk does."""

    def recall_written(self) -> Sequence[tuple[float, int]]:
        """What `remember_written` was given last, by whichever process."""
        ...

    def remember_written(self, written: Sequence[tuple[float, int]]) -> None:
        """Remember when how many bytes were written: seconds since 1970 and bytes."""
        ...

    def recall_seen(self) -> bytes:
        """What `remember_seen` was given, by whichever process."""
        ...

    def remember_seen(self, records: bytes, *, anew: bool) -> None:
        """Remember which blocks were seen, beside those that are remembered; `anew`: in their place."""
        ...


class DurableStore(Store, Protocol):
    """A tier that outlives the process, and so has what other processes and other engines left there."""

    def drop_of_other_engines(self, keys: Callable[[bytes], Sequence[bytes]]) -> int:
        """Drop what `keys` says of the identity of each other engine that has chunks here, now or once the disk allows
        it; how many went."""
        ...

    def erase_of_model(self, model: bytes, salt: bytes, tokens: Sequence[int], keep: int) -> bool:
        """Remove what a model that is not served now has stored of a context beyond its first `keep` tokens; whether
        nothing of it can be read any more."""
        ...

    @property
    def notes(self) -> StoreNotes:
        """What it remembers beside its chunks."""
        ...

    def was_damaged(self, block: bytes) -> bool:
        """Whether a chunk with this block went of late because it failed a check."""
        ...

    def lingers(self, keys: Sequence[bytes]) -> bool:
        """Whether something of what was dropped is still there or may come back."""
        ...

    def unsaved(self, owner: str) -> bool:
        """Whether what `owner` pinned or unpinned last is not durable."""
        ...

    def paths(self, keys: Sequence[bytes]) -> list[Path]:
        """The files of those that are here, in this order."""
        ...

    def take_in(self, path: Path, keyed: Callable[[int, int, Sequence[int], memoryview], Chunk | None]) -> TakenIn:
        """Keep what a file has of KV, after every check. `keyed` makes the chunk of what a group, a depth, tokens and
        pages are."""
        ...

    def tend(self) -> None:
        """What has to be done now and then: about once a second, from a thread that may wait for the disk."""
        ...

    def scrub(self) -> Scrubbed:
        """Read and verify everything; what is damaged goes, with what extends it."""
        ...

    def prune(self, *, others: bool = False) -> int:
        """Remove what nobody used for the time to live, and with `others` all of other models; how many chunks went."""
        ...
