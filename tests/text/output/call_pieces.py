"""Assembly of streamed calls, as clients do it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from cairn.text.output.tool_parser import Piece
from cairn.types.outputs import ToolCallDelta


def whole_calls(pieces: Iterable[Piece]) -> list[tuple[str, str]]:
    """Return (name, arguments) of each call; fail unless only its first piece has the name and no call interrupts
    another.
    """
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if not isinstance(piece, ToolCallDelta):
            continue
        if piece.id:
            assert piece.index == len(calls) and piece.name
            calls.append((piece.name, piece.arguments))
        else:
            assert piece.index == len(calls) - 1 and not piece.name and piece.arguments
            name, arguments = calls.pop()
            calls.append((name, arguments + piece.arguments))
    return calls


def read_calls(pieces: Iterable[Piece]) -> list[tuple[str, Any]]:
    """Return (name, parsed arguments) of each call; arguments that are not JSON stay strings."""
    return [(name, _read(arguments)) for name, arguments in whole_calls(pieces)]


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
