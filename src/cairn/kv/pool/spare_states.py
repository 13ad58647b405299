"""Copies of recurrent states that a row with guesses would lose.

Such a row leaves the state after its last guess. If one of them was wrong, the sequence goes on from the state before
the row, and computes the accepted tokens again.
"""

from __future__ import annotations

from collections.abc import Sequence

from cairn.kv.pool.blocks import BlockPool, Copy
from cairn.kv.pool.sequence_kv import SequenceKV
from cairn.types.step import EngineInfo


class SpareStates:
    """Keeps, restores and drops copies of states. Owned by a `Cache`."""

    def __init__(self, info: EngineInfo, pools: Sequence[BlockPool]) -> None:
        self._block_tokens = info.block_tokens
        self._pools = [(number, pools[number]) for number, group in enumerate(info.groups) if group.kind == "state"]
        self._copies: list[Copy] = []

    def keep(self, seq_kv: SequenceKV, computed: int) -> bool:
        """Order copies of the states after `computed` positions; return False and do nothing if a pool has no room.

        At the end of a block nothing is copied: the row writes to the next one.
        """
        index, within = divmod(computed, self._block_tokens)
        if not within:
            return True
        if any(pool.available < 1 for _, pool in self._pools):
            return False
        for number, pool in self._pools:
            (spare,) = pool.take(1)
            seq_kv.table.spares.append(spare)
            self._copies.append(Copy(number, seq_kv.table.groups[number][index], spare))
        return True

    def copies(self) -> list[Copy]:
        """Return the copies ordered since the last call; make them before the step."""
        copies, self._copies = self._copies, []
        return copies

    def restore(self, seq_kv: SequenceKV, computed: int) -> None:
        """Put the states that were kept back in the table, and release those that the row left."""
        spares, index = seq_kv.table.spares, computed // self._block_tokens
        for (number, pool), spare in zip(self._pools, spares, strict=bool(spares)):
            table = seq_kv.table.groups[number]
            pool.release((table[index],))
            table[index] = spare
        spares.clear()

    def drop(self, seq_kv: SequenceKV) -> None:
        """Release the copies: the row left the state that is needed, or the sequence is closed."""
        spares = seq_kv.table.spares
        for (_, pool), spare in zip(self._pools, spares, strict=bool(spares)):
            pool.release((spare,))
        spares.clear()
