"""The paged KV cache: the pool, the stores below it, and the way between them."""
