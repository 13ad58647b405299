"""Keys of KV blocks: one chain of SHA-256 digests a cache group.

The key of block i covers every token up to the end of the block, and through the root everything else that could
change a number: the engine's identity (weights, tokenizer, dtype, kernels, layout), a codec that loses bits, the
tenant's salt, the cache group and the block size. Keys are the same in every process and on every machine. The digest
is used whole.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from cairn.types.model_spec import CacheGroup

_DOMAIN = b"cairn kv chain 1"
_CODEC_DOMAIN = b"cairn kv codec 1"


def numerics(identity: bytes, codec: str) -> bytes:
    """The identity under which KV is kept that may have gone through a codec: the engine's own where that is `raw`.

    What is computed after pages that lost bits has lost them, too, also before it is ever written down; so the codec
    is in every key of the process, not only in those of its files.
    """
    if codec == "raw":
        return identity
    return hashlib.sha256(_CODEC_DOMAIN + struct.pack("<q", len(identity)) + identity + codec.encode()).digest()


def root(identity: bytes, salt: bytes, group: CacheGroup, block_tokens: int) -> bytes:
    """The key before block 0. Every part is preceded by its length, so no two lists of parts read the same."""
    numbers = (block_tokens, group.window, *group.layers)
    digest = hashlib.sha256()
    for part in (_DOMAIN, identity, salt, group.kind.encode(), struct.pack(f"<{len(numbers)}q", *numbers)):
        digest.update(struct.pack("<q", len(part)))
        digest.update(part)
    return digest.digest()


def extend(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the block that holds `tokens` and follows the block with key `parent`."""
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


class Chain:
    """The keys of one sequence's full blocks in one group, computed when they are first asked for.

    The same `tokens` list must be given every time; it may grow, it must not change.
    """

    __slots__ = ("_block_tokens", "_keys", "_root")

    def __init__(self, start: bytes, block_tokens: int) -> None:
        self._root = start
        self._block_tokens = block_tokens
        self._keys: list[bytes] = []

    def key(self, index: int, tokens: Sequence[int]) -> bytes:
        """The key of block `index`, which must lie wholly within `tokens`."""
        keys, size = self._keys, self._block_tokens
        if (index + 1) * size > len(tokens):
            raise ValueError(f"block {index} is not full: {len(tokens)} tokens")
        while len(keys) <= index:
            at = len(keys) * size
            keys.append(extend(keys[-1] if keys else self._root, tokens[at : at + size]))
        return keys[index]

    def before(self, index: int, tokens: Sequence[int]) -> bytes:
        """The key that block `index` extends."""
        return self.key(index - 1, tokens) if index else self._root
