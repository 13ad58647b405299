"""POST /v1/chat/completions and /v1/completions, as the OpenAI API has them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from cairn.api.answers import (
    Answer,
    ChatAnswer,
    Choice,
    TextAnswer,
    finished,
    said,
    starting,
    tied,
    tokens_of,
    usage_of,
)
from cairn.api.checks import check_chat, check_strict, choice_of
from cairn.api.limits import read_json
from cairn.api.parse import parse
from cairn.api.registry import Registry
from cairn.api.reply import Call, Watch, internal, shown
from cairn.api.resumable import Tapes, is_resumable
from cairn.api.schemas import ChatBody, CompletionBody, contents, plain_messages, plain_tools
from cairn.api.sse import DONE, EVENT_STREAM, HEARTBEAT, error_event
from cairn.api.ties import Ties
from cairn.config import Config
from cairn.errors import CairnError, InvalidRequest, UnknownModel
from cairn.service.admission import check_together
from cairn.service.recent import Told, told_of
from cairn.service.requests import requests
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
        body = parse(ChatBody, await read_json(call, self._config), self._config, call)
        check_chat(body, self._config)
        check_strict(body.tools, call)
        check_model(body.model, service)
        service.check_generates()
        tools = plain_tools(body.tools) if choice_of(body) != "none" else None
        await check_length(call, service, contents(body.messages, tools), "messages")
        messages = plain_messages(body.messages)
        prompt = await service.chat.prompt(
            messages,
            tools,
            tenant=call.tenant,
            share=call.share,
            template_args=body.template_args(service.chat.knows),
        )
        names, store = names_of(body.max_tokens), is_stored(body.store, self._config)
        with spelled(names):
            made = requests(
                service.spec,
                prompt.tokens,
                body.chat_options(),
                ids=ids(call, service),
                context=service.info.context,
                controls=service.controls,
                sampler_order=self._config.sampler_order,
                max_choices=self._config.max_choices,
                output=prompt.output,
                salt=call.salt,
                share=call.share,
                timeout=self._config.request_timeout,
                durable=any(message.role == "assistant" for message in body.messages),
                stored=store,
            )
        check_together(made, self._config, service.info.max_rows)
        choices = [Choice(request) for request in made]
        tie = await self._ties.tie(call, body, store=store)
        answer = ChatAnswer(call, service, choices, body.include_usage, tie)
        answer.told, answer.names = told_of(messages, store=store), names
        await self._run(call, service, choices, answer, bool(body.stream), body.include_usage)

    async def complete(self, call: Call, service: Service) -> None:
        """POST /v1/completions."""
        body = parse(CompletionBody, await read_json(call, self._config), self._config, call)
        check_model(body.model, service)
        service.check_generates()
        echo, store = bool(body.echo), is_stored(body.store, self._config)
        options = body.options(
            max_tokens=COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
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
            tokens = await encode_text(call, service, prompt, body.suffix or "", inline=inline, special=special)
            with spelled({"top_logprobs": "logprobs"}):
                made = requests(
                    service.spec,
                    tokens,
                    options,
                    ids=draw,
                    context=service.info.context,
                    controls=service.controls,
                    sampler_order=self._config.sampler_order,
                    max_choices=self._config.max_choices,
                    salt=call.salt,
                    share=call.share,
                    timeout=self._config.request_timeout,
                    output=OutputFormat(continues=True),
                    allow_empty=echo,
                    stored=store,
                )
            choices += [Choice(request) for request in made]
            if echo:
                text = prompt if isinstance(prompt, str) else service.tokenizer.decode(tokens)
                echoes += [text] * len(made)
        check_together([choice.request for choice in choices], self._config, service.info.max_rows)
        top = body.logprobs
        tie = await self._ties.tie(call, body, store=store)
        answer = TextAnswer(call, service, choices, body.include_usage, echoes if echo else None, top, tie)
        answer.told = Told(store=store)
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
            events = self._events(call, service, choices, answer, usage)
            follower = self._tapes.start(
                call, events, lambda: [service.abort(id) for id in numbers], self._config.heartbeat
            )
            await follower.run(call)
            call.tokens = tokens_of(choices)
            return
        self._registry.open(call.number, numbers, name=call.name, salt=call.salt)
        try:
            with spelled(answer.names), tied(choices, answer):
                async with Watch(call) as watch:
                    if stream:
                        await self._stream(call, service, choices, answer, usage, watch)
                    else:
                        await self._whole(call, service, choices, answer, watch)
                if watch.left:
                    call.ended = "client_left"
        finally:
            self._registry.close(call.number)
            call.tokens = tokens_of(choices)

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
        whole = answer.whole(usage_of(choices))
        watch.stop()
        await call.json(whole)

    async def _stream(
        self, call: Call, service: Service, choices: Sequence[Choice], answer: Answer, usage: bool, watch: Watch
    ) -> None:
        try:
            asked = [choice.request for choice in choices]
            start = starting(service, choices, answer)
            data = answer.begin()
            events = merge(start, asked, heartbeat=self._config.heartbeat, announce=True)
            async with contextlib.aclosing(events) as found:
                async for batch in found:
                    if not call.started:
                        await call.begin(EVENT_STREAM)
                        continue
                    data += said(batch, choices, answer) if batch else HEARTBEAT
                    if all(choice.done for choice in choices):
                        data += answer.usage(usage_of(choices)) + DONE if usage else DONE
                        watch.stop()
                        await call.write(data, more=False)
                        return
                    if data:
                        await call.write(data)
                    data = b""
        except Exception as error:
            if not call.started:
                raise
            watch.stop()
            known = error if isinstance(error, CairnError) else internal(call.id)
            call.ended = known.code
            await call.write(error_event(known), more=False)
            if known is not error:
                raise

    async def _events(
        self, call: Call, service: Service, choices: Sequence[Choice], answer: Answer, usage: bool
    ) -> AsyncGenerator[bytes, None]:
        """The chunks of a stream, whoever reads them; nothing at all first, once the requests are let in."""
        asked = [choice.request for choice in choices]
        number, name, salt = call.number, call.name, call.salt
        del call  # its connection may be gone long before
        self._registry.open(number, [request.id for request in asked], name=name, salt=salt)
        try:
            with spelled(answer.names), tied(choices, answer):
                events = merge(starting(service, choices, answer), asked, announce=True)
                async with contextlib.aclosing(events) as found:
                    await anext(found)
                    yield b""
                    data = answer.begin()
                    async for batch in found:
                        data += said(batch, choices, answer)
                        if data:
                            yield data
                        data = b""
            yield answer.usage(usage_of(choices)) + DONE if usage else DONE
        finally:
            self._registry.close(number)


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
        raise error.named(text, name) from None


def is_stored(store: bool | None, config: Config) -> bool:
    """Whether something of a request may be kept on the disk, as it says itself and the server's owner."""
    return store is not False or config.store_kv == "always"


def check_model(name: str | None, service: Service, *, strict: bool = False) -> None:
    """UnknownModel where `strict`, or the server's owner, wants a name of the model that is served."""
    if name is not None and name not in service.names and (strict or service.strict):
        raise UnknownModel(f"there is no model {shown(name)!r}; this server has: {service.name}", field="model")


async def encode_text(
    call: Call,
    service: Service,
    prompt: str | list[int],
    suffix: str = "",
    *,
    inline: bool = True,
    special: bool = True,
) -> list[int]:
    """The token ids of a raw prompt, with a `suffix` of what stands between the two.

    A long text, or one of many (not `inline`), does not hold up the event loop. `special`: control tokens written in
    the texts are control tokens.
    """
    texts = [text for text in (prompt, suffix) if isinstance(text, str)]
    if service.spec.whole and isinstance(prompt, str):
        encode: Callable[[], list[int]] = partial(_whole, service, prompt, special)
    else:
        encode = partial(service.tokenizer.encode_raw, prompt, suffix, special=special)
    if inline and sum(map(len, texts)) <= INLINE:
        return encode()
    await check_length(call, service, texts, "prompt", special=special)
    return await service.chat.long.run(call.share, encode)


def _whole(service: Service, text: str, special: bool) -> list[int]:
    """The ids that an encoder reads of a text."""
    tokenizer = service.tokenizer
    return list(tokenizer.affixes.whole(tokenizer.encode(text, special=special)).tokens)


def check_suffix(body: CompletionBody, service: Service) -> None:
    """InvalidRequest for a suffix that this model cannot fill in before, or that cannot be echoed."""
    if not body.suffix:
        return
    if service.tokenizer.middle is None:
        raise InvalidRequest("suffix: this model has no tokens for filling in the middle", field="suffix")
    if body.echo:
        raise InvalidRequest("suffix and echo do not go together: the prompt is not before the answer", field="suffix")


async def check_length(
    call: Call, service: Service, texts: Sequence[str], field: str, *, special: bool = False
) -> None:
    """Refuse texts that are far too long for the context before anything is done with them."""
    encode = partial(service.tokenizer.encode, special=special)
    await length.check_length(encode, texts, service.info.context, field, service.chat.long, call.share)
