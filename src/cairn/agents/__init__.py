"""Contexts that survive: the durable token log and the agents on it."""
