"""Bodies of OpenAI's Responses API, and the chat that they ask for.

Shapes: platform.openai.com/docs/api-reference/responses, as openai-python's `types.responses` state them. Clients send
items and tools of services that run elsewhere: those are ignored, and named in X-Cairn-Warning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from cairn.api.chat.client_tools import OPENAI
from cairn.api.chat.free_text_tools import function_of, warning
from cairn.api.http.body import Body, Count, Number, Several, Stop
from cairn.api.http.call import HTTPCall
from cairn.api.openai.responses_items import Called, messages_of
from cairn.types.errors import InvalidRequest, Unsupported

NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""This dialect's names for the fields of a chat."""
EFFORTS = {"xhigh": "high", "max": "high"}
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


class ResponseBody(Body):
    """POST /v1/responses; for /v1/responses/input_tokens without the fields of the answer."""

    place = "responses"
    attached = "input"
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
    presence_penalty: Number = None
    frequency_penalty: Number = None
    seed: Count = None
    stop: Stop | None = None
    top_logprobs: Count = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    background: bool | None = None
    conversation: Any = None
    return_progress: bool | None = None
    """As of a chat."""
    max_tool_calls: Count = None
    """Of tools that run on a server: `file_search` alone does, once."""
    safety_identifier: str | None = None
    service_tier: str | None = None
    """All requests are served alike."""

    @property
    def compares(self) -> str | None:
        """The response whose prompt is compared with this one's."""
        found = (self.prompt_cache_options or {}).get("comparison_response_id")
        return found if isinstance(found, str) else None

    @property
    def parts(self) -> dict[str, Any]:
        """Parts of the request that can be named as the reason why a prompt differs."""
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
        """Whether the prompt is computed and nothing is generated."""
        return (self.prompt_cache_options or {}).get("prewarm") is True

    @property
    def summarises(self) -> bool:
        """Whether reasoning is sent as a summary: it is the whole, under that name."""
        return (self.reasoning or {}).get("summary") is not None

    def includes(self, what: str) -> bool:
        """Return whether the answer is to include this."""
        return what in (self.include or ())


class Tools:
    """The tools of a body as functions: those of a namespace under both names, one of free text with one argument."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None, call: HTTPCall) -> None:
        self.functions: list[dict[str, Any]] = []
        self.called: dict[str, Called] = {}
        """By the name that the model uses."""
        self.searches: list[tuple[str, dict[str, Any]]] = []
        """Tools that search files, with their places in the body."""
        self._named = [tool.get("name") for tool in tools or () if tool.get("type") in ("function", "custom")]
        for index, tool in enumerate(tools or ()):
            self._add(tool, f"tools[{index}]", call, None)

    def _add(self, tool: Mapping[str, Any], where: str, call: HTTPCall, namespace: str | None) -> None:
        kind = tool.get("type")
        if kind == "namespace" and namespace is None:
            inner = tool.get("tools")
            if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
                raise InvalidRequest(f"{where}.tools must be a list of tools", field=f"{where}.tools")
            for index, one in enumerate(inner):
                self._add(one, f"{where}.tools[{index}]", call, _name(tool, where))
        elif kind in ("function", "custom"):
            self._add_function(tool, where, call, namespace)
        elif kind == "file_search" and namespace is None:
            self.searches.append((where, dict(tool)))
        elif isinstance(kind, str) and kind in OPENAI and namespace is None and not _is_hosted(tool):
            self._add_client_tool(tool, kind, where, call)
        elif isinstance(kind, str) and kind.startswith("computer"):
            raise Unsupported(f"{where}: {kind:.40} shows the model a screen, and models here read text", field=where)
        else:
            call.warn(f"{where} is ignored: a tool of type {kind!s:.40} runs on a server, and it is not built")

    def _add_client_tool(self, tool: Mapping[str, Any], kind: str, where: str, call: HTTPCall) -> None:
        """Add a tool that the client runs, as a function held to its schema. Its calls are items of their own kind."""
        if kind in self._named:
            call.warn(f"{where} is ignored: a function is named {kind} too")
            return
        self.functions.append({"type": "function", "function": OPENAI[kind].function() | {"strict": True}})
        self.called[kind] = Called(kind, format=dict(tool), kind=kind)

    def _add_function(self, tool: Mapping[str, Any], where: str, call: HTTPCall, namespace: str | None) -> None:
        name, custom = _name(tool, where), tool.get("type") == "custom"
        told = name if namespace is None else f"{namespace}__{name}"
        description = tool.get("description")
        if not isinstance(description, str | None):
            raise InvalidRequest(f"{where}.description must be a text", field=f"{where}.description")
        if custom:
            made = function_of(told, description, tool.get("format"), f"{where}.format")
            function = made.function
            if made.why_not:
                call.warn(warning(where, made.why_not))
        else:
            parameters = tool.get("parameters")
            if parameters is not None and not isinstance(parameters, dict):
                raise InvalidRequest(f"{where}.parameters must be an object", field=f"{where}.parameters")
            function = {"name": told, "description": description or None, "parameters": parameters}
            if tool.get("strict") is True:
                function["strict"] = True
        self.functions.append({"type": "function", "function": function})
        if custom:
            given = tool.get("format")
            self.called[told] = Called(name, namespace, True, tool.get("description"), given or None)
        elif namespace is not None:
            self.called[told] = Called(name, namespace)


def tools_of(functions: Sequence[Mapping[str, Any]], called: Mapping[str, Called]) -> list[dict[str, Any]]:
    """Convert functions back to tools as the client sent them, those of a namespace inside it."""
    found: list[dict[str, Any]] = []
    spaces: dict[str, list[dict[str, Any]]] = {}
    for function in functions:
        how = called.get(str(function["name"]), Called(str(function["name"])))
        if how.kind:
            tool: dict[str, Any] = dict(how.format or {"type": how.kind})
        elif how.custom:
            tool = {"type": "custom", "name": how.name}
            tool |= {name: value for name in ("description", "format") if (value := getattr(how, name)) is not None}
        else:
            tool = {"type": "function", "strict": False} | dict(function) | {"name": how.name}
        if how.namespace is None:
            found.append(tool)
            continue
        if how.namespace not in spaces:
            spaces[how.namespace] = []
            found.append({"type": "namespace", "name": how.namespace, "tools": spaces[how.namespace]})
        spaces[how.namespace].append(tool)
    return found


def chat_of(body: ResponseBody, tools: Tools, call: HTTPCall) -> dict[str, Any]:
    """Return the fields of a `ChatBody` that a body asks for by itself."""
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
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "seed": body.seed,
        "stop": body.stop,
        "tools": tools.functions or None,
        "tool_choice": _choice_of(body, tools),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": None if effort is None else EFFORTS.get(effort, effort),
        "response_format": _format(text.get("format")),
        "return_progress": body.return_progress,
        "store": body.store,
        "metadata": body.metadata,
        "prompt_cache_key": body.prompt_cache_key,
    }
    if body.includes(LOGPROBS):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return {name: value for name, value in chat.items() if value is not None}


def instructed(instructions: str | None) -> list[dict[str, Any]]:
    """Return the system message of instructions; empty without any."""
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


def _choice_of(body: ResponseBody, tools: Tools) -> Any:
    """Return the choice among the functions. A tool that searches files is not chosen by the model."""
    given = body.tool_choice
    if given is None or (tools.searches and not tools.functions):
        return None
    return None if isinstance(given, dict) and given.get("type") == "file_search" else _choice(given)


def _choice(given: Any) -> Any:
    """Convert a tool choice to the form of chat completions."""
    if not isinstance(given, dict):
        return given
    kind = given.get("type")
    if isinstance(kind, str) and kind in OPENAI:
        return {"type": "function", "function": {"name": kind}}
    if kind in ("function", "custom"):
        name = given.get("name")
        namespace = given.get("namespace")
        return {"type": "function", "function": {"name": f"{namespace}__{name}" if namespace else name}}
    if kind == "allowed_tools":
        listed = given.get("tools")
        named = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else None
        tools = None if named is None else [_choice(one) for one in named if one.get("type") != "file_search"]
        return {"type": "allowed_tools", "allowed_tools": {"mode": given.get("mode", "auto"), "tools": tools}}
    return given


def _is_hosted(tool: Mapping[str, Any]) -> bool:
    """Return whether a shell is to run in a container of the server, and not at the client."""
    environment = tool.get("environment")
    return isinstance(environment, dict) and environment.get("type") in ("container_auto", "container_reference")


def _name(tool: Mapping[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        letters = "1 to 128 letters, digits, '_', '-' and '.'"
        raise InvalidRequest(f"{where}.name must be {letters}", field=f"{where}.name")
    return name
