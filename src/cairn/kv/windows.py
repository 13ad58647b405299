"""Which blocks of a cache group a position reads: all before it, or those that its window overlaps."""

from __future__ import annotations

from cairn.types import CacheGroup


def window_blocks(group: CacheGroup, block_tokens: int) -> int:
    """Most blocks that one position of a window group reads or writes; 0 for full attention, which has no bound."""
    return -(-(group.window - 1) // block_tokens) + 1 if group.kind == "window" else 0


def first_read(group: CacheGroup, position: int, block_tokens: int) -> int:
    """The first block that `position` and those after it still read."""
    return max(0, position - group.window + 1) // block_tokens if group.kind == "window" else 0
