"""Contexts that survive: the durable token log."""
