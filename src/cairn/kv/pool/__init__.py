"""KV in the pool that the engine reads: blocks, prefix keys, tables and snapshots."""
