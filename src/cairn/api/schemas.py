"""Request bodies: their shapes, the fields that are accepted without effect, and those whose meaning is not built.
What a body of the right shape may still not say is in `checks`.

Shapes follow the OpenAI API reference (platform.openai.com/docs/api-reference, as openai-python's `types` state them).
Numbers are only typed here; their ranges, and the limits of lists, are checked in `service/requests.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from cairn.api.reply import shown
from cairn.errors import InvalidRequest, Unsupported
from cairn.service.requests import SamplingOptions

HARMLESS = frozenset(
    {
        "user",
        "service_tier",
        "safety_identifier",
        "prompt_cache_retention",
        "prediction",
    }
)
"""Fields that are accepted and have no effect: leaving them out never changes the answer."""

_NO: tuple[Any, ...] = (None, False, [], {})
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True),
    "audio": _NO,
    "functions": _NO,
    "function_call": (None, "auto", "none"),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "suffix": (None, ""),
    "best_of": (None, 1),
}
"""Fields whose meaning is not built, with the values that ask for nothing; every other value is a 400."""

MESSAGE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "refusal": (None,),
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
}
"""The same for fields of a message: what openai-python's message objects carry when they are sent back."""

_HIDDEN = "~"
"""First letter of the union tags, which are no part of a field's name."""


class Body(BaseModel):
    """Strict: no field but these, no number written as text."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(Body):
    """`{"type": "text", "text": ...}`; `cache_control` has no effect, since every prefix is kept anyway."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None


def _text_or_list(value: Any) -> str | None:
    return "~text" if isinstance(value, str) else "~list" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[TextPart], Tag("~list")],
    Discriminator(
        _text_or_list,
        custom_error_type="content",
        custom_error_message="must be a text or a list of text parts",
    ),
]


class CalledFunction(Body):
    """What the model called. `arguments` is whatever text it produced, JSON or not."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call that an assistant message made."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(Body):
    """One message of any role; `checks` knows what a role may carry."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name for `reasoning_content`, which some servers use."""


class FunctionTool(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """`{"type": "function", "function": {...}}`."""

    type: Literal["function"]
    function: FunctionTool


class StreamOptions(Body):
    """`include_usage` adds a last chunk with the usage."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


Number = float | None
Count = int | None
Stop = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[str], Tag("~list")],
    Discriminator(_text_or_list, custom_error_type="stop", custom_error_message="must be a text or a list of texts"),
]


class Generation(Body):
    """What chat and text completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count = None
    temperature: Number = None
    top_k: Count = None
    top_p: Number = None
    min_p: Number = None
    repetition_penalty: Number = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    logit_bias: dict[str, float] | None = None
    seed: Count = None
    stop: Stop | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: Count = None
    ignore_eos: bool | None = None
    n: Count = None
    store: bool | None = None
    """False: nothing of it goes to the disk, neither the answer for exact replay nor its KV, which holds token ids."""
    metadata: dict[str, str] | None = None
    """`agent`: whose account it is on, where there is an agent of that id."""
    prompt_cache_key: str | None = None
    """The same."""

    def options(self, **more: Any) -> SamplingOptions:
        """The sampling options as the service wants them; `more` adds or replaces some."""
        given: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": None if self.logit_bias is None else _bias(self.logit_bias),
            "seed": self.seed,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "min_tokens": self.min_tokens,
            "ignore_eos": bool(self.ignore_eos),
            "n": self.n,
        }
        return SamplingOptions(**(given | more))

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatBody(Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: Any = None
    max_completion_tokens: Count = None
    logprobs: bool | None = None
    top_logprobs: Count = None
    chat_template_kwargs: dict[str, Any] | None = None


def _prompt_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "~text"
    if not isinstance(value, list) or not value:
        return None
    first = value[0]
    if isinstance(first, str):
        return "~texts"
    return "~batch" if isinstance(first, list) else "~tokens"


Prompt = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[str], Tag("~texts")]
    | Annotated[list[int], Tag("~tokens")]
    | Annotated[list[list[int]], Tag("~batch")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt",
        custom_error_message="must be a text, a list of texts, a list of token ids or a list of such lists",
    ),
]


class CompletionBody(Generation):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Count = None


class TokenizeBody(Body):
    """POST /tokenize: a text as a completion prompt, or messages as the chat template renders them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


B = TypeVar("B", bound=Body)


def parse(kind: type[B], value: dict[str, Any]) -> B:
    """The body as a model; InvalidRequest or Unsupported names the field and what was expected."""
    fields = kind.model_fields
    kept = {}
    for name, item in value.items():
        if name in fields:
            kept[name] = item
        elif issubclass(kind, Generation):
            _outside(name, item)
        else:
            raise InvalidRequest(f"{shown(name)} is not a field of this route", field=shown(name))
    if "messages" in kept:
        kept["messages"] = _strip_messages(kept["messages"])
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _explain(first["type"], first["loc"], first["msg"]) from None


def plain_messages(messages: Iterable[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as plain values, without what is absent; what they mean to a template is the chat's business."""
    found = []
    for message in messages:
        content: Any = message.content
        if isinstance(content, list):
            content = [{"type": "text", "text": part.text} for part in content]
        plain: dict[str, Any] = {"role": message.role, "content": content}
        if message.name is not None:
            plain["name"] = message.name
        reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
        if reasoning is not None:
            plain["reasoning_content"] = reasoning
        if message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in message.tool_calls
            ]
        found.append(plain)
    return found


def contents(messages: Iterable[ChatMessage]) -> list[str]:
    """Every text of the messages' contents, all of which a template puts into the prompt."""
    found: list[str] = []
    for message in messages:
        if isinstance(message.content, str):
            found.append(message.content)
        else:
            found += [part.text for part in message.content or ()]
    return found


def plain_tools(tools: Iterable[Tool] | None) -> list[dict[str, Any]] | None:
    """The tools as the chat template wants them, or None."""
    plain = [
        {"type": "function", "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}
        for tool in tools or ()
    ]
    return plain or None


def _strip_messages(messages: Any) -> Any:
    """Messages without the fields that ask for nothing; Unsupported where one asks for something."""
    if not isinstance(messages, list):
        return messages
    stripped = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or MESSAGE_NEUTRAL.keys().isdisjoint(message):
            stripped.append(message)
            continue
        for name, neutral in MESSAGE_NEUTRAL.items():
            if name in message and message[name] not in neutral:
                field = f"messages[{index}].{name}"
                raise Unsupported(f"{field} is not built", field=field)
        stripped.append({name: item for name, item in message.items() if name not in MESSAGE_NEUTRAL})
    return stripped


def _outside(name: str, value: Any) -> None:
    """Let a field pass that the body does not have, if it is harmless or asks for nothing."""
    if name in HARMLESS:
        return
    if name not in NEUTRAL:
        raise InvalidRequest(f"{shown(name)} is not a field of this route", field=shown(name))
    if not any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL[name]):
        allowed = ", ".join("null" if neutral is None else repr(neutral) for neutral in NEUTRAL[name])
        raise Unsupported(f"{name} is not built yet; the only values accepted are {allowed}", field=name)


def _bias(given: dict[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10) or int(key) in bias:
            field = f"logit_bias.{shown(key)}"
            raise InvalidRequest(f"{field} must be a token id, each at most once", field=field)
        bias[int(key)] = value
    return bias


def _explain(kind: str, loc: tuple[int | str, ...], message: str) -> InvalidRequest:
    field = ""
    for part in loc:
        if isinstance(part, int):
            field += f"[{part}]"
        elif not part.startswith(_HIDDEN):
            field += ("." if field else "") + shown(part)
    if kind == "missing":
        return InvalidRequest(f"{field} is missing", field=field)
    if kind == "extra_forbidden":
        return InvalidRequest(f"{field} is not a known field", field=field)
    if kind == "literal_error" and field.endswith(".type"):
        return Unsupported(f"{field}: {_lower(message)}; other types are not built yet", field=field)
    return InvalidRequest(f"{field}: {_lower(message)}", field=field)


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
