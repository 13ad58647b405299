"""Calls of a stream that are sent once complete, for dialects without pieces of calls."""

from __future__ import annotations

from cairn.types.outputs import Delta, ToolCallDelta


class WholeCalls:
    """Puts the pieces of one choice's calls together."""

    def __init__(self) -> None:
        self._pieces: list[ToolCallDelta] = []
        """Those of the call that is being written."""

    def push(self, delta: Delta) -> tuple[list[ToolCallDelta], list[ToolCallDelta]]:
        """Take a delta; the calls that were whole before its text, and those that are whole within it."""
        before = self.finish() if delta.reasoning or delta.text else []
        within: list[ToolCallDelta] = []
        for call in delta.tool_calls:
            within += self.finish() if call.id else []
            self._pieces.append(call)
        return before, within

    def finish(self) -> list[ToolCallDelta]:
        """Return the call that was being written: it is complete, since something else follows or nothing does."""
        pieces, self._pieces = self._pieces, []
        if not pieces:
            return []
        first, arguments = pieces[0], "".join(piece.arguments for piece in pieces)
        return [ToolCallDelta(index=first.index, id=first.id, name=first.name, arguments=arguments)]
