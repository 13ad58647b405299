"""Assembly of streamed tool calls, for dialects that send each call whole."""

from __future__ import annotations

from cairn.types.outputs import Delta, ToolCallDelta


class WholeCalls:
    """Joins the pieces of one choice's calls."""

    def __init__(self) -> None:
        self._pieces: list[ToolCallDelta] = []
        """Pieces of the incomplete call."""

    def push(self, delta: Delta) -> tuple[list[ToolCallDelta], list[ToolCallDelta]]:
        """Add a delta; return the calls that it completes: those to send before its text, and those after it."""
        before = self.finish() if delta.reasoning or delta.text else []
        within: list[ToolCallDelta] = []
        for call in delta.tool_calls:
            within += self.finish() if call.id else []
            self._pieces.append(call)
        return before, within

    def finish(self) -> list[ToolCallDelta]:
        """Return the incomplete call as complete, in a list; call this when another part or the end follows."""
        pieces, self._pieces = self._pieces, []
        if not pieces:
            return []
        first, arguments = pieces[0], "".join(piece.arguments for piece in pieces)
        return [ToolCallDelta(index=first.index, id=first.id, name=first.name, arguments=arguments)]
