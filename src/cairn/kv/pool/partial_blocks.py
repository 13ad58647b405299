"""Reuse by the token: a sequence gets a copy of a block that shares only its first tokens.

A shared block is never written to, so a sequence that agrees with only its first tokens computes the others in a block
of its own. The computed tokens of a sequence's last, unfinished block are found by others in the same way. Recurrent
states cannot be reused so: a state belongs to exactly the tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cairn.kv.pool import prefix
from cairn.kv.pool.blocks import BlockPool, Copy, common_length
from cairn.kv.pool.sequence_kv import SequenceKV
from cairn.types.step import EngineInfo


class PartialHit(NamedTuple):
    """Blocks whose first tokens agree with a sequence."""

    blocks: tuple[int, ...]
    """One block a group. Each is held until it is copied or given up."""
    agreed: int
    """Number of tokens that agree."""


class PartialBlocks:
    """Finds, copies and publishes parts of blocks. Owned by a `Cache`."""

    def __init__(self, info: EngineInfo, pools: Sequence[BlockPool]) -> None:
        self._pools, self._block_tokens = pools, info.block_tokens
        self._windows = [group.kind == "window" for group in info.groups]
        self._off = any(group.kind == "state" for group in info.groups)
        self._copies: list[Copy] = []

    def find(self, seq_kv: SequenceKV, tokens: Sequence[int], hit: int, wanted: int) -> PartialHit | None:
        """Hold, in every group, a block that agrees with the first of `tokens` after `hit` blocks.

        The last token is left out. Return None if there is no such block, or if a pool has no room for the copy beside
        the `wanted` blocks of a full group.
        """
        size = self._block_tokens
        rest = tuple(tokens[hit * size : min((hit + 1) * size, len(tokens) - 1)])
        if not rest or self._off:
            return None
        found = []
        for number, pool in enumerate(self._pools):
            block, count = pool.nearest(seq_kv.chains[number].before(hit, tokens), rest)
            needed = (1 if self._windows[number] else wanted) + (not pool.holders(block))
            if not count or needed > pool.available:
                return None
            rest = rest[:count]
            found.append(block)
        for pool, block in zip(self._pools, found, strict=True):
            pool.hold(block)
        return PartialHit(tuple(found), len(rest))

    def copy(self, seq_kv: SequenceKV, part: PartialHit, hit: int) -> int:
        """Order a copy of the part to the block after the first `hit`; return how many tokens it covers."""
        for number, (pool, table) in enumerate(zip(self._pools, seq_kv.table.groups, strict=True)):
            if len(table) == hit:
                table.extend(pool.take(1))
            self._copies.append(Copy(number, part.blocks[number], table[hit]))
            pool.release((part.blocks[number],))
        seq_kv.table.measure(self._block_tokens)
        return part.agreed

    def copies(self) -> list[Copy]:
        """Return the copies ordered since the last call; make them in this order before any computing or loading."""
        copies, self._copies = self._copies, []
        return copies

    def put(
        self,
        seq_kv: SequenceKV,
        tokens: Sequence[int],
        end: int,
        follow: tuple[int, ...],
        write: Callable[[int, int], None],
    ) -> int:
        """Publish a block of the tokens `follow` after block `end`; return how many of them the sequence can reuse.

        Any sequence that agrees with its first tokens may copy it. `write` fills a block of a group. Do nothing and
        return 0 if no token agrees or a pool has no room.
        """
        size = self._block_tokens
        agreed = common_length(follow, tokens[end * size : min((end + 1) * size, len(tokens) - 1)])
        if self._off or len(follow) != size or not agreed or not all(pool.available for pool in self._pools):
            return 0
        for number, pool in enumerate(self._pools):
            parent = seq_kv.chains[number].before(end, tokens)
            key = prefix.extend(parent, follow)
            if pool.find(key, follow) is None:
                (block,) = pool.take(1)
                try:
                    write(number, block)
                except Exception:
                    pool.release((block,))
                    raise
                published = pool.publish(block, key, follow, parent)
                pool.release((block if published is None else published,))
        return agreed

    def publish(self, seq_kv: SequenceKV, tokens: Sequence[int], computed: int) -> None:
        """Publish the computed part of the unfinished block at `computed` positions, before the block is released."""
        index, more = divmod(computed, self._block_tokens)
        if not more or self._off or any(done != index for done in seq_kv.table.published):
            return
        tables = seq_kv.table.groups
        if any(copy.target == tables[copy.group][index] for copy in self._copies):
            return  # the block is still to be copied into
        part = tuple(tokens[computed - more : computed])
        for number, pool in enumerate(self._pools):
            parent = seq_kv.chains[number].before(index, tokens)
            pool.publish_part(tables[number][index], prefix.extend(parent, part), part, parent)

    def forget(self, seq_kv: SequenceKV, tokens: Sequence[int], keep: int) -> None:
        """Evict parts of `tokens` beyond the first `keep` tokens."""
        size = self._block_tokens
        for number, pool in enumerate(self._pools):
            for index in range(-(-keep // size), len(tokens) // size + 1):
                rest = tuple(tokens[index * size : (index + 1) * size])
                parent = seq_kv.chains[number].before(index, tokens)
                for block in pool.begun(parent, rest) if rest else ():
                    published = pool.published(block)
                    if published is not None and len(published.tokens) < size:
                        pool.forget(block)
