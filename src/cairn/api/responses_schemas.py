"""Bodies of OpenAI's Responses API, and the chat that they ask for.

Shapes: platform.openai.com/docs/api-reference/responses, as openai-python's `types.responses` state them. Clients send
items and tools of services that run elsewhere: those are passed over, and told in X-Cairn-Warning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from cairn.api.reasoning_text import unpack
from cairn.api.reply import Call
from cairn.api.schemas import Body, Count, Number, Several
from cairn.errors import InvalidRequest, Unsupported

NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""What this dialect calls the fields of a chat."""
EFFORTS = {"xhigh": "high", "max": "high"}
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


class ResponseBody(Body):
    """POST /v1/responses, and /v1/responses/input_tokens without what is of the answer."""

    place = "responses"
    lenient: ClassVar[bool] = True

    model: str | None = None
    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count = None
    tools: Several[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: Several[str] | None = None
    stream: bool | None = None
    store: bool | None = None
    temperature: Number = None
    top_p: Number = None
    top_logprobs: Count = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    background: bool | None = None
    conversation: Any = None

    @property
    def compares(self) -> str | None:
        """The response with whose prompt this one is to be compared."""
        found = (self.prompt_cache_options or {}).get("comparison_response_id")
        return found if isinstance(found, str) else None

    @property
    def parts(self) -> dict[str, Any]:
        """What may be named as the reason why a prompt is another."""
        text, items = self.text or {}, self.input if isinstance(self.input, list) else []
        compacted = any(isinstance(item, dict) and item.get("type") == "compaction" for item in items)
        return {
            "tools_changed": self.tools or [],
            "text_format_changed": text.get("format"),
            "reasoning_effort_changed": (self.reasoning or {}).get("effort"),
            "verbosity_changed": text.get("verbosity"),
            "context_compacted": compacted,
        }

    @property
    def prewarms(self) -> bool:
        """Whether the prompt is to be computed, and nothing is to be said."""
        return (self.prompt_cache_options or {}).get("prewarm") is True

    @property
    def summarises(self) -> bool:
        """Whether reasoning is wanted as a summary; it is given whole, under that name."""
        return (self.reasoning or {}).get("summary") is not None

    def includes(self, what: str) -> bool:
        """Whether the answer is to have this."""
        return what in (self.include or ())


class Called(NamedTuple):
    """A tool whose calls are said otherwise than a function's."""

    name: str
    """Its own, without the namespace."""
    namespace: str | None = None
    custom: bool = False
    """Its input is free text."""


class Tools:
    """The tools of a body as functions: those of a namespace under both names, one of free text with one argument."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None, call: Call) -> None:
        self.functions: list[dict[str, Any]] = []
        self.called: dict[str, Called] = {}
        """By the name that the model uses."""
        for index, tool in enumerate(tools or ()):
            self._add(tool, f"tools[{index}]", call, None)

    def _add(self, tool: Mapping[str, Any], where: str, call: Call, namespace: str | None) -> None:
        kind = tool.get("type")
        if kind == "namespace" and namespace is None:
            inner = tool.get("tools")
            if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
                raise InvalidRequest(f"{where}.tools must be a list of tools", field=f"{where}.tools")
            for index, one in enumerate(inner):
                self._add(one, f"{where}.tools[{index}]", call, _name(tool, where))
        elif kind in ("function", "custom"):
            self._add_function(tool, where, namespace)
        else:
            call.warn(f"{where} is passed over: a tool of type {kind!s:.40} runs on a server, and none runs here")

    def _add_function(self, tool: Mapping[str, Any], where: str, namespace: str | None) -> None:
        name, custom = _name(tool, where), tool.get("type") == "custom"
        told = name if namespace is None else f"{namespace}__{name}"
        description = tool.get("description")
        if custom:
            form = tool.get("format") if isinstance(tool.get("format"), dict) else {}
            grammar = form.get("definition") if isinstance(form, dict) else None
            description = "\n".join(filter(None, [description, grammar and f"Its input has this grammar:\n{grammar}"]))
            text = {"type": "string", "description": "the whole input, as it is"}
            parameters: Any = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        else:
            parameters = tool.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise InvalidRequest(f"{where}.parameters must be an object", field=f"{where}.parameters")
        function = {"name": told, "description": description or None, "parameters": parameters}
        if tool.get("strict") is True:
            function["strict"] = True
        self.functions.append({"type": "function", "function": function})
        if custom or namespace is not None:
            self.called[told] = Called(name, namespace, custom)


def chat_of(body: ResponseBody, tools: Tools, call: Call) -> dict[str, Any]:
    """The chat that a body asks for by itself, as a `ChatBody` has it."""
    reasoning, text = body.reasoning or {}, body.text or {}
    effort = reasoning.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise InvalidRequest("reasoning.effort must be a text", field="reasoning.effort")
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": [*instructed(body.instructions), *messages_of(body.input, call)],
        "max_completion_tokens": 0 if body.prewarms else body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": tools.functions or None,
        "tool_choice": None if body.tool_choice is None else _choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": None if effort is None else EFFORTS.get(effort, effort),
        "response_format": _format(text.get("format")),
        "store": body.store,
        "metadata": body.metadata,
        "prompt_cache_key": body.prompt_cache_key,
    }
    if body.includes(LOGPROBS):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return {name: value for name, value in chat.items() if value is not None}


def instructed(instructions: str | None) -> list[dict[str, Any]]:
    """The message of instructions."""
    return [{"role": "system", "content": instructions}] if instructions else []


def _format(given: Any) -> Any:
    if given is None or (isinstance(given, dict) and given.get("type") == "text"):
        return None
    if isinstance(given, dict) and given.get("type") == "json_schema":
        schema = {
            name: given[name] for name in ("name", "description", "schema", "strict") if given.get(name) is not None
        }
        return {"type": "json_schema", "json_schema": schema}
    return given


def _choice(given: Any) -> Any:
    """A choice as chat completions have it."""
    if not isinstance(given, dict):
        return given
    kind = given.get("type")
    if kind in ("function", "custom"):
        name = given.get("name")
        namespace = given.get("namespace")
        return {"type": "function", "function": {"name": f"{namespace}__{name}" if namespace else name}}
    if kind == "allowed_tools":
        tools = [_choice(one) for one in given.get("tools") or () if isinstance(one, dict)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": given.get("mode", "auto"), "tools": tools}}
    return given


def _name(tool: Mapping[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        letters = "1 to 128 letters, digits, '_', '-' and '.'"
        raise InvalidRequest(f"{where}.name must be {letters}", field=f"{where}.name")
    return name


# --------------------------------------------------------------------------------------------------------- input items


def messages_of(given: Any, call: Call) -> list[dict[str, Any]]:
    """Input items as messages. What an assistant thought, said and called one after another is one message."""
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
    return reader.messages


class _Items:
    """Reads input items in order."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.messages: list[dict[str, Any]] = []
        self._kinds: Mapping[str, Callable[[Mapping[str, Any], str], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._function_call,
            "custom_tool_call": self._custom_call,
            "function_call_output": self._output,
            "custom_tool_call_output": self._output,
            "compaction": self._compaction,
        }

    def add(self, item: Mapping[str, Any], where: str) -> None:
        """The next item."""
        kind = item.get("type", "message" if "role" in item else None)
        read = self._kinds.get(kind) if isinstance(kind, str) else None
        if read is not None:
            read(item, where)
        elif kind == "item_reference":
            raise Unsupported(f"{where}: items are not kept one by one; send the item itself", field=where)
        elif not isinstance(kind, str):
            raise InvalidRequest(f"{where}.type must be a text", field=f"{where}.type")
        else:
            self._call.warn(f"{where} is passed over: an item of type {kind:.40} is nothing to this server")

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise InvalidRequest(f"{where}.role must be user, assistant, system or developer", field=f"{where}.role")
        texts = _texts(item.get("content"), f"{where}.content")
        if role != "assistant":
            self.messages.append({"role": role, "content": "\n".join(texts)})
            return
        answer = self._answer(lambda last: not last["content"] or "tool_calls" in last)
        answer["content"] = (answer["content"] or "") + "".join(texts)

    def _reasoning(self, item: Mapping[str, Any], where: str) -> None:
        text = unpack(item.get("encrypted_content"))
        for name in ("content", "summary"):
            if not text and item.get(name):
                text = "".join(_texts(item[name], f"{where}.{name}"))
        if text:
            answer = self._answer(lambda last: not last["content"] and "tool_calls" not in last)
            answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def _function_call(self, item: Mapping[str, Any], where: str) -> None:
        name, namespace = _text(item, "name", where), item.get("namespace")
        if isinstance(namespace, str):
            name = f"{namespace}__{name}"
        self._add_call(item, name, _text(item, "arguments", where), where)

    def _custom_call(self, item: Mapping[str, Any], where: str) -> None:
        arguments = json.dumps({"input": _text(item, "input", where)}, ensure_ascii=False)
        self._add_call(item, _text(item, "name", where), arguments, where)

    def _add_call(self, item: Mapping[str, Any], name: str, arguments: str, where: str) -> None:
        function = {"name": name, "arguments": arguments}
        answer = self._answer(lambda last: True)
        made = {"id": _text(item, "call_id", where), "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(made)

    def _output(self, item: Mapping[str, Any], where: str) -> None:
        output = "\n".join(_texts(item.get("output"), f"{where}.output"))
        self.messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": output})

    def _compaction(self, item: Mapping[str, Any], where: str) -> None:
        text = unpack(item.get("encrypted_content"))
        if not text:
            raise InvalidRequest(
                f"{where}.encrypted_content is not of this server: what was compacted elsewhere cannot be read",
                field=f"{where}.encrypted_content",
            )
        self.messages.append({"role": "user", "content": text})

    def _answer(self, goes_on: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The assistant's message that an item belongs to: the last, where the item `goes_on` with it."""
        if not self.messages or self.messages[-1]["role"] != "assistant" or not goes_on(self.messages[-1]):
            self.messages.append({"role": "assistant", "content": None})
        return self.messages[-1]


def _texts(content: Any, where: str) -> list[str]:
    """The texts of a content or of an output."""
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
        elif kind in _TEXTS:
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


def items_of(messages: Sequence[Mapping[str, Any]], called: Mapping[str, Called], prefix: str) -> list[dict[str, Any]]:
    """Messages as items, those of an answer last: what a client would have to send to say the same."""
    items: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message.get("content")
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content)
        if role == "tool":
            items.append(
                {"type": "function_call_output", "call_id": message.get("tool_call_id", ""), "output": content or ""}
            )
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
    marks = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
    return [
        {"id": f"{marks.get(item['type'], 'fco')}_{prefix}_{n}", "status": "completed"} | item
        for n, item in enumerate(items)
    ]


def call_item(id: str, name: str, arguments: str, called: Mapping[str, Called]) -> dict[str, Any]:
    """A call as an item."""
    tool = called.get(name, Called(name))
    more = {} if tool.namespace is None else {"namespace": tool.namespace}
    if tool.custom:
        return {"type": "custom_tool_call", "call_id": id, "name": tool.name, "input": free_text(arguments)} | more
    return {"type": "function_call", "call_id": id, "name": tool.name, "arguments": arguments} | more


def free_text(arguments: str) -> str:
    """The input of a tool of free text; what a model made otherwise stands as it is."""
    try:
        found = json.loads(arguments)["input"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return arguments
    return found if isinstance(found, str) else arguments
