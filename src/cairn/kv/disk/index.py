"""The index of a disk store: which chunk extends which, pins, and the order of eviction. Pure; one thread at a time.

An id is a model's tag and a key, so chunks of many models can share an index. A chunk is *live* (it may be read) until
it is *deleted* (no lookup finds it; its file is about to be removed) and then forgotten. Its bytes count until then.

A live chunk is evictable if no other chunk, live or being written, extends it and nobody pins or holds it. Superseded
chunks (`Standing`) go first, then the cheapest to compute again per byte, in steps of two, and in each step the least
recently used; a chunk that waits for its next turn counts as used later.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from cairn.kv.disk.chunk_file import Name
from cairn.kv.tiers.store import HEAD_BYTES, Standing, Standings, Watch, later

KEY_BYTES = 32
"""Bytes of a chunk's key, which ends its id."""
CHEAP_DEPTH = 4096
"""Tokens of depth at which attention over the tokens before a chunk costs as much as the rest of computing it. A round
figure for small models; it only shapes the order of eviction."""
STATE_SAVES = 32
"""Approximate number of chunks that are computed again where a state is missing: half of those between two snapshots of
a long prompt. With this a state of the usual size is evicted at about the same time as its KV, which is of little use
without it."""
DOUBLE_SECONDS = 1800.0
"""How many seconds longer a chunk stays than one that costs half as much to compute: costly chunks outlast cheap ones,
but not for ever. Over days of agents' work, hours would cost more than they save, since abandoned chunks lie as deep as
used ones."""

WAITING_SECONDS = 3600.0
"""How many seconds longer a chunk stays that waits for the result of a call. One that waits longer is likely to wait
for ever."""


@dataclass(slots=True, eq=False)
class IndexEntry:
    """One chunk's file."""

    id: bytes
    parent: bytes
    """Id of the chunk that it extends; empty for the first of a chain."""
    name: Name
    disk: int
    """Bytes that it takes on the disk."""
    used: float
    """Last use, in seconds since 1970."""
    saved: float
    """The last use that the file's own time records."""
    live: bool = True
    going: bool = False
    """Whether it is deleted and a thread is removing its file now."""
    faults: int = 0
    """Consecutive reads that failed in the disk."""
    children: set[bytes] = field(default_factory=set)
    held: int = 0
    """Number of writers that need it."""
    pins: int = 0
    """Number of its blocks that are pinned, and of its children that have pins."""
    saves: int = 1
    """Approximate number of chunks that would have to be computed again without it."""

    @property
    def worth(self) -> float:
        """The time of its last use, plus `DOUBLE_SECONDS` for each doubling of its cost per byte."""
        dear = (CHEAP_DEPTH + self.name.depth) * self.saves
        return self.used + DOUBLE_SECONDS * math.frexp(dear / max(1, self.disk))[1]


class DiskIndex:
    """All chunks of a folder, their pins, and their order of eviction."""

    def __init__(self) -> None:
        self.bytes = 0
        """Bytes of the folder on the disk: chunks, deleted ones too, and other files."""
        self._entries: dict[bytes, IndexEntry] = {}
        self._pins: dict[str, frozenset[bytes]] = {}
        self._pinned: dict[bytes, int] = {}
        self.pinned = 0
        """Number of live chunks that a pin protects, directly or through a chunk that extends them. Counted with each
        change, since figures are asked for between steps."""
        self._order: list[tuple[float, float, bytes]] = []
        self.standings = Standings()
        self._deleted: dict[bytes, IndexEntry] = {}
        self._tags: dict[bytes, int] = {}
        """Chunks of each model, deleted ones too."""
        self._sizes: dict[bytes, int] = {}
        """Bytes on the disk of each model's chunks, deleted ones too."""
        self._pinned_tags = Counter[bytes]()
        """Pinned keys of each model, stored or not."""
        self._pinned_heads = Counter[bytes]()
        """Number of pinned blocks by tag and head."""
        self._chunks_by_head: dict[bytes, tuple[IndexEntry, ...]] = {}
        """Live chunks by tag and head of each block that they contain."""
        self._watched: tuple[bytes, Watch] | None = None
        """The tag of the chunks that are watched, and who is told."""

    def __len__(self) -> int:
        """Return the number of live chunks."""
        return len(self._entries) - len(self._deleted)

    @property
    def pinned_bytes(self) -> int:
        """Approximate bytes of all pinned chunks, stored or not.

        A missing one is taken to be of its model's mean size. A model without chunks counts nothing.
        """
        models = ((tag, count) for tag, count in self._pinned_tags.items() if tag in self._tags)
        return sum(count * self._sizes[tag] // self._tags[tag] for tag, count in models)

    def _protect(self, entry: IndexEntry, change: int) -> None:
        """Change the number of pins on a live chunk, and so on its ancestors: each counts its pinned children."""
        one: IndexEntry | None = entry
        while one is not None and change:
            before, one.pins = one.pins, one.pins + change
            change = bool(one.pins) - bool(before)
            self.pinned += change
            parent = self.get(one.parent)
            one = parent if parent is not None and one.id in parent.children else None

    def get(self, id: bytes) -> IndexEntry | None:
        """Return the chunk if it is live."""
        entry = self._entries.get(id)
        return entry if entry is not None and entry.live else None

    def within(self, ids: Iterable[bytes]) -> tuple[int, IndexEntry] | None:
        """Return the most leading blocks that one live chunk has, and that chunk.

        `ids`: of the blocks, in order. Return None if no chunk has the first.
        """
        found: tuple[int, IndexEntry] | None = None
        for count, id in enumerate(ids, 1):
            if not (having := self._chunks_by_head.get(_head(id))):
                break
            found = count, max(having, key=lambda one: (len(one.name.heads), one.used))
        return found

    def replaced(self, entry: IndexEntry) -> list[IndexEntry]:
        """Return the live tails that a chunk begins with."""
        beginnings = ((tag_and_head, self._chunks_by_head.get(tag_and_head, ())) for tag_and_head in _heads(entry))
        return [one for head, having in beginnings for one in having if _head(one.id) == head]

    def replaces(self, id: bytes) -> bool:
        """Return whether a live chunk begins with the tail of this id."""
        return any(one.id != id for one in self._chunks_by_head.get(_head(id), ()))

    def after(self, entry: IndexEntry, steps: int) -> IndexEntry | None:
        """Return the live chunk `steps` further in the chain; None if there is none or the chain branches."""
        found: IndexEntry | None = entry
        for _ in range(steps):
            if found is None or len(found.children) != 1:
                return None
            (id,) = found.children
            found = self.get(id)
        return found

    def known(self, id: bytes) -> bool:
        """Return whether the chunk is live or deleted: a file may have its name."""
        return id in self._entries

    def live(self) -> list[IndexEntry]:
        """Return all live chunks."""
        return [entry for entry in self._entries.values() if entry.live]

    def of_other_models(self, tags: Collection[bytes]) -> list[IndexEntry]:
        """Return all chunks without these tags, deleted ones too. Quick if there are none, since each drop asks."""
        if all(tag in tags for tag in self._tags):
            return []
        return [entry for entry in self._entries.values() if entry.name.tag not in tags]

    def add(self, entry: IndexEntry) -> None:
        """Add a chunk whose parent, if it has one, is live."""
        assert entry.id not in self._entries, "a chunk is added twice"
        if entry.parent:
            parent = self.get(entry.parent)
            assert parent is not None, "a chunk without its parent"
            parent.children.add(entry.id)
        self._entries[entry.id] = entry
        self._tags[entry.name.tag] = self._tags.get(entry.name.tag, 0) + 1
        self._sizes[entry.name.tag] = self._sizes.get(entry.name.tag, 0) + entry.disk
        self.bytes += entry.disk
        for head in (*_heads(entry), _head(entry.id)):
            self._chunks_by_head[head] = (*self._chunks_by_head.get(head, ()), entry)
        if self._pinned_heads:
            self._protect(entry, sum(head in self._pinned_heads for head in (*_heads(entry), _head(entry.id))))
        self._rank(entry)
        self._tell(entry, stored=True)

    def watch(self, tag: bytes, watch: Watch | None) -> None:
        """Tell of a model's blocks, as `WatchedStore` says."""
        self._watched = None if watch is None else (tag, watch)
        if watch is not None:
            for entry in chains(one for one in self.live() if one.name.tag == tag):
                self._tell(entry, stored=True)

    def _tell(self, entry: IndexEntry, *, stored: bool) -> None:
        """Tell that a chunk's blocks are here, or that those are gone which no other chunk has."""
        if self._watched is None or entry.name.tag != self._watched[0]:
            return
        heads = [*entry.name.heads, entry.name.key[:HEAD_BYTES]]
        if not stored:
            heads = [head for head in heads if entry.name.tag + head not in self._chunks_by_head]
        if heads:
            self._watched[1](stored, heads, entry.name.parent[:HEAD_BYTES])

    def use(self, entry: IndexEntry, now: float) -> None:
        """Record a use of a chunk."""
        if now > entry.used:
            entry.used = now
            self._rank(entry)

    def mark(self, ids: Iterable[bytes], standing: Standing) -> None:
        """Set the standing of chunks, also of those that are added later."""
        for id in self.standings.set(ids, standing):
            if (entry := self.get(id)) is not None:
                self._rank(entry)

    def hold(self, entry: IndexEntry) -> None:
        """Keep a chunk from eviction while a chunk that extends it is written."""
        entry.held += 1

    def release(self, entry: IndexEntry) -> None:
        """End a `hold`."""
        entry.held -= 1
        self._rank(entry)

    def victim(self) -> IndexEntry | None:
        """Return the next chunk to evict; None if nothing is evictable."""
        while self._order:
            *place, id = self._order[0]
            entry = self.get(id)
            if entry is not None and self._evictable(entry) and tuple(place) == self._place(entry):
                return entry
            heapq.heappop(self._order)
        return None

    def leaves(
        self, wanted: Callable[[IndexEntry], bool], among: Iterable[IndexEntry] | None = None
    ) -> list[IndexEntry]:
        """Return the evictable chunks that are wanted, of all or `among` those that are still live."""
        among = self.live() if among is None else (one for one in among if self.get(one.id) is one)
        return [entry for entry in among if self._evictable(entry) and wanted(entry)]

    def parents(self, entries: Iterable[IndexEntry]) -> list[IndexEntry]:
        """Return the live chunks that these extend, each once."""
        found = (self.get(id) for id in dict.fromkeys(entry.parent for entry in entries))
        return [entry for entry in found if entry is not None]

    def family(self, ids: Iterable[bytes]) -> list[IndexEntry]:
        """Return these live chunks and all that extend them, children before parents."""
        found: dict[bytes, IndexEntry] = {}
        waiting = list(ids)
        while waiting:
            entry = self.get(waiting.pop())
            if entry is not None and entry.id not in found:
                found[entry.id] = entry
                waiting += entry.children
        return sorted(found.values(), key=lambda entry: -entry.name.depth)

    def mark_deleted(self, entry: IndexEntry) -> None:
        """Hide a chunk from lookups; its bytes still count. Only the caller removes the file."""
        self._protect(entry, -entry.pins)
        entry.live, entry.going = False, True
        self._deleted[entry.id] = entry
        for head in (*_heads(entry), _head(entry.id)):
            if left := tuple(one for one in self._chunks_by_head[head] if one is not entry):
                self._chunks_by_head[head] = left
            else:
                del self._chunks_by_head[head]
        self._tell(entry, stored=False)
        parent = self._entries.get(entry.parent)
        if parent is not None:
            parent.children.discard(entry.id)
            # A use of a chunk is a use of its ancestors.
            parent.used = max(parent.used, entry.used)
            self._rank(parent)

    def deleted(self) -> list[IndexEntry]:
        """Return the deleted chunks whose files nobody is removing, deepest first. The caller removes them now."""
        left = sorted((one for one in self._deleted.values() if not one.going), key=lambda one: -one.name.depth)
        for one in left:
            one.going = True
        return left

    @property
    def lingering(self) -> Collection[bytes]:
        """Ids of chunks whose files still have to be removed."""
        return self._deleted.keys()

    def forget(self, entry: IndexEntry) -> None:
        """Forget a chunk whose file is gone. Ignore one that is forgotten, or of an index that was `emptied`."""
        if self._deleted.get(entry.id) is not entry:
            return
        del self._deleted[entry.id], self._entries[entry.id]
        self._tags[entry.name.tag] -= 1
        self._sizes[entry.name.tag] -= entry.disk
        if not self._tags[entry.name.tag]:
            del self._tags[entry.name.tag], self._sizes[entry.name.tag]
        self.bytes -= entry.disk

    def emptied(self) -> DiskIndex:
        """Return an index with the same pins and no chunks."""
        index = DiskIndex()
        index._watched = self._watched
        self._chunks_by_head.clear()
        for entry in self.live():
            self._tell(entry, stored=False)
        index.standings = self.standings
        for owner, ids in self._pins.items():
            index.pin(owner, ids)
        return index

    @property
    def pins(self) -> Mapping[str, frozenset[bytes]]:
        """The ids that each owner pins."""
        return self._pins

    def pin(self, owner: str, ids: Collection[bytes]) -> None:
        """Pin these ids instead of those that the owner pinned before."""
        old, new = self._pins.pop(owner, frozenset()), frozenset(ids)
        if new:
            self._pins[owner] = new
        # Only what differs: a pin is replaced after each turn of its agent, and most of it stays.
        for id in new - old:
            self._pinned[id] = self._pinned.get(id, 0) + 1
            if self._pinned[id] == 1:
                self._pin_block(id)
        for id in old - new:
            self._pinned[id] -= 1
            if not self._pinned[id]:
                del self._pinned[id]
                self._unpin_block(id)

    def _pin_block(self, id: bytes) -> None:
        self._pinned_tags[id[:-KEY_BYTES]] += 1
        self._pinned_heads[_head(id)] += 1
        if self._pinned_heads[_head(id)] == 1:
            for entry in self._chunks_by_head.get(_head(id), ()):
                self._protect(entry, 1)

    def _unpin_block(self, id: bytes) -> None:
        self._pinned_tags[id[:-KEY_BYTES]] -= 1
        self._pinned_heads[_head(id)] -= 1
        if not self._pinned_heads[_head(id)]:
            del self._pinned_heads[_head(id)]
            for entry in self._chunks_by_head.get(_head(id), ()):
                self._protect(entry, -1)
                self._rank(entry)

    def _evictable(self, entry: IndexEntry) -> bool:
        return entry.live and not entry.children and not entry.held and not entry.pins

    def _rank(self, entry: IndexEntry) -> None:
        """Put a chunk in its place in the order of eviction; its earlier places are skipped when they come up."""
        if self._evictable(entry):
            heapq.heappush(self._order, (*self._place(entry), entry.id))
            if len(self._order) > 64 + 4 * len(self._entries):
                self._order = [(*self._place(one), one.id) for one in self.live() if self._evictable(one)]
                heapq.heapify(self._order)

    def _place(self, entry: IndexEntry) -> tuple[float, float]:
        """Return a chunk's place in the order of eviction; among superseded ones, too, the oldest goes first."""
        return entry.worth + later(self.standings.of(entry.id), WAITING_SECONDS), entry.worth


def _head(id: bytes) -> bytes:
    """Return the tag and head of a block from its id."""
    return id[: HEAD_BYTES - KEY_BYTES]


def _heads(entry: IndexEntry) -> Iterator[bytes]:
    """Return an iterator over the tag and head of each block of a chunk but its last."""
    return (entry.name.tag + head for head in entry.name.heads)


def chains(entries: Iterable[IndexEntry]) -> Iterator[IndexEntry]:
    """Yield the chunks of complete chains, parents before children; the others are orphans.

    Depths must grow along a chain.
    """
    below: dict[bytes, list[IndexEntry]] = {}
    for entry in entries:
        below.setdefault(entry.parent, []).append(entry)
    waiting = below.pop(b"", [])
    while waiting:
        entry = waiting.pop()
        yield entry
        waiting += [one for one in below.pop(entry.id, []) if one.name.depth > entry.name.depth]
