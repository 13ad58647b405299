"""What a body of the right shape may still not say, above all combinations that mean nothing."""

from __future__ import annotations

from typing import Any

from cairn.api.limits import has_more
from cairn.api.reply import shown
from cairn.api.schemas import ChatBody, ChatGeneration, ChatMessage, Generation, Tool
from cairn.config import Config
from cairn.errors import InvalidRequest, Unsupported
from cairn.text.chat import RESERVED
from cairn.text.messages import check_strict

MAX_TEMPLATE_ARGS = 16


def check_chat(body: ChatBody, config: Config) -> None:
    """The limits of a chat, and combinations that mean nothing."""
    check_generation(body, body.tools, config)
    if body.tool_choice is not None and body.tool_choice not in ("none", "auto"):
        if body.tool_choice == "required" or isinstance(body.tool_choice, dict):
            raise Unsupported("tool_choice can only be 'none' or 'auto' so far", field="tool_choice")
        raise InvalidRequest("tool_choice must be 'none' or 'auto'", field="tool_choice")
    if body.tool_choice == "auto" and not body.tools:
        raise InvalidRequest("tool_choice 'auto' needs tools", field="tool_choice")


def check_generation(body: ChatGeneration, tools: list[Tool] | None, config: Config) -> None:
    """What holds for a chat and for a turn."""
    check_stream(body)
    check_messages(body.messages, tools, config)
    both = body.max_tokens is not None and body.max_completion_tokens is not None
    if both and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens mean the same; give one of them", field="max_completion_tokens"
        )
    check_template_args(body.chat_template_kwargs)


def check_messages(messages: list[ChatMessage], tools: list[Tool] | None, config: Config) -> None:
    """What each role may carry, and how much its tool calls."""
    check_strict(tool.function.strict for tool in tools or ())
    calls = [call.function.arguments for message in messages for call in message.tool_calls or ()]
    if has_more([arguments.encode("utf-8", "surrogatepass") for arguments in calls], config.max_json_values):
        raise InvalidRequest(
            f"the arguments of the messages' tool calls hold more than {config.max_json_values} JSON values, the limit",
            field="messages",
        )
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")


def check_stream(body: Generation) -> None:
    """`stream_options` belongs to a stream."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", field="stream_options")


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
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise InvalidRequest(f"{where}.content is missing", field=f"{where}.content")
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{where}.tool_calls belongs to an assistant message", field=f"{where}.tool_calls")
    for name in ("reasoning_content", "reasoning"):
        if getattr(message, name) is not None and message.role != "assistant":
            raise InvalidRequest(f"{where}.{name} belongs to an assistant message", field=f"{where}.{name}")
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(
            f"{where}.tool_call_id is missing: it says which tool call the message answers",
            field=f"{where}.tool_call_id",
        )
    if message.role != "tool" and message.tool_call_id is not None:
        raise InvalidRequest(f"{where}.tool_call_id belongs to a tool message", field=f"{where}.tool_call_id")
