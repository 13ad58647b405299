"""What a text is split into."""

from __future__ import annotations

from cairn.types.outputs import ToolCallDelta

Content = tuple[str, str]
"""("text" or "reasoning", characters)."""
Piece = Content | ToolCallDelta
