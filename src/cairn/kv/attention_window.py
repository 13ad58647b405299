"""Which blocks of a cache group a position reads: all before it, or those that its window overlaps."""

from __future__ import annotations

from collections.abc import Sequence

from cairn.types import CacheGroup

ANY = 1 << 62
"""`longest` of pools that no sequence is too long for."""


def window_blocks(group: CacheGroup, block_tokens: int) -> int:
    """Most blocks that one position of a window group reads or writes; 0 for full attention, which has no bound."""
    return -(-(group.window - 1) // block_tokens) + 1 if group.kind == "window" else 0


def first_read(group: CacheGroup, position: int, block_tokens: int) -> int:
    """The first block that `position` and those after it still read."""
    return max(0, position - group.window + 1) // block_tokens if group.kind == "window" else 0


def longest(groups: Sequence[CacheGroup], sizes: Sequence[int], block_tokens: int) -> int:
    """The longest sequence that pools of so many blocks hold, in tokens; `ANY` where none limits it.

    A window group's pool limits it only where it has no room for one window.
    """
    spans = (window_blocks(group, block_tokens) for group in groups)
    limits = [size * block_tokens for size, span in zip(sizes, spans, strict=True) if not span or size < span]
    return min(limits, default=ANY)
