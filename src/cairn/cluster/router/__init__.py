"""The router: one address for several servers that share a store."""
