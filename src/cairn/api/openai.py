"""POST /v1/chat/completions and /v1/completions, as the OpenAI API has them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast

import msgspec

from cairn.api.limits import parse_json
from cairn.api.registry import Registry
from cairn.api.reply import JSON, Call, Watch, encode, internal
from cairn.api.schemas import (
    ChatBody,
    CompletionBody,
    check_chat,
    check_stream,
    parse,
    plain_messages,
    plain_tools,
)
from cairn.api.sse import (
    DONE,
    EVENT_STREAM,
    HEARTBEAT,
    ChatChunks,
    TextChunks,
    TextLogprobs,
    chat_logprobs,
    error_event,
    usage_object,
)
from cairn.config import Config
from cairn.errors import (
    CairnError,
    Cancelled,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    UnknownModel,
    UnsupportedMedia,
)
from cairn.service.requests import SamplingOptions, requests
from cairn.service.service import Service
from cairn.service.stream import Waker
from cairn.types import Delta, Done, Event, FinishReason, Request, TokenLogprob, Usage

LONG_TEXT = 16_384
"""Characters from which a text is encoded off the event loop."""
COMPLETION_TOKENS = 16
"""max_tokens of a text completion that gives none, as in the OpenAI API."""


class Choice:
    """What one choice has said so far."""

    __slots__ = ("calls", "done", "logprobs", "prompt_logprobs", "reasoning", "request", "text", "tokens")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, dict[str, Any]] = {}
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.done: Done | None = None

    def add(self, delta: Delta) -> None:
        """Take a piece."""
        if delta.text:
            self.text.append(delta.text)
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        for piece in delta.tool_calls:
            call = self.calls.setdefault(
                piece.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["id"] = call["id"] or piece.id
            call["function"]["name"] = call["function"]["name"] or piece.name
            call["function"]["arguments"] += piece.arguments

    def message(self) -> dict[str, Any]:
        """The assistant message; content is None where the model only called tools."""
        text = "".join(self.text)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if self.calls else "")}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [self.calls[index] for index in sorted(self.calls)]
        return message


class ChatAnswer:
    """How chat completions look."""

    prefix = "chatcmpl-"

    def __init__(self, call: Call, service: Service, choices: Sequence[Choice], include_usage: bool) -> None:
        self._service = service
        self._tenant = call.tenant
        self._choices = choices
        self._head = head(call, service, self.prefix)
        self._chunks: ChatChunks | None = None
        self._include_usage = include_usage

    def begin(self) -> bytes:
        """The first bytes of a stream: every choice names its role."""
        self._chunks = ChatChunks(self._head, len(self._choices), self._include_usage, self._service.tokenizer)
        return b"".join(self._chunks.first(index) for index in range(len(self._choices)))

    def delta(self, index: int, delta: Delta) -> bytes:
        """A piece of a stream."""
        assert self._chunks is not None
        return self._chunks.delta(index, delta)

    def finish(self, index: int, reason: str) -> bytes:
        """The end of a choice in a stream."""
        assert self._chunks is not None
        return self._chunks.finish(index, reason)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The usage chunk of a stream."""
        assert self._chunks is not None
        return self._chunks.usage(usage)

    def done(self, index: int) -> None:
        """Keep the exact tokens of an answer, for when it comes back as history."""
        choice = self._choices[index]
        self._service.chat.remember(self._tenant, choice.request.prompt, choice.tokens, choice.message())

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece."""
        found = []
        for index, choice in enumerate(self._choices):
            logprobs = None
            if choice.request.sampling.logprobs:
                logprobs = chat_logprobs(choice.logprobs, self._service.tokenizer)
            message = choice.message() | {"refusal": None}
            found.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason(choice)})
        return self._head | {"object": "chat.completion", "choices": found, "usage": usage}


class TextAnswer:
    """How text completions look. `echoes` holds the prompt's text of each choice, or None without echo."""

    prefix = "cmpl-"

    def __init__(
        self,
        call: Call,
        service: Service,
        choices: Sequence[Choice],
        include_usage: bool,
        echoes: Sequence[str] | None,
        top: int | None,
    ) -> None:
        self._choices = choices
        self._echoes = echoes
        self._head = head(call, service, self.prefix)
        self._chunks: TextChunks | None = None
        self._include_usage = include_usage
        self._logprobs = None if top is None else [TextLogprobs(service.tokenizer, top) for _ in choices]
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

    def finish(self, index: int, reason: str) -> bytes:
        """The end of a choice in a stream."""
        assert self._chunks is not None
        return self._echo(index) + self._chunks.finish(index, reason)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The usage chunk of a stream."""
        assert self._chunks is not None
        return self._chunks.usage(usage)

    def done(self, index: int) -> None:
        """Nothing is kept."""

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
            text = (self._echoes[index] if self._echoes is not None else "") + "".join(choice.text)
            found.append({"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason(choice)})
        return self._head | {"object": "text_completion", "choices": found, "usage": usage}

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


class OpenAI:
    """The two generating routes."""

    def __init__(self, config: Config, registry: Registry) -> None:
        self._config = config
        self._registry = registry

    async def chat(self, call: Call, service: Service) -> None:
        """POST /v1/chat/completions."""
        body = parse(ChatBody, await read_json(call, self._config))
        check_chat(body, self._config)
        check_model(body.model, service)
        tools = plain_tools(body.tools) if body.tool_choice != "none" else None
        prompt = await service.chat.prompt(
            plain_messages(body.messages), tools, tenant=call.tenant, template_args=body.chat_template_kwargs
        )
        max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        options = body.options(max_tokens=max_tokens, logprobs=bool(body.logprobs), top_logprobs=body.top_logprobs)
        made = requests(
            service.spec,
            prompt.tokens,
            options,
            ids=ids(call, service),
            context=service.info.context,
            max_choices=self._config.max_choices,
            output=prompt.output,
            salt=call.salt,
            timeout=self._config.request_timeout,
        )
        choices = [Choice(request) for request in made]
        answer = ChatAnswer(call, service, choices, body.include_usage)
        await self._run(call, service, choices, answer, bool(body.stream), body.include_usage)

    async def complete(self, call: Call, service: Service) -> None:
        """POST /v1/completions."""
        body = parse(CompletionBody, await read_json(call, self._config))
        check_stream(body)
        check_model(body.model, service)
        echo = bool(body.echo)
        options = body.options(
            max_tokens=body.max_tokens,
            logprobs=body.logprobs is not None,
            top_logprobs=body.logprobs,
            prompt_logprobs=echo and body.logprobs is not None,
        )
        draw = ids(call, service)
        choices: list[Choice] = []
        echoes: list[str] = []
        for prompt in self._prompts(body):
            tokens = await encode_text(service.tokenizer, prompt) if isinstance(prompt, str) else prompt
            made = requests(
                service.spec,
                tokens,
                options if body.max_tokens is not None else _fit(options, len(tokens), service.info.context),
                ids=draw,
                context=service.info.context,
                max_choices=self._config.max_choices,
                salt=call.salt,
                timeout=self._config.request_timeout,
                allow_empty=echo,
            )
            choices += [Choice(request) for request in made]
            if echo:
                text = prompt if isinstance(prompt, str) else service.tokenizer.decode(tokens)
                echoes += [text] * len(made)
        top = body.logprobs
        answer = TextAnswer(call, service, choices, body.include_usage, echoes if echo else None, top)
        await self._run(call, service, choices, answer, bool(body.stream), body.include_usage)

    def _prompts(self, body: CompletionBody) -> list[str | list[int]]:
        given = body.prompt
        if isinstance(given, str) or isinstance(given[0], int):
            return [given]
        prompts = cast("list[str | list[int]]", given)
        if len(prompts) > self._config.max_prompts:
            raise InvalidRequest(
                f"prompt holds {len(prompts)} prompts; the limit is {self._config.max_prompts}", field="prompt"
            )
        return prompts

    async def _run(
        self, call: Call, service: Service, choices: Sequence[Choice], answer: Answer, stream: bool, usage: bool
    ) -> None:
        self._registry.open(call.number, [choice.request.id for choice in choices])
        try:
            async with Watch(call) as watch:
                if stream:
                    await self._stream(call, service, choices, answer, usage, watch)
                else:
                    await self._whole(call, service, choices, answer, watch)
        finally:
            self._registry.close(call.number)

    async def _whole(
        self, call: Call, service: Service, choices: Sequence[Choice], answer: Answer, watch: Watch
    ) -> None:
        async with contextlib.aclosing(batches(service, choices)) as found:
            async for batch in found:
                for index, event in batch:
                    if isinstance(event, Done):
                        finished(choices[index], event)
                        answer.done(index)
                    else:
                        choices[index].add(event)
        body = encode(answer.whole(usage_of(choices)))
        watch.stop()
        await call.respond(200, body, [JSON])

    async def _stream(
        self, call: Call, service: Service, choices: Sequence[Choice], answer: Answer, usage: bool, watch: Watch
    ) -> None:
        try:
            async with contextlib.aclosing(batches(service, choices, self._config.heartbeat)) as found:
                async for batch in found:
                    data = b"" if call.started else await self._begin(call, answer)
                    if not batch:
                        data += HEARTBEAT
                    for index, event in batch:
                        choice = choices[index]
                        if isinstance(event, Done):
                            data += answer.finish(index, finished(choice, event))
                            answer.done(index)
                        else:
                            choice.add(event)
                            data += answer.delta(index, event)
                    if all(choice.done for choice in choices):
                        data += answer.usage(usage_of(choices)) + DONE if usage else DONE
                        watch.stop()
                        await call.write(data, more=False)
                        return
                    if data:
                        await call.write(data)
        except Exception as error:
            if not call.started:
                raise
            watch.stop()
            known = error if isinstance(error, CairnError) else internal(call)
            await call.write(error_event(known), more=False)
            if known is not error:
                raise

    async def _begin(self, call: Call, answer: Answer) -> bytes:
        data = answer.begin()
        await call.start(200, EVENT_STREAM)
        return data


async def batches(
    service: Service, choices: Sequence[Choice], heartbeat: float | None = None
) -> AsyncGenerator[list[tuple[int, Event]], None]:
    """All events that are there, each time there are any; an empty list when none came for `heartbeat` seconds.

    A consumer that lags gets what it missed at once. However it ends, every request is closed.
    """
    waker = Waker()
    streams = []
    try:
        for choice in choices:
            stream = service.generate(choice.request)
            streams.append(stream)
            stream.wake_with(waker)
        alive = list(enumerate(streams))
        while alive:
            found = [(index, event) for index, stream in alive for event in stream.take()]
            alive = [pair for pair in alive if not pair[1].over]
            if found:
                yield found
            elif alive and not await waker.sleep(heartbeat):
                yield []
    finally:
        for stream in streams:
            stream.close()


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


def usage_of(choices: Sequence[Choice]) -> dict[str, Any]:
    """The usage object of a call that has ended."""
    pairs: list[tuple[Usage, bool]] = []
    for choice in choices:
        assert choice.done is not None
        pairs.append((choice.done.usage, choice.request.choice == 0))
    return usage_object(pairs)


def head(call: Call, service: Service, prefix: str) -> dict[str, Any]:
    """What every object and chunk of an answer begins with. The fingerprint changes with the weights or tokenizer."""
    identity = service.spec.identity
    return {
        "id": prefix + call.id,
        "created": int(time.time()),
        "model": service.name,
        "system_fingerprint": "fp_" + identity[:6].hex() if identity else None,
    }


def ids(call: Call, service: Service) -> Any:
    """Draws request ids; the first is the call's own."""
    return itertools.chain((call.number,), iter(service.next_id, -1)).__next__


def check_model(name: str, service: Service) -> None:
    """UnknownModel unless this is the model served here."""
    if name != service.name:
        shown = "".join(char if char.isprintable() else "?" for char in name[:100])
        raise UnknownModel(f"there is no model {shown!r}; this server has: {service.name}", field="model")


async def read_json(call: Call, config: Config) -> dict[str, Any]:
    """The body of a request that must be a JSON object."""
    kind = (call.header(b"content-type") or b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise UnsupportedMedia("the content-type must be application/json", field="Content-Type")
    return parse_json(await call.body(config.max_body_mib << 20), max_depth=config.max_json_depth)


async def encode_text(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a raw prompt; a long text does not hold up the event loop."""
    if len(text) < LONG_TEXT:
        found: list[int] = tokenizer.encode_prompt(text)
        return found
    return await asyncio.to_thread(tokenizer.encode_prompt, text)


def _fit(options: SamplingOptions, prompt: int, context: int) -> SamplingOptions:
    """The default of max_tokens, cut to what is left of the context."""
    room = context - prompt
    return msgspec.structs.replace(options, max_tokens=max(1, min(COMPLETION_TOKENS, room)))
