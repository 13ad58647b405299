"""An assistant's message, from the pieces of an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cairn.types.outputs import Delta, TokenKind, ToolCallDelta

ORDER = "order"
"""Of a message that is kept: in which order its parts were said, where that is not the usual one."""
_USUAL = ("reasoning", "text", "call")


class MessageBuilder:
    """What an answer has said so far."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[str]] = {"reasoning": [], "text": []}
        self._calls: dict[int, list[str]] = {}
        """Index -> id, name and pieces of the arguments."""
        self._order: list[list[Any]] = []
        """The parts as they were said: ["reasoning" or "text", characters], or ["call", index]."""

    def __bool__(self) -> bool:
        return bool(self._order)

    def add(self, delta: Delta) -> None:
        """Take the next piece."""
        self._say("reasoning", delta.reasoning)
        self._say("text", delta.text)
        for piece in delta.tool_calls:
            if piece.index not in self._calls:
                self._order.append(["call", piece.index])
            self._calls.setdefault(piece.index, [piece.id, piece.name]).append(piece.arguments)

    def _say(self, kind: str, text: str) -> None:
        if not text:
            return
        self._pieces[kind].append(text)
        if self._order and self._order[-1][0] == kind:
            self._order[-1][1] += len(text)
        else:
            self._order.append([kind, len(text)])

    @property
    def text(self) -> str:
        """The content."""
        return "".join(self._pieces["text"])

    @property
    def reasoning(self) -> str:
        """What it thought."""
        return "".join(self._pieces["reasoning"])

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        """(id, name, arguments) of each tool call."""
        return [(one[0], one[1], "".join(one[2:])) for _, one in sorted(self._calls.items())]

    def parts(self) -> list[Delta]:
        """Return what was said, in order: each delta is one stretch of reasoning or of text, or one whole call."""
        whole, at = {"reasoning": self.reasoning, "text": self.text}, {"reasoning": 0, "text": 0}
        found = []
        for kind, size in self._order:
            if kind == "call":
                id, name, *pieces = self._calls[size]
                call = ToolCallDelta(index=size, id=id, name=name, arguments="".join(pieces))
                found.append(Delta(tool_calls=(call,)))
            else:
                text = whole[kind][at[kind] : at[kind] + size]
                at[kind] += size
                found.append(Delta(text=text) if kind == "text" else Delta(reasoning=text))
        return found

    def message(self) -> dict[str, Any]:
        """Return the message as OpenAI's API has it."""
        return message_of(self.text, self.reasoning, self.calls)

    def kept(self) -> dict[str, Any]:
        """Return the message as it is kept: with its order, where that is not the usual one."""
        ranks = [_USUAL.index(kind) for kind, _ in self._order]
        return self.message() | ({} if ranks == sorted(ranks) else {ORDER: self._order})


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a kept message without what is only kept."""
    return {name: value for name, value in message.items() if name != ORDER}


def said_of(message: Mapping[str, Any] | None) -> MessageBuilder:
    """Return what a kept message says, in the order in which it was said."""
    said = MessageBuilder()
    if message is None:
        return said
    rest = {"reasoning": message.get("reasoning_content") or "", "text": message.get("content") or ""}
    calls = message.get("tool_calls") or ()
    usual = [*((kind, len(text)) for kind, text in rest.items()), *(("call", index) for index in range(len(calls)))]
    for kind, size in message.get(ORDER) or usual:
        if kind == "call":
            one = calls[size]
            function = one["function"]
            call = ToolCallDelta(index=size, id=one["id"], name=function["name"], arguments=function["arguments"])
            said.add(Delta(tool_calls=(call,)))
        else:
            text, rest[kind] = rest[kind][:size], rest[kind][size:]
            said.add(Delta(text=text) if kind == "text" else Delta(reasoning=text))
    return said


def reasoning_tokens(delta: Delta) -> int:
    """Return how many tokens of reasoning a delta tells of, its tags among them."""
    return delta.kinds.count(TokenKind.REASONING) + delta.kinds.count(TokenKind.REASONING_TAG)


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
