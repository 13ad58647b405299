"""Generation of nodes' answers by a model of this server; tests script another `Answerer`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from cairn.frontend.miss_explainer import describe_prompt
from cairn.frontend.request_options import RequestParams, SamplingOptions
from cairn.frontend.service import Service
from cairn.text.chat.messages import MessageBuilder
from cairn.text.grammar.grammar import Wanted
from cairn.types.errors import GenerationFailed, Overloaded
from cairn.types.outputs import Delta, Done

PATIENCE = 60
"""Tries of an answer whose queue is full."""

Heard = Callable[[Delta], object]


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """An answer and its token counts."""

    text: str
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Asker(NamedTuple):
    """The client that a run generates for."""

    tenant: str
    salt: bytes = b""
    share: str = ""
    """Key of the fair share that the work counts against."""
    service: Service | None = None
    """The model that answers."""


class Answerer(Protocol):
    """Answers prompts."""

    async def answer(
        self,
        asker: Asker,
        messages: Sequence[dict[str, Any]],
        options: SamplingOptions,
        wanted: Wanted,
        heard: Heard,
    ) -> Answered:
        """Return the answer to a chat; `heard` gets its deltas."""
        ...


class ServiceAnswerer:
    """Answers with the asker's model. Only the answer is kept, in the run's journal."""

    async def answer(
        self,
        asker: Asker,
        messages: Sequence[dict[str, Any]],
        options: SamplingOptions,
        wanted: Wanted,
        heard: Heard,
    ) -> Answered:
        """Implement `Answerer.answer`; wait while the queue is full."""
        for tried in range(PATIENCE):
            try:
                return await self._answer(asker, messages, options, wanted, heard)
            except Overloaded as error:
                if tried == PATIENCE - 1:
                    raise
                await asyncio.sleep(min(error.retry_after or 1.0, 5.0))
        raise AssertionError

    async def _answer(
        self,
        asker: Asker,
        messages: Sequence[dict[str, Any]],
        options: SamplingOptions,
        wanted: Wanted,
        heard: Heard,
    ) -> Answered:
        service = asker.service
        assert service is not None
        chat = service.chat
        plain = options.reasoning_budget == 0 and chat.mentions("enable_thinking")
        prompt = await chat.prompt(
            list(messages),
            None,
            tenant=asker.tenant,
            share=asker.share,
            template_args={"enable_thinking": False} if plain else None,
            wanted=wanted,
        )
        (request,) = service.make_requests(
            prompt.tokens,
            options,
            RequestParams(output=prompt.output, grammar=prompt.grammar, salt=asker.salt, share=asker.share),
        )
        said, done = MessageBuilder(), None
        async with contextlib.aclosing(service.generate(request, describe_prompt(messages))) as stream:
            async for event in stream:
                if isinstance(event, Done):
                    done = event
                else:
                    said.add(event)
                    heard(event)
        if done is None:
            raise GenerationFailed("the answer of a node ended without a conclusion")
        return Answered(
            text=said.text,
            finish_reason=done.reason.value,
            prompt_tokens=done.usage.prompt_tokens,
            cached_tokens=done.usage.cached_tokens,
            completion_tokens=done.usage.completion_tokens,
        )
