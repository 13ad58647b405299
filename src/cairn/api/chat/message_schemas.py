"""Chat messages and tools in request bodies: their shapes, and as plain values.

Shapes follow the OpenAI API reference (platform.openai.com/docs/api-reference, as openai-python's `types` state them).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from cairn.api.chat.free_text_tools import function_of, packed
from cairn.api.http.body import Body, Several, text_or_list
from cairn.types.errors import InvalidRequest

_NAME = re.compile("[a-zA-Z0-9_.-]{1,128}")


def _as_text(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


class TextPart(Body):
    """`{"type": "text", "text": ...}`; the types of a text in OpenAI's other API mean the same."""

    place = "part"

    type: Literal["text"]
    text: str

    @classmethod
    def usual(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Return the part as a text, if it is one by another name."""
        if value.get("type") in ("input_text", "output_text"):
            return value | {"type": "text"}
        if value.get("type") == "refusal" and "text" not in value:
            rest = {name: item for name, item in value.items() if name != "refusal"}
            return rest | {"type": "text", "text": value.get("refusal")}
        return value


Content = Annotated[
    Annotated[str, Tag("~text")] | Annotated[Several[TextPart], Tag("~list")],
    Discriminator(
        text_or_list,
        custom_error_type="content",
        custom_error_message="must be a text or a list of text parts",
    ),
]


class CalledFunction(Body):
    """The function that the model called.

    `arguments` is any text it produced, JSON or not; some clients send an object.
    """

    place = "called"

    name: str
    arguments: Annotated[str, BeforeValidator(_as_text)]


class ToolCallBody(Body):
    """A call that an assistant message made."""

    place = "call"
    within: ClassVar = {"function": CalledFunction}

    id: str = ""
    type: Literal["function", "custom"] = "function"
    function: CalledFunction
    index: int | None = None

    @classmethod
    def usual(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Return a custom tool's call as that of a function; any other unchanged."""
        inner = value.get("custom")
        if value.get("type") != "custom" or not isinstance(inner, dict):
            return value
        text = inner.get("input")
        if not isinstance(text, str):
            raise InvalidRequest("custom.input must be a text", field="custom.input")
        rest = {name: item for name, item in value.items() if name != "custom"}
        return rest | {"function": {"name": inner.get("name"), "arguments": packed(text)}}


class ChatMessage(Body):
    """One message of any role; `generation` checks what a role may carry."""

    place = "message"
    within: ClassVar[dict[str, type[Body]]] = {"content": TextPart, "tool_calls": ToolCallBody}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Several[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name for `reasoning_content`, which some servers use."""

    @classmethod
    def usual(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Return the message with `tool_call_id`, for which some clients say `id`."""
        if value.get("role") == "tool" and value.get("tool_call_id") is None:
            return value | {"tool_call_id": value.get("id")}
        return value


class FunctionTool(Body):
    """A function that the model may call."""

    place = "function"

    name: Annotated[str, Field(pattern=rf"^{_NAME.pattern}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """`{"type": "function", "function": {...}}`, or `{"type": "custom", "custom": {...}}`, whose input is one text."""

    place = "tool"
    within: ClassVar[dict[str, type[Body]]] = {"function": FunctionTool}

    type: Literal["function", "custom"]
    function: FunctionTool
    """The function that the model sees, of a custom tool too."""
    custom: dict[str, Any] | None = None

    @classmethod
    def usual(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Return the tool with the function that a custom one becomes. InvalidRequest names the field."""
        if value.get("type") != "custom":
            return value
        inner = value.get("custom")
        if not isinstance(inner, dict):
            raise InvalidRequest("custom must be an object", field="custom")
        if value.get("function") is not None:
            raise InvalidRequest("function belongs to a tool of type function", field="function")
        name, description = inner.get("name"), inner.get("description")
        for field, given in (("name", name), ("description", description)):
            if not isinstance(given, str | None) or (field == "name" and given is None):
                raise InvalidRequest(f"custom.{field} must be a text", field=f"custom.{field}")
        if not _NAME.fullmatch(str(name)):
            raise InvalidRequest("custom.name must be 1 to 128 letters, digits, '_', '-' and '.'", field="custom.name")
        made = function_of(str(name), description, inner.get("format"), "custom.format")
        return value | {"function": made.function}

    def why_not_held(self) -> str:
        """Return why the input of a custom tool is not held to its grammar; empty for all others."""
        if self.custom is None:
            return ""
        return function_of(self.function.name, None, self.custom.get("format"), "custom.format").why_not


Messages = Annotated[Several[ChatMessage], Field(min_length=1)]


def plain_messages(messages: Iterable[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages as plain values without absent fields."""
    found = []
    for message in messages:
        content: Any = message.content
        if isinstance(content, list):
            content = [{"type": "text", "text": part.text} for part in content]
        plain: dict[str, Any] = {"role": message.role, "content": content}
        if message.name is not None:
            plain["name"] = message.name
        reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
        if reasoning is not None:
            plain["reasoning_content"] = reasoning
        if message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in message.tool_calls
            ]
        found.append(plain)
    return found


def contents(messages: Iterable[ChatMessage], tools: Sequence[dict[str, Any]] | None = None) -> list[str]:
    """Return every text that a template puts into the prompt: all of the messages but reasoning, tools as JSON."""
    found = [json.dumps(tool, ensure_ascii=False) for tool in tools or ()]
    for message in messages:
        if isinstance(message.content, str):
            found.append(message.content)
        else:
            found += [part.text for part in message.content or ()]
        for call in message.tool_calls or ():
            found += [call.function.name, call.function.arguments]
    return found


def plain_tools(tools: Iterable[Tool] | None) -> list[dict[str, Any]] | None:
    """Return the tools in the form that chat templates read, or None."""
    plain = [
        {"type": "function", "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}
        for tool in tools or ()
    ]
    return plain or None
