"""The models of one server: registry, loading, swapping, and the one that a call gets."""
