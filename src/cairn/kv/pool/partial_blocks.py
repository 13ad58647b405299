"""Reuse by the token: of a block that goes on as a sequence does for some tokens only, the sequence gets a copy.

A shared block is never written to, so whoever agrees with its first tokens alone computes the others in a block of its
own. What a sequence computed of its last block, which is not full, others find by its first tokens in the same way. Of
recurrent states there is none of this: a state is that after its last token, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cairn.kv.pool import prefix
from cairn.kv.pool.blocks import BlockPool, Copy, common
from cairn.kv.pool.sequence_kv import SequenceKV
from cairn.types.step import EngineInfo


class PartialHit(NamedTuple):
    """Blocks of which the first tokens are those of a sequence."""

    blocks: tuple[int, ...]
    """One a group. Each is held until it is copied or given up."""
    agreed: int
    """How many tokens that is."""


class PartialBlocks:
    """Finds, copies and publishes parts of blocks. Owned by a `Cache`."""

    def __init__(self, info: EngineInfo, pools: Sequence[BlockPool]) -> None:
        self._pools, self._block_tokens = pools, info.block_tokens
        self._windows = [group.kind == "window" for group in info.groups]
        self._off = any(group.kind == "state" for group in info.groups)
        self._copies: list[Copy] = []

    def find(self, seq_kv: SequenceKV, tokens: Sequence[int], hit: int, wanted: int) -> PartialHit | None:
        """Hold the blocks that go on after the first `hit` as `tokens` do, in every group; the last token is left out.

        None where there are none, or where a pool has no room for one beside the `wanted` blocks of a full group.
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
        """Have a part copied to the block after the first `hit`; return how many tokens that covers."""
        for number, (pool, table) in enumerate(zip(self._pools, seq_kv.table.groups, strict=True)):
            if len(table) == hit:
                table.extend(pool.take(1))
            self._copies.append(Copy(number, part.blocks[number], table[hit]))
            pool.release((part.blocks[number],))
        seq_kv.table.measure(self._block_tokens)
        return part.agreed

    def copies(self) -> list[Copy]:
        """Return what is to be copied since the last call: in this order, before anything is computed or loaded."""
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
        """Publish a block of the tokens `follow` after the first `end` blocks of a context, to be copied by whoever
        agrees with its first tokens; return how many of them are the context's.

        `write` fills a block of a group. Nothing is done, and 0 returned, where none are or a pool has no room.
        """
        size = self._block_tokens
        agreed = common(follow, tokens[end * size : min((end + 1) * size, len(tokens) - 1)])
        if self._off or len(follow) != size or not agreed or not all(pool.available for pool in self._pools):
            return 0
        for number, pool in enumerate(self._pools):
            parent = seq_kv.chains[number].before(end, tokens)
            key = prefix.extend(parent, follow)
            if pool.find(key, follow) is None:
                (block,) = pool.take(1)
                write(number, block)
                published = pool.publish(block, key, follow, parent)
                pool.release((block if published is None else published,))
        return agreed

    def publish(self, seq_kv: SequenceKV, tokens: Sequence[int], computed: int) -> None:
        """Let others find what was computed of the block that `computed` positions end in, before it is released."""
        index, more = divmod(computed, self._block_tokens)
        if not more or self._off or any(done != index for done in seq_kv.table.published):
            return
        tables = seq_kv.table.groups
        if any(copy.target == tables[copy.group][index] for copy in self._copies):
            return  # nothing is in it yet
        part = tuple(tokens[computed - more : computed])
        for number, pool in enumerate(self._pools):
            parent = seq_kv.chains[number].before(index, tokens)
            pool.publish_part(tables[number][index], prefix.extend(parent, part), part, parent)

    def forget(self, seq_kv: SequenceKV, tokens: Sequence[int], keep: int) -> None:
        """Give up what is kept of blocks of `tokens` that are not full, beyond the first `keep` tokens."""
        size = self._block_tokens
        for number, pool in enumerate(self._pools):
            for index in range(-(-keep // size), len(tokens) // size + 1):
                rest = tuple(tokens[index * size : (index + 1) * size])
                parent = seq_kv.chains[number].before(index, tokens)
                for block in pool.begun(parent, rest) if rest else ():
                    published = pool.published(block)
                    if published is not None and len(published.tokens) < size:
                        pool.forget(block)
