"""Weights for the kernels: formats, packed files, random weights, and the writer of GGUF files."""
