"""An assistant's message, from the pieces of an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cairn.types.outputs import Delta
from cairn.types.request import OutputFormat


class MessageBuilder:
    """What an answer has said so far."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, list[str]] = {}
        """Index -> id, name and pieces of the arguments."""

    def __bool__(self) -> bool:
        return bool(self._text or self._reasoning or self._calls)

    def add(self, delta: Delta) -> None:
        """The next piece."""
        if delta.text:
            self._text.append(delta.text)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        for piece in delta.tool_calls:
            self._calls.setdefault(piece.index, [piece.id, piece.name]).append(piece.arguments)

    @property
    def text(self) -> str:
        """The content."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """What it thought."""
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        """(id, name, arguments) of each tool call."""
        return [(one[0], one[1], "".join(one[2:])) for _, one in sorted(self._calls.items())]

    def message(self) -> dict[str, Any]:
        """The message as OpenAI's API has it."""
        return message_of(self.text, self.reasoning, self.calls)


class ReasoningCount:
    """How many of an answer's tokens are of reasoning, its tags among them."""

    def __init__(self, output: OutputFormat) -> None:
        self.tokens = 0
        self._thinking = output.reasoning_open

    def add(self, delta: Delta) -> None:
        """The next piece."""
        said = bool(delta.text or delta.tool_calls)
        self._thinking = bool(delta.reasoning) or (self._thinking and not said)
        if self._thinking:
            self.tokens += len(delta.tokens)
            self._thinking = not said


def message_of(text: str, reasoning: str, calls: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    """The assistant's message; its content is None where the model only called tools."""
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in calls
        ]
    return message


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call as an object, for APIs that have them so: what is none stands under one name."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, dict) else {"arguments": value}
