"""From a chat, as any dialect has said it, to the exchange that answers it.

The neutral form of a chat is a `ChatBody`, OpenAI's: every dialect reads its own shape and makes one of it, so what a
field means, and what is refused, is said once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cairn.api.agent_attribution import AgentAttribution, Attribution
from cairn.api.checks import check_chat, check_strict, choice_of
from cairn.api.exchange import Adapter, Choice, Exchange, generating, spelled
from cairn.api.reply import Call, shown
from cairn.api.schemas import ChatBody, contents, plain_messages, plain_tools
from cairn.config import Config
from cairn.errors import UnknownModel
from cairn.service.admission import check_together
from cairn.service.recent import told_of
from cairn.service.requests import requests
from cairn.service.service import Service
from cairn.text import length
from cairn.text.chat import Prompt


async def chat_exchange(
    call: Call,
    service: Service,
    config: Config,
    attribution: AgentAttribution,
    body: ChatBody,
    adapter: Callable[[Sequence[Choice]], Adapter],
    names: Mapping[str, str],
    *,
    allow_empty: bool = False,
) -> Exchange:
    """The exchange of a chat. `names` are what the dialect calls the fields of a chat, and of a request.

    `allow_empty`: an answer of no tokens may be asked for, to have the prompt computed.
    """
    with spelled(names):
        prompt = await chat_prompt(call, service, config, body)
        store = is_stored(body.store, config)
        made = requests(
            service.spec,
            prompt.tokens,
            body.chat_options(),
            ids=ids(call, service),
            context=service.info.context,
            controls=service.controls,
            sampler_order=config.sampler_order,
            max_choices=config.max_choices,
            output=prompt.output,
            salt=call.salt,
            share=call.share,
            timeout=config.request_timeout,
            durable=any(message.role == "assistant" for message in body.messages),
            stored=store,
            allow_empty=allow_empty,
        )
        check_together(made, config, service.info.max_rows)
    choices = [Choice(request) for request in made]
    tied = await attribution.tie(call, body, store=store)
    told = told_of(plain_messages(body.messages), store=store)
    return Exchange(
        choices=choices,
        adapter=adapter(choices),
        source=generating(service, choices, told),
        cancel=lambda: [service.abort(request.id) for request in made],
        keep=chat_keeper(service, call.tenant, tied),
        attribution=tied,
        names=names,
    )


async def chat_prompt(call: Call, service: Service, config: Config, body: ChatBody) -> Prompt:
    """The prompt of a chat, checked."""
    check_chat(body, config)
    check_strict(body.tools, call)
    check_model(body.model, service)
    service.check_generates()
    tools = shown_tools(body)
    await check_length(call, service, contents(body.messages, tools), "messages")
    return await service.chat.prompt(
        plain_messages(body.messages),
        tools,
        tenant=call.tenant,
        share=call.share,
        template_args=body.template_args(service.chat.knows),
    )


def shown_tools(body: ChatBody) -> list[dict[str, Any]] | None:
    """The tools that the model is told of."""
    return plain_tools(body.tools) if choice_of(body) != "none" else None


def chat_keeper(service: Service, tenant: str, tied: Attribution | None) -> Callable[[Choice], None]:
    """Keeps the exact tokens of an answer, for when it comes back as history, and what it cost."""

    def keep(choice: Choice) -> None:
        sampled = service.chat.remember(tenant, choice.request.prompt, choice.tokens, choice.said.message())
        if tied is not None and choice.done is not None:
            tied.done(choice.request, choice.tokens, choice.done, sampled)

    return keep


def ids(call: Call, service: Service) -> Any:
    """Draws request ids; the first is the call's own."""
    return itertools.chain((call.number,), iter(service.next_id, -1)).__next__


def is_stored(store: bool | None, config: Config) -> bool:
    """Whether something of a request may be kept on the disk, as it says itself and the server's owner."""
    return store is not False or config.store_kv == "always"


def check_model(name: str | None, service: Service, *, strict: bool = False) -> None:
    """UnknownModel where `strict`, or the server's owner, wants a name of the model that is served."""
    if name is not None and name not in service.names and (strict or service.strict):
        raise UnknownModel(f"there is no model {shown(name)!r}; this server has: {service.name}", field="model")


async def check_length(
    call: Call, service: Service, texts: Sequence[str], field: str, *, special: bool = False
) -> None:
    """Refuse texts that are far too long for the context before anything is done with them."""

    def encode(text: str) -> list[int]:
        return service.tokenizer.encode(text, special=special)

    await length.check_length(encode, texts, service.info.context, field, service.chat.long, call.share)
