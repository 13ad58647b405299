"""GGUF files: reading, writing, and the model that their metadata describes."""
