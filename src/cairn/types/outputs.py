"""What comes back of a request: the worker's `Output` of a step, and the events that the front makes of it."""

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
"""What `Done.detail` says of an answer that was ended because it only repeated itself."""


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


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds a request spent; what the metrics record."""

    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


class PromptProgress(msgspec.Struct, frozen=True):
    """How far a prompt is, in tokens."""

    cached: int
    """Found in the cache."""
    processed: int
    """There by now, those among them."""


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did to one request: the worker's side of an event.

    The last output of a request has `finish`; with `FinishReason.ERROR`, `error` is a sentence for the client. With
    `FinishReason.STOP` the last of `tokens` is the stop token: it counts as a completion token, and is no text if it is
    one of the model's own.
    """

    id: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Those of prompt positions 1, 2, ..., sent in pieces, in order, before the first sampled token."""
    finish: FinishReason | None = None
    error: str = ""
    mu: float | None = None
    """Mirostat's state after `tokens`, where that is on: for a request that goes on elsewhere."""
    cache: CacheReport | None = None
    """Set on the first output after the prompt was computed."""
    timing: Timing | None = None
    """Set with `finish`."""
    progress: PromptProgress | None = None
    """Set while the prompt is computed, of a request that wants to know."""
    vector: bytes = b""
    """float32 in the machine's order: what a request that wants a hidden state has asked for, with `finish`."""


class TokenKind(enum.IntEnum):
    """What a token of an answer is a part of."""

    HIDDEN = 0
    """A call, a tag, a control token, or what a stop string has cut off."""
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
    """Return pieces of calls, those of each call that came one behind the other made one."""
    found: list[ToolCallDelta] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        if piece.id or not found:
            found.append(piece)
            arguments.append([])
        arguments[-1].append(piece.arguments)
    return tuple(
        one if len(texts) == 1 else msgspec.structs.replace(one, arguments="".join(texts))
        for one, texts in zip(found, arguments, strict=True)
    )


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New output of one choice. Any field may be empty; pieces of `text` join to exactly the decoded whole."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    tokens: tuple[int, ...] = ()
    kinds: bytes = b""
    """A `TokenKind` for each token whose kind became certain, in the order of the answer. They come with the text of
    these tokens, and so later than `tokens`. Told where log-probabilities or reasoning are wanted."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens of `kinds`; of content, where there are no kinds."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    progress: tuple[PromptProgress, ...] = ()
    """How far the prompt was after each step, of a request that wants to know."""


def logprobs_of(kind: TokenKind, kinds: bytes | bytearray, logprobs: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
    """Return the log-probabilities of one kind of tokens; where no kinds are known, all are of content."""
    if not kinds:
        return logprobs if kind is TokenKind.CONTENT else ()
    return [one for one, found in zip(logprobs, kinds, strict=False) if found == kind]


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one choice. A generation that failed raises a typed error instead."""

    reason: FinishReason
    usage: Usage
    cache: CacheReport
    timing: Timing = Timing()
    vector: bytes = b""
    """float32, of a request that wants a hidden state."""
    detail: str = ""
    """More than the reason says: REPETITION where LENGTH ended an answer that only repeated itself."""
    unread_call: bool = False
    """Something in the text began as a call of a tool does and could not be read as one, or as a whole one."""
    moved: str = ""
    """A sentence, where the device failed that began the choice and another one computed the rest."""


Event = Delta | Done
