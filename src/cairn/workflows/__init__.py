"""Workflows: nodes with roles whose answers go on to others, each held to a contract."""
