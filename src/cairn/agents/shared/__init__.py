"""Agents that several servers share: their turns as records in the shared store, and back."""
