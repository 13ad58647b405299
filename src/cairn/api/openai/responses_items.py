"""Conversion between items of OpenAI's Responses API and messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cairn.api.chat.client_tools import OPENAI
from cairn.api.chat.free_text_tools import free_text, packed
from cairn.api.chat.openai_chunks import unpack
from cairn.api.http.call import HTTPCall
from cairn.types.errors import InvalidRequest, Unsupported

SEARCHED = "Sources, found by a search of the files for what follows.\n\n"
"""Beginning of the part of a message that a search has added; it is not the client's."""
_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


MARKS: Mapping[str, str] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "shell_call": "sh",
    "local_shell_call": "lsh",
    "apply_patch_call": "apc",
}
"""Prefixes of item ids, by type."""


class Called(NamedTuple):
    """A tool whose calls have another form than a function's."""

    name: str
    """Its own, without the namespace."""
    namespace: str | None = None
    custom: bool = False
    """Its input is free text."""
    description: str | None = None
    """The client's description of a free-text tool; the model reads its grammar too."""
    format: dict[str, Any] | None = None
    """The grammar of its input, as the client sent it; of a client's own tool all that it sent."""
    kind: str = ""
    """The type of a tool that the client names by it alone, such as `shell`: its calls are items of a kind of their
    own."""


def messages_of(given: Any, call: HTTPCall) -> list[dict[str, Any]]:
    """Convert input items to messages.

    An assistant's consecutive reasoning, text and calls become one message.
    """
    if given is None:
        return []
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise InvalidRequest("input must be a text or a list of items", field="input")
    reader = _Items(call)
    for index, item in enumerate(given):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise InvalidRequest(f"{where} must be an object", field=where)
        reader.add(item, where)
    return reader.end()


class _Items:
    """Reads input items in order."""

    def __init__(self, call: HTTPCall) -> None:
        self._call = call
        self.messages: list[dict[str, Any]] = []
        self._said: list[str] = []
        self._thought: list[str] = []
        """Texts and thoughts of the last message, an assistant's, piece by piece: there may be many."""
        self._speaks = False
        """Whether its text is not empty."""
        self._kinds: Mapping[str, Callable[[Mapping[str, Any], str], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._function_call,
            "custom_tool_call": self._custom_call,
            "function_call_output": self._output,
            "custom_tool_call_output": self._output,
            **dict.fromkeys(("shell_call", "local_shell_call", "apply_patch_call"), self._client_call),
            **dict.fromkeys(("shell_call_output", "local_shell_call_output"), self._shell_output),
            "apply_patch_call_output": self._shell_output,
            "compaction": self._compaction,
            "file_search_call": lambda item, where: None,  # its passages stood in a message, and the answer follows
        }

    def end(self) -> list[dict[str, Any]]:
        """Return all messages."""
        self._close()
        return self.messages

    def _close(self) -> None:
        """Put an assistant's texts and thoughts into its message."""
        if self._said:
            self.messages[-1]["content"] = "".join(self._said)
        if self._thought:
            self.messages[-1]["reasoning_content"] = "".join(self._thought)
        self._said, self._thought, self._speaks = [], [], False

    def _put(self, message: dict[str, Any]) -> None:
        self._close()
        self.messages.append(message)

    def add(self, item: Mapping[str, Any], where: str) -> None:
        """Add the next item."""
        kind = item.get("type", "message" if "role" in item else None)
        read = self._kinds.get(kind) if isinstance(kind, str) else None
        if read is not None:
            read(item, where)
        elif not isinstance(kind, str):
            raise InvalidRequest(f"{where}.type must be a text", field=f"{where}.type")
        else:
            self._call.warn(f"{where} is ignored: this server knows no item of type {kind:.40}")

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise InvalidRequest(f"{where}.role must be user, assistant, system or developer", field=f"{where}.role")
        texts = _texts(item.get("content"), f"{where}.content")
        if role != "assistant":
            self._put({"role": role, "content": "\n".join(texts)})
            return
        self._answer(lambda last: not self._speaks or "tool_calls" in last)
        self._said += texts or [""]
        self._speaks = self._speaks or any(texts)

    def _reasoning(self, item: Mapping[str, Any], where: str) -> None:
        text = unpack(item.get("encrypted_content"))
        for name in ("content", "summary"):
            if not text and item.get(name):
                text = "".join(_texts(item[name], f"{where}.{name}"))
        if text:
            self._answer(lambda last: not self._speaks and "tool_calls" not in last)
            self._thought.append(text)

    def _function_call(self, item: Mapping[str, Any], where: str) -> None:
        self._add_call(item, _called(item, where), _text(item, "arguments", where), where)

    def _custom_call(self, item: Mapping[str, Any], where: str) -> None:
        self._add_call(item, _called(item, where), packed(_text(item, "input", where)), where)

    def _client_call(self, item: Mapping[str, Any], where: str) -> None:
        kind = str(item["type"]).removesuffix("_call")
        name = "operation" if kind == "apply_patch" else "action"
        given = item.get(name)
        if not isinstance(given, dict):
            raise InvalidRequest(f"{where}.{name} must be an object", field=f"{where}.{name}")
        known = OPENAI[kind].parameters["properties"]
        made = {key: value for key, value in given.items() if key in known and value not in (None, {})}
        if kind == "apply_patch":
            made.setdefault("diff", "")
        self._add_call(item, kind, json.dumps(made, ensure_ascii=False), where)

    def _shell_output(self, item: Mapping[str, Any], where: str) -> None:
        output = item.get("output")
        if isinstance(output, list):
            text = "\n".join(_shown_output(one, f"{where}.output[{at}]") for at, one in enumerate(output))
        else:
            text = output if isinstance(output, str) else str(item.get("status") or "")
        id = item if "call_id" in item else {"call_id": item.get("id")}
        self._put({"role": "tool", "tool_call_id": _text(id, "call_id", where), "content": text})

    def _add_call(self, item: Mapping[str, Any], name: str, arguments: str, where: str) -> None:
        function = {"name": name, "arguments": arguments}
        answer = self._answer(lambda last: True)
        made = {"id": _text(item, "call_id", where), "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(made)

    def _output(self, item: Mapping[str, Any], where: str) -> None:
        output = "\n".join(_texts(item.get("output"), f"{where}.output"))
        self._put({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": output})

    def _compaction(self, item: Mapping[str, Any], where: str) -> None:
        text = unpack(item.get("encrypted_content"))
        if not text:
            raise InvalidRequest(
                f"{where}.encrypted_content was made by another server and cannot be read",
                field=f"{where}.encrypted_content",
            )
        self._put({"role": "user", "content": text})

    def _answer(self, goes_on: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the assistant's message that an item belongs to: the last if the item continues it, else a new one."""
        if not self.messages or self.messages[-1]["role"] != "assistant" or not goes_on(self.messages[-1]):
            self._put({"role": "assistant", "content": None})
        return self.messages[-1]


def _called(item: Mapping[str, Any], where: str) -> str:
    """Return the name of the tool that a call means, with its namespace if it has one."""
    name, namespace = _text(item, "name", where), item.get("namespace")
    return f"{namespace}__{name}" if isinstance(namespace, str) else name


def _shown_output(output: Any, where: str) -> str:
    """Return what one of a shell's commands wrote, and how it ended, as a text."""
    if not isinstance(output, dict):
        raise InvalidRequest(f"{where} must be an object", field=where)
    outcome = output.get("outcome")
    outcome = outcome if isinstance(outcome, dict) else {}
    code = outcome.get("exit_code")
    ended = "[timed out]" if outcome.get("type") == "timeout" else f"[exit code {code}]" if code else ""
    texts = [str(output.get("stdout") or ""), str(output.get("stderr") or ""), ended]
    return "\n".join(text.rstrip("\n") for text in texts if text)


def _texts(content: Any, where: str) -> list[str]:
    """Return the texts of a content or of an output."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a text or a list of parts", field=where)
    found = []
    for index, part in enumerate(content):
        at = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise InvalidRequest(f"{at} must be an object", field=at)
        kind = part.get("type")
        if kind == "refusal":
            found.append(_text(part, "refusal", at))
        elif isinstance(kind, str) and kind in _TEXTS:
            found.append(_text(part, "text", at))
        else:
            raise Unsupported(
                f"{at}.type can only be a text here, not {kind!s:.40}: images, sound and files are not read",
                field=f"{at}.type",
            )
    return found


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be a text", field=f"{where}.{name}")
    return value


def items_of(
    messages: Sequence[Mapping[str, Any]],
    called: Mapping[str, Called],
    prefix: str,
    number: Callable[[int], int] = lambda place: place,
) -> list[dict[str, Any]]:
    """Convert messages to items, those of an answer last: what a client would send to say the same.

    `number` returns the number in an item's id, from the item's place.
    """
    items: list[dict[str, Any]] = []
    kinds: dict[str, str] = {}
    for message in messages:
        role, content = message["role"], message.get("content")
        if isinstance(content, list):
            parts = [part["text"] for part in content]
            found = role == "user" and len(parts) > 1 and parts[0].startswith(SEARCHED)
            content = "\n".join(parts[1:] if found else parts)
        if role == "tool":
            id = message.get("tool_call_id", "")
            items.append(_output_item(kinds.get(id, "function_call"), id, content or ""))
            continue
        if message.get("reasoning_content"):
            part = {"type": "reasoning_text", "text": message["reasoning_content"]}
            items.append({"type": "reasoning", "summary": [], "content": [part]})
        if content or role != "assistant":
            part = {"type": "output_text" if role == "assistant" else "input_text", "text": content or ""}
            if role == "assistant":
                part |= {"annotations": [], "logprobs": []}
            items.append({"type": "message", "role": role, "content": [part]})
        for call in message.get("tool_calls") or ():
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            items.append(call_item(call.get("id", ""), name, arguments, called))
            kinds[call.get("id", "")] = items[-1]["type"]
    return [
        {"id": f"{MARKS.get(item['type'], 'fco')}_{prefix}_{number(place)}", "status": "completed"} | item
        for place, item in enumerate(items)
    ]


def _output_item(call: str, id: str, text: str) -> dict[str, Any]:
    """Return a result as an item, by the type of its call's item."""
    found: dict[str, Any] = {"type": f"{call}_output", "call_id": id}
    if call == "shell_call":
        outcome = {"type": "exit", "exit_code": 0}
        return found | {"output": [{"stdout": text, "stderr": "", "outcome": outcome}], "max_output_length": None}
    if call == "apply_patch_call":
        return found | (
            {"status": text} if text in ("completed", "failed") else {"status": "completed", "output": text}
        )
    return found | {"output": text}


def call_item(id: str, name: str, arguments: str, called: Mapping[str, Called]) -> dict[str, Any]:
    """Return a call as an item."""
    tool = called.get(name, Called(name))
    if tool.kind:
        return {"type": f"{tool.kind}_call", "call_id": id} | _client_item(tool.kind, arguments)
    more = {} if tool.namespace is None else {"namespace": tool.namespace}
    if tool.custom:
        return {"type": "custom_tool_call", "call_id": id, "name": tool.name, "input": free_text(arguments)} | more
    return {"type": "function_call", "call_id": id, "name": tool.name, "arguments": arguments} | more


def _client_item(kind: str, arguments: str) -> dict[str, Any]:
    """Return the fields of a call to a client's own tool; of an incomplete call those that are there."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        given = {}
    given = given if isinstance(given, dict) else {}
    if kind == "apply_patch":
        operation = {"type": "update_file", "path": "", "diff": ""} | given
        if operation["type"] == "delete_file":
            del operation["diff"]
        return {"operation": operation}
    if kind == "local_shell":
        return {"action": {"type": "exec", "command": [], "env": {}} | given}
    return {"action": {"commands": [], "timeout_ms": None, "max_output_length": None} | given}
