"""What a text is split into."""

from __future__ import annotations

from cairn.types.outputs import ToolCallDelta

Content = tuple[str, str]
"""("text" or "reasoning", characters)."""
Piece = Content | ToolCallDelta

PUSHED = 1_024
"""Characters that a splitter takes at once: it copies what is behind a tag, so a long text goes through in pieces."""
