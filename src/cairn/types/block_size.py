"""How many tokens a KV block holds, and how many blocks a chunk.

Everything that counts in blocks takes the size from here: kernels, pools, stores and files.
"""

from __future__ import annotations

BLOCK_TOKENS = 16
"""Tokens in one KV block."""
CHUNK_BLOCKS = 4
"""Blocks in a chunk, which is what stores keep together."""
CHUNK_TOKENS = CHUNK_BLOCKS * BLOCK_TOKENS
"""Tokens in a chunk."""
