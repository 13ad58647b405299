"""What a body of the right shape may still not say, above all combinations that mean nothing."""

from __future__ import annotations

from typing import Any

from cairn.api.chat.message_schemas import ChatMessage
from cairn.api.chat.schemas import ChatBody, ChatGeneration, Generation
from cairn.api.http.call import shown
from cairn.api.http.json_body import has_more
from cairn.config.config import Config
from cairn.text.chat.prompt import RESERVED
from cairn.types.errors import InvalidRequest

MAX_TEMPLATE_ARGS = 16
MAX_EFFORT = 32


def check_chat(body: ChatBody, config: Config) -> None:
    """The limits of a chat, and combinations that mean nothing."""
    check_generation(body, config)


def check_stream(body: Generation) -> None:
    """InvalidRequest for options of a stream where there is none."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options goes with stream: true", field="stream_options")


def choice_of(body: ChatBody) -> Any:
    """Whether the model may call the tools: `none`, or anything else. Some clients send an object."""
    choice = body.tool_choice
    if isinstance(choice, dict):
        choice = choice.get("type", choice.get("mode"))
    return "auto" if choice is None else choice


def check_generation(body: ChatGeneration, config: Config) -> None:
    """What holds for a chat and for a turn."""
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
    """What each role may carry, and how much its tool calls."""
    calls = [call.function.arguments for message in messages for call in message.tool_calls or ()]
    if has_more([arguments.encode("utf-8", "surrogatepass") for arguments in calls], config.max_json_values):
        raise InvalidRequest(
            f"the arguments of the messages' tool calls hold more than {config.max_json_values} JSON values, the limit",
            field="messages",
        )
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")


def check_template_args(given: dict[str, Any] | None) -> None:
    """Arguments of a chat template: at most 16 plain values, none of the names that the server sets itself."""
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
