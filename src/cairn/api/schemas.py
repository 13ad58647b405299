"""Request bodies: their shapes. How a JSON object becomes one is in `parse`, what it may still not say in `checks`.

Shapes follow the OpenAI API reference (platform.openai.com/docs/api-reference, as openai-python's `types` state them).
Numbers are only typed here; their ranges are checked in `service/requests.py`, lengths of lists there and in `parse`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from cairn.api.reply import shown
from cairn.errors import InvalidRequest
from cairn.service.requests import SamplingOptions

SPARE_FIELDS = 16
"""Unknown fields of an object that are told by name."""


class Body(BaseModel):
    """Strict: no field but these, no number written as text."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        """Every unknown field is an error of its own: of an object with many more than are known none is looked at."""
        most = len(cls.model_fields) + SPARE_FIELDS
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError(
                "fields", "Holds {count} fields; the limit is {most}", {"count": len(value), "most": most}
            )
        return value


T = TypeVar("T")
Several = Annotated[list[T], Field(fail_fast=True)]
"""A list that is read up to its first error: collecting those of a long one would hold everybody up."""


class TextPart(Body):
    """`{"type": "text", "text": ...}`; what is said of caching has no effect, since every prefix is kept anyway."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


def _text_or_list(value: Any) -> str | None:
    return "~text" if isinstance(value, str) else "~list" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag("~text")] | Annotated[Several[TextPart], Tag("~list")],
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
    parsed_arguments: Any = None
    """What openai-python's parsed streams make of `arguments`, for their own use; it has no effect."""


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
    tool_calls: Several[ToolCall] | None = None
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
    Annotated[str, Tag("~text")] | Annotated[Several[str], Tag("~list")],
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
    stop_token_ids: Several[int] | None = None
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


Messages = Annotated[Several[ChatMessage], Field(min_length=1)]


class ChatGeneration(Generation):
    """What a chat and an agent's turn share."""

    messages: Messages
    max_completion_tokens: Count = None
    logprobs: bool | None = None
    top_logprobs: Count = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat_options(self) -> SamplingOptions:
        """The sampling options, `max_tokens` by either of its names."""
        most = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return self.options(max_tokens=most, logprobs=bool(self.logprobs), top_logprobs=self.top_logprobs)


class ChatBody(ChatGeneration):
    """POST /v1/chat/completions."""

    tools: Several[Tool] | None = None
    tool_choice: Any = None


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
    | Annotated[Several[str], Tag("~texts")]
    | Annotated[Several[int], Tag("~tokens")]
    | Annotated[Several[Several[int]], Tag("~batch")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt",
        custom_error_message="must be a text, a list of texts, a list of token ids or a list of such lists",
    ),
]


class CompletionBody(Generation):
    """POST /v1/completions."""

    prompt: Prompt
    suffix: str | None = None
    """What follows the text that is asked for: the model fills in the middle."""
    parse_special: bool | None = None
    """False: control tokens written in the prompt are ordinary text."""
    echo: bool | None = None
    logprobs: Count = None


class TokenizeBody(Body):
    """POST /tokenize: a text as a completion prompt, or messages as the chat template renders them."""

    model: str | None = None
    prompt: str | None = None
    parse_special: bool | None = None
    """As of a completion."""
    messages: Messages | None = None
    tools: Several[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Several[int]


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


def contents(messages: Iterable[ChatMessage], tools: Sequence[dict[str, Any]] | None = None) -> list[str]:
    """Every text that a template puts into the prompt: of the messages all but reasoning, and the tools as JSON."""
    found = [json.dumps(tool, ensure_ascii=False) for tool in tools or ()]
    for message in messages:
        if isinstance(message.content, str):
            found.append(message.content)
        else:
            found += [part.text for part in message.content or ()]
        for call in message.tool_calls or ():
            found += [call.function.name, call.function.arguments]
    return found


def plain_tools(tools: Iterable[Tool] | None) -> list[dict[str, Any]] | None:
    """The tools as the chat template wants them, or None."""
    plain = [
        {"type": "function", "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}
        for tool in tools or ()
    ]
    return plain or None


def _bias(given: dict[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10) or int(key) in bias:
            field = f"logit_bias.{shown(key)}"
            raise InvalidRequest(f"{field} must be a token id, each at most once", field=field)
        bias[int(key)] = value
    return bias
