"""Weights in memory: formats, quantising, unpacking, and packed files."""
