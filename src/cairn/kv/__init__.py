"""The paged KV cache: blocks, keys, tables."""
