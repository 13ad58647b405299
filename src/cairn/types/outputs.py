"""Results of a request: the worker's `Output` for each step, and the events that the front makes of them."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from cairn.types.stats import CacheReport


class FinishReason(enum.StrEnum):
    """Why a generation ended. `STOP`: EOS, a stop token or a stop string; `LENGTH`: a token limit."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


REPETITION = "repetition"
"""`Done.detail` of an answer that was ended because it only repeated itself."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability of one token under the raw distribution (before bias, penalties and temperature)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely (token, logprob) pairs, best first."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one choice, as the OpenAI API defines them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    accepted_prediction_tokens: int = 0
    """Tokens of the answer that were guessed before they were sampled."""
    rejected_prediction_tokens: int = 0
    """Guesses that were computed and are not in the answer."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that a request spent in each phase, as the metrics record them."""

    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


class PromptProgress(msgspec.Struct, frozen=True):
    """Progress of a prompt, in tokens."""

    cached: int
    """Tokens found in the cache."""
    processed: int
    """Tokens done so far, cached ones included."""


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one step for one request, sent by the worker.

    The last output of a request has `finish`; with `FinishReason.ERROR`, `error` is a sentence for the client. With
    `FinishReason.STOP` the last of `tokens` is the stop token: it counts as a completion token, and is not part of the
    text if it is one of the model's own.
    """

    id: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of prompt positions 1, 2, ..., sent in pieces, in order, before the first sampled token."""
    finish: FinishReason | None = None
    error: str = ""
    mu: float | None = None
    """Mirostat's state after `tokens`, if it is on: needed to continue the request on another worker."""
    cache: CacheReport | None = None
    """Set on the first output after the prompt was computed."""
    timing: Timing | None = None
    """Set with the first token, and with `finish`."""
    progress: PromptProgress | None = None
    """Set while the prompt is computed, if the request asked for progress."""
    vector: bytes = b""
    """The result of a request for a hidden state, as float32 in native byte order; set with `finish`."""
    accepted_prediction_tokens: int = 0
    """Guesses of this step that were right and are in the answer."""
    rejected_prediction_tokens: int = 0
    """Guesses of this step that were checked and are not in the answer."""


class TokenKind(enum.IntEnum):
    """The part of an answer that a token belongs to."""

    HIDDEN = 0
    """A tool call, a tag, a control token, or text cut off by a stop string."""
    CONTENT = 1
    REASONING = 2
    REASONING_TAG = 3


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a tool call. The first piece of a call carries `id` and `name`; pieces of `arguments` join to JSON."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


def joined_calls(pieces: Sequence[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Return the pieces with consecutive pieces of the same call joined."""
    calls: list[ToolCallDelta] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        if piece.id or not calls:
            calls.append(piece)
            arguments.append([])
        arguments[-1].append(piece.arguments)
    return tuple(
        call if len(texts) == 1 else msgspec.structs.replace(call, arguments="".join(texts))
        for call, texts in zip(calls, arguments, strict=True)
    )


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New output of one choice. Any field may be empty; pieces of `text` join to exactly the decoded whole."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    tokens: tuple[int, ...] = ()
    kinds: bytes = b""
    """A `TokenKind` for each token whose kind became certain, in the order of the answer.

    They come with these tokens' text, so later than `tokens`. Only set if log-probabilities or reasoning are wanted."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of the tokens in `kinds`; of content tokens if `kinds` is empty."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    progress: tuple[PromptProgress, ...] = ()
    """Progress of the prompt after each step, if the request asked for it."""


def logprobs_of(kind: TokenKind, kinds: bytes | bytearray, logprobs: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
    """Return the log-probabilities of one kind of tokens; without kinds, all count as content."""
    if not kinds:
        return logprobs if kind is TokenKind.CONTENT else ()
    return [logprob for logprob, its_kind in zip(logprobs, kinds, strict=False) if its_kind == kind]


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one choice. A generation that failed raises a typed error instead."""

    reason: FinishReason
    usage: Usage
    cache: CacheReport
    timing: Timing = Timing()
    vector: bytes = b""
    """The result of a request for a hidden state, as float32."""
    detail: str = ""
    """More on the reason: REPETITION if LENGTH ended an answer that only repeated itself."""
    unread_call: bool = False
    """Whether the text holds the beginning of a tool call that is malformed or incomplete."""
    moved: str = ""
    """A sentence if the device failed and another computed the rest of the choice; else empty."""


Event = Delta | Done
