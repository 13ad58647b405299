"""POST /v1/chat/completions and /v1/completions, as the OpenAI API has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from cairn.api.chat.answers import ChatAnswer, TextAnswer
from cairn.api.chat.exchange import ChoiceStream
from cairn.api.chat.generation import answer_times, chat_exchange, chat_names, check_length, check_model, text_exchange
from cairn.api.chat.parse import parse, read
from cairn.api.chat.schemas import ChatBody, CompletionBody, with_prompt_logprobs
from cairn.api.chat.state import ServerState
from cairn.api.http.body import read_json
from cairn.api.http.call import HTTPCall
from cairn.api.http.routes import Route
from cairn.frontend.service import Service
from cairn.text.tokens.tokenizer import INLINE
from cairn.types.errors import InvalidRequest

COMPLETION_TOKENS = 16
"""Default max_tokens of a text completion, as in the OpenAI API."""


class OpenAI:
    """The two generating routes."""

    def __init__(self, state: ServerState) -> None:
        self._config = state.config
        self._attribution = state.attribution
        self._exchanges = state.exchanges

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("POST", "/v1/chat/completions", self.chat, ChatBody, model="chat"),
            Route("POST", "/v1/completions", self.complete, CompletionBody, model="chat"),
        ]

    async def chat(self, call: HTTPCall, service: Service) -> None:
        """Generate the next message of a chat, whole or as a stream."""
        body = await read(ChatBody, call, self._config)
        exchange = await chat_exchange(
            call,
            service,
            self._config,
            self._attribution,
            body,
            lambda choices: ChatAnswer(
                call,
                service,
                choices,
                body.include_usage,
                answer_times(body, choices),
                top=body.top_logprobs or 0,
                scored=body.prompt_logprobs,
                free=[tool.function.name for tool in body.tools or () if tool.type == "custom"],
                hides=body.reasoning is not None and bool(body.reasoning.exclude),
            ),
            chat_names(body.max_tokens),
        )
        await self._exchanges.run(call, exchange, stream=bool(body.stream))

    async def complete(self, call: HTTPCall, service: Service) -> None:
        """Generate what follows a text."""
        body = parse(CompletionBody, await read_json(call, self._config), self._config, call)
        check_model(body.model, service)
        service.check_generates()
        echo = bool(body.echo)
        options = body.options(
            max_tokens=COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
            logprobs=body.logprobs is not None,
            top_logprobs=body.logprobs,
            prompt_logprobs=echo and body.logprobs is not None,
        )
        options = with_prompt_logprobs(options, body.prompt_logprobs, stream=bool(body.stream))
        prompts = self._prompts(body)
        inline = sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) <= INLINE
        special = body.parse_special is not False
        check_suffix(body.suffix, service, echo=echo)
        tokens = [
            await encode_text(call, service, prompt, body.suffix or "", inline=inline, special=special)
            for prompt in prompts
        ]

        def echoed(choices: Sequence[ChoiceStream]) -> list[str]:
            texts = [
                one if isinstance(one, str) else service.tokenizer.decode(ids)
                for one, ids in zip(prompts, tokens, strict=True)
            ]
            each = len(choices) // len(prompts)
            return [text for text in texts for _ in range(each)]

        exchange = await text_exchange(
            call,
            service,
            self._config,
            self._attribution,
            body,
            tokens,
            options,
            lambda choices: TextAnswer(
                call,
                service,
                choices,
                body.include_usage,
                echoed(choices) if echo else None,
                body.logprobs,
                answer_times(body, choices),
                body.prompt_logprobs,
            ),
            {"top_logprobs": "logprobs"},
            allow_empty=echo or body.prompt_logprobs is not None,
        )
        await self._exchanges.run(call, exchange, stream=bool(body.stream))

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


async def encode_text(
    call: HTTPCall,
    service: Service,
    prompt: str | list[int],
    suffix: str = "",
    *,
    inline: bool = True,
    special: bool = True,
) -> list[int]:
    """Return the token ids of a raw prompt, or of a prompt and a `suffix` to fill in between.

    A long text, or one of many (not `inline`), is encoded off the event loop. `special`: control tokens written in the
    texts are control tokens.
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
    """Return the ids that an encoder reads of a text."""
    tokenizer = service.tokenizer
    return list(tokenizer.affixes.whole(tokenizer.encode(text, special=special)).tokens)


def check_suffix(suffix: str | None, service: Service, *, echo: bool = False) -> None:
    """Raise InvalidRequest for a suffix that this model cannot fill in before, or that cannot be echoed."""
    if not suffix:
        return
    if service.tokenizer.middle is None:
        raise InvalidRequest("suffix: this model has no tokens for filling in the middle", field="suffix")
    if echo:
        raise InvalidRequest("suffix and echo do not go together: the prompt is not before the answer", field="suffix")
