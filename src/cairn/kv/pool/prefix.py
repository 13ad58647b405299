"""Keys of KV blocks: one chain of SHA-256 digests a cache group.

The key of block i covers every token up to the end of the block and, through the root, everything else that could
change a computed number: the engine's identity (weights, tokenizer, dtype, kernels, layout), a lossy codec, the
tenant's salt, the cache group and the block size. Keys are the same in every process and on every machine. The digest
is never shortened.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import msgspec

from cairn.types.model_spec import CHUNK_BLOCKS, CacheGroup

_DOMAIN = b"cairn kv chain 1"
_CODEC_DOMAIN = b"cairn kv codec 1"


def numerics(identity: bytes, codec: str) -> bytes:
    """Return the identity under which KV is stored: the engine's own for `raw`, else a digest with the codec.

    What is computed after lossy pages is itself changed by the loss, even before it is written to disk. So the codec is
    part of every key of the process, not only of the keys of its files.
    """
    if codec == "raw":
        return identity
    return hashlib.sha256(_CODEC_DOMAIN + struct.pack("<q", len(identity)) + identity + codec.encode()).digest()


def root(identity: bytes, salt: bytes, group: CacheGroup, block_tokens: int) -> bytes:
    """Return the key before block 0. Each part is preceded by its length, so two lists of parts never collide."""
    numbers = (block_tokens, group.window, *group.layers)
    digest = hashlib.sha256()
    for part in (_DOMAIN, identity, salt, group.kind.encode(), struct.pack(f"<{len(numbers)}q", *numbers)):
        digest.update(struct.pack("<q", len(part)))
        digest.update(part)
    return digest.digest()


def extend(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of the block that holds `tokens` and follows the block with key `parent`."""
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


class Chain:
    """Keys of one sequence's full blocks in one group, computed on first use.

    Pass the same `tokens` list every time; it may grow but must not change.
    """

    __slots__ = ("_block_tokens", "_keys", "_root")

    def __init__(self, start: bytes, block_tokens: int) -> None:
        self._root = start
        self._block_tokens = block_tokens
        self._keys: list[bytes] = []

    def key(self, index: int, tokens: Sequence[int]) -> bytes:
        """Return the key of block `index`. Raise `ValueError` if `tokens` do not fill the block."""
        keys, size = self._keys, self._block_tokens
        if (index + 1) * size > len(tokens):
            raise ValueError(f"block {index} is not full: {len(tokens)} tokens")
        while len(keys) <= index:
            at = len(keys) * size
            keys.append(extend(keys[-1] if keys else self._root, tokens[at : at + size]))
        return keys[index]

    def before(self, index: int, tokens: Sequence[int]) -> bytes:
        """Return the key that block `index` extends."""
        return self.key(index - 1, tokens) if index else self._root


class Layout(msgspec.Struct, frozen=True):
    """A model's block size and cache groups: how its tokens become chunks."""

    block_tokens: int
    groups: tuple[CacheGroup, ...]

    def keys(self, identity: bytes, salt: bytes, tokens: Sequence[int], first: int) -> list[bytes]:
        """Return the keys of a context's full blocks from chunk `first` on, in every group.

        `identity`: of the engine that stored them. A whole chunk, a tail or a state may have any of these keys.
        """
        low, high, found = first * CHUNK_BLOCKS, len(tokens) // self.block_tokens, list[bytes]()
        for group in self.groups:
            chain = Chain(root(identity, salt, group, self.block_tokens), self.block_tokens)
            found += [chain.key(one, tokens) for one in range(low, high)]
        return found
