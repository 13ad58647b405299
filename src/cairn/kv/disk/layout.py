"""What has to be known of a model to tell which of the chunks in its store are of a context: kept in the store, so that
something can be erased from it while another model is served.

    <store>/layout      see `record`
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cairn.kv.disk.folder import StoreFolder
from cairn.kv.disk.record import read_record, write_record
from cairn.kv.pool.prefix import Chain, root
from cairn.types.model_spec import CHUNK_BLOCKS, CacheGroup

_NAME = "layout"
_MAGIC = b"cairn kv layout1"


class Layout(msgspec.Struct, frozen=True):
    """How a model's tokens become chunks."""

    block_tokens: int
    groups: tuple[CacheGroup, ...]

    def keys(self, identity: bytes, salt: bytes, tokens: Sequence[int], first: int) -> list[bytes]:
        """Keys that an engine with this identity gives a context's blocks from chunk `first` on, in every group: those
        of all chunks, tails and states that there might be."""
        low, high, found = first * CHUNK_BLOCKS, len(tokens) // self.block_tokens, list[bytes]()
        for group in self.groups:
            chain = Chain(root(identity, salt, group, self.block_tokens), self.block_tokens)
            found += [chain.key(one, tokens) for one in range(low, high)]
        return found


def write(folder: StoreFolder, layout: Layout) -> None:
    """Keep it in a store that this process holds, durably, unless it is there."""
    if read(folder) != layout:
        write_record(folder, _NAME, _MAGIC, layout)


def read(folder: StoreFolder) -> Layout | None:
    """What a store's file says; None where there is none, or it is not whole."""
    return read_record(folder, _NAME, _MAGIC, Layout)
