"""From a chat, as any dialect has said it, to the exchange that answers it.

The neutral form of a chat is a `ChatBody`, OpenAI's: every dialect reads its own shape and makes one of it, so what a
field means, and what is refused, is said once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from cairn.api.chat.checks import check_chat, check_stream, choice_of
from cairn.api.chat.exchange import Adapter, ChoiceStream, Exchange, generating, spelled
from cairn.api.chat.free_text_tools import warning
from cairn.api.chat.message_schemas import contents, plain_messages, plain_tools
from cairn.api.chat.schemas import ChatBody, Generation, Templated
from cairn.api.chat.sessions import AgentAttribution, Attribution
from cairn.api.http.call import HTTPCall, shown
from cairn.config.config import Config
from cairn.frontend.admission import check_together
from cairn.frontend.miss_explainer import PromptOrigin, describe_prompt
from cairn.frontend.requests import SamplingOptions
from cairn.frontend.service import Service
from cairn.text.chat.prompt import Prompt
from cairn.text.tokens import length
from cairn.types.errors import InvalidRequest, UnknownModel
from cairn.types.request import OutputFormat, Request


async def chat_exchange(
    call: HTTPCall,
    service: Service,
    config: Config,
    attribution: AgentAttribution,
    body: ChatBody,
    adapter: Callable[[Sequence[ChoiceStream]], Adapter],
    names: Mapping[str, str],
    *,
    before: Sequence[int] = (),
    allow_empty: bool = False,
) -> Exchange:
    """The exchange of a chat. `names` are what the dialect calls the fields of a chat, and of a request.

    `before` are tokens that stand before it. `allow_empty`: an answer of no tokens may be asked for, to have the prompt
    computed.
    """
    with spelled(names):
        prompt = await chat_prompt(call, service, config, body)
        store = is_stored(body.store, config)
        made = service.make_requests(
            [*before, *prompt.tokens],
            body.chat_options(),
            ids=ids(call, service),
            max_choices=config.max_choices,
            output=prompt.output,
            grammar=prompt.grammar,
            salt=call.salt,
            share=call.share,
            durable=any(message.role == "assistant" for message in body.messages),
            stored=store,
            allow_empty=allow_empty,
        )
        check_together(made, config, service.info.max_rows)
    tied = await attribution.tie(call, body, store=store)
    asked = _durable(made, tied)
    choices = [ChoiceStream(request) for request in asked]
    told = describe_prompt(plain_messages(body.messages), store=store)
    return Exchange(
        choices=choices,
        adapter=adapter(choices),
        source=generating(service, choices, told),
        cancel=lambda: [service.abort(request.id) for request in asked],
        keep=chat_keeper(service, call.tenant, tied),
        attribution=tied,
        names=names,
        warnings=prompt.warnings,
    )


async def text_exchange(
    call: HTTPCall,
    service: Service,
    config: Config,
    attribution: AgentAttribution,
    body: Generation,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    adapter: Callable[[Sequence[ChoiceStream]], Adapter],
    names: Mapping[str, str],
    *,
    allow_empty: bool = False,
) -> Exchange:
    """The exchange of raw prompts. `names` as of a chat; `allow_empty`: prompts that are only scored."""
    check_stream(body)
    draw, store, output = ids(call, service), is_stored(body.store, config), OutputFormat(continues=True)
    asked: list[Request] = []
    with spelled(names):
        held = await service.chat.grammar(body.wanted().structure, output, share=call.share)
        for prompt in prompts:
            asked += service.make_requests(
                prompt,
                options,
                ids=draw,
                max_choices=config.max_choices,
                salt=call.salt,
                share=call.share,
                output=output,
                grammar=held.grammar,
                allow_empty=allow_empty,
                stored=store,
            )
        check_together(asked, config, service.info.max_rows)
    tied = await attribution.tie(call, body, store=store)
    asked = _durable(asked, tied)
    choices = [ChoiceStream(request) for request in asked]
    return Exchange(
        choices=choices,
        adapter=adapter(choices),
        source=generating(service, choices, PromptOrigin(store=store)),
        cancel=lambda: [service.abort(request.id) for request in asked],
        keep=cost_keeper(tied),
        attribution=tied,
        names=names,
        warnings=held.warnings,
    )


def _durable(requests: Sequence[Request], tied: Attribution | None) -> list[Request]:
    """The same, to be stored before others where they name an agent or a session."""
    if tied is None or not tied.named:
        return list(requests)
    return [msgspec.structs.replace(request, durable=True) for request in requests]


async def chat_prompt(call: HTTPCall, service: Service, config: Config, body: ChatBody) -> Prompt:
    """The prompt of a chat, checked."""
    check_chat(body, config)
    check_model(body.model, service)
    service.check_generates()
    tools = shown_tools(body)
    warn_of_tools(call, service, tools)
    for index, tool in enumerate(body.tools or ()):
        if why_not := tool.why_not_held():
            call.warn(warning(f"tools[{index}]", why_not))
    warn_of_thinking(call, service, body)
    await check_length(call, service, contents(body.messages, tools), "messages")
    return await service.chat.prompt(
        plain_messages(body.messages),
        tools,
        tenant=call.tenant,
        share=call.share,
        template_args=body.template_args(service.chat.knows),
        wanted=body.wanted(),
    )


def shown_tools(body: ChatBody) -> list[dict[str, Any]] | None:
    """The tools that the model is told of."""
    return plain_tools(body.tools) if choice_of(body) != "none" else None


def warn_of_tools(call: HTTPCall, service: Service, tools: Sequence[Any] | None) -> None:
    """Tell where the model learns of tools otherwise than by its template."""
    if tools and service.chat.tells_tools:
        call.warn(
            "the model's chat template shows no tools: it is told of them in its first message, and how well it calls "
            "them depends on the model"
        )


def warn_of_thinking(call: HTTPCall, service: Service, body: Templated) -> None:
    """Tell where reasoning is not wanted and the model's template cannot turn it off."""
    switches = ("enable_thinking", "reasoning_effort")
    if body.thinks() is False and service.chat.thinks and not any(map(service.chat.knows, switches)):
        call.warn("the model reasons all the same: its chat template has no switch for it")


def chat_keeper(service: Service, tenant: str, tied: Attribution | None) -> Callable[[ChoiceStream], None]:
    """Keeps the exact tokens of an answer, for when it comes back as history, and what it cost."""

    def keep(choice: ChoiceStream) -> None:
        sampled = service.chat.remember(tenant, choice.request.prompt, choice.tokens, choice.said.message())
        if tied is not None and choice.done is not None:
            tied.done(choice.request, choice.tokens, choice.done, sampled)

    return keep


def cost_keeper(tied: Attribution | None) -> Callable[[ChoiceStream], None]:
    """Of a text only what it cost is kept."""

    def keep(choice: ChoiceStream) -> None:
        if tied is not None and choice.done is not None:
            tied.done(choice.request, choice.tokens, choice.done, None)

    return keep


def ids(call: HTTPCall, service: Service) -> Any:
    """Draws request ids; the first is the call's own."""
    return itertools.chain((call.number,), iter(service.next_id, -1)).__next__


def is_stored(store: bool | None, config: Config) -> bool:
    """Whether something of a request may be kept on the disk, as it says itself and the server's owner."""
    return store is not False or config.store_kv == "always"


def check_model(name: str | None, service: Service, *, strict: bool = False) -> None:
    """UnknownModel where `strict`, or the server's owner, wants a name of the model that is served."""
    if name is not None and name not in service.names and (strict or service.strict):
        raise UnknownModel(f"there is no model {shown(name)!r}; this server has: {service.name}", field="model")


def check_sampling(service: Service, sampling: Mapping[str, Any], where: str) -> None:
    """Raise InvalidRequest for options that no answer of a model can be asked for with; it names the field."""
    try:
        service.make_requests([0], SamplingOptions(**sampling), output=OutputFormat(reasoning=True))
    except InvalidRequest as error:
        raise error.named(f"{where}: {error}", f"{where}.{error.field}") from None


async def check_length(
    call: HTTPCall, service: Service, texts: Sequence[str], field: str, *, special: bool = False
) -> None:
    """Refuse texts that are far too long for the context before anything is done with them."""

    def encode(text: str) -> list[int]:
        return service.tokenizer.encode(text, special=special)

    await length.check_length(encode, texts, service.info.context, field, service.chat.long, call.share)
