"""The blocks of one cache group: who holds each, under which key it is found, and which may be used again.

    free     nobody holds it and no key finds it
    cached   nobody holds it and its key finds it; given up, oldest use first, when no free block is left
    held     at least one block table names it, whether it is published (has a key) or not

`free + cached + held` is the size of the pool, always.

Nothing is evicted before what extends it, without a tree: a table that holds a block holds everything before it too,
and gives its blocks back last to first. So in the order of last use a block stands after all that extends it, and the
oldest cached block is a leaf.

A block of which only the beginning was computed may be published too, when its sequence ends: a *part*. No table ever
names a part again. Whoever goes on with the same tokens has it copied, as far as they agree (`nearest`). A part that
another published block begins with is given up at once, so under one parent no part begins another block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Published(NamedTuple):
    """What a published block holds: the tokens of this block, and the key that covers all tokens up to its end."""

    key: bytes
    tokens: tuple[int, ...]
    """Of a part fewer than the block has slots."""
    parent: bytes
    """The key of the block before it; empty where it is never looked for by its first tokens."""


class Copy(NamedTuple):
    """A block of a group whose content another one of the group is to get."""

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
        self._after: dict[bytes, list[int]] = {}
        """The published blocks that follow each key, in the order of their tokens."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.leaving: Callable[[bytes], None] = _nobody
        """Called with the key of a published block that is about to be given up and can still be found and read."""

    @property
    def free(self) -> int:
        """Blocks that nobody holds and no key finds."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Published blocks that nobody holds."""
        return len(self._cached)

    @property
    def held(self) -> int:
        """Blocks that at least one table names."""
        return self.size - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that `take` can give now."""
        return len(self._free) + len(self._cached)

    def holders(self, block: int) -> int:
        """How many tables name the block."""
        return self._holders[block]

    def published(self, block: int) -> Published | None:
        """What the block is published as, if it is."""
        return self._published[block]

    def take(self, count: int) -> list[int]:
        """`count` unpublished blocks, held once each. All or none: `MemoryError` if fewer are available."""
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
        """Name the blocks in one table less. Give a table's blocks last to first: see the module's docstring."""
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
        """The block published under `key`, if it holds exactly `tokens`. It stays as it is: see `hold`."""
        block = self._index.get(key)
        if block is None:
            return None
        published = self._published[block]
        return block if published is not None and published.tokens == tuple(tokens) else None

    def publish(self, block: int, key: bytes, tokens: Sequence[int], parent: bytes = b"") -> int | None:
        """Let `key` find a held, completely computed block. Returns the block that the table must name from now on.

        That is another one where the same content was published before: it is held in the place of `block`, which is
        released, so that equal contexts are stored once. None, and no change, where the key stands for other tokens.
        With `parent`, the key of the block before, it is also found by its first tokens.
        """
        if self._holders[block] < 1 or self._published[block] is not None:
            raise RuntimeError(f"block {block} cannot be published: it is not held or has a key already")
        if key not in self._index:
            published = self._published[block] = Published(key, tuple(tokens), parent)
            self._index[key] = block
            if parent:
                self._insert(block, published)
            return block
        twin = self.find(key, tokens)
        if twin is not None:
            self.hold(twin)
            self.release((block,))
        return twin

    def publish_part(self, block: int, key: bytes, tokens: Sequence[int], parent: bytes) -> None:
        """Let others copy the beginning of a block that the caller holds alone and is about to release.

        Where a published block begins with the same tokens, that one counts as used instead, and `block` stays private.
        """
        place, after = tuple(tokens), self._after.get(parent, ())
        at = bisect_left(after, place, key=self._tokens_of)
        if at < len(after) and self._tokens_of(after[at])[: len(place)] == place:
            if after[at] in self._cached:
                self._cached.move_to_end(after[at])
        elif key not in self._index:
            self.publish(block, key, place, parent)

    def nearest(self, parent: bytes, tokens: tuple[int, ...]) -> tuple[int, int]:
        """Return which block after the one with key `parent` has most first tokens in common with `tokens`, and how
        many; 0 where none has."""
        found, most = 0, 0
        if after := self._after.get(parent):
            at = bisect_left(after, tokens, key=self._tokens_of)
            for block in after[max(0, at - 1) : at + 1]:
                count = common(self._tokens_of(block), tokens)
                if count > most:
                    found, most = block, count
        return found, most

    def begun(self, parent: bytes, tokens: tuple[int, ...]) -> list[int]:
        """Return the blocks after the one with key `parent` that begin with `tokens`, or with which these begin."""
        found = []
        for block in self._after.get(parent, ()):
            own = self._tokens_of(block)
            if common(own, tokens) == min(len(own), len(tokens)):
                found.append(block)
        return found

    def forget(self, block: int) -> bool:
        """Make a cached block free: its key finds nothing any more. False, and no change, if somebody holds it."""
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
        """Take a cached block out of all indexes."""
        published = self._published[block]
        assert published is not None
        self.leaving(published.key)
        del self._cached[block]
        del self._index[published.key]
        if published.parent:
            self._remove(block, published)
        self._published[block] = None

    def _insert(self, block: int, published: Published) -> None:
        """Find a block by its first tokens from now on, and give up the part that it begins with."""
        after = self._after.get(published.parent)
        if after is None:
            self._after[published.parent] = [block]
            return
        at = bisect_left(after, published.tokens, key=self._tokens_of)
        after.insert(at, block)
        if at:  # what begins with the same tokens stands just behind the part that has no others
            before = self._tokens_of(after[at - 1])
            if len(before) < len(published.tokens) and published.tokens[: len(before)] == before:
                self.forget(after[at - 1])

    def _remove(self, block: int, published: Published) -> None:
        after = self._after[published.parent]
        if len(after) == 1:
            del self._after[published.parent]
            return
        at = bisect_left(after, published.tokens, key=self._tokens_of)
        assert after[at] == block, "two blocks with the same tokens after one key"
        del after[at]

    def _tokens_of(self, block: int) -> tuple[int, ...]:
        published = self._published[block]
        assert published is not None
        return published.tokens


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first tokens are the same."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


def _nobody(key: bytes) -> None:
    """Nobody wants to know which blocks go."""
