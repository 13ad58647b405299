"""KV between the pool and the stores: looking up, loading and writing behind."""
