"""OpenAI's chat messages: built from an answer's pieces, and converted to the plain dicts that templates expect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cairn.text.output.json_scan import MAX_DEPTH
from cairn.types.errors import InvalidRequest, Unsupported
from cairn.types.outputs import Delta, TokenKind, ToolCallDelta

_TOOL_INSTRUCTIONS = """You can call functions. Each line is one of them:
{tools}

To call a function, write its name and its arguments as JSON between these tags, and wait for the result:
<tool_call>
{{"name": "<the name>", "arguments": {{<the arguments>}}}}
</tool_call>"""


def with_tools_by_instruction(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Describe the tools and how to call them in the first message: after a system text, before any other text."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = _TOOL_INSTRUCTIONS.format(tools="\n".join(lines))
    first, *rest = messages
    said = first["content"] or ""
    whole = f"{said}\n\n{text}" if first["role"] == "system" else f"{text}\n\n{said}"
    return [{**first, "content": whole}, *rest]


ORDER = "order"
"""Field of a stored message: the order of its parts, if it is not the usual one."""
_USUAL = ("reasoning", "text", "call")


class MessageBuilder:
    """An assistant message assembled from the deltas of an answer."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[str]] = {"reasoning": [], "text": []}
        self._calls: dict[int, list[str]] = {}
        """Index -> [id, name, pieces of the arguments...]."""
        self._order: list[list[Any]] = []
        """The parts in order: ["reasoning" or "text", characters] or ["call", index]."""

    def __bool__(self) -> bool:
        return bool(self._order)

    def add(self, delta: Delta) -> None:
        """Append the next delta."""
        if delta.reasoning:
            self._say("reasoning", delta.reasoning)
        if delta.text:
            self._say("text", delta.text)
        for piece in delta.tool_calls:
            if piece.index not in self._calls:
                self._order.append(["call", piece.index])
            self._calls.setdefault(piece.index, [piece.id, piece.name]).append(piece.arguments)

    def _say(self, kind: str, text: str) -> None:
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
        """The reasoning."""
        return "".join(self._pieces["reasoning"])

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        """(id, name, arguments) of each tool call."""
        return [(one[0], one[1], "".join(one[2:])) for _, one in sorted(self._calls.items())]

    def parts(self) -> list[Delta]:
        """Return the parts in order; each delta is one stretch of reasoning or text, or one whole call."""
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
        """Return the message in OpenAI's format."""
        return message_of(self.text, self.reasoning, self.calls)

    def kept(self) -> dict[str, Any]:
        """Return the message as it is stored: with its order of parts if that is not the usual one."""
        ranks = [_USUAL.index(kind) for kind, _ in self._order]
        return self.message() | ({} if ranks == sorted(ranks) else {ORDER: self._order})


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored message without the fields that only storage uses."""
    return {name: value for name, value in message.items() if name != ORDER}


def said_of(message: Mapping[str, Any] | None) -> MessageBuilder:
    """Rebuild the parts of a stored message in their original order."""
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
    """Count the reasoning tokens of a delta, tags included."""
    return delta.kinds.count(TokenKind.REASONING) + delta.kinds.count(TokenKind.REASONING_TAG)


def message_of(text: str, reasoning: str, calls: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    """Build an assistant message; `calls` are (id, name, arguments).

    The content is None if the model only called tools.
    """
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
    """Return a call's arguments as an object; any other value is wrapped as {"arguments": value}."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, dict) else {"arguments": value}


_THOUGHT = re.compile(r"\s*<think>\n*+(.*?)\n?</think>\n*", re.DOTALL)
_NAMES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "text"}) | {
    "object", "array", "string", "integer", "number", "boolean", "null"
}  # fmt: skip
"""Roles, and types of parts, calls and schemas: templates compare with them, so they are never changed."""


_MARKS = [chr(code) for block in (range(0xFDE0, 0xFDF0), range(0x10F000, 0x10FF00)) for code in block]


def plain_message(message: Mapping[str, Any], index: int, *, thinks: bool) -> dict[str, Any]:
    """Convert one message to the form that templates expect; fields that are None or unknown are dropped.

    Content becomes one text (parts joined by line breaks), `developer` becomes `system`, a call's arguments become an
    object. If the template knows reasoning (`thinks`), a leading `<think>...</think>` is split off, so that the
    template decides whether to keep it. Raises InvalidRequest or Unsupported naming the field.
    """
    where = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest(f"{where}.role must be a text", field=f"{where}.role")
    role = "system" if role == "developer" else role
    content = _content(message.get("content"), f"{where}.content")
    plain: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if not reasoning and thinks and (found := _THOUGHT.match(content)):
            reasoning, plain["content"] = found[1], content[found.end() :]
        if reasoning:
            if not isinstance(reasoning, str):
                field = f"{where}.reasoning_content"
                raise InvalidRequest(f"{field} must be a text", field=field)
            plain["reasoning_content"] = reasoning
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list | tuple):
                raise InvalidRequest(f"{where}.tool_calls must be a list", field=f"{where}.tool_calls")
            plain["tool_calls"] = [_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            plain[name] = message[name]
    return plain


def unused_marks(texts: Iterable[str]) -> tuple[str, str]:
    """Return two private-use characters that no text contains. Raises InvalidRequest if all are used."""
    used = {mark for text in texts if not text.isascii() for mark in set(text)}
    free = (mark for mark in _MARKS if mark not in used)
    try:
        return next(free), next(free)
    except StopIteration:
        raise InvalidRequest("messages use every private character there is", field="messages") from None


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with `change` applied to every text, keys included, except known roles and types."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): item if _is_name(key, item) else with_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_texts(item, change) for item in value]
    return value


def with_message_texts(message: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return a plain message with `change` applied to every text, except roles, types and field names."""
    made = {key: item if _is_name(key, item) else with_texts(item, change) for key, item in message.items()}
    if "tool_calls" in message:
        made["tool_calls"] = [
            {
                "type": call["type"],
                "function": {key: with_texts(item, change) for key, item in call["function"].items()},
                **({"id": change(call["id"])} if "id" in call else {}),
            }
            for call in message["tool_calls"]
        ]
    return made


def _is_name(key: str, value: Any) -> bool:
    return key in ("role", "type") and isinstance(value, str) and value in _NAMES


def _content(content: Any, field: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"{field} must be a text or a list of parts", field=field)
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise Unsupported(f"{field} has a part of type {kind!r}; only 'text' is supported", field=field)
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{field} has a text part without text", field=field)
        texts.append(part["text"])
    return "\n".join(texts)


def _call(call: Any, field: str) -> dict[str, Any]:
    """Return a tool call with its arguments parsed to an object.

    Arguments that are not a JSON object, or are nested too deeply, stay a text: an answer that was cut in the middle
    of a call must not make every later turn fail.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{field}.function.name must be a text", field=f"{field}.function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) and not _is_deep(parsed) else arguments
    plain = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    return {**plain, "id": call["id"]} if isinstance(call.get("id"), str) else plain


def _is_deep(value: dict[str, Any]) -> bool:
    """Return whether a value is nested deeper than MAX_DEPTH."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        items = (item for each in level for item in (each.values() if isinstance(each, dict) else each))
        level = [item for item in items if isinstance(item, dict | list)]
    return bool(level)
