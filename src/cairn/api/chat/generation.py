"""From a chat in any dialect to the exchange that answers it.

The neutral form of a chat is a `ChatBody`, OpenAI's: every dialect converts its own shape to one, so the meaning of a
field, and what is refused, is defined once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from cairn.api.chat.attribution import AgentAttribution, Attribution
from cairn.api.chat.exchange import Adapter, ChoiceStream, Exchange, generating, rename_fields
from cairn.api.chat.free_text_tools import warning
from cairn.api.chat.message_schemas import ChatMessage, contents, plain_messages, plain_tools
from cairn.api.chat.schemas import ChatBody, ChatGeneration, Generation, Templated
from cairn.api.chat.timings import AnswerTimes
from cairn.api.http.body import has_more
from cairn.api.http.call import HTTPCall, shown
from cairn.config.config import Config
from cairn.frontend.adapter_services import AdaptedService
from cairn.frontend.admission import check_together
from cairn.frontend.miss_explainer import PromptOrigin, describe_prompt
from cairn.frontend.request_options import RequestParams, SamplingOptions
from cairn.frontend.service import Service
from cairn.text.chat.prompt import RESERVED, FindSampled, Prompt
from cairn.text.tokens import length
from cairn.types.errors import InvalidRequest, UnknownModel
from cairn.types.request import OutputFormat, Request

MAX_TEMPLATE_ARGS = 16
MAX_EFFORT = 32
_INLINE = 2048
"""Characters of a predicted text that are encoded at once; longer ones wait for a thread."""


def check_stream(body: Generation) -> None:
    """Raise InvalidRequest for options of a stream without a stream."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options goes with stream: true", field="stream_options")


def check_lora(body: Generation, service: Service) -> None:
    """Raise InvalidRequest if a body applies adapters and the model has none; `ModelRouter` has applied known ones."""
    if any(one.scale for one in body.lora or ()) and not isinstance(service, AdaptedService):
        raise InvalidRequest(f"lora: {service.name} has no adapters; load one first", field="lora")


def choice_of(body: ChatBody) -> Any:
    """Return the body's tool choice: `none`, or another mode. Some clients send an object."""
    choice = body.tool_choice
    if isinstance(choice, dict):
        choice = choice.get("type", choice.get("mode"))
    return "auto" if choice is None else choice


def check_generation(body: ChatGeneration, config: Config) -> None:
    """Check the limits of a chat or a turn, and combinations of fields that mean nothing."""
    check_stream(body)
    check_messages(body.messages, config)
    name = "reasoning.effort" if body.reasoning_effort is None else "reasoning_effort"
    if body.effort is not None and len(body.effort) > MAX_EFFORT:
        raise InvalidRequest(f"{name} is longer than {MAX_EFFORT} characters", field=name)
    if body.reasoning is not None and body.reasoning.effort not in (None, body.effort):
        raise InvalidRequest("reasoning_effort and reasoning.effort differ; give one of them", field="reasoning.effort")
    both = body.max_tokens is not None and body.max_completion_tokens is not None
    if both and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens mean the same; give one of them", field="max_completion_tokens"
        )
    check_template_args(body.chat_template_kwargs)


def check_messages(messages: list[ChatMessage], config: Config) -> None:
    """Check what each role may carry, and the size of all tool calls."""
    calls = [call.function.arguments for message in messages for call in message.tool_calls or ()]
    if has_more([arguments.encode("utf-8", "surrogatepass") for arguments in calls], config.max_json_values):
        raise InvalidRequest(
            f"the arguments of the messages' tool calls hold more than {config.max_json_values} JSON values, the limit",
            field="messages",
        )
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")


def check_template_args(given: dict[str, Any] | None) -> None:
    """Check arguments of a chat template: at most 16 plain values, none that the server sets itself."""
    for name, value in (given or {}).items():
        field = f"chat_template_kwargs.{shown(name)}"
        if not name.isidentifier() or name.startswith("_") or name in RESERVED:
            raise InvalidRequest(f"{field} cannot be set by a request", field=field)
        if not isinstance(value, str | int | float | bool | None):
            raise InvalidRequest(f"{field} must be a text, a number, true, false or null", field=field)
        if isinstance(value, str) and len(value) > 1024:
            raise InvalidRequest(f"{field} is longer than 1024 characters, the limit", field=field)
    if given and len(given) > MAX_TEMPLATE_ARGS:
        raise InvalidRequest(
            f"chat_template_kwargs holds {len(given)} values; the limit is {MAX_TEMPLATE_ARGS}",
            field="chat_template_kwargs",
        )


def _check_message(message: ChatMessage, where: str) -> None:
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{where}.tool_calls belongs to an assistant message", field=f"{where}.tool_calls")
    for name in ("reasoning_content", "reasoning"):
        if getattr(message, name) is not None and message.role != "assistant":
            raise InvalidRequest(f"{where}.{name} belongs to an assistant message", field=f"{where}.{name}")
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(
            f"{where}.tool_call_id is missing: it says which call of a tool the message answers",
            field=f"{where}.tool_call_id",
        )
    if message.role != "tool" and message.tool_call_id is not None:
        raise InvalidRequest(f"{where}.tool_call_id belongs to a tool message", field=f"{where}.tool_call_id")


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
    """Build the exchange of a chat.

    `names` map the fields of a chat and of a request to the dialect's. `before` are tokens in front of the prompt.
    `allow_empty` permits an answer of no tokens, to have only the prompt computed.
    """
    with rename_fields(names):
        prompt = await chat_prompt(call, service, config, body, attribution.find_sampled(call, body))
        store = is_stored(body.store, config)
        options = await with_prediction(call, service, body, body.chat_options())
        made = service.make_requests(
            [*before, *prompt.tokens],
            options,
            RequestParams(
                output=prompt.output,
                grammar=prompt.grammar,
                salt=call.salt,
                share=call.share,
                durable=any(message.role == "assistant" for message in body.messages),
                stored=store,
                allow_empty=allow_empty,
            ),
            ids=ids(call, service),
            max_choices=config.max_choices,
        )
        check_together(made, config, service.info.max_rows)
    if call.on_prompt is not None:
        call.on_prompt(service, made[0])
    tied = await attribution.tie(call, body, store=store)
    origin = describe_prompt(plain_messages(body.messages), store=store)
    keep = _keeper(tied, service, call.tenant, prompt.conversation_digest)
    exchange = _exchange(service, made, tied, adapter, origin, keep)
    exchange.names, exchange.warnings = names, prompt.warnings
    return exchange


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
    """Build the exchange of raw prompts.

    `names` are as for a chat; `allow_empty` permits prompts that are only scored.
    """
    check_stream(body)
    check_lora(body, service)
    draw, store, output = ids(call, service), is_stored(body.store, config), OutputFormat(continues=True)
    asked: list[Request] = []
    with rename_fields(names):
        held = await service.chat.grammar(body.wanted().structure, output, share=call.share)
        params = RequestParams(
            output=output,
            grammar=held.grammar,
            salt=call.salt,
            share=call.share,
            allow_empty=allow_empty,
            stored=store,
        )
        for prompt in prompts:
            asked += service.make_requests(prompt, options, params, ids=draw, max_choices=config.max_choices)
        check_together(asked, config, service.info.max_rows)
    if call.on_prompt is not None and len(prompts) == 1:
        call.on_prompt(service, asked[0])
    tied = await attribution.tie(call, body, store=store)
    exchange = _exchange(service, asked, tied, adapter, PromptOrigin(store=store), _keeper(tied))
    exchange.names, exchange.warnings = names, held.warnings
    return exchange


def _exchange(
    service: Service,
    requests: Sequence[Request],
    tied: Attribution | None,
    adapter: Callable[[Sequence[ChoiceStream]], Adapter],
    origin: PromptOrigin,
    keep: Callable[[ChoiceStream], None],
) -> Exchange:
    """Return the exchange of checked requests. They are `durable` if they belong to an agent or a session."""
    if tied is not None and tied.named:
        requests = [msgspec.structs.replace(request, durable=True) for request in requests]
    choices = [ChoiceStream(request) for request in requests]
    return Exchange(
        choices=choices,
        adapter=adapter(choices),
        source=generating(service, choices, origin),
        cancel=lambda: [service.abort(request.id) for request in requests],
        keep=keep,
        attribution=tied,
    )


def _keeper(
    tied: Attribution | None, service: Service | None = None, tenant: str = "", conversation_digest: bytes = b""
) -> Callable[[ChoiceStream], None]:
    """Return a function that records an answer's cost.

    With a `service`, it also keeps a chat's exact tokens, for when the answer comes back as history.
    `conversation_digest` is that of its prompt.
    """

    def keep(choice: ChoiceStream) -> None:
        sampled = None
        if service is not None:
            sampled = service.chat.remember(
                tenant, choice.request.prompt, choice.tokens, choice.said.message(), conversation_digest
            )
        if tied is not None and choice.done is not None:
            tied.done(choice.request, choice.tokens, choice.done, sampled)

    return keep


async def chat_prompt(
    call: HTTPCall, service: Service, config: Config, body: ChatBody, find_sampled: FindSampled | None = None
) -> Prompt:
    """Check a chat and return its prompt. `recall` is asked for answers that another server sampled."""
    check_generation(body, config)
    check_lora(body, service)
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
        template_args=body.template_args(service.chat.mentions),
        wanted=body.wanted(),
        find_sampled=find_sampled,
    )


def shown_tools(body: ChatBody) -> list[dict[str, Any]] | None:
    """Return the tools that the prompt lists; None if the model may not call any."""
    return plain_tools(body.tools) if choice_of(body) != "none" else None


def warn_of_tools(call: HTTPCall, service: Service, tools: Sequence[Any] | None) -> None:
    """Warn if the model's template cannot render tools."""
    if tools and service.chat.instructs_tools:
        call.warn(
            "the model's chat template shows no tools: they are described in its first message, and how well it calls "
            "them depends on the model"
        )


def warn_of_thinking(call: HTTPCall, service: Service, body: Templated) -> None:
    """Warn if the request turns reasoning off and the model's template cannot."""
    switches = ("enable_thinking", "reasoning_effort")
    if body.thinks() is False and service.chat.thinks and not any(map(service.chat.mentions, switches)):
        call.warn("the model reasons all the same: its chat template has no switch for it")


def ids(call: HTTPCall, service: Service) -> Any:
    """Return a source of request ids; the first is the call's own."""
    return itertools.chain((call.number,), iter(service.next_id, -1)).__next__


def is_stored(store: bool | None, config: Config) -> bool:
    """Return whether a request may be kept on the disk, by its own `store` and the server's options."""
    return store is not False or config.store_kv == "always"


def check_model(name: str | None, service: Service, *, strict: bool = False) -> None:
    """Raise UnknownModel for a name of another model, if `strict` or the options ask for exact names."""
    if name is not None and name not in service.names and (strict or service.strict):
        raise UnknownModel(f"there is no model {shown(name)!r}; this server has: {service.name}", field="model")


def check_sampling(service: Service, sampling: Mapping[str, Any], where: str) -> None:
    """Raise InvalidRequest for sampling options that the model does not take; its field is `where` and the option."""
    try:
        service.make_requests([0], SamplingOptions(**sampling), RequestParams(output=OutputFormat(reasoning=True)))
    except InvalidRequest as error:
        raise error.named(f"{where}: {error}", f"{where}.{error.field}") from None


async def check_length(
    call: HTTPCall, service: Service, texts: Sequence[str], field: str, *, special: bool = False
) -> None:
    """Refuse texts that are far too long for the context before anything is done with them."""

    def encode(text: str) -> list[int]:
        return service.tokenizer.encode(text, special=special)

    await length.check_length(encode, texts, service.info.context, field, service.chat.long, call.share)


async def with_prediction(
    call: HTTPCall, service: Service, body: ChatGeneration, options: SamplingOptions
) -> SamplingOptions:
    """Return the options with the tokens of the text that the request predicts. Raise as `check_length`."""
    if body.prediction is None:
        return options
    text, encode = body.prediction.text, service.tokenizer.encode
    await check_length(call, service, [text], "prediction")
    short = len(text) <= _INLINE
    tokens = encode(text) if short else await service.chat.long.run(call.share, encode, text)
    return msgspec.structs.replace(options, prediction=tokens)


def answer_times(body: Generation, choices: Sequence[ChoiceStream]) -> AnswerTimes:
    """Return what a request with `timings_per_token` or `return_progress` gets beside its answer."""
    return AnswerTimes(choices, timings=body.timings_per_token, progress=body.return_progress)


def chat_names(max_tokens: int | None) -> dict[str, str]:
    """Return a chat's names of fields, by our own, for error messages; `max_tokens`: as the client sent it."""
    return {"prompt": "messages"} | ({"max_tokens": "max_completion_tokens"} if max_tokens is None else {})
