"""What a call says, whole or in chunks: one object for each of the two generating routes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cairn.api.reply import Call
from cairn.api.sse import ChatChunks, TextChunks, TextLogprobs, chat_logprobs, usage_object
from cairn.api.ties import Tie
from cairn.errors import Cancelled, DeadlineExceeded, GenerationFailed, Overloaded
from cairn.service.recent import Told
from cairn.service.service import Service
from cairn.service.stream import Stream
from cairn.text.said import Said
from cairn.types import Delta, Done, Event, FinishReason, Request, TokenLogprob


class Choice:
    """What one choice has said so far."""

    __slots__ = ("done", "logprobs", "prompt_logprobs", "request", "said", "stream", "tokens")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.said = Said()
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.done: Done | None = None
        self.stream: Stream | None = None
        """Where it comes from, once it was started with `starting`."""

    @property
    def computed(self) -> Sequence[int]:
        """Its tokens, and those that a client which reads slowly has kept from being taken."""
        return self.tokens if self.stream is None else self.stream.tokens

    def add(self, delta: Delta) -> None:
        """Take a piece of an answer that is sent whole."""
        self.logprobs += delta.logprobs
        self.pass_on(delta)

    def pass_on(self, delta: Delta) -> None:
        """Take a piece that a stream sends at once: its log-probabilities are not kept, they are large."""
        self.said.add(delta)
        self.tokens += delta.tokens
        self.prompt_logprobs += delta.prompt_logprobs


class ChatAnswer:
    """How chat completions look."""

    prefix = "chatcmpl-"
    kind = "chat.completion"
    told: Told = Told()
    """What its requests are told of the messages."""
    names: Mapping[str, str] = {}
    """What the route calls the fields of a request, where it has other names."""

    def __init__(
        self, call: Call, service: Service, choices: Sequence[Choice], include_usage: bool, tie: Tie | None = None
    ) -> None:
        self._service = service
        self.tie = tie
        self._tenant = call.tenant
        self._choices = choices
        self._head = head(call, service, self.prefix, self.kind)
        self._chunks: ChatChunks | None = None
        self._include_usage = include_usage
        self._warnings = call.warnings

    def begin(self) -> bytes:
        """The first bytes of a stream: every choice names its role."""
        self._chunks = ChatChunks(self._head, len(self._choices), self._include_usage, self._service.tokenizer)
        return b"".join(self._chunks.first(index) for index in range(len(self._choices)))

    def delta(self, index: int, delta: Delta) -> bytes:
        """A piece of a stream."""
        assert self._chunks is not None
        return self._chunks.delta(index, delta)

    def finish(self, index: int, done: Done, reason: str) -> bytes:
        """The end of a choice in a stream."""
        assert self._chunks is not None
        return self._chunks.finish(index, done, reason, self._warnings)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The usage chunk of a stream."""
        assert self._chunks is not None
        return self._chunks.usage(usage)

    def done(self, index: int) -> None:
        """Keep the exact tokens of an answer, for when it comes back as history."""
        choice = self._choices[index]
        sampled = self._service.chat.remember(self._tenant, choice.request.prompt, choice.tokens, choice.said.message())
        if self.tie is not None and choice.done is not None:
            self.tie.done(choice.request, choice.tokens, choice.done, sampled)

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece."""
        found = []
        for index, choice in enumerate(self._choices):
            logprobs = None
            if choice.request.sampling.logprobs:
                logprobs = chat_logprobs(choice.logprobs, self._service.tokenizer)
            message = choice.said.message() | {"refusal": None}
            found.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason(choice)})
        return self._head | {"choices": found, "usage": usage}


class TextAnswer:
    """How text completions look. `echoes` holds the prompt's text of each choice, or None without echo."""

    prefix = "cmpl-"
    kind = "text_completion"
    told: Told = Told()
    names: Mapping[str, str] = {}

    def __init__(
        self,
        call: Call,
        service: Service,
        choices: Sequence[Choice],
        include_usage: bool,
        echoes: Sequence[str] | None,
        top: int | None,
        tie: Tie | None = None,
    ) -> None:
        self._choices = choices
        self.tie = tie
        self._echoes = echoes
        self._head = head(call, service, self.prefix, self.kind)
        self._chunks: TextChunks | None = None
        self._include_usage = include_usage
        self._warnings = call.warnings
        self._logprobs = None if top is None else [self._scores(choice, service, top) for choice in choices]
        self._echoed = [echoes is None] * len(choices)

    def begin(self) -> bytes:
        """Text completions have no opening chunk."""
        self._chunks = TextChunks(self._head, len(self._choices), self._include_usage)
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """A piece of a stream, after the echoed prompt."""
        assert self._chunks is not None
        if not (delta.tokens or delta.text or delta.logprobs):
            return b""
        before = self._echo(index)
        if self._logprobs is None:
            return before + (self._chunks.text(index, delta.text) if delta.text else b"")
        for entry in delta.logprobs:
            self._logprobs[index].add(entry.token, entry)
        return before + self._chunks.text(index, delta.text, self._logprobs[index].take())

    def finish(self, index: int, done: Done, reason: str) -> bytes:
        """The end of a choice in a stream."""
        assert self._chunks is not None
        return self._echo(index) + self._chunks.finish(index, done, reason, self._warnings)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The usage chunk of a stream."""
        assert self._chunks is not None
        return self._chunks.usage(usage)

    def done(self, index: int) -> None:
        """Only what it cost is kept."""
        choice = self._choices[index]
        if self.tie is not None and choice.done is not None:
            self.tie.done(choice.request, choice.tokens, choice.done, None)

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece."""
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
            found.append({"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason(choice)})
        return self._head | {"choices": found, "usage": usage}

    def _scores(self, choice: Choice, service: Service, top: int) -> TextLogprobs:
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


Answer = ChatAnswer | TextAnswer


@contextlib.contextmanager
def tied(choices: Sequence[Choice], answer: Answer) -> Iterator[None]:
    """While choices are generated: the agent in whose name they were asked for is in use, and however one ends that was
    begun, its KV belongs to that agent."""
    computed = True
    try:
        with answer.tie.using() if answer.tie is not None else contextlib.nullcontext():
            yield
    except Overloaded:
        computed = False
        raise
    finally:
        for choice in choices:
            if answer.tie is not None and choice.stream is not None and choice.done is None and computed:
                answer.tie.cut(choice.request, choice.computed)


def starting(service: Service, choices: Sequence[Choice], answer: Answer) -> Callable[[Request], Stream]:
    """What starts the choices' requests; each choice has its stream then."""
    of = {choice.request.id: choice for choice in choices}

    def start(request: Request) -> Stream:
        of[request.id].stream = stream = service.generate(request, answer.told)
        return stream

    return start


def said(batch: Sequence[tuple[int, Event]], choices: Sequence[Choice], answer: Answer) -> bytes:
    """The chunks of what came together; ends are noted."""
    data = b""
    for index, event in batch:
        choice = choices[index]
        if isinstance(event, Done):
            data += answer.finish(index, event, finished(choice, event))
            answer.done(index)
        else:
            choice.pass_on(event)
            data += answer.delta(index, event)
    return data


def finished(choice: Choice, done: Done) -> str:
    """Note the end of a choice; its finish_reason. An end that is no success raises instead of looking like one."""
    match done.reason:
        case FinishReason.CANCELLED:
            raise Cancelled("the request was cancelled")
        case FinishReason.DEADLINE:
            raise DeadlineExceeded("the request reached its time limit")
        case FinishReason.ERROR:
            raise GenerationFailed("the generation failed")
    choice.done = done
    return done.reason.value


def reason(choice: Choice) -> str:
    """The finish_reason of a choice that has ended."""
    assert choice.done is not None
    return choice.done.reason.value


def tokens_of(choices: Sequence[Choice]) -> tuple[int, int]:
    """Tokens of the prompts, each counted once, and of all answers, however they ended."""
    prompts = sum(len(choice.request.prompt) for choice in choices if choice.request.choice == 0)
    return prompts, sum(len(choice.computed) for choice in choices)


def usage_of(choices: Sequence[Choice]) -> dict[str, Any]:
    """The usage object of a call that has ended."""
    ends: list[tuple[Done, bool]] = []
    for choice in choices:
        assert choice.done is not None
        ends.append((choice.done, choice.request.choice == 0))
    return usage_object(ends)


def head(call: Call, service: Service, prefix: str, kind: str) -> dict[str, Any]:
    """What every object and chunk of an answer begins with. The fingerprint changes with all that could change a
    number: weights, tokenizer, kernels, a KV codec."""
    identity = service.info.identity
    return {
        "id": prefix + call.id,
        "object": kind,
        "created": int(time.time()),
        "model": service.name,
        "system_fingerprint": "fp_" + identity[:6].hex() if identity else None,
    }
