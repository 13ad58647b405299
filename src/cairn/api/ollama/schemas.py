"""Bodies of Ollama's API, and the chat or the text that they ask for.

Shapes: github.com/ollama/ollama, docs/api.md, as ollama-python's `_types` state them. Ollama ignores unknown fields, so
its clients send all manner of things: unknown fields are named in X-Cairn-Warning.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from cairn.api.chat.schemas import Generation
from cairn.api.http.body import Body, Count, Number, Several, Stop
from cairn.api.http.call import HTTPCall
from cairn.types.errors import InvalidRequest, Unsupported

NAMES = {
    "prompt": "messages",
    "max_completion_tokens": "options.num_predict",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "response_format.json_schema.schema": "format",
    "reasoning_effort": "think",
    **{name: f"options.{name}" for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
    **{name: f"options.{name}" for name in ("presence_penalty", "frequency_penalty", "typical_p")},
    **{name: f"options.{name}" for name in ("mirostat", "mirostat_tau", "mirostat_eta")},
}
"""This dialect's names for the fields of a chat."""
TEXT_NAMES = NAMES | {"prompt": "prompt", "messages": "prompt"}
"""Its names for them if the chat is one prompt."""


class Options(Body):
    """`options` of a request: how to sample."""

    place = "options"
    lenient: ClassVar[bool] = True

    num_predict: Count = None
    """0 and less: until the context is full."""
    num_ctx: Count = None
    temperature: Number = None
    top_k: Count = None
    top_p: Number = None
    min_p: Number = None
    seed: Count = None
    stop: Stop | None = None
    repeat_penalty: Number = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    typical_p: Number = None
    mirostat: Count = None
    mirostat_tau: Number = None
    mirostat_eta: Number = None

    def sampling(self) -> dict[str, Any]:
        """Return the options by the names of a `ChatBody`."""
        most = self.num_predict
        return {
            "n_predict": -1 if most is not None and most <= 0 else most,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": self.stop or None,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "typical_p": self.typical_p,
            "mirostat": self.mirostat,
            "mirostat_tau": self.mirostat_tau,
            "mirostat_eta": self.mirostat_eta,
        }


class OllamaBody(Body):
    """The fields that /api/chat and /api/generate share."""

    place = "ollama"
    within: ClassVar[dict[str, type[Body]]] = {"options": Options}
    lenient: ClassVar[bool] = True

    model: str | None = None
    stream: bool | None = None
    """True by default."""
    think: Any = None
    format: Any = None
    options: Options | None = None
    logprobs: bool | None = None
    top_logprobs: Count = None

    @property
    def streams(self) -> bool:
        """Whether the answer comes in pieces."""
        return self.stream is not False

    @property
    def hides(self) -> bool:
        """Whether thinking is hidden."""
        return self.think is False

    def common(self, knows: Callable[[str], bool], *, thinks: bool) -> dict[str, Any]:
        """Return the fields of a `ChatBody` without its messages.

        `knows`: as in `ChatBody.template_args`; `thinks`: whether the model can think.
        """
        chat = (self.options or Options()).sampling()
        chat |= {"model": self.model, "logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        if self.logprobs is None and self.top_logprobs:
            chat["logprobs"] = True
        chat |= self._thinking(knows, thinks=thinks)
        if self.format not in (None, ""):
            chat["response_format"] = _form(self.format)
        return chat

    def _thinking(self, knows: Callable[[str], bool], *, thinks: bool) -> dict[str, Any]:
        think = self.think
        if not isinstance(think, bool | str | None):
            raise InvalidRequest('think must be true, false, "low", "medium" or "high"', field="think")
        if think and not thinks:
            raise Unsupported("this model does not support thinking; leave think out", field="think")
        found: dict[str, Any] = {}
        if think is not None and knows("enable_thinking"):
            found["enable_thinking"] = bool(think)
        if isinstance(think, str) and knows("reasoning_effort"):
            found["reasoning_effort"] = think
        return found


class OllamaChatBody(OllamaBody):
    """POST /api/chat."""

    attached = "messages"

    messages: Several[dict[str, Any]] | None = None
    tools: Several[dict[str, Any]] | None = None


class OllamaGenerateBody(OllamaBody):
    """POST /api/generate."""

    attached = "prompt"

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: Several[int] | None = None
    """Tokens that an earlier answer returned: the context before the prompt."""


class OllamaEmbedBody(Body):
    """POST /api/embed."""

    place = "ollama"
    within: ClassVar[dict[str, type[Body]]] = {"options": Options}
    lenient: ClassVar[bool] = True

    model: str | None = None
    input: Stop | None = None
    """Empty: the model is to be loaded."""
    truncate: bool | None = None
    """False: refuse a text that is too long; by default it is cut."""
    dimensions: Count = None
    options: Options | None = None


class OllamaEmbeddingsBody(Body):
    """POST /api/embeddings, its older form."""

    place = "ollama"
    within: ClassVar[dict[str, type[Body]]] = {"options": Options}
    lenient: ClassVar[bool] = True

    model: str | None = None
    prompt: str | None = None
    """The same."""
    options: Options | None = None


class NameBody(Body):
    """The body of /api/show, pull and delete. `name` is the older name of `model`."""

    place = "model"
    lenient: ClassVar[bool] = True
    synonyms: ClassVar[Mapping[str, str]] = {"name": "model"}

    model: str
    stream: bool | None = None

    @classmethod
    def usual(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Drop an empty `name` or `model`: Ollama's own client sends both, one of them empty."""
        return {key: item for key, item in value.items() if item != "" or key not in ("name", "model")}


class CopyBody(Body):
    """POST /api/copy."""

    source: str
    destination: str


def chat_of(body: OllamaChatBody, knows: Callable[[str], bool], *, thinks: bool) -> dict[str, Any]:
    """Return the fields of a `ChatBody` that a body asks for."""
    chat = body.common(knows, thinks=thinks)
    calls = _OpenCalls()
    chat["messages"] = [
        _message(message, f"messages[{index}]", calls) for index, message in enumerate(body.messages or ())
    ]
    if chat["messages"][-1]["role"] == "assistant":
        raise InvalidRequest(
            "messages ends with an assistant message: to go on with a given beginning is not built", field="messages"
        )
    chat["tools"] = [_tool(tool) for tool in body.tools or ()] or None
    return _given(chat)


def prompt_chat(body: OllamaGenerateBody, knows: Callable[[str], bool], *, thinks: bool) -> dict[str, Any]:
    """Return the fields of a `ChatBody` with one prompt."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    user = {"role": "user", "content": body.prompt or ""}
    return _given(body.common(knows, thinks=thinks) | {"messages": [*system, user]})


def raw_text(body: OllamaGenerateBody, knows: Callable[[str], bool], *, thinks: bool) -> dict[str, Any]:
    """Return the fields of a `Generation` for a text without a template around it.

    Raises Unsupported for fields that need a template.
    """
    for name in ("system", "think"):
        if getattr(body, name):
            raise Unsupported(f"{name} needs a chat template, and this prompt is completed without one", field=name)
    chat = body.common(knows, thinks=thinks)
    known = {*Generation.model_fields, *Generation.synonyms, "response_format"}
    return _given({name: value for name, value in chat.items() if name in known})


def _given(chat: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in chat.items() if value is not None}


def _form(given: Any) -> dict[str, Any]:
    """Return the `response_format` of a `format`."""
    if given == "json":
        return {"type": "json_object"}
    if isinstance(given, dict):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given}}
    raise InvalidRequest('format must be "json" or a JSON schema', field="format")


class _OpenCalls:
    """Calls that no result was given of, in their order. Finding one takes a moment however many there are."""

    def __init__(self) -> None:
        self._open: dict[int, str] = {}
        """The id of each, by its number."""
        self._by_id: dict[str, list[int]] = {}
        self._by_name: dict[str, deque[int]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, name: str, id: str) -> None:
        """Note a call."""
        self._open[self._next] = id
        self._by_id.setdefault(id, []).append(self._next)
        self._by_name.setdefault(name, deque()).append(self._next)
        self._next += 1

    def answer(self, id: str) -> None:
        """Note a result, which answers all calls of this id."""
        for number in self._by_id.pop(id, ()):
            self._open.pop(number, None)

    def first(self, name: object) -> str | None:
        """Remove the first call of that name, else the first of all; return its id, or None if there is none."""
        waiting = self._by_name.get(name, deque()) if isinstance(name, str) else deque[int]()
        while waiting:
            if (number := waiting.popleft()) in self._open:
                return self._open.pop(number)
        return self._open.pop(next(iter(self._open))) if self._open else None


def _message(message: Mapping[str, Any], where: str, calls: _OpenCalls) -> dict[str, Any]:
    """Return a message as a `ChatBody` has it. It adds its own calls to `calls`, or answers one of them."""
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise InvalidRequest(f"{where}.role must be system, user, assistant or tool", field=f"{where}.role")
    if not isinstance(content, str | None):
        raise InvalidRequest(f"{where}.content must be a text", field=f"{where}.content")
    found: dict[str, Any] = {"role": role, "content": content or ""}
    if role == "assistant":
        if message.get("thinking"):
            found["reasoning_content"] = message["thinking"]
        if message.get("tool_calls"):
            found["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls", calls)
    elif role == "tool":
        found["tool_call_id"] = _answered(message, calls)
    return found


def _calls(given: Any, where: str, calls: _OpenCalls) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for index, call in enumerate(given if isinstance(given, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{where} must be a list of calls, each with a function", field=where)
        id = call.get("id")
        id = id if isinstance(id, str) and id else f"call_{len(calls)}_{index}"
        calls.add(function["name"], id)
        arguments = function.get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        found.append({"id": id, "type": "function", "function": {"name": function["name"], "arguments": text}})
    return found


def _answered(message: Mapping[str, Any], calls: _OpenCalls) -> str:
    """Return the id of the call that a result belongs to: its own, else the first of its name, else the first."""
    id = message.get("tool_call_id")
    if isinstance(id, str) and id:
        calls.answer(id)
        return id
    return calls.first(message.get("tool_name") or message.get("name")) or "call_0"


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool with the fields that clients leave out."""
    function = tool.get("function")
    if isinstance(function, dict):
        function = {name: value for name, value in function.items() if value is not None}
    return {"type": tool.get("type") or "function", "function": function}


def warn_of_context(options: Options | None, context: int, call: HTTPCall) -> None:
    """Tell the sender of a request that wants more context than there is."""
    wanted = None if options is None else options.num_ctx
    if wanted is not None and wanted > context:
        call.warn(f"options.num_ctx is {wanted}, and this server's context has {context} tokens: cairn serve --context")
