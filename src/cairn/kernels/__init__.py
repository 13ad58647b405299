"""The arithmetic of a step."""
