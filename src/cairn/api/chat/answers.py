"""The adapters of OpenAI's chat and text completions: answers whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import msgspec

from cairn.api.chat.exchange import ChoiceStream
from cairn.api.chat.free_text_tools import free_text
from cairn.api.chat.openai_chunks import (
    ChatChunks,
    TextChunks,
    TextLogprobs,
    chat_logprobs,
    prompt_scores,
    usage_object,
    with_fields,
)
from cairn.api.chat.timings import AnswerTimes
from cairn.api.chat.whole_calls import WholeCalls
from cairn.api.http.call import HTTPCall
from cairn.api.http.sse import DONE, HEARTBEAT, error_event
from cairn.frontend.service import Service
from cairn.types.errors import CairnError
from cairn.types.outputs import Delta, Done, TokenKind, TokenLogprob, ToolCallDelta, logprobs_of


class ChatAnswer:
    """Adapter of chat completions."""

    prefix = "chatcmpl-"
    kind = "chat.completion"

    def __init__(
        self,
        call: HTTPCall,
        service: Service,
        choices: Sequence[ChoiceStream],
        include_usage: bool,
        pace: AnswerTimes,
        *,
        top: int | None = None,
        scored: int | None = None,
        hides: bool = False,
        free: Collection[str] = (),
    ) -> None:
        """Format the answer of a chat.

        `top`: how many alternatives are listed beside each token of the answer (None: all that are known); `scored`:
        the same for tokens of the prompt, if these are reported. `hides` leaves reasoning out. `free`: the names of
        custom tools.
        """
        self._pace, self._top, self._scored, self._hides = pace, top, scored, hides
        self._free = frozenset(free)
        self._input: dict[int, WholeCalls] = {}
        """Calls of custom tools by choice. Their input is sent once it is complete."""
        self._writing: dict[int, bool] = {}
        """Whether the open call is a custom tool's, by choice."""
        self._service = service
        self._choices = choices
        self._head = head(call, service, self.prefix, self.kind)
        self._chunks: ChatChunks | None = None
        self._include_usage = include_usage
        self._warnings = call.warnings

    def begin(self) -> bytes:
        """Return the first bytes of a stream: every choice names its role."""
        self._chunks = ChatChunks(self._head, len(self._choices), self._include_usage, self._service.tokenizer)
        return b"".join(self._chunks.first(index) for index in range(len(self._choices)))

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the events of one delta."""
        assert self._chunks is not None
        if self._hides and (delta.reasoning or delta.logprobs):
            shown = tuple(logprobs_of(TokenKind.CONTENT, delta.kinds, delta.logprobs))
            delta = msgspec.structs.replace(delta, reasoning="", logprobs=shown, kinds=b"")
        before = _progress_chunks(self._pace, index, delta, self._chunks.nothing)
        if self._free and (delta.tool_calls or index in self._input):
            return before + _timed(self._pace, index, self._with_free_calls(index, delta))
        return before + _timed(self._pace, index, self._chunks.delta(index, delta))

    def _with_free_calls(self, index: int, delta: Delta) -> bytes:
        """Return the chunks of a delta with calls. Calls of custom tools are held back until they are complete."""
        assert self._chunks is not None
        free = self._input.setdefault(index, WholeCalls())
        data = b"".join(
            map(partial(self._free_call, index), free.push(Delta(text=delta.text, reasoning=delta.reasoning))[0])
        )
        data += self._chunks.delta(index, msgspec.structs.replace(delta, tool_calls=()))
        for call in delta.tool_calls:
            if call.id:
                data += b"".join(map(partial(self._free_call, index), free.finish()))
                self._writing[index] = call.name in self._free
            if self._writing.get(index):
                free.push(Delta(tool_calls=(call,)))
            else:
                data += self._chunks.delta(index, Delta(tool_calls=(call,)))
        return data

    def _free_call(self, index: int, call: ToolCallDelta) -> bytes:
        """Return the chunk of a custom tool's call."""
        assert self._chunks is not None
        return self._chunks.call(index, {"index": call.index} | _free_shape(call.id, call.name, call.arguments))

    def finish(self, index: int, done: Done, reason: str) -> bytes:
        """Return the events that end a choice."""
        assert self._chunks is not None
        last = self._chunks.finish(index, done, reason, self._warnings)
        free = self._input.get(index, WholeCalls()).finish()
        return b"".join(map(partial(self._free_call, index), free)) + _ended(self._pace, index, done, last)

    def end(self) -> bytes:
        """Return the usage chunk, if it was asked for, and the end mark."""
        assert self._chunks is not None
        return self._chunks.usage(usage_of(self._choices)) + DONE if self._include_usage else DONE

    def error(self, error: CairnError) -> bytes:
        """Return the event of a failure."""
        return error_event(error)

    def heartbeat(self) -> bytes:
        """Return a comment."""
        return HEARTBEAT

    def whole(self) -> dict[str, Any]:
        """Return the answer in one piece."""
        found = []
        for index, choice in enumerate(self._choices):
            logprobs = None
            if choice.request.sampling.logprobs:
                content = _cut(choice.scores(TokenKind.CONTENT), self._top)
                thought = () if self._hides else _cut(choice.scores(TokenKind.REASONING), self._top)
                logprobs = chat_logprobs(content, thought, self._service.tokenizer)
            message = choice.said.message() | {"refusal": None}
            if self._hides:
                message.pop("reasoning_content", None)
            if self._free and "tool_calls" in message:
                message["tool_calls"] = [self._shape(call) for call in message["tool_calls"]]
            found.append(
                {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.reason}
                | choice.detail
            )
        whole = self._head | {"choices": found, "usage": usage_of(self._choices)}
        if self._scored is not None:
            entries = _cut(self._choices[0].prompt_logprobs, self._scored)
            whole["prompt_logprobs"] = prompt_scores(entries, self._service.tokenizer)
        return whole | timings_of(self._pace, self._choices)

    def _shape(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return a call in the shape of its tool's kind."""
        function = call["function"]
        free = function["name"] in self._free
        return _free_shape(call["id"], function["name"], function["arguments"]) if free else call


def _free_shape(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "custom", "custom": {"name": name, "input": free_text(arguments)}}


class TextAnswer:
    """Formats text completions. `echoes` holds the prompt's text of each choice, or None without echo."""

    prefix = "cmpl-"
    kind = "text_completion"

    def __init__(
        self,
        call: HTTPCall,
        service: Service,
        choices: Sequence[ChoiceStream],
        include_usage: bool,
        echoes: Sequence[str] | None,
        top: int | None,
        pace: AnswerTimes,
        scored: int | None = None,
    ) -> None:
        self._pace, self._scored, self._tokenizer = pace, scored, service.tokenizer
        self._choices = choices
        self._echoes = echoes
        self._head = head(call, service, self.prefix, self.kind)
        self._chunks: TextChunks | None = None
        self._include_usage = include_usage
        self._warnings = call.warnings
        self._logprobs = None if top is None else [self._scores(choice, service, top) for choice in choices]
        self._echoed = [echoes is None] * len(choices)
        self._last: dict[int, str] = {}
        """The last text of each choice, which is sent with its end if log-probabilities are reported."""

    def begin(self) -> bytes:
        """Return nothing: text completions have no opening chunk."""
        self._chunks = TextChunks(self._head, len(self._choices), self._include_usage)
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the events of one delta, after the echoed prompt."""
        chunks = self._chunks
        assert chunks is not None
        if not (delta.tokens or delta.text or delta.logprobs or delta.progress):
            return b""
        before = _progress_chunks(self._pace, index, delta, lambda index: chunks.text(index, ""))
        if delta.progress and not (delta.tokens or delta.text):
            return before
        before += self._echo(index)
        if self._logprobs is None:
            return before + _timed(self._pace, index, chunks.text(index, delta.text) if delta.text else b"")
        for entry in delta.logprobs:
            self._logprobs[index].add(entry.token, entry)
        if self._choices[index].ending:
            self._last[index] = self._last.get(index, "") + delta.text
            return before
        if not delta.text and not delta.logprobs:
            return before
        return before + _timed(self._pace, index, chunks.text(index, delta.text, self._logprobs[index].take()))

    def finish(self, index: int, done: Done, reason: str) -> bytes:
        """Return the events that end a choice, with the log-probabilities of its last tokens."""
        assert self._chunks is not None
        scores = None if self._logprobs is None else self._logprobs[index].take()
        scores = scores if scores is not None and scores["tokens"] else None
        last = self._chunks.finish(index, done, reason, self._warnings, self._last.get(index, ""), scores)
        return self._echo(index) + _ended(self._pace, index, done, last)

    def end(self) -> bytes:
        """Return the usage chunk, if it was asked for, and the end mark."""
        assert self._chunks is not None
        return self._chunks.usage(usage_of(self._choices)) + DONE if self._include_usage else DONE

    def error(self, error: CairnError) -> bytes:
        """Return the event of a failure."""
        return error_event(error)

    def heartbeat(self) -> bytes:
        """Return a comment."""
        return HEARTBEAT

    def whole(self) -> dict[str, Any]:
        """Return the answer in one piece."""
        found = []
        for index, choice in enumerate(self._choices):
            logprobs = None
            if self._logprobs is not None:
                if self._echoes is not None:
                    self._add_prompt(index)
                for entry in choice.logprobs:
                    self._logprobs[index].add(entry.token, entry)
                logprobs = self._logprobs[index].take()
            text = (self._echoes[index] if self._echoes is not None else "") + choice.said.text
            found.append(
                {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.reason} | choice.detail
            )
            if self._scored is not None:
                scores = prompt_scores(_cut(choice.prompt_logprobs, self._scored), self._tokenizer)
                found[-1]["prompt_logprobs"] = scores
        return self._head | {"choices": found, "usage": usage_of(self._choices)} | timings_of(self._pace, self._choices)

    def _scores(self, choice: ChoiceStream, service: Service, top: int) -> TextLogprobs:
        before = choice.request.prompt if self._echoes is None else ()
        return TextLogprobs(service.tokenizer, top, after=before)

    def _echo(self, index: int) -> bytes:
        if self._echoed[index]:
            return b""
        assert self._echoes is not None and self._chunks is not None
        self._echoed[index] = True
        if self._logprobs is None:
            return self._chunks.text(index, self._echoes[index])
        self._add_prompt(index)
        return self._chunks.text(index, self._echoes[index], self._logprobs[index].take())

    def _add_prompt(self, index: int) -> None:
        assert self._logprobs is not None
        choice = self._choices[index]
        self._logprobs[index].add(choice.request.prompt[0], None)
        for entry in choice.prompt_logprobs:
            self._logprobs[index].add(entry.token, entry)


def _cut(entries: Sequence[TokenLogprob], top: int | None) -> Sequence[TokenLogprob]:
    """Keep the `top` likeliest alternatives of each entry: a request computes as many as any part of it needs."""
    return entries if top is None else [TokenLogprob(one.token, one.logprob, one.top[:top]) for one in entries]


def timings_of(pace: AnswerTimes, choices: Sequence[ChoiceStream]) -> dict[str, Any]:
    """Return the `timings` field of an answer in one piece, if it was asked for: those of the first choice."""
    done = choices[0].done
    return {"timings": pace.whole(0, done)} if pace.timings and done is not None else {}


def _progress_chunks(pace: AnswerTimes, index: int, delta: Delta, nothing: Callable[[int], bytes]) -> bytes:
    """Return the chunks that report prompt progress before a delta."""
    reports = pace.heard(index, delta)
    return b"".join([with_fields(nothing(index), told) for told in reports]) if reports else b""


def _timed(pace: AnswerTimes, index: int, chunks: bytes) -> bytes:
    return with_fields(chunks, {"timings": pace.so_far(index)}) if pace.timings and chunks else chunks


def _ended(pace: AnswerTimes, index: int, done: Done, chunk: bytes) -> bytes:
    return with_fields(chunk, {"timings": pace.whole(index, done)}) if pace.timings else chunk


def usage_of(choices: Sequence[ChoiceStream]) -> dict[str, Any]:
    """Return the usage object of a call that has ended."""
    ends: list[tuple[Done, bool]] = []
    for choice in choices:
        assert choice.done is not None
        ends.append((choice.done, choice.request.choice == 0))
    return usage_object(ends, sum(choice.reasoning_tokens for choice in choices))


def head(call: HTTPCall, service: Service, prefix: str, kind: str) -> dict[str, Any]:
    """Return the fields that begin every object and chunk of an answer.

    The fingerprint changes with everything that could change a number: weights, tokenizer, kernels, a KV codec.
    """
    identity = service.info.identity
    return {
        "id": prefix + call.id,
        "object": kind,
        "created": int(time.time()),
        "model": service.name,
        "system_fingerprint": "fp_" + identity[:6].hex() if identity else None,
    }
