"""Shapes of request bodies.

`parse` turns a JSON object into one, `fields` lists other fields that are accepted, `generation` checks combinations.
Shapes follow the OpenAI API reference (platform.openai.com/docs/api-reference, as openai-python's `types` state them).
Numbers are only typed here. `frontend/request_options.py` checks their ranges, and with `parse` the lengths of lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Discriminator, Field, Tag

from cairn.api.chat.message_schemas import ChatMessage, Content, Messages, TextPart, Tool
from cairn.api.http.body import Body, Count, Number, Prompt, Several, Stop, text_or_list
from cairn.api.http.call import shown
from cairn.config.resolve import MOST_ADAPTERS
from cairn.frontend.request_options import MAX_TOP_LOGPROBS, SamplingOptions
from cairn.frontend.sampling_extras import BEYOND
from cairn.frontend.structured_output import FIELDS, wanted_of
from cairn.text.grammar.grammar import Wanted
from cairn.types.errors import InvalidRequest


class StreamOptions(Body):
    """`include_usage` adds a last chunk with the usage."""

    place = "stream_options"

    include_usage: bool | None = None


class Prediction(Body):
    """Text that much of the answer is expected to repeat."""

    place = "prediction"
    within: ClassVar[dict[str, type[Body]]] = {"content": TextPart}

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        """The whole text."""
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


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
        text_or_list,
        custom_error_type="samplers",
        custom_error_message="must be a list of names of samplers, or a text of their letters",
    ),
]


class AdapterScale(Body):
    """One adapter of a request, in llama-server's form."""

    id: int
    scale: Annotated[float, Field(ge=-100, le=100)]


class Generation(Body):
    """The fields that chat and text completions share."""

    place = "request"
    within: ClassVar[dict[str, type[Body]]] = {"stream_options": StreamOptions, "lora": AdapterScale}
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
    lora: Several[AdapterScale] | None = Field(default=None, max_length=MOST_ADAPTERS)
    """Adapters by their ids, which `ModelRouter` has applied already; others do not count."""
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
    repetition_stop: bool | None = None
    """True: an answer ends where it only repeats itself, with the finish_reason `length` and `finish_detail`."""
    n: Count = None
    reasoning_budget: Count = None
    """Tokens after which reasoning is ended; -1: no limit. Also called `thinking_budget` and the like."""
    response_format: Any = None
    """Constraint on the answer in OpenAI's form; other fields of `structured_output.FIELDS` are those of vLLM and
    llama.cpp."""
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
    """Chunks, and the whole answer, carry llama-server's `timings`."""
    return_progress: bool | None = None
    """Chunks before the answer report prompt progress."""
    metadata: dict[str, str] | None = None
    """`agent` names the agent that the request belongs to."""
    prompt_cache_key: str | None = None
    """The same."""

    @classmethod
    def usual(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Return the body without an empty `stop`.

        InvalidRequest for a negative number of tokens by OpenAI's names: -1, for as many as there is room for, is
        llama-server's, which calls them `n_predict`.
        """
        for name in ("max_tokens", "max_completion_tokens"):
            given = value.get(name)
            if isinstance(given, int | float) and not isinstance(given, bool) and given < 0:
                raise InvalidRequest(
                    f"{name} must be from 1, and it is negative; leave it out for as many as there is room for",
                    field=name,
                )
        return {key: item for key, item in value.items() if key != "stop"} if value.get("stop") == "" else value

    def options(self, **more: Any) -> SamplingOptions:
        """Return the sampling options for the service; `more` adds or replaces some."""
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
            "repetition_stop": bool(self.repetition_stop),
            "n": self.n,
            "reasoning_budget": self.reasoning_budget,
            "priority": self.priority,
            "timeout": self.timeout,
            "first_token_timeout": self.first_token_timeout,
            "progress": bool(self.return_progress),
        }
        return SamplingOptions(**(given | more))

    def wanted(self) -> Wanted:
        """Return the constraints on the answer."""
        return wanted_of({name: getattr(self, name) for name in FIELDS})

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)


class Thinking(Body):
    """`thinking` of a chat, as Anthropic's API has it, and DeepSeek's, GLM's and Kimi's after it."""

    lenient: ClassVar[bool] = True

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Count = None


class Reasoning(Body):
    """`reasoning` of a chat, as OpenRouter has it, and OpenAI's Responses."""

    lenient: ClassVar[bool] = True

    effort: str | None = None
    max_tokens: Count = None
    enabled: bool | None = None
    exclude: bool | None = None
    """Reasoning is left out of the answer."""
    summary: str | None = None
    """Accepted; reasoning is always sent whole."""


class Templated(Body):
    """The fields that the chat template renders."""

    within: ClassVar[dict[str, type[Body]]] = {"thinking": Thinking, "reasoning": Reasoning}

    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    """Short for that argument of the template."""
    reasoning_effort: str | None = None
    """`none` and `minimal` turn reasoning off if the template can; other values are an argument of the template."""
    thinking: Thinking | None = None
    reasoning: Reasoning | None = None
    """Another form of the same, with a budget."""

    def thinks(self) -> bool | None:
        """Return whether reasoning is wanted; None if the request does not say."""
        said = [
            self.enable_thinking,
            None if self.thinking is None else self.thinking.type != "disabled",
            None if self.reasoning is None else self.reasoning.enabled,
            False if self.effort in ("none", "minimal") else None,
        ]
        return next((one for one in said if one is not None), None)

    @property
    def effort(self) -> str | None:
        """How much reasoning is wanted."""
        inner = None if self.reasoning is None else self.reasoning.effort
        return inner if self.reasoning_effort is None else self.reasoning_effort

    def budget(self) -> int | None:
        """Return the tokens of reasoning that `thinking` or `reasoning` allow; None if they set no limit."""
        of_thinking = None if self.thinking is None else self.thinking.budget_tokens
        of_reasoning = None if self.reasoning is None else self.reasoning.max_tokens
        return of_reasoning if of_thinking is None else of_thinking

    def template_args(self, knows: Callable[[str], bool]) -> dict[str, Any]:
        """Return the arguments of the template; `knows` tells whether it looks at one of that name."""
        found: dict[str, Any] = {}
        wanted, effort = self.thinks(), self.effort
        if self.enable_thinking is not None or (wanted is not None and knows("enable_thinking")):
            found["enable_thinking"] = wanted
        off = effort in ("none", "minimal") and knows("enable_thinking")
        if effort is not None and not off and knows("reasoning_effort"):
            found["reasoning_effort"] = effort
        return found | (self.chat_template_kwargs or {})


class ChatGeneration(Generation, Templated):
    """The fields that a chat and an agent's turn share."""

    within: ClassVar[dict[str, type[Body]]] = (
        Generation.within | Templated.within | {"messages": ChatMessage, "prediction": Prediction}
    )
    attached = "messages"

    messages: Messages
    prediction: Prediction | None = None
    """It changes the speed alone."""
    max_completion_tokens: Count = None
    logprobs: bool | None = None
    top_logprobs: Count = None
    parallel_tool_calls: bool | None = None
    """False: the answer ends with its first call."""

    def chat_options(self) -> SamplingOptions:
        """Return the sampling options, with `max_tokens` by either of its names."""
        most = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return self.options(
            max_tokens=most,
            logprobs=bool(self.logprobs),
            top_logprobs=self.top_logprobs,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            reasoning_budget=self.budget() if self.reasoning_budget is None else self.reasoning_budget,
        )

    def wanted(self) -> Wanted:
        """Return the constraints on the answer."""
        given = {name: getattr(self, name) for name in FIELDS}
        return wanted_of(given, parallel=self.parallel_tool_calls is not False)


class ChatBody(ChatGeneration):
    """POST /v1/chat/completions."""

    within: ClassVar[dict[str, type[Body]]] = ChatGeneration.within | {"tools": Tool}

    tools: Several[Tool] | None = None
    tool_choice: Any = None
    prompt_logprobs: Count = None
    """Number of alternatives beside each token of the prompt, with log-probabilities, as in vLLM."""

    def chat_options(self) -> SamplingOptions:
        """Return the sampling options, with log-probabilities of the prompt."""
        return with_prompt_logprobs(super().chat_options(), self.prompt_logprobs, stream=bool(self.stream))

    def wanted(self) -> Wanted:
        """Return the constraints on the answer and its calls."""
        return wanted_of(
            {name: getattr(self, name) for name in FIELDS},
            [(tool.function.name, bool(tool.function.strict)) for tool in self.tools or ()],
            self.tool_choice,
            parallel=self.parallel_tool_calls is not False,
        )


def with_prompt_logprobs(options: SamplingOptions, count: int | None, *, stream: bool) -> SamplingOptions:
    """Return options that also ask for log-probabilities of the prompt. Raises InvalidRequest for a stream."""
    field = "prompt_logprobs"
    if count is None:
        return options
    if stream:
        raise InvalidRequest(f"{field} needs an answer in one piece: set stream to false", field=field)
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"{field} must be from 0 to {MAX_TOP_LOGPROBS}; it is {count}", field=field)
    most = max(count, options.top_logprobs or 0)
    return msgspec.structs.replace(options, prompt_logprobs=True, top_logprobs=most)


class CompletionBody(Generation):
    """POST /v1/completions."""

    prompt: Prompt
    suffix: str | None = None
    """The text that follows: the model fills in the middle."""
    parse_special: bool | None = None
    """False: control tokens written in the prompt are ordinary text."""
    echo: bool | None = None
    logprobs: Count = None
    prompt_logprobs: Count = None
    """As of a chat."""


class TokenizeBody(Templated):
    """POST /tokenize: a completion prompt, a text by itself, or messages as the chat template renders them."""

    place = "tokenize"
    within: ClassVar[dict[str, type[Body]]] = Templated.within | {"messages": ChatMessage, "tools": Tool}
    attached = "messages"

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None
    """For `content`: add what begins a text, such as BOS."""
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


def _bias(given: dict[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10) or int(key) in bias:
            field = f"logit_bias.{shown(key)}"
            raise InvalidRequest(f"{field} must be a token id, each at most once", field=field)
        bias[int(key)] = value
    return bias
