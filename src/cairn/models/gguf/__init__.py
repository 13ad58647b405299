"""GGUF files: reading them, and the model that their metadata describes."""
