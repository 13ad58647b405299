"""Grammars that an answer is held to."""
