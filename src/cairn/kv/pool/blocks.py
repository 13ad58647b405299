"""The blocks of one cache group: who holds each, under which key it is found, and which may be used again.

    free     nobody holds it and no key finds it
    cached   nobody holds it and its key finds it; given up, oldest use first, when no free block is left
    held     at least one block table names it, whether it is published (has a key) or not

`free + cached + held` is the size of the pool, always.

Nothing is evicted before what extends it, without a tree: a table that holds a block holds everything before it too,
and gives its blocks back last to first. So in the order of last use a block stands after all that extends it, and the
oldest cached block is a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Published:
    """What a published block holds: the tokens of this block, and the key that covers all tokens up to its end."""

    key: bytes
    tokens: tuple[int, ...]


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

    def publish(self, block: int, key: bytes, tokens: Sequence[int]) -> int | None:
        """Let `key` find a held, completely computed block. Returns the block that the table must name from now on.

        That is another one where the same content was published before: it is held in the place of `block`, which is
        released, so that equal contexts are stored once. None, and no change, where the key stands for other tokens.
        """
        if self._holders[block] < 1 or self._published[block] is not None:
            raise RuntimeError(f"block {block} cannot be published: it is not held or has a key already")
        if key not in self._index:
            self._published[block] = Published(key, tuple(tokens))
            self._index[key] = block
            return block
        twin = self.find(key, tokens)
        if twin is not None:
            self.hold(twin)
            self.release((block,))
        return twin

    def forget(self, block: int) -> bool:
        """Make a cached block free: its key finds nothing any more. False, and no change, if somebody holds it."""
        published = self._published[block]
        if self._holders[block] or published is None:
            return False
        self.leaving(published.key)
        del self._cached[block]
        del self._index[published.key]
        self._published[block] = None
        self._free.append(block)
        return True

    def _evict(self) -> int:
        block = next(iter(self._cached))
        published = self._published[block]
        assert published is not None
        self.leaving(published.key)
        del self._cached[block]
        del self._index[published.key]
        self._published[block] = None
        return block


def _nobody(key: bytes) -> None:
    """Nobody wants to know which blocks go."""
