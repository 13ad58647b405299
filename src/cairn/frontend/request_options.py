"""Making frozen `Request`s from a caller's options: the one place that knows ranges, defaults and limits.

The HTTP API, the Python API and the CLI all come through here, so that the same options mean the same everywhere. None
stands for an option that the caller left out: `sampling_defaults` says what applies then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from cairn.frontend.sampling_defaults import sampling_defaults
from cairn.frontend.sampling_extras import (
    MAX_BIAS,
    NUMBERS,
    Encode,
    SamplerOrder,
    arrange,
    bias_of,
    extras_of,
    numbers,
    shown,
)
from cairn.scheduler.sequence import MAX_PRIORITY
from cairn.system.interfaces import Rng
from cairn.system.posix import SystemRng
from cairn.types.errors import ContextTooLong, InvalidRequest
from cairn.types.model_spec import ModelSpec
from cairn.types.request import SAMPLING_RANGES, Grammar, OutputFormat, Request, SamplingParams

MAX_STOP = 64
MAX_STOP_BYTES = 256
MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKENS = 64
ONE_TOKEN = 1e-9
"""The value that replaces a top_p of 0: the likeliest token alone."""
MOST_SECONDS = 1e9
"""The longest time limit if none is configured."""
LEAST_SEED, MOST_SEED = -(1 << 63), (1 << 64) - 1
MOST_BUDGET = (1 << 31) - 1
"""Most tokens of reasoning; no context is as long."""
NONE_GIVEN = -1
"""As a seed: draw one. As `max_tokens`: until the context is full. As a budget: none."""


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of one generation, unchecked: `sampling_params` and `requests` check them."""

    max_tokens: int | None = None
    """At least 1. Default, and -1: what is left of the context; more than that ends there too. 0 is allowed by
    `requests(..., allow_empty=True)`."""
    temperature: float | None = None
    """0 to 10; 0 is greedy."""
    top_k: int | None = None
    """-1 or 0 is off."""
    top_p: float | None = None
    """0 to 1; 0 is the likeliest token alone."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    samplers: Sequence[str] | str | None = None
    """Those that apply, in their order, by the names that llama.cpp's clients use (`sampling_extras.arrange`)."""
    logit_bias: Mapping[int, float] | Sequence[Sequence[Any]] | None = None
    """Token id -> -100 to 100, at most 1,024 of them; or a list of pairs (`sampling_extras`)."""
    typical_p: float | None = None
    """This and those down to `bad_words`: `SamplingExtras`, with ranges in `sampling_extras`."""
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Sequence[str] | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    seed: int | None = None
    """Any 64-bit number. Default, and -1: drawn, so that every generation can be repeated."""
    logprobs: bool = False
    top_logprobs: int | None = None
    """0 to 20; needs `logprobs`."""
    prompt_logprobs: bool = False
    stop: str | Sequence[str] | None = None
    """At most 64 texts of at most 256 bytes. A control token, which is never shown, is a stop token too."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the generation, in addition to the model's EOS."""
    min_tokens: int | None = None
    ignore_eos: bool = False
    repetition_stop: bool = False
    """End an answer that only repeats itself (`text.output.repetition`), with LENGTH. One that is held to a form, or in
    the middle of a tool call, goes on."""
    n: int | None = None
    """Choices, at most `max_choices`."""
    priority: int | None = None
    """-100 to 100, default 0; lower runs sooner. Waiting makes up for it, so no request starves."""
    timeout: float | None = None
    """Seconds after which it ends with an error; by default, and at most, what the server allows."""
    first_token_timeout: float | None = None
    """Seconds after which it ends with an error if no token has come."""
    reasoning_budget: int | None = None
    """Tokens of reasoning after which the tag that ends it is forced. Default, and -1: it ends by itself."""
    progress: bool = False
    """Whether the events before the answer report how much of its prompt is computed."""
    parallel_tool_calls: bool = True
    """False: an answer ends with its first tool call."""
    prediction: str | Sequence[int] | None = None
    """A text or token ids that much of the answer is expected to repeat. It makes it faster and changes nothing."""


PLAIN = SamplingOptions()


def sampling_params(
    spec: ModelSpec,
    options: SamplingOptions = PLAIN,
    *,
    prompt_tokens: int,
    context: int | None = None,
    allow_empty: bool = False,
    thinking: bool = False,
    rng: Rng | None = None,
    sampler_order: SamplerOrder = "default",
    encode: Encode | None = None,
) -> SamplingParams:
    """Return checked and complete sampling parameters.

    Order of precedence: the request's option, then `sampling_defaults`. `context` is the engine's limit in tokens
    (`EngineInfo.context`), by default the model's. `allow_empty` admits `max_tokens=0` (only the prompt is scored).
    `thinking`: the answer has reasoning. `sampler_order` applies if the options list no samplers. Raise InvalidRequest
    (with `field` and the limit) or ContextTooLong (with the figures).
    """
    context = spec.context if context is None else context
    beyond = numbers({name: getattr(options, name) for name in NUMBERS})
    values, temperature_last = arrange(_values(spec, options, thinking) | beyond, options.samplers, sampler_order)
    max_tokens = _max_tokens(options.max_tokens, prompt_tokens, context, allow_empty)
    asked = options.max_tokens
    most = max_tokens if asked is None else max(asked, max_tokens)
    min_tokens = min(_count("min_tokens", options.min_tokens or 0, 0, most, "max_tokens"), max_tokens)
    _flags(options)
    seed = NONE_GIVEN if options.seed is None else _count("seed", options.seed, LEAST_SEED, MOST_SEED)
    seed = (rng or SystemRng()).bits64() if seed == NONE_GIVEN else seed
    eos = () if options.ignore_eos else spec.eos_ids
    stop_token_ids = tuple(dict.fromkeys((*eos, *_stop_tokens(options.stop_token_ids or (), spec.vocab))))
    extras = extras_of(
        values,
        breakers=options.dry_sequence_breakers,
        allowed=options.allowed_token_ids,
        bad_words=options.bad_words,
        vocab=spec.vocab,
        ends=stop_token_ids,
        encode=encode,
    )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=values["temperature"],
        top_k=max(int(values["top_k"]), 0),
        top_p=values["top_p"] or ONE_TOKEN,
        min_p=values["min_p"],
        temperature_last=temperature_last,
        repetition_penalty=values["repetition_penalty"],
        presence_penalty=values["presence_penalty"],
        frequency_penalty=values["frequency_penalty"],
        logit_bias=_bias(bias_of(options.logit_bias, encode) or {}, spec.vocab),
        seed=seed & MOST_SEED,
        logprobs=options.logprobs,
        top_logprobs=_top_logprobs(options),
        prompt_logprobs=options.prompt_logprobs,
        stop_token_ids=stop_token_ids,
        min_tokens=min_tokens,
        extras=extras,
    )


class RequestParams(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a prompt's requests beside sampling, by whoever makes them."""

    output: OutputFormat = OutputFormat()
    """How the answer is parsed."""
    grammar: Grammar | None = None
    """A grammar that compiles, for `Request.grammar`."""
    salt: bytes = b""
    share: str = ""
    """Fairness key of the requests."""
    durable: bool = False
    """Whether the context belongs to an agent, a session or a conversation: see `Request.durable`."""
    stored: bool = True
    """Whether its KV may be kept beyond the pool."""
    allow_empty: bool = False
    """Whether `max_tokens` may be 0, to have the prompt computed or scored and nothing generated."""


NO_PARAMS = RequestParams()


def requests(
    spec: ModelSpec,
    prompt: Sequence[int],
    options: SamplingOptions = PLAIN,
    params: RequestParams = NO_PARAMS,
    *,
    ids: Callable[[], int],
    context: int | None = None,
    max_choices: int = 8,
    timeout: float | None = None,
    rng: Rng | None = None,
    controls: Mapping[str, int] | None = None,
    sampler_order: SamplerOrder = "default",
    encode: Encode | None = None,
) -> tuple[Request, ...]:
    """Return one `Request` per choice (`options.n`, default 1) for a prompt of token ids.

    `ids` returns each one's id. `controls`: text -> id of the model's control tokens; a stop text that is one is a stop
    token too. `encode`: text -> ids of the model's tokens, for options that name texts.

    Raise InvalidRequest for an empty prompt, a token id outside the vocabulary or an option out of range, and
    ContextTooLong if the prompt leaves no room in the context.
    """
    tokens, output = checked_prompt(prompt, spec), params.output
    if params.grammar is not None and options.ignore_eos:
        raise InvalidRequest("ignore_eos must be false with structured output, which ends itself", field="ignore_eos")
    choices = 1 if options.n is None else _count("n", options.n, 1, max_choices)
    sampling = sampling_params(
        spec,
        options,
        thinking=output.reasoning and not output.reasoning_closed,
        prompt_tokens=len(tokens),
        context=context,
        allow_empty=params.allow_empty,
        rng=rng,
        sampler_order=sampler_order,
        encode=encode,
    )
    stop = _stop(options.stop)
    sampling = _with_control_stops(sampling, stop, controls, spec.vocab)
    budget = _reasoning_budget(options.reasoning_budget, output)
    if output.tools and not options.parallel_tool_calls:
        output = msgspec.structs.replace(output, one_call=True)
    priority = 0 if options.priority is None else _count("priority", options.priority, -MAX_PRIORITY, MAX_PRIORITY)
    longest = MOST_SECONDS if timeout is None else timeout
    prediction = _prediction(options.prediction, spec, encode, context or spec.context)
    first_token = _seconds("first_token_timeout", options.first_token_timeout, longest)
    timeout = _seconds("timeout", options.timeout, longest) or timeout
    return tuple(
        Request(
            id=ids(),
            prompt=tokens,
            sampling=sampling,
            choice=choice,
            stop=stop,
            repetition_stop=options.repetition_stop,
            output=output,
            grammar=params.grammar,
            reasoning_budget=budget,
            salt=params.salt,
            share=params.share,
            timeout=timeout,
            first_token_timeout=first_token,
            priority=-priority,
            durable=params.durable,
            stored=params.stored,
            progress=options.progress,
            prediction=prediction,
        )
        for choice in range(choices)
    )


def checked_prompt(prompt: Sequence[int], spec: ModelSpec) -> tuple[int, ...]:
    """Return the prompt's token ids. Raise InvalidRequest if there is none, or one that is not in the vocabulary."""
    tokens = tuple(prompt)
    if not tokens:
        raise InvalidRequest("the prompt is empty; it must hold at least one token", field="prompt")
    if not {int}.issuperset(map(type, tokens)):
        raise InvalidRequest("the prompt must hold token ids, which are whole numbers", field="prompt")
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= spec.vocab:
        wrong = low if low < 0 else high
        raise InvalidRequest(f"prompt holds token id {wrong}; ids go from 0 to {spec.vocab - 1}", field="prompt")
    return tokens


def _with_control_stops(
    sampling: SamplingParams, stop: Sequence[str], controls: Mapping[str, int] | None, vocab: int
) -> SamplingParams:
    """Return the parameters with a stop token for each stop text that is a control token."""
    named = [controls[text] for text in stop if text in controls] if controls else []
    if not named:
        return sampling
    ends = dict.fromkeys((*sampling.stop_token_ids, *(token for token in named if token < vocab)))
    return msgspec.structs.replace(sampling, stop_token_ids=tuple(ends))


def _prediction(
    given: str | Sequence[int] | None, spec: ModelSpec, encode: Encode | None, context: int
) -> tuple[int, ...]:
    """Return the token ids of a predicted answer. Raise InvalidRequest if it could not be one."""
    if not given:
        return ()
    if isinstance(given, str):
        if encode is None:
            raise InvalidRequest("prediction must be token ids where no tokenizer is at hand", field="prediction")
        given = encode(given)
    tokens = tuple(given)
    if not {int}.issuperset(map(type, tokens)) or min(tokens) < 0 or max(tokens) >= spec.vocab:
        raise InvalidRequest(f"prediction must be a text, or token ids from 0 to {spec.vocab - 1}", field="prediction")
    if len(tokens) > context:
        raise InvalidRequest(
            f"prediction has {len(tokens)} tokens, and the context holds {context}; send what is expected of the "
            "answer alone",
            field="prediction",
        )
    return tokens


def _values(spec: ModelSpec, options: SamplingOptions, thinking: bool) -> dict[str, float]:
    """Return every parameter of `sampling_defaults`, checked."""
    values: dict[str, float] = {}
    for name, applied in sampling_defaults(spec, thinking=thinking).items():
        option = getattr(options, name)
        if name == "top_k":
            values[name] = _count(name, int(applied.value) if option is None else option, *SAMPLING_RANGES[name])
        else:
            values[name] = _number(name, applied.value if option is None else option)
    return values


def _number(name: str, value: object) -> float:
    low, high = SAMPLING_RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a finite number", field=name)
    if isinstance(value, float) and not math.isfinite(value):  # an int is always finite, but may not fit a float
        raise InvalidRequest(f"{name} must be a finite number", field=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be from {low:g} to {high:g}; it is {shown(value)}", field=name)
    return float(value)


def _reasoning_budget(value: object, output: OutputFormat) -> int | None:
    """Return `Request.reasoning_budget`; None also if reasoning is not recognized in the output."""
    budget = NONE_GIVEN if value is None else _count("reasoning_budget", value, NONE_GIVEN, MOST_BUDGET)
    if budget == NONE_GIVEN:
        return None
    if output.continues:
        raise InvalidRequest(
            "reasoning_budget works only in chats: the text that follows a raw prompt has no separate reasoning",
            field="reasoning_budget",
        )
    return budget if output.reasoning else None


def _seconds(name: str, value: object, most: float) -> float | None:
    """Return the time limit that is asked for, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise InvalidRequest(
            f"{name} must be a number of seconds above 0 and at most {most:g} (request_timeout)", field=name
        )
    return float(value)


def _count(name: str, value: object, low: float, high: float, limit: str = "") -> int:
    """Return a whole number in [low, high], also from 4.0; `limit` names the option that `high` comes from."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be a whole number", field=name)
    if not low <= value <= high:
        named = f" ({limit})" if limit else ""
        allowed = f"{low}" if low == high else f"from {low} to {high}"
        raise InvalidRequest(f"{name} must be {allowed}{named}; it is {shown(value)}", field=name)
    return value


def _max_tokens(asked: int | None, prompt_tokens: int, context: int, allow_empty: bool) -> int:
    """Return how many tokens an answer may have: at most what was asked for and what the context has room for."""
    endless = asked is None or asked == NONE_GIVEN
    most = context if asked is None or endless else _count("max_tokens", asked, 0, 1 << 63)
    if most == 0 and not allow_empty:
        raise InvalidRequest(
            "max_tokens must be from 1, since an answer has at least 1 token; leave it out, or send -1, for as "
            "many as there is room for",
            field="max_tokens",
        )
    room = context - prompt_tokens
    if room < min(most, 1):
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens; the context is {context} tokens, so no room is left for an answer",
            field="prompt",
            prompt_tokens=prompt_tokens,
            context=context,
        )
    return min(most, room)


def _flags(options: SamplingOptions) -> None:
    for name in (
        "logprobs",
        "prompt_logprobs",
        "ignore_eos",
        "repetition_stop",
        "parallel_tool_calls",
        "progress",
    ):
        if not isinstance(getattr(options, name), bool):
            raise InvalidRequest(f"{name} must be true or false", field=name)


def _top_logprobs(options: SamplingOptions) -> int:
    if options.top_logprobs is None:
        return 0
    count = _count("top_logprobs", options.top_logprobs, 0, MAX_TOP_LOGPROBS)
    if count and not (options.logprobs or options.prompt_logprobs):
        raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
    return count


def _bias(bias: Mapping[int, float], vocab: int) -> tuple[tuple[int, float], ...]:
    if not isinstance(bias, Mapping):
        raise InvalidRequest("logit_bias must map token ids to numbers", field="logit_bias")
    if len(bias) > MAX_BIAS:
        raise InvalidRequest(f"logit_bias has {len(bias)} entries; at most {MAX_BIAS}", field="logit_bias")
    pairs = []
    for token, value in bias.items():
        _count("logit_bias", token, 0, vocab - 1, "the vocabulary")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise InvalidRequest("logit_bias values must be numbers from -100 to 100", field="logit_bias")
        pairs.append((token, float(value)))
    return tuple(sorted(pairs))


def _stop_tokens(tokens: Sequence[int], vocab: int) -> tuple[int, ...]:
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Sequence):
        raise InvalidRequest("stop_token_ids must be a list of token ids", field="stop_token_ids")
    if len(tokens) > MAX_STOP_TOKENS:
        raise InvalidRequest(f"stop_token_ids has {len(tokens)} ids; at most {MAX_STOP_TOKENS}", field="stop_token_ids")
    return tuple(_count("stop_token_ids", token, 0, vocab - 1, "the vocabulary") for token in tokens)


def _stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    if stop is not None and not isinstance(stop, Sequence):
        raise InvalidRequest("stop must be a text or a list of texts", field="stop")
    texts = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(texts) > MAX_STOP:
        raise InvalidRequest(f"stop has {len(texts)} texts; at most {MAX_STOP}", field="stop")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidRequest("stop must hold texts that are not empty", field="stop")
        if len(text) > MAX_STOP_BYTES:  # checked before the loop over its characters
            raise InvalidRequest(f"a stop text may have at most {MAX_STOP_BYTES} bytes", field="stop")
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise InvalidRequest("stop holds half a surrogate pair, which is not a character", field="stop")
        if len(text.encode()) > MAX_STOP_BYTES:
            raise InvalidRequest(f"a stop text may have at most {MAX_STOP_BYTES} bytes", field="stop")
    return tuple(dict.fromkeys(texts))
