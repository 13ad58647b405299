"""Bodies of Anthropic's Messages API, and the chat that they ask for.

Shapes: docs.anthropic.com/en/api/messages, as anthropic-python's `types.MessageCreateParams` states them. Clients send
undocumented fields of betas: unknown ones are ignored, and named in X-Cairn-Warning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from cairn.api.chat.client_tools import of_anthropic
from cairn.api.chat.openai_chunks import unpack
from cairn.api.http.body import Body, Count, Number, Several
from cairn.api.http.call import HTTPCall
from cairn.types.errors import InvalidRequest, Unsupported

ATTRIBUTION = re.compile(r"x-anthropic-billing-header:[^\n]*\n*", re.IGNORECASE)
"""A line that some clients put before the system prompt. It changes with every session and means nothing to a model."""
EFFORTS = {"xhigh": "high", "max": "high"}
"""Effort names of chat templates for Anthropic's other names."""
NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
"""This dialect's names for the fields of a chat."""
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesBody(Body):
    """POST /v1/messages; for /v1/messages/count_tokens without the fields of the answer."""

    place = "messages"
    attached = "messages"
    lenient: ClassVar[bool] = True

    model: str | None = None
    messages: Several[dict[str, Any]]
    max_tokens: Count = None
    system: Any = None
    tools: Several[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    """An older name for `output_config.format`."""
    stop_sequences: Several[str] | None = None
    stream: bool | None = None
    temperature: Number = None
    top_k: Count = None
    top_p: Number = None
    diagnostics: dict[str, Any] | None = None
    """`previous_message_id`: why is less cached than of that message?"""
    metadata: dict[str, Any] | None = None
    """`user_id`: some clients write JSON there, with a `session_id`."""

    @property
    def thinks(self) -> bool:
        """Whether thinking was asked for, and is to be shown."""
        return bool((self.thinking or {}).get("type", "disabled") != "disabled")

    @property
    def parts(self) -> dict[str, Any]:
        """Parts of the request that can be named as the reason why a prompt differs."""
        system = _system(self.system, "system") if self.system is not None else []
        tools = [{name: value for name, value in tool.items() if name != "cache_control"} for tool in self.tools or ()]
        return {"tools": tools, "system": system}

    @property
    def omits(self) -> bool:
        """Whether thinking is left out of the answer, except for its signature."""
        return (self.thinking or {}).get("display") == "omitted"


def chat_of(
    body: MessagesBody, call: HTTPCall, knows: Callable[[str], bool], *, answers: bool = True
) -> dict[str, Any]:
    """Return the fields of a `ChatBody` that a body asks for. `knows`: as in `ChatBody.template_args`.

    Raises InvalidRequest for a beginning of the answer, if the chat is to be answered.
    """
    messages = [] if body.system is None else _system(body.system, "system")
    for index, message in enumerate(body.messages):
        messages += _message(message, f"messages[{index}]", call)
    if answers and messages and messages[-1]["role"] == "assistant":
        raise InvalidRequest(
            "messages ends with an assistant message: to go on with a given beginning (prefill) is not built",
            field="messages",
        )
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "stop": body.stop_sequences,
        "tools": _tools(body.tools, call),
        "metadata": {name: value for name, value in (body.metadata or {}).items() if isinstance(value, str)} or None,
    }
    chat |= _thinking(body, knows)
    if body.tool_choice is not None:
        chat["tool_choice"] = _choice(body.tool_choice)
        if body.tool_choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
    form = (body.output_config or {}).get("format")
    if body.output_format is not None and form not in (None, body.output_format):
        raise InvalidRequest("output_config.format and output_format differ; give one of them", field="output_format")
    form = body.output_format if form is None else form
    if form is not None:
        schema = form.get("schema") if isinstance(form, dict) else None
        wanted = {"name": "output", "schema": schema}
        chat["response_format"] = {"type": "json_schema", "json_schema": wanted}
    return {name: value for name, value in chat.items() if value is not None}


def _thinking(body: MessagesBody, knows: Callable[[str], bool]) -> dict[str, Any]:
    """Return the template arguments for thinking. Without `thinking` there is none, as with Anthropic's models."""
    kind = (body.thinking or {}).get("type", "disabled")
    if kind not in ("enabled", "adaptive", "between_tools", "disabled"):
        raise InvalidRequest(
            "thinking.type must be enabled, adaptive, between_tools or disabled", field="thinking.type"
        )
    found: dict[str, Any] = {}
    if kind == "enabled":
        found["reasoning_budget"] = _budget(body.thinking or {})
    if knows("enable_thinking"):
        found["enable_thinking"] = kind != "disabled"
    effort = (body.output_config or {}).get("effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise InvalidRequest("output_config.effort must be a text", field="output_config.effort")
        if knows("reasoning_effort") and kind != "disabled":
            found["reasoning_effort"] = EFFORTS.get(effort, effort)
    return found


def _budget(thinking: Mapping[str, Any]) -> int | None:
    """Return the tokens after which thinking ends; None if the client leaves them out."""
    given = thinking.get("budget_tokens")
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < 1 << 31:
        raise InvalidRequest(
            "thinking.budget_tokens must be a whole number of tokens, below 2,147,483,648",
            field="thinking.budget_tokens",
        )
    return given


def _choice(given: Mapping[str, Any]) -> Any:
    kind = given.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidRequest("tool_choice.type must be auto, any, tool or none", field="tool_choice.type")
    return _CHOICES[kind]


def _tools(tools: list[dict[str, Any]] | None, call: HTTPCall) -> list[dict[str, Any]] | None:
    found = []
    named = [tool.get("name") for tool in tools or () if tool.get("type") in (None, "custom")]
    for index, tool in enumerate(tools or ()):
        where = f"tools[{index}]"
        kind = tool.get("type")
        if kind not in (None, "custom"):
            found += _client_tool(tool, where, named, call)
            continue
        name, schema = tool.get("name"), tool.get("input_schema", {})
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{where}.name must be 1 to 128 letters, digits, '_', '-' and '.'", field=f"{where}.name"
            )
        if not isinstance(schema, dict):
            raise InvalidRequest(f"{where}.input_schema must be an object", field=f"{where}.input_schema")
        function = {"name": name, "description": tool.get("description"), "parameters": schema}
        found.append({"type": "function", "function": function | _strict(tool)})
    return found or None


def _client_tool(tool: Mapping[str, Any], where: str, named: Collection[Any], call: HTTPCall) -> list[dict[str, Any]]:
    """Return a typed tool that clients run as a function; None for one that would run on a server."""
    kind = tool.get("type")
    if isinstance(kind, str) and kind.startswith("computer_"):
        raise Unsupported(f"{where}: {kind:.40} shows the model a screen, and models here read text", field=where)
    known = of_anthropic(kind)
    if known is None:
        call.warn(f"{where} is ignored: a tool of type {kind!s:.40} runs on a server, and none runs here")
        return []
    name = tool.get("name") or known.name
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"{where}.name must be 1 to 128 letters, digits, '_', '-' and '.'", field=f"{where}.name")
    if name in named:
        call.warn(f"{where} is ignored: a function is named {name} too")
        return []
    return [{"type": "function", "function": known.function(name) | _strict(tool)}]


def _strict(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"strict": True} if tool.get("strict") is True else {}


def _system(given: Any, where: str) -> list[dict[str, Any]]:
    """Return system texts as one message; none if nothing is left of them."""
    texts = [ATTRIBUTION.sub("", text, count=1) if ATTRIBUTION.match(text) else text for text in _texts(given, where)]
    text = "\n".join(text for text in texts if text)
    return [{"role": "system", "content": text}] if text else []


def _message(message: Mapping[str, Any], where: str, call: HTTPCall) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role in ("system", "developer"):  # in its place: moved to the front it would change all that was computed
        return _system(content, f"{where}.content")
    if role == "user":
        return _user(content, f"{where}.content", call)
    if role == "assistant":
        return [_assistant(content, f"{where}.content", call)]
    raise InvalidRequest(f"{where}.role must be user, assistant or system", field=f"{where}.role")


def _user(content: Any, where: str, call: HTTPCall) -> list[dict[str, Any]]:
    """Return the results of tools, each a message of its own, and texts, those beside each other one message."""
    found: list[dict[str, Any]] = []
    texts: list[str] = []

    def close() -> None:
        if texts:
            found.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for index, block in enumerate(_blocks(content, where)):
        at = f"{where}[{index}]"
        if block.get("type") == "tool_result":
            id = block.get("tool_use_id")
            if not isinstance(id, str):
                raise InvalidRequest(f"{at}.tool_use_id must be a text", field=f"{at}.tool_use_id")
            said = _texts(block.get("content") or "", f"{at}.content")
            close()
            found.append({"role": "tool", "tool_call_id": id, "content": "\n".join(said)})
        else:
            texts.append(_text(block, at))
    close()
    return found or [{"role": "user", "content": ""}]


def _assistant(content: Any, where: str, call: HTTPCall) -> dict[str, Any]:
    """Return thinking, texts and calls as one message."""
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(_blocks(content, where)):
        at, kind = f"{where}[{index}]", block.get("type")
        if kind == "thinking":
            thoughts.append(_field(block, "thinking", at) or unpack(block.get("signature")))
        elif kind == "redacted_thinking":
            thoughts.append(unpack(block.get("data")))
        elif kind == "tool_use":
            given = block.get("input", {})
            if not isinstance(given, dict):
                raise InvalidRequest(f"{at}.input must be an object", field=f"{at}.input")
            function = {"name": _field(block, "name", at), "arguments": json.dumps(given, ensure_ascii=False)}
            calls.append({"id": _field(block, "id", at), "type": "function", "function": function})
        elif kind == "text":
            texts.append(_field(block, "text", at))
        else:
            call.warn(f"{at} is ignored: this server knows no block of type {kind!s:.40}")
    thought, said = "".join(thoughts), "".join(texts)
    message: dict[str, Any] = {"role": "assistant", "content": said or (None if calls else "")}
    if thought:
        message["reasoning_content"] = thought
    return message | ({"tool_calls": calls} if calls else {})


def _texts(content: Any, where: str) -> list[str]:
    return [_text(block, f"{where}[{index}]") for index, block in enumerate(_blocks(content, where))]


def _text(block: Mapping[str, Any], where: str) -> str:
    """Return the text of a block that may stand in a prompt."""
    kind = block.get("type")
    if kind == "text":
        return _field(block, "text", where)
    source = block.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return _field(source, "data", f"{where}.source")
    if kind == "document" and isinstance(source, dict) and source.get("type") == "content":
        return "\n".join(_texts(source.get("content"), f"{where}.source.content"))
    if kind == "search_result":
        head = [_field(block, name, where) for name in ("title", "source")]
        return "\n".join([*head, *_texts(block.get("content"), f"{where}.content")])
    if kind == "tool_reference":
        return _field(block, "tool_name", where)
    raise Unsupported(f"{where}.type can only be text here, not {kind!s:.40}", field=f"{where}.type")


def _blocks(content: Any, where: str) -> list[Mapping[str, Any]]:
    """Return the blocks of a content; a text counts as one block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a text or a list of blocks", field=where)
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise InvalidRequest(f"{where}[{index}] must be an object", field=f"{where}[{index}]")
    return content


def _field(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be a text", field=f"{where}.{name}")
    return value
