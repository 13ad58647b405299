"""POST /v1/chat/completions and /v1/completions, as the OpenAI API has them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from cairn.api.answers import Answer, ChatAnswer, Choice, TextAnswer, finished, said, starting, tied, usage_of
from cairn.api.checks import check_chat, check_stream
from cairn.api.limits import read_json
from cairn.api.parse import parse
from cairn.api.registry import Registry
from cairn.api.reply import JSON, Call, Watch, encode, internal, shown
from cairn.api.resumable import Tapes, is_resumable
from cairn.api.schemas import ChatBody, CompletionBody, contents, plain_messages, plain_tools
from cairn.api.sse import DONE, EVENT_STREAM, HEARTBEAT, error_event
from cairn.api.ties import Ties
from cairn.config import Config
from cairn.errors import CairnError, InvalidRequest, UnknownModel
from cairn.service.admission import check_together
from cairn.service.recent import Told, told_of
from cairn.service.requests import SamplingOptions, requests
from cairn.service.service import Service
from cairn.service.stream import merge
from cairn.text import length
from cairn.text.tokenizer import INLINE
from cairn.types import Done, OutputFormat

COMPLETION_TOKENS = 16
"""max_tokens of a text completion that gives none, as in the OpenAI API."""


class OpenAI:
    """The two generating routes."""

    def __init__(self, config: Config, registry: Registry, tapes: Tapes, ties: Ties) -> None:
        self._config = config
        self._ties = ties
        self._registry = registry
        self._tapes = tapes

    async def chat(self, call: Call, service: Service) -> None:
        """POST /v1/chat/completions."""
        body = parse(ChatBody, await read_json(call, self._config), self._config)
        check_chat(body, self._config)
        check_model(body.model, service)
        tie = self._ties.tie(call, body)
        tools = plain_tools(body.tools) if body.tool_choice != "none" else None
        await check_length(service, contents(body.messages, tools), "messages")
        messages = plain_messages(body.messages)
        prompt = await service.chat.prompt(messages, tools, tenant=call.tenant, template_args=body.chat_template_kwargs)
        names = names_of(body.max_tokens)
        with spelled(names):
            made = requests(
                service.spec,
                prompt.tokens,
                body.chat_options(),
                ids=ids(call, service),
                context=service.info.context,
                max_choices=self._config.max_choices,
                output=prompt.output,
                salt=call.salt,
                timeout=self._config.request_timeout,
                durable=any(message.role == "assistant" for message in body.messages),
                stored=body.store is not False,
            )
        check_together(made, self._config, service.info.max_rows)
        choices = [Choice(request) for request in made]
        answer = ChatAnswer(call, service, choices, body.include_usage, tie)
        answer.told, answer.names = told_of(messages, store=body.store is not False), names
        await self._run(call, service, choices, answer, bool(body.stream), body.include_usage)

    async def complete(self, call: Call, service: Service) -> None:
        """POST /v1/completions."""
        body = parse(CompletionBody, await read_json(call, self._config), self._config)
        check_stream(body)
        check_model(body.model, service)
        tie = self._ties.tie(call, body)
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
        prompts = self._prompts(body)
        inline = sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) <= INLINE
        special = body.parse_special is not False
        check_suffix(body, service)
        for prompt in prompts:
            tokens = await encode_text(service, prompt, body.suffix or "", inline=inline, special=special)
            with spelled({"top_logprobs": "logprobs"}):
                made = requests(
                    service.spec,
                    tokens,
                    options if body.max_tokens is not None else _fit(options, len(tokens), service.info.context),
                    ids=draw,
                    context=service.info.context,
                    max_choices=self._config.max_choices,
                    salt=call.salt,
                    timeout=self._config.request_timeout,
                    output=OutputFormat(continues=True),
                    allow_empty=echo,
                    stored=body.store is not False,
                )
            choices += [Choice(request) for request in made]
            if echo:
                text = prompt if isinstance(prompt, str) else service.tokenizer.decode(tokens)
                echoes += [text] * len(made)
        check_together([choice.request for choice in choices], self._config, service.info.max_rows)
        top = body.logprobs
        answer = TextAnswer(call, service, choices, body.include_usage, echoes if echo else None, top, tie)
        answer.told = Told(store=body.store is not False)
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
        numbers = [choice.request.id for choice in choices]
        if is_resumable(call, stream):
            events = self._events(call.number, service, choices, answer, usage)
            follower = self._tapes.start(
                call, events, lambda: [service.abort(id) for id in numbers], self._config.heartbeat
            )
            await follower.run(call)
            return
        self._registry.open(call.number, numbers)
        try:
            with spelled(answer.names), tied(choices, answer):
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
        asked = [choice.request for choice in choices]
        async with contextlib.aclosing(merge(starting(service, choices, answer), asked)) as found:
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
            asked = [choice.request for choice in choices]
            events = merge(starting(service, choices, answer), asked, heartbeat=self._config.heartbeat)
            async with contextlib.aclosing(events) as found:
                async for batch in found:
                    data = b"" if call.started else await self._begin(call, answer)
                    data += said(batch, choices, answer) if batch else HEARTBEAT
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
            known = error if isinstance(error, CairnError) else internal(call.id)
            await call.write(error_event(known), more=False)
            if known is not error:
                raise

    async def _events(
        self, number: int, service: Service, choices: Sequence[Choice], answer: Answer, usage: bool
    ) -> AsyncGenerator[bytes, None]:
        """The chunks of a stream, whoever reads them."""
        asked = [choice.request for choice in choices]
        self._registry.open(number, [request.id for request in asked])
        try:
            with spelled(answer.names), tied(choices, answer):
                async with contextlib.aclosing(merge(starting(service, choices, answer), asked)) as found:
                    data = answer.begin()
                    async for batch in found:
                        data += said(batch, choices, answer)
                        if data:
                            yield data
                        data = b""
            yield answer.usage(usage_of(choices)) + DONE if usage else DONE
        finally:
            self._registry.close(number)

    async def _begin(self, call: Call, answer: Answer) -> bytes:
        data = answer.begin()
        await call.start(200, EVENT_STREAM)
        return data


def ids(call: Call, service: Service) -> Any:
    """Draws request ids; the first is the call's own."""
    return itertools.chain((call.number,), iter(service.next_id, -1)).__next__


def names_of(max_tokens: int | None) -> dict[str, str]:
    """What a chat calls the fields of a request: a prompt is its messages."""
    return {"prompt": "messages"} | ({"max_tokens": "max_completion_tokens"} if max_tokens is None else {})


@contextlib.contextmanager
def spelled(names: Mapping[str, str]) -> Iterator[None]:
    """A refusal names the field that the client has sent: `names` are ours and the route's."""
    try:
        yield
    except InvalidRequest as error:
        name = names.get(error.field or "")
        if name is None:
            raise
        text = str(error) if error.field == "prompt" else str(error).replace(str(error.field), name)
        raise type(error)(text, field=name) from None


def check_model(name: str, service: Service) -> None:
    """UnknownModel unless this is the model served here."""
    if name != service.name:
        raise UnknownModel(f"there is no model {shown(name)!r}; this server has: {service.name}", field="model")


async def encode_text(
    service: Service, prompt: str | list[int], suffix: str = "", *, inline: bool = True, special: bool = True
) -> list[int]:
    """The token ids of a raw prompt, with a `suffix` of what stands between the two.

    A long text, or one of many (not `inline`), does not hold up the event loop. `special`: control tokens written in
    the texts are control tokens.
    """
    texts = [text for text in (prompt, suffix) if isinstance(text, str)]
    encode = partial(service.tokenizer.encode_raw, prompt, suffix, special=special)
    if inline and sum(map(len, texts)) <= INLINE:
        return encode()
    await check_length(service, texts, "prompt", special=special)
    return await asyncio.to_thread(encode)


def check_suffix(body: CompletionBody, service: Service) -> None:
    """InvalidRequest for a suffix that this model cannot fill in before, or that cannot be echoed."""
    if not body.suffix:
        return
    if service.tokenizer.middle is None:
        raise InvalidRequest("suffix: this model has no tokens for filling in the middle", field="suffix")
    if body.echo:
        raise InvalidRequest("suffix and echo do not go together: the prompt is not before the answer", field="suffix")


async def check_length(service: Service, texts: Sequence[str], field: str, *, special: bool = False) -> None:
    """Refuse texts that are far too long for the context before anything is done with them."""
    encode = partial(service.tokenizer.encode, special=special)
    await length.check_length(encode, texts, service.info.context, field)


def _fit(options: SamplingOptions, prompt: int, context: int) -> SamplingOptions:
    """The default of max_tokens, cut to what is left of the context; without any room the length check says so."""
    room = context - prompt
    return msgspec.structs.replace(options, max_tokens=min(COMPLETION_TOKENS, room)) if room > 0 else options
