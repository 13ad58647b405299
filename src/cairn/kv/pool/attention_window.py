"""Which blocks of a cache group a position reads: all before it, those that its window overlaps, or the one block
that holds the recurrent state of the position before it."""

from __future__ import annotations

from collections.abc import Sequence

from cairn.types.model_spec import CacheGroup

ANY = 1 << 62
"""`longest` of pools that no sequence is too long for."""


def window_blocks(group: CacheGroup, block_tokens: int) -> int:
    """Most blocks that one position of a window or state group reads or writes; 0 for full attention, which has no
    bound."""
    if group.kind == "state":
        return 2
    return -(-(group.window - 1) // block_tokens) + 1 if group.kind == "window" else 0


def first_read(group: CacheGroup, position: int, block_tokens: int) -> int:
    """The first block that `position` and those after it still read."""
    if group.kind == "state":
        return max(0, position - 1) // block_tokens
    return max(0, position - group.window + 1) // block_tokens if group.kind == "window" else 0


def lead(groups: Sequence[CacheGroup]) -> int:
    """Number of the group whose blocks tell how far a context was computed: the first of full attention."""
    return next((number for number, group in enumerate(groups) if group.kind == "full"), 0)


def longest(groups: Sequence[CacheGroup], sizes: Sequence[int], block_tokens: int) -> int:
    """The longest sequence that pools of so many blocks hold, in tokens; `ANY` where none limits it.

    The pool of a window or state group limits it only where it has no room for what one position needs.
    """
    spans = (window_blocks(group, block_tokens) for group in groups)
    limits = [size * block_tokens for size, span in zip(sizes, spans, strict=True) if not span or size < span]
    return min(limits, default=ANY)
