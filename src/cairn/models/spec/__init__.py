"""What a model is, read from its configuration: families, layers, positions, end tokens."""
