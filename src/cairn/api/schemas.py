"""Request bodies: their shapes. How a JSON object becomes one is in `parse`, which fields beside these are accepted in
`fields`, what a body may still not say in `checks`.

Shapes follow the OpenAI API reference (platform.openai.com/docs/api-reference, as openai-python's `types` state them).
Numbers are only typed here; their ranges are checked in `service/requests.py`, lengths of lists there and in `parse`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from cairn.api.reply import shown
from cairn.errors import InvalidRequest
from cairn.service.requests import MAX_TOP_LOGPROBS, SamplingOptions
from cairn.service.sampling_extras import BEYOND
from cairn.service.wanted import FIELDS, wanted_of
from cairn.text.grammar import Wanted

Place = Literal[
    "request",
    "messages",
    "responses",
    "ollama",
    "options",
    "model",
    "embedding",
    "tokenize",
    "stream_options",
    "message",
    "part",
    "tool",
    "function",
    "call",
    "called",
    "other",
]
"""What kind of object a field stands in."""


class Body(BaseModel):
    """Strict: no field but these, no number written as text."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    place: ClassVar[Place] = "other"
    within: ClassVar[dict[str, type[Body]]] = {}
    """The fields that hold such bodies, one or a list of them."""
    lenient: ClassVar[bool] = False
    """Unknown fields are passed over, which the sender is told in a header."""
    synonyms: ClassVar[Mapping[str, str]] = {}
    """Other names of fields, which count where the field's own is absent."""


def _as_text(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


def _whole(value: Any) -> Any:
    """4.0 is a whole number, as of clients whose numbers are all floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


T = TypeVar("T")
Several = Annotated[list[T], Field(fail_fast=True)]
"""A list that is read up to its first error: collecting those of a long one would hold everybody up."""


class TextPart(Body):
    """`{"type": "text", "text": ...}`."""

    place = "part"

    type: Literal["text"]
    text: str


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
    """What the model called. `arguments` is whatever text it produced, JSON or not; some clients send an object."""

    place = "called"

    name: str
    arguments: Annotated[str, BeforeValidator(_as_text)]


class ToolCall(Body):
    """A call that an assistant message made."""

    place = "call"
    within = {"function": CalledFunction}

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(Body):
    """One message of any role; `checks` knows what a role may carry."""

    place = "message"
    within = {"content": TextPart, "tool_calls": ToolCall}

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

    place = "function"

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """`{"type": "function", "function": {...}}`."""

    place = "tool"
    within = {"function": FunctionTool}

    type: Literal["function"]
    function: FunctionTool


class StreamOptions(Body):
    """`include_usage` adds a last chunk with the usage."""

    place = "stream_options"

    include_usage: bool | None = None


Number = float | None
Count = Annotated[int | None, BeforeValidator(_whole)]
Stop = Annotated[
    Annotated[str, Tag("~text")] | Annotated[Several[str], Tag("~list")],
    Discriminator(_text_or_list, custom_error_type="stop", custom_error_message="must be a text or a list of texts"),
]
Bias = Annotated[
    Annotated[dict[str, float], Tag("~map")] | Annotated[Several[Any], Tag("~list")],
    Discriminator(
        lambda value: "~map" if isinstance(value, dict) else "~list" if isinstance(value, list) else None,
        custom_error_type="logit_bias",
        custom_error_message="must be an object of token ids and numbers, or a list of pairs",
    ),
]
Samplers = Annotated[
    Annotated[str, Tag("~text")] | Annotated[Several[str], Tag("~list")],
    Discriminator(
        _text_or_list,
        custom_error_type="samplers",
        custom_error_message="must be a list of names of samplers, or a text of their letters",
    ),
]


class Generation(Body):
    """What chat and text completions share."""

    place = "request"
    within = {"stream_options": StreamOptions}
    synonyms: ClassVar[Mapping[str, str]] = {
        "n_predict": "max_tokens",
        "repeat_penalty": "repetition_penalty",
        "typ_p": "typical_p",
        "thinking_budget": "reasoning_budget",
        "thinking_token_budget": "reasoning_budget",
        "reasoning_budget_tokens": "reasoning_budget",
        "thinking_budget_tokens": "reasoning_budget",
    }

    model: str | None = None
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
    samplers: Samplers | None = None
    logit_bias: Bias | None = None
    typical_p: Number = None
    top_n_sigma: Number = None
    xtc_probability: Number = None
    xtc_threshold: Number = None
    dry_multiplier: Number = None
    dry_base: Number = None
    dry_allowed_length: Count = None
    dry_penalty_last_n: Count = None
    dry_sequence_breakers: Several[str] | None = None
    dynatemp_range: Number = None
    dynatemp_exponent: Number = None
    mirostat: Count = None
    mirostat_tau: Number = None
    mirostat_eta: Number = None
    allowed_token_ids: Several[int] | None = None
    bad_words: Several[str] | None = None
    seed: Count = None
    stop: Stop | None = None
    stop_token_ids: Several[int] | None = None
    min_tokens: Count = None
    ignore_eos: bool | None = None
    n: Count = None
    reasoning_budget: Count = None
    """Tokens of reasoning after which it is ended; -1: none. Others call it `thinking_budget` and the like."""
    response_format: Any = None
    """What the answer has to be, as OpenAI has it; the others of `wanted.FIELDS` as vLLM and llama.cpp do."""
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Several[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    priority: Count = None
    timeout: Number = None
    first_token_timeout: Number = None
    store: bool | None = None
    """False: nothing of it goes to the disk, neither the answer for exact replay nor its KV, which holds token ids."""
    timings_per_token: bool | None = None
    """Each chunk says how fast the answer comes, and the last, or the whole, how fast it came: llama-server's
    `timings`."""
    return_progress: bool | None = None
    """Chunks before the answer say how far its prompt is."""
    metadata: dict[str, str] | None = None
    """`agent`: whose account it is on."""
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
            "samplers": self.samplers,
            "logit_bias": _bias(self.logit_bias) if isinstance(self.logit_bias, dict) else self.logit_bias,
            **{name: getattr(self, name) for name in BEYOND},
            "seed": self.seed,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "min_tokens": self.min_tokens,
            "ignore_eos": bool(self.ignore_eos),
            "n": self.n,
            "reasoning_budget": self.reasoning_budget,
            "priority": self.priority,
            "timeout": self.timeout,
            "first_token_timeout": self.first_token_timeout,
        }
        return SamplingOptions(**(given | more))

    def wanted(self) -> Wanted:
        """What the answer has to be."""
        return wanted_of({name: getattr(self, name) for name in FIELDS})

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)


Messages = Annotated[Several[ChatMessage], Field(min_length=1)]


class Templated(Body):
    """What is rendered by the chat template."""

    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    """Short for that argument of the template."""
    reasoning_effort: str | None = None
    """`none` and `minimal` turn reasoning off where the template can; otherwise an argument of the template."""

    def template_args(self, knows: Callable[[str], bool]) -> dict[str, Any]:
        """The arguments of the template; `knows` tells whether it looks at one of that name."""
        found: dict[str, Any] = {}
        if self.enable_thinking is not None:
            found["enable_thinking"] = self.enable_thinking
        if self.reasoning_effort in ("none", "minimal") and knows("enable_thinking"):
            found.setdefault("enable_thinking", False)
        elif self.reasoning_effort is not None and knows("reasoning_effort"):
            found["reasoning_effort"] = self.reasoning_effort
        return found | (self.chat_template_kwargs or {})


class ChatGeneration(Generation, Templated):
    """What a chat and an agent's turn share."""

    within = Generation.within | {"messages": ChatMessage}

    messages: Messages
    max_completion_tokens: Count = None
    logprobs: bool | None = None
    top_logprobs: Count = None
    parallel_tool_calls: bool | None = None
    """False: the answer ends with its first call."""

    def chat_options(self) -> SamplingOptions:
        """The sampling options, `max_tokens` by either of its names."""
        most = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return self.options(
            max_tokens=most,
            logprobs=bool(self.logprobs),
            top_logprobs=self.top_logprobs,
            parallel_tool_calls=self.parallel_tool_calls is not False,
        )

    def wanted(self) -> Wanted:
        """What the answer has to be."""
        given = {name: getattr(self, name) for name in FIELDS}
        return wanted_of(given, parallel=self.parallel_tool_calls is not False)


class ChatBody(ChatGeneration):
    """POST /v1/chat/completions."""

    within = ChatGeneration.within | {"tools": Tool}

    tools: Several[Tool] | None = None
    tool_choice: Any = None
    prompt_logprobs: Count = None
    """How many of the likeliest tokens are told beside each of the prompt's, with log-probabilities, as vLLM does."""

    def chat_options(self) -> SamplingOptions:
        """The sampling options, the prompt's log-probabilities among them."""
        return with_prompt_logprobs(super().chat_options(), self.prompt_logprobs, stream=bool(self.stream))

    def wanted(self) -> Wanted:
        """What the answer has to be, calls included."""
        return wanted_of(
            {name: getattr(self, name) for name in FIELDS},
            [(tool.function.name, bool(tool.function.strict)) for tool in self.tools or ()],
            self.tool_choice,
            parallel=self.parallel_tool_calls is not False,
        )


def with_prompt_logprobs(options: SamplingOptions, count: int | None, *, stream: bool) -> SamplingOptions:
    """The options of an answer that also has the log-probabilities of its prompt. InvalidRequest."""
    field = "prompt_logprobs"
    if count is None:
        return options
    if stream:
        raise InvalidRequest(f"{field} are told of an answer in one piece, not of a stream", field=field)
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"{field} must be from 0 to {MAX_TOP_LOGPROBS}; it is {count}", field=field)
    most = max(count, options.top_logprobs or 0)
    return msgspec.structs.replace(options, prompt_logprobs=True, top_logprobs=most)


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
    prompt_logprobs: Count = None
    """As of a chat."""


class EmbeddingBody(Body):
    """POST /v1/embeddings."""

    place = "embedding"

    model: str | None = None
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count = None
    truncate: bool | None = None
    """Whether a text that is longer than the model takes is cut."""
    normalize: bool | None = None
    """False: the vectors as the model makes them; default: of length 1."""
    prompt_name: str | None = None
    """Which of the model's words stand before each text, such as those for queries."""


class TextsBody(Body):
    """POST /embed, as Text Embeddings Inference has it."""

    place = "embedding"

    model: str | None = None
    inputs: Prompt
    truncate: bool | None = None
    normalize: bool | None = None
    dimensions: Count = None
    prompt_name: str | None = None


class Document(Body):
    """`{"text": ...}`."""

    text: str


class RerankBody(Body):
    """POST /v1/rerank: `documents` as Cohere and Jina have them, or `texts` as Text Embeddings Inference does."""

    place = "embedding"
    within = {"documents": Document}
    synonyms = {"top_k": "top_n", "return_text": "return_documents"}

    model: str | None = None
    query: str
    documents: Several[str | Document] | None = None
    texts: Several[str] | None = None
    top_n: Count = None
    return_documents: bool | None = None
    truncate: bool | None = None
    raw_scores: bool | None = None
    """Whether the scores of a judge are those before the logistic function."""
    instruction: str | None = None
    """What a decoder judges by."""


class ScoreBody(Body):
    """POST /v1/score, as vLLM has it: one text or several beside one or as many."""

    place = "embedding"
    synonyms = {
        "queries": "text_1",
        "documents": "text_2",
        "data_1": "text_1",
        "data_2": "text_2",
    }

    model: str | None = None
    text_1: Stop
    text_2: Stop
    truncate: bool | None = None
    instruction: str | None = None


class TokenizeBody(Templated):
    """POST /tokenize: a completion prompt, a text by itself, or messages as the chat template renders them."""

    place = "tokenize"
    within = {"messages": ChatMessage, "tools": Tool}

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None
    """Of `content`: put what begins a text before it."""
    add_special_tokens: bool | None = None
    """False: nothing before `prompt`."""
    parse_special: bool | None = None
    """As of a completion."""
    with_pieces: bool | None = None
    messages: Messages | None = None
    tools: Several[Tool] | None = None


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
