"""The HTTP layer: connections, bodies, keys, limits, and event streams."""
