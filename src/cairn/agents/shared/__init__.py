"""Agents, and the journals of their work, in a store that several servers share."""
