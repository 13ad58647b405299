"""The blocks of one cache group: who holds each, its key, and the order of eviction.

    free     nobody holds it and no key finds it
    cached   nobody holds it and its key finds it; evicted, least recently used first, when no free block is left
    held     at least one block table names it, whether it is published (has a key) or not

`free + cached + held` is always the size of the pool.

No block is evicted before the blocks that extend it, and no tree is needed for that: a table that holds a block holds
every block before it too, and releases them last to first. So in the order of last use a block comes after all blocks
that extend it, and the least recently used cached block is a leaf.

When a sequence ends, the first tokens of its unfinished block may be published too: a *part*. No table names a part
again. A sequence that goes on with the same tokens gets a copy of it, as far as they agree (`nearest`). A part is
evicted as soon as another published block begins with it, so under one parent no part is a prefix of another block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from cairn.types.stats import GroupUse
from cairn.types.step import NO_BLOCK


class Published(NamedTuple):
    """The content of a published block: its tokens, and the key that covers all tokens up to its end."""

    key: bytes
    tokens: tuple[int, ...]
    """Tokens of this block; a part has fewer than the block has slots."""
    parent: bytes
    """Key of the block before it; empty if the block is never looked up by its first tokens."""


class Copy(NamedTuple):
    """An order to copy a block's content to another block of the same group."""

    group: int
    source: int
    target: int


class BlockPool:
    """`size` blocks, numbered from 0. Every operation is O(1) a block."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a block pool needs at least one block, got {size}")
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._holders = [0] * size
        self._published: list[Published | None] = [None] * size
        self._index: dict[bytes, int] = {}
        self._after: dict[bytes, list[tuple[tuple[int, ...], int]]] = {}
        """The published blocks that follow each key, with their tokens, by which they are ordered."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.leaving: Callable[[bytes], None] = lambda key: None
        """Called with the key of a published block just before its eviction, while it can still be found and read."""
        self.watch: Callable[[bool, Published], None] | None = None
        """Called with whether a block was published or evicted, and what it holds; None: nobody follows."""

    def use(self) -> GroupUse:
        """Return how many blocks are `free`, `cached` and `held`."""
        free, cached = len(self._free), len(self._cached)
        return GroupUse(free, cached, self.size - free - cached)

    @property
    def free(self) -> int:
        """Number of blocks that nobody holds and no key finds."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Number of published blocks that nobody holds."""
        return len(self._cached)

    @property
    def held(self) -> int:
        """Number of blocks that at least one table names."""
        return self.size - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Number of blocks that `take` can give now."""
        return len(self._free) + len(self._cached)

    def holders(self, block: int) -> int:
        """Return how many tables name the block."""
        return self._holders[block]

    def knows(self, key: bytes) -> bool:
        """Return whether a block is published under this key."""
        return key in self._index

    def all_published(self) -> list[Published]:
        """Return what all published blocks hold, each after the one that it extends."""
        blocks = (self._published[block] for block in self._index.values())
        return [one for one in blocks if one is not None]

    def published(self, block: int) -> Published | None:
        """Return the block's published content; None if it is not published."""
        return self._published[block]

    def take(self, count: int) -> list[int]:
        """Return `count` unpublished blocks, held once each. Raise `MemoryError` if fewer are available."""
        if count > self.available:
            raise MemoryError(f"{count} blocks wanted, {self.available} available")
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def hold(self, block: int) -> None:
        """Name a held or cached block in one more table."""
        if self._holders[block] == 0:
            if self._published[block] is None:
                raise RuntimeError(f"block {block} is free and cannot be shared")
            del self._cached[block]
        self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Name the blocks in one table less. Pass a table's blocks last to first: see the module's docstring."""
        for block in blocks:
            if self._holders[block] < 1:
                raise RuntimeError(f"block {block} was given back twice")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if self._published[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def find(self, key: bytes, tokens: Sequence[int]) -> int | None:
        """Return the block published under `key` if it holds exactly `tokens`; do not hold it."""
        block = self._index.get(key)
        if block is None:
            return None
        published = self._published[block]
        return block if published is not None and published.tokens == tuple(tokens) else None

    def publish(self, block: int, key: bytes, tokens: Sequence[int], parent: bytes = b"") -> int | None:
        """Let `key` find a held, fully computed block; return the block that the table must name from now on.

        If the same content was published before, that block is held instead and `block` is released, so that equal
        prefixes are stored once. Return None and change nothing if the key stands for other tokens. With `parent`, the
        key of the block before it, the block is also found by its first tokens.
        """
        if self._holders[block] < 1 or self._published[block] is not None:
            raise RuntimeError(f"block {block} cannot be published: it is not held or has a key already")
        if key not in self._index:
            published = self._published[block] = Published(key, tuple(tokens), parent)
            self._index[key] = block
            if parent:
                self._insert(block, published)
            if self.watch is not None:
                self.watch(True, published)
            return block
        twin = self.find(key, tokens)
        if twin is not None:
            self.hold(twin)
            self.release((block,))
        return twin

    def publish_part(self, block: int, key: bytes, tokens: Sequence[int], parent: bytes) -> None:
        """Publish the computed beginning of a block that the caller alone holds and is about to release.

        If a published block begins with the same tokens, mark that one as used instead and keep `block` private.
        """
        place, after = tuple(tokens), self._after.get(parent, ())
        at = bisect_left(after, (place, NO_BLOCK))
        if at < len(after) and after[at][0][: len(place)] == place:
            if after[at][1] in self._cached:
                self._cached.move_to_end(after[at][1])
        elif key not in self._index:
            self.publish(block, key, place, parent)

    def nearest(self, parent: bytes, tokens: tuple[int, ...]) -> tuple[int, int]:
        """Return the block after `parent` with the longest common prefix with `tokens`, and that prefix's length.

        The length is 0 if no block agrees in its first token.
        """
        found, most = 0, 0
        if after := self._after.get(parent):
            at = bisect_left(after, (tokens, NO_BLOCK))
            for own, block in after[max(0, at - 1) : at + 1]:
                count = common_length(own, tokens)
                if count > most:
                    found, most = block, count
        return found, most

    def begun(self, parent: bytes, tokens: tuple[int, ...]) -> list[int]:
        """Return the blocks after `parent` that begin with `tokens`, or that `tokens` begins with."""
        blocks = []
        for own, block in self._after.get(parent, ()):
            if common_length(own, tokens) == min(len(own), len(tokens)):
                blocks.append(block)
        return blocks

    def forget(self, block: int) -> bool:
        """Evict a cached block. Return False and change nothing if it is held or not published."""
        if self._holders[block] or self._published[block] is None:
            return False
        self._unpublish(block)
        self._free.append(block)
        return True

    def _evict(self) -> int:
        block = next(iter(self._cached))
        self._unpublish(block)
        return block

    def _unpublish(self, block: int) -> None:
        published = self._published[block]
        assert published is not None
        self.leaving(published.key)
        del self._cached[block]
        del self._index[published.key]
        if published.parent:
            self._remove(block, published)
        self._published[block] = None
        if self.watch is not None:
            self.watch(False, published)

    def _insert(self, block: int, published: Published) -> None:
        """Index a block by its first tokens and evict the part that it begins with."""
        after = self._after.get(published.parent)
        if after is None:
            self._after[published.parent] = [(published.tokens, block)]
            return
        at = bisect_left(after, (published.tokens, NO_BLOCK))
        after.insert(at, (published.tokens, block))
        if at:  # in this order a part comes just before the blocks that begin with it
            before, part = after[at - 1]
            if len(before) < len(published.tokens) and published.tokens[: len(before)] == before:
                self.forget(part)

    def _remove(self, block: int, published: Published) -> None:
        after = self._after[published.parent]
        if len(after) == 1:
            del self._after[published.parent]
            return
        at = bisect_left(after, (published.tokens, NO_BLOCK))
        assert after[at][1] == block, "two blocks with the same tokens after one key"
        del after[at]


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
