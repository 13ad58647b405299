"""What a disk store holds, as its index: who extends whom, what is pinned, what goes first. Pure; one thread at a time.

An id is a model's tag and a key, so chunks of many models stand side by side. A chunk is *live* (it may be read) until
it is *deleted* (nobody finds it; its file is about to go) and then forgotten. Its bytes count until then.

Evictable is a live chunk that no other live or coming chunk extends and that nobody pins or holds. Of those go first
what is superseded (`reuse_hints`), then the cheapest to compute again per byte, in steps of two, and in each step the
one that was used longest ago; one that waits for its next turn counts as used later.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from cairn.kv.disk.chunk_file import Name
from cairn.kv.tiers.store import HEAD_BYTES, Standing, Standings, later

KEY_BYTES = 32
"""How long a chunk's key is, which ends its id."""
CHEAP_DEPTH = 4096
"""Tokens of depth at which attention over what is before a chunk costs as much as all the rest of computing it.

A round figure for small models; it only shapes the order of eviction.
"""
STATE_SAVES = 32
"""Chunks that are computed again where a state is missing, about: half of those between two snapshots of a long prompt.
With that a state of the usual size goes about when the KV does that it belongs to, which is of little use without."""
DOUBLE_SECONDS = 1800.0
"""How much longer a chunk stays than one that is half as dear: what is dear outlasts what is cheap, not for ever. Over
days of agents hours of it cost more than they save, for what is left lies deep as often as what is used."""

WAITING_SECONDS = 3600.0
"""How much longer a chunk stays that waits for the result of a call. What waits longer is likely to wait for ever."""


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
    """Seconds since 1970 of the last use."""
    saved: float
    """The use that the file's own time remembers."""
    live: bool = True
    going: bool = False
    """Deleted, and somebody is removing the file now."""
    faults: int = 0
    """Reads that failed in the disk."""
    children: set[bytes] = field(default_factory=set)
    held: int = 0
    """How many are writing something that needs it."""
    saves: int = 1
    """Chunks that would have to be computed again for it, about."""

    @property
    def worth(self) -> float:
        """The time of its last use, later by some hours for each time that a byte of it is twice as dear to compute."""
        dear = (CHEAP_DEPTH + self.name.depth) * self.saves
        return self.used + DOUBLE_SECONDS * math.frexp(dear / max(1, self.disk))[1]


class DiskIndex:
    """All chunks of a folder, who pins them, and in which order they may go."""

    def __init__(self) -> None:
        self.bytes = 0
        """What the folder takes on the disk: chunks, deleted ones too, and files that are no chunks."""
        self._entries: dict[bytes, IndexEntry] = {}
        self._pins: dict[str, frozenset[bytes]] = {}
        self._pinned: dict[bytes, int] = {}
        self._protected: set[bytes] | None = None
        """What `pinned` counts, while it is known: figures are asked for between steps."""
        self._order: list[tuple[float, float, bytes]] = []
        self.standings = Standings()
        self._deleted: dict[bytes, IndexEntry] = {}
        self._tags: dict[bytes, int] = {}
        """How many chunks each model has, deleted ones too."""
        self._sizes: dict[bytes, int] = {}
        """Bytes on the disk of each model's chunks, deleted ones too."""
        self._pinned_tags = Counter[bytes]()
        """How many chunks of each model are pinned, here or not."""
        self._pinned_heads = Counter[bytes]()
        """How many pins there are of blocks by the beginnings of their ids."""
        self._having: dict[bytes, tuple[IndexEntry, ...]] = {}
        """Live chunks by the beginnings of the ids of the blocks that they have."""

    def __len__(self) -> int:
        """How many chunks are live."""
        return len(self._entries) - len(self._deleted)

    @property
    def pinned(self) -> int:
        """Live chunks that a pin protects, directly or through what extends them."""
        if self._protected is None:
            self._protected = set()
            self._protect(self._pinned)
        return len(self._protected)

    @property
    def pinned_bytes(self) -> int:
        """About what all that is pinned takes once it is there: what is not is like the rest of its model, of which
        nothing is known while there is none."""
        models = ((tag, count) for tag, count in self._pinned_tags.items() if tag in self._tags)
        return sum(count * self._sizes[tag] // self._tags[tag] for tag, count in models)

    def _protect(self, ids: Iterable[bytes]) -> None:
        """Count these pinned chunks, as far as they are live, and what they extend, if that is counted at all."""
        if self._protected is None:
            return
        for id in ids:
            for entry in self._having.get(_head(id), ()):
                one: IndexEntry | None = entry
                while one is not None and one.id not in self._protected:
                    self._protected.add(one.id)
                    one = self.get(one.parent)

    def get(self, id: bytes) -> IndexEntry | None:
        """The chunk if it is live."""
        entry = self._entries.get(id)
        return entry if entry is not None and entry.live else None

    def within(self, ids: Iterable[bytes]) -> tuple[int, IndexEntry] | None:
        """How many of these blocks, the first ones of one chunk in order, one live chunk has most; and that chunk."""
        found: tuple[int, IndexEntry] | None = None
        for count, id in enumerate(ids, 1):
            if not (having := self._having.get(_head(id))):
                break
            found = count, max(having, key=lambda one: (len(one.name.heads), one.used))
        return found

    def replaced(self, entry: IndexEntry) -> list[IndexEntry]:
        """The live tails that a chunk begins with."""
        beginnings = ((tag_and_head, self._having.get(tag_and_head, ())) for tag_and_head in _heads(entry))
        return [one for head, having in beginnings for one in having if _head(one.id) == head]

    def replaces(self, id: bytes) -> bool:
        """Whether a live chunk begins with the tail of this id."""
        return any(one.id != id for one in self._having.get(_head(id), ()))

    def after(self, entry: IndexEntry, steps: int) -> IndexEntry | None:
        """The live chunk that extends this one so many steps on; None where that is none, or one of several."""
        found: IndexEntry | None = entry
        for _ in range(steps):
            if found is None or len(found.children) != 1:
                return None
            (id,) = found.children
            found = self.get(id)
        return found

    def known(self, id: bytes) -> bool:
        """Whether it is live or deleted: a file may have its name."""
        return id in self._entries

    def live(self) -> list[IndexEntry]:
        """All live chunks."""
        return [entry for entry in self._entries.values() if entry.live]

    def of_other_models(self, tags: Collection[bytes]) -> list[IndexEntry]:
        """All chunks of models that are none of these, deleted ones too. Quick where there are none: each drop asks."""
        if all(tag in tags for tag in self._tags):
            return []
        return [entry for entry in self._entries.values() if entry.name.tag not in tags]

    def add(self, entry: IndexEntry) -> None:
        """A chunk whose parent, if it has one, is live."""
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
            self._having[head] = (*self._having.get(head, ()), entry)
        if self._is_pinned(entry):
            self._protect([entry.id])
        self._rank(entry)

    def use(self, entry: IndexEntry, now: float) -> None:
        """Remember that a chunk was used."""
        if now > entry.used:
            entry.used = now
            self._rank(entry)

    def mark(self, ids: Iterable[bytes], standing: Standing) -> None:
        """These chunks stand so from now on, those that come later too."""
        for id in self.standings.set(ids, standing):
            if (entry := self.get(id)) is not None:
                self._rank(entry)

    def hold(self, entry: IndexEntry) -> None:
        """Keep it from eviction while something that extends it is written."""
        entry.held += 1

    def release(self, entry: IndexEntry) -> None:
        """The end of a `hold`."""
        entry.held -= 1
        self._rank(entry)

    def victim(self) -> IndexEntry | None:
        """What to evict next."""
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
        """Evictable chunks of this kind, of all or of those given that are still here."""
        among = self.live() if among is None else (one for one in among if self.get(one.id) is one)
        return [entry for entry in among if self._evictable(entry) and wanted(entry)]

    def parents(self, entries: Iterable[IndexEntry]) -> list[IndexEntry]:
        """The live chunks that these extend, each once."""
        found = (self.get(id) for id in dict.fromkeys(entry.parent for entry in entries))
        return [entry for entry in found if entry is not None]

    def family(self, ids: Iterable[bytes]) -> list[IndexEntry]:
        """These live chunks and all that extend them, what extends before what is extended."""
        found: dict[bytes, IndexEntry] = {}
        waiting = list(ids)
        while waiting:
            entry = self.get(waiting.pop())
            if entry is not None and entry.id not in found:
                found[entry.id] = entry
                waiting += entry.children
        return sorted(found.values(), key=lambda entry: -entry.name.depth)

    def mark_deleted(self, entry: IndexEntry) -> None:
        """Nobody finds it any more; its bytes still count. The caller removes the file, and nobody else does."""
        entry.live, entry.going = False, True
        self._deleted[entry.id] = entry
        for head in (*_heads(entry), _head(entry.id)):
            if left := tuple(one for one in self._having[head] if one is not entry):
                self._having[head] = left
            else:
                del self._having[head]
        if self._protected is not None and entry.id in self._protected:
            self._protected = None
        parent = self._entries.get(entry.parent)
        if parent is not None:
            parent.children.discard(entry.id)
            # Whoever used a chunk used what it extends.
            parent.used = max(parent.used, entry.used)
            self._rank(parent)

    def deleted(self) -> list[IndexEntry]:
        """Chunks whose files still have to go and nobody removes, deepest first. The caller removes them now."""
        left = sorted((one for one in self._deleted.values() if not one.going), key=lambda one: -one.name.depth)
        for one in left:
            one.going = True
        return left

    @property
    def lingering(self) -> Collection[bytes]:
        """Ids of chunks whose files still have to go."""
        return self._deleted.keys()

    def forget(self, entry: IndexEntry) -> None:
        """Its file is gone. A second time does nothing, nor does one that was here before this was `emptied`."""
        if self._deleted.get(entry.id) is not entry:
            return
        del self._deleted[entry.id], self._entries[entry.id]
        self._tags[entry.name.tag] -= 1
        self._sizes[entry.name.tag] -= entry.disk
        if not self._tags[entry.name.tag]:
            del self._tags[entry.name.tag], self._sizes[entry.name.tag]
        self.bytes -= entry.disk

    def emptied(self) -> DiskIndex:
        """One that pins the same and has no chunks."""
        index = DiskIndex()
        index.standings = self.standings
        for owner, ids in self._pins.items():
            index.pin(owner, ids)
        return index

    @property
    def pins(self) -> Mapping[str, frozenset[bytes]]:
        """What each owner pins."""
        return self._pins

    def pin(self, owner: str, ids: Collection[bytes]) -> None:
        """These instead of what the owner pinned before."""
        old = self._pins.pop(owner, frozenset())
        if ids:
            self._pins[owner] = frozenset(ids)
        for id in self._pins.get(owner, frozenset()):
            self._pinned[id] = self._pinned.get(id, 0) + 1
            self._pinned_tags[id[:-KEY_BYTES]] += self._pinned[id] == 1
            self._pinned_heads[_head(id)] += self._pinned[id] == 1
        for id in old:
            self._pinned[id] -= 1
            if not self._pinned[id]:
                del self._pinned[id]
                self._pinned_tags[id[:-KEY_BYTES]] -= 1
                self._pinned_heads[_head(id)] -= 1
                if not self._pinned_heads[_head(id)]:
                    del self._pinned_heads[_head(id)]
                self._protected = None
                for entry in self._having.get(_head(id), ()):
                    self._rank(entry)
        self._protect(ids)

    def _is_pinned(self, entry: IndexEntry) -> bool:
        """Whether a pin names the chunk, or a block that it has."""
        heads = self._pinned_heads
        return entry.id in self._pinned or (bool(heads) and any(head in heads for head in _heads(entry)))

    def _evictable(self, entry: IndexEntry) -> bool:
        return entry.live and not entry.children and not entry.held and not self._is_pinned(entry)

    def _rank(self, entry: IndexEntry) -> None:
        """Put it where it belongs among what may go. Places that it had before are passed over when they come up."""
        if self._evictable(entry):
            heapq.heappush(self._order, (*self._place(entry), entry.id))
            if len(self._order) > 64 + 4 * len(self._entries):
                self._order = [(*self._place(one), one.id) for one in self.live() if self._evictable(one)]
                heapq.heapify(self._order)

    def _place(self, entry: IndexEntry) -> tuple[float, float]:
        """Where it belongs among what may go; of what is superseded, too, the oldest goes first."""
        return entry.worth + later(self.standings.of(entry.id), WAITING_SECONDS), entry.worth


def _head(id: bytes) -> bytes:
    """Return the beginning of the id of a block, or of a chunk by its last one."""
    return id[: HEAD_BYTES - KEY_BYTES]


def _heads(entry: IndexEntry) -> Iterator[bytes]:
    """Yield the beginnings of the ids of the blocks that a chunk has beside its last."""
    return (entry.name.tag + head for head in entry.name.heads)


def chains(entries: Iterable[IndexEntry]) -> Iterator[IndexEntry]:
    """Those that hang on the first chunk of a chain, parents before children. The rest are orphans.

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
