"""What a model is: the `ModelSpec` of a folder or a GGUF file."""
