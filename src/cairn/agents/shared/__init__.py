"""Journals, and the exact tokens of ordinary chats, in a store that several servers share."""
