"""Keywords of `LLM` and of its calls: types for editors and type checkers, and their text for `help()`.

A test holds `ModelKeywords` to the local options of `Config`, and `SamplingKeywords` to `SamplingOptions`.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict, TypeVar, get_args, get_origin, get_type_hints

from cairn.config.option import OTHER_NAMES, SAMPLING_NAMES, closest, options

T = TypeVar("T")


class ModelKeywords(TypedDict, total=False):
    """Options of a model in this process. `Config` documents each."""

    tokenizer: str | None
    kind: Literal["auto", "rerank"]
    engine: Literal["auto", "cpu", "fake"]
    device: str
    tp: int
    kernels: Literal[
        "auto", "reference", "portable", "avx2", "avxvnni", "avx512vnni", "avx512", "amx", "neon", "neoni8mm", "metal"
    ]
    weights: Literal["auto", "stored", "f32", "bf16", "int8", "int4"]
    keep_packed: bool
    keep_packed_gb: float | None
    experts: Literal["auto", "memory", "mapped"]
    cpu_experts: str
    threads: int | None
    profile: str | None
    context: int | None
    kv_gb: float | None
    kv_dtype: Literal["auto", "f32", "bf16", "f16", "q8"]
    max_running: int
    step_tokens: int
    step_seconds: float
    speculate: str
    draft_model: str | None
    draft_kv_gb: float
    max_queue: int
    max_queue_tokens: int
    max_queue_pools: float
    request_timeout: float
    kv_dir: str | None
    kv_disk: bool
    kv_disk_gb: float | None
    kv_codec: Literal["raw", "q8"]
    kv_ram_gb: float | None
    kv_load: Literal["auto", "always", "never"]
    kv_write_gb: float
    kv_ttl: float
    kv_fresh: bool
    sampler_order: Literal["default", "llama"]
    default_temperature: float | None
    default_top_k: int | None
    default_top_p: float | None
    default_min_p: float | None
    reasoning_history: Literal["keep", "template"]
    tool_instructions: bool
    chat_template: str | None
    template_timeout: float


class SamplingKeywords(TypedDict, total=False):
    """Options of one call. Defaults come from the model's files, then from Cairn."""

    max_tokens: Annotated[int | None, "Most tokens of the answer; default: what is left of the context."]
    temperature: Annotated[float | None, "0 to 10; 0 always takes the likeliest token."]
    top_k: Annotated[int | None, "Draw from the k likeliest tokens; 0 is off."]
    top_p: Annotated[float | None, "Draw from the likeliest tokens that add up to this probability, 0 to 1."]
    min_p: Annotated[float | None, "Leave out tokens below this part of the likeliest one's probability, 0 to 1."]
    repetition_penalty: Annotated[float | None, "Divides the logits of earlier tokens; 1 is off."]
    presence_penalty: Annotated[float | None, "Subtracted once from the logit of each generated token; 0 is off."]
    frequency_penalty: Annotated[float | None, "Subtracted for each time a token was generated; 0 is off."]
    samplers: Annotated[Sequence[str] | str | None, "The samplers that apply, in their order."]
    logit_bias: Annotated[
        Mapping[int, float] | Sequence[Sequence[Any]] | None, "Token id -> -100 to 100, added to its logit."
    ]
    typical_p: Annotated[float | None, "Locally typical sampling, 0 to 1; 1 is off."]
    top_n_sigma: Annotated[float | None, "Keep logits within this many standard deviations of the best; 0 is off."]
    xtc_probability: Annotated[float | None, "How often XTC leaves out the likeliest tokens, 0 to 1."]
    xtc_threshold: Annotated[float | None, "XTC leaves out tokens of at least this probability."]
    dry_multiplier: Annotated[float | None, "Strength of DRY, which avoids repeated passages; 0 is off."]
    dry_base: Annotated[float | None, "How fast DRY grows with the length of a repetition."]
    dry_allowed_length: Annotated[int | None, "Tokens that may repeat without DRY."]
    dry_penalty_last_n: Annotated[int | None, "How many tokens DRY looks back; -1 is all."]
    dry_sequence_breakers: Annotated[Sequence[str] | None, "Texts at which a repetition ends."]
    dynatemp_range: Annotated[float | None, "How far the temperature follows the entropy; 0 is off."]
    dynatemp_exponent: Annotated[float | None, "The exponent of that dependence."]
    mirostat: Annotated[int | None, "0 is off, 1 or 2 the version of Mirostat."]
    mirostat_tau: Annotated[float | None, "The surprise that Mirostat aims at."]
    mirostat_eta: Annotated[float | None, "How fast Mirostat adapts."]
    allowed_token_ids: Annotated[Sequence[int] | None, "The only tokens that may be generated."]
    bad_words: Annotated[Sequence[str] | None, "Texts that must not be generated."]
    seed: Annotated[int | None, "Any 64-bit number; the same seed gives the same answer. Default: drawn."]
    logprobs: Annotated[bool, "Return the log probability of each token."]
    top_logprobs: Annotated[int | None, "Also those of this many likeliest tokens, 0 to 20."]
    prompt_logprobs: Annotated[bool, "Return the log probabilities of the prompt's tokens."]
    stop: Annotated[str | Sequence[str] | None, "Texts that end the answer; at most 64."]
    stop_token_ids: Annotated[Sequence[int] | None, "Tokens that end the answer."]
    min_tokens: Annotated[int | None, "Fewest tokens of the answer."]
    ignore_eos: Annotated[bool, "Go on after the model's end token."]
    repetition_stop: Annotated[bool, "End an answer that only repeats itself."]
    n: Annotated[int | None, "Number of answers; only 1 here."]
    priority: Annotated[int | None, "-100 to 100; a lower number runs sooner."]
    timeout: Annotated[float | None, "Seconds after which DeadlineExceeded is raised."]
    first_token_timeout: Annotated[float | None, "Seconds to the first token, after which it is raised."]
    reasoning_budget: Annotated[int | None, "Most tokens of reasoning."]
    progress: Annotated[bool, "Pieces of a stream report how much of the prompt is computed."]
    parallel_tool_calls: Annotated[bool, "False: the answer ends with its first tool call."]
    prediction: Annotated[
        str | Sequence[int] | None, "A text or tokens that much of the answer is expected to repeat: it is faster."
    ]


_CALLS = SAMPLING_NAMES | {
    "typ_p": "typical_p",
    "format": "response_format",
    "functions": "tools",
    "function_call": "tool_choice",
    "chat_template_kwargs": "template_args",
    "use_tqdm": "progress_bar",
}
"""Keywords of other libraries -> the name here."""
_UNPACKED = {
    "sampling_params": "give its fields as keywords: temperature=0, max_tokens=100",
    "options": "give its fields as keywords: temperature=0, max_tokens=100",
    "do_sample": "temperature=0 always takes the likeliest token",
}
_OF_CALLS = (
    "messages",
    "prompts",
    "tools",
    "stream",
    "progress_bar",
    "response_format",
    "tool_choice",
    "template_args",
)


def unknown_keyword(name: str) -> str:
    """Return the error message for a keyword that a call does not take, with the right name if it is known."""
    if name in _CALLS:
        return f"unknown option {name!r}: it is called {_CALLS[name]} here"
    if name in _UNPACKED:
        return f"unknown option {name!r}: {_UNPACKED[name]}"
    option = OTHER_NAMES.get(name, name)
    if option in get_type_hints(ModelKeywords):
        return f"unknown option {name!r}: {option} is an option of the model; give it to LLM(...)"
    return f"unknown option {name!r}{closest(name, (*get_type_hints(SamplingKeywords), *_OF_CALLS))}"


def document_model_options(kind: T) -> T:
    """Append the options of a model to a docstring, for `help()` and notebooks."""
    help_texts = {option.name: option.help for option in options()}
    lines = _lines({name: (hint, help_texts[name]) for name, hint in get_type_hints(ModelKeywords).items()})
    return _with_section(kind, "Options of the model:", lines)


def document_sampling_options(call: T) -> T:
    """Append the options of a call to a docstring."""
    hints = get_type_hints(SamplingKeywords, include_extras=True)
    lines = _lines({name: get_args(hint) for name, hint in hints.items()})
    return _with_section(call, "Sampling options:", lines)


def _with_section(subject: T, title: str, lines: str) -> T:
    if subject.__doc__:  # not with python -OO
        subject.__doc__ = f"{inspect.cleandoc(subject.__doc__)}\n\n{title}\n{lines}\n"
    return subject


def _lines(found: Mapping[str, Sequence[Any]]) -> str:
    def line(name: str, kind: Any, text: str) -> str:
        return textwrap.fill(
            f"{name} ({_spelled(kind)}): {text}", 100, initial_indent="    ", subsequent_indent=" " * 8
        )

    return "\n".join(line(name, *rest) for name, rest in found.items())


def _spelled(kind: Any) -> str:
    """Return a type as people write it, without `| None` and module names."""
    parts = [part for part in get_args(kind) if part is not type(None)]
    if get_origin(kind) is Literal:
        return " | ".join(map(repr, parts))
    if type(None) in get_args(kind):
        return " | ".join(map(_spelled, parts))
    return kind.__name__ if isinstance(kind, type) and not parts else str(kind).replace("collections.abc.", "")
