"""What has to be known of a model to tell which of the chunks in its store are of a context: kept in the store, so that
something can be erased from it while another model is served.

    <store>/layout      magic, XXH3-128 of the rest, msgpack
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec
import xxhash

from cairn.kv.disk.folder import StoreFolder
from cairn.kv.pool.prefix import Chain, root
from cairn.types.block_size import CHUNK_BLOCKS
from cairn.types.layer_spec import CacheGroup

_NAME = "layout"
_MAGIC = b"cairn kv layout1"
_DIGEST = 16
_LARGEST = 1 << 20


class Layout(msgspec.Struct, frozen=True):
    """How a model's tokens become chunks."""

    block_tokens: int
    groups: tuple[CacheGroup, ...]

    def keys(self, identity: bytes, salt: bytes, tokens: Sequence[int], first: int) -> list[bytes]:
        """Keys that an engine with this identity gives a context's whole chunks from number `first` on, in every group,
        and the states that there might be."""
        stop, found = len(tokens) // (CHUNK_BLOCKS * self.block_tokens), list[bytes]()
        for group in self.groups:
            chain = Chain(root(identity, salt, group, self.block_tokens), self.block_tokens)
            found += [chain.key((one + 1) * CHUNK_BLOCKS - 1, tokens) for one in range(first, stop)]
        return found


def write(folder: StoreFolder, layout: Layout) -> None:
    """Keep it in a store that this process holds, durably, unless it is there."""
    if read(folder) == layout:
        return
    data = msgspec.msgpack.encode(layout)
    temporary, size = folder.write(folder.folder, [_MAGIC + xxhash.xxh3_128_digest(data), data])
    try:
        folder.files.replace(temporary, folder.folder / _NAME)
    except OSError:
        folder.discard(temporary, size)
        raise
    folder.files.sync_folder(folder.folder)


def read(folder: StoreFolder) -> Layout | None:
    """What a store's file says; None where there is none, or it is not whole."""
    try:
        file = folder.files.open(folder.folder / _NAME, "read")
    except FileNotFoundError:
        return None
    try:
        found = file.read(0, _LARGEST)
    finally:
        file.close()
    start, data = len(_MAGIC) + _DIGEST, found[len(_MAGIC) + _DIGEST :]
    if found[:start] == _MAGIC + xxhash.xxh3_128_digest(data):
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.msgpack.decode(data, type=Layout)
    return None
