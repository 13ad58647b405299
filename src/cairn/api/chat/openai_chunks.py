"""The wire shapes of answers: OpenAI's objects, and their streamed chunks as bytes built by hand.

Shapes: platform.openai.com/docs/api-reference (chat/object, chat/streaming, completions/object), as openai-python's
`types.chat.ChatCompletionChunk` and `types.Completion` state them; `reasoning_content` as in DeepSeek and vLLM.
Framing: server-sent events (html.spec.whatwg.org, 9.2). Chunks differ in a few bytes, so the constant part is encoded
once a stream.
"""

from __future__ import annotations

import base64
import binascii
import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from cairn.api.http.call import encode
from cairn.types.model_spec import BLOCK_TOKENS
from cairn.types.outputs import Delta, Done, TokenKind, TokenLogprob, ToolCallDelta, logprobs_of
from cairn.types.stats import CacheReport, Miss

MARK = "cairn1."


def pack(text: str) -> str:
    """Encode a text in a form that clients hand back unchanged."""
    return MARK + base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode()


def unpack(value: object) -> str:
    """Return the text of a packed value; empty for any other."""
    if not isinstance(value, str) or not value.startswith(MARK):
        return ""
    try:
        return base64.b64decode(value[len(MARK) :], altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


_CLOSE = b"}\n\n"
"""The end of every event with an object."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""


class Pieces(Protocol):
    """The part of an incremental detokenizer that this module uses."""

    def push(self, ids: Sequence[int], /) -> str:
        """Return the text that these tokens complete."""
        ...


class TokenBytes(Protocol):
    """The part of a tokenizer that this module uses."""

    def token_bytes(self, token: int, /) -> bytes:
        """Return the bytes of a token."""
        ...

    def detokenizer(self, *, after: Sequence[int] = ()) -> Pieces:
        """Return a detokenizer at the start of a text, or after these tokens."""
        ...


def with_fields(events: bytes, fields: Mapping[str, Any]) -> bytes:
    """Add fields to the object of the last event."""
    return events[: -len(_CLOSE)] + b"," + encode(fields)[1:-1] + _CLOSE


def cache_object(report: CacheReport) -> dict[str, Any]:
    """Return where a prompt's KV came from: tokens by source, and the first block that had to be computed.

    `miss` is a list of none or one: clients that add up usages (LangChain's ChatOpenAI) fail if a field is null here
    and an object there.
    """
    miss = report.miss
    return {
        "computed": report.computed,
        "pool": report.pool,
        "ram": report.ram,
        "disk": report.disk,
        "shared": report.shared,
        "load_seconds": round(report.load, 6),
        "miss": [] if miss is None else [miss_object(miss)],
    }


def written_of(prompt: int, cached: int) -> int:
    """Return how many tokens of a prompt were added to the cache.

    These are whole blocks of all but its last token, which is always computed anew.
    """
    return max((prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS - cached, 0)


def miss_object(miss: Miss) -> dict[str, Any]:
    """Return the first block that had to be computed, and why; `differs` only if a nearest known context is known."""
    found: dict[str, Any] = {"position": miss.position, "reason": miss.reason}
    if miss.differs is not None:
        found["differs"] = msgspec.to_builtins(miss.differs)
    return found


def usage_object(ends: Iterable[tuple[Done, bool]], reasoning: int = 0) -> dict[str, Any]:
    """Return the usage of a whole call, with `cairn` in it. `reasoning`: the tokens that are reasoning.

    Only the first choice of a prompt (True) counts the prompt. Of several prompts the cache reports are added up, and
    `miss` is the first there was.
    """
    prompt = completion = cached = accepted = rejected = 0
    report: CacheReport | None = None
    for done, first in ends:
        completion += done.usage.completion_tokens
        accepted += done.usage.accepted_prediction_tokens
        rejected += done.usage.rejected_prediction_tokens
        if first:
            prompt += done.usage.prompt_tokens
            cached += done.usage.cached_tokens
            report = done.cache if report is None else _sum(report, done.cache)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
        "cairn": cache_object(report or CacheReport()),
    }


def _sum(one: CacheReport, other: CacheReport) -> CacheReport:
    return CacheReport(
        computed=one.computed + other.computed,
        pool=one.pool + other.pool,
        ram=one.ram + other.ram,
        disk=one.disk + other.disk,
        shared=one.shared + other.shared,
        load=one.load + other.load,
        miss=one.miss or other.miss,
    )


def token_scores(logprobs: Sequence[TokenLogprob], vocabulary: TokenBytes) -> list[dict[str, Any]]:
    """Return the log-probabilities of tokens as OpenAI's chats have them."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = vocabulary.token_bytes(token)
        return {"token": _readable(token, vocabulary), "logprob": _finite(logprob), "bytes": list(raw)}

    return [
        one(entry.token, entry.logprob) | {"top_logprobs": [one(token, value) for token, value in entry.top]}
        for entry in logprobs
    ]


def chat_logprobs(
    content: Sequence[TokenLogprob], reasoning: Sequence[TokenLogprob], vocabulary: TokenBytes
) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice, with `reasoning_content` if there is reasoning."""
    found: dict[str, Any] = {"content": token_scores(content, vocabulary), "refusal": None}
    return found | ({"reasoning_content": token_scores(reasoning, vocabulary)} if reasoning else {})


def prompt_scores(logprobs: Sequence[TokenLogprob], vocabulary: TokenBytes) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: null for the first token, else the scores of it and of the likeliest.

    The rank of a token that is not among the likeliest is unknown.
    """
    found: list[dict[str, Any] | None] = [None]
    for entry in logprobs:
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
        told = {}
        for token, value in ({entry.token: entry.logprob} | dict(entry.top)).items():
            text = _readable(token, vocabulary)
            told[str(token)] = {"logprob": _finite(value), "rank": ranks.get(token), "decoded_token": text}
        found.append(told)
    return found


class TextLogprobs:
    """Collects the parallel lists of a text completion's `logprobs`; offsets are characters of the choice's text.

    A token is called by its text, by its bytes where they are no whole characters (`bytes:\\xe2\\x82`), and by its
    number (`token_id:9`) where a likelier one beside it has that name. `after`: the prompt, where it is no part of that
    text.
    """

    def __init__(self, vocabulary: TokenBytes, top: int, *, after: Sequence[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._top = top
        self._pieces = vocabulary.detokenizer(after=after)
        self._length = 0
        self._begun = codecs.getincrementaldecoder("utf-8")("replace")
        """Holds the bytes of a character that is not whole yet."""
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, token: int, entry: TokenLogprob | None) -> None:
        """Add a token; `entry` is None for the first of an echoed prompt, which nothing precedes."""
        self._offsets.append(self._place(token))
        top = entry.top[: self._top] if entry is not None else ()
        names: dict[int, str] = {}
        for one in dict.fromkeys((*(other for other, _ in top), token)):
            name = _name(self._vocabulary.token_bytes(one))
            names[one] = f"token_id:{one}" if name in names.values() else name
        self._tokens.append(names[token])
        self._logprobs.append(None if entry is None else _finite(entry.logprob))
        own = {names[token]: _finite(entry.logprob)} if entry is not None else {}
        self._tops.append({names[other]: _finite(value) for other, value in top} | own or None)

    def _place(self, token: int) -> int:
        """Return the offset at which the token's own text begins.

        That is after text of earlier tokens that waited for the rest of a character. Within a character it is that
        character's offset.
        """
        before, raw = self._length, self._vocabulary.token_bytes(token)
        text = self._pieces.push([token])
        self._length += len(text)
        state = self._begun.getstate()
        whole = self._begun.decode(raw)
        goes_on = state[0] and not whole.startswith(REPLACEMENT)
        if goes_on:
            return before
        own = whole[1:] if state[0] else whole
        if own and not text:  # it is shown later, or never
            self._begun.setstate(state)
        return self._length - len(own) if text.endswith(own) else before

    def take(self) -> dict[str, Any]:
        """Return what was added since the last call."""
        found = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops if self._top else None,
            "text_offset": self._offsets,
        }
        self._tokens, self._logprobs, self._tops, self._offsets = [], [], [], []
        return found


def tool_call(delta: ToolCallDelta) -> dict[str, Any]:
    """Return a piece of a tool call: `id`, `type` and `name` in the first piece only."""
    if delta.id:
        function = {"name": delta.name, "arguments": delta.arguments}
        return {"index": delta.index, "id": delta.id, "type": "function", "function": function}
    return {"index": delta.index, "function": {"arguments": delta.arguments}}


class ChatChunks:
    """The chunks of one streamed chat completion."""

    def __init__(self, head: dict[str, Any], choices: int, include_usage: bool, vocabulary: TokenBytes) -> None:
        fixed = encode(head | {"object": "chat.completion.chunk"})[:-1]
        self._open = b"data: " + fixed + b',"choices":['
        self._heads = [self._open + b'{"index":%d,"delta":' % index for index in range(choices)]
        self._usage_null = b',"usage":null' if include_usage else b""
        self._plain = b'},"logprobs":null,"finish_reason":null}]' + self._usage_null + b"}\n\n"
        self._vocabulary = vocabulary

    def first(self, index: int) -> bytes:
        """Return the chunk that names the role."""
        return self._heads[index] + b'{"role":"assistant","content":""' + self._plain

    def nothing(self, index: int) -> bytes:
        """Return a chunk without a part of the answer."""
        return self._heads[index] + b"{" + self._plain

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the chunks of one delta; empty if it holds nothing a client sees.

        Log-probabilities go with their text.
        """
        if delta.text and not (delta.logprobs or delta.reasoning or delta.tool_calls):
            return self._heads[index] + b'{"content":' + encode(delta.text) + self._plain
        if delta.logprobs:
            return self._scored(index, delta)
        pieces: list[dict[str, Any]] = []
        if delta.reasoning:
            pieces.append({"reasoning_content": delta.reasoning})
        if delta.text:
            pieces.append({"content": delta.text})
        pieces += [{"tool_calls": [tool_call(call)]} for call in delta.tool_calls]
        return b"".join(self._heads[index] + encode(piece)[:-1] + self._plain for piece in pieces)

    def _scored(self, index: int, delta: Delta) -> bytes:
        content = logprobs_of(TokenKind.CONTENT, delta.kinds, delta.logprobs)
        thought = logprobs_of(TokenKind.REASONING, delta.kinds, delta.logprobs)
        data = b""
        for name, text, scores in (
            ("reasoning_content", delta.reasoning, chat_logprobs((), thought, self._vocabulary)),
            ("content", delta.text, chat_logprobs(content, (), self._vocabulary)),
        ):
            if text or scores["content"] or "reasoning_content" in scores:
                data += self._chunk(index, encode({name: text}), encode(scores), b"null")
        calls = [{"tool_calls": [tool_call(call)]} for call in delta.tool_calls]
        return data + b"".join(self._heads[index] + encode(call)[:-1] + self._plain for call in calls)

    def call(self, index: int, call: dict[str, Any]) -> bytes:
        """Return the chunk of one complete call."""
        return self._heads[index] + encode({"tool_calls": [call]})[:-1] + self._plain

    def finish(self, index: int, done: Done, reason: str, warnings: Sequence[str] = ()) -> bytes:
        """Return the last chunk of a choice. If no usage follows, it reports where the prompt's KV came from."""
        more = _told(warnings) + (b"" if self._usage_null else _cairn(done))
        return self._chunk(index, b"{}", b"null", encode(reason) + _detail(done), more)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Return the chunk without choices that carries the usage."""
        return self._open + b'],"usage":' + encode(usage) + b"}\n\n"

    def _chunk(self, index: int, delta: bytes, logprobs: bytes, reason: bytes, more: bytes = b"") -> bytes:
        tail = b',"logprobs":' + logprobs + b',"finish_reason":' + reason + b"}]" + self._usage_null + more + b"}\n\n"
        return self._heads[index] + delta + tail


class TextChunks:
    """The chunks of one streamed text completion."""

    def __init__(self, head: dict[str, Any], choices: int, include_usage: bool) -> None:
        fixed = encode(head)[:-1]
        self._open = b"data: " + fixed + b',"choices":['
        self._heads = [self._open + b'{"index":%d,"text":' % index for index in range(choices)]
        self._usage_null = b',"usage":null' if include_usage else b""
        self._plain = b',"logprobs":null,"finish_reason":null}]' + self._usage_null + b"}\n\n"

    def text(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> bytes:
        """Return the chunk of a piece of text."""
        if logprobs is None:
            return self._heads[index] + encode(text) + self._plain
        tail = b',"logprobs":' + encode(logprobs) + b',"finish_reason":null}]' + self._usage_null + b"}\n\n"
        return self._heads[index] + encode(text) + tail

    def finish(
        self,
        index: int,
        done: Done,
        reason: str,
        warnings: Sequence[str] = (),
        text: str = "",
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        """Return the last chunk of a choice, perhaps with its last text.

        If no usage follows, it reports where the prompt's KV came from.
        """
        more = _told(warnings) + (self._usage_null or _cairn(done))
        ended = b',"finish_reason":' + encode(reason) + _detail(done)
        tail = b',"logprobs":' + encode(logprobs) + ended + b"}]" + more + b"}\n\n"
        return self._heads[index] + encode(text) + tail

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Return the chunk without choices that carries the usage."""
        return self._open + b'],"usage":' + encode(usage) + b"}\n\n"


def _detail(done: Done) -> bytes:
    return b',"finish_detail":' + encode(done.detail) if done.detail else b""


def _told(warnings: Sequence[str]) -> bytes:
    return b',"warnings":' + encode(warnings) if warnings else b""


def _cairn(done: Done) -> bytes:
    return b',"cairn":' + encode(cache_object(done.cache))


def _readable(token: int, vocabulary: TokenBytes) -> str:
    """Return the token's own text. Bytes of an incomplete character become U+FFFD; `bytes` has them as they are."""
    return vocabulary.token_bytes(token).decode("utf-8", "replace")


def _name(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
