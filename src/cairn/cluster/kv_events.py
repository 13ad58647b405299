"""What a server says of the KV it holds: vLLM's KV events, and which text a block ends.

Names and fields: vLLM's vllm/distributed/kv_events.py, where `KVEventBatch` is what a message holds. So a router that
reads those events can read these. They come as JSON over HTTP (`GET /v1/cache/events`), not over ZeroMQ.

A block's hash is the first 8 bytes of its key, which covers all tokens before it, the model and the tenant's salt.
Token ids are never sent: who follows the events of all tenants would read all their prompts.
"""

from __future__ import annotations

import msgspec

HASH_BYTES = 8
EVENT = "kv"
"""Name of the server-sent event that holds a `KVEventBatch`."""
TEXTS_EVENT = "texts"
"""Name of the one that holds a `TextBlocks`."""


def block_hash(key: bytes) -> int:
    """Return the hash by which events name the block with this key."""
    return int.from_bytes(key[:HASH_BYTES], "big")


class BlockStored(msgspec.Struct, tag=True, frozen=True):
    """Blocks that a tier has now, each the parent of the next."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """The block before the first one; None at the beginning of a context."""
    token_ids: list[int]
    """Always empty here."""
    block_size: int
    """Tokens in a block."""
    lora_id: int | None = None
    """Always None here: adapters are part of the hashes."""
    medium: str | None = None
    """GPU: the pool that the engine reads, on any device. CPU: memory below it. DISK."""
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, frozen=True):
    """Blocks that a tier has no longer."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    """Nothing said before holds: what the server has follows in `BlockStored` events."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, omit_defaults=True, frozen=True):
    """Events in their order."""

    ts: float
    """Seconds since 1970."""
    events: list[KVEvent]
    data_parallel_rank: int | None = None


class TextBlocks(msgspec.Struct, frozen=True):
    """Which block ends at the end of a text, as far as the server can tell without aligning text and tokens."""

    texts: list[tuple[int, int, int]]
    """Digest of a text (`text_prefixes`), hash of the block, tokens up to the block's end."""
